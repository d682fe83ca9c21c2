"""A synthetic set of simple instructions: conversations, and preferences between a right and a wrong answer.

Row i of a split depends on (seed, split, i) alone. A hash of each operand decides its split: of a number, a pair of
numbers, and each pair of neighbours in a string of words. So the number or pair of a row to validate with or to hold
out is asked about in no training row, and no two neighbours of its strings are neighbours in a training row.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from smalti.base import store
from smalti.base.rng import derive_key

Split = Literal["train", "validation", "heldout"]
_HELDOUT_ONE_IN = 5
_VALIDATION_ONE_IN = 10
"""Of those that are not held out."""
_TEXT = """
block case class client code data date day end error event field file format group host index input item key level line
link map message method mode module month name node object order output part path point port process range result rule
server set sign signal size space start state step table test text thread time tree type user value version way year
"""
_WORDS = tuple(_TEXT.split())
"""Frequent words, of which tokenizers have a token each."""
_TASK = """\
kind: generation
file: {split}.jsonl
columns: {{messages: messages, category: kind}}
verbatim: true
"""
_SYSTEM = ("You are a helpful assistant.", "Answer briefly.")
_FULL_STOP = "End every answer with a full stop."


class Turn(NamedTuple):
    """A question with its right answer, and a wrong one that looks like it."""

    question: str
    answer: str
    wrong: str


@dataclass(frozen=True)
class Instruction:
    """A conversation that ends with a question of its kind."""

    kind: str
    prompt: tuple[dict[str, str], ...]
    """Messages with role and content, the last of the user."""
    answer: str
    wrong: str
    operands: tuple[str, ...]
    """What is asked about; all of them belong to the split of the row."""

    def chat(self) -> dict[str, Any]:
        """Return the row in OpenAI's format, with its kind."""
        return {"messages": [*self.prompt, {"role": "assistant", "content": self.answer}], "kind": self.kind}

    def preference(self) -> dict[str, Any]:
        """Return the row of a preference: the right answer is chosen, the wrong one rejected."""
        return {"prompt": list(self.prompt), "chosen": self.answer, "rejected": self.wrong, "kind": self.kind}


@lru_cache(None)
def split_of(operand: str) -> Split:
    """Return the split that an operand belongs to; one in five is held out, one in ten of the others validates."""
    others, remainder = divmod(derive_key("operands of instructions", operand), _HELDOUT_ONE_IN)
    if remainder == 0:
        return "heldout"
    return "validation" if others % _VALIDATION_ONE_IN == 0 else "train"


def kinds() -> tuple[str, ...]:
    """Return the names of the kinds of instructions."""
    return tuple(_KINDS)


def instruction(index: int, *, seed: int, split: Split) -> Instruction:
    """Return row ``index`` of a split; the kinds take turns."""
    kind = kinds()[index % len(_KINDS)]
    draw = _Draw(random.Random(derive_key("instructions", seed, split, index)), split)
    turns = _KINDS[kind](draw)
    prompt: list[dict[str, str]] = []
    end = ""
    chance = draw.random.random()
    if chance < 0.1:
        prompt.append({"role": "system", "content": _FULL_STOP})
        end = "."
    elif chance < 0.3:
        prompt.append({"role": "system", "content": draw.random.choice(_SYSTEM)})
    for turn in turns[:-1]:
        prompt.append({"role": "user", "content": turn.question})
        prompt.append({"role": "assistant", "content": turn.answer + end})
    last = turns[-1]
    prompt.append({"role": "user", "content": last.question})
    return Instruction(kind, tuple(prompt), last.answer + end, last.wrong + end, tuple(draw.operands))


def write(
    folder: str, *, n_train: int = 32_000, n_heldout: int = 600, n_preferences: int = 2_500, seed: int = 17
) -> None:
    """Write the set into ``folder``, the same files whenever the arguments are the same.

    ``train.jsonl``, ``heldout.jsonl`` and ``validation.jsonl`` (``n_heldout`` rows each) are conversations in OpenAI's
    format, ``preferences.jsonl``, ``heldout-preferences.jsonl`` and ``validation-preferences.jsonl`` have the columns
    prompt, chosen and rejected. ``instructions.yaml`` and ``validation.yaml`` are the evaluation tasks of the held-out
    and the validation conversations. Preferences are about other rows than the conversations.
    """

    def write_rows(name: str, rows: Iterable[dict[str, Any]]) -> None:
        store.write_text(store.join(folder, name), "".join(json.dumps(row) + "\n" for row in rows))

    sizes: dict[Split, tuple[int, int]] = {
        "train": (n_train, n_preferences),
        "validation": (n_heldout, n_heldout),
        "heldout": (n_heldout, n_heldout),
    }
    for split, (n, n_pairs) in sizes.items():
        pairs = "preferences.jsonl" if split == "train" else f"{split}-preferences.jsonl"
        write_rows(f"{split}.jsonl", (row.chat() for row in instructions(range(n), seed=seed, split=split)))
        write_rows(pairs, (row.preference() for row in instructions(range(n, n + n_pairs), seed=seed, split=split)))
    store.write_text(store.join(folder, "instructions.yaml"), _TASK.format(split="heldout"))
    store.write_text(store.join(folder, "validation.yaml"), _TASK.format(split="validation"))


def instructions(indices: Iterable[int], *, seed: int, split: Split) -> Iterator[Instruction]:
    """Yield the rows of these numbers."""
    return (instruction(index, seed=seed, split=split) for index in indices)


@dataclass
class _Draw:
    """Draws operands of one split, and remembers them."""

    random: random.Random
    split: Split
    operands: list[str] = field(default_factory=list)

    def phrase(self, *texts: str) -> str:
        """Return one of several wordings."""
        return self.random.choice(texts)

    def words(self, low: int, high: int) -> list[str]:
        """Return ``low`` to ``high`` different words."""
        n = self.random.randint(low, high)
        while True:
            words = self.random.sample(_WORDS, n)
            pairs = [" ".join(sorted(pair)) for pair in pairwise(words)]
            if all(split_of(pair) == self.split for pair in pairs):
                self.operands += pairs
                return words

    def number(self, low: int, high: int) -> int:
        """Return a number of [low, high]."""
        while True:
            number = self.random.randint(low, high)
            if self._takes(str(number)):
                return number

    def pair(self, low: int, high: int) -> tuple[int, int]:
        """Return two different numbers of [low, high], in random order; their pair is the operand, of every kind."""
        while True:
            a, b = self.random.sample(range(low, high + 1), 2)
            if self._takes(f"{min(a, b)} {max(a, b)}"):
                return a, b

    def _takes(self, operand: str) -> bool:
        if split_of(operand) != self.split:
            return False
        self.operands.append(operand)
        return True


def _repeat(draw: _Draw) -> list[Turn]:
    words = draw.words(2, 3)
    text = " ".join(words)
    question = draw.phrase("Repeat: {}", "Repeat after me: {}", "Say this again: {}").format(text)
    return [Turn(question, text, " ".join(words[1:]))]


def _twice(draw: _Draw) -> list[Turn]:
    text = " ".join(draw.words(2, 2))
    question = draw.phrase("Say twice: {}", "Write this twice: {}", "Repeat two times: {}").format(text)
    return [Turn(question, f"{text} {text}", text)]


def _first(draw: _Draw) -> list[Turn]:
    words = draw.words(2, 3)
    question = draw.phrase("What is the first of these words: {}", "First word of: {}", "Give the first word: {}")
    return [Turn(question.format(" ".join(words)), words[0], draw.random.choice(words[1:]))]


def _last(draw: _Draw) -> list[Turn]:
    words = draw.words(2, 3)
    question = draw.phrase("What is the last of these words: {}", "Last word of: {}", "Give the last word: {}")
    return [Turn(question.format(" ".join(words)), words[-1], draw.random.choice(words[:-1]))]


def _nth(draw: _Draw) -> list[Turn]:
    words = draw.words(3, 4)
    place = draw.random.randrange(1, 3)
    name = ("first", "second", "third")[place]
    question = draw.phrase("What is the {} of these words: {}", "Which word is {}: {}", "Give the {} word: {}")
    wrong = draw.random.choice([word for word in words if word != words[place]])
    return [Turn(question.format(name, " ".join(words)), words[place], wrong)]


def _swap(draw: _Draw) -> list[Turn]:
    a, b = draw.words(2, 2)
    question = draw.phrase("Swap these words: {} {}", "Write in reverse order: {} {}", "Swap: {} {}").format(a, b)
    return [Turn(question, f"{b} {a}", f"{a} {b}")]


def _call(draw: _Draw) -> list[Turn]:
    a, b = draw.words(2, 2)
    question = draw.phrase(
        "Call the function {} with {}", "How do I call {} with the argument {}?", "Call {}, given {}"
    )
    return [Turn(question.format(a, b), f"{a}({b})", f"{b}({a})")]


def _commas(draw: _Draw) -> list[Turn]:
    words = draw.words(2, 3)
    question = draw.phrase("Separate with commas: {}", "Write as a list with commas: {}", "Put commas between: {}")
    return [Turn(question.format(" ".join(words)), ", ".join(words), " ".join(words))]


def _larger(draw: _Draw) -> list[Turn]:
    a, b = draw.pair(10, 49)
    question = draw.phrase("Which is larger, {} or {}?", "What is the larger number: {} {}", "Larger: {} or {}?")
    return [Turn(question.format(a, b), str(max(a, b)), str(min(a, b)))]


def _sort(draw: _Draw) -> list[Turn]:
    a, b = draw.pair(10, 49)
    question = draw.phrase("Sort these numbers: {} {}", "Put in ascending order: {} {}", "Sort: {} {}").format(a, b)
    low, high = min(a, b), max(a, b)
    return [Turn(question, f"{low} {high}", f"{high} {low}")]


def _number(draw: _Draw) -> list[Turn]:
    number = draw.number(100, 999)
    wrong = str(number)[:-1] + str((number + draw.random.randint(1, 9)) % 10)
    question = draw.phrase("Write the number {}", "Copy this number: {}", "Which number is this: {}").format(number)
    return [Turn(question, str(number), wrong)]


def _letter(draw: _Draw) -> list[Turn]:
    a, b = draw.words(2, 2)
    question = draw.phrase("Write a greeting to {} from {}", "Greet {} in the name of {}", "To {}, from {}: a greeting")
    return [Turn(question.format(a, b), f"Hello {a}, best wishes, {b}", f"Hello {b}, best wishes, {a}")]


def _follow_up(draw: _Draw) -> list[Turn]:
    first = _first(draw)[0]
    words = first.question.split(": ")[1].split()
    if draw.random.random() < 0.5:
        question = draw.phrase("And the last one?", "Now the last one.", "And the last?")
        return [first, Turn(question, words[-1], words[0])]
    question = draw.phrase("Say all of them again.", "Now repeat them all.", "And all the words?")
    return [first, Turn(question, " ".join(words), " ".join(words[1:]))]


_KINDS: dict[str, Callable[[_Draw], list[Turn]]] = {
    "repeat": _repeat,
    "twice": _twice,
    "first": _first,
    "last": _last,
    "nth": _nth,
    "swap": _swap,
    "call": _call,
    "commas": _commas,
    "larger": _larger,
    "sort": _sort,
    "number": _number,
    "letter": _letter,
    "follow-up": _follow_up,
}
