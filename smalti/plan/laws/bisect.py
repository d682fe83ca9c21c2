"""Find the zero of a falling function by bisection."""

from collections.abc import Callable

WIDEST = 92.0
"""Logarithm of 1e40, which no count of parameters, tokens or FLOPs exceeds."""


def root(falling: Callable[[float], float], low: float = -WIDEST, high: float = WIDEST) -> float:
    """Return the zero of ``falling`` in [low, high] to the precision of a float; an end if there is none."""
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
