"""One optimizer step, the loop around it, and how it survives. Ten lines of Python are enough:

from smalti.evals.in_loop import heldout_hook
from smalti.train import build, fit, load

loaded = load("recipe.yaml", "train.duration=100step")
result = fit(build(loaded.config, evaluation=heldout_hook))
"""

from smalti.config.load import Loaded
from smalti.config.load import load as _load
from smalti.config.run import RunConfig
from smalti.train.api import Result, build, fit
from smalti.train.hooks import Hook
from smalti.train.origin import model_of

__all__ = ["Hook", "Result", "build", "fit", "load"]


def load(recipe: str, *overrides: str) -> Loaded[RunConfig]:
    """Load the config of a run from a recipe (file or name) and ``a.b=value`` overrides.

    As for ``smalti train``, a recipe without a section ``model`` has that of ``init_from``.
    """
    return _load(RunConfig, recipe, overrides, origin_model=model_of)
