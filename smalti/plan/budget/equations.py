"""Solve products of quantities as linear equations of their logarithms.

Which quantities follow is decided exactly (elimination over fractions); values have the precision of a float. A
contradiction raises UserError with the equation and its numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from smalti.base.errors import UserError
from smalti.plan.quantities import MAX_ROUNDING, Quantity, format_number


@dataclass(frozen=True)
class Equation:
    """``left`` = ``factor`` x the product of ``right`` / the product of ``under``."""

    left: str
    factor: float
    right: tuple[str, ...]
    under: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All quantities of the equation."""
        return (self.left, *self.right, *self.under)

    @property
    def exponents(self) -> dict[str, int]:
        """Exponents in left / right x under = factor."""
        return {self.left: 1, **dict.fromkeys(self.right, -1), **dict.fromkeys(self.under, 1)}

    def write(self, words: Mapping[str, str]) -> str:
        """The right side with ``words`` for the quantities: ``6 x 7e9 x 1.4e11``."""
        above = [f"{self.factor:g}"] if self.factor != 1 else []
        above += [words[name] for name in self.right]
        return " x ".join(above) + "".join(f" / {words[name]}" for name in self.under)

    @property
    def text(self) -> str:
        """``flops = 6 x active_params x tokens``."""
        return f"{self.left} = {self.write({name: name for name in self.names})}"

    def right_side(self, values: Mapping[str, float]) -> float:
        """The number on the right side."""
        return self.factor * math.prod(values[n] for n in self.right) / math.prod(values[n] for n in self.under)


@dataclass
class _Row:
    """``sum of coefficients x log(quantity) = right``, made from ``parts`` of the given values."""

    coefficients: dict[str, Fraction]
    right: float
    parts: dict[str, Fraction]

    def minus(self, other: "_Row", times: Fraction) -> "_Row":
        def subtract(left: dict[str, Fraction], right: dict[str, Fraction]) -> dict[str, Fraction]:
            difference = {
                name: left.get(name, Fraction(0)) - times * right.get(name, Fraction(0)) for name in {**left, **right}
            }
            return {name: value for name, value in difference.items() if value}

        return _Row(
            subtract(self.coefficients, other.coefficients),
            self.right - float(times) * other.right,
            subtract(self.parts, other.parts),
        )


class System:
    """Equations and given values, always fully reduced."""

    def __init__(self, equations: tuple[Equation, ...]) -> None:
        self.equations = list(equations)
        self._rows: dict[str, _Row] = {}
        self._given: dict[str, Quantity] = {}
        self.rounded: list[str] = []
        """Notes on values that agree only within the rounding of their digits."""
        for equation in equations:
            self.equate(equation)

    def equate(self, equation: Equation) -> bool:
        """Add an equation; return False if the others already imply or contradict it."""
        if equation not in self.equations:
            self.equations.append(equation)
        exponents = {name: Fraction(power) for name, power in equation.exponents.items()}
        return self._insert(_Row(exponents, math.log(equation.factor), {})) is None

    def give(self, quantity: Quantity) -> None:
        """Add a value. Raises UserError if it contradicts the others by more than the rounding of the digits given."""
        name = quantity.name
        rest = self._insert(_Row({name: Fraction(1)}, math.log(quantity.value), {name: Fraction(1)}))
        self._given.setdefault(name, quantity)
        if rest is None:
            return
        rounding = sum(
            abs(float(part)) * (quantity if other == name else self._given[other]).rounding
            for other, part in rest.parts.items()
        )
        if abs(rest.right) > min(rounding, MAX_ROUNDING) + 1e-9:
            message, equation = self._describe(quantity, rest)
            others = [other for other in self._given if other in rest.parts and other != name]
            raise UserError(
                message,
                allowed=f"values with {equation}, to the digits given",
                hint=f"leave one of them out: {', '.join((*others, name))}",
            )
        if abs(rest.right) > 1e-5:
            self.rounded.append(f"{self._describe(quantity, rest)[0]}: equal to the digits given, both are kept")

    def set(self, name: str, value: float) -> None:
        """Add a chosen or assumed value; it must not be determined yet, or be equal."""
        rest = self._insert(_Row({name: Fraction(1)}, math.log(value), {}))
        assert rest is None or abs(rest.right) < 1e-6, f"{name}={value} contradicts the plan"

    def value(self, name: str) -> float | None:
        """Return the value if it is determined, else None."""
        row = self._rows.get(name)
        return math.exp(row.right) if row is not None and len(row.coefficients) == 1 else None

    def line(self, first: str, second: str) -> tuple[int, tuple[float, float], tuple[float, float]]:
        """Return how far two quantities are determined: (degrees of freedom, logarithms at a point, direction).

        With one degree of freedom their logarithms are point + t x direction; with two, ``direction`` is unused.
        """
        first_log, first_slopes = self._affine(first)
        second_log, second_slopes = self._affine(second)
        point = first_log, second_log
        names = sorted({*first_slopes, *second_slopes})
        if not names:
            return 0, point, (0.0, 0.0)
        pairs = [(first_slopes.get(name, Fraction(0)), second_slopes.get(name, Fraction(0))) for name in names]
        if any(a * d != b * c for a, b in pairs for c, d in pairs):
            return 2, point, (0.0, 0.0)
        a, b = next(pair for pair in pairs if any(pair))
        sign = -1 if a < 0 or (a == 0 and b < 0) else 1
        size = max(abs(a), abs(b))
        return 1, point, (float(sign * a / size), float(sign * b / size))

    def equation_of(self, name: str) -> Equation | None:
        """Return an equation by which ``name`` follows from known values, preferably given ones, or None."""
        known = [
            equation
            for equation in self.equations
            if name in equation.names and all(self.value(n) for n in equation.names)
        ]
        return max(known, key=lambda equation: sum(n in self._given for n in equation.names), default=None)

    def _affine(self, name: str) -> tuple[float, dict[str, Fraction]]:
        row = self._rows.get(name)
        if row is None:
            return 0.0, {name: Fraction(1)}
        return row.right, {other: -value for other, value in row.coefficients.items() if other != name}

    def _insert(self, row: _Row) -> _Row | None:
        """Reduce ``row`` and add it; return the rest of a row that adds nothing, else None."""
        for name in list(row.coefficients):
            if name in self._rows and name in row.coefficients:
                row = row.minus(self._rows[name], row.coefficients[name])
        if not row.coefficients:
            return row
        pivot = min(row.coefficients)
        scale = row.coefficients[pivot]
        row = _Row(
            {name: value / scale for name, value in row.coefficients.items()},
            row.right / float(scale),
            {name: value / scale for name, value in row.parts.items()},
        )
        for name, other in self._rows.items():
            if pivot in other.coefficients:
                self._rows[name] = other.minus(row, other.coefficients[pivot])
        self._rows[pivot] = row
        return None

    def _describe(self, quantity: Quantity, rest: _Row) -> tuple[str, str]:
        """Return (message of the difference between a quantity and the others, their equation)."""
        others = [other for name, other in self._given.items() if name in rest.parts and name != quantity.name]
        words = {each.name: each.text for each in (*others, quantity)}
        values = {each.name: each.value for each in (*others, quantity)}
        for name in dict.fromkeys(name for equation in self.equations for name in equation.names):
            if name not in values and (known := self.value(name)) is not None:
                values[name], words[name] = known, format_number(known)
        for equation in self.equations:
            if quantity.name not in equation.names or any(name not in values for name in equation.names):
                continue
            right = equation.right_side(values)
            if not math.isclose(right, values[equation.left], rel_tol=1e-9):
                message = f"{equation.left}={words[equation.left]} but {equation.write(words)}"
                if not message.endswith(format_number(right)):
                    message += f" = {format_number(right)}"
                return message, equation.text
        implied = quantity.value * math.exp(-rest.right / float(rest.parts[quantity.name]))
        given_values = ", ".join(f"{other.name}={other.text}" for other in others)
        return f"{quantity.name}={quantity.text} but {given_values} give {format_number(implied)}", "all equations"
