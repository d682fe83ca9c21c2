"""What is known of the checkpoints of a run: from their folders, and from the run's events and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.marks import BLESSED, VERIFIED, marked_at
from smalti.track.checkpoints.names import size_bytes, step_of
from smalti.track.checkpoints.retention import roles
from smalti.track.events import read_events
from smalti.track.sinks.jsonl import read_metrics

_BLOCKED = ("ckpt/block_s", "ckpt/save_s")
"""Metrics of the time that a save stopped the training; the first that a run has."""


@dataclass(frozen=True)
class CheckpointFacts:
    """A complete checkpoint of a run; None where something is not known. Times are UTC."""

    step: int
    tokens: int | None
    """Tokens of training until then."""
    bytes: int | None
    """Size by its manifest."""
    block_s: float | None
    """Seconds that the save stopped the training."""
    saved: str | None
    verified: str | None
    """When all its files last matched their digests: at a resume, or by ``verify``."""
    blessed: str | None
    """When it became blessed."""
    best: bool
    registered: bool
    """A model registry has it (``smalti models``)."""
    protected: bool
    newest: bool
    parent: int | None
    """Step of the checkpoint before it, from which it was trained; None: from the start of the run."""
    attempt: int | None
    """The attempt that saved it."""
    locations: tuple[str, ...]
    """Its folder, then the copies that were made of it."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields."""
        return asdict(self)


def checkpoints(run: Path, events: Sequence[Mapping[str, Any]] | None = None) -> list[CheckpointFacts]:
    """Return the complete checkpoints of a run folder, oldest first. events: those of the run, if they were read."""
    history = _History(read_events(run) if events is None else events)
    folder = run / "checkpoints"
    blocked = _blocked(run)
    return [_facts(folder / name, role, history, blocked) for name, role in reversed(roles(folder).items())]


class _History:
    """What the events of a run say of each step's checkpoint; those of later attempts count."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.saved: dict[int, Mapping[str, Any]] = {}
        self.parents: dict[int, int | None] = {}
        self.verified: dict[int, str | None] = {}
        self.copies: dict[int, list[str]] = {}
        newest: int | None = None
        attempt: Any = None
        for event in events:
            kind, step = event.get("event"), event.get("step")
            if kind not in ("resumed", "checkpoint_saved", "checkpoint_copied") or not isinstance(step, int):
                continue
            if kind == "checkpoint_copied":
                self.copies.setdefault(step, []).append(str(event.get("url")))
                continue
            if event.get("attempt") != attempt:
                newest, attempt = None, event.get("attempt")
            if kind == "checkpoint_saved":
                self.saved[step], self.parents[step] = event, newest
                self.verified.pop(step, None)  # it is another checkpoint than that of an earlier attempt
                self.copies.pop(step, None)
            else:
                self.verified[step] = event.get("time")
            newest = step


def _facts(path: Path, role: Sequence[str], history: _History, blocked: Mapping[int, float]) -> CheckpointFacts:
    step = step_of(path)
    saved = history.saved.get(step, {})
    verified = [time for time in (history.verified.get(step), marked_at(path, VERIFIED)) if time]
    return CheckpointFacts(
        step=step,
        tokens=_tokens(path),
        bytes=_bytes(path),
        block_s=blocked.get(step, saved.get("seconds")),
        saved=saved.get("time"),
        verified=max(verified, default=None),
        blessed=marked_at(path, BLESSED),
        best="best" in role,
        registered="registered" in role,
        protected="protected" in role,
        newest="newest" in role,
        parent=history.parents.get(step),
        attempt=saved.get("attempt"),
        locations=(str(path), *dict.fromkeys(history.copies.get(step, ()))),
    )


def _blocked(run: Path) -> dict[int, float]:
    """Return the seconds that each save stopped the training, by step."""
    rows = [row for row in read_metrics(run) if "step" in row]
    return {row["step"]: row[name] for name in reversed(_BLOCKED) for row in rows if row.get(name) is not None}


def _tokens(path: Path) -> int | None:
    try:
        tokens = manifest.read_state(path).get("tokens")
    except (DataError, OSError):
        return None
    return int(tokens) if isinstance(tokens, int | float) else None


def _bytes(path: Path) -> int | None:
    try:
        return int(size_bytes(path))
    except (DataError, OSError, KeyError, TypeError):
        return None
