"""Preference losses over a microbatch: ``(model, microbatch) -> (sum, pairs, metrics)``, all sums (``train.step``).

They do not depend on the split into microbatches and ranks, nor on the sequences beside each other in a row. Losses of
an MoE's routers are not part of them.

Shapes: S rows, T tokens, K sequences of a row, P pairs of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.config.preference import PreferenceConfig
from smalti.config.train import LossConfig
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.step import Loss, Metrics
from smalti.tune.heads.log_probs import log_probs_head
from smalti.tune.losses import preference as losses
from smalti.tune.losses.accuracy import correct
from smalti.tune.preference.estimate import KLEstimate
from smalti.tune.sequences import Sequences, column, sequences_of

Reference = Callable[[nn.Module, Microbatch, Sequences], Tensor]
"""(model that is trained, microbatch, its sequences) -> log-probability of each sequence by the reference [S, K]."""

REFERENCE_COLUMNS = ("reference_first", "reference_second")
"""Columns with the reference's log-probabilities of the first and the second sequence of an example."""


def cached_reference(model: nn.Module, microbatch: Microbatch, sequences: Sequences) -> Tensor:
    """Return the log-probabilities that were computed before the run; a ``Reference``."""
    first_SK, second_SK = (column(microbatch, name) for name in REFERENCE_COLUMNS)
    is_second_K = torch.arange(first_SK.shape[1], device=first_SK.device) % 2 == 1
    return torch.where(is_second_K, second_SK, first_SK)


def log_probs(
    model: nn.Module, microbatch: Microbatch, sequences: Sequences, *, soft_cap: float | None, chunk_bytes: int
) -> Tensor:
    """Return the log-probability of each sequence's targets [S, K], summed, in nats."""
    values_ST: Tensor = model(
        microbatch.inputs,
        microbatch.positions,
        microbatch.documents,
        n_documents=microbatch.n_documents,
        mask_BT=microbatch.targets != IGNORE,
        head=log_probs_head(microbatch.targets, soft_cap=soft_cap, chunk_bytes=chunk_bytes),
    ).value
    return sequences.sums(values_ST)


class _OverSequences:
    """Compares the log-probabilities of sequences with those of the reference."""

    def __init__(
        self, model: ModelConfig, config: PreferenceConfig, loss: LossConfig, reference: Reference | None
    ) -> None:
        assert config.traits.has_reference == (reference is not None)
        self.config = config
        self._soft_cap = model.final_logit_softcapping
        self._loss = loss
        self._reference = reference

    def _log_probs(self, model: nn.Module, microbatch: Microbatch, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return log p, and log p less the reference's (the same without one), each [S, K]."""
        chunk_bytes = self._loss.tile_bytes(microbatch.inputs.device.type)
        # the reference first: the model's own forward pass must be the last before its backward pass
        reference_SK = 0 if self._reference is None else self._reference(model, microbatch, sequences).detach()
        log_p_SK = log_probs(model, microbatch, sequences, soft_cap=self._soft_cap, chunk_bytes=chunk_bytes)
        return log_p_SK, log_p_SK - reference_SK


class PairLoss(_OverSequences):
    """DPO, IPO or SimPO over pairs; weight = number of pairs."""

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Run the forward pass of a microbatch; return the summed loss, the number of pairs, and sums for the log."""
        sequences = sequences_of(microbatch)
        log_p_SK, log_ratio_SK = self._log_probs(model, microbatch, sequences)
        lengths_SK = sequences.lengths_SK.clamp(min=1) if self.config.traits.averages else 1
        value_SK = log_ratio_SK / lengths_SK
        chosen_SP, rejected_SP = value_SK[:, 0::2], value_SK[:, 1::2]
        exists_SP = sequences.pairs_exist()
        total = (self._loss_of(chosen_SP, rejected_SP) * exists_SP).sum()
        with torch.no_grad():
            beta = self.config.beta_or_default
            size_SK = log_p_SK.abs() / lengths_SK
            is_correct_SP = correct(chosen_SP - rejected_SP, size_SK[:, 0::2] + size_SK[:, 1::2])
            metrics = {
                "preference/accuracy": (is_correct_SP * exists_SP).sum(),
                "preference/reward_chosen": (beta * chosen_SP * exists_SP).sum(),
                "preference/reward_rejected": (beta * rejected_SP * exists_SP).sum(),
                "preference/reward_margin": (beta * (chosen_SP - rejected_SP) * exists_SP).sum(),
                "preference/logp_chosen": (log_p_SK[:, 0::2] * exists_SP).sum(),
                "preference/logp_rejected": (log_p_SK[:, 1::2] * exists_SP).sum(),
                "loss/train/targets": sequences.lengths_SK.sum(),
            }
        return total, exists_SP.sum(), metrics

    def _loss_of(self, chosen_SP: Tensor, rejected_SP: Tensor) -> Tensor:
        config, beta = self.config, self.config.beta_or_default
        smoothing = config.label_smoothing
        match config.loss:
            case "dpo":
                return losses.dpo(chosen_SP, rejected_SP, beta=beta, label_smoothing=smoothing)
            case "robust_dpo":
                return losses.robust_dpo(chosen_SP, rejected_SP, beta=beta, label_smoothing=smoothing)
            case "ipo":
                return losses.ipo(chosen_SP, rejected_SP, beta=beta)
            case "simpo":
                return losses.simpo(chosen_SP, rejected_SP, beta=beta, gamma=config.gamma, label_smoothing=smoothing)
        raise AssertionError(f"{config.loss} is not a loss of pairs")


class KTOLoss(_OverSequences):
    """KTO over labelled answers; weight = number of answers.

    An example is two sequences: the answer, and a mismatched one (its prompt with an answer to another), from
    which the divergence from the reference is estimated. The column ``label`` is above 0 for desirable answers.

    The estimate is the mean over the whole batch of the previous step, 0 before the first, where the model is the
    reference. So it does not depend on the split into microbatches and ranks; that of TRL is of the same step, but over
    one microbatch of all ranks.
    """

    def __init__(
        self, model: ModelConfig, config: PreferenceConfig, loss: LossConfig, reference: Reference | None
    ) -> None:
        super().__init__(model, config, loss, reference)
        self.state = KLEstimate()

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Run the forward pass of a microbatch; return the summed loss, the number of answers, and sums for the log."""
        sequences = sequences_of(microbatch)
        log_p_SK, log_ratio_SK = self._log_probs(model, microbatch, sequences)
        log_ratio_SP, mismatched_SP = log_ratio_SK[:, 0::2], log_ratio_SK[:, 1::2].detach()
        exists_SP, desirable_SP = sequences.pairs_exist(), column(microbatch, "label")[:, 0::2] > 0
        config, kl = self.config, self.state.on(microbatch.inputs.device)
        loss_SP = losses.kto(
            log_ratio_SP,
            desirable_SP,
            kl,
            beta=config.beta_or_default,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        with torch.no_grad():
            above_SP = log_ratio_SP - kl
            is_correct_SP = correct(torch.where(desirable_SP, above_SP, -above_SP), log_p_SK[:, 0::2].abs())
            metrics = {
                "preference/accuracy": (is_correct_SP * exists_SP).sum(),
                "preference/logp": (log_p_SK[:, 0::2] * exists_SP).sum(),
                "preference/kl_estimate": (mismatched_SP * exists_SP).sum(),
                "loss/train/targets": sequences.lengths_SK[:, 0::2].sum(),
            }
        return (loss_SP * exists_SP).sum(), exists_SP.sum(), metrics


def preference_loss(
    model: ModelConfig, config: PreferenceConfig, loss: LossConfig, reference: Reference | None
) -> Loss:
    """Return the loss of a config. ``reference``: None for a loss without one."""
    return (KTOLoss if config.loss == "kto" else PairLoss)(model, config, loss, reference)
