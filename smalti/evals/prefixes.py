"""Rows that compute the shared beginning of several windows once: the options of an item, or contexts after its shots.

A row has the shared inputs, then the rest of each window, at the positions that follow the shared ones. A token attends
to the shared inputs before it and to its own window, so every score is that of the window alone, up to rounding.

R: rows. T: tokens of a row. N: scored tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.choice import windows_of
from smalti.model.blocks.attention.scores import Attend, bias_of_distance, scores_of
from smalti.model.blocks.attention.sdpa import Dense, Fused
from smalti.model.blocks.kv_cache import Place, Read
from smalti.model.decoder import Decoder, Hooks

Ids = NDArray[np.int64]
_WIDEST_BRANCHED = 8192
"""Longest row of windows that differ: its mask has as many numbers as the square of the length (268 MB in fp32)."""


class HasIds(Protocol):
    """A window, of which the inputs are ``ids[:-1]``, and the targets from ``first`` on are scored."""

    @property
    def ids(self) -> Ids: ...

    @property
    def first(self) -> int: ...


@dataclass
class Row:
    """Windows that share their first ``n_shared`` inputs; ``width`` is the number of tokens of the row."""

    n_shared: int
    width: int
    longest: int
    numbers: list[int] = field(default_factory=list)
    """The windows' numbers."""

    @property
    def is_plain(self) -> bool:
        """Whether the row is the inputs of its longest window, and all others begin like it: nothing branches."""
        return self.width == self.longest


class Batch(NamedTuple):
    """The tokens of rows, and where the scored targets' inputs are in them."""

    ids_RT: Ids
    positions_RT: Ids
    parts_RT: Ids
    """0 for shared inputs, then 1, 2 ... for each window's own, -1 for padding."""
    row_N: Ids
    column_N: Ids


def rows_of(windows: Sequence[HasIds], *, branches: bool) -> list[Row]:
    """Group windows that follow each other. Without ``branches`` only those with equal inputs share a row.

    They share a row if at least half of its longest window is shared and the row is at most twice as long as that.
    """
    rows: list[Row] = []
    for number, window in enumerate(windows):
        n_inputs = len(window.ids) - 1
        if not rows or not _add(rows[-1], windows[rows[-1].numbers[0]].ids, number, window.ids, branches):
            rows.append(Row(n_inputs, n_inputs, n_inputs, [number]))
    return rows


def _add(row: Row, first_ids: Ids, number: int, ids: Ids, branches: bool) -> bool:
    """Add a window to a row; returns False where they share too little."""
    n_inputs = len(ids) - 1
    most = min(row.n_shared, n_inputs)
    differs = np.flatnonzero(first_ids[:most] != ids[:most])
    shared = int(differs[0]) if len(differs) else most
    longest = max(row.longest, n_inputs)
    width = row.width + n_inputs - shared + (row.n_shared - shared) * (len(row.numbers) - 1)
    branches = branches and width <= _WIDEST_BRANCHED
    if 2 * shared < longest or width > 2 * longest or (not branches and width > shared):
        return False
    row.n_shared, row.width, row.longest = shared, width, longest
    row.numbers.append(number)
    return True


def batches_of(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Yield batches of at most ``batch_tokens``, padding included, the widest rows first: memory is largest at once.

    A batch with an eighth of the tokens ends before a row that would be an eighth padding.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.width):
        if batch:
            widest, n_rows = batch[0].width, len(batch)
            is_large = 8 * n_rows * widest >= batch_tokens
            if (n_rows + 1) * widest > batch_tokens or (is_large and 8 * row.width < 7 * widest):
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def pack(windows: Sequence[HasIds], rows: Sequence[Row]) -> Batch:
    """Lay out the inputs of rows. The scored targets are in the order of the rows and of the windows in them."""
    shape = (len(rows), max(row.width for row in rows))
    ids_RT, positions_RT, parts_RT = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    row_N, column_N = [], []
    for at, row in enumerate(rows):
        end = row.n_shared
        ids_RT[at, :end] = windows[row.numbers[0]].ids[:end]
        positions_RT[at, :end] = np.arange(end)
        parts_RT[at, :end] = 0
        for part, number in enumerate(row.numbers, 1):
            ids = windows[number].ids[row.n_shared : -1]
            place = slice(end, end + len(ids))
            ids_RT[at, place], parts_RT[at, place] = ids, part
            positions_RT[at, place] = row.n_shared + np.arange(len(ids))
            inputs = np.arange(windows[number].first - 1, len(windows[number].ids) - 1)
            column_N.append(np.where(inputs < row.n_shared, inputs, inputs + end - row.n_shared))
            row_N.append(np.full(len(inputs), at))
            end = place.stop
    return Batch(ids_RT, positions_RT, parts_RT, np.concatenate(row_N), np.concatenate(column_N))


def can_branch(model: nn.Module) -> bool:
    """Return whether a model can read rows of several windows: a decoder on one rank, without lengths in its RoPE."""
    if not isinstance(model, Decoder) or model.hooks != Hooks():
        return False
    scaling = model.config.rope_scaling
    return scaling is None or scaling.rope_type not in ("dynamic", "longrope")


class Branches:
    """Positions and attention of rows with shared inputs, as the decoder gets them from a cache; stores nothing."""

    def __init__(self, config: ModelConfig, positions_RT: Tensor, parts_RT: Tensor) -> None:
        self._config = config
        self._positions_RT = positions_RT
        same_part_RTT = parts_RT[:, :, None] == parts_RT[:, None, :]
        self._unseen_RTT = ~(same_part_RTT | (parts_RT == 0)[:, None, :])
        self._kernels: dict[int | None, Attend] = {}

    def begin(self, like_BTD: Tensor) -> Place:
        """Build the kernels of all layers and return the positions."""
        scores = scores_of(self._config, like_BTD.device)
        distance_RTT = self._positions_RT[:, :, None] - self._positions_RT[:, None, :]
        for window in windows_of(self._config):
            bias = bias_of_distance(distance_RTT, window, scores, self._unseen_RTT, dtype=like_BTD.dtype)
            self._kernels[window] = Fused(scores.scale, bias[:, None]) if scores.plain else Dense(scores, bias)
        return Place(self._positions_RT, self._positions_RT.amax(dim=1, keepdim=True) + 1)

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Return the keys and values of the rows themselves, and the layer's kernel."""
        return [Read(slice(None), keys_BKTd, values_BKTd, self._kernels[self._config.window(layer)])]

    def advance(self, n_tokens: int) -> None:
        """Nothing is stored."""


def forward_of(model: nn.Module, rows: Sequence[Row], batch: Batch, device: torch.device, head: object) -> Tensor:
    """Run a model on packed rows; returns what ``head`` returns."""
    ids_RT = torch.from_numpy(batch.ids_RT).to(device)
    if all(row.is_plain for row in rows):
        value: Tensor = model(ids_RT, head=head).value
        return value
    assert isinstance(model, Decoder)
    positions_RT, parts_RT = (torch.from_numpy(array).to(device) for array in (batch.positions_RT, batch.parts_RT))
    value = model(ids_RT, cache=Branches(model.config, positions_RT, parts_RT), head=head).value
    return value
