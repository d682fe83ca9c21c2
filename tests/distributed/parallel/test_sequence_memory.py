"""A long row over four ranks: the loss and gradients of one process, and a quarter of what it keeps for backward."""

from collections.abc import Callable
from typing import Any

import pytest
import sequence_runs
import torch
import torch.distributed as dist
from conftest import PROVE
from gloo_ranks import run_ranks
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.cost.axes import Layout
from smalti.distributed.group.mesh import build
from smalti.distributed.parallel import sequence
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
from smalti.train.loss import LanguageLoss

RANKS, MAX_FRAC = 4, 0.27
ROWS = [pytest.param(8192, True, id="8k-packed")]
if PROVE:
    ROWS.append(pytest.param(65536, False, id="64k"))
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def _step(rank: int, contexts: list[Any], tokens: int, packed: bool) -> list[tuple[float, Tensor, int]]:
    """For each context: loss of the row, its gradient, and bytes of what this rank kept for backward."""
    return [_forward_and_backward(context, tokens, packed) for context in contexts]


def _forward_and_backward(context: Any, tokens: int, packed: bool) -> tuple[float, Tensor, int]:
    mesh = build(torch.device("cpu"), Layout(sequence=dist.get_world_size()))
    config = ModelConfig.model_validate(SHAPE | {"num_attention_heads": 4})
    model = Decoder(config)
    init_weights(model, config, 3)
    sequence.apply(model, mesh, context=context)
    whole = sequence_runs.rows_of(0, packed=packed, rows=1, tokens=tokens, document_tokens=400)
    row = sequence_runs.shared(whole, mesh, context)
    saved_bytes: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _, _ = LanguageLoss(config, LossConfig())(model, row)
    total.backward()
    packed_up = torch.cat([total.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
    dist.all_reduce(packed_up)
    return float(packed_up[0]), packed_up[1:], sum(saved_bytes.values())


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(("tokens", "packed"), ROWS)
def test_long_rows_take_a_quarter_of_the_memory_each(
    tokens: int, packed: bool, record: Callable[[str, dict[str, Any]], None]
) -> None:
    contexts = ["ulysses", "ring"]
    ((loss, gradient, kept_bytes),) = run_ranks(1, _step, contexts[:1], tokens, packed, timeout_s=1200)[0]
    by_rank = run_ranks(RANKS, _step, contexts, tokens, packed, timeout_s=2400)
    for number, context in enumerate(contexts):
        found_loss, found_gradient, _ = by_rank[0][number]
        frac = max(of_rank[number][2] for of_rank in by_rank) / kept_bytes
        off = float((found_gradient - gradient).abs().max() / gradient.abs().max())
        figures = {"tokens": tokens, "packed": packed, "context": context, "ranks": RANKS, "kept_bytes": kept_bytes}
        figures |= {"kept_frac": round(frac, 4), "loss_off": abs(found_loss / loss - 1), "gradient_off": off}
        print(figures)
        assert figures["loss_off"] <= 1e-5
        assert off <= 1e-5
        assert frac <= MAX_FRAC
        record("long_context_packed" if packed else "long_context", {f"{tokens} {context}": figures})
