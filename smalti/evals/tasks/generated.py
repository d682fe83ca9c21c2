"""Two in-context tasks generated from a seed, without a data set or contamination: sums, and closing brackets.

Both are ranked by likelihood among k candidates, so chance is 1/k. "Examples + question + candidate + newline" is
tokenised as one text; a candidate's score is the summed log-likelihood of the tokens after those that all candidates
share. The newline ends the answer, so a longer one is not favoured. Item i depends on (seed, task, i) alone.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.config.eval import EvalConfig
from smalti.evals.tasks import needles
from smalti.evals.tasks.items import Item

_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_DEPTH = 4
_SUMS = 10
_ENDINGS = 6


def arithmetic(index: int, *, shots: int, seed: int) -> Item:
    """Return ``a+b=`` with two-digit a and one-digit b; the candidates are ten consecutive sums.

    The right sum is at a uniform position of the ten, so always choosing the least or the middle does not beat chance.
    Examples never contain the question. Every sum has two digits.
    """
    draw = random.Random(derive_key("arithmetic", seed, index))
    question = (draw.randint(20, 80), draw.randint(1, 9))
    examples: list[tuple[int, int]] = []
    while len(examples) < shots:
        pair = (draw.randint(20, 80), draw.randint(1, 9))
        if pair != question:
            examples.append(pair)
    right, gold = sum(question), draw.randrange(_SUMS)
    lines = "".join(f"{a}+{b}={a + b}\n" for a, b in examples)
    candidates = tuple(f"{right - gold + place}\n" for place in range(_SUMS))
    return Item(index, (f"{lines}{question[0]}+{question[1]}=",), candidates, gold)


def brackets(index: int, *, shots: int, seed: int) -> Item:
    """Return four opening brackets; the candidates are six different endings, one of them right.

    Wrong endings are drawn uniformly from all others. Examples contain none of the six, so a candidate's absence from
    them has no information.
    """
    draw = random.Random(derive_key("brackets", seed, index))
    openings: list[str] = []
    while len(openings) < _ENDINGS:
        opening = _opening(draw)
        if opening not in openings:
            openings.append(opening)
    gold = draw.randrange(_ENDINGS)
    examples: list[str] = []
    while len(examples) < shots:
        opening = _opening(draw)
        if opening not in openings:
            examples.append(opening)
    lines = "".join(f"{opening}{close(opening)}\n" for opening in examples)
    return Item(index, (lines + openings[gold],), tuple(close(opening) + "\n" for opening in openings), gold)


def close(opening: str) -> str:
    """Return the closing brackets: ``([{`` -> ``}])``."""
    return "".join(_PAIRS[character] for character in reversed(opening))


def _opening(draw: random.Random) -> str:
    return "".join(draw.choice("([{<") for _ in range(_DEPTH))


class Generator(NamedTuple):
    """What makes the items of a task, and their chance."""

    make: Callable[[int, EvalConfig, needles.Count], Item]
    """(index, settings, number of tokens of a text) -> item."""
    chance: float
    n_tokens: int | None = None
    """Tokens of an item with its answer, of a task with a length in its name."""


def generator(name: str) -> Generator | None:
    """Return the generator of a task; None where its items are not generated."""
    if name in _WITH_SHOTS:
        make, chance = _WITH_SHOTS[name]
        return Generator(lambda index, config, count: make(index, shots=config.shots, seed=config.seed), chance)
    sized = needles.sized(name)
    if sized is None:
        return None
    kind, n_tokens = sized
    make_sized = partial(needles.KINDS[kind], n_tokens=n_tokens)
    return Generator(
        lambda index, config, count: make_sized(index, seed=config.seed, count=count), needles.CHANCE, n_tokens
    )


def context_of(name: str, seq_len: int, longest: int) -> int:
    """Return the context of a task: the length in its name, or ``seq_len``. Raises UserError beyond ``longest``."""
    made = generator(name)
    n_tokens = None if made is None else made.n_tokens
    if n_tokens is not None and n_tokens > longest:
        raise UserError(
            f"the task '{name}' needs a context of {n_tokens:,} tokens, and the model's longest is {longest:,}",
            allowed=f"a length of at most {longest}",
            hint=f"{name.partition('_')[0]}_{longest}; or extend the model: docs/guides/long-context.md",
        )
    return n_tokens or seq_len


_WITH_SHOTS: dict[str, tuple[Callable[..., Item], float]] = {
    "arithmetic": (arithmetic, 1 / _SUMS),
    "brackets": (brackets, 1 / _ENDINGS),
}
