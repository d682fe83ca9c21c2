"""Responses that pass and fail an instruction, and the check that its verifier grades them so."""

from dataclasses import dataclass, field
from typing import Any

from smalti.evals.graders.ifeval.verdict import Verdict
from smalti.evals.graders.ifeval.verifiers import verifier


@dataclass
class Examples:
    """Responses to an instruction with these kwargs, by the verdicts that they get."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    passing: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    official_only: list[str] = field(default_factory=list)
    fixed_only: list[str] = field(default_factory=list)


def check_examples(instruction_id: str, groups: list[Examples]) -> None:
    """Assert the verdicts, and that at least ten responses pass and ten fail by both."""
    wrong = []
    for group in groups:
        check = verifier(instruction_id, group.kwargs, "example")
        for expected, responses in (
            (Verdict(True, True), group.passing),
            (Verdict(False, False), group.failing),
            (Verdict(True, False), group.official_only),
            (Verdict(False, True), group.fixed_only),
        ):
            verdicts = [(response, check(response, **group.kwargs)) for response in responses]
            wrong += [(group.kwargs, *pair) for pair in verdicts if pair[1] != expected]
    assert not wrong, wrong
    assert len({response for group in groups for response in group.passing}) >= 10
    assert len({response for group in groups for response in group.failing}) >= 10
