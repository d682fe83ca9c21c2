"""A dropless top-k MoE in place of an MLP: ``MoE``, and the router sums that it returns, ``RouterStats``."""

from smalti.model.blocks.moe.layer import MoE
from smalti.model.blocks.moe.router_stats import RouterStats, over_layers

__all__ = ["MoE", "RouterStats", "over_layers"]
