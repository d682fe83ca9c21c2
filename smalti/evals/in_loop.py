"""Held-out loss during training: likelihood of fixed token windows, split over the ranks.

All ranks run the same number of forward passes, so any mesh works. Windows do not overlap and are equally spaced over
all held-out files. Bits per byte differ from ``evals.tasks.heldout``: tokens at the start of a window have little
context, and tokens per byte are of all held-out text.

B: windows in a forward pass. T: seq_len. N: counted tokens. D: hidden size. V: vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from smalti.base import store
from smalti.base.errors import DataError
from smalti.config.data import DataConfig
from smalti.config.run import RunConfig
from smalti.data import pack
from smalti.data.fetch import Share, open_files
from smalti.data.stream.inputs import heldout_key
from smalti.data.tokens.manifest import FILE_NAME, Manifest, read_manifest
from smalti.data.tokens.reader import TokenSource
from smalti.distributed.group.mesh import Mesh
from smalti.evals.likelihood import logits_of, token_nats
from smalti.evals.mesh_scores import Place, place_of
from smalti.train.loop import Evaluate

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class _Source:
    """Rows of seq_len + 1 tokens of a source, of all ranks together."""

    name: str
    rows_ST1: NDArray[np.int64]
    eod_id: int
    tokens_per_byte: float


def heldout_hook(
    config: RunConfig, indexes: Mapping[str, bytes] | None = None, mesh: Mesh | None = None
) -> Evaluate | None:
    """Return the function that measures ``data.heldout``; None if the run has no held-out source.

    It returns ``metrics/eval/<source>/LanguageCrossEntropy`` (nats per token), ``LanguagePerplexity`` (its exp) and
    ``metrics/eval/<source>/bits_per_byte`` (nats per token / ln 2 * tokens per UTF-8 byte of all held-out documents).
    The token files are read here, so a missing or corrupt one is reported before the first step. ``indexes``: the
    result of ``data.stream.inputs.read_inputs``; None: each rank reads the manifests itself. ``mesh``: of the job; None
    is allowed if every rank reads different rows.
    """
    if not config.data.heldout:
        return None
    place = place_of(config.train.parallel, mesh)
    known = indexes or {}
    sources = [_load(name, config, known.get(heldout_key(name))) for name in config.data.heldout]

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return {
                    key: value
                    for source in sources
                    for key, value in _measure(model, source, config.data, place).items()
                }
        finally:
            model.train(was_training)

    return evaluate


def _load(name: str, config: RunConfig, index: bytes | None) -> _Source:
    folder, seq_len = config.data.heldout[name], config.data.seq_len
    share = Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share(0, 1)
    fetch = config.data.fetch
    if index is None:
        with closing(open_files(folder, fetch=fetch, share=share)) as files:
            index = read_manifest(files)
    manifest = Manifest.parse(index, store.join(folder, FILE_NAME))
    files = open_files(folder, fetch=fetch, share=share, digest=manifest.digest)
    tokens = TokenSource(folder, index=index, files=files)
    wanted = math.ceil(config.train.eval_tokens / seq_len)
    n_all = pack.n_sequences(manifest.n_tokens, seq_len)
    n_rows = min(n_all, wanted)
    if n_rows < 1:
        raise DataError(
            f"the held-out source '{name}' ({folder}) has {manifest.n_tokens} tokens, fewer than one sequence",
            allowed=f"at least data.seq_len + 1 = {seq_len + 1}",
            hint=f"hold more documents out, or take 'data.heldout.{name}' out of the recipe",
        )
    if not manifest.n_text_bytes:
        raise DataError(
            f"the manifest in {folder} has no number of bytes of the documents, which bits per byte need",
            hint="write the tokens again: smalti data tokenize",
        )
    # Equally spaced: files are written in the order of names, so their first rows are not a sample.
    rows_ST1 = np.stack([tokens.read(row * n_all // n_rows * seq_len, seq_len + 1) for row in range(n_rows)])
    tokens.close()
    return _Source(name, rows_ST1, manifest.eod_id, manifest.n_tokens / manifest.n_text_bytes)


def _measure(model: nn.Module, source: _Source, data: DataConfig, place: Place) -> dict[str, float]:
    device = next(model.parameters()).device
    own_ST1 = source.rows_ST1[place.rank :: place.ranks]
    per_rank = math.ceil(len(source.rows_ST1) / place.ranks)
    width = max(1, _BATCH_TOKENS // data.seq_len)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, per_rank, width):
        rows_BT1 = own_ST1[start : start + width]
        counted, most = len(rows_BT1), min(width, per_rank - start)
        if counted < most:  # ranks that exchange buffers of one size need equally many rows
            rows_BT1 = np.concatenate([rows_BT1, source.rows_ST1[: most - counted]])
        total += _forward(model, rows_BT1, counted, source.eod_id, data, device, place.part_of)
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, n_tokens = total.tolist()
    per_token = nats / n_tokens
    return {
        f"metrics/eval/{source.name}/LanguageCrossEntropy": per_token,
        f"metrics/eval/{source.name}/LanguagePerplexity": math.exp(min(per_token, 700.0)),  # exp(710) overflows
        f"metrics/eval/{source.name}/bits_per_byte": per_token / math.log(2) * source.tokens_per_byte,
    }


def _forward(
    model: nn.Module,
    rows_BT1: NDArray[np.int64],
    counted: int,
    eod_id: int,
    data: DataConfig,
    device: torch.device,
    part_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return nats and number of this rank's targets of the first ``counted`` rows, float64 [2]."""
    inputs, targets, positions, documents = pack.split(rows_BT1, eod_id, mask_documents=data.mask_documents)
    targets_BT = part_of(torch.from_numpy(targets).to(device))
    targets_N, tokens = targets_BT.flatten(), counted * targets_BT.shape[1]

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        nats_N = token_nats(hidden_BTD.flatten(0, 1), weight_VD, targets_N, logits=logits_of(model))[:tokens]
        return torch.stack([nats_N.double().sum(), torch.tensor(nats_N.numel(), dtype=torch.float64, device=device)])

    ids_BT, positions_BT, documents_BT = (
        torch.from_numpy(array).to(device, torch.int64) for array in (inputs, positions, documents)
    )
    packed_BT = documents_BT if data.mask_documents else None
    value: Tensor = model(part_of(ids_BT), part_of(positions_BT), packed_BT, head=head).value
    return value
