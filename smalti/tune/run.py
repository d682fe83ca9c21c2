"""The loss and the evaluation of a run with ``tune.preference``, ``tune.reward`` or ``tune.distill``."""

from collections.abc import Mapping

import torch
from torch import nn

from smalti.config.run import RunConfig
from smalti.distributed.group.mesh import Mesh
from smalti.evals.in_loop import heldout_hook
from smalti.train.loop import Evaluate
from smalti.train.origin import model_of
from smalti.train.step import Loss
from smalti.tune.distill import DistillLoss
from smalti.tune.frozen import frozen
from smalti.tune.heldout import pairs_hook
from smalti.tune.preference.loss import Reference, cached_reference, preference_loss
from smalti.tune.preference.reference import LiveReference
from smalti.tune.reward.loss import RewardLoss


class Tuning:
    """Builds the loss of a run, and then the evaluation that measures it; one for each job."""

    def __init__(self) -> None:
        self._loss: Loss | None = None

    def loss(self, config: RunConfig, mesh: Mesh, device: torch.device) -> Loss:
        """Return the loss; a ``train.job.MakeLoss``. A collective where it has a second model."""
        tune = config.tune
        assert tune is not None and config.init_from is not None
        if tune.preference is not None:
            reference: Reference | None = None
            if tune.preference.reference_or_default == "live":
                model = None if config.adapter else frozen(config.init_from, config.model, config, mesh, device)
                reference = LiveReference(model, config.train.loss, config.model.final_logit_softcapping)
            elif tune.preference.reference_or_default == "cached":
                reference = cached_reference
            self._loss = preference_loss(config.model, tune.preference, config.train.loss, reference)
        elif tune.reward is not None:
            self._loss = RewardLoss(tune.reward)
        else:
            assert tune.distill is not None
            teacher_model = model_of(tune.distill.teacher)
            teacher = frozen(tune.distill.teacher, teacher_model, config, mesh, device)
            self._loss = DistillLoss(config.model, tune.distill, config.train.loss, teacher, teacher_model)
        return self._loss

    def evaluation(
        self, config: RunConfig, indexes: Mapping[str, bytes] | None = None, mesh: Mesh | None = None
    ) -> Evaluate | None:
        """Return the function that measures held-out text and pairs; a ``train.job.MakeEvaluate``."""
        assert self._loss is not None
        pairs = pairs_hook(config, self._loss, indexes, mesh)
        text = None if config.model.num_labels else heldout_hook(config, indexes, mesh)
        hooks = [hook for hook in (text, pairs) if hook is not None]

        def evaluate(model: nn.Module, step: int) -> dict[str, float]:
            return {name: value for hook in hooks for name, value in hook(model, step).items()}

        return evaluate if hooks else None
