"""Grades a response strictly and loosely, and sums grades up to the four published accuracies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from smalti.base.errors import UserError
from smalti.evals.graders.ifeval.rows import Row
from smalti.evals.graders.ifeval.verdict import Verdict
from smalti.evals.graders.ifeval.verifiers import Verifier
from smalti.evals.statistics.intervals import mean

Kind = Literal["official", "fixed"]


class Verdicts(TypedDict):
    """Both verdicts on one instruction; ``verdict.Verdict`` says what they are."""

    official: bool
    fixed: bool


class Grade(TypedDict):
    """The verdicts on one instruction of a row."""

    instruction_id: str
    strict: Verdicts
    loose: Verdicts


def grade(row: Row, response: str) -> list[Grade]:
    """Return a grade for each instruction of ``row``: strict for the response, loose for any of its eight variants.

    A blank response or variant follows no instruction.
    """
    variants = loose_variants(response)
    grades: list[Grade] = []
    for instruction_id, verifier, kwargs in zip(row.instruction_id_list, row.verifiers(), row.kwargs, strict=True):
        strict = _verdict(verifier, response, kwargs)
        loose = [strict, *(_verdict(verifier, variant, kwargs) for variant in variants)]
        grades.append(
            {
                "instruction_id": instruction_id,
                "strict": {"official": strict.official, "fixed": strict.fixed},
                "loose": {
                    "official": any(verdict.official for verdict in loose),
                    "fixed": any(verdict.fixed for verdict in loose),
                },
            }
        )
    return grades


def _verdict(verifier: Verifier, response: str, kwargs: Mapping[str, Any]) -> Verdict:
    return verifier(response, **kwargs) if response.strip() else Verdict(False, False)


def loose_variants(response: str) -> list[str]:
    """Return the other variants of a response: without first line, last line or both; all of them without asterisks."""
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = [*shortened, *(text.replace("*", "") for text in (response, *shortened))]
    return [variant for variant in dict.fromkeys(variants) if variant != response]


def summarize(grades: Iterable[Sequence[Grade]]) -> dict[Kind, dict[str, dict[str, Any]]]:
    """Return the accuracies of prompts and instructions, strict and loose, by official and by fixed verdicts.

    A prompt counts if all of its instructions are followed; instructions are counted over all prompts. Each has n, a
    standard error and a 95 % interval, in which the instructions of a prompt are dependent.
    """
    rows = [row for row in grades if row]
    if not rows:
        raise UserError("there are no grades to sum up", allowed="the grades of at least one row")
    return {"official": _accuracies(rows, "official"), "fixed": _accuracies(rows, "fixed")}


def _accuracies(rows: list[Sequence[Grade]], kind: Kind) -> dict[str, dict[str, Any]]:
    accuracies: dict[str, dict[str, Any]] = {}
    prompts = [number for number, row in enumerate(rows) for _ in row]
    for level in ("strict", "loose"):
        verdicts = [[grade["strict" if level == "strict" else "loose"][kind] for grade in row] for row in rows]
        instructions = [verdict for row in verdicts for verdict in row]
        accuracies[f"prompt_{level}"] = mean(list(map(all, verdicts))).to_score()
        accuracies[f"instruction_{level}"] = mean(instructions, prompts).to_score()
    return accuracies
