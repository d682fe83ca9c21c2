"""The plot of ``smalti plan budget``: loss against cost, and parameters against tokens with what they cost."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.base.chart import Cross, Series
    from smalti.plan.budget.choice import Law
    from smalti.plan.budget.solver import Budget

_POINTS = 97
_DECADES = 1.5
"""Decades shown on either side of the chosen point."""
_CHOSEN, _OPTIMAL, _SERVED, _FAMILY = 6, 0, 1, 7


def plot_budget(answer: "Budget") -> str:
    """Return an SVG file of two charts. Raises UserError where no parameters and tokens follow."""
    from smalti.base.chart import column, standalone
    from smalti.base.errors import UserError

    if answer.values["loss"] is None:
        raise UserError(
            "--plot has no point to draw: parameters and tokens do not follow from what is given",
            allowed="with params, tokens, loss or a budget (flops, gpu_hours, cost_usd)",
        )
    return standalone(column([_loss_by_cost(answer), _sizes(answer)], title="The budget of a run"))


def _loss_by_cost(answer: "Budget") -> str:
    from smalti.base.chart import Series, line_chart

    law, active, tokens = _point(answer)
    scale, unit = _cost(answer)
    flops, loss = 6 * active * tokens, law.loss(active, tokens)
    budgets = _around(flops, _DECADES)
    x = [budget * scale for budget in budgets]
    lines = [Series(name, x, [law.loss(*_best(law, budget, served)) for budget in budgets], colour=colour)
             for name, served, colour in _rules(answer)]  # fmt: skip
    top = max(*(line.y[0] for line in lines), loss)
    bounds = [bound for budget in budgets if (bound := _bounds(answer, budget)) is not None]
    if len(bounds) == len(budgets):
        lines += [Series("", x, [bound[side] for bound in bounds], dashed=True, colour=_OPTIMAL) for side in (0, 1)]
    for size in (active * 10**power for power in (-1.0, -0.5, 0.0, 0.5, 1.0)):
        points = [(budget * scale, law.loss(size, budget / 6 / size)) for budget in budgets]
        shown = [budget for budget in points if budget[1] <= top]
        # small models stop early on the right, large ones begin late on the left: there is room for the name
        lines.append(_family(_count(size), shown if size < active else shown[::-1]))
    lines.append(Series(_label(answer), [flops * scale], [loss], colour=_CHOSEN))
    cross = _cross(answer, flops * scale, loss, _times(answer.intervals.get("flops"), scale), "loss")
    title = "Loss by cost of training; grey: models of one size" + "; dashed: 80 % interval of the law" * bool(bounds)
    return line_chart(lines, title=title, x_label=unit, log_x=True, crosses=[cross], format_y=_loss_text, height=380)


def _sizes(answer: "Budget") -> str:
    from smalti.base.chart import Series, line_chart

    law, active, tokens = _point(answer)
    scale, unit = _cost(answer)
    flops, loss = 6 * active * tokens, law.loss(active, tokens)
    sizes = _around(active, _DECADES)
    low, high = tokens / 10**_DECADES, tokens * 10**_DECADES
    lines = []
    for name, served, colour in _rules(answer):
        best = [_best(law, size, served) for size in _around(flops, 2 * _DECADES)]
        shown = _inside([size for size in best if sizes[0] <= size[0] <= sizes[-1]], low, high)
        lines.append(Series(name, [x for x, _ in shown], [y for _, y in shown], colour=colour))
    for cost in (flops * 10.0**power for power in (-2, -1, 0, 1, 2)):
        points = _inside([(size, cost / 6 / size) for size in sizes], low, high)
        lines.append(_family(f"{_money(cost * scale)} {unit}", points, colour=2))
    for target in (loss, *(round(loss, 2) + step for step in (-0.1, -0.05, 0.05, 0.1, 0.2, 0.4))):
        points = _inside([(size, _tokens(law, size, target)) for size in sizes], low, high)
        lines.append(_family(f"loss {_loss_text(target)}", points[::-1]))
    lines.append(Series(_label(answer), [active], [tokens], colour=_CHOSEN))
    cross = _cross(answer, active, tokens, answer.intervals.get("active_params"), "tokens")
    title = "Tokens by parameters, with lines of the same cost and of the same loss"
    return line_chart(
        [line for line in lines if line.x], title=title, x_label="active parameters",
        log_x=True, log_y=True, crosses=[cross], height=440,
    )  # fmt: skip


def _rules(answer: "Budget") -> list[tuple[str, float, int]]:
    """Return the lines of optimal models: (name, inference tokens that they are optimal for, colour)."""
    rules = [(f"compute-optimal ({answer.fit.name})", 0.0, _OPTIMAL)]
    served = answer.problem.served(answer.number("mfu"))
    return [*rules, ("cheapest over training and inference", served, _SERVED)] if served else rules


def _label(answer: "Budget") -> str:
    active, tokens, loss = (answer.number(name) for name in ("active_params", "tokens", "loss"))
    return f"this run: {_count(active or 0)} parameters, {_count(tokens or 0)} tokens, loss {_loss_text(loss or 0)}"


def _point(answer: "Budget") -> "tuple[Law, float, float]":
    active, tokens = answer.number("active_params"), answer.number("tokens")
    assert active is not None and tokens is not None, "a loss follows from both"
    return answer.problem.law(answer.fit), active, tokens


def _cost(answer: "Budget") -> tuple[float, str]:
    """Return (cost of a FLOP, its unit)."""
    cost, flops = answer.number("cost_usd"), answer.number("flops")
    return (cost / flops, "USD") if cost and flops else (1.0, "FLOPs")


def _best(law: "Law", flops: float, served: float = 0.0) -> tuple[float, float]:
    """Return the active parameters and tokens that are optimal for ``flops`` of training."""
    from smalti.plan.laws.bisect import root

    active = math.exp(
        root(lambda x: law.balance(math.exp(x), flops / 6 / math.exp(x), served), 0.0, law.max_log_active)
    )
    return active, flops / 6 / active


def _bounds(answer: "Budget", flops: float) -> tuple[float, float] | None:
    from smalti.plan.laws.fits import spread

    def best(fit: "object") -> dict[str, float]:
        law = answer.problem.law(fit)  # type: ignore[arg-type]
        return {"loss": law.loss(*_best(law, flops))}

    return spread(answer.fit, best)["loss"]


def _tokens(law: "Law", active: float, target: float) -> float:
    from smalti.base.errors import UserError

    try:
        return law.tokens_for_loss(active, target)
    except UserError:
        return math.inf


def _around(value: float, decades: float) -> list[float]:
    return [value * 10 ** (decades * (2 * i / (_POINTS - 1) - 1)) for i in range(_POINTS)]


def _inside(points: Sequence[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    return [point for point in points if low <= point[1] <= high]


def _family(name: str, points: Sequence[tuple[float, float]], colour: int = _FAMILY) -> "Series":
    from smalti.base.chart import Series

    return Series(name, [x for x, _ in points], [y for _, y in points], colour=colour, named_at_end=True)


def _cross(answer: "Budget", x: float, y: float, x_interval: tuple[float, float] | None, name: str) -> "Cross":
    from smalti.base.chart import Cross
    from smalti.cli.plan.quantities import format_quantity

    label = ", ".join(
        f"{key} {format_quantity(key, value)}"
        for key in ("active_params", "tokens", "flops", "cost_usd", "loss")
        if (value := answer.values[key]) is not None
    )
    return Cross(x, y, label, x_interval, answer.intervals.get(name), colour=_CHOSEN)


def _times(interval: tuple[float, float] | None, by: float) -> tuple[float, float] | None:
    return None if interval is None else (interval[0] * by, interval[1] * by)


def _loss_text(value: float) -> str:
    return f"{value:.2f}"


def _money(value: float) -> str:
    from smalti.plan.quantities import format_number

    return _count(value) if value < 1e15 else format_number(float(f"{value:.2g}"))


def _count(value: float) -> str:
    from smalti.base.units import format_count

    return format_count(float(f"{value:.2g}"))
