"""``smalti fleet launch --sweep``: a run for each combination of values."""

import itertools
import re
from collections.abc import Sequence

from smalti.base.errors import UserError

MOST_RUNS = 1000
_HINT = "--sweep train.optimizer.lr=1e-4,3e-4 --sweep seed=1,2"


def combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each run: one value of each sweep, ``KEY=VALUE,VALUE ...``; the last varies fastest.

    Commas inside of brackets and quotes, as in YAML, separate no values. Raises UserError for a sweep without values, a
    key or value that is there twice, or too many runs.
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = _values(text)
        if key == "name":
            raise UserError(
                f"--sweep {sweep}: the values name the runs", hint="name=NAME without --sweep begins their names"
            )
        if not equals or not key or not values:
            raise UserError(f"--sweep {sweep} has no values", allowed="KEY=VALUE,VALUE ...", hint=_HINT)
        twice = next((value for value in values if values.count(value) > 1), key if key in axes else None)
        if twice is not None:
            raise UserError(f"--sweep {sweep}: '{twice}' is there twice", hint="give it once: its runs would be equal")
        axes[key] = values
    runs = list(itertools.product(*([f"{key}={value}" for value in values] for key, values in axes.items())))
    if len(runs) > MOST_RUNS:
        raise UserError(f"--sweep: {len(runs):,} runs", allowed=f"at most {MOST_RUNS:,}", hint="sweep fewer values")
    return runs


def name_of(name: str, overrides: Sequence[str]) -> str:
    """Return the name of a run of a sweep: ``demo-lr-1e-4-seed-2``."""
    parts = [
        override.partition("=")[0].rpartition(".")[2] + "-" + re.sub("^-", "m", override.partition("=")[2])
        for override in overrides
    ]
    return "-".join([name, *(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)])[:100].rstrip("-.")


def _values(text: str) -> list[str]:
    import yaml

    try:
        node = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode):
        return []
    return [f"[{text}]"[item.start_mark.index : item.end_mark.index].strip() for item in node.value]
