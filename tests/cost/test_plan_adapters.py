"""The planned memory of runs that train adapters: exact sizes of weights, and a whole step within 5 %."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from counted_step import counted, counted_steps
from gloo_ranks import run_ranks

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.layout.possible import possible_layout
from smalti.cost.memory.adapters import total
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.model.adapters.apply import apply, is_adapter
from smalti.model.decoder import Decoder
from smalti.model.huggingface import save
from smalti.model.init import init_weights


def tuned(root: Path, moe: bool, adapter: dict[str, Any], compute: str = "fp32", **train: Any) -> RunConfig:
    """The config of a run whose widths are multiples of a block, so that no padding differs."""
    parallel = {"device": "cpu"} | train.pop("parallel", {})
    tree = toy_run.config(root, precision={"compute": compute}, parallel=parallel, **train).model_dump()
    tree["model"] |= {"family": "mixtral" if moe else "llama", "hidden_size": 128, "intermediate_size": 192}
    tree["model"] |= {"vocab_size": 4096, "max_position_embeddings": 256}
    tree["model"]["moe"] = {"num_experts": 8, "num_experts_per_tok": 2} if moe else None
    tree["data"] |= {"seq_len": 256}
    tree |= {"init_from": str(root / "base"), "adapter": {"rank": 16} | adapter}
    return from_dict(RunConfig, tree, "test").config


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4", "nf4_double", "int8"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_and_moments_are_those_of_the_model(
    moe: bool, quantize: str | None, compute: str, tmp_path: Path
) -> None:
    adapter = {"quantize": quantize, "targets": ["q_proj", "mlp"], "layers": [1, 1]}
    config = tuned(tmp_path, moe, adapter, compute, global_batch_tokens=2048)
    assert config.adapter is not None
    with torch.device("meta"):
        model = Decoder(config.model)
        apply(model, config.adapter, compute={"fp32": torch.float32, "bf16": torch.bfloat16}[compute])
    memory = memory_per_rank(config)
    trained = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
    assert total(config.model, config.adapter) == trained
    padding = 0.005 if quantize == "nf4_double" else 0  # of the last group of a matrix's scales
    assert memory.params_bytes == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=padding)
    assert (memory.grads_bytes, memory.moments_bytes) == (4 * trained, 8 * trained)
    full = memory_per_rank(config.model_copy(update={"adapter": None, "init_from": None}))
    assert memory.tensors_bytes < full.tensors_bytes


@pytest.mark.parametrize(
    ("adapter", "parallel", "says", "hint"),
    [
        ({"quantize": "nf4"}, {"tensor": 2}, r"tensor=2 .* rows of 96 numbers \(intermediate_size\)", "tensor=1"),
        ({"quantize": "nf4_double"}, {"tensor": 2}, "tensor=2 .* would be on several ranks", "tensor=1"),
        ({"layers": [0, 0]}, {"pipeline": 2}, "pipeline=2 .* layers 1 to 1 would be a stage without", "pipeline=1"),
        ({}, {"shard": 6, "expert": 2}, "expert=2 .* 3 ranks cannot share an adapter of an expert", "expert=1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(
    adapter: dict[str, Any], parallel: dict[str, Any], says: str, hint: str, tmp_path: Path
) -> None:
    ranks = math.prod(size for axis, size in parallel.items() if axis != "expert")
    batch = {"global_batch_tokens": 2048, "microbatch_tokens": 256}
    config = tuned(tmp_path, "expert" in parallel, adapter, **batch, parallel={"ranks": ranks, **parallel})
    with pytest.raises(UserError, match=says) as refused:
        possible_layout(config)
    assert str(refused.value.hint).startswith(f"train.parallel.{hint}")
    possible_layout(tuned(tmp_path, False, {}, **batch, parallel={"ranks": 2, "tensor": 2}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("moe", "quantize", "parallel"),
    [
        (False, None, {"ranks": 2, "tensor": 2}),
        (False, "nf4", {"activation_checkpointing": "full"}),
        (True, None, {"ranks": 2, "shard": 2, "expert": 2}),
    ],
)
def test_a_step_takes_what_is_planned(
    moe: bool, quantize: str | None, parallel: dict[str, Any], tmp_path: Path
) -> None:
    config = tuned(tmp_path, moe, {"quantize": quantize}, global_batch_tokens=2048, parallel=parallel)
    model = Decoder(config.model)
    init_weights(model, config.model, seed=1)
    save(model, tmp_path / "base")
    counted_bytes = run_ranks(config.train.parallel.ranks, _count, config)  # in other processes: nothing else is alive
    assert memory_per_rank(config).tensors_bytes == pytest.approx(max(counted_bytes), rel=0.05)


def _count(rank: int, config: RunConfig) -> int:
    _, second = counted_steps(config)
    return counted(second.live).peak_bytes
