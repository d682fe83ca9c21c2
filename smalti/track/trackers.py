"""Copies runs to trackers: follow a run, send what is missing, publish a file.

A tracker is the ``TRACKER`` of the module of its name in ``track.sinks``. At its first contact one that does not answer
is a UserError; from then on no failure of a tracker is an error of the run.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from smalti.base import log
from smalti.base.errors import SmaltiError, UserError
from smalti.config.load import from_dict
from smalti.config.track import SinkName, TrackConfig
from smalti.track.events import NoEventLog
from smalti.track.registry import mlflow as mlflow_registry
from smalti.track.registry.versions import Version
from smalti.track.run import RunFolder
from smalti.track.sinks import mlflow
from smalti.track.sinks.feed import Events, Feed, Tracker, brief
from smalti.track.sinks.mlflow import Mlflow
from smalti.track.sinks.run_info import FOLDER, RunInfo, read_run_info

_END_S = 10.0
"""Seconds that the end of a run waits for all trackers that still lack lines."""
_STOP_S = 1.5
"""The same after an error or a stop: rank 0 is killed 2.5 s after another rank has died."""


def load_tracker(name: SinkName) -> Callable[[TrackConfig, RunInfo], Tracker]:
    """Return the class of a tracker: ``TRACKER`` of the module ``track.sinks.<name>``."""
    return cast("Callable[[TrackConfig, RunInfo], Tracker]", import_module(f"smalti.track.sinks.{name}").TRACKER)


def check(track: TrackConfig, folder: str | Path) -> None:
    """Raise the errors of ``follow`` that can be known before the run folder exists."""
    root = Path(folder)
    info = read_run_info(root) if (root / "config.yaml").exists() else RunInfo(root, root.name, {}, {}, 0.0)
    for name in track.sinks:
        tracker = load_tracker(name)(track, info)
        if not info.record(name):
            tracker.check()


def follow(track: TrackConfig, folder: str | Path, events: Events) -> list[Feed]:
    """Start to copy the run's metrics to all of ``track.sinks``; pass the feeds to ``close`` at the end.

    Raises UserError where a tracker is not installed or, at this run's first contact with it, does not answer.
    """
    return [_start(name, track, folder, events) for name in track.sinks]


def close(feeds: Sequence[Feed], state: str) -> None:
    """End the attempt at all trackers, with a state of ``status.json``; waits for all of them together."""
    _close(feeds, state, wait_s=_END_S if state == "done" else _STOP_S)


def _close(feeds: Sequence[Feed], state: str, *, wait_s: float) -> None:
    for feed in feeds:
        feed.end(state, wait_s=wait_s)
    for feed in feeds:
        feed.wait()


def complete(folder: RunFolder) -> None:
    """Send the lines and the status that a dead rank 0 has not sent to the trackers.

    Trackers that rank 0 has waited for without an answer are skipped. An error is logged as a warning.
    """
    try:
        track = _track(folder)
        info = read_run_info(folder.path)
        behind = {event.get("tracker") for event in folder.events()
                if event["event"] == "tracker_behind" and event["attempt"] == folder.attempt}  # fmt: skip
        left_open: list[SinkName] = [
            name for name in track.sinks if info.record(name).get("open") and name not in behind
        ]
        # The event log stays open: a feed that still waits for its tracker may write to it.
        events = folder.event_log() if left_open else NoEventLog()
        _close([_start(name, track, folder.path, events) for name in left_open], _state(folder), wait_s=_END_S)
    except Exception as error:  # the next attempt, or 'smalti runs send', sends it
        log.get("track").warning("the end of the attempt was not sent to the trackers: %s", brief(error))


def send(run: str | Path, overrides: Sequence[str] = ()) -> dict[str, int]:
    """Send all that the trackers of a run lack, however long it takes; returns tracker -> number of lines not sent.

    ``overrides`` change the config's ``track`` section, as ``track.sinks=[mlflow]``, also for a run that had no sinks.
    """
    folder = RunFolder.read(run)
    track = _track(folder, overrides)
    if not track.sinks:
        raise UserError(
            f"{folder.path} has no trackers",
            allowed="track.sinks: " + ", ".join(get_args(SinkName)),
            hint=f"smalti runs send {folder.path} 'track.sinks=[mlflow]'",
        )
    folder.take_lock()
    try:
        feeds = follow(track, folder.path, NoEventLog())  # the command reports its result itself
        return {feed.tracker.name: feed.close(_state(folder), wait_s=float(24 * 3600)) for feed in feeds}
    finally:
        folder.close()


def publish(
    run: str | Path, path: str | Path, at: str, *, numbers: Mapping[str, float] | None = None, step: int | None = None
) -> list[str]:
    """Upload a file or folder, and numbers at ``step``, to the run's trackers (only MLflow takes files).

    Returns a line to print for each tracker; none for a run without one, or whose later attempts dropped it. A tracker
    that does not answer gives a warning as its line.
    """
    return _in_mlflow(
        run,
        lambda tracker: tracker.publish(Path(path), at, numbers or {}, step),
        f"{at} is not uploaded",
    )


def register(version: Version, at: str) -> list[str]:
    """Register the files at ``at`` of the version's MLflow run in MLflow's model registry; lines as of ``publish``."""
    return _in_mlflow(
        version.run_folder,
        lambda tracker: mlflow_registry.register(tracker, version, at),
        f"{version.label} is not registered",
    )


def move_tag(version: Version, tag: str, *, remove: bool = False) -> list[str]:
    """Set or delete the alias of a tag in MLflow's model registry; lines as of ``publish``."""
    return _in_mlflow(
        version.run_folder,
        lambda tracker: mlflow_registry.move_alias(tracker, version, tag, remove=remove),
        f"the alias '{tag}' is not {'deleted' if remove else 'set'}",
    )


def _in_mlflow(run: str | Path | None, use: Callable[[Mlflow], str], failed: str) -> list[str]:
    """Return the line of ``use``, or ``failed`` as a warning; nothing for a run that does not upload to MLflow."""
    if run is None or not all((Path(run) / name).exists() for name in ("config.yaml", f"{FOLDER}/{Mlflow.name}.json")):
        return []
    try:
        folder = RunFolder.read(run)
        track = _track(folder)
        was_left = Mlflow.name not in track.sinks and any(
            Mlflow.name in _track(folder, attempt=attempt).sinks for attempt in [0, *folder.attempts()]
        )
        if track.mlflow.upload_max_bytes == 0 or was_left:
            return []
        return [use(Mlflow(track, read_run_info(folder.path)))]
    except Exception as error:
        return [f"warning: mlflow: {failed} ({brief(error)}); run the command again when it is back"]


def _start(name: SinkName, track: TrackConfig, folder: str | Path, events: Events) -> Feed:
    info = read_run_info(folder)
    is_first_contact = not info.record(name)
    tracker = load_tracker(name)(track, info)
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
        hint="fix it, or train without it: track.sinks=[]",
    )


def _track(folder: RunFolder, overrides: Sequence[str] = (), *, attempt: int | None = None) -> TrackConfig:
    """Return the ``track`` section of an attempt (default: the newest), for any kind of training."""
    number = attempt if attempt is not None else max(folder.attempts(), default=None)
    path = folder.path / "config.yaml"
    if number is not None and (folder.log_folder(number) / "config.yaml").exists():
        path = folder.log_folder(number) / "config.yaml"
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    fields = [override.removeprefix("track.") for override in overrides]
    return from_dict(TrackConfig, tree.get("track") or {}, str(path), fields).config


def _state(folder: RunFolder) -> str:
    state = str(folder.status().get("state", "failed"))
    return "failed" if state in ("starting", "running") else state
