"""Tasks of long contexts, generated at a length in tokens: ``needle_2048`` finds a fact, ``copy_2048`` repeats a text.

*needle*: ten sentences that give a password to a place are spread over generated prose; asked for one of them, the
candidates are all ten passwords. *copy*: after random words, eight of them in their order; the candidates are the word
that followed and nine others of the text. Chance is 1/10; the category of an item is its depth, in fifths of the text.
Item i depends on (seed, task, tokens, i) and the tokenizer. Training texts never have a pair of the evaluation.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.evals.tasks.items import Item

Count = Callable[[str], int]
"""Number of tokens of a text."""

_NEEDLES = 10
_DEPTHS = 5
_COPIED_WORDS = 8
_MOST_REPEATS = 8
"""Of a text to train on: with a varying period, attending to a fixed distance does not copy."""
_EVALUATED = 8
"""One pair of place and password in so many is kept for evaluation."""
_TEXTS = (
    """abbey airport balcony bank barn bridge cabin castle cave cellar chapel church cinema clinic college cottage court
    dairy dam depot factory ferry forge fort fountain garage garden gate hall harbour hospital hotel house inn island
    jail kiosk laundry library lodge mall mansion market mine monastery museum office palace park pier prison quarry
    school shed shop stable station studio temple theatre tower tunnel vault villa""",
    """amber aspen aspen badger basil birch bronze canary carbon cedar cherry cobalt copper coral crimson daisy dolphin
    ebony falcon fennel garnet ginger hazel heron indigo iris ivory jasmine juniper koala lavender lemon lilac lynx
    magnet mango maple marble mint nickel nutmeg olive onyx opal orchid otter panda pepper plum poppy quartz raven ruby
    saffron scarlet silver spruce tiger topaz tulip turquoise velvet violet walnut willow zinc""",
    "old young quiet tall small clever tired happy busy gentle proud curious",
    "baker doctor farmer teacher sailor painter singer writer tailor miller hunter dancer",
    "carries finds sells paints cleans repairs brings keeps wants loses buys moves",
    "ladder basket lamp bottle chair letter kettle ribbon blanket hammer mirror wagon",
)
_PLACES, _PASSWORDS, _ADJECTIVES, _PEOPLE, _VERBS, _THINGS = (text.split() for text in _TEXTS)


def sized(name: str) -> tuple[str, int] | None:
    """Return kind and tokens of a name such as ``needle_2048``; None for other names."""
    match = re.fullmatch(f"({'|'.join(KINDS)})_([1-9][0-9]{{0,7}})", name)
    return (match[1], int(match[2])) if match else None


def needle(index: int, *, n_tokens: int, seed: int, count: Count) -> Item:
    """Return a question of at most ``n_tokens`` tokens with its answer. Raises UserError if the needles have more."""
    return _fitted(partial(_needle, index, (seed, n_tokens)), n_tokens, count)


def copy(index: int, *, n_tokens: int, seed: int, count: Count) -> Item:
    """Return random words and the first part of a span of them, at most ``n_tokens`` tokens with the next word."""
    return _fitted(partial(_copy, index, (seed, n_tokens)), n_tokens, count)


def _fitted(make: Callable[[int, Count], Item], n_tokens: int, count: Count) -> Item:
    """Return the item of the largest room that fits: a text has other tokens than its sentences where they meet."""
    room = n_tokens
    while True:
        item = make(room, count)
        excess = count(item.prompt + max(item.choices, key=count)) - n_tokens
        if excess <= 0:
            return item
        room -= excess


def _needle(index: int, key: tuple[int, int], n_tokens: int, count: Count) -> Item:
    draw = random.Random(derive_key("needle", *key, index))
    pairs = _pairs(draw, evaluated=True)
    asked = index % _NEEDLES
    place, _ = pairs[asked]
    choices = [f" {password}" for _, password in pairs]
    end = f"\n{_fact(place)}"
    text = _haystack(draw, pairs, n_tokens - max(count(end + choice) for choice in choices), count)
    answer = choices[asked]
    draw.shuffle(choices)
    return Item(index, (text + end,), tuple(choices), choices.index(answer), category=_depth(asked / _NEEDLES))


def _copy(index: int, key: tuple[int, int], n_tokens: int, count: Count) -> Item:
    draw = random.Random(derive_key("copy", *key, index))
    longest = max(count(f" {word}") for word in _words())
    words = _random_words(draw, n_tokens - 1 - (_COPIED_WORDS + 1) * longest, count)
    fifth = index % _DEPTHS
    last_start = len(words) - _COPIED_WORDS - 1
    if len(set(words)) < 2 * _NEEDLES:
        raise UserError(f"{n_tokens} tokens have no room for a text and its copy", hint="name a longer task: copy_512")
    start = draw.randint(last_start * fifth // _DEPTHS, last_start * (fifth + 1) // _DEPTHS)
    right = words[start + _COPIED_WORDS]
    others = sorted(set(words) - {right})
    choices = [f" {word}" for word in (right, *draw.sample(others, _NEEDLES - 1))]
    draw.shuffle(choices)
    prompt = f"{' '.join(words)}\n{' '.join(words[start : start + _COPIED_WORDS])}"
    return Item(index, (prompt,), tuple(choices), choices.index(f" {right}"), category=_depth(fifth / _DEPTHS))


KINDS: dict[str, Callable[..., Item]] = {"needle": needle, "copy": copy}
CHANCE = 1 / _NEEDLES


def training_texts(seed: int, n_tokens: int, count: Count = lambda text: len(text.split())) -> Iterator[str]:
    """Yield texts of about ``n_tokens`` tokens without end: half of them haystacks with all questions and answers, half
    random words two to eight times. Their pairs of place and password are none of the evaluation's.

    A haystack has a needle for every 24 tokens, up to ten.
    """
    index = 0
    while True:
        draw = random.Random(derive_key("training", seed, n_tokens, index))
        if index % 2 == 0:
            pairs = _pairs(draw, evaluated=False)[: max(1, n_tokens // 24)]
            asked = [f"{_fact(place)} {password}." for place, password in draw.sample(pairs, len(pairs))]
            answers = "\n".join(["", *asked])
            yield _haystack(draw, pairs, n_tokens - count(answers), count) + answers
        else:
            repeats = draw.randint(2, _MOST_REPEATS)
            yield "\n".join([" ".join(_random_words(draw, n_tokens // repeats, count))] * repeats)
        index += 1


def _pairs(draw: random.Random, *, evaluated: bool) -> list[tuple[str, str]]:
    """Return ten pairs of different places and passwords, all of the evaluation or all of training."""
    while True:
        passwords = iter(draw.sample(_PASSWORDS, len(_PASSWORDS)))
        pairs = list(zip(draw.sample(_PLACES, len(_PLACES)), passwords, strict=False))
        chosen = [pair for pair in pairs if _is_evaluated(*pair) == evaluated]
        if len(chosen) >= _NEEDLES:
            return chosen[:_NEEDLES]


def _is_evaluated(place: str, password: str) -> bool:
    return derive_key("needle pair", place, password) % _EVALUATED == 0


def _fact(place: str) -> str:
    return f"The password of the {place} is"


def _haystack(draw: random.Random, pairs: Sequence[tuple[str, str]], n_tokens: int, count: Count) -> str:
    """Return prose of at most ``n_tokens`` tokens with the i-th fact in the i-th of equal parts."""
    facts = [f"{_fact(place)} {password}." for place, password in pairs]
    room = n_tokens - count(" ".join(facts))
    if room < 0:
        raise UserError(
            f"the needles alone have {n_tokens - room} tokens, and there is room for {n_tokens}",
            hint="name a longer task, such as needle_512",
        )
    prose: list[str] = []
    while (size := count(" " + (sentence := _sentence(draw)))) <= room:
        prose.append(sentence)
        room -= size
    places = [int((number + draw.random()) * (len(prose) + 1) / len(facts)) for number in range(len(facts))]
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        prose.insert(place, fact)
    return " ".join(prose)


def _sentence(draw: random.Random) -> str:
    words = [draw.choice(words) for words in (_ADJECTIVES, _PEOPLE, _VERBS, _ADJECTIVES, _THINGS)]
    return f"The {' '.join(words[:3])} the {' '.join(words[3:])}."


def _random_words(draw: random.Random, n_tokens: int, count: Count) -> list[str]:
    words: list[str] = []
    pool = _words()
    while (size := count(" " + (word := draw.choice(pool)))) <= n_tokens:
        words.append(word)
        n_tokens -= size
    return words


def _words() -> list[str]:
    return [*_PLACES, *_PASSWORDS, *_PEOPLE, *_THINGS]


def _depth(start_frac: float) -> str:
    fifth = int(start_frac * _DEPTHS + 1e-9)
    return f"depth {fifth / _DEPTHS:g} to {(fifth + 1) / _DEPTHS:g}"
