"""The losses of preference tuning, reward models and distillation; sections of ``tune``."""

from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, NotAllowed, Real

PreferenceLossName = Literal["dpo", "robust_dpo", "ipo", "simpo", "kto"]


class LossTraits(NamedTuple):
    """What a preference loss reads."""

    beta: float
    """Default of ``beta``."""
    has_reference: bool = True
    """It compares with a reference model."""
    averages: bool = False
    """It averages log-probabilities over an answer's tokens; others sum."""
    options: tuple[str, ...] = ()
    """Options that have an effect."""


LOSSES: dict[PreferenceLossName, LossTraits] = {
    "dpo": LossTraits(0.1, options=("label_smoothing",)),
    "robust_dpo": LossTraits(0.1, options=("label_smoothing",)),
    "ipo": LossTraits(0.1, averages=True),
    "simpo": LossTraits(2.0, has_reference=False, averages=True, options=("label_smoothing", "gamma")),
    "kto": LossTraits(0.1, options=("desirable_weight", "undesirable_weight")),
}


class PreferenceConfig(Config):
    """Tuning on preferences: pairs of a chosen and a rejected answer, or answers with a label (kto)."""

    loss: PreferenceLossName = "dpo"
    """The loss; ``dpo`` with ``label_smoothing`` is conservative DPO."""
    beta: Real | None = Field(None, gt=0)
    """Strength of the pull to the reference (simpo: scale of the rewards); absent: 0.1, simpo 2."""
    label_smoothing: Real = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are swapped (dpo, robust_dpo, simpo)."""
    gamma: Real = Field(1.0, ge=0)
    """Target margin between the rewards (simpo)."""
    desirable_weight: Real = Field(1.0, gt=0)
    """Weight of desirable answers (kto)."""
    undesirable_weight: Real = Field(1.0, gt=0)
    """Weight of undesirable answers (kto)."""
    reference: Literal["cached", "live"] | None = None
    """Log-probabilities of the reference model, ``init_from``: ``cached``, computed once before the run; ``live``, by a
    frozen second model, as sharded as the first. Absent: cached (simpo has none)."""

    @property
    def traits(self) -> LossTraits:
        """What the loss reads."""
        return LOSSES[self.loss]

    @property
    def beta_or_default(self) -> float:
        """``beta``, with the default of the loss applied."""
        return self.traits.beta if self.beta is None else self.beta

    @property
    def reference_or_default(self) -> Literal["cached", "live"] | None:
        """``reference``, with the default applied; None: the loss has no reference."""
        return (self.reference or "cached") if self.traits.has_reference else None

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for name in ("label_smoothing", "gamma", "desirable_weight", "undesirable_weight"):
            value: Any = getattr(self, name)
            if value != type(self).model_fields[name].default and name not in self.traits.options:
                others = ", ".join(loss for loss, traits in LOSSES.items() if name in traits.options)
                raise NotAllowed(
                    f"{name}={value} has no effect with loss={self.loss}",
                    allowed=f"{name} with {others}",
                    hint=f"leave {name} out",
                )
        if self.reference is not None and not self.traits.has_reference:
            raise NotAllowed(
                f"reference={self.reference} has no effect with loss={self.loss}, which has no reference",
                allowed="a reference with dpo, robust_dpo, ipo, kto",
                hint="leave reference out",
            )
        if self.loss == "robust_dpo" and not self.label_smoothing:
            raise NotAllowed(
                "loss=robust_dpo with label_smoothing=0 is dpo",
                allowed="a label_smoothing above 0, the share of swapped pairs",
                hint="label_smoothing=0.1, or loss=dpo",
            )
        return self


class RewardConfig(Config):
    """Training of a reward model on pairs (Bradley-Terry); margins are the column ``margin`` of the examples."""

    center_coef: Real = Field(0.01, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0; 0: none."""


class DistillConfig(Config):
    """Distillation from a teacher's distribution of the next token."""

    teacher: str
    """Run, checkpoint or Hugging Face folder of the teacher, with the same tokens as the model."""
    direction: Literal["forward", "reverse"] = "forward"
    """``forward``: KL(teacher || student); ``reverse``: KL(student || teacher)."""
    temperature: Real = Field(1.0, gt=0)
    """Both distributions are softmax(logits / temperature); the divergence is times its square."""
    weight: Real = Field(1.0, gt=0, le=1)
    """Share of the divergence in the loss; the rest is the cross-entropy of the targets."""
