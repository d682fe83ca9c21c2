"""Copies a run for Weights & Biases: a folder in the run's ``wandb/`` that ``wandb sync`` uploads, or the site itself.

Offline unless the config or WANDB_MODE says otherwise. A run folder is one W&B run, over all attempts, each of which
writes its own folder. Of steps repeated after a crash the first values stay. Metrics, config and provenance are
copied, no files. Mode ``online`` has not been tested against the site.
"""

import json
import math
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smalti.base import env
from smalti.base.errors import missing_extra
from smalti.config.track import TrackConfig
from smalti.track.sinks.feed import Row
from smalti.track.sinks.run_info import RunInfo

_STEP = "time/batch"
"""The axis of all charts. W&B's own counter may only rise, but a held-out result belongs to an earlier step."""


_ANSWER_S = 20.0
"""Seconds that W&B's process may try to reach its site; our process waits for it when it exits."""
_BLOCK_BYTES, _HEAD_BYTES = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


class Wandb:
    """The W&B run of a run folder."""

    name = "wandb"

    def __init__(self, track: TrackConfig, info: RunInfo) -> None:
        self._config = track.wandb
        self._info = info
        self._settings = env.tracker_settings()
        self._has: dict[str, int] = {}
        self._run: Any = None
        self.place: Mapping[str, str] = {}

    def check(self) -> None:
        """Raise UserError without wandb. No request is sent to the site."""
        if find_spec("wandb") is None:
            raise missing_extra("wandb", "wandb", "track.sinks=[wandb]")

    def open(self) -> Mapping[str, int]:
        """Create or continue the run with the id of the record (or WANDB_RUN_ID)."""
        env.quiet_trackers()
        import wandb

        record = self._info.record(self.name)
        mode: Any = self._config.mode or self._settings.get("WANDB_MODE") or "offline"
        project = self._config.project or self._settings.get("WANDB_PROJECT") or "smalti"
        run_id = self._settings.get("WANDB_RUN_ID") or record.get("run_id") or secrets.token_hex(4)
        folder = self._settings.get("WANDB_DIR") or str(self._info.folder)
        self._run = wandb.init(
            project=project,
            entity=self._config.entity or self._settings.get("WANDB_ENTITY"),
            name=self._info.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=folder,
            config=dict(self._info.params) | dict(self._info.tags),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True, x_disable_machine_info=True, x_disable_meta=True, x_save_requirements=False,
                host="-", init_timeout=_ANSWER_S,
            ),
        )  # fmt: skip
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.place = {"mode": mode, "project": project, "run_id": run_id, "folder": f"{folder}/wandb"}
        if record.get("run_id") == run_id:
            last = _last_step(Path(folder) / "wandb", run_id) if record.get("open") else math.inf
            self._has = {name: int(min(step, last)) for name, step in record.get("sent", {}).items()}
        self._keep(is_open=True)
        return dict(self._has)

    def send(self, rows: Sequence[Row]) -> None:
        """Pass the rows to W&B's own process, which writes or uploads them."""
        for row in rows:
            self._run.log({**row.values, _STEP: row.step, "_timestamp": row.time_s})
            self._has |= dict.fromkeys(row.values, row.step)
        self._keep(is_open=True)

    def close(self, state: str, end_s: float | None) -> None:
        """End W&B's process; a run that was stopped is marked as preempted."""
        if state in ("stopped", "interrupted"):
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "done" else 1)
        self._keep(is_open=False)

    def _keep(self, *, is_open: bool) -> None:
        self._info.keep(self.name, {**self.place, "open": is_open, "sent": self._has})


def _last_step(folder: Path, run_id: str) -> int:
    """Return the last step in W&B's files of this run; -1 where they have none.

    W&B's process writes whole blocks, and may lose an incomplete one when ours is killed, so it may have fewer lines
    than it was sent (measured: 19 of 589 were lost). If it still writes during the read, some lines are sent twice,
    with equal values.
    """
    for file in sorted(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"), reverse=True):
        steps = [int(json.loads(item.value_json)) for record in _tail(file) for item in record.history.item
                 if _STEP in (item.key, *item.nested_key)]  # fmt: skip
        if steps:
            return steps[-1]
    return -1


def _tail(file: Path) -> Iterator[Any]:
    """Yield the records in the last megabyte of a ``.wandb`` file: LevelDB's log format after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    read = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    data = file.read_bytes()
    whole = None
    at = max(_HEAD_BYTES, (len(data) // _BLOCK_BYTES - 32) * _BLOCK_BYTES)
    while at + _HEAD_BYTES <= len(data):
        room = _BLOCK_BYTES - at % _BLOCK_BYTES
        if room < _HEAD_BYTES:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        at += _HEAD_BYTES + length
        if kind in (_FULL, _FIRST):
            whole = b""
        if whole is None or len(part) < length:  # part of a record that began before the tail, or a truncated end
            continue
        whole += part
        if kind in (_FULL, _LAST):
            yield read(whole)
            whole = None


TRACKER = Wandb
