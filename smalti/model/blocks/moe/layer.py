"""A dropless top-k mixture of experts (Shazeer et al. 2017; MegaBlocks, arXiv:2211.15841; DBRX 2024).

Shapes: B batch, T time, D hidden, E experts, k experts per token.
"""

from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.model.blocks.moe.balance import RouterStats, router_stats
from smalti.model.blocks.moe.experts import Experts
from smalti.model.blocks.moe.router import Router


class MoE(nn.Module):
    """Router and experts in place of an MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """[B, T, D] -> [B, T, D] and the sums of this layer; ``mask_BT`` True marks tokens that count in the sums."""
        routing = self.router(x_BTD)
        expert_Nk, weight_Nk = routing.expert_BTk.flatten(0, 1), routing.weight_BTk.flatten(0, 1)
        out_ND = self.experts(x_BTD.flatten(0, 1), expert_Nk, weight_Nk)
        return out_ND.view_as(x_BTD), router_stats(routing, mask_BT)
