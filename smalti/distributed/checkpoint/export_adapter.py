"""Exports the adapters of a run: alone, in PEFT's format, or merged into the weights of their base."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smalti import __version__
from smalti.base import clock, store
from smalti.base.disk import writing
from smalti.base.errors import DataError
from smalti.config.adapter import matrix_names
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import base
from smalti.distributed.checkpoint.card import history
from smalti.distributed.checkpoint.source import Source
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter, Merged
from smalti.model.adapters.quantized import Dequantized
from smalti.model.decoder import Decoder
from smalti.model.huggingface_weights import companion_files, meta_weights
from smalti.track.provenance import directory_of
from smalti.track.registry.facts import RECORD

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
    smalti chat {base} --adapter {folder}

With PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)`, and
`AutoTokenizer.from_pretrained(FOLDER)`, which has the run's chat template, if any.
"""
_CARD_OF_SCORES = """---
library_name: peft
tags:
- smalti
- lora
- reward-model
---

# {name}

Adapters (LoRA) of rank {rank} and the score of a reward model, trained with Smalti {version} beside the weights of
`{base}`, step {step}. They compute what they learned only with those weights: SHA-256 of their files {digest}.

    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
    model = PeftModel.from_pretrained(model, "{folder}")
    score = model(input_ids).logits[0, 0]
"""


def read_adapter(config: RunConfig, source: Source) -> Adapter:
    """Return the adapters in the checkpoint ``source``."""
    assert config.adapter is not None
    return Adapter.of_tensors(source.weights, meta_weights(config.model), config.adapter.scale)


def merged_weights(run: Path, config: RunConfig, source: Source) -> Merged:
    """Return the weights of the base with the adapters merged, so that they compute what was trained.

    A base that was quantised is dequantised. DataError if the base is another than in training.
    """
    assert config.adapter is not None
    weights = _base_weights(run, config, source)
    if config.adapter.quantize is not None:
        weights = Dequantized(weights, matrix_names(config.model), config.adapter.quantize)
    return Merged(weights, read_adapter(config, source))


def merge_errors(run: Path, config: RunConfig, source: Source, *, logits: bool) -> dict[str, dict[str, float]]:
    """Return the relative errors, against the merged weights, of two other merges beside a quantised base.

    ``requantized``: the merged weights, quantised again. ``unquantized``: the adapters added to the base's own weights.
    Each has ``weights``, over the matrices that were quantised, and with ``logits`` those of a sample, in float32.
    """
    assert config.adapter is not None
    kind, names = config.adapter.quantize, matrix_names(config.model)
    assert kind is not None
    exact = merged_weights(run, config, source)
    others: dict[str, Mapping[str, Tensor]] = {
        "requantized": Dequantized(exact, names, kind),
        "unquantized": Merged(_base_weights(run, config, source), read_adapter(config, source)),
    }
    errors = {other: {"weights": _relative_error(weights, exact, names)} for other, weights in others.items()}
    if logits:
        expected = _logits(config, exact)
        for other, weights in others.items():
            errors[other]["logits"] = float((_logits(config, weights) - expected).norm() / expected.norm())
    return errors


def _relative_error(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: list[str]) -> float:
    squares = torch.zeros(2, dtype=torch.float64)
    for name in names:
        right = expected[name].double()
        squares += torch.stack([(weights[name].double() - right).square().sum(), right.square().sum()])
    return float((squares[0] / squares[1]).sqrt())


def _logits(config: RunConfig, weights: Mapping[str, Tensor]) -> Tensor:
    model = Decoder(config.model)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    with torch.inference_mode():
        logits_BTV: Tensor = model.eval()(probe_ids(config.model)).value
    return logits_BTV.double()


def probe_ids(model: ModelConfig) -> Tensor:
    """Return fixed token ids [2, up to 128] spread over the vocabulary, for comparing logits."""
    length = min(128, model.max_position_embeddings)
    return (torch.arange(2 * length) * 7919 % model.vocab_size).view(2, length)


def _base_weights(run: Path, config: RunConfig, source: Source) -> Mapping[str, Tensor]:
    assert config.init_from is not None
    path = base.find(str(Path(directory_of(run, [config.init_from]) or ".", config.init_from)))
    base.require_same(
        source.state["base"], base.identity(path, config.init_from), f"the adapters in {source.place} were"
    )
    return base.weights(path)


def write_adapter(final: Path, run: Path, config: RunConfig, source: Source, dtype: str, as_dtype: torch.dtype) -> None:
    """Write the adapters of the checkpoint ``source`` to the folder ``final``, whole or not at all.

    Beside them are the files of the run's tokenizer, if it has one: with its chat template and the tokens that end an
    answer, requests are prompted as in training.
    """
    assert config.adapter is not None
    assert config.init_from is not None
    if final.exists() and not peft.is_adapter_folder(final):
        raise DataError(f"{final} exists and is not an exported adapter", hint="name another folder: --output FOLDER")
    adapter = read_adapter(config, source).to(as_dtype)
    recorded, step = source.state["base"], source.step
    record: dict[str, Any] = {
        "run": config.name,
        "run_folder": str(run.resolve()),
        "step": step,
        **({"ema": True} if source.ema else {}),
        "dtype": dtype,
        "time": clock.utc_text(),
        "smalti_version": __version__,
        "base": recorded,
    }
    card = (_CARD_OF_SCORES if config.model.num_labels else _CARD).format(
        name=config.name, rank=config.adapter.rank, version=__version__, base=config.init_from, step=step,
        digest=recorded["sha256"], folder=final,
    ).rstrip()  # fmt: skip
    with writing(final):
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            store.make_folder(temporary)
            peft.save(temporary, adapter, config.model, config.adapter, config.init_from)
            store.write_json(temporary / RECORD, record)
            for name, data in companion_files(run / "tokenizer").items():
                store.write_bytes(temporary / name, data)
            store.write_text(temporary / "README.md", "\n\n".join([card, *history(run, config, step)]) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
