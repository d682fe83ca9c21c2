"""The picture of ``smalti plan budget``: loss against cost, and parameters against tokens with what they cost."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.base.chart import Cross, Series
    from smalti.plan.budget.choice import Law
    from smalti.plan.budget.solver import Budget

_POINTS = 97
_DECADES = 1.5
"""So much is shown on either side of the chosen point."""
_CHOSEN, _OPTIMAL, _SERVED, _FAMILY = 6, 0, 1, 7


def picture(found: "Budget") -> str:
    """An SVG file of two charts; UserError where no parameters and tokens follow."""
    from smalti.base.chart import column, standalone
    from smalti.base.errors import UserError

    if found.values["loss"] is None:
        raise UserError(
            "--plot has no point to draw: parameters and tokens do not follow from what is given",
            allowed="with params, tokens, loss or a budget (flops, gpu_hours, cost_usd)",
        )
    return standalone(column([_loss_by_cost(found), _sizes(found)], title="The budget of a run"))


def _loss_by_cost(found: "Budget") -> str:
    from smalti.base.chart import Series, line_chart

    law, active, tokens = _point(found)
    scale, unit = _cost(found)
    flops, here = 6 * active * tokens, law.loss(active, tokens)
    budgets = _around(flops, _DECADES)
    x = [one * scale for one in budgets]
    lines = [Series(name, x, [law.loss(*_best(law, one, served)) for one in budgets], colour=colour)
             for name, served, colour in _rules(found)]  # fmt: skip
    top = max(*(line.y[0] for line in lines), here)
    bounds = [bound for one in budgets if (bound := _bounds(found, one)) is not None]
    if len(bounds) == len(budgets):
        lines += [Series("", x, [bound[side] for bound in bounds], dashed=True, colour=_OPTIMAL) for side in (0, 1)]
    for size in (active * 10**power for power in (-1.0, -0.5, 0.0, 0.5, 1.0)):
        points = [(one * scale, law.loss(size, one / 6 / size)) for one in budgets]
        kept = [one for one in points if one[1] <= top]
        # small models stop early on the right, large ones begin late on the left: there is room for the name
        lines.append(_family(_count(size), kept if size < active else kept[::-1]))
    lines.append(Series(_said(found), [flops * scale], [here], colour=_CHOSEN))
    cross = _cross(found, flops * scale, here, _times(found.intervals.get("flops"), scale), "loss")
    title = "Loss by cost of training; grey: models of one size" + "; dashed: 80 % interval of the law" * bool(bounds)
    return line_chart(lines, title=title, x_label=unit, log_x=True, crosses=[cross], format_y=_loss_text, height=380)


def _sizes(found: "Budget") -> str:
    from smalti.base.chart import Series, line_chart

    law, active, tokens = _point(found)
    scale, unit = _cost(found)
    flops, here = 6 * active * tokens, law.loss(active, tokens)
    sizes = _around(active, _DECADES)
    low, high = tokens / 10**_DECADES, tokens * 10**_DECADES
    lines = []
    for name, served, colour in _rules(found):
        best = [_best(law, one, served) for one in _around(flops, 2 * _DECADES)]
        kept = _inside([one for one in best if sizes[0] <= one[0] <= sizes[-1]], low, high)
        lines.append(Series(name, [x for x, _ in kept], [y for _, y in kept], colour=colour))
    for cost in (flops * 10.0**power for power in (-2, -1, 0, 1, 2)):
        points = _inside([(one, cost / 6 / one) for one in sizes], low, high)
        lines.append(_family(f"{_money(cost * scale)} {unit}", points, colour=2))
    for target in (here, *(round(here, 2) + step for step in (-0.1, -0.05, 0.05, 0.1, 0.2, 0.4))):
        points = _inside([(one, _tokens(law, one, target)) for one in sizes], low, high)
        lines.append(_family(f"loss {_loss_text(target)}", points[::-1]))
    lines.append(Series(_said(found), [active], [tokens], colour=_CHOSEN))
    cross = _cross(found, active, tokens, found.intervals.get("active_params"), "tokens")
    title = "Tokens by parameters, with lines of the same cost and of the same loss"
    return line_chart(
        [line for line in lines if line.x], title=title, x_label="parameters that a token meets",
        log_x=True, log_y=True, crosses=[cross], height=440,
    )  # fmt: skip


def _rules(found: "Budget") -> list[tuple[str, float, int]]:
    """The lines of the best models: their name, the inference tokens that they are best for, and their colour."""
    rules = [(f"compute-optimal ({found.fit.name})", 0.0, _OPTIMAL)]
    served = found.problem.served(found.number("mfu"))
    return [*rules, ("cheapest over training and use", served, _SERVED)] if served else rules


def _said(found: "Budget") -> str:
    active, tokens, loss = (found.number(name) for name in ("active_params", "tokens", "loss"))
    return f"this run: {_count(active or 0)} parameters, {_count(tokens or 0)} tokens, loss {_loss_text(loss or 0)}"


def _point(found: "Budget") -> "tuple[Law, float, float]":
    active, tokens = found.number("active_params"), found.number("tokens")
    assert active is not None and tokens is not None, "a loss follows from both"
    return found.problem.law(found.fit), active, tokens


def _cost(found: "Budget") -> tuple[float, str]:
    """What a FLOP costs, and the words for it."""
    cost, flops = found.number("cost_usd"), found.number("flops")
    return (cost / flops, "USD") if cost and flops else (1.0, "FLOPs")


def _best(law: "Law", flops: float, served: float = 0.0) -> tuple[float, float]:
    """Active parameters and tokens that are best for so many FLOPs of training."""
    from smalti.plan.laws.bisect import root

    active = math.exp(root(lambda x: law.balance(math.exp(x), flops / 6 / math.exp(x), served), 0.0, law.most))
    return active, flops / 6 / active


def _bounds(found: "Budget", flops: float) -> tuple[float, float] | None:
    from smalti.plan.laws.fits import spread

    def best(fit: "object") -> dict[str, float]:
        law = found.problem.law(fit)  # type: ignore[arg-type]
        return {"loss": law.loss(*_best(law, flops))}

    return spread(found.fit, best)["loss"]


def _tokens(law: "Law", active: float, target: float) -> float:
    from smalti.base.errors import UserError

    try:
        return law.tokens_for_loss(active, target)
    except UserError:
        return math.inf


def _around(value: float, decades: float) -> list[float]:
    return [value * 10 ** (decades * (2 * i / (_POINTS - 1) - 1)) for i in range(_POINTS)]


def _inside(points: Sequence[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    return [one for one in points if low <= one[1] <= high]


def _family(name: str, points: Sequence[tuple[float, float]], colour: int = _FAMILY) -> "Series":
    from smalti.base.chart import Series

    return Series(name, [x for x, _ in points], [y for _, y in points], colour=colour, named_at_end=True)


def _cross(found: "Budget", x: float, y: float, x_interval: tuple[float, float] | None, name: str) -> "Cross":
    from smalti.base.chart import Cross
    from smalti.cli.plan.quantities import format_quantity

    said = ", ".join(
        f"{key} {format_quantity(key, value)}"
        for key in ("active_params", "tokens", "flops", "cost_usd", "loss")
        if (value := found.values[key]) is not None
    )
    return Cross(x, y, said, x_interval, found.intervals.get(name), colour=_CHOSEN)


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
