"""Models as Hugging Face folders: ``load`` and ``save`` (stable names), and what stands behind them.

A folder holds ``config.json``, safetensors in one file or in shards with an index, and what belongs to the model beside
its weights: tokenizer, chat template, ``generation_config.json``.

Promises: a folder is checked whole before a model is built from it (``source.py``); a round trip gives the same bytes.
Writing holds one rule's tensors at a time. A folder without ``config.json`` holds no model, and ``config.json`` is
written last, so an interrupted save is never read as a model; a save that fails leaves the model that was there.
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
from smalti.model.described import FAMILIES
from smalti.model.source import (
    INDEX,
    WHOLE,
    Source,
    check_tensors,
    companions,
    open_source,
    skeleton,
    theirs,
)
from smalti.model.tensor_files import DTYPES, write_tensors
from smalti.model.zoo.family import Family, Rule, Weights
from smalti.model.zoo.fields import Json

__all__ = [
    "FAMILIES",
    "Beside",
    "LanguageModel",
    "Source",
    "companions",
    "load",
    "load_folder",
    "open_source",
    "save",
    "save_folder",
]

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Beside:
    """What a folder holds beside the weights and the shape of the model."""

    tokens: Json = field(default_factory=lambda: dict.fromkeys(_TOKENS[:2]))
    """Ids of special tokens for ``config.json``; what is absent takes the family's default in transformers."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, chat templates, ``generation_config.json``, by name."""

    @classmethod
    def of_source(cls, source: Source) -> "Beside":
        """What lies in a folder that is read."""
        return cls({name: source.raw[name] for name in _TOKENS if name in source.raw}, companions(source.folder))

    @classmethod
    def of_documents(cls, eod_id: int, generation: Json | None = None) -> "Beside":
        """For a model whose documents end with ``eod_id``: it begins a text too, as it stood before every document.

        generation: how ``generate`` shall sample, as in ``generation_config.json``; tokens that end an answer there
        (of a chat template, say) go on to end one.
        """
        tokens = dict.fromkeys(_TOKENS[:2], eod_id)
        before = (generation or {}).get("eos_token_id")
        kept = before if isinstance(before, list) else [] if before is None else [before]
        ends = list(dict.fromkeys([eod_id, *kept]))
        described = (generation or {"_from_model_config": True}) | tokens
        described |= {"eos_token_id": ends if len(ends) > 1 else eod_id}
        return cls(tokens, {_GENERATION: (json.dumps(described, indent=2) + "\n").encode()})


class LanguageModel(nn.Module):
    """A decoder as a plain function of token ids, with what its folder holds beside the weights."""

    def __init__(self, decoder: Decoder, beside: Beside | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.beside = beside or Beside()

    @property
    def config(self) -> ModelConfig:
        """Shape and options of the model."""
        return self.decoder.config

    def forward(self, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, V]; positions and documents, both [B, S], as in ``Decoder.forward``."""
        logits_BSV: Tensor = self.decoder(ids, positions, documents).value
        return logits_BSV


def load(folder: str | Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model in a Hugging Face folder, on the CPU, in eval mode.

    dtype: that of all weights; absent, each keeps that of the files. Tokenizer, chat template and generation config are
    kept for ``save``. UserError or DataError names file and tensor where a folder is damaged, hostile or of a model
    that we do not compute; nothing has been allocated then.
    """
    source = open_source(folder)
    return LanguageModel(_decoder(source, dtype), Beside.of_source(source))


def save(
    module: LanguageModel | Decoder,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers reads without remote code, and that ``load`` gives back to the bit.

    dtype: that of all weights in the files; absent, each keeps its own. A model that lies in the folder already is
    replaced once the new one is on the disk; other files stay. Raises UserError for a family that has no such form.
    """
    decoder, beside = (module.decoder, module.beside) if isinstance(module, LanguageModel) else (module, Beside())
    _write_folder(folder, decoder.config, decoder.state_dict(), beside, dtype, max_shard_bytes)


def load_folder(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder alone, as ``load`` gives it."""
    return _decoder(open_source(folder), dtype)


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
    """As ``save``, for weights by our names; each is asked for once, so the mapping may read them from a disk.

    eod_id, the end-of-document token, is written as both begin- and end-of-sequence, as it stands around documents.
    """
    _write_folder(folder, config, weights, Beside.of_documents(eod_id, generation), dtype, max_shard_bytes)


def _decoder(source: Source, dtype: torch.dtype | None) -> Decoder:
    _check_dtype(dtype)
    source.check_values()
    with torch.device("meta"):
        model = Decoder(source.config)
    model.load_state_dict(dict(source.tensors(dtype)), strict=True, assign=True)
    return model.eval()


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise UserError(f"dtype={dtype} is not one of weights", allowed=", ".join(map(str, DTYPES.values())))


# ---- writing --------------------------------------------------------------------------------------------------------


def _write_folder(
    folder: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    beside: Beside,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    if not store.is_local(folder):
        raise UserError(f"{folder} is not a local folder", hint="write to a local disk, then copy it")
    if config.family not in FAMILIES:
        raise UserError(
            f"family '{config.family}' has no form in Hugging Face folders",
            allowed=", ".join(FAMILIES),
            hint="train with one of these as model.family to export",
        )
    _check_dtype(dtype)
    family, target = FAMILIES[config.family], Path(folder)
    rules, wanted = family.rules(config), skeleton(config)
    check_tensors("the state dict", dict.fromkeys(wanted, ()), dict.fromkeys(weights, ()))
    planned = {name: tensor.to(dtype or weights[name].dtype) for name, tensor in wanted.items()}
    with writing(target):
        _write_and_swap(target, family, config, rules, weights, planned, beside, max_shard_bytes)


def _write_and_swap(
    target: Path,
    family: Family,
    config: ModelConfig,
    rules: list[Rule],
    weights: Mapping[str, Tensor],
    planned: Weights,
    beside: Beside,
    max_shard_bytes: int,
) -> None:
    store.make_folder(target)
    staging = target / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _write_shards(staging, theirs(rules, planned), _converted(rules, weights, planned), max_shard_bytes)
        for name, data in beside.files.items():
            store.write_bytes(staging / name, data)
        described = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.config_to_huggingface(config),
            **beside.tokens,
            "use_cache": True,
            "dtype": str(planned["embed.weight"].dtype).removeprefix("torch."),
        }
        store.write_json(staging / "config.json", described)
        _swap(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _converted(rules: list[Rule], weights: Mapping[str, Tensor], planned: Weights) -> Iterator[tuple[str, Tensor]]:
    """(their name, tensor), rule by rule; one rule's tensors are alive at a time."""
    for rule in rules:
        shapes = {name: tuple(planned[name].shape) for name in rule.ours}
        ours = [weights[name].detach() for name in rule.ours]
        found = {name: tuple(tensor.shape) for name, tensor in zip(rule.ours, ours, strict=True)}
        check_tensors("the state dict", shapes, found)
        ours = [tensor.to("cpu", planned[name].dtype) for name, tensor in zip(rule.ours, ours, strict=True)]
        converted = rule.to_theirs(ours)
        del ours
        yield from zip(rule.theirs, converted, strict=True)
        del converted


def _write_shards(folder: Path, planned: Weights, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """One file, or numbered shards of at most ``max_shard_bytes`` (a larger tensor gets one alone) and an index."""
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
    """Put the staged files in place of an older model: its config goes first, the new one comes last."""
    (target / "config.json").unlink(missing_ok=True)
    for path in target.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    for file in [*(file for file in files if file.name != "config.json"), Path("config.json")]:
        store.make_folder((target / file).parent)
        os.replace(staging / file, target / file)
