"""Which trackers there are, and what is done with them: follow a run, send what is missing, publish a file.

Promises: at the first contact a tracker that does not answer is a UserError; from then on nothing that a tracker does
is an error of ours.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from smalti.base import log
from smalti.base.errors import SmaltiError, UserError
from smalti.config.load import from_dict
from smalti.config.track import SinkName, TrackConfig
from smalti.track.run import RunFolder
from smalti.track.sinks import mlflow
from smalti.track.sinks.about import FOLDER, About, about_run
from smalti.track.sinks.feed import Events, Feed, Tracker, brief
from smalti.track.sinks.mlflow import Mlflow
from smalti.track.sinks.tensorboard import TensorBoard
from smalti.track.sinks.wandb import Wandb

TRACKERS: dict[SinkName, Callable[[TrackConfig, About], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "wandb": Wandb,
}
"""Name in ``track.sinks`` -> what makes it."""

_END_S = 10.0
"""How long the end of a run waits for trackers that still lack lines, all of them together."""
_STOP_S = 1.5
"""The same after an error or a stop: the parent of the ranks gives rank 0 2.5 s to end once another one is dead."""


def check(track: TrackConfig, folder: str | Path) -> None:
    """What ``follow`` would refuse, as far as that can be seen before the run folder is there."""
    root = Path(folder)
    about = about_run(root) if (root / "config.yaml").exists() else About(root, root.name, {}, {}, 0.0)
    for name in track.sinks:
        tracker = TRACKERS[name](track, about)
        if not about.record(name):
            tracker.check()


def follow(track: TrackConfig, folder: str | Path, events: Events) -> list[Feed]:
    """Copy the run's metrics to all of ``track.sinks`` from now on; close each feed in the end.

    UserError where a tracker is not installed, or, the first time that this run meets it, does not answer.
    """
    return [_start(name, track, folder, events) for name in track.sinks]


def close(feeds: Sequence[Feed], state: str) -> None:
    """End the attempt at all trackers, with a state of ``status.json``; they are waited for together."""
    _close(feeds, state, wait_s=_END_S if state == "done" else _STOP_S)


def _close(feeds: Sequence[Feed], state: str, *, wait_s: float) -> None:
    for feed in feeds:
        feed.end(state, wait_s=wait_s)
    for feed in feeds:
        feed.wait()


def complete(folder: RunFolder) -> None:
    """End at the trackers what a rank that died has left open there: the rest of the lines, and the status.

    Where rank 0 itself has waited for a tracker in vain, nobody does so again. An error is a warning.
    """
    try:
        track, about = _track(folder), about_run(folder.path)
        told = {event.get("tracker") for event in folder.events()
                if event["event"] == "tracker_behind" and event["attempt"] == folder.attempt}  # fmt: skip
        left_open: list[SinkName] = [
            name for name in track.sinks if about.record(name).get("open") and name not in told
        ]
        # The log of events stays open: a feed that still waits for its tracker may write to it.
        events = folder.event_log() if left_open else _Silent()
        _close([_start(name, track, folder.path, events) for name in left_open], _state(folder), wait_s=_END_S)
    except Exception as error:  # the next attempt, or 'smalti runs send', does it
        log.get("track").warning("the trackers were not told how the attempt ended: %s", brief(error))


def send(run: str | Path, overrides: Sequence[str] = ()) -> dict[str, int]:
    """Send all that the trackers of a run lack, however long it takes; tracker -> lines that it did not take.

    ``overrides`` of the config's ``track`` section, as ``track.sinks=[mlflow]``: also for a run that had none.
    """
    folder = RunFolder.read(run)
    track = _track(folder, overrides)
    if not track.sinks:
        raise UserError(
            f"{folder.path} has no trackers",
            allowed="track.sinks: " + ", ".join(TRACKERS),
            hint=f"smalti runs send {folder.path} 'track.sinks=[mlflow]'",
        )
    folder.take_lock()
    try:
        feeds = follow(track, folder.path, _Silent())
        return {feed.tracker.name: feed.close(_state(folder), wait_s=float(24 * 3600)) for feed in feeds}
    finally:
        folder.close()


def publish(
    run: str | Path, path: str | Path, at: str, *, numbers: Mapping[str, float] | None = None, step: int | None = None
) -> list[str]:
    """Put a file or folder, and numbers at ``step``, to where the run is tracked (MLflow alone takes files).

    Returns a line for people for each tracker that was asked; none for a run that is not tracked there, or not any more
    since an attempt without the tracker. A tracker that does not answer is a line too.
    """
    root = Path(run)
    if not (root / "config.yaml").exists() or not (root / FOLDER / f"{Mlflow.name}.json").exists():
        return []
    try:
        folder = RunFolder.read(root)
        track = _track(folder)
        was_left = Mlflow.name not in track.sinks and any(
            Mlflow.name in _track(folder, attempt=attempt).sinks for attempt in [0, *folder.attempts()]
        )
        if track.mlflow.upload_max_bytes == 0 or was_left:
            return []
        return [Mlflow(track, about_run(root)).publish(Path(path), at, numbers or {}, step)]
    except Exception as error:
        return [f"warning: mlflow: {at} is not uploaded ({brief(error)}); run the command again when it is back"]


def _start(name: SinkName, track: TrackConfig, folder: str | Path, events: Events) -> Feed:
    about = about_run(folder)
    is_first_contact = not about.record(name)
    tracker = TRACKERS[name](track, about)
    feed = Feed(tracker, folder, events)
    if is_first_contact:
        tracker.check()
    try:
        feed.start(must_answer=is_first_contact)
    except SmaltiError:
        raise
    except Exception as error:
        raise _refused(tracker, error) from error
    return feed


def _refused(tracker: Tracker, error: Exception) -> UserError:
    if isinstance(tracker, Mlflow):
        return mlflow.unreachable(tracker.uri, error)
    return UserError(
        f"{tracker.name} cannot be used: {brief(error)}",
        hint="mend it, or train without it: track.sinks=[]",
    )


def _track(folder: RunFolder, overrides: Sequence[str] = (), *, attempt: int | None = None) -> TrackConfig:
    """The ``track`` section of an attempt, of the newest where none is named, whatever kind of training it was."""
    number = attempt if attempt is not None else max(folder.attempts(), default=None)
    own = folder.log_folder(number) / "config.yaml" if number is not None else None
    path = own if own is not None and own.exists() else folder.path / "config.yaml"
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    short = [override.removeprefix("track.") for override in overrides]
    return from_dict(TrackConfig, tree.get("track") or {}, str(path), short).config


def _state(folder: RunFolder) -> str:
    state = str(folder.status().get("state", "failed"))
    return "failed" if state in ("starting", "running") else state


class _Silent:
    """For a command that says itself what came out."""

    def write(self, kind: str, **fields: Any) -> None:
        """Drop it."""
