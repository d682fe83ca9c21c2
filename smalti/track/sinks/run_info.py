"""Name, parameters and tags of a run for trackers, read from the run folder, and the records of the trackers.

Guarantees: no secret leaves the machine. Values under secret-sounding names and logins in addresses become ``***``,
home folders ``~``, and neither host nor user is named.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import clock, store
from smalti.base.machine import without_home
from smalti.config.show import flatten
from smalti.config.yaml_lines import parse, to_yaml
from smalti.track.attempts import attempts, log_folder
from smalti.track.events import read_events
from smalti.track.line_file import disk_trouble, read_lines
from smalti.track.provenance import redact
from smalti.track.sinks import jsonl

FOLDER = "trackers"
_RESOLVED = ("ranks", "device", "params_total", "params_active", "peak_flops_per_s")


@dataclass(frozen=True)
class RunInfo:
    """A run's name, parameters and tags, for trackers."""

    folder: Path
    name: str
    params: Mapping[str, Any]
    """Dotted key of the config -> value, of the first attempt."""
    tags: Mapping[str, str]
    """Provenance and placement; may change at any attempt."""
    made_s: float
    """When the run was created, in seconds since 1970."""

    @property
    def config_text(self) -> str:
        """``config.yaml`` with secrets masked."""
        return to_yaml(_masked_tree("", _read(self.folder / "config.yaml")))

    def last_step(self) -> int:
        """Return the last step in ``metrics.jsonl``; -1 where it has none."""
        steps = (line.get("step") for line in read_lines(self.folder / jsonl.FILE_NAME))
        return max((step for step in steps if isinstance(step, int)), default=-1)

    def record(self, tracker: str) -> dict[str, Any]:
        """Return the record of a tracker (ids, addresses); empty before the first contact."""
        path = self._path(tracker)
        return dict(store.read_json(path)) if path.exists() else {}

    def keep(self, tracker: str, record: Mapping[str, Any]) -> None:
        """Write the record of a tracker."""
        with disk_trouble(self._path(tracker)):
            self._path(tracker).parent.mkdir(exist_ok=True)
            store.write_json(self._path(tracker), dict(record))

    def _path(self, tracker: str) -> Path:
        return self.folder / FOLDER / f"{tracker}.json"


def read_run_info(folder: str | Path) -> RunInfo:
    """Read a run's info from its folder."""
    root = Path(folder)
    first = _values(root / "config.yaml")
    made_by = store.read_json(root / "provenance.json") if (root / "provenance.json").exists() else {}
    made_s = clock.seconds_of(str(made_by.get("time")))
    tags = _tags(root, first, made_by)
    return RunInfo(root, str(first.get("name", root.name)), first, tags, clock.wall_s() if made_s is None else made_s)


def _values(config: Path) -> dict[str, Any]:
    return {key: _masked(key, value) for key, value in flatten(_read(config)).items()}


def _read(config: Path) -> Any:
    return parse(config.read_text(encoding="utf-8"), str(config), lines=False).value or {}


def _masked_tree(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked_tree(str(key), child) for key, child in value.items()}
    return [_masked_tree(name, child) for child in value] if isinstance(value, list) else _masked(name, value)


def _masked(key: str, value: Any) -> Any:
    """Return the value, or its masked text where it holds a secret or a home folder."""
    if value is not None and redact(f"{key}=x") != f"{key}=x":
        return "***"
    plain = value if isinstance(value, str) else json.dumps(value)
    shown = without_home(redact(plain))
    return value if shown == plain else shown


def _tags(root: Path, first: Mapping[str, Any], made_by: Mapping[str, Any]) -> dict[str, str]:
    git = made_by.get("git") or {}
    tags = {
        "smalti.version": made_by.get("smalti"),
        "smalti.torch": made_by.get("packages", {}).get("torch"),
        "smalti.python": made_by.get("python"),
        "smalti.command": " ".join(map(str, made_by.get("command", []))) or None,
        "smalti.commit": git.get("commit"),
        "smalti.commit_dirty": None if git.get("dirty") is None else str(git["dirty"]).lower(),
        "smalti.folder": str(root) if not root.is_absolute() else root.name,
    }
    resolved: dict[str, Any] = next(
        (event for event in reversed(read_events(root)) if event["event"] == "auto_resolved"), {}
    )
    tags |= {f"smalti.{key}": resolved.get(key) for key in _RESOLVED}
    for attempt in attempts(root):
        tags["smalti.attempt"] = str(attempt)
        config = log_folder(root, attempt) / "config.yaml"
        if config.exists():
            other = _values(config)
            changes = [f"{key}: {first.get(key)} -> {value}" for key, value in other.items() if first.get(key) != value]
            tags[f"smalti.changed_in_attempt_{attempt}"] = "; ".join(changes)
    return {key: without_home(redact(str(value))) for key, value in tags.items() if value is not None}
