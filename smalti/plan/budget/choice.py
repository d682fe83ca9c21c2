"""Choose parameters and tokens where the given values leave them open: by a target loss, or optimally.

The result is one point and the rule that chose it, or None if too much is open. The loss is that of the active
parameters; for an MoE it is an upper bound, unless ``experts`` is given (Clark's estimate).
"""

import math
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.plan.budget.equations import System
from smalti.plan.laws import law as laws
from smalti.plan.laws.bisect import root
from smalti.plan.laws.fits import Fit
from smalti.plan.quantities import Quantity, format_number

_ALL = ("params", "active_params", "tokens")
_MIN_LOG, _MAX_LOG = math.log(1e-3), math.log(1e40)


@dataclass(frozen=True)
class Choice:
    """Names of the chosen quantities, and the rule as text."""

    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Law:
    """The loss of a run by its active parameters and tokens."""

    fit: Fit
    experts: float | None = None
    """Experts for each active one, by Clark et al.; None: the law ignores experts."""
    unique_tokens: float | None = None

    def params(self, active: float) -> float:
        """Return the parameters that the law counts."""
        return active if self.experts is None else laws.clark_params(active, self.experts)

    def loss(self, active: float, tokens: float) -> float:
        """Return the loss in nats per token."""
        return laws.loss(self.fit, self.params(active), tokens, unique_tokens=self.unique_tokens)

    def tokens_for_loss(self, active: float, target: float) -> float:
        """Return the tokens that bring ``active`` parameters to the loss ``target``. Raises UserError if none do."""
        return laws.tokens_for_loss(self.fit, self.params(active), target, unique_tokens=self.unique_tokens)

    def balance(self, active: float, tokens: float, served: float) -> float:
        """Return ``laws.balance`` by active parameters."""
        slope = 1.0 if self.experts is None else laws.clark_exponent(self.experts)
        params = self.params(active)
        return math.log(slope) + laws.balance(
            self.fit, params, tokens, served_tokens=served, unique_tokens=self.unique_tokens
        )

    def cheapest(self, target: float, served: float) -> tuple[float, float]:
        """Return active parameters and tokens that reach the loss ``target`` at the least 6 N D + 2 N ``served``."""
        if self.experts is None:
            return laws.cheapest(self.fit, target, served, self.unique_tokens)

        def balance_at(x: float) -> float:
            try:
                return self.balance(math.exp(x), self.tokens_for_loss(math.exp(x), target), served)
            except UserError:
                return math.inf

        active = math.exp(root(balance_at, 0.0, self.max_log_active))
        return active, self.tokens_for_loss(active, target)

    @property
    def max_log_active(self) -> float:
        """Logarithm of the largest number of active parameters that the law covers."""
        return _MAX_LOG if self.experts is None else math.log(laws.CLARK_PARAMS_MAX)

    def check_loss(self, target: Quantity, active: float, tokens: float) -> str | None:
        """Return a note if ``target`` differs from the law inside its interval. Raises UserError if outside."""
        predicted = self.loss(active, tokens)
        off = abs(target.value - predicted)
        if off <= target.value * max(target.rounding, 1e-9):
            return None
        interval = laws.loss_interval(self.fit, self.params(active), tokens, unique_tokens=self.unique_tokens)
        law_text = f"{self.fit.name} gives {format_number(predicted)}"
        if interval is not None:
            law_text += f" ({format_number(interval[0])} to {format_number(interval[1])})"
        model = f"{format_number(active)} active parameters and {format_number(tokens)} tokens"
        message = f"loss={target.text} but {law_text} for {model}"
        if interval is not None and interval[0] <= target.value <= interval[1]:
            return message
        raise UserError(message, allowed="a loss that the law gives", hint="leave loss out, or params, or tokens")


def close(system: System, law: Law, target: float | None, served: float, *, may_choose: bool) -> Choice | None:
    """Determine active parameters and tokens in ``system`` as far as possible; return the choice, if one was made.

    ``served``: inference tokens, weighed in FLOPs of training tokens; they count only where there is a choice.
    """
    free, point, direction = system.line("active_params", "tokens")
    if free == 1 and target is not None:
        return _reach(system, law, target, point, direction)
    if free == 0 or not may_choose:
        return None
    if free == 2:
        if target is None:
            return None
        active, tokens = law.cheapest(target, served)
        _settle(system, active, tokens)
        what = "least cost of training and inference" if served else "least cost of training"
        return Choice(_ALL, f"of all models of loss={format_number(target)} the one with the {what}, by {law.fit.name}")
    if min(direction) >= 0 and max(direction) > 0 and 0 not in direction:
        return None  # parameters and tokens grow together: there is no optimum
    low, high = _ends(law, point, direction)
    sign = 1.0 if direction[0] > 0 else -1.0
    t = root(lambda t: sign * law.balance(*_at(point, direction, t), served), low, high)
    active, tokens = _at(point, direction, t)
    _settle(system, active, tokens)
    rule = "cheapest over training and inference for its loss" if served else "compute-optimal"
    if direction[0] == 0:
        return Choice(
            ("tokens",), f"the tokens for {format_number(active)} active parameters: {rule} by {law.fit.name}"
        )
    if direction[1] == 0:
        return Choice(
            ("params", "active_params"), f"the parameters for {format_number(tokens)} tokens: {rule} by {law.fit.name}"
        )
    return Choice(
        _ALL, f"parameters and tokens of flops={format_number(6 * active * tokens)}: {rule} by {law.fit.name}"
    )


def _reach(
    system: System, law: Law, target: float, point: tuple[float, float], direction: tuple[float, float]
) -> Choice | None:
    """Set the point of a line that has the loss ``target``; return the choice, if there were two."""
    low, high = _ends(law, point, direction)
    choice = None
    if direction[1] < 0:  # so many FLOPs: the loss first falls with the size, then rises
        best = root(lambda t: law.balance(*_at(point, direction, t), 0.0), low, high)
        flops = format_number(6 * math.prod(_at(point, direction, best)))
        least = law.loss(*_at(point, direction, best))
        if target < least * (1 - 1e-9):
            raise UserError(
                f"loss={format_number(target)} is out of reach of flops={flops}: the least by {law.fit.name} is "
                f"{format_number(least)}, with {format_number(_at(point, direction, best)[0])} parameters",
                allowed=f"a loss of {format_number(least)} or more, or more FLOPs",
            )
        high = best
        choice = Choice((), f"of the two models that reach loss={format_number(target)} with flops={flops} the smaller")
    elif law.loss(*_at(point, direction, high)) >= target:
        fixed = (
            f"{format_number(math.exp(point[0]))} parameters"
            if direction[0] == 0
            else f"{format_number(math.exp(point[1]))} tokens"
        )
        raise UserError(
            f"loss={format_number(target)} is out of reach of {fixed}: {law.fit.name} goes down to "
            f"{format_number(law.loss(*_at(point, direction, high)))}",
            allowed="a higher loss, or more of them",
        )
    _settle(system, *_at(point, direction, root(lambda t: law.loss(*_at(point, direction, t)) - target, low, high)))
    return choice


def _settle(system: System, active: float, tokens: float) -> None:
    system.set("active_params", active)
    system.set("tokens", tokens)


def _at(point: tuple[float, float], direction: tuple[float, float], t: float) -> tuple[float, float]:
    return math.exp(point[0] + t * direction[0]), math.exp(point[1] + t * direction[1])


def _ends(law: Law, point: tuple[float, float], direction: tuple[float, float]) -> tuple[float, float]:
    """Return the range of t in which both quantities stay within their bounds."""
    low, high = -1e3, 1e3
    for at, step, maximum in zip(point, direction, (law.max_log_active, _MAX_LOG), strict=True):
        if step:
            first, last = sorted(((_MIN_LOG - at) / step, (maximum - at) / step))
            low, high = max(low, first), min(high, last)
    return low, high
