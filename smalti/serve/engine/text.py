"""Text that may be shown: nothing of a stop text, not even its beginning."""


class StopText:
    """Passes text on up to the first stop text; holds back what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What may be shown after ``text`` came; nothing once a stop text was found."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop`` (shorter than all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
