"""Reads and writes adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names are those of the family's tensors in transformers. Experts are written one by one, as transformers stores them;
read are also the stacked ones of PEFT with transformers 5. Query, key and value of a family that joins them (DBRX,
MPT) are written as one adapter of the joined matrix, block by block, which computes the same. The score of a reward
model is one of the ``modules_to_save``.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.adapter import AdapterConfig, matrices
from smalti.config.model import ModelConfig
from smalti.model.adapters.adapter import Adapter
from smalti.model.blocks.embed import SCORES
from smalti.model.huggingface_config import FAMILIES
from smalti.model.huggingface_weights import meta_weights
from smalti.model.json_file import read_object
from smalti.model.tensor_files import TensorFile, write_tensors
from smalti.model.zoo.tensor_names import Rule

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}
"""Fields of which only these values are supported."""
_HEADS = ("score", "classifier")
"""``modules_to_save`` of an adapter for sequence classification, as PEFT writes them; a decoder has the first."""


def is_adapter_folder(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's format."""
    return (Path(folder) / CONFIG).is_file()


def why_no_format(model: ModelConfig, config: AdapterConfig) -> str | None:
    """Return why PEFT has no format for the adapters of ``config``; None where it has one."""
    names = {f"blocks.{layer}.{name}" for layer, adapted in config.paths(model).items() for name in adapted}
    for rule in _rules(model):
        name = rule.ours[0].removesuffix(".weight")
        if name in names and ".mlp.experts." in name and len(rule.theirs) == 1:
            return f"PEFT has no format for adapters of '{name}': family {model.family} keeps all experts in one matrix"
    return None


# ---- writing --------------------------------------------------------------------------------------------------------


def save(folder: str | Path, adapter: Adapter, model: ModelConfig, config: AdapterConfig, base: str) -> None:
    """Write an adapter whose ranks are all that of ``config``; ``base`` is the name of its base model.

    UserError for a family without a Hugging Face format, and for the experts of DBRX, which PEFT cannot adapt.
    """
    reason = why_no_format(model, config)
    if reason is not None:
        raise UserError(reason, allowed="--merge, or adapters of other matrices", hint="smalti export RUN --merge")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    weights = meta_weights(model)
    for rule in _rules(model):
        for module, a, b in _peft_tensors(rule, adapter, weights):
            tensors |= {f"{_PREFIX}{module}.lora_A.weight": a, f"{_PREFIX}{module}.lora_B.weight": b}
            if a.shape[0] != config.rank:
                ranks[module.rpartition(".")[2]] = a.shape[0]
    tensors |= {f"{_PREFIX}{name}": weight for name, weight in adapter.whole.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(Path(folder) / WEIGHTS, tensors, iter(tensors.items()))
    store.write_json(Path(folder) / CONFIG, _config(config, model, base, tensors, ranks))


def _peft_tensors(rule: Rule, adapter: Adapter, weights: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return (module, A, B) of the tensors of one rule that have an adapter."""
    pairs = [adapter.pairs.get(name) for name in rule.ours]
    modules = [name.removesuffix(".weight") for name in rule.theirs]
    first = next((pair for pair in pairs if pair is not None), None)
    if first is None:
        return []
    if len(rule.ours) > 1:
        blocks = [
            weights[name].new_empty((weights[name].shape[0], 0), device="cpu") if pair is None else pair[1]
            for name, pair in zip(rule.ours, pairs, strict=True)
        ]
        return [(modules[0], torch.cat([pair[0] for pair in pairs if pair is not None]), torch.block_diag(*blocks))]
    a, b = first
    return list(zip(modules, a, b, strict=True)) if a.ndim == 3 else [(modules[0], a, b)]


def _config(
    config: AdapterConfig, model: ModelConfig, base: str, tensors: dict[str, Tensor], ranks: dict[str, int]
) -> dict[str, Any]:
    modules = [name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]
    layers, pattern = None, None
    if config.layers is not None:
        layers = list(range(config.layers[0], config.layers[1] + 1))
        pattern = modules[0].partition(f".{layers[0]}.")[0].rpartition(".")[2]
    grown = {leaf: rank / config.rank for leaf, rank in ranks.items()}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "layers_to_transform": layers,
        "layers_pattern": pattern,
        "rank_pattern": ranks,
        # the scale of a matrix stays that of the others
        "alpha_pattern": {
            leaf: config.alpha * (math.sqrt(times) if config.rslora else times) for leaf, times in grown.items()
        },
        "modules_to_save": [SCORES.removesuffix(".weight")] if model.num_labels else None,
    }


# ---- reading --------------------------------------------------------------------------------------------------------


def load(folder: str | Path, model: ModelConfig) -> Adapter:
    """Read an adapter for a model of this config. DataError for one that does not fit, or of another kind than LoRA."""
    path = Path(folder)
    if not is_adapter_folder(path):
        raise DataError(
            f"{path} has no {CONFIG}",
            allowed="a folder of an adapter in PEFT's format",
            hint=f"its folder {path / 'adapter'} has one" if is_adapter_folder(path / "adapter") else None,
        )
    raw = read_object(path / CONFIG)
    for key, allowed in _PLAIN.items():
        if raw.get(key, allowed[-1]) not in allowed:
            raise DataError(f"{path / CONFIG} has {key}={raw[key]!r}", allowed=f"{key}={allowed[0]!r}, plain LoRA")
    saved = set(raw.get("modules_to_save") or []) - set(_HEADS if model.num_labels else ())
    if saved:
        raise DataError(
            f"{path / CONFIG} has modules_to_save={sorted(saved)}, weights that were trained whole",
            allowed="no others than the matrices of adapters; for a reward model its score",
            hint="a reward model generates no text; 'smalti export RUN --merge' writes it whole"
            if saved <= set(_HEADS)
            else None,
        )
    reader = _Reader(path, raw)
    weights = meta_weights(model)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for rule in _rules(model):
        pairs |= reader.of_rule(rule, weights)
    whole = reader.whole(SCORES, weights)
    reader.finish(model)
    adapter = Adapter(reader.scale, pairs, whole)
    adapter.check(weights, str(path))
    return adapter


class _Reader:
    """The tensors of a folder, each taken once."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self._path, self._raw = path, raw
        self._file = TensorFile.open(path / WEIGHTS)
        self._left = set(self._file.entries)
        self.scale = self._scale("")

    def of_rule(self, rule: Rule, weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the pairs of the weights of one rule."""
        modules = [name.removesuffix(".weight") for name in rule.theirs]
        if len(modules) > 1:
            pairs = [pair for pair in map(self._take, modules) if pair is not None]
            if pairs and len(pairs) < len(modules):
                raise DataError(f"{self._path}: {len(modules) - len(pairs)} experts have no adapter of {modules[0]}")
            if pairs:
                a, b = (torch.stack(parts) for parts in zip(*pairs, strict=True))
                return {rule.ours[0]: (a, b)}
            return self._stacked(rule.ours[0], modules[0], weights[rule.ours[0]])
        pair = self._take(modules[0])
        if pair is None:
            return {}
        parts = pair[1].split([weights[name].shape[0] for name in rule.ours]) if len(rule.ours) > 1 else [pair[1]]
        every = {name: (pair[0], part) for name, part in zip(rule.ours, parts, strict=True)}
        return {name: (a, b) for name, (a, b) in every.items() if b.any()} or every

    def _stacked(self, ours: str, first: str, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the pair of stacked experts, which transformers 5 joins to ``gate_up_proj`` and ``down_proj``.

        PEFT nests the adapters of both in one module, so that only their shapes tell which is which.
        """
        block, (experts, inner, hidden) = first.rpartition(".experts.")[0], weight.shape
        module = f"{block.rpartition('.')[0]}.mlp.experts"  # as all families have it there
        is_down = ours.endswith("down_proj")
        shape = (inner, hidden) if is_down else (hidden, 2 * inner)
        for name in (module, f"{module}.base_layer"):
            entry_a, entry_b = (self._file.entries.get(f"{_PREFIX}{name}.lora_{part}.weight") for part in "AB")
            if entry_a is None or entry_b is None or (entry_a.shape[1], entry_b.shape[0]) != shape:
                continue
            pair = self._take(name, "experts.down_proj" if is_down else "experts.gate_up_proj")
            assert pair is not None
            a, b = pair[0].unflatten(0, (experts, -1)), pair[1].unflatten(1, (-1, experts)).permute(2, 0, 1)
            half = {"gate_proj": b[:, :inner], "up_proj": b[:, inner:]}
            return {ours: (a, half.get(ours.rpartition(".")[2], b))}
        return {}

    def _take(self, module: str, scaled_as: str | None = None) -> tuple[Tensor, Tensor] | None:
        """Return A and B of a module, B such that the common scale applies; None if it has no adapter."""
        a_name, b_name = (f"{_PREFIX}{module}.lora_{part}.weight" for part in "AB")
        if a_name not in self._file.entries or b_name not in self._file.entries:
            return None
        self._left -= {a_name, b_name}
        a, b = self._file.read(a_name).float(), self._file.read(b_name).float()
        scale = self._scale(scaled_as or module)
        return a, b if scale == self.scale else b * (scale / self.scale)

    def _scale(self, module: str) -> float:
        """Return the scale of a module as PEFT computes it; patterns are regular expressions of the name's end."""
        ranks, alphas = (self._raw.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
        values = []
        for patterns, default in ((ranks, self._raw["r"]), (alphas, self._raw["lora_alpha"])):
            key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
            values.append(float(default if key is None else patterns[key]))
        return values[1] / (math.sqrt(values[0]) if self._raw.get("use_rslora") else values[0])

    def whole(self, name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a weight that was trained whole, by its name; empty if the folder or the model lacks it."""
        theirs = f"{_PREFIX}{name}"
        if name not in weights or theirs not in self._left:
            return {}
        self._left.remove(theirs)
        weight, wanted = self._file.read(theirs).float(), weights[name].shape
        if weight.shape != wanted:
            raise DataError(f"{self._path / WEIGHTS}: {theirs} is {list(weight.shape)}", allowed=f"{list(wanted)}")
        return {name: weight}

    def finish(self, model: ModelConfig) -> None:
        """Raise DataError for tensors that belong to no matrix that can have an adapter."""
        if self._left:
            names = sorted({name for layer in range(model.num_hidden_layers) for name in matrices(model, layer)})
            raise DataError(
                f"{self._path / WEIGHTS} has {len(self._left)} tensors that this model has no place for, such as "
                f"{min(self._left)}",
                allowed=f"adapters of {', '.join(names)}",
            )


def _rules(model: ModelConfig) -> list[Rule]:
    """Return the rules of the matrices that can have an adapter."""
    if model.family not in FAMILIES:
        raise UserError(f"family '{model.family}' has no Hugging Face format", allowed=", ".join(FAMILIES))
    names = {f"blocks.{layer}.{name}" for layer in range(model.num_hidden_layers) for name in matrices(model, layer)}
    return [rule for rule in FAMILIES[model.family].rules(model) if rule.ours[0].removesuffix(".weight") in names]
