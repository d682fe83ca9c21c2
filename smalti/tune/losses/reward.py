"""The loss of a reward model on pairs of scores. Shapes: N pairs."""

from torch import Tensor
from torch.nn import functional as F


def bradley_terry(
    chosen_N: Tensor, rejected_N: Tensor, margin_N: Tensor | None = None, *, center_coef: float = 0.0
) -> Tensor:
    """Return -log sigmoid(c - r - m) + a (c + r)^2 of the scores c and r.

    The first term is the model of Bradley and Terry (as in InstructGPT, arXiv:2203.02155, equation 1) with the margin m
    of Llama 2 (arXiv:2307.09288, equation 2; absent: 0). The second, with a = center_coef, keeps scores around 0, which
    the first does not fix (Eisenstein et al., arXiv:2312.09244, section 2).
    """
    difference_N = chosen_N - rejected_N if margin_N is None else chosen_N - rejected_N - margin_N
    loss_N = -F.logsigmoid(difference_N)
    return loss_N if not center_coef else loss_N + center_coef * (chosen_N + rejected_N).square()
