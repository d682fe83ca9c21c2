"""One optimizer step, the loop around it, and how it survives. Ten lines of Python are enough:

from smalti.train import build, fit, load

loaded = load("recipe.yaml", "train.duration=100step")
fit(build(loaded.config))
"""

from smalti.config.load import Loaded
from smalti.config.load import load as _load
from smalti.config.run import RunConfig
from smalti.train.job import build
from smalti.train.loop import Hook, fit

__all__ = ["Hook", "build", "fit", "load"]


def load(recipe: str, *overrides: str) -> Loaded[RunConfig]:
    """The config of a run from a recipe (file or name) and ``a.b=value`` overrides."""
    return _load(RunConfig, recipe, overrides)
