"""Several adapters over one base at once, for generation: each row of a batch uses one of them, or none.

The base's products are computed for the whole batch, those of an adapter for its rows. No gradients.

Shapes: B rows, T tokens of a row, N = B * T, I inputs, O outputs, k experts per token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.model.adapters.adapter import Adapter
from smalti.model.adapters.lora import LoRAExperts
from smalti.model.blocks.moe.experts import Experts
from smalti.model.decoder import Decoder

NONE = -1
"""In place of the number of an adapter: the base alone."""
Pair = tuple[Tensor, Tensor, float]


class AdapterRows:
    """Which rows of the next batch use which adapter; shared by the modules of a model."""

    def __init__(self) -> None:
        self.n_rows = 0
        self.groups: list[tuple[int, Tensor]] = []
        """(number of the adapter, its rows), without those of the base; empty if all rows are the base's."""

    def set(self, adapters: Sequence[int], device: torch.device) -> None:
        """Set the number of the adapter of each row, ``NONE`` for the base."""
        self.n_rows = len(adapters)
        used = sorted(set(adapters) - {NONE})
        rows_of = {adapter: [row for row, other in enumerate(adapters) if other == adapter] for adapter in used}
        self.groups = [(adapter, torch.tensor(rows, device=device)) for adapter, rows in rows_of.items()]


class SeveralLinear(nn.Linear):
    """Replaces ``linear``, whose weight and bias it takes."""

    def __init__(self, linear: nn.Linear, pairs: Mapping[int, Pair], rows: AdapterRows) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._pairs, self._rows = pairs, rows

    def forward(self, x_BTI: Tensor) -> Tensor:
        """[B, T, I] -> [B, T, O]; B is the number of rows that were set."""
        out_BTO = F.linear(x_BTI, self.weight, self.bias)
        for adapter, rows in self._rows.groups:
            if adapter in self._pairs:
                a, b, scale = self._pairs[adapter]
                change = F.linear(F.linear(x_BTI.index_select(0, rows), a), b)
                out_BTO.index_add_(0, rows, change, alpha=scale)
        return out_BTO


class SeveralExperts(LoRAExperts):
    """Replaces ``experts``: the tokens of each adapter are computed by themselves."""

    def __init__(self, experts: Experts, pairs: Mapping[str, Mapping[int, Pair]], rows: AdapterRows) -> None:
        super().__init__(experts, [], 0, 1.0)
        self._pairs, self._rows = pairs, rows
        self._adapter = NONE

    def low_rank(self, part: str) -> tuple[Tensor, Tensor] | None:
        """Return A and B of the adapter whose tokens are computed, None if it has none of this part."""
        pair = self._pairs.get(part, {}).get(self._adapter)
        if pair is None:
            return None
        self.scale = pair[2]
        return pair[:2]

    def forward(self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, pending: Any = None) -> Tensor:
        """Return sum_k weight_k * expert_k(x): [N, D] -> [N, D]."""
        groups = self._rows.groups
        if not groups:
            return super().forward(x_ND, expert_Nk, weight_Nk)
        of_row = torch.full((self._rows.n_rows,), NONE, device=x_ND.device)
        for adapter, rows in groups:
            of_row[rows] = adapter
        of_token = of_row.repeat_interleave(len(x_ND) // self._rows.n_rows)
        out_ND = torch.empty_like(x_ND)
        for adapter in (NONE, *(adapter for adapter, _ in groups)):
            tokens = (of_token == adapter).nonzero()[:, 0]
            if len(tokens):
                self._adapter = adapter
                out_ND[tokens] = super().forward(x_ND[tokens], expert_Nk[tokens], weight_Nk[tokens])
        self._adapter = NONE
        return out_ND


def add(model: Decoder, adapters: Sequence[Adapter]) -> AdapterRows:
    """Add adapters to a model in place; returns the object that says which row of the next batch uses which."""
    rows = AdapterRows()
    weights = dict(model.named_parameters())
    pairs: dict[str, dict[int, Pair]] = {}
    for number, adapter in enumerate(adapters):
        for name, pair in adapter.pairs.items():
            a, b = (tensor.to(weights[name].device, weights[name].dtype) for tensor in pair)
            pairs.setdefault(name, {})[number] = (a, b, adapter.scale)
    experts: dict[str, dict[str, dict[int, Pair]]] = {}
    for name, of_weight in pairs.items():
        path, _, last = name.rpartition(".")
        if last == "weight":
            linear = model.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            model.set_submodule(path, SeveralLinear(linear, of_weight, rows))
        else:
            experts.setdefault(path, {})[last] = of_weight
    for path, of_parts in experts.items():
        module = model.get_submodule(path)
        assert isinstance(module, Experts)
        model.set_submodule(path, SeveralExperts(module, of_parts, rows))
    return rows
