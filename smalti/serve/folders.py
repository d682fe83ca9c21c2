"""Finds an exported model by Hugging Face folder, run, or reference to the model registry. Loads nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.track.registry.facts import RECORD
from smalti.track.registry.reference import is_reference
from smalti.track.registry.versions import resolve as resolve_reference
from smalti.track.run import resolve, runs_beside


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model, and the folder of its run if the model is that run's ``export/``."""

    folder: str
    run_folder: str | None
    version: str | None = None
    """``NAME/NUMBER`` of the model registry, if it was given by a reference."""

    @property
    def record(self) -> dict[str, Any]:
        """Return the record that ``smalti export`` wrote (run, step, dtype ...); empty for a folder from elsewhere."""
        path = store.join(self.folder, RECORD)
        return dict(store.read_json(path)) if store.exists(path) else {}

    @property
    def name(self) -> str:
        """Return the run's name from the record of the export, else the folder's name."""
        return str(self.record.get("run") or Path(self.folder).resolve().name)

    def special_ids(self) -> tuple[int | None, frozenset[int]]:
        """Return the bos and eos ids of config.json and generation_config.json (eos may be a list there).

        The folder must have passed ``open_source``.
        """
        begin: int | None = None
        ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            path = store.join(self.folder, name)
            values = store.read_json(path) if store.exists(path) else {}
            if values.get("bos_token_id") is not None:
                begin = values["bos_token_id"]
            eos = values.get("eos_token_id")
            ends |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        return begin, frozenset(ends)


def find(name_or_path: str, *, runs: str = "runs") -> ModelFolder:
    """Find the model of ``runs/demo`` (its ``export/``), of ``demo`` (the same), of a Hugging Face folder, or of
    ``models:/demo@production``.

    Raises UserError with the command to type where a run has no export yet, DataError where no folder exists, or it is
    not what was registered.
    """
    if is_reference(name_or_path):
        return _registered(name_or_path)
    path = resolve(name_or_path, runs=runs)
    if (path / "config.json").is_file():
        return ModelFolder(str(path), None)
    if (path / "config.yaml").is_file():
        if not (path / "export" / "config.json").is_file():
            has_adapter = (path / "adapter").is_dir()
            merge = f" --merge; or smalti chat, smalti serve BASE --adapter {path}" if has_adapter else ""
            raise UserError(f"the run {path} has no exported model yet", hint=f"smalti export {path}{merge}")
        return ModelFolder(str(path / "export"), str(path))
    if not path.exists():
        raise DataError(
            f"there is no folder '{name_or_path}', and no run of that name in {runs}/",
            allowed="a run folder (with config.yaml), a Hugging Face folder (with config.json), or models:/NAME",
            hint=runs_beside(path),
        )
    is_checkpoint = path.absolute().parent.name == "checkpoints" and path.name.startswith("step-")
    raise DataError(
        f"{path} is {'a checkpoint' if is_checkpoint else 'neither a run nor a model'}",
        allowed="a run folder (with config.yaml) or a Hugging Face folder (with config.json and safetensors)",
        hint=f"smalti export {path.parent.parent} --step {path.name.removeprefix('step-').lstrip('0')} --output FOLDER"
        if is_checkpoint
        else None,
    )


def find_adapter(name_or_path: str) -> str:
    """Return the folder of an adapter given by a reference to the model registry; any other path unchanged."""
    if not is_reference(name_or_path):
        return name_or_path
    version = resolve_reference(name_or_path)
    if version.kind != "adapter":
        raise UserError(f"models:/{version.label} is a {version.kind}", allowed="the version of an adapter")
    return version.path


def _registered(reference: str) -> ModelFolder:
    version = resolve_reference(reference)
    if version.kind == "checkpoint":
        raise UserError(
            f"models:/{version.label} is a checkpoint",
            allowed="the version of an exported model",
            hint=f"smalti export models:/{version.label} --output FOLDER",
        )
    if version.kind == "adapter":
        raise UserError(
            f"models:/{version.label} is an adapter",
            allowed="the version of a whole model",
            hint=f"smalti serve BASE --adapter {version.name}=models:/{version.label}",
        )
    run = Path(version.path).parent
    is_of_run = Path(version.path).name == "export" and (run / "config.yaml").is_file()
    return ModelFolder(version.path, str(run) if is_of_run else None, version.label)
