"""The loss of language modelling: ``(model, microbatch) -> (sum, weight, metrics)``, all sums (``train.step``).

It adds cross-entropy of next tokens, an optional z-loss of the output (PaLM, arXiv 2204.02311, section 5), and for an
MoE the losses of ``train.expert_balance``. Each is a sum over tokens or sequences, so it does not depend on the split
into microbatches and ranks.
"""

from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.cross_entropy import cross_entropy_head
from smalti.train.expert_balance import ExpertBalance
from smalti.train.step import Metrics


class LanguageLoss:
    """Next-token loss of a ``Decoder``; weight = number of targets that are not ignored."""

    def __init__(self, model: ModelConfig, config: LossConfig) -> None:
        self.balance = ExpertBalance(model) if model.moe else None
        """Losses of the experts."""
        self._soft_cap = model.final_logit_softcapping
        self._config = config

    @property
    def state(self) -> ExpertBalance | None:
        """The losses of the experts, which need the load of each step."""
        return self.balance

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Run the forward pass of a microbatch; return the summed loss, the number of targets, and sums for the log."""
        if not microbatch.inputs.numel():
            raise UserError(
                f"a microbatch has {' x '.join(map(str, microbatch.inputs.shape))} tokens",
                allowed="at least one row of one token",
                hint="for a rank without rows: one row whose targets are all IGNORE (-100)",
            )
        counted = microbatch.targets != IGNORE
        output = model(
            microbatch.inputs,
            microbatch.positions,
            microbatch.documents,
            n_documents=microbatch.n_documents,
            mask_BT=counted,
            head=cross_entropy_head(
                microbatch.targets,
                z_loss_coef=self._config.z_loss_coef,
                soft_cap=self._soft_cap,
                chunk_bytes=self._config.tile_bytes(microbatch.inputs.device.type),
            ),
        )
        total, z_loss = output.value
        metrics = {"loss/train/cross_entropy": (total - z_loss).detach()}
        if self._config.z_loss_coef:
            metrics["loss/train/z"] = z_loss
        if self.balance is not None:
            balance, sums = self.balance.loss(output.router)
            total = total + balance
            metrics |= sums
        return total, counted.sum(), metrics
