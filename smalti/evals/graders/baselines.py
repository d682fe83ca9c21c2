"""What a model without the skill would score: the majority answer, and the model's answers to other questions."""

from collections import Counter
from collections.abc import Sequence


def majority(golds: Sequence[int]) -> float:
    """Return the share of the most frequent place of the right option; ``golds`` are places in the file's order."""
    return max(Counter(golds).values()) / len(golds)


def permuted(options: Sequence[tuple[str, ...]], golds: Sequence[int], choices: Sequence[int]) -> float:
    """Return the expected accuracy of the same choices if the right answers were permuted over the items.

    An answer is the text of an option where all items have the same options ("A" to "D", yes and no), else its place. A
    model that always gives the same letter has this as its accuracy.
    """
    has_labels = len({tuple(sorted(texts)) for texts in options}) == 1
    right, chosen = (
        Counter(texts[place] if has_labels else str(place) for texts, place in zip(options, places, strict=True))
        for places in (golds, choices)
    )
    return sum(right[answer] * chosen[answer] for answer in right) / len(golds) ** 2
