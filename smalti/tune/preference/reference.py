"""The reference model of a preference loss: log-probabilities computed before the run, or in it.

The reference is the model of ``init_from``; of a run with adapters it is their base, as it is quantised. There is no
dropout, so both give the same values up to rounding.

Shapes: S rows, T tokens, K sequences of a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smalti.base.hashing import digest_json, sha256_bytes, sha256_file
from smalti.base.progress import Progress, no_progress
from smalti.config.adapter import Quantization, matrix_names
from smalti.config.train import LossConfig
from smalti.data.examples import Example
from smalti.distributed.checkpoint import base
from smalti.model.adapters.apply import without_adapters
from smalti.model.adapters.quantized import dequantize, quantize
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES, freeze
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.origin import model_of
from smalti.tune.heads.log_probs import log_probs_head
from smalti.tune.preference.loss import REFERENCE_COLUMNS, log_probs
from smalti.tune.sequences import Sequences
from smalti.tune.spool import Computed, Indexed

_BATCH_TOKENS = 8192
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16

Ids = tuple[Sequence[int], Sequence[int]]
"""(ids, mask) of a sequence."""


class LiveReference:
    """Log-probabilities by a frozen model beside the one that is trained; a ``Reference``.

    model: None for adapters: the model that is trained, without them, so that there is no second one in memory.
    """

    def __init__(self, model: nn.Module | None, loss: LossConfig, soft_cap: float | None) -> None:
        self._model, self._loss, self._soft_cap = model, loss, soft_cap

    @torch.no_grad()
    def __call__(self, model: nn.Module, microbatch: Microbatch, sequences: Sequences) -> Tensor:
        """Return the log-probability of each sequence [S, K]."""
        chunk_bytes = self._loss.tile_bytes(microbatch.inputs.device.type)
        options: Any = {"soft_cap": self._soft_cap, "chunk_bytes": chunk_bytes}
        if self._model is not None:
            return log_probs(self._model, microbatch, sequences, **options)
        with without_adapters(model):
            return log_probs(model, microbatch, sequences, **options)


def identity(origin: str) -> str:
    """Return a digest of the weights of a run, a checkpoint or a Hugging Face folder.

    Every command and rank computes it, so of a folder's files only 64 equally spaced parts are read.
    """
    path = Path(base.find(origin))
    if not base.is_model_folder(path):
        return sha256_file(path / "manifest.json")
    return digest_json({file.name: _sampled(file) for file in sorted(path.glob("*.safetensors"))})


def _sampled(path: Path) -> list[int | str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for number in range(_SAMPLES):
            file.seek(number * size // _SAMPLES)
            parts.append(file.read(_SAMPLE_BYTES))
    return [size, sha256_bytes(b"".join(parts))]


def with_reference(
    examples: Indexed[Example],
    origin: str,
    compute: str,
    *,
    quantization: Quantization | None = None,
    progress: Progress = no_progress,
) -> Indexed[Example]:
    """Return the examples with the columns ``REFERENCE_COLUMNS``: log-probabilities by the model of ``origin``.

    compute: ``fp32`` or ``bf16``, the format of matmuls in training; routers are in fp32, as there. quantization:
    that of the base of adapters. The whole model is on one device, a GPU if there is one.
    """
    model = _load(origin, DTYPES[compute], quantization)
    freeze(model, DTYPES[compute])
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sequences = Computed(2 * len(examples), lambda number: examples[number // 2].sequences[number % 2])
    values = sequence_log_probs(model, sequences, progress=progress).reshape(-1, 2)

    def example_of(number: int) -> Example:
        example, pair = examples[number], values[number].tolist()
        return replace(example, values={**example.values, **dict(zip(REFERENCE_COLUMNS, pair, strict=True))})

    return Computed(len(examples), example_of)


def sequence_log_probs(
    model: Decoder, sequences: Indexed[Ids], *, batch_tokens: int = _BATCH_TOKENS, progress: Progress = no_progress
) -> npt.NDArray[np.float64]:
    """Return the log-probability of each sequence's tokens in the loss, summed, in nats.

    Sequences of similar length are computed together, in rows padded to the right.
    """
    device, soft_cap = next(model.parameters()).device, model.config.final_logit_softcapping
    lengths = np.fromiter((len(ids) for ids, _ in sequences), dtype=np.int64, count=len(sequences))
    order = np.argsort(-lengths, kind="stable").tolist()
    results = np.zeros(len(sequences))
    start = 0
    while start < len(order):
        width = len(sequences[order[start]][0]) - 1
        rows = order[start : start + max(1, batch_tokens // width)]
        inputs, targets = _padded([sequences[number] for number in rows], width)
        with torch.inference_mode():
            head = log_probs_head(torch.from_numpy(targets).to(device), soft_cap=soft_cap)
            values_ST: Tensor = model(torch.from_numpy(inputs).to(device), head=head).value
            results[rows] = values_ST.double().sum(dim=1).cpu().numpy()
        start += len(rows)
        progress("reference log-probabilities", start, len(order), "sequence")
    return results


def _padded(sequences: Sequence[Ids], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    inputs = np.zeros((len(sequences), width), dtype=np.int64)
    targets = np.full((len(sequences), width), IGNORE, dtype=np.int64)
    for row, (ids, mask) in enumerate(sequences):
        size = len(ids) - 1
        inputs[row, :size] = ids[:-1]
        targets[row, :size] = np.where(mask[1:], ids[1:], IGNORE)
    return inputs, targets


def _load(origin: str, compute: torch.dtype, quantization: Quantization | None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(model_of(origin))
    weights = base.weights(base.find(origin))
    state: dict[str, Any] = {name: weights[name] for name in model.state_dict() if name in weights}
    for name, buffer in model.named_buffers():
        state.setdefault(name, torch.zeros(buffer.shape, dtype=buffer.dtype))  # biases that were never trained
    if quantization is not None:
        for name in matrix_names(model.config):
            state[name] = dequantize(*quantize(state[name], quantization), state[name].shape, quantization, compute)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()
