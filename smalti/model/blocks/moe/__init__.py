"""A dropless top-k mixture of experts in place of an MLP: ``MoE`` and the sums that it hands out, ``RouterStats``."""

from smalti.model.blocks.moe.layer import MoE
from smalti.model.blocks.moe.router_stats import RouterStats, over_layers

__all__ = ["MoE", "RouterStats", "over_layers"]
