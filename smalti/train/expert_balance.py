"""Load balancing of experts: auxiliary losses, and the update of the routers' biases after a step.

Guarantees: losses are sums over tokens and sequences, and biases follow from the load of the whole batch, so any split
into microbatches and ranks gives the same loss, gradient and biases. There is no collective besides the step's one
reduction, and nothing waits for the device.

Shapes: L layers with experts, E experts.
"""

import torch
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.model.blocks.moe import RouterStats
from smalti.model.blocks.moe.router import Router


class ExpertBalance:
    """The auxiliary losses of the routers, and the load of the previous step for the global one."""

    def __init__(self, model: ModelConfig) -> None:
        assert model.moe is not None
        self._moe = model.moe
        self._layers = sum(model.has_experts(layer) for layer in range(model.num_hidden_layers))
        self.local_rows = list(range(self._layers))
        """Numbers of the L layers that this rank's model has; a pipeline stage has fewer than all."""
        self.load_LE = torch.ones(self._layers, model.moe.num_experts)
        """Slots of the whole batch of the previous step, all 1 before the first; moved to the model's device on use."""

    def loss(self, stats: RouterStats) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the losses (each a sum over tokens and a mean over layers), and sums for the log.

        The loss of a sequence is ``RouterStats.balance_sum``. That of the batch is tokens * E * sum_e f_e P_e, with P_e
        the mean share of the scores in this microbatch and f_e the share of slots in the previous step. f_e of the
        batch itself (arXiv:2501.11873) would need a reduction in every layer; it changes little in one step. The
        gradient flows through P_e only.
        """
        moe = self._moe
        self.load_LE = self.load_LE.to(stats.probability_LE.device)
        share_LE = self.load_LE / self.load_LE.sum(dim=-1, keepdim=True).clamp(min=1)
        global_sum = (share_LE * stats.probability_LE).sum() * moe.num_experts
        parts = {
            "loss/train/balance": (moe.balance_loss_coef, stats.balance_sum),
            "loss/train/global_balance": (moe.global_balance_loss_coef, global_sum),
            "loss/train/router_z": (moe.z_loss_coef, stats.z_sum),
        }
        total = torch.zeros_like(stats.z_sum)
        log = {"moe/load": stats.load_LE, "moe/router_entropy": stats.entropy_L}
        for name, (weight, part) in parts.items():
            if weight:
                total = total + weight / self._layers * part
            if weight or name != "loss/train/global_balance":
                log[name] = part.detach() / self._layers
        return total, log

    @torch.no_grad()
    def after_step(self, model: nn.Module, sums: dict[str, Tensor], skip: Tensor) -> None:
        """Store the load of the whole batch (``moe/load``), the same on every rank, and update the biases by it;
        nothing where ``skip``, shape (), is true.

        bias_e += rate * sign(mean load - load_e): the same step for every expert that is used too little or too much
        (arXiv:2408.15664, alg. 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        """
        load_LE = sums["moe/load"]
        self.load_LE.copy_(torch.where(skip, self.load_LE, load_LE))
        if not self._moe.bias_update_rate:
            return
        routers = [module for module in model.modules() if isinstance(module, Router)]
        for router, row in zip(routers, self.local_rows, strict=True):
            if not router.weight.requires_grad:  # frozen beside adapters
                continue
            assert router.choice_bias is not None
            load_E = load_LE[row]  # by an int: a list of rows would be copied to the device, which waits for it
            direction_E = (load_E.mean() - load_E).sign().to(router.choice_bias.dtype)
            moved_E = router.choice_bias.add(direction_E, alpha=self._moe.bias_update_rate)
            router.choice_bias.copy_(torch.where(skip, router.choice_bias, moved_E))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint besides the model, which has the biases as buffers."""
        return {"balance.load": self.load_LE} if self._moe.global_balance_loss_coef else {}
