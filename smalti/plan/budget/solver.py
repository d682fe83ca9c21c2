"""Solve the budget of a run: from the given quantities, all that follow.

Given values are kept; assumed and chosen ones are listed with interval and reason. If the values leave a choice, it is
the compute-optimal model of a budget, a size or a loss, or with ``inference_tokens`` the cheapest over training and
inference. Intervals are those of the fit's constants and of an assumed MFU. Layout, memory and failures are not
considered.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.plan import data
from smalti.plan.budget.problem import ASSUMED_MFU, DENSE, EQUATIONS, Assumption, Problem, Solution
from smalti.plan.data import MANY_EPOCHS, TOO_MANY_EPOCHS
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import DEVIATIONS, FITS, LEVEL, Fit, Interval
from smalti.plan.quantities import format_number

NAMES = (
    "params", "active_params", "tokens", "tokens_per_param", "tokens_per_active_param", "flops", "gpus", "gpu", "mfu",
    "days", "gpu_hours", "price_usd_per_gpu_hour", "cost_usd", "inference_tokens", "loss",
)  # fmt: skip
"""Names of an answer's values, in this order; a value that does not follow is None."""

COMPARED = ("besiroglu-2024", "hoffmann-2022")
"""The fits that are always compared."""


@dataclass(frozen=True)
class Budget:
    """The result of ``solve``."""

    values: Mapping[str, float | str | None]
    """Name of ``NAMES`` -> value."""
    origins: Mapping[str, str]
    """Name -> given, counted, assumed, chosen, or the equation by which it follows."""
    intervals: Mapping[str, Interval]
    """Intervals of values that depend on the fit or on an assumed MFU."""
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]
    """Limits of the answer."""
    choice: str | None
    """The choice and its rule; None: nothing was chosen."""
    fit: Fit
    other_fits: Mapping[str, Mapping[str, float]]
    """The results of other published fits."""
    lifetime: Mapping[str, float | None] | None
    """Training and inference together; None without ``inference_tokens``."""
    repetition: Mapping[str, float] | None
    """Epochs and what they are worth; None without ``unique_tokens``."""
    problem: Problem
    """The problem that was solved."""

    def number(self, name: str) -> float | None:
        """Return a value that is a number or None."""
        value = self.values[name]
        assert not isinstance(value, str)
        return value

    def to_json(self) -> dict[str, Any]:
        """A JSON object; every name of ``NAMES`` is in it."""
        return {
            **self.values,
            "precision": self.problem.precision,
            "fit": self.fit.name,
            "choice": self.choice,
            "origins": dict(self.origins),
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "interval_level": LEVEL,
            "interval_source": self.fit.interval_source,
            "assumptions": [
                {"name": a.name, "value": a.value, "interval": list(a.interval) if a.interval else None, "why": a.why}
                for a in self.assumptions
            ],
            "notes": list(self.notes),
            "other_fits": {name: dict(values) for name, values in self.other_fits.items()},
            "lifetime": dict(self.lifetime) if self.lifetime else None,
            "repetition": dict(self.repetition) if self.repetition else None,
        }


def solve(values: Mapping[str, str | float], *, model: ModelConfig | None = None) -> Budget:
    """Return the budget that follows from ``values`` (names of ``plan.budget.problem.KEYS``).

    ``model``: the model of ``values["model"]`` if that is no preset. Raises UserError for unknown keys, contradictions
    and values out of range.
    """
    problem = Problem(values, model)
    solution = problem.solve(check_it=True)
    numbers = solution.values
    intervals, remarks = _intervals(problem, solution)
    of_the_law = solution.choice is not None or "loss" in numbers
    if problem.fit_is_given and not of_the_law:
        raise UserError(
            f"fit={problem.fit.name} has no effect: parameters and tokens do not follow from the rest",
            allowed="with params, tokens, loss or a budget (flops, gpu_hours, cost_usd)",
            hint="leave fit out",
        )
    assumptions = list(solution.assumptions)
    if of_the_law and not problem.fit_is_given:
        others = ", ".join(name for name in FITS if name != problem.fit.name)
        why = f"the best fit to the runs of Hoffmann et al.; others: {others}"
        assumptions.append(Assumption("fit", problem.fit.name, None, why))
    names: dict[str, float | str | None] = {name: numbers.get(name) for name in NAMES}
    names["gpu"] = problem.device.name if problem.device else None
    return Budget(
        values=names,
        origins=_origins(problem, solution),
        intervals=intervals,
        assumptions=tuple(assumptions),
        notes=(*solution.notes, *_notes(problem, numbers), *remarks),
        choice=solution.choice.text if solution.choice else None,
        fit=problem.fit,
        other_fits=_other_fits(problem) if of_the_law else {},
        lifetime=_lifetime(problem, numbers),
        repetition=_repetition(problem, numbers),
        problem=problem,
    )


def _origins(problem: Problem, solution: Solution) -> dict[str, str]:
    """Return the origin of each value; an equation of given values takes precedence over a choice."""
    values = solution.values
    chosen = solution.choice.names if solution.choice else ()
    assumed = {each.name for each in solution.assumptions if not isinstance(each.value, str)}
    origins = dict.fromkeys(problem.given, "given") | dict.fromkeys(assumed, "assumed")
    origins |= dict.fromkeys(problem.sizes, f"counted from {problem.model_name}")
    _follow(problem, values, origins)
    origins = dict.fromkeys((name for name in chosen if name not in origins), "chosen") | origins
    _follow(problem, values, origins)
    if "loss" in values:
        origins.setdefault("loss", problem.fit.name)
    if problem.device is not None:
        origins["gpu"] = "given" if problem.gpu_is_given else "assumed"
    return {name: origins.get(name, "follows") for name in NAMES if name in values or name in origins}


def _follow(problem: Problem, values: Mapping[str, float], origins: dict[str, str]) -> None:
    """Add every value that is the only one without an origin in an equation."""
    equations = (*EQUATIONS, DENSE) if problem.is_dense else EQUATIONS
    changed = True
    while changed:
        changed = False
        for equation in equations:
            open_ends = [name for name in equation.names if name not in origins and name in NAMES]
            if len(open_ends) == 1 and open_ends[0] in values:
                origins[open_ends[0]] = equation.text
                changed = True


def _intervals(problem: Problem, solution: Solution) -> tuple[dict[str, Interval], list[str]]:
    """Return (intervals of every value that depends on the fit or on the assumed MFU, notes about them).

    The half width by the fit is the root of summed squares over its independent directions; the MFU's is taken at its
    ends. Both are combined as independent.
    """
    centre = {name: math.log(value) for name, value in solution.values.items()}
    fit_squares = dict.fromkeys(centre, 0.0)
    mfu_ends: dict[str, tuple[float, float]] = {}
    try:
        for pair in problem.fit.deviations:
            low, high = (problem.solve(fit).values for fit in pair)
            for name in fit_squares:
                fit_squares[name] += (0.5 * (math.log(high[name]) - math.log(low[name]))) ** 2
        if any(assumption.name == "mfu" for assumption in solution.assumptions):
            ends = [problem.solve(mfu=mfu).values for mfu in ASSUMED_MFU[problem.precision][1]]
            for name, value in centre.items():
                moved = [math.log(end[name]) - value for end in ends]
                mfu_ends[name] = (max(0.0, -min(moved)), max(0.0, *moved))
    except UserError as error:
        return {}, [f"no intervals: inside them {error.message}"]
    intervals = {}
    for name, value in centre.items():
        by_fit = DEVIATIONS * math.sqrt(fit_squares[name])
        down, up = (math.hypot(by_fit, end) for end in mfu_ends.get(name, (0.0, 0.0)))
        if down + up > 1e-9:
            intervals[name] = (math.exp(value - down), math.exp(value + up))
    return intervals, []


def _notes(problem: Problem, values: Mapping[str, float]) -> list[str]:
    notes = []
    active, tokens = values.get("active_params"), values.get("tokens")
    total = values.get("params", active)
    if active and tokens:
        law = problem.law(problem.fit)
        notes += laws.outside(problem.fit, law.params(active), tokens)
        if problem.fit.covariance is None:
            notes.append(f"no interval of the law: {problem.fit.interval_source}")
        if law.experts is not None:
            notes.append(
                f"the law counts {format_number(law.params(active))} parameters (Clark et al. 2022): fitted up to 1.3B "
                "active ones, on 130B tokens, with one expert per token"
            )
        elif total and total > active * 1.01:
            notes.append(
                f"the law counts the {format_number(active)} active parameters alone: a dense model of that size; the "
                "other experts lower the loss further, which is not included "
                f"(experts={format_number(total / active)}, for example, estimates it by Clark et al. 2022)"
            )
        if law.unique_tokens and tokens > MANY_EPOCHS * law.unique_tokens:
            epochs = tokens / law.unique_tokens
            strength = "worth almost nothing" if epochs > TOO_MANY_EPOCHS else "worth less than new tokens"
            notes.append(f"the data is repeated for {epochs:.3g} epochs: the last repeats are {strength}")
    mfu = values.get("mfu")
    _, (_, usual), _ = ASSUMED_MFU[problem.precision]
    if mfu and mfu > usual * 1.2 and "mfu" not in problem.given:
        notes.append(f"an MFU of {mfu:.3g} is more than large runs reach ({usual:g})")
    return notes


def _other_fits(problem: Problem) -> dict[str, dict[str, float]]:
    fits = {}
    for name in COMPARED:
        if name != problem.fit.name:
            try:
                values = problem.solve(FITS[name]).values
            except UserError:
                continue
            keys = ("active_params", "tokens", "tokens_per_active_param", "flops", "cost_usd", "loss")
            fits[name] = {key: values[key] for key in keys if key in values}
    return fits


def _lifetime(problem: Problem, values: Mapping[str, float]) -> dict[str, float | None] | None:
    """Compare training and inference of the model with the compute-optimal one of the same loss."""
    if "inference_tokens" not in values or not all(name in values for name in ("active_params", "tokens", "loss")):
        return None
    active, tokens, served = values["active_params"], values["tokens"], problem.served(values.get("mfu"))
    plain, plain_tokens = problem.law(problem.fit).cheapest(values["loss"], 0.0)
    total = 6 * active * tokens + 2 * active * served
    plain_total = 6 * plain * plain_tokens + 2 * plain * served
    cost = None
    if problem.device and "inference_mfu" in values and "price_usd_per_gpu_hour" in values:
        usd = laws.usd_per_flop(
            values["price_usd_per_gpu_hour"], problem.device.require_peak(problem.precision), values["inference_mfu"]
        )
        cost = 2 * active * values["inference_tokens"] * usd
    return {
        "inference_flops": 2 * active * values["inference_tokens"],
        "inference_weight": served / values["inference_tokens"],
        "inference_cost_usd": cost,
        "lifetime_flops": total,
        "chinchilla_params": plain,
        "chinchilla_tokens": plain_tokens,
        "chinchilla_lifetime_flops": plain_total,
        "saving_frac": 1 - total / plain_total,
    }


def _repetition(problem: Problem, values: Mapping[str, float]) -> dict[str, float] | None:
    law = problem.law(problem.fit)
    if law.unique_tokens is None or "tokens" not in values:
        return None
    epochs = values["tokens"] / law.unique_tokens
    worth = {"epochs": epochs, "effective_tokens": data.effective_tokens(law.unique_tokens, epochs)}
    if "active_params" in values:
        params = law.params(values["active_params"])
        worth["effective_params"] = laws.effective_params(problem.fit, params, law.unique_tokens)
    return worth
