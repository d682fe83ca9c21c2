"""Models as Hugging Face folders: ``config.json``, ``generation_config.json``, safetensors in one file or in shards.

Promises: a folder without ``config.json`` holds no model, and ``config.json`` is written last, so an interrupted save
is never read as a model; a folder that is read must hold exactly the tensors that its config asks for, each of the
right shape; pickled weights are never opened. Local folders only. Does not write the tokenizer.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.zoo import dbrx, llama, mistral, mixtral, mpt, olmo2, olmoe, qwen3, qwen3_moe
from smalti.model.zoo.family import Family, Weights

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, qwen3, olmo2, mpt, dbrx, mixtral, olmoe, qwen3_moe)
}

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PICKLE = (".bin", ".pt", ".pth", ".ckpt")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints carry although they follow from the config."""


def save_folder(
    folder: str | Path,
    config: ModelConfig,
    state_dict: Weights,
    *,
    eod_id: int,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the model that ``state_dict`` (our names, whole tensors) holds, cast to ``dtype``.

    ``eod_id``, the end-of-document token, is written as both begin- and end-of-sequence, as it stands around documents.
    A model that lies in the folder already is replaced only after the new one is on the disk; other files stay.
    """
    target = _local(folder)
    family = _family_of(config)
    theirs = {
        name: tensor.detach().to(dtype=dtype, device="cpu").contiguous()
        for name, tensor in to_theirs(family, config, _checked(config, state_dict)).items()
    }
    store.make_folder(target)
    staging = target / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _write_shards(staging, theirs, max_shard_bytes)
        text_dtype = str(dtype).removeprefix("torch.")
        described = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.config_to_huggingface(config),
            "bos_token_id": eod_id,
            "eos_token_id": eod_id,
            "use_cache": True,
            "dtype": text_dtype,
        }
        generation = {"_from_model_config": True, "bos_token_id": eod_id, "eos_token_id": eod_id}
        store.write_json(staging / "generation_config.json", generation)
        store.write_json(staging / "config.json", described)
        _swap(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_folder(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """The model in a folder, on the CPU, in eval mode; ``dtype`` absent keeps that of the files."""
    config, weights = read_folder(folder, dtype)
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def read_folder(folder: str | Path, dtype: torch.dtype | None = None) -> tuple[ModelConfig, Weights]:
    """Config and weights (our names, whole tensors on the CPU) of a folder, without building the module."""
    source = _local(folder)
    if not (source / "config.json").exists():
        raise DataError(f"{source} has no config.json, so it holds no (complete) model")
    family, config = _read_config(source)
    expected = {name: tuple(tensor.shape) for name, tensor in _expected(family, config).items()}
    theirs = _read_tensors(source, _locate(source), expected, dtype)
    return config, to_ours(family, config, theirs)


def _local(folder: str | Path) -> Path:
    if not store.is_local(folder):
        raise UserError(f"{folder} is not a local folder", hint="copy the model to a local disk first")
    return Path(folder)


def _family_of(config: ModelConfig) -> Family:
    if config.family not in FAMILIES:
        raise UserError(
            f"family '{config.family}' has no form in Hugging Face folders",
            allowed=", ".join(FAMILIES),
            hint="train with model.family=llama or model.family=dbrx to export",
        )
    return FAMILIES[config.family]


def _read_config(source: Path) -> tuple[Family, ModelConfig]:
    raw = store.read_json(source / "config.json")
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in FAMILIES:
        raise DataError(f"{source}/config.json has model_type={kind!r}", allowed=", ".join(FAMILIES))
    return FAMILIES[kind], FAMILIES[kind].config_from_huggingface(raw)


def to_theirs(family: Family, config: ModelConfig, weights: Weights) -> Weights:
    """All weights under their names."""
    found: Weights = {}
    for rule in family.rules(config):
        found |= zip(rule.theirs, rule.to_theirs([weights[name] for name in rule.ours]), strict=True)
    return found


def to_ours(family: Family, config: ModelConfig, weights: Weights) -> Weights:
    """All weights under our names."""
    found: Weights = {}
    for rule in family.rules(config):
        found |= zip(rule.ours, rule.to_ours([weights[name] for name in rule.theirs]), strict=True)
    return found


def _skeleton(config: ModelConfig) -> Weights:
    with torch.device("meta"):
        return Decoder(config).state_dict()


def _expected(family: Family, config: ModelConfig) -> Weights:
    """The tensors that a folder must hold, on the meta device: what we would write."""
    return to_theirs(family, config, _skeleton(config))


def _checked(config: ModelConfig, state_dict: Weights) -> Weights:
    expected = {name: tuple(tensor.shape) for name, tensor in _skeleton(config).items()}
    _compare("the state dict", expected, {name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    return state_dict


def _compare(what: str, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """DataError that names missing and unexpected tensors, and those of another shape."""
    faults = [
        *_list("missing", [name for name in expected if name not in found]),
        *_list("unexpected", [name for name in found if name not in expected]),
        *_list(
            "of another shape",
            [
                f"{name} {list(found[name])} instead of {list(shape)}"
                for name, shape in expected.items()
                if name in found and found[name] != shape
            ],
        ),
    ]
    if faults:
        raise DataError(f"{what} does not fit its config; " + "; ".join(faults))


def _list(label: str, names: Iterable[str], shown: int = 5) -> list[str]:
    every = list(names)
    if not every:
        return []
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return [f"{label}: {', '.join(every[:shown])}{more}"]


def _locate(source: Path) -> dict[str, Path]:
    """Each tensor's file, by the index or from the single file's header."""
    if (source / _INDEX).exists():
        index: dict[str, Any] = store.read_json(source / _INDEX)
        places = {}
        for name, file in index.get("weight_map", {}).items():
            if Path(file).name != file or not (source / file).exists():
                raise DataError(f"{source / _INDEX} places {name} in '{file}', which is not in the folder")
            places[name] = source / file
        return places
    whole = source / _WHOLE
    if whole.exists():
        with _opened(whole) as file:
            return dict.fromkeys(file.keys(), whole)
    pickled = sorted(path.name for path in source.iterdir() if path.suffix in _PICKLE)
    if pickled:
        raise UserError(
            f"{source} holds pickled weights ({', '.join(pickled[:3])}); opening them can run any code",
            allowed="safetensors",
            hint="convert it once where it is trusted: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)",
        )
    raise DataError(f"{source} has neither {_WHOLE} nor {_INDEX}")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from error


def _read_tensors(
    source: Path, places: dict[str, Path], expected: dict[str, tuple[int, ...]], dtype: torch.dtype | None
) -> Weights:
    places = {name: path for name, path in places.items() if not _DERIVED.search(name)}
    tied = "lm_head.weight" if "lm_head.weight" in places and "lm_head.weight" not in expected else None
    found: dict[str, tuple[int, ...]] = {}
    tensors: Weights = {}
    for path in sorted(set(places.values())):
        with _opened(path) as file:
            held = set(file.keys())
            for name in (name for name, place in places.items() if place == path):
                if name not in held:
                    raise DataError(f"{path} does not hold {name}, although the index says so")
                found[name] = tuple(file.get_slice(name).get_shape())
                if name == tied or found[name] == expected.get(name):
                    tensors[name] = _read(file, name, dtype)
    if tied:
        _check_tied(source, tensors.pop(tied), tensors)
        del found[tied]
    _compare(str(source), expected, found)
    return tensors


def _read(file: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    return tensor if dtype is None else tensor.to(dtype)


def _check_tied(source: Path, head: Tensor, tensors: Weights) -> None:
    """A tied model may carry its head too, but only as the same values as the embedding."""
    embeds = [tensor for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if not embeds or not torch.equal(embeds[0], head):
        raise DataError(f"{source} says tie_word_embeddings, but its lm_head.weight differs from the embedding")


def _write_shards(folder: Path, tensors: Weights, max_shard_bytes: int) -> None:
    """One file, or numbered shards of at most ``max_shard_bytes`` (a larger tensor gets one alone) and an index."""
    shards: list[Weights] = [{}]
    used_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and used_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
    if len(shards) == 1:
        _write(folder / _WHOLE, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    store.write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write(path: Path, tensors: Weights) -> None:
    path.touch()
    mode = path.stat().st_mode  # what the umask gives; save_file would leave it readable by its owner alone
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _swap(staging: Path, target: Path) -> None:
    """Put the staged files in place of an older model: its config goes first, the new one comes last."""
    (target / "config.json").unlink(missing_ok=True)
    for path in target.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    names = sorted(path.name for path in staging.iterdir() if path.name != "config.json")
    for name in [*names, "config.json"]:
        os.replace(staging / name, target / name)
