"""Distillation: next-token tuning against a frozen teacher's distribution. Sums over targets, as ``LanguageLoss``."""

from typing import Any

import torch
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.preference import DistillConfig
from smalti.config.train import LossConfig
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.cross_entropy import cross_entropy_head
from smalti.train.step import Metrics
from smalti.tune.heads.divergence import Teacher, divergence_head


class DistillLoss:
    """w t^2 KL + (1 - w) cross-entropy of a ``Decoder``'s next tokens; weight = number of targets in the loss.

    teacher: a frozen model of the same vocabulary, as ``tune.frozen`` builds it; its output matrix must stay in memory
    between its forward pass and the head of the student.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: DistillConfig,
        loss: LossConfig,
        teacher: nn.Module,
        teacher_model: ModelConfig,
    ) -> None:
        if model.vocab_size != teacher_model.vocab_size:
            raise UserError(
                f"the teacher has {teacher_model.vocab_size:,} tokens, the model {model.vocab_size:,}",
                allowed="a teacher with the tokenizer of the model",
            )
        self.config = config
        self._soft_caps = model.final_logit_softcapping, teacher_model.final_logit_softcapping
        self._loss = loss
        self._teacher = teacher

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Run both forward passes of a microbatch; return the summed loss, the number of targets, and sums."""
        config, counted = self.config, microbatch.targets != IGNORE
        chunk_bytes = self._loss.tile_bytes(microbatch.inputs.device.type)
        with torch.no_grad():
            hidden, weight = _forward(self._teacher, microbatch, lambda *parts: parts)
        divergence = divergence_head(
            Teacher(hidden, weight, self._soft_caps[1]),
            counted,
            direction=config.direction,
            temperature=config.temperature,
            soft_cap=self._soft_caps[0],
            chunk_bytes=chunk_bytes,
        )
        cross_entropy = cross_entropy_head(microbatch.targets, soft_cap=self._soft_caps[0], chunk_bytes=chunk_bytes)

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and config.weight < 1):
                entropy = cross_entropy(hidden_BTD, weight_VD)[0]
            return divergence(hidden_BTD, weight_VD), entropy

        kl, entropy = _forward(model, microbatch, head)
        metrics = {"loss/train/divergence": kl.detach(), "loss/train/cross_entropy": entropy.detach()}
        return config.weight * kl + (1 - config.weight) * entropy, counted.sum(), metrics


def _forward(model: nn.Module, microbatch: Microbatch, head: Any) -> Any:
    return model(
        microbatch.inputs,
        microbatch.positions,
        microbatch.documents,
        n_documents=microbatch.n_documents,
        mask_BT=microbatch.targets != IGNORE,
        head=head,
    ).value
