"""The decoder-only transformer: embedding, blocks, norm, output head.

A plain ``nn.Module`` without a mesh. Each parameter is used only in the forward of the module that owns it (the output
head in the decoder's), so blocks can be sharded one by one; ``Hooks`` has what depends on whole rows or the whole
vocabulary. Auxiliary losses are sums: the caller divides.

Shapes: B batch, T time, D hidden, V vocabulary, L layers, E experts, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.choice import kernels_of
from smalti.model.blocks.attention.module import Attention
from smalti.model.blocks.attention.scores import Attend
from smalti.model.blocks.embed import build_embed, build_lm_head, build_score
from smalti.model.blocks.kv_cache import Cache
from smalti.model.blocks.mlp import MLP
from smalti.model.blocks.moe import MoE, RouterStats, over_layers
from smalti.model.blocks.norm import build_norm
from smalti.model.blocks.rope import rope_table

Head = Callable[[Tensor, Tensor], Tensor]
"""(hidden_BTD after the last norm, lm_head_weight_VD) -> ``DecoderOutput.value``."""


def _from_0(time: int, device: torch.device) -> Tensor:
    """Return the positions 0 to T - 1, [1, T]."""
    return torch.arange(time, device=device)[None]


@dataclass(frozen=True)
class Hooks:
    """Functions of whole rows or of the whole vocabulary; a decoder on one rank uses the defaults.

    ``smalti.distributed.parallel`` replaces fields if ranks share the rows or the vocabulary.
    """

    kernels_of: Callable[[ModelConfig, Tensor, Tensor | None, int | None], dict[int | None, Attend]] = kernels_of
    """(config, tensor of a batch's shape, documents_BT, n_documents) -> the attention kernel of each window."""
    positions_of: Callable[[int, torch.device], Tensor] = _from_0
    """(tokens of a row on this rank, device) -> default positions, [1, T]."""
    lengths_of: Callable[[Tensor], Tensor] | None = None
    """positions_BT -> the length that rotary scalings depend on; None: the largest position plus one."""
    project: Callable[[Tensor, Tensor], Tensor] = F.linear
    """(hidden_BTD, lm_head_weight_VD) -> logits [B, T, V]."""


class DecoderOutput(NamedTuple):
    """Output of a decoder. A tuple, because FSDP looks for tensors in tuples, not in dataclasses."""

    value: Tensor
    """Logits [B, T, V], or what ``head`` returned."""
    router: RouterStats | None
    """Sums over layers; None for a dense model, and with a cache, which training does not use."""


class Block(nn.Module):
    """x + m attention(norm(x)), then x + m mlp(norm(x)), m the ``residual_multiplier``.

    With ``norm_placement`` post the norms come after: x + m norm(attention(x)).
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
        """[B, T, D] -> [B, T, D] and this layer's router sums (None when dense, or with a cache)."""
        pre = self.norm_placement == "pre"
        read_BTD = self.attention_norm(x_BTD) if pre else x_BTD
        change_BTD = self.attention(read_BTD, rope, attend, cache)
        x_BTD = self._add(x_BTD, change_BTD if pre else self.attention_norm(change_BTD))
        read_BTD, stats = self.mlp_norm(x_BTD) if pre else x_BTD, None
        if isinstance(self.mlp, MoE):
            change_BTD, stats = self.mlp(read_BTD, mask_BT, with_stats=cache is None)
        else:
            change_BTD = self.mlp(read_BTD)
        return self._add(x_BTD, change_BTD if pre else self.mlp_norm(change_BTD)), stats

    def _add(self, x_BTD: Tensor, change_BTD: Tensor) -> Tensor:
        return x_BTD + (change_BTD if self.residual_multiplier == 1 else change_BTD * self.residual_multiplier)


class Decoder(nn.Module):
    """The model of a ``ModelConfig``.

    Parameters: ``embed. blocks.N. norm. lm_head.`` (no ``lm_head`` if tied), and ``embedding_norm.`` if configured; a
    reward model has ``score.`` instead of ``lm_head.``, and everywhere one score in place of V logits.
    Weights are torch's defaults until ``smalti.model.init.init_weights`` or a state dict sets them. The only buffers
    (biases on the choice of experts) start at 0, so the model can be built on the meta device.
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
        self.score = build_score(config)
        self.hooks = Hooks()

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        n_documents: int | None = None,
        cache: Cache | None = None,
        mask_BT: Tensor | None = None,
        head: Head | None = None,
    ) -> DecoderOutput:
        """Compute logits [B, T, V], or ``head(hidden_BTD, lm_head_weight_VD)``, from token ids.

        positions_BT: default 0..T-1. documents_BT: attention stays within a run of equal numbers; None: rows are one
        document each. n_documents: number of these runs; if it is None, counting them may wait for a GPU. mask_BT: True
        for tokens that count in the router sums (and nowhere else); None: all. cache: is read and extended by T tokens;
        it sets their positions, so positions and documents must be None.
        """
        x_BTD = self.embed_tokens(input_ids_BT)
        x_BTD, stats = self.run_blocks(
            x_BTD, positions_BT, documents_BT, n_documents=n_documents, cache=cache, mask_BT=mask_BT
        )
        return DecoderOutput(self.project_logits(x_BTD, head), over_layers(list(stats.values())))

    def embed_tokens(self, input_ids_BT: Tensor) -> Tensor:
        """Compute the input of the first block, [B, T, D], from token ids."""
        x_BTD: Tensor = self.embed(input_ids_BT)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def run_blocks(
        self,
        x_BTD: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        *,
        n_documents: int | None = None,
        cache: Cache | None = None,
        mask_BT: Tensor | None = None,
        layers: range | None = None,
    ) -> tuple[Tensor, dict[int, RouterStats]]:
        """Run the blocks ``layers`` (None: all): [B, T, D] -> [B, T, D] and the router sums by layer."""
        time = x_BTD.shape[1]
        kernels: dict[int | None, Attend] = {}
        lengths_B1 = None
        if cache is not None:
            assert documents_BT is None and positions_BT is None, (
                "with a cache, rows are one document each, from position 0"
            )
            positions_BT, lengths_B1 = cache.begin(x_BTD)
        else:
            if positions_BT is None:
                positions_BT = self.hooks.positions_of(time, x_BTD.device)
            like_BT1 = x_BTD.new_empty(()).expand(x_BTD.shape[0], positions_BT.shape[1], 1)
            kernels = self.hooks.kernels_of(self.config, like_BT1, documents_BT, n_documents)
            lengths_B1 = None if self.hooks.lengths_of is None else self.hooks.lengths_of(positions_BT)
        rope = None
        if self.config.position == "rope":
            rope = rope_table(self.config, positions_BT, x_BTD.dtype, lengths_B1)
        per_layer: dict[int, RouterStats] = {}
        for name, block in self.blocks.named_children():
            layer = int(name)
            if layers is not None and layer not in layers:
                continue
            x_BTD, stats = block(x_BTD, rope, kernels.get(self.config.window(layer)), mask_BT, cache)
            if stats is not None:
                per_layer[layer] = stats
        if cache is not None:
            cache.advance(time)
        return x_BTD, per_layer

    def project_logits(self, x_BTD: Tensor, head: Head | None) -> Tensor:
        """Compute logits [B, T, V], or the result of ``head``, from the output of the last block."""
        hidden_BTD = self.norm(x_BTD)
        output = self.score or self.lm_head or self.embed
        weight_VD = output.weight
        return self.logits(hidden_BTD, weight_VD) if head is None else head(hidden_BTD, weight_VD)

    def logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return hidden @ weight^T, bounded by ``final_logit_softcapping``; [B, T, V]."""
        return soft_cap(self.hooks.project(hidden_BTD, weight_VD), self.config.final_logit_softcapping)


def soft_cap(x: Tensor, bound: float | None) -> Tensor:
    """Return bound tanh(x / bound), in the shape and dtype of x, or x if bound is None (Gemma 2, arXiv:2408.00118)."""
    return x if bound is None else bound * torch.tanh(x / bound)
