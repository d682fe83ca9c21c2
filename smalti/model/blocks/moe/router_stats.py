"""Sums for the losses that keep experts evenly used.

Guarantees: sums over sequences and tokens, so any split of a batch into microbatches or ranks adds up to the same loss
and the same gradient. Counts are a scatter and a sum, without a wait for the device.

Shapes: B batch, T time, E experts, k experts per token, L layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smalti.model.blocks.moe.router import Routing

OverRow = Callable[[Tensor], Tensor]
"""Sums [B, ...] over this rank's tokens of each row -> those over all tokens of the row."""


class RouterStats(NamedTuple):
    """Sums for the auxiliary losses. A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    balance_sum: Tensor
    """Scalar: sum over sequences (and layers) of T_s * E * sum_e f_e P_e; equals the tokens when in balance."""
    z_sum: Tensor
    """Scalar: sum over counted tokens (and layers) of logsumexp(router logits)^2."""
    load_LE: Tensor
    """Slots that each expert of each layer received from counted tokens; no gradient. [E] for a single layer."""
    probability_LE: Tensor
    """Sum over counted tokens of each expert's share of the scores. [E] for a single layer."""
    entropy_L: Tensor
    """Sum over counted tokens of the entropy of those shares, in parts of log E; no gradient. [] for a single layer."""


def router_stats(routing: Routing, mask_BT: Tensor | None, over_row: OverRow | None = None) -> RouterStats:
    """Compute the sums of one layer; ``mask_BT`` is True for tokens that count (None: all).

    over_row: where ranks share a row. f_e and T_s are then of the whole row and P_e of the tokens here, so the ranks'
    balance sums add up to that of the row; all other sums are of the tokens here.

    Balance (Switch, arXiv:2101.03961, eq. 4, over one sequence of T_s counted tokens): E * sum_e f_e P_e with f_e the
    share of slots and P_e the mean share of the scores (of sigmoids, as in DeepSeek-V3, arXiv:2412.19437, eq. 18-20);
    times T_s, summed over sequences. The gradient runs through P_e only. z (ST-MoE, arXiv:2202.08906, eq. 5):
    logsumexp^2 per token.
    """
    score_BTE, expert_BTk = routing.score_BTE, routing.expert_BTk
    experts, top_k = score_BTE.shape[-1], expert_BTk.shape[-1]
    share_BTE = score_BTE / score_BTE.sum(dim=-1, keepdim=True)
    hit_BTE = torch.zeros_like(share_BTE, requires_grad=False).scatter_(-1, expert_BTk, 1.0)
    square_BT = routing.logits_BTE.logsumexp(dim=-1).square()
    entropy_BT = torch.special.entr(share_BTE.detach()).sum(dim=-1) / math.log(experts)
    if mask_BT is None:
        tokens_B1: Tensor | int = share_BTE.shape[1]
    else:
        valid_BT = mask_BT.to(share_BTE.dtype)
        valid_B1 = valid_BT.sum(dim=1, keepdim=True)
        tokens_B1 = valid_B1.clamp(min=1)
        hit_BTE, share_BTE = hit_BTE * valid_BT[..., None], share_BTE * valid_BT[..., None]
        square_BT, entropy_BT = square_BT * valid_BT, entropy_BT * valid_BT
    count_BE, share_BE = hit_BTE.sum(dim=1), share_BTE.sum(dim=1)
    of_row_BE = count_BE
    if over_row is not None:
        own_B1 = count_BE.new_full((len(count_BE), 1), share_BTE.shape[1]) if mask_BT is None else valid_B1
        of_row_BE, whole_B1 = over_row(torch.cat((count_BE, own_B1), dim=1)).split((experts, 1), dim=1)
        tokens_B1 = whole_B1.clamp(min=1)
    balance_sum = (of_row_BE / tokens_B1 * share_BE).sum() * (experts / top_k)
    return RouterStats(balance_sum, square_BT.sum(), count_BE.sum(dim=0), share_BE.sum(dim=0), entropy_BT.sum())


def over_layers(per_layer: Sequence[RouterStats]) -> RouterStats | None:
    """Combine the sums of all layers: two are added, the others stacked; None without an MoE layer."""
    if not per_layer:
        return None
    balance, z, *stacked = (torch.stack(values) for values in zip(*per_layer, strict=True))
    return RouterStats(balance.sum(), z.sum(), *stacked)
