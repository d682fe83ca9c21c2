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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from smalti.base.errors import DataError
from smalti.config.data import DataConfig
from smalti.config.run import RunConfig
from smalti.data import pack
from smalti.data.examples.folder import ExamplesRecord
from smalti.data.examples.source import ExampleSource
from smalti.data.fetch import Files, Share, open_files
from smalti.data.pack.examples import ExampleRows
from smalti.data.stream.batch import Batch
from smalti.data.stream.inputs import heldout_key, parse_heldout, read_heldout
from smalti.data.tokens.manifest import Manifest
from smalti.data.tokens.reader import TokenSource
from smalti.distributed.group.mesh import Mesh
from smalti.evals.likelihood import logits_of, token_nats
from smalti.evals.mesh_scores import Shard, shard_of
from smalti.train.batches import IGNORE
from smalti.train.loop import Evaluate

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class _Source:
    """Rows of a source, of all ranks together: arrays [S, seq_len]."""

    name: str
    rows: tuple[NDArray[Any], ...]
    """inputs, targets (IGNORE outside the loss), positions, documents."""
    tokens_per_byte: float | None
    """Targets for each UTF-8 byte of their text; None: unknown."""


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
    shard = shard_of(config.train.parallel, mesh)
    known = indexes or {}
    loaded = [_load(name, config, known.get(heldout_key(name))) for name in config.data.heldout]
    sources = [source for source in loaded if source is not None]

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return {
                    key: value
                    for source in sources
                    for key, value in _measure(model, source, config.data, shard).items()
                }
        finally:
            model.train(was_training)

    return evaluate


def _load(name: str, config: RunConfig, index: bytes | None) -> _Source | None:
    """Return the rows of a held-out set; None for pairs of answers, which other metrics measure (``smalti/tune``)."""
    folder = config.data.heldout[name]
    share = Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share(0, 1)
    fetch = config.data.fetch
    if index is None:
        with closing(open_files(folder, fetch=fetch, share=share)) as files:
            index = read_heldout(folder, files)
    record = parse_heldout(index, folder)
    if isinstance(record, ExamplesRecord):
        return None if record.pairs else _load_examples(name, config, ExampleSource(folder, record))
    return _load_tokens(name, config, record, open_files(folder, fetch=fetch, share=share, digest=record.digest), index)


def _load_tokens(name: str, config: RunConfig, manifest: Manifest, files: Files, index: bytes) -> _Source:
    """Return rows of token files: all text after one another, cut into rows."""
    folder, seq_len = config.data.heldout[name], config.data.seq_len
    n_all = pack.n_sequences(manifest.n_tokens, seq_len)
    n_rows = min(n_all, math.ceil(config.train.eval_tokens / seq_len))
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
    with closing(TokenSource(folder, index=index, files=files)) as tokens:
        rows_ST1 = np.stack([tokens.read(row * n_all // n_rows * seq_len, seq_len + 1) for row in range(n_rows)])
    arrays = pack.split(rows_ST1, manifest.eod_id, mask_documents=config.data.mask_documents)
    return _Source(name, arrays, manifest.n_tokens / manifest.n_text_bytes)


def _load_examples(name: str, config: RunConfig, source: ExampleSource) -> _Source:
    """Return rows of examples, in which the tokens outside their loss masks do not count."""
    sequences, record = ExampleRows(source, config.data.seq_len, source.record.eod_id), source.record
    n_rows = min(sequences.size, math.ceil(config.train.eval_tokens / sequences.seq_len))
    tokens = np.empty((n_rows, sequences.seq_len + 1), dtype=source.dtype)
    with closing(source):
        info = sequences.read(np.arange(n_rows) * sequences.size // n_rows, tokens)
    batch = Batch(tokens, np.zeros(n_rows, np.int16), 0, record.eod_id, True, info.joints, info.masked)
    per_byte = record.n_loss_tokens / record.n_text_bytes if record.n_text_bytes else None
    return _Source(name, (batch.inputs, batch.targets, batch.positions, batch.documents), per_byte)


def _measure(model: nn.Module, source: _Source, data: DataConfig, shard: Shard) -> dict[str, float]:
    device = next(model.parameters()).device
    of_rank = tuple(part[shard.rank :: shard.ranks] for part in source.rows)
    per_rank = math.ceil(len(source.rows[0]) / shard.ranks)
    width = max(1, _BATCH_TOKENS // data.seq_len)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, per_rank, width):
        rows = tuple(part[start : start + width] for part in of_rank)
        counted, most = len(rows[0]), min(width, per_rank - start)
        if counted < most:  # ranks that exchange buffers of one size need equally many rows
            more = tuple(part[: most - counted] for part in source.rows)
            rows = tuple(np.concatenate(parts) for parts in zip(rows, more, strict=True))
        total += _forward(model, rows, counted, data, device, shard.part_of)
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, n_tokens = total.tolist()
    per_token = nats / n_tokens
    per_byte = {} if source.tokens_per_byte is None else {
        f"metrics/eval/{source.name}/bits_per_byte": per_token / math.log(2) * source.tokens_per_byte
    }  # fmt: skip
    return {
        f"metrics/eval/{source.name}/LanguageCrossEntropy": per_token,
        f"metrics/eval/{source.name}/LanguagePerplexity": math.exp(min(per_token, 700.0)),  # exp(710) overflows
        **per_byte,
    }


def _forward(
    model: nn.Module,
    rows: tuple[NDArray[Any], ...],
    counted: int,
    data: DataConfig,
    device: torch.device,
    part_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return nats and number of this rank's targets of the first ``counted`` rows, float64 [2]."""
    inputs_BT, targets_BT, positions_BT, documents_BT = (
        torch.from_numpy(np.ascontiguousarray(part)).to(device, torch.int64) for part in rows
    )
    targets_BT = part_of(targets_BT)
    targets_N, tokens = targets_BT.flatten(), counted * targets_BT.shape[1]

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        in_loss_N = (targets_N != IGNORE)[:tokens]
        nats_N = token_nats(hidden_BTD.flatten(0, 1), weight_VD, targets_N.clamp(min=0), logits=logits_of(model))
        nats_N = torch.where(in_loss_N, nats_N[:tokens].double(), 0.0)
        return torch.stack([nats_N.sum(), in_loss_N.sum().double()])

    packed_BT = documents_BT if data.mask_documents else None
    value: Tensor = model(part_of(inputs_BT), part_of(positions_BT), packed_BT, head=head).value
    return value
