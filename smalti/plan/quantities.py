"""Parse quantities as users type them, and keep the precision with which they were typed.

Accepts ``7b``, ``1.4T``, ``30k``, ``5.88e21`` and plain numbers. Percent, zero, negative, infinite and out-of-range
values raise UserError with what to type instead.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from smalti.base.errors import UserError, nearest

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

MAX_ROUNDING = 0.1
"""Largest relative difference of two values that may be equal up to rounding."""

_NUMBER = re.compile(r"(\d[\d_]*)?(?:\.(\d*))?(?:e([+-]?\d+))?\s*([kmbt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """A number with its name and the text that was typed."""

    name: str
    value: float
    text: str
    """Text as typed."""
    rounding: float
    """Half of the last digit that was typed, as a share of the value; at most ``MAX_ROUNDING``."""


def parse_quantity(name: str, typed: str | float, limits: tuple[float, float]) -> Quantity:
    """Parse ``typed``. Raises UserError if it is not a number inside ``limits``."""
    if isinstance(typed, str):
        value, unit = _parse(name, typed.strip(), limits)
        text = typed.strip()
        rounding = min(0.5 * unit / value, MAX_ROUNDING) if value > 0 else 0.0
    else:
        value, text, rounding = float(typed), format_number(float(typed)), 1e-6
    require_in_range(name, value, text, limits)
    return Quantity(name, value, text, rounding)


def require_whole(quantity: Quantity) -> Quantity:
    """Return ``quantity``. Raises UserError unless it is a whole number."""
    if quantity.value != round(quantity.value):
        raise UserError(f"{quantity.name}={quantity.text} is not a whole number", allowed="a whole number from 1")
    return quantity


def require_in_range(
    name: str, value: float, text: str, limits: tuple[float, float], *, hint: str | None = None
) -> None:
    """Raise UserError unless ``value`` is inside ``limits``."""
    low, high = limits
    allowed = (
        f"a number above 0, up to {format_number(high)}"
        if low < 1e-9
        else f"{format_number(low)} to {format_number(high)}"
    )
    if not math.isfinite(value) or value <= 0:
        raise UserError(
            f"{name}={text} is not a positive number", allowed=allowed, hint=hint or "leave out what is not known"
        )
    if high == 1 and 1 < value <= 100:
        raise UserError(f"{name}={text} is more than 1", allowed=allowed, hint=hint or f"write {name}={value / 100:g}")
    if not low <= value <= high:
        raise UserError(f"{name}={text} is out of range", allowed=allowed, hint=hint or "count the zeros")


def parse_pairs(words: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Return ``key=value`` words as a mapping. Raises UserError for a key that is not ``known``, or is repeated."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        require_known(key, known)
        if not equals or not value.strip():
            raise UserError(f"'{word}' gives {key} no value", allowed="key=value", hint=f"{key}=7e9, for example")
        if key in values:
            raise UserError(f"{key} is given twice: {values[key]} and {value}", allowed="each key once")
        values[key] = value.strip()
    return values


def require_known(key: str, known: tuple[str, ...]) -> None:
    """Raise UserError with the nearest name unless ``key`` is known."""
    if key not in known:
        close = nearest(key, known)
        hint = f"did you mean {close}=...?" if close else None
        raise UserError(f"'{key}' is not a quantity of this plan", allowed=", ".join(known), hint=hint)


def format_number(value: float) -> str:
    """Format a number with four digits in the shortest form: 5.88e21, 512, 0.4."""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.4g}"
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].replace("+", ""), text)


def join_texts(quantities: Mapping[str, Quantity]) -> str:
    """Join ``name=text`` of all quantities with blanks."""
    return " ".join(f"{quantity.name}={quantity.text}" for quantity in quantities.values())


def _parse(name: str, text: str, limits: tuple[float, float]) -> tuple[float, float]:
    """Return (value, unit of its last digit)."""
    plain = text.lstrip("-+")
    if plain.lower() in ("nan", "inf", "infinity"):
        require_in_range(name, float(text), text, limits)
    if plain.endswith("%"):
        shown = f"{name}={_percent(plain)}" if limits[1] == 1 else f"{name} without %"
        raise UserError(f"{name}={text} is in percent", allowed="numbers; shares from 0 to 1", hint=f"write {shown}")
    match = _NUMBER.fullmatch(plain)
    if match is None or (match[1] is None and not match[2]):
        hint = (
            "write it without commas"
            if "," in text
            else "leave out the unit: it is in the name"
            if plain[:1].isdigit()
            else None
        )
        raise UserError(f"{name}={text} is not a number", allowed="such as 7e9, 7b, 1.4T, 30k, 512, 0.4", hint=hint)
    whole, fraction, exponent, suffix = match[1] or "", match[2], int(match[3] or 0), match[4].lower()
    if abs(exponent) > 300:
        raise UserError(
            f"{name}={text} is out of range", allowed=f"up to {format_number(limits[1])}", hint="count the zeros"
        )
    scale = 10.0**exponent * SUFFIXES[suffix]
    value = float(f"{whole or 0}.{fraction or 0}".replace("_", "")) * scale
    unit = scale * 10.0 ** -len(fraction or "")
    if (
        fraction is None and not match[3] and not suffix and value >= 1000
    ):  # the zeros of 1000000 need not be significant
        digits = whole.replace("_", "")
        unit = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return (-value if text.startswith("-") else value), unit


def _percent(text: str) -> str:
    try:
        return f"{float(text.rstrip('% ')) / 100:g}"
    except ValueError:
        return "0.4"
