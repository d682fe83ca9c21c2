"""What the ``config.json`` of a Hugging Face folder says of its model. Without torch: plans read it too.

Guarantees: a family that is not known, options that our blocks do not compute, code that a folder brings and quantised
weights are refused by name; nothing else of the folder is opened. Local folders only.
"""

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config import families
from smalti.config.model import ModelConfig
from smalti.model.json_file import read_object
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Json

FAMILIES: dict[str, Family] = {name: import_module(f"smalti.model.zoo.{name}").FAMILY for name in families.FAMILIES}
"""By ``model_type``, which is the name of the module in ``smalti/model/zoo`` and in ``smalti/config/families.py``."""

FORMATS = ("F32", "F16", "BF16")
"""Number formats of weights that we read and write, by their names in safetensors."""


@dataclass(frozen=True)
class Described:
    """A folder whose ``config.json`` has been read."""

    folder: Path
    raw: Json
    """``config.json``."""
    family: Family
    config: ModelConfig


def open_config(folder: str | Path) -> Described:
    """Read a folder's ``config.json``; UserError or DataError says what in it we do not compute."""
    if not store.is_local(folder):
        raise UserError(f"{folder} is not a local folder", hint="copy the model to a local disk first")
    path = Path(folder)
    if not (path / "config.json").exists():
        raise DataError(f"{path} has no config.json, so it holds no (complete) model")
    raw = read_object(inside(path, "config.json"))
    family = _family(path, raw)
    try:
        return Described(path, raw, family, family.config_from_huggingface(raw))
    except DataError as error:
        raise DataError(f"{path}: {error.message}", allowed=error.allowed, hint=error.hint) from error


def inside(folder: Path, name: Any) -> Path:
    """The file ``name`` of a folder; DataError for a name that leads out of it.

    Symbolic links may lead to files of the folder, and to the blobs beside a snapshot in the hub's cache.
    """
    path = folder / name
    allowed = [folder.resolve()]
    if allowed[0].parent.name == "snapshots":
        allowed.append(allowed[0].parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(root) for root in allowed):
        raise DataError(f"{path} leads out of the folder, to {path.resolve()}", allowed="files of the folder itself")
    return path


def _family(folder: Path, raw: Json) -> Family:
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise DataError(f"{folder}/config.json has model_type={kind!r}", allowed=", ".join(FAMILIES))
    family = FAMILIES[kind]
    if classes is not None and str(classes).casefold() != str([family.architecture]).casefold():
        raise DataError(f"{folder}/config.json has architectures={classes!r}", allowed=family.architecture)
    if not _is_own_code(raw.get("auto_map"), kind):
        raise DataError(
            f"{folder}/config.json has auto_map={raw['auto_map']!r}: the model wants code of its folder, and none is "
            "ever run",
            allowed=f"models of modeling_{kind}, which are computed here",
            hint=f"if it is a plain {family.architecture}, delete auto_map from config.json",
        )
    if raw.get("quantization_config") is not None:
        raise DataError(
            f"{folder}/config.json has quantization_config: quantised weights are not read",
            allowed=f"absent; weights in {', '.join(FORMATS)}",
            hint="bring the model as it was before it was quantised",
        )
    return family


def _is_own_code(auto_map: Any, kind: str) -> bool:
    """Whether the code that a folder brings is that of its family, as in MPT's and DBRX's; it is never run."""
    if auto_map is None:
        return True
    own = re.compile(rf"(.*--)?modeling_{kind}\.\w+")
    return isinstance(auto_map, dict) and all(
        isinstance(name, str) and own.fullmatch(name) for key, name in auto_map.items() if key.startswith("AutoModel")
    )
