"""Exports the adapters of a run: alone, in PEFT's format, or merged into the weights of their base."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from smalti import __version__
from smalti.base import clock, store
from smalti.base.disk import writing
from smalti.base.errors import DataError
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import base, checkpoint
from smalti.distributed.checkpoint.card import RECORD
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter, Merged
from smalti.model.huggingface_weights import meta_weights
from smalti.track.checkpoint_names import step_of
from smalti.track.provenance import directory_of

_CARD = """---
library_name: peft
tags:
- smalti
- lora
---

# {name}

Adapters (LoRA) of rank {rank}, trained with Smalti {version} beside the weights of `{base}`, step {step}. They compute
what they learned only with those weights: SHA-256 of their files {digest}.

    smalti serve {base} --adapter {name}={folder}

With PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)`.
"""


def read_adapter(config: RunConfig, source: str) -> Adapter:
    """Return the adapters in the checkpoint ``source``."""
    assert config.adapter is not None
    return Adapter.of_tensors(checkpoint.StoredModel(source), meta_weights(config.model), config.adapter.scale)


def merged_weights(run: Path, config: RunConfig, source: str) -> Merged:
    """Return the weights of the base with the adapters merged. DataError if the base is another than in training."""
    assert config.init_from is not None
    path = base.find(str(Path(directory_of(run, [config.init_from]) or ".", config.init_from)))
    base.require_same(checkpoint.read_state(source)["base"], base.identity(path, config.init_from), source)
    return Merged(base.weights(path), read_adapter(config, source))


def write_adapter(final: Path, run: Path, config: RunConfig, source: str, dtype: str, as_dtype: torch.dtype) -> None:
    """Write the adapters of the checkpoint ``source`` to the folder ``final``, whole or not at all."""
    assert config.adapter is not None
    assert config.init_from is not None
    if final.exists() and not peft.is_adapter_folder(final):
        raise DataError(f"{final} exists and is not an exported adapter", hint="name another folder: --output FOLDER")
    adapter = read_adapter(config, source)
    adapter = Adapter(adapter.scale, {name: (a.to(as_dtype), b.to(as_dtype)) for name, (a, b) in adapter.pairs.items()})
    recorded = checkpoint.read_state(source)["base"]
    record: dict[str, Any] = {
        "run": config.name,
        "run_folder": str(run.resolve()),
        "step": step_of(source),
        "dtype": dtype,
        "time": clock.utc_text(),
        "smalti_version": __version__,
        "base": recorded,
    }
    card = _CARD.format(
        name=config.name, rank=config.adapter.rank, version=__version__, base=config.init_from, step=step_of(source),
        digest=recorded["sha256"], folder=final,
    )  # fmt: skip
    with writing(final):
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            store.make_folder(temporary)
            peft.save(temporary, adapter, config.model, config.adapter, config.init_from)
            store.write_json(temporary / RECORD, record)
            store.write_text(temporary / "README.md", card)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
