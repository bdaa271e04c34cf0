"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Releases text up to the first stop string.

    The result does not depend on how the text was cut into pieces: the text ends at the first
    character that completes a stop string, and is cut before the longest of those completed
    there. Text that may be the beginning of a stop string is held back.

    Attributes:
        matched: the stop string that was found, else None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return the text that is now certain to be output.

        After a match everything further is dropped.
        """
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        if not text:
            return ""
        buffer = self._held + text
        # find() gives the first occurrence, which is also the one that ends first.
        found = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return buffer[:start]
        held = self._beginning_of_a_stop(buffer)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def pass_on(self, text: str) -> str:
        """Take the next piece, in which stop strings are not looked for."""
        if self.matched is not None:
            return ""
        self._held, text = "", self._held + text
        return text

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
