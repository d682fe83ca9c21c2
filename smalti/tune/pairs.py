"""Examples of preference tuning and of reward models, from those of ``chats``."""

from collections.abc import Sequence
from dataclasses import replace

from smalti.base.errors import DataError
from smalti.data.examples import Example

Ids = tuple[Sequence[int], Sequence[int]]


def require_pairs(examples: Sequence[Example]) -> None:
    """Raise DataError for examples that are not pairs of a chosen and a rejected answer."""
    for example in examples:
        if len(example.sequences) != 2:
            raise DataError(
                f"example {example.id} has one answer",
                allowed="prompt, chosen and rejected",
                hint="smalti tune sft for answers alone; tune.preference.loss=kto for answers with a label",
            )


def with_mismatched(examples: Sequence[Example], longest: int) -> list[Example]:
    """Return examples of KTO: each answer, and a mismatched one: its prompt with the answer of the next example.

    longest: the most tokens of an example, of both sequences together; an answer that is longer beside this prompt is
    cut at the end. Raises DataError for examples without ``label``, and for one alone.
    """
    for example in examples:
        if len(example.sequences) != 1 or "label" not in example.values:
            raise DataError(
                f"example {example.id} is not an answer with a label",
                allowed="prompt, completion and label (true or false)",
                hint="tune.preference.loss=dpo for pairs",
            )
    if len(examples) == 1:
        raise DataError("one example alone has no other answer to compare with", allowed="two examples or more")
    others = [*examples[1:], examples[0]]
    return [
        replace(example, sequences=(example.sequences[0], _mismatched(example, other, longest)))
        for example, other in zip(examples, others, strict=True)
    ]


def _mismatched(example: Example, other: Example, longest: int) -> Ids:
    (ids, mask), (other_ids, other_mask) = example.sequences[0], other.sequences[0]
    begin, other_begin = _begin(mask), _begin(other_mask)
    room = longest - (len(ids) - 1) - (begin - 1)
    if room < 1:
        raise DataError(
            f"example {example.id} leaves no room for a mismatched answer in a row of {longest} tokens",
            allowed="examples of at most half a row",
            hint="tune.examples.max_tokens, or a larger data.seq_len",
        )
    end = other_begin + room
    return [*ids[:begin], *other_ids[other_begin:end]], [*mask[:begin], *other_mask[other_begin:end]]


def _begin(mask: Sequence[int]) -> int:
    """Return the index of the first token in the loss."""
    return next(number for number, flag in enumerate(mask) if flag)


def with_last_inputs(examples: Sequence[Example], token: int) -> list[Example]:
    """Return examples of reward models: each sequence with one more token outside the loss.

    A row has the tokens of a sequence as inputs, except the last one, whose score is wanted.
    """
    require_pairs(examples)
    return [
        replace(example, sequences=tuple(([*ids, token], [*mask, 0]) for ids, mask in example.sequences))
        for example in examples
    ]
