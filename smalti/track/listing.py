"""What a list of runs says about each; reads run folders only."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError
from smalti.track.report.read import RunRecord, read_run

_SHOWN = ("loss/train/total", "time/token", "time/train", "throughput/tokens_per_sec", "throughput/device/mfu")


@dataclass(frozen=True)
class RunSummary:
    """One run in a few values; None where the folder does not say."""

    name: str
    folder: str
    state: str
    reason: str | None
    step: int | None
    attempt: int | None
    loss: float | None
    heartbeat: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest values of the metrics that a person asks for first, held-out results included."""
    evals: dict[str, str] = field(default_factory=dict)
    """Suite -> time of its newest results."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields."""
        return asdict(self)


def list_runs(folder: str) -> list[RunSummary]:
    """All run folders right under ``folder``, newest heartbeat first. DataError if ``folder`` does not exist."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"there is no folder '{folder}'", hint="smalti runs ls FOLDER")
    found = [describe(entry) for entry in sorted(root.iterdir()) if (entry / "config.yaml").is_file()]
    return sorted(found, key=lambda run: run.heartbeat or "", reverse=True)


def describe(folder: str | Path) -> RunSummary:
    """One run. DataError if ``folder`` is not a run folder."""
    run = read_run(folder)
    names = [*_SHOWN, *(name for name in sorted(run.names) if name.startswith("metrics/eval/"))]
    values = {name: run.last(name) for name in names}
    return RunSummary(
        name=run.name,
        folder=run.folder,
        state=run.state,
        reason=run.status.get("reason"),
        step=_step(run),
        attempt=run.status.get("attempt"),
        loss=run.last("loss/train/total"),
        heartbeat=run.status.get("heartbeat"),
        metrics={name: value for name, value in values.items() if value is not None},
        evals={found.suite: found.time for found in run.evals},
    )


def _step(run: RunRecord) -> int | None:
    step = run.rows[-1]["step"] if run.rows else run.status.get("step")
    return step if isinstance(step, int) else None
