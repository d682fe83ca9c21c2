"""Reads the ``config.json`` of a Hugging Face folder. Without torch: plans read it too.

Guarantees: an unknown family, options that our blocks do not compute, code in the folder and quantised weights are
refused by name; no other file of the folder is opened. Local folders only.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config import families
from smalti.config.model import ModelConfig
from smalti.model.json_file import read_object
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Json

FAMILIES: dict[str, Family] = {name: import_module(f"smalti.model.zoo.{name}").FAMILY for name in families.FAMILIES}
"""The families by ``model_type``, which is the module's name in ``smalti/model/zoo`` and the key in
``smalti/config/families.py``."""

FORMATS = ("F32", "F16", "BF16")
"""Dtypes of weights that can be read and written, by their names in safetensors."""


class FolderConfig(NamedTuple):
    """A folder whose ``config.json`` has been read."""

    path: Path
    raw: Json
    """``config.json``."""
    family: Family
    config: ModelConfig


def open_config(folder: str | Path) -> FolderConfig:
    """Read a folder's ``config.json``; UserError or DataError names what is not supported."""
    if not store.is_local(folder):
        raise UserError(f"{folder} is not a local folder", hint="copy the model to a local disk first")
    path = Path(folder)
    if not (path / "config.json").exists():
        raise DataError(f"{path} has no config.json, so it holds no (complete) model")
    raw = read_object(inside(path, "config.json"))
    family = _family(path, raw)
    try:
        return FolderConfig(path, raw, family, _with_scores(raw, family, family.config_from_huggingface(raw)))
    except DataError as error:
        raise DataError(f"{path}: {error.message}", allowed=error.allowed, hint=error.hint) from error


def classifier(family: Family) -> str:
    """Return the name of the family's class with scores in transformers."""
    return family.architecture.replace("ForCausalLM", "ForSequenceClassification")


def can_score(family: Family) -> bool:
    """Return whether the family has reward models."""
    return any(name == family.model_type and "num_labels" in row.free for name, row in families.FAMILIES.items())


def identity(family: Family, config: ModelConfig) -> Json:
    """Return the keys of ``config.json`` that name the class in transformers."""
    if not config.num_labels:
        return {"architectures": [family.architecture], "model_type": family.model_type}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [classifier(family)], "model_type": family.model_type, **labels}


def _with_scores(raw: Json, family: Family, config: ModelConfig) -> ModelConfig:
    """Return the config of a reward model where ``architectures`` names one. Raises DataError for several labels."""
    if not can_score(family) or raw.get("architectures") != [classifier(family)]:
        return config
    labels = raw.get("num_labels", len(raw.get("id2label", {0: "", 1: ""})))  # transformers' default is two
    if labels != 1:
        raise DataError(f"config.json is of a {classifier(family)} with {labels} labels", allowed="one: a reward model")
    return config.model_copy(update={"num_labels": 1})


def inside(folder: Path, name: Any) -> Path:
    """Return the path of the file ``name`` in a folder; DataError if it is outside the folder.

    Symbolic links may point to files of the folder, and to the blobs next to a snapshot in the hub's cache.
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
    allowed = [family.architecture, classifier(family)] if can_score(family) else [family.architecture]
    if classes is not None and str(classes).casefold() not in {str([name]).casefold() for name in allowed}:
        raise DataError(f"{folder}/config.json has architectures={classes!r}", allowed=" or ".join(allowed))
    if not _is_own_code(raw.get("auto_map"), kind):
        raise DataError(
            f"{folder}/config.json has auto_map={raw['auto_map']!r}: the model uses code from its folder, which is "
            "never run",
            allowed=f"classes of modeling_{kind}, which Smalti implements itself",
            hint=f"if it is a plain {family.architecture}, delete auto_map from config.json",
        )
    if raw.get("quantization_config") is not None:
        raise DataError(
            f"{folder}/config.json has quantization_config: quantised weights are not supported",
            allowed=f"absent; weights in {', '.join(FORMATS)}",
            hint="use the model before quantisation",
        )
    return family


def _is_own_code(auto_map: Any, kind: str) -> bool:
    """Return True if the folder's code is that of its family, as in MPT's and DBRX's folders; it is never run."""
    if auto_map is None:
        return True
    family_class = re.compile(rf"(.*--)?modeling_{kind}\.\w+")
    return isinstance(auto_map, dict) and all(
        isinstance(name, str) and family_class.fullmatch(name)
        for key, name in auto_map.items()
        if key.startswith("AutoModel")
    )
