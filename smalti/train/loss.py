"""Losses: ``(model, microbatch) -> (sum, weight, metrics)``, all of them sums (see ``train.step``).

Language modelling adds cross-entropy of next tokens, an optional z-loss of the output (PaLM, arXiv 2204.02311, section
5), and for a mixture of experts the balance loss (Switch, arXiv 2101.03961, eq. 4, taken per sequence and weighted by
its tokens) and the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5). Each is a sum over tokens or sequences, so it is
the same whatever the split into microbatches and ranks.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.step import Metrics


class LanguageLoss:
    """Next-token loss of a ``Decoder``; weight = number of targets that are not ignored."""

    def __init__(self, model: ModelConfig, config: LossConfig) -> None:
        self._layers = model.num_hidden_layers
        self._moe = model.moe
        self._config = config

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Forward one microbatch; returns the summed loss, the number of targets, and sums for the log."""
        counted = microbatch.targets != IGNORE
        output = model(
            microbatch.inputs,
            microbatch.positions,
            microbatch.documents,
            mask_BT=counted,
            head=cross_entropy_head(microbatch.targets, self._config.z_loss_coef, self._config.chunk_tokens),
        )
        total, z_loss = output.value
        metrics = {"loss/train/cross_entropy": (total - z_loss).detach()}
        if self._config.z_loss_coef:
            metrics["loss/train/z"] = z_loss
        if self._moe is not None:
            balance = output.router.balance_sum / self._layers
            router_z = output.router.z_sum / self._layers
            total = total + self._moe.balance_loss_coef * balance + self._moe.z_loss_coef * router_z
            metrics["loss/train/balance"] = balance.detach()
            metrics["loss/train/router_z"] = router_z.detach()
            metrics["moe/load"] = output.router.load_LE
        return total, counted.sum(), metrics


def cross_entropy_head(
    targets_BT: Tensor, z_loss_coef: float, chunk_tokens: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A head for ``Decoder.forward``: (hidden_BTD, weight_VD) -> (cross-entropy + z-loss, z-loss), fp32 sums.

    The second is for the log and carries no gradient.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_ND = hidden_BTD.flatten(0, -2)
        targets_N = targets_BT.flatten()
        return _ChunkedCrossEntropy.apply(
            hidden_ND, weight_VD, targets_N, z_loss_coef, chunk_tokens, torch.is_grad_enabled()
        )

    return head


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose logits exist for one chunk of tokens at a time.

    The gradient is formed in the forward pass while a chunk's probabilities are at hand (the idea of fused linear
    cross-entropy, arXiv 2410.10989): no logits are kept and none are computed twice. The gradient of the output
    matrix adds up in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        z_loss_coef: float,
        chunk_tokens: int,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        z_loss = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_gradient else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_gradient else None
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD, targets_C = hidden_ND[rows], targets_N[rows]
            counted_C = targets_C != IGNORE
            safe_C1 = targets_C.clamp(min=0)[:, None]
            logits_CV = hidden_CD @ weight_VD.T
            grad_CV = torch.softmax(logits_CV, dim=-1, dtype=torch.float32)
            # log Z = logit - log p at the largest p, which cannot underflow; cheaper than logsumexp + exp, and two amax
            # cheaper than one max with its index.
            log_partition_C = logits_CV.amax(dim=-1).float() - grad_CV.amax(dim=-1).log()
            picked_C = logits_CV.gather(1, safe_C1)[:, 0].float()
            z_chunk = z_loss_coef * (log_partition_C.square() * counted_C).sum()
            z_loss += z_chunk
            total += ((log_partition_C - picked_C) * counted_C).sum() + z_chunk
            if grad_hidden_ND is None or grad_weight_VD is None:
                continue
            # d/dlogits = softmax * (1 + 2 z logZ) - onehot; rows whose target is ignored are cut out of both products.
            if z_loss_coef:
                grad_CV *= (1 + 2 * z_loss_coef * log_partition_C)[:, None]
            grad_CV.scatter_add_(1, safe_C1, grad_CV.new_full((1, 1), -1.0).expand_as(safe_C1))
            grad_CV = grad_CV.to(hidden_ND.dtype)
            counted_C1 = counted_C[:, None].to(hidden_ND.dtype)
            torch.mul(grad_CV @ weight_VD, counted_C1, out=grad_hidden_ND[rows])
            grad_weight_VD += grad_CV.T @ (hidden_CD * counted_C1)
        ctx.mark_non_differentiable(z_loss)
        if grad_hidden_ND is not None and grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total, z_loss

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _grad_z: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        factor = grad_total.to(grad_hidden_ND.dtype)
        return grad_hidden_ND * factor, grad_weight_VD * factor, None, None, None, None
