"""One zero of a falling function, by bisection: no derivative, no start value, nothing that can run away."""

import math
from collections.abc import Callable

WIDEST = 92.0
"""Logarithm of 1e40: no count of parameters, tokens or FLOPs is larger."""


def root(falling: Callable[[float], float], low: float = -WIDEST, high: float = WIDEST) -> float:
    """Where ``falling`` goes from above 0 to below it inside [low, high], to the last digit; an end if it does not."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        value = falling(middle)
        if value == 0:
            return middle
        if value > 0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def least(valley: Callable[[float], float], low: float, high: float) -> float:
    """Where ``valley``, which first falls and then rises, is lowest in [low, high]: golden section.

    Good to about the root of the precision of a float, as any method that compares values only.
    """
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = valley(left), valley(right)
    while high - low > 1e-9 * (1 + abs(low)):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = valley(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = valley(right)
    return 0.5 * (low + high)
