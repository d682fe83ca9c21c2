"""Edited copies of texts with a known similarity to the original."""

import random
import re
from collections.abc import Sequence

from build_planted.document import jaccard, shingles

_PIECE = re.compile(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\s\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+|\s+")
_TRIES = 40


def edited_to(rng: random.Random, text: str, low: float, high: float, fresh: Sequence[str]) -> str | None:
    """Return a copy whose Jaccard similarity of runs of three words is in [low, high]; None if there is none.

    Words are replaced at random places, a passage is left out, or words of ``fresh`` are added in one place.
    """
    original = shingles(text)
    for _ in range(_TRIES):
        copy = rng.choice((_replaced, _shortened, _extended))(rng, text, rng.uniform(low, high), fresh)
        if low <= jaccard(original, shingles(copy)) <= high:
            return copy
    return None


def _replaced(rng: random.Random, text: str, target: float, fresh: Sequence[str]) -> str:
    pieces = _PIECE.findall(text)
    places = [place for place, piece in enumerate(pieces) if not piece.isspace()]
    # A word is in three shingles: if a share p is replaced, 1 - 3p of them stay and 3p are new.
    share = (1 - target) / (3 * (1 + target)) * rng.uniform(0.9, 1.2)
    for place in rng.sample(places, min(len(places), max(1, round(share * len(places))))):
        pieces[place] = rng.choice(fresh)
    return "".join(pieces)


def _shortened(rng: random.Random, text: str, target: float, fresh: Sequence[str]) -> str:
    pieces = _PIECE.findall(text)
    n = round((1 - target) * len(pieces))
    first = rng.randint(0, len(pieces) - n)
    return "".join(pieces[:first] + pieces[first + n :])


def _extended(rng: random.Random, text: str, target: float, fresh: Sequence[str]) -> str:
    pieces = _PIECE.findall(text)
    n = round((1 / target - 1) * sum(not piece.isspace() for piece in pieces))
    place = rng.randint(0, len(pieces))
    return "".join(pieces[:place]) + " " + " ".join(rng.choice(fresh) for _ in range(n)) + " " + "".join(pieces[place:])
