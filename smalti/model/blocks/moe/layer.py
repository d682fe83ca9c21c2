"""The dropless top-k MoE layer (Shazeer et al. 2017; MegaBlocks, arXiv:2211.15841; DBRX 2024).

Shapes: B batch, T time, D hidden, N = B * T tokens, k experts per token.
"""

from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.model.blocks.mlp import MLP
from smalti.model.blocks.moe.experts import Experts
from smalti.model.blocks.moe.router import Router
from smalti.model.blocks.moe.router_stats import OverRow, RouterStats, router_stats


class MoE(nn.Module):
    """Router and experts in place of an MLP; shared experts, which every token uses, are one more MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.moe.num_shared_experts * config.expert_width
        as_one = config.model_copy(update={"intermediate_size": shared, "mlp_bias": False})
        self.shared_experts = MLP(as_one) if shared else None
        self.over_row: OverRow | None = None
        """Set by ``smalti.distributed.parallel`` if ranks share a row."""

    def forward(
        self, x_BTD: Tensor, mask_BT: Tensor | None = None, *, with_stats: bool = True
    ) -> tuple[Tensor, RouterStats | None]:
        """[B, T, D] -> [B, T, D] and the router sums; ``mask_BT`` is True for tokens that count in them."""
        routing = self.router(x_BTD)
        expert_Nk, weight_Nk = routing.expert_BTk.flatten(0, 1), routing.weight_BTk.flatten(0, 1)
        pending = self.experts.exchange_counts(expert_Nk)
        # First what needs no routed expert: it overlaps with the exchange of tokens between ranks.
        stats = router_stats(routing, mask_BT, self.over_row) if with_stats else None
        shared_BTD = None if self.shared_experts is None else self.shared_experts(x_BTD)
        out_BTD = self.experts(x_BTD.flatten(0, 1), expert_Nk, weight_Nk, pending).view_as(x_BTD)
        return out_BTD if shared_BTD is None else out_BTD + shared_BTD, stats
