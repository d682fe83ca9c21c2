"""A run for TensorBoard: event files in the run's ``tb/``, in tensorboardX's format, without TensorFlow.

Promises: what is sent is in the file when ``send`` is back, so a kill loses the last few seconds at most; a resumed run
takes back what it does again (TensorBoard drops it when it reads). Shows metrics, and the config as text; no files.
tensorboardX imports PyTorch where that is installed: a second or two, in our thread, also of ``smalti runs send``.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from smalti.base import clock
from smalti.base.errors import missing_extra
from smalti.config.track import TrackConfig
from smalti.track.append import disk_trouble
from smalti.track.sinks.about import About
from smalti.track.sinks.feed import Row

FOLDER = "tb"
_FILES = "events.out.tfevents."


class TensorBoard:
    """The run's event files, one an attempt.

    tensorboardX's SummaryWriter is not used: its ``flush`` returns while values still wait in a queue of its own.
    """

    name = "tensorboard"

    def __init__(self, track: TrackConfig, about: About) -> None:
        self._about, self._folder = about, about.folder / FOLDER
        self._has: dict[str, int] = {}
        # Now, and not in open(): by then the training may have done some of the steps again that are taken back.
        self._last = about.last_step() if about.record(self.name) else -1
        self._file: Any = None
        self.place: Mapping[str, str] = {"folder": str(self._folder)}

    def check(self) -> None:
        """UserError without tensorboardX."""
        if find_spec("tensorboardX") is None:
            raise missing_extra("tensorboardX", "tensorboard", "track.sinks=[tensorboard]")

    def open(self) -> Mapping[str, int]:
        """Begin another event file, which takes back all steps behind the last that the run still has."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        with disk_trouble(self._folder):
            self._folder.mkdir(exist_ok=True)
            there = len(list(self._folder.glob(f"{_FILES}*")))
            # TensorBoard reads the files in the order of their names.
            name = f"{_FILES}{clock.wall_s():.0f}.smalti.{there:04d}"
            self._file = RecordWriter(str(self._folder / name))
        sent = self._about.record(self.name).get("sent", {}) if there else {}
        last = min(self._last, max(sent.values(), default=-1))
        self._has = {metric: min(step, last) for metric, step in sent.items()}
        now_s = clock.wall_s()
        self._write(Event(wall_time=now_s, file_version="brain.Event:2"))
        if there:
            self._write(Event(wall_time=now_s, step=last + 1, session_log=SessionLog(status=SessionLog.START)))
        else:
            text = "".join(f"    {line}\n" for line in self._about.config_text.splitlines())
            self._write(Event(wall_time=now_s, summary=summary.text("config", text)))
        self._file.flush()
        self._keep(is_open=True)
        return dict(self._has)

    def send(self, rows: Sequence[Row]) -> None:
        """Write them and flush."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._write(Event(wall_time=row.time_s, step=row.step, summary=Summary(value=values)))
            self._has |= dict.fromkeys(row.values, row.step)
        self._file.flush()
        self._keep(is_open=True)

    def close(self, state: str, end_s: float | None) -> None:
        """Close the file; TensorBoard knows no state."""
        self._file.close()
        self._keep(is_open=False)

    def _keep(self, *, is_open: bool) -> None:
        self._about.keep(self.name, {**self.place, "open": is_open, "sent": self._has})

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
