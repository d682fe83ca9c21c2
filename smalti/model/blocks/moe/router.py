"""The router: which experts a token is sent to, and with what weights.

Guarantees: logits, scores and weights are float32 whatever the parameters' dtype, because rounding would change choices
near a tie; weights come from the scores alone, without the bias on the choice.

Shapes: B batch, T time, D hidden, E experts, k experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.config.model import ModelConfig

Choose = Callable[[Tensor], Tensor]
"""Scores [B, T, E] -> the k experts of each token, [B, T, k]."""


class Routing(NamedTuple):
    """Output of the router for each token. A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    logits_BTE: Tensor
    """float32."""
    score_BTE: Tensor
    """Softmax of the logits, or the sigmoid of each."""
    expert_BTk: Tensor
    """int64: the chosen experts, all different."""
    weight_BTk: Tensor
    """Factor on the output of each of them; float32."""


class Router(nn.Module):
    """A linear layer without bias, the scores, and the k experts with the largest scores.

    With ``bias_update_rate`` each expert has a ``choice_bias``, a buffer that is added to its score when experts are
    chosen and nowhere else (DeepSeek-V3, arXiv:2412.19437, eq. 16); ``smalti.train.expert_balance`` updates it between
    steps.
    """

    full_precision = True
    """Read by ``fsdp.shard``, which leaves this weight in float32 under mixed precision."""
    choice_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config.moe
        experts = config.moe.num_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.register_buffer("choice_bias", torch.zeros(experts) if config.moe.bias_update_rate else None)
        self.chooser: Choose | None = None
        """Replaces ``choose``, to record, force or spread choices; see ``choices.py``."""
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x_BTD: Tensor) -> Routing:
        """Route tokens [B, T, D] of any dtype."""
        linear = _Float32Linear.apply if torch.is_grad_enabled() else _float32_linear
        logits_BTE = linear(x_BTD, self.weight)
        score_BTE = logits_BTE.softmax(dim=-1) if self.config.score == "softmax" else logits_BTE.sigmoid()
        choose = self.choose if self.chooser is None else self.chooser
        expert_BTk = choose(score_BTE.detach())
        return Routing(logits_BTE, score_BTE, expert_BTk, self._weights(score_BTE.gather(-1, expert_BTk)))

    def choose(self, score_BTE: Tensor) -> Tensor:
        """Return the k experts of each token, [B, T, k], best first."""
        if self.choice_bias is not None:
            score_BTE = score_BTE + self.choice_bias.float()
        return score_BTE.topk(self.config.num_experts_per_tok, dim=-1).indices

    def _weights(self, chosen_BTk: Tensor) -> Tensor:
        if self.config.norm_topk_prob:
            p = self.config.norm_topk_p
            norm_BT1 = (
                chosen_BTk.sum(dim=-1, keepdim=True)  # scores are positive, and vector_norm is slow over few values
                if p == 1
                else torch.linalg.vector_norm(chosen_BTk, ord=p, dim=-1, keepdim=True)
            )
            chosen_BTk = chosen_BTk / norm_BT1.clamp(min=torch.finfo(torch.float32).tiny)
        factor = self.config.routed_scaling_factor
        return chosen_BTk if factor == 1 else chosen_BTk * factor


def _float32_linear(x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
    return F.linear(x_BTD.float(), weight_ED.float())


class _Float32Linear(torch.autograd.Function):
    """x @ weight^T in float32; inputs of any dtype are saved for backward as they are, without a float32 copy."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_ED)
        return _float32_linear(x_BTD, weight_ED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, weight_ED = ctx.saved_tensors
        grad_weight_ED = grad_BTE.flatten(0, -2).T @ x_BTD.flatten(0, -2).float()
        return (grad_BTE @ weight_ED.float()).to(x_BTD.dtype), grad_weight_ED.to(weight_ED.dtype)
