"""Scores windows with the model of a training job, split over the ranks of any mesh.

All ranks run the same number of forward passes over equally many rows of one width, as models that exchange buffers
need. The scores of all windows are on every rank, and equal those of ``likelihood.score_greedy`` up to rounding.

B: rows of a forward pass. T: inputs of a row. t: those on this rank. N: scored tokens on this rank. W: windows. D:
hidden size. V: vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.parallel import ParallelConfig
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import sequence
from smalti.evals.likelihood import Scores, Window, logits_of, scores_of, token_scores


@dataclass(frozen=True)
class Shard:
    """The part of the data that a rank scores: its rows, and the part of their tokens."""

    rank: int
    ranks: int
    part_of: Callable[[Tensor], Tensor]
    multiple: int = 1
    """Rows have a multiple of so many tokens."""


def shard_of(parallel: ParallelConfig, mesh: Mesh | None) -> Shard:
    """Return the share of this rank. ``mesh``: of the job; None is allowed if every rank reads different rows."""
    if mesh is not None:
        part = sequence.own_part(mesh, context=parallel.context)
        layout = mesh.layout
        return Shard(mesh.data_rank, layout.data_ranks, part, multiple=2 * layout.sequence * layout.tensor)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sharing = [axis for axis in ("sequence", "tensor", "pipeline") if getattr(parallel, axis) != 1]
    if sharing and parallel.ranks > 1:
        raise UserError(
            f"an evaluation with an axis {sharing[0]} needs the mesh, because some ranks read the same rows",
            hint="build(config, evaluation=heldout_hook), and tasks=suite_hook for evals",
        )
    return Shard(rank, ranks, lambda rows_BT: rows_BT)


def score(model: nn.Module, windows: Sequence[Window], shard: Shard, *, batch_tokens: int) -> Scores:
    """Return the scores of all windows on every rank. A collective; ``batch_tokens`` of each rank and forward pass."""
    device = next(model.parameters()).device
    # Nats, missed targets and targets: the last one says how many ranks have counted a window.
    totals_3W = torch.zeros(3, len(windows), dtype=torch.float64, device=device)
    order = sorted(range(len(windows)), key=lambda row: -len(windows[row].ids))
    start = 0
    with torch.no_grad():
        while start < len(order):
            longest = len(windows[order[start]].ids) - 1
            width = math.ceil(longest / shard.multiple) * shard.multiple
            n_rows = max(1, batch_tokens // width)
            rows = order[start : start + n_rows * shard.ranks][shard.rank :: shard.ranks]
            totals_3W += _forward(model, windows, rows, (n_rows, width), shard, device)
            start += n_rows * shard.ranks
    if dist.is_initialized():
        dist.all_reduce(totals_3W)
    nats, missed, counted = totals_3W.cpu().numpy()
    copies = counted / [len(window.ids) - window.first for window in windows]
    return scores_of(windows, nats / copies, missed)


def _forward(
    model: nn.Module,
    windows: Sequence[Window],
    rows: Sequence[int],
    shape: tuple[int, int],
    shard: Shard,
    device: torch.device,
) -> Tensor:
    """Return what this rank adds to the sums of all windows, float64 [3, W]."""
    inputs, targets = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    owner = np.full(shape, -1, dtype=np.int64)
    for place_in_batch, row in enumerate(rows):
        window = windows[row]
        length = len(window.ids) - 1
        inputs[place_in_batch, :length], targets[place_in_batch, :length] = window.ids[:-1], window.ids[1:]
        owner[place_in_batch, window.first - 1 : length] = row
    inputs_Bt, targets_Bt, owner_Bt = (
        shard.part_of(torch.from_numpy(array).to(device)) for array in (inputs, targets, owner)
    )
    scored_Bt = owner_Bt >= 0

    def head(hidden_BtD: Tensor, weight_VD: Tensor) -> Tensor:
        targets_N = targets_Bt[scored_Bt]
        scores_2N = token_scores(hidden_BtD[scored_Bt], weight_VD, targets_N, logits_of(model), greedy=True)
        sums_3N = torch.cat([scores_2N.double(), torch.ones_like(scores_2N[:1], dtype=torch.float64)])
        totals_3W = torch.zeros(3, len(windows), dtype=torch.float64, device=device)
        return totals_3W.index_add_(1, owner_Bt[scored_Bt], sums_3N)

    value: Tensor = model(inputs_Bt, head=head).value
    return value
