"""Adapters for the engine: read from folders in PEFT's format, and checked against the base."""

from collections.abc import Mapping
from pathlib import Path

from smalti.base import log, store
from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.distributed.checkpoint.base import identity, require_same
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter
from smalti.serve.folders import RECORD


def parse(options: list[str], base_name: str) -> dict[str, str]:
    """Return name -> folder of options ``NAME=FOLDER``; names must differ from each other and from the base's."""
    named: dict[str, str] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals or not name or not folder:
            raise UserError(
                f"--adapter {option}", allowed="NAME=FOLDER", hint=f"--adapter {Path(option).name or 'mine'}={option}"
            )
        if name in named or name == base_name:
            raise UserError(f"--adapter {option}: '{name}' is already the name of a model", allowed="another name")
        named[name] = folder
    return named


def load(folders: Mapping[str, str], base: str | Path, model: ModelConfig) -> dict[str, Adapter]:
    """Read the adapters by name. Raises DataError for one that does not fit, or was trained beside another base.

    The latter is known where a record of ``smalti export`` names the digest of a base folder.
    """
    adapters = {}
    base_identity: dict[str, str] | None = None
    for name, path in folders.items():
        folder = _folder(path)
        adapters[name] = peft.load(folder, model)
        record = store.read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
        recorded = record.get("base", {"kind": "unknown"})
        if recorded["kind"] == "folder":
            base_identity = base_identity or identity(base, str(base))
            require_same(recorded, base_identity, str(folder))
        else:
            log.get("serve").warning("it is not checked that %s was trained beside %s: no record says so", folder, base)
    return adapters


def _folder(name: str) -> Path:
    """Return the folder of an adapter, which may be given by its run."""
    path = Path(name)
    return path if peft.is_adapter_folder(path) or not peft.is_adapter_folder(path / "adapter") else path / "adapter"
