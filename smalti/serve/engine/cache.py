"""The key/value cache of a decode batch: a row for each running request, rows grouped into buckets by capacity.

Rows at different positions share an attention call for each bucket, masked by length, and a row's result is independent
of the batch. docs/decisions/0008 has the reasons for buckets.

Shapes: B rows of the decode batch, n rows of a bucket, S capacity, K key/value heads, d width of a head, D hidden.
"""

import torch
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.scores import Attend
from smalti.model.blocks.kv_cache import KVCache, Place, Read, cached_kernels
from smalti.serve.engine.scheduler import capacity_tokens


class CacheBucket:
    """Keys and values of the rows of one capacity, without gaps: the last row replaces one that is removed.

    A row has room for at most twice its tokens, and a bucket for at most 1.5 times its rows plus one.
    """

    def __init__(self, config: ModelConfig, capacity_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity_tokens = capacity_tokens
        self.requests: list[int] = []
        self.lengths: list[int] = []
        self._config = config
        # Zeros, because masked values are still multiplied by 0 and so must be finite.
        shape = (0, config.kv_heads, capacity_tokens, config.width_per_head)
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        # ``begin`` sets these for a decode step.
        self._rows = slice(0, 0)
        self._index_n = torch.empty(0, dtype=torch.int64, device=device)
        self._length_n = torch.empty(0, dtype=torch.int64, device=device)
        self._kernels: dict[int | None, Attend] = {}

    def add(self, request_id: int, source: list[tuple[Tensor, Tensor]], length: int) -> None:
        """Copy ``length`` tokens of a row, per layer two tensors [K, S, d], into a new row."""
        row = len(self.requests)
        if row == self.layers[0][0].shape[0]:
            self._resize(row + 1 + row // 4)
        for (keys, values), (source_keys, source_values) in zip(self.layers, source, strict=True):
            keys[row, :, :length] = source_keys[:, :length]
            values[row, :, :length] = source_values[:, :length]
        self.requests.append(request_id)
        self.lengths.append(length)

    def row(self, request_id: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Return a row's keys and values, per layer [K, S, d], and how many tokens it holds."""
        row = self.requests.index(request_id)
        return [(keys[row], values[row]) for keys, values in self.layers], self.lengths[row]

    def remove(self, request_id: int) -> None:
        """Remove a row, and release memory once more than a third of the rows are empty."""
        row = self.requests.index(request_id)
        last = len(self.requests) - 1
        for keys, values in self.layers:
            # Whole rows, zeros included: the values of this request may not be finite.
            if row < last:
                keys[row] = keys[last]
                values[row] = values[last]
            keys[last].zero_()
            values[last].zero_()
        self.requests[row] = self.requests[last]
        self.lengths[row] = self.lengths[last]
        self.requests.pop()
        self.lengths.pop()
        if self.layers[0][0].shape[0] > last + 1 + last // 2:
            self._resize(last + last // 4)

    def begin(self, first_row: int) -> None:
        """Prepare one more token in each row; the bucket's rows start at ``first_row`` of the batch."""
        keys = self.layers[0][0]
        n_rows = len(self.requests)
        self._rows = slice(first_row, first_row + n_rows)
        self._index_n = torch.arange(n_rows, device=keys.device)
        self._length_n = torch.tensor(self.lengths, device=keys.device)
        # Attend over the whole capacity, which depends on a row's own length alone: a matmul over as many keys as the
        # longest row has would sum in an order that depends on that row.
        self._kernels = cached_kernels(self._config, self._length_n[:, None], self.capacity_tokens, keys.dtype)

    def update(self, layer: int, keys_BKd: Tensor, values_BKd: Tensor) -> Read:
        """Store the new token of each row in a layer."""
        keys, values = self.layers[layer]
        keys[self._index_n, :, self._length_n] = keys_BKd[self._rows].to(keys.dtype)
        values[self._index_n, :, self._length_n] = values_BKd[self._rows].to(values.dtype)
        n_rows = len(self.requests)
        return Read(self._rows, keys[:n_rows], values[:n_rows], self._kernels[self._config.window(layer)])

    def _resize(self, n_rows: int) -> None:
        used = len(self.requests)
        for layer, pair in enumerate(self.layers):
            keys, values = (old.new_zeros(n_rows, *old.shape[1:]) for old in pair)
            keys[:used] = pair[0][:used]
            values[:used] = pair[1][:used]
            self.layers[layer] = (keys, values)


class BatchedKVCache:
    """All buckets: the cache of a decode step, in which row i of the batch is request ``requests()[i]``.

    A batch may have more rows than there are requests: these padding rows attend to themselves and are not stored.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._buckets: dict[int, CacheBucket] = {}
        self._bucket_of: dict[int, CacheBucket] = {}
        self._rope_length_of: dict[int, int] = {}
        # ``begin`` sets these for a decode step.
        self._batch: list[CacheBucket] = []
        self._padding = slice(0, 0)

    def requests(self) -> list[int]:
        """Return the requests in the order of the batch."""
        return [request_id for bucket in self._sorted_buckets() for request_id in bucket.requests]

    def add(self, request_id: int, prompt: KVCache) -> None:
        """Add a request; copies the keys and values of its prompt, which was prefilled into a cache of one row."""
        self._rope_length_of[request_id] = prompt.rope_length_tokens
        self._add(request_id, [(keys[0], values[0]) for keys, values in prompt.layers], prompt.length)

    def remove(self, request_id: int) -> None:
        """Free a request's row; does nothing for a request without one."""
        self._rope_length_of.pop(request_id, None)
        bucket = self._bucket_of.pop(request_id, None)
        if bucket is not None:
            self._remove(request_id, bucket)

    def grow(self) -> None:
        """Move each full row to a bucket of larger capacity; call before ``requests`` and the forward of a step."""
        for request_id, bucket in list(self._bucket_of.items()):
            layers, length = bucket.row(request_id)
            if length == bucket.capacity_tokens:
                self._add(request_id, layers, length)
                self._remove(request_id, bucket)

    def begin(self, like_BTD: Tensor) -> Place:
        """Return the positions of the new tokens, [B, 1]; 0 for padding rows."""
        n_rows, time = like_BTD.shape[:2]
        assert time == 1, "a decode step feeds one token to each row"
        self._batch = self._sorted_buckets()
        positions: list[int] = []
        for bucket in self._batch:
            bucket.begin(len(positions))
            positions += bucket.lengths
        self._padding = slice(len(positions), n_rows)
        padding = [0] * (n_rows - len(positions))
        lengths = [self._rope_length_of[request_id] for request_id in self.requests()]
        place_2B = torch.tensor([positions + padding, lengths + padding], device=like_BTD.device)
        return Place(place_2B[0, :, None], place_2B[1, :, None])

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Store the new tokens of a layer; returns what the rows of each bucket attend to."""
        reads = [bucket.update(layer, keys_BKTd[:, :, 0], values_BKTd[:, :, 0]) for bucket in self._batch]
        if self._padding.start < self._padding.stop:
            reads.append(Read(self._padding, keys_BKTd[self._padding], values_BKTd[self._padding], _attend_to_self))
        return reads

    def advance(self, n_tokens: int) -> None:
        """Add the new tokens to the lengths."""
        for bucket in self._batch:
            bucket.lengths = [length + n_tokens for length in bucket.lengths]

    def _sorted_buckets(self) -> list[CacheBucket]:
        return [bucket for _, bucket in sorted(self._buckets.items())]

    def _add(self, request_id: int, layers: list[tuple[Tensor, Tensor]], length: int) -> None:
        capacity = capacity_tokens(length + 1, self._config.max_position_embeddings)
        if capacity not in self._buckets:
            self._buckets[capacity] = CacheBucket(self._config, capacity, self._dtype, self._device)
        self._bucket_of[request_id] = self._buckets[capacity]
        self._buckets[capacity].add(request_id, layers, length)

    def _remove(self, request_id: int, bucket: CacheBucket) -> None:
        bucket.remove(request_id)
        if not bucket.requests:
            del self._buckets[bucket.capacity_tokens]


def _attend_to_self(query_BHTd: Tensor, _: Tensor, value_BKTd: Tensor) -> Tensor:
    """Return the result of attention to a single key, [B, T, H, d]: its value."""
    return value_BKTd.repeat_interleave(query_BHTd.shape[1] // value_BKTd.shape[1], dim=1).transpose(1, 2)
