"""Adapters in a run: which base their frozen weights come from, and that it is the same on every attempt.

A checkpoint of such a run holds the adapters alone and the digest of the base's files (``base`` in
``train_state.json``); the base is loaded from ``init_from`` each time.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_bytes, sha256_file
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import world as worlds
from smalti.distributed.parallel import fsdp
from smalti.model.adapters.apply import apply, is_adapter
from smalti.model.adapters.lora import draw
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES
from smalti.train.weights import find_checkpoint


def has_adapter(config: JobConfig) -> bool:
    """Return whether the run trains adapters."""
    return isinstance(config, RunConfig) and config.adapter is not None


def refuse_own_model(config: JobConfig) -> None:
    """Raise UserError for a config with adapters, which are added to the model of the config alone."""
    if has_adapter(config):
        raise UserError(
            "the section adapter has no effect on a model of your own",
            allowed="adapters of the model that the config describes",
            hint="build(config) without model, or remove adapter",
        )


def add(model: Decoder, config: RunConfig) -> None:
    """Add the adapters of the config, if any, to a model on the meta device."""
    if config.adapter is not None:
        with torch.device("meta"):
            apply(model, config.adapter, compute=DTYPES[config.train.precision.compute])


def init(model: nn.Module, seed: int) -> None:
    """Set the adapters of a model, which may be sharded, to their initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                fsdp.assign(parameter, draw(name, parameter.shape, seed))


def check_base(config: JobConfig, path: str | None) -> dict[str, str] | None:
    """Return the identity of the base for the checkpoints of this run, None for a run without adapters. A collective.

    DataError if the checkpoint at ``path``, from which the run resumes, was trained beside another base.
    """
    if not has_adapter(config):
        return None
    assert config.init_from is not None
    base = base_of(config.init_from)
    saved = None if path is None else worlds.broadcast_from_rank0(lambda: checkpoint.read_state(path)).get("base")
    if saved is not None and saved["sha256"] != base["sha256"]:
        raise DataError(
            f"the adapters in {path} were trained beside other weights than those of init_from={config.init_from}: "
            f"the digest of their files is {base['sha256'][:12]}, not {saved['sha256'][:12]}",
            allowed="the weights with which the run began",
            hint="restore them, or start a new run: name=NEW_NAME",
        )
    return base


def base_of(init_from: str) -> dict[str, str]:
    """Return ``init_from`` and the SHA-256 of its files of weights. A collective."""
    if worlds.broadcast_from_rank0(lambda: os.path.isfile(f"{init_from}/config.json")):
        digest = worlds.broadcast_from_rank0(lambda: digest_of_folder(Path(init_from)))
        return {"init_from": init_from, "sha256": digest}
    manifest = Path(find_checkpoint(init_from)) / "manifest.json"
    return {
        "init_from": init_from,
        "sha256": worlds.broadcast_from_rank0(lambda: sha256_bytes(store.read_bytes(manifest))),
    }


def digest_of_folder(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the files of weights in a Hugging Face folder."""
    return digest_json({path.name: sha256_file(path) for path in sorted(folder.glob("*.safetensors"))})


def trained_only(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict for a checkpoint: of a decoder with adapters these alone, else all."""
    adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    return adapters if adapters and isinstance(model, Decoder) else tensors
