"""What the examples of each kind of tuning are: answers, pairs, or mismatched answers; with the reference's columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smalti.base.errors import DataError
from smalti.config.adapter import Quantization
from smalti.config.tune import TuneConfig
from smalti.data.examples import Example
from smalti.data.tokenizer.encode import Tokenizer
from smalti.tune.pairs import checked_pairs, with_last_inputs, with_mismatched
from smalti.tune.spool import Computed, Indexed


@dataclass(frozen=True)
class Form:
    """The form of the examples of a kind of tuning."""

    key: list[Any]
    """All that determines it besides files and tokenizer."""
    max_tokens: int
    """The longest example before ``convert``."""
    convert: Callable[[Indexed[Example], Tokenizer], Indexed[Example]]
    """Converts the examples of a split. Raises DataError for examples of another kind."""


def form_of(
    tune: TuneConfig, seq_len: int, origin: str, compute: str, quantization: Quantization | None = None
) -> Form:
    """Return the form of the examples. The weights of ``origin`` are read for the digest of a cached reference.

    quantization: that of the base of adapters, which is the reference.
    """
    if tune.reward is not None:
        return Form(["reward"], seq_len - 2, lambda examples, tokenizer: with_last_inputs(examples, tokenizer.eod_id))
    if tune.preference is None:
        return Form([], seq_len, _answers)
    is_kto = tune.preference.loss == "kto"

    def pairs(examples: Indexed[Example]) -> Indexed[Example]:
        return with_mismatched(examples, seq_len) if is_kto else checked_pairs(examples)

    kind, max_tokens = ("kto", seq_len // 2) if is_kto else ("pairs", seq_len)
    if tune.preference.reference_or_default != "cached":
        return Form([kind], max_tokens, lambda examples, _: pairs(examples))
    from smalti.tune.preference.reference import identity, with_reference  # loads torch

    key = [kind, identity(origin), compute, *([quantization] if quantization else [])]

    def convert(examples: Indexed[Example], _: Tokenizer) -> Indexed[Example]:
        return with_reference(pairs(examples), origin, compute, quantization=quantization)

    return Form(key, max_tokens, convert)


def _answers(examples: Indexed[Example], tokenizer: Tokenizer) -> Indexed[Example]:
    def answer(number: int) -> Example:
        example = examples[number]
        if example.values:
            raise DataError(
                f"example {example.id} has {', '.join(example.values)} beside its answer, which supervised tuning "
                "does not read: wrong answers would be learned too",
                allowed="rows of right answers",
                hint="smalti tune preference kto, or leave out the wrong rows and the column",
            )
        if len(example.sequences) != 1:
            raise DataError(
                f"example {example.id} is a pair of answers",
                allowed="one answer in each row, for supervised tuning",
                hint="smalti tune preference dpo, or tune.examples.columns.completion=chosen",
            )
        return example

    return Computed(len(examples), answer)
