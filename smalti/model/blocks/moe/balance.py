"""Sums for the losses that keep experts evenly used.

Promises: sums over sequences and tokens, so any split of a batch into microbatches or ranks adds up to the same loss
and the same gradient. Counts are a scatter and a sum, without a wait for the device.

Shapes: B batch, T time, E experts, k experts per token, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smalti.model.blocks.moe.router import Routing


class RouterStats(NamedTuple):
    """Sums for the auxiliary losses. A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    balance_sum: Tensor
    """Scalar: sum over sequences (and layers) of T_s * E * sum_e f_e P_e; equals the tokens when in balance."""
    z_sum: Tensor
    """Scalar: sum over counted tokens (and layers) of logsumexp(router logits)^2."""
    load_LE: Tensor
    """Slots that each expert of each layer received from counted tokens; no gradient. [E] for a single layer."""


def router_stats(routing: Routing, mask_BT: Tensor | None) -> RouterStats:
    """The sums of one layer; ``mask_BT`` True marks the tokens that count, absent all.

    Balance (Switch, arXiv:2101.03961, eq. 4, over one sequence of T_s counted tokens): E * sum_e f_e P_e with f_e the
    share of slots and P_e the mean score; times T_s, summed over sequences. The gradient runs through P_e only.
    z (ST-MoE, arXiv:2202.08906, eq. 5): logsumexp^2 per token.
    """
    probability_BTE, expert_BTk = routing.score_BTE, routing.expert_BTk
    experts, top_k = probability_BTE.shape[-1], expert_BTk.shape[-1]
    hit_BTE = torch.zeros_like(probability_BTE, requires_grad=False).scatter_(-1, expert_BTk, 1.0)
    square_BT = routing.logits_BTE.logsumexp(dim=-1).square()
    if mask_BT is None:
        tokens_B1: Tensor | int = probability_BTE.shape[1]
        count_BE, probability_BE = hit_BTE.sum(dim=1), probability_BTE.sum(dim=1)
        z_sum = square_BT.sum()
    else:
        valid_BT1 = mask_BT[..., None].to(probability_BTE.dtype)
        tokens_B1 = valid_BT1.sum(dim=1).clamp(min=1)
        count_BE, probability_BE = (hit_BTE * valid_BT1).sum(dim=1), (probability_BTE * valid_BT1).sum(dim=1)
        z_sum = (square_BT * valid_BT1[..., 0]).sum()
    balance_sum = (count_BE / tokens_B1 * probability_BE).sum() * (experts / top_k)
    return RouterStats(balance_sum, z_sum, count_BE.sum(dim=0))


def over_layers(per_layer: Sequence[RouterStats]) -> RouterStats | None:
    """The sums of all layers together, their loads stacked; None where there is no MoE layer."""
    if not per_layer:
        return None
    balance_L, z_L, load_L = zip(*per_layer, strict=True)
    return RouterStats(torch.stack(balance_L).sum(), torch.stack(z_L).sum(), torch.stack(load_L))
