"""Prompts: the text before an answer, made of a task's preamble, shots and delimiters.

``v0.3`` is the text of version 0.3 of LLM Foundry's Eval Gauntlet. ``fixed`` has the same pieces; its shots are drawn
for each item by (seed, item), so they are the same whatever else is asked, and its options are in the order of a hash.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smalti.base.rng import derive_key
from smalti.config.eval import EvalConfig
from smalti.config.task import Mode, TaskConfig
from smalti.evals.tasks.items import Item


@dataclass(frozen=True)
class Prompt:
    """The texts of one item: ``head`` (preamble and shots), then a context (one, or one for each option)."""

    item: Item
    head: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    """With their leading white space, except in ``v0.3``, where it depends on the tokenizer."""

    @property
    def text(self) -> str:
        """What the model reads before the answer; of several contexts, the right one."""
        return self.head + self.contexts[self.item.gold if len(self.contexts) > 1 else 0]


def limit_of(task: TaskConfig, config: EvalConfig) -> int | None:
    """Return the number of rows to ask: the smaller limit of the two; None: all."""
    return min((limit for limit in (task.limit, config.limit) if limit is not None), default=None)


def shots_of(task: TaskConfig, items: Sequence[Item]) -> int:
    """Return the shots that every prompt has: the task's, or fewer where the smallest category has no more rows."""
    return min(task.shots, min(Counter(item.category for item in items).values()) - 1)


def make_prompts(task: TaskConfig, items: Sequence[Item], *, mode: Mode, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of at most ``limit`` items, with shots from all of them (of the same category)."""
    parts: dict[str, list[Item]] = {}
    for item in items:
        parts.setdefault(item.category, []).append(item)
    prompts: list[Prompt] = []
    for number, category in enumerate(sorted(parts)):
        share = None if limit is None else (limit + len(parts) - 1 - number) // len(parts)
        prompts += (_as_published if mode == "v0.3" else _fixed)(task, parts[category], share)
    return sorted(prompts, key=lambda prompt: prompt.item.index)


def _as_published(task: TaskConfig, items: list[Item], limit: int | None) -> list[Prompt]:
    """The first ``limit`` rows; one random sequence draws the shots of all, in the order of a set of integers."""
    draw = random.Random(task.seed)
    prompts = []
    for place, item in enumerate(items[:limit]):
        head = task.preamble
        for shot in _sequential_shots(draw, len(items), task.shots, place) if task.shots else ():
            head += _solved(task, items[shot], head, mode="v0.3")
        if task.kind == "schema":
            delimiter = task.continuation_delimiter.rstrip() if head else ""
            lead = task.prelimiter + (task.example_delimiter if head else "")
            contexts = tuple(lead + context + delimiter for context in item.contexts)
        else:
            contexts = ((_lead(task, head) + item.prompt + task.continuation_delimiter).rstrip(),)
        prompts.append(Prompt(item, head, contexts, item.choices))
    return prompts


def _sequential_shots(draw: random.Random, n: int, shots: int, place: int) -> set[int]:
    """Return the rows that LLM Foundry draws. A set, because its order of iteration is that of the prompt."""
    shots = min(n - 1, shots)
    chosen = set(draw.sample(range(n), shots))
    if place in chosen:
        chosen.remove(place)
        if len(chosen) < n - 1:
            other = draw.choice(range(n))
            while other in chosen or other == place:
                other = draw.choice(range(n))
            chosen.add(other)
    return chosen


def _fixed(task: TaskConfig, items: list[Item], limit: int | None) -> list[Prompt]:
    """The ``limit`` rows of the least hash; options in the order of another."""
    chosen = items
    if limit is not None and limit < len(items):
        chosen = sorted(items, key=lambda item: derive_key("limit", task.seed, item.key, item.index))[:limit]
    copies = Counter(item.key for item in items)
    return [_fixed_prompt(task, item, items, copies) for item in chosen]


def _fixed_prompt(task: TaskConfig, item: Item, items: list[Item], copies: Counter[int]) -> Prompt:
    head = task.preamble
    for shot in _shots_of(task, item, items, copies):
        head += _solved(task, shot, head, mode="fixed")
    item = shuffled(item, task.seed)
    texts = [_lead(task, head) + context + task.continuation_delimiter for context in item.contexts]
    contexts = tuple(text.rstrip() for text in texts)
    space = texts[0][len(contexts[0]) :]
    continuations = tuple(text if text[:1].isspace() else space + text for text in item.choices)
    return Prompt(item, head, contexts, continuations)


def _shots_of(task: TaskConfig, item: Item, items: list[Item], copies: Counter[int]) -> list[Item]:
    """Draw different rows that are not the item, nor a copy of it."""
    draw = random.Random(derive_key("shots", task.seed, item.key))
    shots: dict[int, Item] = {}
    while len(shots) < min(task.shots, len(items) - copies[item.key]):
        place = draw.randrange(len(items))
        if items[place].key != item.key:
            shots[place] = items[place]
    return list(shots.values())


def shuffled(item: Item, seed: int) -> Item:
    """Return the item with its options in the order of a hash of its content."""
    n = len(item.options)
    if n < 2:
        return item
    order = random.Random(derive_key("options", seed, item.key)).sample(range(n), n)
    options = tuple(item.options[place] for place in order)
    gold = order.index(item.gold)
    if len(item.contexts) > 1:
        return replace(item, gold=gold, contexts=options)
    return replace(item, gold=gold, choices=options)


def _lead(task: TaskConfig, head: str) -> str:
    return (task.example_delimiter if head else "") + task.prelimiter


def _solved(task: TaskConfig, item: Item, head: str, *, mode: Mode) -> str:
    """Return an item with its right answer, as it follows ``head``."""
    lead = _lead(task, head)
    context = item.contexts[item.gold if task.kind == "schema" else 0]
    if task.kind == "schema" and mode == "v0.3":
        lead = task.prelimiter + (task.example_delimiter if head else "")
    if task.kind == "generation":
        answer = item.answers[0] if item.reasoning is None else item.reasoning + task.answer_delimiter + item.answers[0]
    else:
        answer = item.choices[item.gold if task.kind == "choice" else 0]
    return lead + context + task.continuation_delimiter + answer
