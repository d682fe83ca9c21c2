"""The two verdicts on one instruction, and the comparison of a count with its bound."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether a response follows an instruction, as two verifiers see it."""

    official: bool
    """As the published checkers grade (google-research and lm-evaluation-harness), defects included."""
    fixed: bool
    """As the words of the instruction ask."""


def meets(count: int, relation: str, bound: int) -> bool:
    """``count < bound`` for the relation "less than", ``count >= bound`` for "at least"."""
    return count < bound if relation == "less than" else count >= bound
