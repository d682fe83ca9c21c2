"""A run for Weights & Biases: a folder in the run's ``wandb/`` that ``wandb sync`` uploads, or the site itself.

Promises: offline unless the config or WANDB_MODE says otherwise; one id for one run folder, over all attempts, each of
which leaves a folder of its own. Of steps that were done again after a crash the first values stay. Not promised: mode
``online`` was never run against the site by Smalti's tests. Takes no files: metrics, config and where it comes from.
"""

import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from smalti.base import env
from smalti.base.errors import missing_extra
from smalti.config.track import TrackConfig
from smalti.track.sinks.about import About
from smalti.track.sinks.feed import Row

_STEP = "time/batch"
"""The axis of all charts. W&B's own counter may only rise, and a held-out result belongs to a step that has gone by."""


class Wandb:
    """The run at Weights & Biases."""

    name = "wandb"

    def __init__(self, track: TrackConfig, about: About) -> None:
        self._config, self._about = track.wandb, about
        self._settings = env.tracker_settings()
        self._has: dict[str, int] = {}
        self._run: Any = None
        self.place: Mapping[str, str] = {}

    def check(self) -> None:
        """UserError without wandb; the site itself is not asked."""
        if find_spec("wandb") is None:
            raise missing_extra("wandb", "wandb", "track.sinks=[wandb]")

    def open(self) -> Mapping[str, int]:
        """Begin or go on under the id of the record (or WANDB_RUN_ID)."""
        env.quiet_trackers()
        import wandb

        record = self._about.record(self.name)
        mode: Any = self._config.mode or self._settings.get("WANDB_MODE") or "offline"
        project = self._config.project or self._settings.get("WANDB_PROJECT") or "smalti"
        run_id = self._settings.get("WANDB_RUN_ID") or record.get("run_id") or secrets.token_hex(4)
        folder = self._settings.get("WANDB_DIR") or str(self._about.folder)
        self._run = wandb.init(
            project=project,
            entity=self._config.entity or self._settings.get("WANDB_ENTITY"),
            name=self._about.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=folder,
            config=dict(self._about.params) | dict(self._about.tags),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True, x_disable_machine_info=True, x_disable_meta=True, x_save_requirements=False,
                host="-",
            ),
        )  # fmt: skip
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.place = {"mode": mode, "project": project, "run_id": run_id, "folder": f"{folder}/wandb"}
        if record.get("run_id") == run_id:
            self._has = dict(record.get("sent", {}))
        self._about.keep(self.name, {**self.place, "sent": self._has})
        return dict(self._has)

    def send(self, rows: Sequence[Row]) -> None:
        """Hand them to W&B's own process, which writes or uploads them."""
        for row in rows:
            self._run.log({**row.values, _STEP: row.step, "_timestamp": row.time_s})
            self._has |= dict.fromkeys(row.values, row.step)
        self._about.keep(self.name, {**self.place, "sent": self._has})

    def close(self, state: str) -> None:
        """End W&B's process; a run that was stopped is marked as preempted."""
        if state in ("stopped", "interrupted"):
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "done" else 1)
