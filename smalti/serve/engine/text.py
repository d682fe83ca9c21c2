"""Stop texts in a stream of text: neither one nor the start of one is shown."""


class StopText:
    """Passes text through up to the first stop text; holds back an end that may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Add text; returns what may be shown now, nothing after a stop text."""
        if self.stopped:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            shown = self._held[: min(places)]
            self._held = ""
            return shown
        n_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        split = len(self._held) - n_held
        shown = self._held[:split]
        self._held = self._held[split:]
        return shown

    def flush(self) -> str:
        """Return what was held back, when the answer ends without a stop text."""
        shown = self._held
        self._held = ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
