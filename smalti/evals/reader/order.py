"""The orders in which samples are read. A key is None for a sample that has no place in its order."""

from collections.abc import Callable, Iterable

from smalti.evals.samples import Sample

Key = Callable[[Sample], float | None]


def wrong_and_confident(sample: Sample) -> float | None:
    """Return 2 + the probability of a wrong answer; where that is not known, 2 - that of the right answer.

    For held-out text, bits per byte scaled below 1.
    """
    if sample.bits_per_byte is not None:
        return sample.bits_per_byte / (1 + sample.bits_per_byte)
    if sample.correct is not False:
        return None
    return 2 - (sample.gold_probability or 0.0) if sample.confidence is None else 2 + sample.confidence


def disagreement(sample: Sample) -> float | None:
    """Return how much two models differ on an item; None where their answers are the same.

    Where one is right and the other wrong: 2 + the difference of the right answer's probabilities; where both are
    wrong: 1 + the same. Held-out text: the difference of bits per byte, scaled below 1.
    """
    other = sample.other
    if other is None:
        return None
    if sample.bits_per_byte is not None and other.bits_per_byte is not None:
        distance = abs(sample.bits_per_byte - other.bits_per_byte)
        return distance / (1 + distance)
    if sample.correct == other.correct and (sample.answer == other.answer or sample.correct):
        return None
    base = 1.0 if sample.correct == other.correct else 2.0
    return base + abs((sample.gold_probability or 0.0) - (other.gold_probability or 0.0))


ORDERS: dict[str, Key] = {
    "confident": wrong_and_confident,
    "disagreement": disagreement,
    "unparsed": lambda sample: 1.0 if sample.unparsed else None,
    "truncated": lambda sample: 1.0 if sample.truncated else None,
    "index": lambda sample: 0.0,
}
"""Name -> key; the largest comes first, and equal ones in the order of the file."""

TITLES = {
    "confident": "wrong and confident",
    "disagreement": "answered differently",
    "unparsed": "without an answer that could be parsed",
    "truncated": "truncated",
    "index": "in the order of the file",
}


def ordered(samples: Iterable[Sample], order: str) -> list[Sample]:
    """Return the samples that have a place in the order, in it."""
    keyed = [(key, sample) for sample in samples if (key := ORDERS[order](sample)) is not None]
    return [sample for _, sample in sorted(keyed, key=lambda pair: -pair[0])]
