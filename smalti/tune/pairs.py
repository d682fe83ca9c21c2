"""Examples of preference tuning and of reward models, from those of ``chats``; each is computed when it is read."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from smalti.base import log
from smalti.base.errors import DataError
from smalti.data.examples import Example
from smalti.tune.spool import Computed, Indexed

Ids = tuple[Sequence[int], Sequence[int]]


def checked_pairs(examples: Indexed[Example]) -> Indexed[Example]:
    """Return the same examples, of which DataError is raised for one that is not a chosen and a rejected answer."""
    return Computed(len(examples), lambda number: _pair(examples[number]))


def _pair(example: Example) -> Example:
    if len(example.sequences) != 2:
        raise DataError(
            f"example {example.id} has one answer",
            allowed="prompt, chosen and rejected",
            hint="smalti tune sft for answers alone; smalti tune preference kto for answers with a label",
        )
    return example


def with_mismatched(examples: Indexed[Example], longest: int) -> Indexed[Example]:
    """Return examples of KTO: each answer, and a mismatched one: its prompt with the next answer to another prompt.

    longest: the most tokens of an example, of both sequences together; an answer that is longer beside this prompt is
    cut at the end. Raises DataError for examples without ``label``, and if all have one prompt.
    """
    others = _next_other_prompts(examples)
    labels = {example.values["label"] for example in examples}
    if len(labels) == 1:
        kind = "true: no answer is undesirable" if labels == {1.0} else "false: no answer is desirable"
        log.get("tune").warning("the label of all %d examples is %s; KTO compares the two kinds", len(examples), kind)

    def example_of(number: int) -> Example:
        example = examples[number]
        return replace(
            example, sequences=(example.sequences[0], _mismatched(example, examples[others[number]], longest))
        )

    return Computed(len(examples), example_of)


def _next_other_prompts(examples: Indexed[Example]) -> Sequence[int]:
    """Return for each example the index of the next one with another prompt; after the last one follows the first."""
    prompts = array("q", map(_prompt_hash, examples))
    following = next((number for number, prompt in enumerate(prompts) if prompt != prompts[-1]), None)
    if following is None:
        raise DataError(
            f"the prompts of all {len(examples)} examples are equal, and a mismatched answer is to another prompt",
            allowed="two prompts or more, of training and of held-out examples",
            hint="add prompts, or change tune.examples.heldout_frac",
        )
    results = array("q", [following])
    for number in range(len(prompts) - 1, 0, -1):
        results.append(number if prompts[number] != prompts[number - 1] else results[-1])
    return results[::-1]


def _prompt_hash(example: Example) -> int:
    """Return the hash of a prompt's tokens. Raises DataError for an example that is not an answer with a label."""
    if len(example.sequences) != 1 or "label" not in example.values:
        raise DataError(
            f"example {example.id} is not an answer with a label",
            allowed="prompt, completion and label (true or false)",
            hint="smalti tune preference dpo for pairs",
        )
    ids, mask = example.sequences[0]
    return hash(tuple(ids[: _answer_begin(mask)]))


def _mismatched(example: Example, other: Example, longest: int) -> Ids:
    (ids, mask), (other_ids, other_mask) = example.sequences[0], other.sequences[0]
    begin, other_begin = _answer_begin(mask), _answer_begin(other_mask)
    room = longest - (len(ids) - 1) - (begin - 1)
    if room < 1:
        raise DataError(
            f"example {example.id} leaves no room for a mismatched answer in a row of {longest} tokens",
            allowed="examples of at most half a row",
            hint="tune.examples.max_tokens, or a larger data.seq_len",
        )
    end = other_begin + room
    return [*ids[:begin], *other_ids[other_begin:end]], [*mask[:begin], *other_mask[other_begin:end]]


def _answer_begin(mask: Sequence[int]) -> int:
    """Return the index of the first token in the loss."""
    return next(number for number, flag in enumerate(mask) if flag)


def with_last_inputs(examples: Indexed[Example], token: int) -> Indexed[Example]:
    """Return examples of reward models: each sequence with one more token outside the loss.

    A row has the tokens of a sequence as inputs, except the last one, whose score is wanted.
    """

    def example_of(number: int) -> Example:
        example = _pair(examples[number])
        return replace(example, sequences=tuple(([*ids, token], [*mask, 0]) for ids, mask in example.sequences))

    return Computed(len(examples), example_of)
