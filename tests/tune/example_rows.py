"""Packed rows of synthetic examples, and a model without layers, for tests of losses over sequences."""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from smalti.train.batches import IGNORE, Microbatch

VOCAB, WIDTH = 11, 5


@dataclass(frozen=True)
class Answer:
    """A sequence: ``ids`` and, for each but the first, whether it is a target in the loss."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class Pair:
    """Two sequences and the columns of their example."""

    first: Answer
    second: Answer
    values: dict[str, float]


class Layerless(nn.Module):
    """Hidden states are rows of a table, by the token and its position; the head is as a decoder's."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype))
        self.place = nn.Parameter(torch.randn(64, WIDTH, generator=generator, dtype=dtype))
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype))

    def forward(self, inputs: Tensor, positions: Tensor, documents: Tensor, *, head: Any, **_: Any) -> Any:
        return SimpleNamespace(value=head(self.table[inputs] + self.place[positions], self.weight), router=None)


@st.composite
def answers(draw: Any, longest: int = 7) -> Answer:
    """A sequence with at least one target."""
    length = draw(st.integers(2, longest))
    mask = draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))
    mask[draw(st.integers(0, length - 2))] = True
    return Answer(tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))), tuple(mask))


@st.composite
def rows_of_pairs(draw: Any) -> list[list[Pair]]:
    """1 to 3 rows of 0 to 3 pairs each, with at least one pair."""
    number = st.floats(-5, 5, allow_subnormal=False)
    values = st.fixed_dictionaries(
        {"reference_first": number, "reference_second": number, "label": st.sampled_from([0.0, 1.0]), "margin": number}
    )
    pair = st.builds(Pair, answers(), answers(), values)
    rows = draw(st.lists(st.lists(pair, max_size=3), min_size=1, max_size=3))
    return rows if any(rows) else [[draw(pair)]]


def some_pairs(count: int) -> list[Pair]:
    """Pairs of 2 to 8 tokens each, always the same."""
    random = Random(3)

    def answer() -> Answer:
        size = random.randint(2, 8)
        return Answer(tuple(random.choices(range(VOCAB), k=size)), (True, *random.choices([True, False], k=size - 2)))

    names = ("reference_first", "reference_second", "margin")
    return [
        Pair(answer(), answer(), {name: random.uniform(-9, 0) for name in names} | {"label": float(i % 2)})
        for i in range(count)
    ]


def pack(
    rows: list[list[Pair]], seq_len: int = 0, dtype: torch.dtype = torch.float64, like: list[Pair] | None = None
) -> Microbatch:
    """The rows of a microbatch: padded to the longest, or to ``seq_len``; padding is a document of its own. ``like``
    gives the columns of rows without pairs."""
    longest = max([seq_len, 1, *(sum(len(p.first.ids) + len(p.second.ids) for p in row) for row in rows)])
    columns = max([1, *(2 * len(row) for row in rows)])
    inputs, positions, documents = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(3))
    targets = torch.full((len(rows), longest), IGNORE)
    names = {name for row in [*rows, like or []] for pair in row for name in pair.values}
    values = {name: torch.zeros(len(rows), columns, dtype=dtype) for name in names}
    for row, pairs in enumerate(rows):
        start = 0
        for number, answer in enumerate(answer for pair in pairs for answer in (pair.first, pair.second)):
            size = len(answer.ids)
            inputs[row, start : start + size] = torch.tensor(answer.ids)
            shown = [target if counts else IGNORE for target, counts in zip(answer.ids[1:], answer.mask, strict=True)]
            targets[row, start : start + size - 1] = torch.tensor(shown)
            positions[row, start : start + size] = torch.arange(size)
            documents[row, start : start + size] = number + 1
            for name, value in pairs[number // 2].values.items():
                values[name][row, number] = value
            start += size
        documents[row, start:] = 2 * len(pairs) + 1
        positions[row, start:] = torch.arange(longest - start) % 64
    return Microbatch(inputs, targets, positions, documents, values=values)


def log_p(model: Layerless, answer: Answer) -> Tensor:
    """The answer's summed log-probability from whole logits, alone."""
    ids = torch.tensor(answer.ids)
    hidden = model.table[ids[:-1]] + model.place[torch.arange(len(ids) - 1)]
    probability = (hidden @ model.weight.T).softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
    return (probability.log() * torch.tensor(answer.mask)).sum()


def length(answer: Answer) -> int:
    """Number of targets in the loss."""
    return sum(answer.mask)
