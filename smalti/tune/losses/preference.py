"""Losses of preference pairs and of labelled answers, from log-probabilities: DPO, IPO, SimPO, KTO.

A *log-ratio* is log pi(y|x) - log pi_ref(y|x) of an answer y to a prompt x, in nats. Functions return one loss for each
pair or answer; they do not reduce.

Shapes: N pairs, or N answers.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def dpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return -(1 - e) log sigmoid(b d) - e log sigmoid(-b d), d the difference of the log-ratios, summed over tokens.

    b = beta, e = label_smoothing, the assumed share of swapped pairs. e = 0 is DPO (Rafailov et al., arXiv:2305.18290,
    equation 7), e > 0 conservative DPO (Mitchell, "A note on DPO with noisy preferences", 2023).
    """
    return _smoothed(beta * (chosen_N - rejected_N), label_smoothing)


def robust_dpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return (-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)) / (1 - 2 e): in expectation over swaps at the rate e,
    DPO on the true pairs (Chowdhury et al., arXiv:2403.00409, equation 11). Not bounded below."""
    logits_N = beta * (chosen_N - rejected_N)
    kept_N, swapped_N = F.logsigmoid(logits_N), F.logsigmoid(-logits_N)
    return (label_smoothing * swapped_N - (1 - label_smoothing) * kept_N) / (1 - 2 * label_smoothing)


def ipo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> Tensor:
    """Return (d - 1 / (2 b))^2, d the difference of the log-ratios averaged over tokens, b = beta.

    Azar et al., arXiv:2310.12036, equation 17, whose tau is beta. Averages instead of sums are the authors' correction
    for answers of different lengths (as in TRL).
    """
    return (chosen_N - rejected_N - 1 / (2 * beta)).square()


def simpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """Return DPO's loss of b (mean log p chosen - mean log p rejected) - g: no reference, averages over tokens.

    b = beta, g = gamma, the target margin (Meng et al., arXiv:2405.14734, equation 6; their code gives gamma / beta).
    """
    return _smoothed(beta * (chosen_N - rejected_N) - gamma, label_smoothing)


def kto(
    log_ratio_N: Tensor,
    desirable_N: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return w (1 - sigmoid(+- b (r - z))) of labelled answers: r the summed log-ratio, + for desirable ones.

    Ethayarajh et al., arXiv:2402.01306, equation 8. desirable_N: bool. kl: z, shape (), an estimate of KL(pi || pi_ref)
    without a gradient; ``mean_kl`` bounds it.
    """
    desirable_N = desirable_N.to(log_ratio_N.dtype)
    weight_N = undesirable_weight + (desirable_weight - undesirable_weight) * desirable_N
    sign_N = 2 * desirable_N - 1
    return weight_N * torch.sigmoid(-sign_N * beta * (log_ratio_N - kl.detach()))


def mean_kl(total: Tensor, count: Tensor) -> Tensor:
    """Return the estimate of KL(pi || pi_ref) from the sum of the log-ratios of ``count`` mismatched answers, at least
    0 as a divergence is (arXiv:2402.01306, section 4.1)."""
    return (total / count.clamp(min=1)).clamp(min=0).detach()


def _smoothed(logits_N: Tensor, smoothing: float) -> Tensor:
    kept_N = -F.logsigmoid(logits_N)
    return kept_N if not smoothing else (1 - smoothing) * kept_N - smoothing * F.logsigmoid(-logits_N)
