"""Held-out pairs during training: the loss and its measures, split over the ranks.

All ranks run the same number of forward passes, so any mesh of the run works.
"""

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from smalti.base.errors import UserError
from smalti.config.run import RunConfig
from smalti.data.examples.folder import ExamplesRecord
from smalti.data.examples.source import ExampleSource
from smalti.data.fetch import open_files
from smalti.data.pack.examples import ExampleRows
from smalti.data.sources.source import Int64s
from smalti.data.stream.batch import Batch
from smalti.data.stream.inputs import heldout_key, parse_heldout, read_heldout
from smalti.distributed.group.mesh import Mesh
from smalti.evals.mesh_scores import Shard, shard_of
from smalti.train.batches import to_microbatch
from smalti.train.loop import Evaluate
from smalti.train.step import Loss

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class _Pairs:
    """Rows of a held-out set: those of this rank, in batches of equal size on all ranks."""

    name: str
    batches: list[Batch]


def pairs_hook(
    config: RunConfig, loss: Loss, indexes: Mapping[str, bytes] | None = None, mesh: Mesh | None = None
) -> Evaluate | None:
    """Return the function that measures ``loss`` on the pairs of ``data.heldout``; None if it has none.

    It returns ``metrics/eval/<source>/<measure>``, with the measures of the loss (``preference_accuracy``) and
    ``preference_loss`` or ``reward_loss``. ``indexes`` and ``mesh``: as for ``evals.in_loop.heldout_hook``. Raises
    UserError for text beside the pairs of a reward model, which predicts none.
    """
    shard, known = shard_of(config.train.parallel, mesh), indexes or {}
    sets = []
    for name in config.data.heldout:
        pairs = _load(name, config, known.get(heldout_key(name)), shard)
        if pairs is not None:
            sets.append(pairs)
        elif config.model.num_labels:
            raise UserError(
                f"data.heldout.{name} holds text, and a reward model predicts none",
                allowed="held-out pairs",
                hint=f"data.heldout.{name}=null removes it",
            )

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return {key: value for pairs in sets for key, value in _measure(model, loss, pairs).items()}
        finally:
            model.train(was_training)

    return evaluate if sets else None


def _load(name: str, config: RunConfig, index: bytes | None, shard: Shard) -> _Pairs | None:
    """Return the rows of this rank of a held-out set; None for a set that is not of pairs."""
    folder = config.data.heldout[name]
    if index is None:
        with closing(open_files(folder, fetch=config.data.fetch)) as files:
            index = read_heldout(folder, files)
    record = parse_heldout(index, folder)
    if not isinstance(record, ExamplesRecord) or not record.pairs:
        return None
    seq_len = config.data.seq_len
    with closing(ExampleSource(folder, record)) as source:
        sequences = ExampleRows(source, seq_len, record.eod_id)
        n_rows = min(sequences.size, math.ceil(config.train.eval_tokens / seq_len))
        indexes = (np.arange(n_rows) * sequences.size // n_rows)[shard.rank :: shard.ranks]
        per_rank, width = math.ceil(n_rows / shard.ranks), max(1, _BATCH_TOKENS // seq_len)
        starts = range(0, per_rank, width)
        batches = [_batch(sequences, indexes[start : start + width], min(width, per_rank - start)) for start in starts]
    return _Pairs(name, batches)


def _batch(sequences: ExampleRows, rows: Int64s, n_rows: int) -> Batch:
    """Return ``n_rows`` rows, of which those after ``rows`` have no target in the loss."""
    record, read = sequences.source.record, rows if rows.size else np.zeros(1, dtype=np.int64)
    tokens = np.empty((read.size, sequences.seq_len + 1), dtype=sequences.source.dtype)
    info = sequences.read(read, tokens)
    masked = info.masked if rows.size else np.ones((1, sequences.seq_len), dtype=bool)
    source = np.zeros(read.size, dtype=np.int16)
    return Batch(tokens, source, 0, record.eod_id, True, info.joints, masked, info.values).padded(n_rows, record.eod_id)


def _measure(model: nn.Module, loss: Loss, pairs: _Pairs) -> dict[str, float]:
    device = next(model.parameters()).device
    sums: dict[str, torch.Tensor] = {}
    for batch in pairs.batches:
        total, weight, metrics = loss(model, to_microbatch(batch, device, mask_documents=True))
        for name, value in {"loss": total, "weight": weight, **metrics}.items():
            if name != "loss/train/targets":
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=device)) + value.double()
    packed = torch.stack(list(sums.values()))
    if dist.is_initialized():
        dist.all_reduce(packed)
    values = dict(zip(sums, packed.tolist(), strict=True))
    weight = values.pop("weight")
    kind = next(name for name in values if "/" in name).partition("/")[0]
    values[f"{kind}/loss"] = values.pop("loss")
    return {f"metrics/eval/{pairs.name}/{name.replace('/', '_')}": value / weight for name, value in values.items()}
