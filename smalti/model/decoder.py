"""The decoder-only transformer: embedding, blocks, norm, output head.

Promises: a plain ``nn.Module`` that knows no mesh and touches each parameter only inside the forward of the module
that owns it (the output head inside the decoder's), so it can be sharded from outside block by block; its only buffers
(biases on the choice of experts) begin at 0, so it can be built on the meta device. Auxiliary sums are sums, never
means: the caller divides. Computes no loss by itself.

Shapes: B batch, T time, D hidden, V vocabulary, L layers, E experts, S keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.choice import kernels_of
from smalti.model.blocks.attention.module import Attention
from smalti.model.blocks.attention.scores import Attend
from smalti.model.blocks.embed import build_embed, build_lm_head
from smalti.model.blocks.kv_cache import Cache
from smalti.model.blocks.mlp import MLP
from smalti.model.blocks.moe import MoE, RouterStats, over_layers
from smalti.model.blocks.norm import build_norm
from smalti.model.blocks.rope import rope_table

Head = Callable[[Tensor, Tensor], Tensor]
"""(hidden_BTD after the last norm, lm_head_weight_VD) -> whatever ``DecoderOutput.value`` shall be."""


class DecoderOutput(NamedTuple):
    """A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    value: Tensor
    """Logits [B, T, V], or what ``head`` returned."""
    router: RouterStats | None
    """Sums over layers; None for a dense model."""


class Block(nn.Module):
    """x + m attention(norm(x)), then x + m mlp(norm(x)), m the ``residual_multiplier``.

    With ``norm_placement`` post the norms are of what is written: x + m norm(attention(x)).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = build_norm(config.norm, config.hidden_size, config.norm_eps)
        self.mlp: MLP | MoE = MoE(config) if config.has_experts(layer) else MLP(config)
        self.norm_placement = config.norm_placement
        self.residual_multiplier = config.residual_multiplier

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        attend: Attend | None,
        mask_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """[B, T, D] -> [B, T, D] and this layer's router sums (None when dense)."""
        pre = self.norm_placement == "pre"
        read_BTD = self.attention_norm(x_BTD) if pre else x_BTD
        change_BTD = self.attention(read_BTD, rope, attend, cache)
        x_BTD = self._add(x_BTD, change_BTD if pre else self.attention_norm(change_BTD))
        read_BTD, stats = self.mlp_norm(x_BTD) if pre else x_BTD, None
        if isinstance(self.mlp, MoE):
            change_BTD, stats = self.mlp(read_BTD, mask_BT)
        else:
            change_BTD = self.mlp(read_BTD)
        return self._add(x_BTD, change_BTD if pre else self.mlp_norm(change_BTD)), stats

    def _add(self, x_BTD: Tensor, change_BTD: Tensor) -> Tensor:
        return x_BTD + (change_BTD if self.residual_multiplier == 1 else change_BTD * self.residual_multiplier)


class Decoder(nn.Module):
    """The model of a ``ModelConfig``. Parameters: ``embed. blocks.N. norm. lm_head.`` (no lm_head when tied).

    With ``embedding_norm`` also ``embedding_norm.``.

    Weights are torch's defaults until ``smalti.model.init.init_weights`` or a state dict sets them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = build_embed(config)
        self.embedding_norm = (
            build_norm(config.norm, config.hidden_size, config.norm_eps) if config.embedding_norm else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config.norm, config.hidden_size, config.norm_eps)
        self.lm_head = build_lm_head(config)

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        cache: Cache | None = None,
        mask_BT: Tensor | None = None,
        head: Head | None = None,
    ) -> DecoderOutput:
        """Token ids to logits [B, T, V], or to ``head(hidden_BTD, lm_head_weight_VD)`` run inside this forward.

        positions_BT: default 0..T-1. documents_BT: attention stays inside a run of equal numbers; absent, a row is one.
        mask_BT: True for tokens that count in the router sums (nothing else); absent, all. cache: read and extended by
        T tokens; it says where they stand, so not together with positions or documents.
        """
        _, time = input_ids_BT.shape
        x_BTD = self.embed(input_ids_BT)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        kernels: dict[int | None, Attend] = {}
        lengths_B1 = None
        if cache is not None:
            assert documents_BT is None and positions_BT is None, "a cached row is one document from its begin on"
            positions_BT, lengths_B1 = cache.begin(x_BTD)
        else:
            kernels = kernels_of(self.config, x_BTD, documents_BT)
        if positions_BT is None:
            positions_BT = torch.arange(time, device=input_ids_BT.device)[None]
        rope = None
        if self.config.position == "rope":
            rope = rope_table(self.config, positions_BT, x_BTD.dtype, lengths_B1)
        per_layer: list[RouterStats] = []
        for layer, block in enumerate(self.blocks):
            x_BTD, stats = block(x_BTD, rope, kernels.get(self.config.window(layer)), mask_BT, cache)
            if stats is not None:
                per_layer.append(stats)
        if cache is not None:
            cache.advance(time)
        hidden_BTD = self.norm(x_BTD)
        weight_VD = self.embed.weight if self.lm_head is None else self.lm_head.weight
        value = self.logits(hidden_BTD, weight_VD) if head is None else head(hidden_BTD, weight_VD)
        return DecoderOutput(value, over_layers(per_layer))

    def logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """What a head makes logits with: hidden @ weight^T, bounded by ``final_logit_softcapping``; [B, T, V]."""
        return soft_cap(F.linear(hidden_BTD, weight_VD), self.config.final_logit_softcapping)


def soft_cap(x: Tensor, bound: float | None) -> Tensor:
    """bound tanh(x / bound), in the shape and dtype of x; x itself without a bound (Gemma 2, arXiv:2408.00118)."""
    return x if bound is None else bound * torch.tanh(x / bound)
