"""The manifest of a checkpoint: size and digest of every file, and whether the files match them.

A folder without ``COMPLETE``, which holds the digest of ``manifest.json``, is no checkpoint. This guards against
damage, not against a forged manifest.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from smalti.base import store
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.hashing import sha256_file, xxh3_file
from smalti.config.fork import other_settings
from smalti.config.load import load_text
from smalti.config.run import RunConfig
from smalti.track.checkpoints.names import is_name, step_of

T = TypeVar("T")
Entry = dict[str, Any]
"""A file of a manifest: ``name`` (below the checkpoint), ``bytes``, and ``xxh3`` (format 1: ``sha256``)."""

FORMAT = 2
CONFIG = "config"
"""Key of the text of the run's ``config.yaml`` in ``train_state.json``."""
_SHOWN = 3
READABLE = (1, 2)
"""1: shards in PyTorch's format, digests SHA-256. 2: shards in safetensors' format, digests XXH3-128."""


def entry(root: Path, path: Path) -> Entry:
    """Return the entry of a file of the checkpoint at ``root``, which is read for its digest."""
    return {"name": str(path.relative_to(root)), "bytes": path.stat().st_size, "xxh3": xxh3_file(path)}


def write(root: Path, train_state: dict[str, Any], entries: list[Entry]) -> None:
    """Write what is not tensors, the manifest, and ``COMPLETE`` last."""
    store.write_json(root / "train_state.json", train_state)
    entries = [*entries, entry(root, root / "train_state.json")]
    store.write_json(root / "manifest.json", {"format": FORMAT, "files": entries})
    store.write_text(root / "COMPLETE", sha256_file(root / "manifest.json") + "\n")


def read_state(path: str | Path) -> dict[str, Any]:
    """Return the JSON state that was saved with the tensors."""
    state: dict[str, Any] = store.read_json(Path(path) / "train_state.json")
    return state


def fault(path: str | Path, read: Callable[[int], None] = lambda _: None) -> str | None:
    """Return why the checkpoint at ``path`` is damaged, or None where every file matches its digest.

    read: called with the bytes of each file that matches. DataError for a format of another version; RetryableError
    where a file exists and cannot be read (permission, I/O).
    """
    root = Path(path)
    entries, reason = listed(root)
    return reason or first_mismatch(root, entries, read) or misplaced(root)


def listed(root: Path) -> tuple[list[Entry], str | None]:
    """Return the files that the manifest lists, or why the manifest is not valid."""

    def look() -> tuple[list[Entry], str | None]:
        if not (root / "COMPLETE").exists():
            return [], "it has no COMPLETE mark"
        if not (root / "manifest.json").exists():
            return [], "manifest.json is missing"
        if store.read_text(root / "COMPLETE").strip() != sha256_file(root / "manifest.json"):
            return [], "manifest.json does not match its digest in COMPLETE"
        manifest = store.read_json(root / "manifest.json")
        if manifest["format"] not in READABLE:
            raise DataError(
                f"checkpoint {root} has format {manifest['format']}; this version of Smalti reads 1 and 2",
                hint="use the version that wrote it (provenance.json names it), or start anew with name=NEW_NAME",
            )
        digest = "sha256" if manifest["format"] == 1 else "xxh3"
        return [{key: entry[key] for key in ("name", "bytes", digest)} for entry in manifest["files"]], None

    listed, reason = guarded(root, look)
    return listed or ([], reason)


def first_mismatch(root: Path, entries: list[Entry], read: Callable[[int], None] = lambda _: None) -> str | None:
    """Return why the first of these files that is damaged is so, or None. read: called with the bytes of each file."""

    def look() -> str | None:
        for entry in entries:
            mismatch = _mismatch(root, entry)
            if mismatch is not None:
                return mismatch
            read(entry["bytes"])
        return None

    mismatch, reason = guarded(root, look)
    return mismatch or reason


def wrong_size(root: Path, entries: list[Entry]) -> str | None:
    """Return why the first of these files that is missing or has another size is damaged; their bytes are not read."""

    def look() -> str | None:
        return next(filter(None, (_wrong_size(root, entry) for entry in entries)), None)

    mismatch, reason = guarded(root, look)
    return mismatch or reason


def misplaced(root: Path) -> str | None:
    """Return why a valid checkpoint is not the one that belongs there: of another step, or of another run."""
    if not is_name(root.name):
        return None
    config = root.absolute().parent.parent / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else None
    return of_another_place(read_state(root), root.name, text, str(config))


def of_another_place(state: Mapping[str, Any], name: str, config: str | None, label: str) -> str | None:
    """Return why a checkpoint with this state is not that of a name and, unless it is None, a config."""
    if (step := state.get("step", step_of(name))) != step_of(name):
        return f"it is the checkpoint of step {step}, in a folder that is named for another step"
    return None if config is None else of_another_run(state, config, label)


def of_another_run(state: Mapping[str, Any], config: str, label: str) -> str | None:
    """Return what shows that a checkpoint with this state is not of the run of this config; None for the same run.

    config: the text of the run's ``config.yaml``. label: its place. Checkpoints of earlier versions have no config, and
    are taken for those of the run, as are those whose recorded config this version cannot read.
    """
    if CONFIG not in state:
        return None
    try:
        saved = load_text(RunConfig, state[CONFIG], "the config of the checkpoint").config
    except UserError:  # of another version of Smalti, or another kind of training
        return None
    try:
        lines = other_settings(saved, load_text(RunConfig, config, label).config)
    except UserError as error:
        return f"the config of its run cannot be read: {error.message}"
    shown = "; ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else "")
    return f"it is of another run; what differs (there -> here): {shown}" if lines else None


def guarded(root: Path, look: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of ``look``, or why the files that it reads are damaged."""
    try:
        return look(), None
    except (FileNotFoundError, EOFError, KeyError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    except OSError as error:
        raise RetryableError(
            f"checkpoint {root} cannot be read: {error}",
            hint="restore the access to it, then run the same command again",
        ) from error


def _mismatch(root: Path, entry: Entry) -> str | None:
    file = root / entry["name"]
    if reason := _wrong_size(root, entry):
        return reason
    matches = sha256_file(file) == entry["sha256"] if "sha256" in entry else xxh3_file(file) == entry["xxh3"]
    return None if matches else f"{entry['name']} does not match its digest"


def _wrong_size(root: Path, entry: Entry) -> str | None:
    file = root / entry["name"]
    if not file.exists():
        return f"{entry['name']} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{entry['name']} has {file.stat().st_size} bytes; {entry['bytes']} were written"
    return None
