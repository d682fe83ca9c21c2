"""What a person types for a quantity, as a number that remembers how precisely it was typed.

Promises: ``7b``, ``1.4T``, ``30k``, ``5.88e21`` and plain numbers are read; percent, zero, negative and infinite ones
and those beyond belief are refused by name, with what to type instead. Knows no formula.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from smalti.base.errors import UserError, nearest

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

MAX_ROUNDING = 0.1
"""Nothing is off by more than this and still taken for the same number."""

_NUMBER = re.compile(r"(\d[\d_]*)?(?:\.(\d*))?(?:e([+-]?\d+))?\s*([kmbt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """A quantity as it was given."""

    name: str
    value: float
    text: str
    """As it was typed."""
    rounding: float
    """Half of the last digit that was typed, as a share of the value; at most ``MAX_ROUNDING``."""


def parse_quantity(name: str, typed: str | float, limits: tuple[float, float]) -> Quantity:
    """The number behind ``typed``, inside ``limits``; UserError with what to type otherwise."""
    if isinstance(typed, str):
        value, unit = _parse(name, typed.strip(), limits)
        text = typed.strip()
        rounding = min(0.5 * unit / value, MAX_ROUNDING) if value > 0 else 0.0
    else:
        value, text, rounding = float(typed), format_number(float(typed)), 1e-6
    require_in_range(name, value, text, limits)
    return Quantity(name, value, text, rounding)


def require_whole(one: Quantity) -> Quantity:
    """The same; UserError unless it is a whole number."""
    if one.value != round(one.value):
        raise UserError(f"{one.name}={one.text} cannot be", allowed="a whole number from 1")
    return one


def require_in_range(
    name: str, value: float, text: str, limits: tuple[float, float], *, hint: str | None = None
) -> None:
    """UserError unless ``value`` lies inside ``limits``."""
    low, high = limits
    allowed = (
        f"a number above 0, up to {format_number(high)}"
        if low < 1e-9
        else f"{format_number(low)} to {format_number(high)}"
    )
    if not math.isfinite(value) or value <= 0:
        raise UserError(
            f"{name}={text} is nothing to plan with", allowed=allowed, hint=hint or "leave out what is not known"
        )
    if high == 1 and 1 < value <= 100:
        raise UserError(
            f"{name}={text} is more than all", allowed=allowed, hint=hint or f"write {name}={value / 100:g}"
        )
    if not low <= value <= high:
        raise UserError(f"{name}={text} is beyond belief", allowed=allowed, hint=hint or "count the zeros")


def parse_pairs(words: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """``key=value`` words as a mapping; a key that is not ``known``, or comes twice, is a UserError."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        require_known(key, known)
        if not equals or not value.strip():
            raise UserError(f"'{word}' gives {key} no value", allowed="key=value", hint=f"{key}=7e9, say")
        if key in found:
            raise UserError(f"{key} is given twice: {found[key]} and {value}", allowed="each key once")
        found[key] = value.strip()
    return found


def require_known(key: str, known: tuple[str, ...]) -> None:
    """UserError with the nearest name unless ``key`` is known."""
    if key not in known:
        close = nearest(key, known)
        hint = f"did you mean {close}=...?" if close else None
        raise UserError(f"'{key}' is not a quantity of this plan", allowed=", ".join(known), hint=hint)


def format_number(value: float) -> str:
    """Four digits, as a person types them: 5.88e21, 512, 0.4."""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.4g}"
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].replace("+", ""), text)


def join_texts(given: Mapping[str, Quantity]) -> str:
    """``name=text`` of all, in a row."""
    return " ".join(f"{one.name}={one.text}" for one in given.values())


def _parse(name: str, text: str, limits: tuple[float, float]) -> tuple[float, float]:
    """The value and the unit of its last digit."""
    plain = text.lstrip("-+")
    if plain.lower() in ("nan", "inf", "infinity"):
        require_in_range(name, float(text), text, limits)
    if plain.endswith("%"):
        shown = f"{name}={_percent(plain)}" if limits[1] == 1 else f"{name} without %"
        raise UserError(f"{name}={text} is in percent", allowed="numbers; shares from 0 to 1", hint=f"write {shown}")
    found = _NUMBER.fullmatch(plain)
    if found is None or (found[1] is None and not found[2]):
        hint = (
            "write it without commas"
            if "," in text
            else "leave the unit out: it is in the name"
            if plain[:1].isdigit()
            else None
        )
        raise UserError(f"{name}={text} is not a number", allowed="such as 7e9, 7b, 1.4T, 30k, 512, 0.4", hint=hint)
    whole, fraction, exponent, suffix = found[1] or "", found[2], int(found[3] or 0), found[4].lower()
    if abs(exponent) > 300:
        raise UserError(
            f"{name}={text} is beyond belief", allowed=f"up to {format_number(limits[1])}", hint="count the zeros"
        )
    scale = 10.0**exponent * SUFFIXES[suffix]
    value = float(f"{whole or 0}.{fraction or 0}".replace("_", "")) * scale
    unit = scale * 10.0 ** -len(fraction or "")
    if fraction is None and not found[3] and not suffix and value >= 1000:  # nobody means every zero of 1000000
        digits = whole.replace("_", "")
        unit = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return (-value if text.startswith("-") else value), unit


def _percent(text: str) -> str:
    try:
        return f"{float(text.rstrip('% ')) / 100:g}"
    except ValueError:
        return "0.4"
