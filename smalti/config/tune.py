"""The ``tune:`` section of a run, and the recipes of ``smalti tune``."""

from typing import Any

from pydantic import Field

from smalti.config.adapter import AdapterConfig
from smalti.config.eval import InLoopConfig
from smalti.config.examples import ExamplesConfig
from smalti.config.profile import ProfileConfig
from smalti.config.schema import Config, Whole, placement
from smalti.config.track import TrackConfig


class TuneConfig(Config):
    """Tuning of the model of ``init_from`` on examples. They are tokenized before the run and become
    ``data.sources.examples``, the held-out ones ``data.heldout.validation``."""

    examples: ExamplesConfig
    """The files of examples, and how they become tokens."""
    prepared: str = placement("data/tune")
    """Folder under which tokenized examples are kept, by their content, for this and later runs."""

    @property
    def loss(self) -> str:
        """Name of the loss, for people."""
        return "cross-entropy of the answers"


class TuneRecipe(Config):
    """A recipe of ``smalti tune``: a run whose model and data follow from ``init_from`` and the examples
    (``smalti.tune.prepare``). ``smalti tune sft RECIPE --print-config`` prints the whole config of the run."""

    name: str
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
    model: dict[str, Any] | None = None
    """Changes of the model; absent: that of ``init_from``."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Further sources, held-out sets and stages, as in a run; absent: the examples alone."""
    train: dict[str, Any]
    """As in a run; ``duration`` may be in epochs of the examples (``3ep``)."""
    evals: InLoopConfig | None = placement(None)
    """Tasks that run during training."""
    track: TrackConfig = TrackConfig()
    """Where metrics are written."""
    profile: ProfileConfig = ProfileConfig()
    """Steps to profile."""
