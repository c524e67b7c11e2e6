"""Files beside the weights: absent, unreadable, or in disagreement with config.json; tokens of MODEL.md §7.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from m31.checkpoint.folder import listed
from m31.checkpoint.reader import Checkpoint
from m31.config.jsonfile import read_bytes, read_object
from m31.errors import ConfigError

_TOKENIZER_LIMIT = 128 * 2**20  # bytes; a vocabulary of 200,064 needs about 15 MB
_ROLE, _END = "]~b]", "[e~["
_TEXT_TOKENS = (_ROLE, _END, "]~!b[", "]<]minimax[>[", "<mm:think>", "</mm:think>")
_IMAGE, _VIDEO = "]<]image[>[", "]<]video[>["
_MEDIA_TOKENS = (_IMAGE, _VIDEO, "]<]start of image[>[", "]<]end of image[>[")


def companions(checkpoint: Checkpoint) -> Iterator[str]:
    """Findings about the tokenizer, the chat template and generation_config.json."""
    folder = checkpoint.folder
    loaded: dict[str, dict[str, Any]] = {}
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        if not path.exists():
            yield f"{name} is missing"
            continue
        try:
            loaded[name] = read_object(path, limit=_TOKENIZER_LIMIT)
        except ConfigError as exc:
            yield f"{name} is unusable: {exc}"
    yield from _template(checkpoint, loaded)
    yield from _special_ids(checkpoint, loaded)
    if "tokenizer.json" in loaded:
        yield from _special_tokens(checkpoint, _token_ids(loaded))


def _template(checkpoint: Checkpoint, loaded: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """A template writes the role headers and message ends of MODEL.md §7.2, whatever else it says."""
    path = checkpoint.folder / "chat_template.jinja"
    text: object = loaded.get("tokenizer_config.json", {}).get("chat_template")
    if path.exists():
        try:
            text = read_bytes(path, limit=_TOKENIZER_LIMIT).decode("utf-8", "replace")
        except ConfigError as exc:
            yield f"chat_template.jinja is unusable: {exc}"
            return
    if text is None:
        yield "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        return
    absent = [token for token in (_ROLE, _END) if token not in str(text)]
    if absent:
        yield f"the chat template does not mention {' and '.join(map(repr, absent))}, which delimit its messages"


def _special_tokens(checkpoint: Checkpoint, ids: Mapping[str, int]) -> Iterator[str]:
    config = checkpoint.config
    wanted = _TEXT_TOKENS + (_MEDIA_TOKENS if config.vision is not None else ())
    absent = [token for token in wanted if token not in ids]
    if absent:
        yield f"the tokenizer lacks {len(absent)} of this model's special tokens: {listed(absent, len(absent))}"
    for key, content, token in (
        ("image_token_index", _IMAGE, config.image_token_id),
        ("video_token_index", _VIDEO, config.video_token_id),
    ):
        if token is not None and ids.get(content, token) != token:
            yield f"{key} is {token} in config.json, but the tokenizer's {content!r} is {ids[content]}"
    outside = sorted(token for token in wanted if ids.get(token, 0) >= config.text.vocab_size)
    if outside:
        yield f"special tokens outside the vocabulary of {config.text.vocab_size}: {listed(outside, len(outside))}"


def _special_ids(checkpoint: Checkpoint, loaded: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    text = checkpoint.config.text
    bos = set() if text.bos_token_id is None else {text.bos_token_id}
    ours: dict[str, set[int]] = {"bos": bos, "eos": set(text.eos_token_ids)}
    generation = loaded.get("generation_config.json", {})
    tokenizer_ids = _token_ids(loaded)
    for kind, expected in ours.items():
        value = generation.get(f"{kind}_token_id")
        theirs = _ids(value)
        if theirs is None:
            theirs = set()
            yield f"generation_config.json gives {kind}_token_id {value!r}, which is no token id"
        elif theirs and expected != theirs:
            yield f"{kind}_token_id is {_show(expected)} in config.json and {_show(theirs)} in generation_config.json"
        for token in sorted(theirs):
            if token >= text.vocab_size:
                size = text.vocab_size
                yield f"generation_config.json gives {kind}_token_id {token}, outside the vocabulary of {size}"
        content = loaded.get("tokenizer_config.json", {}).get(f"{kind}_token")
        content = content.get("content") if isinstance(content, dict) else content
        if isinstance(content, str):
            token_id = tokenizer_ids.get(content)
            if token_id is None:
                yield f"tokenizer_config.json names the {kind} token {content!r}, which no tokenizer file defines"
            elif expected and token_id not in expected:
                here = _show(expected)
                yield f"{kind}_token_id is {here} in config.json, but the tokenizer's {content!r} is {token_id}"


def _ids(value: object) -> set[int] | None:
    """Token ids from an int, a list or null; None when it is something else."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    ids = {item for item in values if type(item) is int and item >= 0}
    return ids if all(type(item) is int and item >= 0 for item in values) else None


def _show(ids: set[int]) -> str:
    return " and ".join(map(str, sorted(ids))) if ids else "absent"


def _token_ids(loaded: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Special-token text -> id, from whichever tokenizer files exist."""
    found: dict[str, int] = {}
    decoder = loaded.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdecimal():
            found[entry["content"]] = int(key)
    tokenizer = loaded.get("tokenizer.json", {})
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    for content, token in vocab.items() if isinstance(vocab, dict) else ():
        if type(token) is int:
            found.setdefault(content, token)
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int:
            found[entry["content"]] = entry["id"]
    return found
