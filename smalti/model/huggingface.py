"""Load and save models as Hugging Face folders: ``load`` and ``save`` (stable names), and functions for decoders alone.

Guarantees: a folder is checked completely before a model is built from it (``huggingface_weights.py``); saving and
loading gives the same bytes; writing holds one rule's tensors at a time. ``config.json`` is written last, so an
interrupted save is never read as a model; a save that fails before the files are moved leaves the old model in place.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from smalti.base import store
from smalti.base.disk import writing
from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.huggingface_config import FAMILIES, identity
from smalti.model.huggingface_weights import (
    INDEX,
    WHOLE,
    ModelFolder,
    check_tensors,
    companion_files,
    meta_weights,
    open_folder,
    to_huggingface,
)
from smalti.model.tensor_files import DTYPES, write_tensors
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Json
from smalti.model.zoo.tensor_names import Rule, Weights

__all__ = [
    "FAMILIES",
    "Companions",
    "LanguageModel",
    "ModelFolder",
    "companion_files",
    "load",
    "load_folder",
    "open_folder",
    "save",
    "save_folder",
]

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Companions:
    """The tokens and files that a folder holds besides config and weights."""

    tokens: Json = field(default_factory=lambda: dict.fromkeys(_TOKENS[:2]))
    """Ids of special tokens for ``config.json``; for an absent one transformers uses the family's default."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, chat templates, ``generation_config.json``, by name."""

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> "Companions":
        """Read those of an opened folder."""
        return cls({name: folder.raw[name] for name in _TOKENS if name in folder.raw}, companion_files(folder.path))

    @classmethod
    def of_documents(cls, eod_id: int, generation: Json | None = None) -> "Companions":
        """Return those of a model whose documents end with ``eod_id``, which also begins a text, as in training.

        generation: sampling options, as in ``generation_config.json``; its end-of-sequence tokens (those of a chat
        template, for example) are kept.
        """
        tokens = dict.fromkeys(_TOKENS[:2], eod_id)
        old_end = (generation or {}).get("eos_token_id")
        old_ends = old_end if isinstance(old_end, list) else [] if old_end is None else [old_end]
        ends = list(dict.fromkeys([eod_id, *old_ends]))
        content = (generation or {"_from_model_config": True}) | tokens
        content |= {"eos_token_id": ends if len(ends) > 1 else eod_id}
        return cls(tokens, {_GENERATION: (json.dumps(content, indent=2) + "\n").encode()})


class LanguageModel(nn.Module):
    """A decoder as a plain function of token ids, with the companion files of its folder."""

    def __init__(self, decoder: Decoder, companions: Companions | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.companions = companions or Companions()

    @property
    def config(self) -> ModelConfig:
        """Shape and options of the model."""
        return self.decoder.config

    def forward(self, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, V]; positions and documents, both [B, S], as in ``Decoder.forward``."""
        logits_BSV: Tensor = self.decoder(ids, positions, documents).value
        return logits_BSV


def load(folder: str | Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """Load a Hugging Face folder: the model is on the CPU, in eval mode.

    dtype: dtype of all weights; None: as in the files. Tokenizer, chat template and generation config are kept for
    ``save``. Raises UserError or DataError, which names file and tensor, if the folder is damaged, hostile or of a
    model that is not supported; nothing has been allocated by then.
    """
    opened = open_folder(folder)
    return LanguageModel(_decoder(opened, dtype), Companions.of_folder(opened))


def save(
    module: LanguageModel | Decoder,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers reads without remote code, and that ``load`` reads bit for bit.

    dtype: dtype of all weights in the files; None: each keeps its own. A model that is already in the folder is
    replaced once the new one is on the disk; other files stay. Raises UserError for a family without a Hugging Face
    format.
    """
    model = module if isinstance(module, LanguageModel) else LanguageModel(module)
    _write_folder(folder, model.config, model.decoder.state_dict(), model.companions, dtype, max_shard_bytes)


def load_folder(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """Load the decoder alone; as ``load`` otherwise."""
    return _decoder(open_folder(folder), dtype)


def save_folder(
    folder: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    eod_id: int,
    generation: Json | None = None,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Save weights by our names, as ``save`` does; each is read once, so the mapping may load them from a disk.

    eod_id: the end-of-document token, written as both begin- and end-of-sequence, because it is before and after every
    document.
    """
    _write_folder(folder, config, weights, Companions.of_documents(eod_id, generation), dtype, max_shard_bytes)


def _decoder(folder: ModelFolder, dtype: torch.dtype | None) -> Decoder:
    _check_dtype(dtype)
    folder.check_values()
    with torch.device("meta"):
        model = Decoder(folder.config)
    model.load_state_dict(dict(folder.tensors(dtype)), strict=True, assign=True)
    return model.eval()


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise UserError(f"dtype={dtype} is not supported for weights", allowed=", ".join(map(str, DTYPES.values())))


# ---- writing --------------------------------------------------------------------------------------------------------


def _write_folder(
    folder: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    companions: Companions,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    if not store.is_local(folder):
        raise UserError(f"{folder} is not a local folder", hint="write to a local disk, then copy it")
    if config.family not in FAMILIES:
        raise UserError(
            f"family '{config.family}' has no Hugging Face format",
            allowed=", ".join(FAMILIES),
            hint="train with one of these as model.family to export",
        )
    _check_dtype(dtype)
    family, target = FAMILIES[config.family], Path(folder)
    rules, wanted = family.rules(config), meta_weights(config)
    check_tensors("the state dict", dict.fromkeys(wanted, ()), dict.fromkeys(weights, ()))
    planned = {name: tensor.to(dtype or weights[name].dtype) for name, tensor in wanted.items()}
    with writing(target):
        _write_and_swap(target, family, config, rules, weights, planned, companions, max_shard_bytes)


def _write_and_swap(
    target: Path,
    family: Family,
    config: ModelConfig,
    rules: list[Rule],
    weights: Mapping[str, Tensor],
    planned: Weights,
    companions: Companions,
    max_shard_bytes: int,
) -> None:
    store.make_folder(target)
    staging = target / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _write_shards(staging, to_huggingface(rules, planned), _converted(rules, weights, planned), max_shard_bytes)
        for name, data in companions.files.items():
            store.write_bytes(staging / name, data)
        content = {
            **identity(family, config),
            **family.config_to_huggingface(config),
            **companions.tokens,
            "use_cache": True,
            "dtype": str(planned["embed.weight"].dtype).removeprefix("torch."),
        }
        store.write_json(staging / "config.json", content)
        _swap(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _converted(rules: list[Rule], weights: Mapping[str, Tensor], planned: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face's name, tensor), rule by rule; only one rule's tensors are in memory at a time."""
    for rule in rules:
        shapes = {name: tuple(planned[name].shape) for name in rule.ours}
        ours = [weights[name].detach() for name in rule.ours]
        actual = {name: tuple(tensor.shape) for name, tensor in zip(rule.ours, ours, strict=True)}
        check_tensors("the state dict", shapes, actual)
        ours = [tensor.to("cpu", planned[name].dtype) for name, tensor in zip(rule.ours, ours, strict=True)]
        converted = rule.to_theirs(ours)
        del ours
        yield from zip(rule.theirs, converted, strict=True)
        del converted


def _write_shards(folder: Path, planned: Weights, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write one file, or an index and shards of at most ``max_shard_bytes`` (a larger tensor is a shard by itself)."""
    shards: list[Weights] = [{}]
    used_bytes = 0
    for name, tensor in planned.items():
        if shards[-1] and used_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / WHOLE, planned, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard, tensors)
        weight_map |= dict.fromkeys(shard, file)
    total_bytes = sum(tensor.nbytes for tensor in planned.values())
    store.write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _swap(staging: Path, target: Path) -> None:
    """Replace an older model by the staged files: its config is deleted first, the new one is moved last."""
    (target / "config.json").unlink(missing_ok=True)
    for path in target.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    for file in [*(file for file in files if file.name != "config.json"), Path("config.json")]:
        store.make_folder((target / file).parent)
        os.replace(staging / file, target / file)
