"""Copies a run to TensorBoard event files in the run's ``tb/``, in tensorboardX's format, without TensorFlow.

Rows are in the file when ``send`` returns, so a kill loses the last few seconds at most. A resumed run marks the steps
that it repeats, and TensorBoard drops their first values. Metrics, and the config as text, are copied; no files.
tensorboardX imports PyTorch where that is installed: a second or two, in the feed's thread.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from smalti.base import clock
from smalti.base.errors import missing_extra
from smalti.config.track import TrackConfig
from smalti.track.line_file import disk_trouble
from smalti.track.sinks.feed import Row
from smalti.track.sinks.run_info import RunInfo

FOLDER = "tb"
_FILES = "events.out.tfevents."


class TensorBoard:
    """The event files of a run, one for each attempt.

    tensorboardX's SummaryWriter is not used: its ``flush`` returns while values are still in its queue.
    """

    name = "tensorboard"

    def __init__(self, track: TrackConfig, info: RunInfo) -> None:
        self._info = info
        self._folder = info.folder / FOLDER
        self._has: dict[str, int] = {}
        # Read here, not in open(): by then training may have repeated some of the steps.
        self._last = info.last_step() if info.record(self.name) else -1
        self._file: Any = None
        self.place: Mapping[str, str] = {"folder": str(self._folder)}

    def check(self) -> None:
        """Raise UserError without tensorboardX."""
        if find_spec("tensorboardX") is None:
            raise missing_extra("tensorboardX", "tensorboard", "track.sinks=[tensorboard]")

    def open(self) -> Mapping[str, int]:
        """Start another event file, which purges all steps after the last one that the run still has."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        with disk_trouble(self._folder):
            self._folder.mkdir(exist_ok=True)
            there = len(list(self._folder.glob(f"{_FILES}*")))
            # TensorBoard reads the files in the order of their names.
            name = f"{_FILES}{clock.wall_s():.0f}.smalti.{there:04d}"
            self._file = RecordWriter(str(self._folder / name))
        sent = self._info.record(self.name).get("sent", {}) if there else {}
        last = min(self._last, max(sent.values(), default=-1))
        self._has = {metric: min(step, last) for metric, step in sent.items()}
        now_s = clock.wall_s()
        self._write(Event(wall_time=now_s, file_version="brain.Event:2"))
        if there:
            self._write(Event(wall_time=now_s, step=last + 1, session_log=SessionLog(status=SessionLog.START)))
        else:
            text = "".join(f"    {line}\n" for line in self._info.config_text.splitlines())
            self._write(Event(wall_time=now_s, summary=summary.text("config", text)))
        self._file.flush()
        self._keep(is_open=True)
        return dict(self._has)

    def send(self, rows: Sequence[Row]) -> None:
        """Write the rows and flush."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._write(Event(wall_time=row.time_s, step=row.step, summary=Summary(value=values)))
            self._has |= dict.fromkeys(row.values, row.step)
        self._file.flush()
        self._keep(is_open=True)

    def close(self, state: str, end_s: float | None) -> None:
        """Close the file; TensorBoard has no field for the state."""
        self._file.close()
        self._keep(is_open=False)

    def _keep(self, *, is_open: bool) -> None:
        self._info.keep(self.name, {**self.place, "open": is_open, "sent": self._has})

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())


TRACKER = TensorBoard
