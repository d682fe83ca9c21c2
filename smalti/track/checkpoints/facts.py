"""What is known of the checkpoints of a run: from their folders, and from the run's events and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError, SmaltiError
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.track.attempts import attempts, log_folder
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.marks import BLESSED, VERIFIED, marked_at
from smalti.track.checkpoints.names import PEER_MEMORY, folder_name, size_bytes, step_of
from smalti.track.checkpoints.retention import Keep, durable_names, roles
from smalti.track.events import read_events
from smalti.track.sinks.jsonl import read_metrics

_KINDS = ("resumed", "checkpoint_saved", "checkpoint_copied", "checkpoint_deleted")
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
    last: bool
    """One of the newest, which ``train.checkpoint.keep.last`` keeps; not of the newest itself."""
    every: bool
    """``train.checkpoint.keep.every`` keeps it for good."""
    parent: int | None
    """Step of the checkpoint before it, from which it was trained; None: from the start of the run."""
    attempt: int | None
    """The attempt that saved it."""
    here: bool
    """The run folder has it; otherwise only copies remain."""
    locations: tuple[str, ...]
    """Its folder, if it is there, then the copies that were made of it."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields."""
        return asdict(self)


def checkpoints(run: Path, events: Sequence[Mapping[str, Any]] | None = None) -> list[CheckpointFacts]:
    """Return the complete checkpoints of a run folder, and those of which only copies remain, by step.

    events: those of the run, if they were read. Copies are those of the events; no store is asked.
    """
    history = _History(read_events(run) if events is None else events)
    folder = run / "checkpoints"
    blocked = _blocked(run)
    role_of = _with_retention(run, roles(folder))
    copied = {folder_name(step): () for step, urls in history.copies.items() if urls}
    return [_facts(folder / name, role_of.get(name), history, blocked) for name in sorted({**copied, **role_of})]


def _with_retention(run: Path, role_of: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the roles (newest first) with ``last`` and ``every``, by the config of the newest attempt."""
    placed = log_folder(run, max(attempts(run), default=0)) / "config.yaml"
    try:
        config = load(RunConfig, str(placed if placed.is_file() else run / "config.yaml")).config
    except (SmaltiError, OSError):  # of another version, or none
        return dict(role_of)
    names, keep = list(role_of), Keep.of(config.train.checkpoint.keep_section, config.length)
    kept_as = {"last": names[1 : keep.last], "every": durable_names(names, keep)}
    return {name: [*role, *(word for word in kept_as if name in kept_as[word])] for name, role in role_of.items()}


class _History:
    """What the events of a run say of each step's checkpoint; those of later attempts count."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.saved: dict[int, Mapping[str, Any]] = {}
        self.parents: dict[int, int | None] = {}
        self.verified: dict[int, str | None] = {}
        self.copies: dict[int, list[str]] = {}
        self.bytes: dict[int, Any] = {}
        newest: int | None = None
        attempt: Any = None
        for event in events:
            kind, step = event.get("event"), event.get("step")
            if kind not in _KINDS or not isinstance(step, int):
                continue
            if kind == "checkpoint_copied":
                self.copies.setdefault(step, []).append(str(event.get("url")))
                self.bytes[step] = event.get("bytes")
                continue
            if kind == "checkpoint_deleted":
                self.copies[step] = [url for url in self.copies.get(step, ()) if url != event.get("path")]
                continue
            if event.get("attempt") != attempt:
                newest, attempt = None, event.get("attempt")
            if kind == "checkpoint_saved":
                self.saved[step], self.parents[step] = event, newest
                self.verified.pop(step, None)  # it is another checkpoint than that of an earlier attempt
                self.copies.pop(step, None)
            elif event.get("source") != PEER_MEMORY:
                self.verified[step] = event.get("time")
            newest = step


def _facts(path: Path, role: Sequence[str] | None, history: _History, blocked: Mapping[int, float]) -> CheckpointFacts:
    """Return the facts of a checkpoint; role: None where its folder is gone."""
    step, here = step_of(path), role is not None
    saved = history.saved.get(step, {})
    verified = [time for time in (history.verified.get(step), marked_at(path, VERIFIED)) if time]
    return CheckpointFacts(
        step=step,
        tokens=_tokens(path) if here else None,
        bytes=_bytes(path) if here else history.bytes.get(step),
        block_s=blocked.get(step, saved.get("seconds")),
        saved=saved.get("time"),
        verified=max(verified, default=None),
        blessed=marked_at(path, BLESSED),
        best="best" in (role or ()),
        registered="registered" in (role or ()),
        protected="protected" in (role or ()),
        newest="newest" in (role or ()),
        last="last" in (role or ()),
        every="every" in (role or ()),
        parent=history.parents.get(step),
        attempt=saved.get("attempt"),
        here=here,
        locations=(*([str(path)] if here else []), *dict.fromkeys(history.copies.get(step, ()))),
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
