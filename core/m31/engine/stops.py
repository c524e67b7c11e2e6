"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from m31.errors import RequestError


class StopStrings:
    """Holds back what could become a stop string, and nothing else.

    The match that is complete first wins; of several complete at the same character, the longest. Both rules look at
    characters only, so the result does not depend on how the text was cut into pieces. Text from the start of the
    match on is never given out.

    Args:
        stops: the stop strings; none at all makes `push` hand everything through.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if isinstance(stops, str) or "" in self._stops:
            raise RequestError(f"stop strings are {stops!r}", where="stop", expected="non-empty strings")
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add a piece of text.

        Returns:
            (what may be shown now, the stop string that was met or None). Once a stop string was met, every later
            call returns ("", that string).
        """
        if self._found is not None:
            return "", self._found
        buffer = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if matches:
            _, start, self._found = min(matches)
            self._held = ""
            return buffer[:start], self._found
        keep = self._suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What is still held, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _suffix(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which a stop string begins."""
        longest = min(max((len(stop) - 1 for stop in self._stops), default=0), len(buffer))
        for length in range(longest, 0, -1):
            end = buffer[len(buffer) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
