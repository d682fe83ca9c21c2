"""The ``tune:`` section of a run, and the recipes of ``smalti tune``."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smalti.config.adapter import AdapterConfig
from smalti.config.chaos import ChaosConfig
from smalti.config.eval import InLoopConfig
from smalti.config.examples import ExamplesConfig
from smalti.config.launch import LaunchConfig
from smalti.config.places import RunName
from smalti.config.preference import DistillConfig, PreferenceConfig, RewardConfig
from smalti.config.profile import ProfileConfig
from smalti.config.schema import Config, NotAllowed, Whole, placement
from smalti.config.track import TrackConfig

Kind = Literal["sft", "preference", "reward"]
"""The verbs of ``smalti tune`` that train."""


UNKNOWN_STEPS = "1000000000step"
"""``train.duration`` in place of epochs of examples that are not tokenized; in no config of a run."""


class TuneConfig(Config):
    """Tuning of the model of ``init_from`` on examples. They are tokenized before the run and become
    ``data.sources.examples``, the held-out ones ``data.heldout.validation``."""

    examples: ExamplesConfig
    """The files of examples, and how they become tokens."""
    preference: PreferenceConfig | None = None
    """Tuning on preferences, by ``smalti tune preference``."""
    reward: RewardConfig | None = None
    """Training of a reward model, by ``smalti tune reward``."""
    distill: DistillConfig | None = None
    """Supervised tuning against a teacher's distribution."""
    prepared: str = placement("data/tune")
    """Folder under which tokenized examples are kept, by their content, for this and later runs."""

    @property
    def kind(self) -> Kind:
        """The verb that trains it."""
        return "preference" if self.preference else "reward" if self.reward else "sft"

    @property
    def has_own_loss(self) -> bool:
        """True unless the loss is next-token cross-entropy."""
        return any((self.preference, self.reward, self.distill))

    @property
    def loss(self) -> str:
        """Name of the loss, for people."""
        if self.preference is not None:
            return f"{self.preference.loss}, beta {self.preference.beta_or_default:g}"
        if self.reward is not None:
            return "Bradley-Terry, over scores of pairs"
        if self.distill is not None:
            return f"{self.distill.direction} divergence from {self.distill.teacher}"
        return "cross-entropy of the answers"

    @model_validator(mode="after")
    def _one_loss(self) -> Self:
        sections = [name for name in ("preference", "reward", "distill") if getattr(self, name) is not None]
        if len(sections) > 1:
            raise NotAllowed(
                f"tune has the sections {' and '.join(sections)}",
                allowed="one of them, or none: supervised tuning",
                hint=f"tune.{sections[1]}=null",
            )
        return self


class TuneSection(Config):
    """The sections that decide the examples, checked before these are tokenized."""

    tune: TuneConfig
    """The examples and the loss."""
    adapter: AdapterConfig | None = None
    """As in a run."""


class TuneRecipe(Config):
    """A recipe of ``smalti tune``: a run whose model and data follow from ``init_from`` and the examples
    (``smalti.tune.prepare``). ``smalti tune sft RECIPE --print-config`` prints the whole config of the run."""

    name: RunName
    """Name of the run and of its folder."""
    seed: Whole = 17
    """Seed of the data order."""
    folder: str | None = placement(None)
    """The run folder; absent: ``runs/<name>``."""
    init_from: str
    """The model to tune: a run, checkpoint or Hugging Face folder."""
    tune: TuneConfig
    """The examples and the loss."""
    adapter: AdapterConfig | None = None
    """Adapters to train in place of the weights; absent: all weights are trained."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Changes of the model; absent: that of ``init_from``."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Further sources, held-out sets and stages, as in a run; absent: the examples alone."""
    train: dict[str, Any]
    """As in a run; ``duration`` may be in epochs of the examples (``3ep``)."""
    evals: InLoopConfig | None = placement(None)
    """Tasks that run during training."""
    track: TrackConfig = TrackConfig()
    """Where metrics are written."""
    launch: LaunchConfig | None = placement(None)
    """How ``smalti fleet launch`` queues the run."""
    profile: ProfileConfig = ProfileConfig()
    """Steps to profile."""
    chaos: ChaosConfig | None = placement(None)
    """Faults to inject, as in a run."""
