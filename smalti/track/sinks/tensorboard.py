"""A run for TensorBoard: event files in the run's ``tb/``, written by tensorboardX, without TensorFlow.

Promises: every line of ``metrics.jsonl`` up to the last few seconds is on disk, also after a kill; a resumed run takes
back what it does again (TensorBoard drops it when it reads). Shows metrics and the config as text; keeps no files.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from smalti.base.errors import missing_extra
from smalti.config.track import TrackConfig
from smalti.track.sinks.about import About
from smalti.track.sinks.feed import Row

FOLDER = "tb"


class TensorBoard:
    """The run's event files."""

    name = "tensorboard"

    def __init__(self, track: TrackConfig, about: About) -> None:
        self._about = about
        self._has: dict[str, int] = {}
        self._writer: Any = None
        self.place: Mapping[str, str] = {"folder": str(about.folder / FOLDER)}

    def check(self) -> None:
        """UserError without tensorboardX."""
        if find_spec("tensorboardX") is None:
            raise missing_extra("tensorboardX", "tensorboard", "track.sinks=[tensorboard]")

    def open(self) -> Mapping[str, int]:
        """Begin another event file, which takes back all steps behind the last that the run still has."""
        from tensorboardX import SummaryWriter

        folder = self._about.folder / FOLDER
        there = any(folder.glob("events.out.tfevents.*"))
        sent = self._about.record(self.name).get("sent", {}) if there else {}
        last = min(self._about.last_step(), max(sent.values(), default=-1))
        self._has = {name: min(step, last) for name, step in sent.items()}
        self._writer = SummaryWriter(str(folder), purge_step=last + 1 if there else None, flush_secs=3600)
        if not there:
            self._writer.add_text("config", "".join(f"    {line}\n" for line in self._about.config_text.splitlines()))
        return dict(self._has)

    def send(self, rows: Sequence[Row]) -> None:
        """Write them and wait until they are on disk."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time_s)
                self._has[name] = row.step
        self._writer.flush()
        self._about.keep(self.name, {**self.place, "sent": self._has})

    def close(self, state: str) -> None:
        """Close the file; TensorBoard knows no state."""
        self._writer.close()
