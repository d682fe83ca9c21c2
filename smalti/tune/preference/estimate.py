"""KTO's estimate of the divergence from the reference, which changes after each step."""

import torch
from torch import Tensor, nn

from smalti.tune.losses.preference import mean_kl


class KLEstimate:
    """The mean log-ratio of the mismatched answers of the previous step, at least 0; a ``train.step.LossState``."""

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.float64)

    def on(self, device: torch.device) -> Tensor:
        """Return the estimate as float32 on ``device``, shape ()."""
        self.value = self.value.to(device)
        return self.value.float()

    @torch.no_grad()
    def after_step(self, model: nn.Module, sums: dict[str, Tensor], skip: Tensor) -> None:
        """Set it from the sums over the whole batch; unchanged where ``skip`` is true."""
        estimate = mean_kl(sums["preference/kl_estimate"], sums["weight"])
        self.value.copy_(torch.where(skip, self.value, estimate.to(self.value.dtype)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor of a checkpoint."""
        return {"loss.kl": self.value}
