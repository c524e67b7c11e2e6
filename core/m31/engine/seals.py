"""What a sealed page is known by (DESIGN.md §5).

A full page whose every token is committed gets a seal: a digest chained over the page before it. The values in a page
follow from everything that the digest covers, so equal digests may share a page:

- the layout id of the cache: how the bytes are stored, and by whom;
- the adapter that the keys and values were computed with;
- the tenant salt, which keeps tenants from finding (and timing) each other's pages;
- the tokens of the page, eight bytes each (BUG-63);
- the media whose placeholder reaches into the page: all images have the same placeholder tokens;
- the digest of the page before, and so all of this about every earlier page.

Fields carry a tag and their length: no two different lists of fields have the same bytes, and an adapter that is named
like another tenant's salt, or like a picture's digest, is neither (BUG-65). The bytes that were hashed stay beside the
digest and are compared when it is found again, so that a collision costs a hit and never gives a wrong page (BUG-62).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m31.errors import PageError

Digest = Callable[[bytes], bytes]


def sha256(content: bytes) -> bytes:
    """The digest that the pool uses unless a test gives another."""
    return hashlib.sha256(content).digest()


@dataclass(frozen=True, kw_only=True)
class Media:
    """One image or video of a prompt.

    Args:
        start, end: positions of its placeholder tokens, end not included.
        digest: of the pixels as the vision tower gets them.
    """

    start: int
    end: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise PageError(
                f"a placeholder from {self.start} to {self.end}", where="media", expected="0 <= start < end"
            )
        if not self.digest:
            raise PageError("an empty digest", where="media", expected="a digest of the pixels")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the pages of a sequence depend on besides its tokens.

    Args:
        adapter: name and version of the adapter's weights, or None. Retrained weights need another name.
        salt: of the tenant; sequences share pages only under one salt. None is a salt of its own: whoever has none.
        media: in order of position, not overlapping.
    """

    adapter: str | None
    salt: str | None
    media: tuple[Media, ...]

    def __post_init__(self) -> None:
        for first, second in zip(self.media, self.media[1:], strict=False):
            if second.start < first.end:
                raise PageError(
                    f"a placeholder starts at {second.start}", where="media", expected=f"{first.end} or later"
                )


PLAIN = Context(adapter=None, salt=None, media=())


@dataclass(frozen=True, eq=False)
class Seal:
    """Identity of a sealed page. Two seals are the same only if they are one object.

    Args:
        digest: over `content` and the parent's digest.
        parent: seal of the page before, None for a first page.
        content: every covered field of this page, encoded.
    """

    digest: bytes
    parent: Seal | None
    content: bytes

    def same(self, other: Seal) -> bool:
        """Whether both stand for the same values: the contents are compared, the digests are not trusted."""
        return self.content == other.content and self.parent is other.parent


def make_seal(
    layout_id: str, context: Context, start: int, tokens: Sequence[int], parent: Seal | None, digest: Digest
) -> Seal:
    """The seal of a full page.

    Args:
        layout_id: of the cache.
        start: position of the page's first token.
        tokens: all of the page.
        parent: seal of the page that ends at `start`.
    """
    end = start + len(tokens)
    fields = [_field(b"L", layout_id.encode())]
    if context.adapter is not None:
        fields.append(_field(b"A", context.adapter.encode()))
    if context.salt is not None:
        fields.append(_field(b"S", context.salt.encode()))
    for media in context.media:
        if media.start < end and start < media.end:
            fields.append(_field(b"M", struct.pack("<2q", media.start, media.end) + media.digest))
    fields.append(_field(b"T", struct.pack(f"<{len(tokens)}q", *tokens)))
    content = b"".join(fields)
    before = b"" if parent is None else _field(b"P", parent.digest)
    return Seal(digest(before + content), parent, content)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<q", len(value)) + value
