"""What a model without the skill would score: the majority answer, and the model's answers to other questions."""

from collections import Counter
from collections.abc import Sequence


def majority(options: Sequence[tuple[str, ...]], golds: Sequence[int]) -> float:
    """Return the share of the most frequent right answer."""
    return max(_answers(options, golds).values()) / len(golds)


def permuted(options: Sequence[tuple[str, ...]], golds: Sequence[int], choices: Sequence[int]) -> float:
    """Return the expected accuracy of the same choices if the right answers were permuted over the items.

    A model that always gives the same letter has this as its accuracy.
    """
    right, chosen = (_answers(options, places) for places in (golds, choices))
    return sum(right[answer] * chosen[answer] for answer in right) / len(golds) ** 2


def have_labels(options: Sequence[tuple[str, ...]]) -> bool:
    """Return whether all items have the same options in any order: "A" to "D", yes and no."""
    return len({tuple(sorted(texts)) for texts in options}) == 1


def _answers(options: Sequence[tuple[str, ...]], places: Sequence[int]) -> Counter[str]:
    """Count the answers: texts of options where these are labels, else places."""
    labelled = have_labels(options)
    return Counter(texts[place] if labelled else str(place) for texts, place in zip(options, places, strict=True))
