"""The keys and values of the requests that generate: one row each, on shelves of equal capacity.

Promises: rows at different positions share one attention call for each shelf, masked by length; a row's result does not
depend on the rows beside it; memory grows with the rows that are there and is given back when they leave: a row has
room for at most twice its tokens, and a shelf for at most half as many rows again, plus one. Decodes one token for each
row at a time; prompts are read into a ``KVCache`` of their own, which ``join`` takes over. A cache in blocks would
replace this file.

Why shelves: one tensor for all rows would be as long as the longest; a call for each row is 2 to 4 times slower where
rows are short (see docs/decisions/0008).

Shapes: B rows of the decode batch, n rows of a shelf, S capacity, K key/value heads, d width of a head, D hidden.
"""

import torch
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.model.blocks.kv_cache import KVCache, Place, Read, cached_kernels
from smalti.serve.engine.scheduler import capacity_tokens


class Shelf:
    """Rows of one capacity, without holes: a row that leaves is replaced by the last one."""

    def __init__(self, config: ModelConfig, capacity_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity_tokens = capacity_tokens
        self.requests: list[int] = []
        self.lengths: list[int] = []
        self._config = config
        # Zeros, because what is masked is still multiplied, by 0, and must be finite.
        shape = (0, config.kv_heads, capacity_tokens, config.width_per_head)
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]

    def add(self, request: int, source: list[tuple[Tensor, Tensor]], length: int) -> None:
        """Copy ``length`` tokens of a row, per layer two tensors [K, S, d], into a new row."""
        row = len(self.requests)
        if row == self.layers[0][0].shape[0]:
            self._resize(row + 1 + row // 4)
        for (keys, values), (old_keys, old_values) in zip(self.layers, source, strict=True):
            keys[row, :, :length] = old_keys[:, :length]
            values[row, :, :length] = old_values[:, :length]
        self.requests.append(request)
        self.lengths.append(length)

    def row(self, request: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """A row's keys and values, per layer [K, S, d], and how many tokens it holds."""
        at = self.requests.index(request)
        return [(keys[at], values[at]) for keys, values in self.layers], self.lengths[at]

    def remove(self, request: int) -> None:
        """Drop a row."""
        at, last = self.requests.index(request), len(self.requests) - 1
        for keys, values in self.layers:
            # Whole rows, zeros included: what is left of this request may hold numbers that are not finite.
            if at < last:
                keys[at], values[at] = keys[last], values[last]
            keys[last].zero_()
            values[last].zero_()
        self.requests[at], self.lengths[at] = self.requests[last], self.lengths[last]
        self.requests.pop()
        self.lengths.pop()
        if self.layers[0][0].shape[0] > last + 1 + last // 2:
            self._resize(last + last // 4)

    def begin(self, row: int) -> None:
        """Get ready for one more token in each row; the shelf's rows are ``row`` and those after it in the batch."""
        keys = self.layers[0][0]
        device, n_rows = keys.device, len(self.requests)
        self._rows = slice(row, row + n_rows)
        self._index_n = torch.arange(n_rows, device=device)
        self._length_n = torch.tensor(self.lengths, device=device)
        # All of the capacity, which follows from a row's own length: a matmul over as many keys as the longest row has
        # would sum in an order that depends on that row.
        self._kernels = cached_kernels(self._config, self._length_n[:, None], self.capacity_tokens, keys.dtype)

    def update(self, layer: int, keys_BKd: Tensor, values_BKd: Tensor) -> Read:
        """Store the new token of each row in a layer."""
        keys, values = self.layers[layer]
        keys[self._index_n, :, self._length_n] = keys_BKd[self._rows].to(keys.dtype)
        values[self._index_n, :, self._length_n] = values_BKd[self._rows].to(values.dtype)
        n_rows, attend = len(self.requests), self._kernels[self._config.window(layer)]
        return Read(self._rows, keys[:n_rows], values[:n_rows], attend)

    def _resize(self, rows: int) -> None:
        kept = len(self.requests)
        for layer, pair in enumerate(self.layers):
            keys, values = (old.new_zeros(rows, *old.shape[1:]) for old in pair)
            keys[:kept], values[:kept] = pair[0][:kept], pair[1][:kept]
            self.layers[layer] = (keys, values)


def _itself(query_BHTd: Tensor, _: Tensor, value_BKTd: Tensor) -> Tensor:
    """What attention to one key gives, [B, T, H, d]: its value."""
    return value_BKTd.repeat_interleave(query_BHTd.shape[1] // value_BKTd.shape[1], dim=1).transpose(1, 2)


class Slots:
    """All shelves: the cache of a decode step, in which row i of the batch is request ``requests()[i]``.

    A batch may have more rows than there are requests: those attend to themselves alone and leave nothing behind.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._shelves: dict[int, Shelf] = {}
        self._shelf_of: dict[int, Shelf] = {}
        self._rope_length_of: dict[int, int] = {}

    def requests(self) -> list[int]:
        """The requests in the order of the batch."""
        return [request for _, shelf in sorted(self._shelves.items()) for request in shelf.requests]

    def join(self, request: int, cache: KVCache) -> None:
        """Take over a request whose prompt stands in ``cache`` (of one row)."""
        self._rope_length_of[request] = cache.rope_length_tokens
        self._add(request, [(keys[0], values[0]) for keys, values in cache.layers], cache.length)

    def leave(self, request: int) -> None:
        """Free a request's row; nothing for one that has none."""
        self._rope_length_of.pop(request, None)
        shelf = self._shelf_of.pop(request, None)
        if shelf is not None:
            shelf.remove(request)
            if not shelf.requests:
                del self._shelves[shelf.capacity_tokens]

    def make_room(self) -> None:
        """Move each row that is full to a longer shelf: before ``requests`` and the forward of a step."""
        for request, shelf in list(self._shelf_of.items()):
            layers, length = shelf.row(request)
            if length == shelf.capacity_tokens:
                self._add(request, layers, length)
                shelf.remove(request)
                if not shelf.requests:
                    del self._shelves[shelf.capacity_tokens]

    def begin(self, like_BTD: Tensor) -> Place:
        """Where the new tokens stand, [B, 1]; at 0 for rows beyond the requests."""
        n_rows, time = like_BTD.shape[:2]
        assert time == 1, "a decode step feeds one token to each row"
        self._parts = [shelf for _, shelf in sorted(self._shelves.items())]
        positions: list[int] = []
        for shelf in self._parts:
            shelf.begin(len(positions))
            positions += shelf.lengths
        self._beyond = slice(len(positions), n_rows)
        beyond = [0] * (n_rows - len(positions))
        lengths = [self._rope_length_of[request] for request in self.requests()]
        both = torch.tensor([positions + beyond, lengths + beyond], device=like_BTD.device)
        return Place(both[0, :, None], both[1, :, None])

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Store the new tokens of a layer; what each shelf's rows attend to."""
        reads = [shelf.update(layer, keys_BKTd[:, :, 0], values_BKTd[:, :, 0]) for shelf in self._parts]
        if self._beyond.start < self._beyond.stop:
            reads.append(Read(self._beyond, keys_BKTd[self._beyond], values_BKTd[self._beyond], _itself))
        return reads

    def advance(self, n_tokens: int) -> None:
        """Count the new tokens as seen."""
        for shelf in self._parts:
            shelf.lengths = [length + n_tokens for length in shelf.lengths]

    def _add(self, request: int, layers: list[tuple[Tensor, Tensor]], length: int) -> None:
        capacity = capacity_tokens(length + 1, self._config.max_position_embeddings)
        if capacity not in self._shelves:
            self._shelves[capacity] = Shelf(self._config, capacity, self._dtype, self._device)
        self._shelf_of[request] = self._shelves[capacity]
        self._shelves[capacity].add(request, layers, length)
