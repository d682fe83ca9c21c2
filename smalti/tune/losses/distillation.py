"""Divergences between a teacher's and a student's distribution of the next token. Shapes: N tokens, V vocabulary."""

from torch import Tensor
from torch.nn import functional as F


def forward_kl(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return t^2 KL(teacher || student) of softmax(logits / t), [N]; t = temperature.

    Hinton et al., arXiv:1503.02531, section 2; t^2 makes gradients of different temperatures comparable. The student
    covers all that the teacher finds likely.
    """
    student_NV, teacher_NV = (F.log_softmax(logits / temperature, dim=-1) for logits in (student_NV, teacher_NV))
    return temperature**2 * (teacher_NV.exp() * (teacher_NV - student_NV)).sum(dim=-1)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return t^2 KL(student || teacher) of softmax(logits / t), [N] (MiniLLM, arXiv:2306.08543, section 2.1).

    The student avoids what the teacher finds unlikely.
    """
    return forward_kl(teacher_NV, student_NV, temperature=temperature)
