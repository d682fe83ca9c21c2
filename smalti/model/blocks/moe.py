"""A dropless top-k mixture of experts (Shazeer et al. 2017; MegaBlocks, arXiv:2211.15841; DBRX 2024).

Promises: every token reaches its k experts, none is dropped; the router works in float32 whatever the parameters'
dtype; no host synchronisation with the ``grouped`` kernel; forward and backward are gathers and reductions in a fixed
order, so the same input gives the same bits. The auxiliary sums are sums over sequences and tokens, so any split of a
batch into microbatches or ranks adds up to the same loss and the same gradient.

Shapes: B batch, T time, N = B * T tokens, D hidden, E experts, k experts per token, S = N * k slots (a token at one of
its experts), F intermediate, n the tokens of one expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.model.blocks.mlp import activation


class RouterStats(NamedTuple):
    """Sums for the auxiliary losses. A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    balance_sum: Tensor
    """Scalar: sum over sequences (and layers) of T_s * E * sum_e f_e P_e; equals the tokens when in balance."""
    z_sum: Tensor
    """Scalar: sum over counted tokens (and layers) of logsumexp(router logits)^2."""
    load_LE: Tensor
    """Slots that each expert of each layer received from counted tokens; no gradient. [E] for a single layer."""


class Experts(nn.Module):
    """The experts' weights, all stored [E, F, D] like DBRX's w1, v1, w2, so that converting is a view and no kernel
    needs a copy: ``grouped_mm`` takes the transposed view of gate and up, and down as it is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        shape = (config.moe.num_experts, config.expert_width, config.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(shape)) if config.gated else None
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape))
        self.kernel = config.moe.kernel
        self.activation = activation(config)
        for weight_EFD in self.parameters():
            nn.init.normal_(weight_EFD, std=config.initializer_range)

    def forward(self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        """sum_k weight_k * expert_k(x): [N, D] -> [N, D]."""
        kernel = {"grouped": _grouped, "loop": _loop}[self.kernel]
        return kernel(self, x_ND, expert_Nk, weight_Nk)


class MoE(nn.Module):
    """Router and experts in place of an MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        _check_widths(config)
        self.num_experts = config.moe.num_experts
        self.top_k = config.moe.num_experts_per_tok
        self.router = Router(config.hidden_size, self.num_experts)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """[B, T, D] -> [B, T, D] and the sums of this layer; ``mask_BT`` True marks tokens that count in the sums."""
        batch, time, width = x_BTD.shape
        logits_BTE = self.router(x_BTD)
        probability_BTE = logits_BTE.softmax(dim=-1)
        top_BTk, expert_BTk = probability_BTE.topk(self.top_k, dim=-1)
        weight_BTk = top_BTk / top_BTk.sum(dim=-1, keepdim=True)
        out_ND = self.experts(x_BTD.reshape(-1, width), expert_BTk.flatten(0, 1), weight_BTk.flatten(0, 1))
        stats = router_stats(logits_BTE, probability_BTE, expert_BTk, mask_BT)
        return out_ND.view(batch, time, width), stats


class Router(nn.Module):
    """A linear layer without bias, computed in float32: near ties decide which experts a token meets."""

    full_precision = True
    """Asks the one who lays mixed precision on the model to leave this weight in float32."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> float32 logits [B, T, E]."""
        return F.linear(x_BTD.float(), self.weight.float())


def router_stats(
    logits_BTE: Tensor, probability_BTE: Tensor, expert_BTk: Tensor, mask_BT: Tensor | None
) -> RouterStats:
    """The sums of one layer.

    Balance (Switch, arXiv:2101.03961, eq. 4, over one sequence of T_s counted tokens): E * sum_e f_e P_e with f_e the
    share of slots and P_e the mean probability; times T_s, summed over sequences. The gradient runs through P_e only.
    z (ST-MoE, arXiv:2202.08906, eq. 5): logsumexp^2 per token.
    """
    experts, top_k = probability_BTE.shape[-1], expert_BTk.shape[-1]
    hit_BTE = torch.zeros_like(probability_BTE, requires_grad=False).scatter_(-1, expert_BTk, 1.0)
    square_BT = logits_BTE.logsumexp(dim=-1).square()
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


def _loop(experts: Experts, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """The naive reference, expert after expert; synchronises with the device and takes any width."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(experts.up_proj.shape[0]):
        token, slot = torch.where(expert_Nk == expert)
        mine_nD = x_ND[token]
        inner_nF = mine_nD @ experts.up_proj[expert].T
        if experts.gate_proj is None:
            inner_nF = experts.activation(inner_nF)
        else:
            inner_nF = experts.activation(mine_nD @ experts.gate_proj[expert].T) * inner_nF
        out_nD = (inner_nF @ experts.down_proj[expert]) * weight_Nk[token, slot, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, out_nD)
    return out_ND


def _grouped(experts: Experts, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """All experts in one grouped matmul per weight, on slots sorted by expert."""
    top_k = expert_Nk.shape[1]
    expert_S, order_S = expert_Nk.flatten().sort(stable=True)
    slot_S = torch.empty_like(order_S)
    slot_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    slot_Nk = slot_S.view(-1, top_k)
    token_S = order_S // top_k
    labels_E = torch.arange(experts.up_proj.shape[0], device=expert_S.device)
    end_E = torch.searchsorted(expert_S, labels_E, right=True, out_int32=True)

    x_SD = _Permute.apply(x_ND, token_S, slot_Nk)
    inner_SF = F.grouped_mm(x_SD, experts.up_proj.transpose(-2, -1), offs=end_E)
    if experts.gate_proj is None:
        inner_SF = experts.activation(inner_SF)
    else:
        inner_SF = experts.activation(F.grouped_mm(x_SD, experts.gate_proj.transpose(-2, -1), offs=end_E)) * inner_SF
    y_SD = F.grouped_mm(inner_SF, experts.down_proj, offs=end_E)
    out_ND: Tensor = _Combine.apply(y_SD, weight_Nk, token_S, order_S, slot_Nk)
    return out_ND


class _Permute(torch.autograd.Function):
    """Tokens to slots: a gather; backward gathers each token's k slots and adds them in order (no scatter-add)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_S: Tensor, slot_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(slot_Nk)
        return x_ND.index_select(0, token_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (slot_Nk,) = ctx.saved_tensors
        return _gather(grad_SD, slot_Nk).sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    """Slots to tokens: out = sum over a token's slots of weight * y; all gathers, in both directions."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, weight_Nk: Tensor, token_S: Tensor, order_S: Tensor, slot_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(y_SD, weight_Nk, token_S, order_S, slot_Nk)
        weight_N1k = weight_Nk.to(y_SD.dtype)[:, None, :]
        return (weight_N1k @ _gather(y_SD, slot_Nk)).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_SD, weight_Nk, token_S, order_S, slot_Nk = ctx.saved_tensors
        weight_S1 = weight_Nk.to(grad_ND.dtype).flatten().index_select(0, order_S)[:, None]
        grad_SD = grad_ND.index_select(0, token_S) * weight_S1
        grad_Nk = (_gather(y_SD, slot_Nk) @ grad_ND[:, :, None]).squeeze(2).to(weight_Nk.dtype)
        return grad_SD, grad_Nk, None, None, None


def _gather(rows_SD: Tensor, slot_Nk: Tensor) -> Tensor:
    """Rows of each token's slots, [N, k, D]."""
    return rows_SD.index_select(0, slot_Nk.flatten()).view(*slot_Nk.shape, rows_SD.shape[1])


def _check_widths(config: ModelConfig) -> None:
    """grouped_mm wants strides that are multiples of 16 bytes, that is 8 values of bfloat16."""
    assert config.moe is not None
    for name in ("hidden_size", "intermediate_size"):
        if config.moe.kernel == "grouped" and getattr(config, name) % 8:
            raise UserError(
                f"model.{name}={getattr(config, name)} does not fit the 'grouped' expert kernel",
                allowed="a multiple of 8 (rows of 16 bytes in bfloat16)",
                hint=f"model.{name}={-(-getattr(config, name) // 8) * 8}, or model.moe.kernel=loop (slow)",
            )
