"""Accuracy of comparisons whose two sides may be equal."""

from torch import Tensor

_ROUNDING = 1e-5


def correct(margin_N: Tensor, size_N: Tensor) -> Tensor:
    """Return 1 for a positive margin, 0 for a negative one, 1/2 for a tie: a margin within rounding of the values.

    size_N: the magnitude of the values whose difference the margin is; a tie is at most 1e-5 of it. A model beside its
    reference has ties alone: their log-probabilities differ by the rounding of other rows and kernels.
    """
    return (margin_N.sign() * (margin_N.abs() > _ROUNDING * size_N) + 1) / 2
