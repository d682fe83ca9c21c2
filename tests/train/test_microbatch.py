"""The microbatch of a run: chosen by the planner, tried without side effects, agreed by all ranks; out of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.cost.microbatch import choose
from smalti.track.out_of_memory import describe, happened, limit_tokens
from smalti.track.run import RunFolder
from smalti.train import build
from smalti.train.batches import Microbatch, TokenBatches
from smalti.train.loop import Job
from smalti.train.microbatch import Trial, all_to_first
from smalti.train.oom import OneRowTooLarge, OutOfMemory, is_out_of_memory
from smalti.train.step import train_step

GB = 1e9


# ---- the planner's choice --------------------------------------------------------------------------------------------


def test_on_a_cpu_the_usual_rule_holds_where_memory_allows(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path)
    usual = choose(config, Layout(), "cpu", 8 * GB)
    assert (usual.tokens, usual.by) == (384, "rule")
    needed = memory_per_rank(config, microbatch_tokens=160, device="cpu").total_bytes
    small = choose(config, Layout(), "cpu", needed)
    assert (small.tokens, small.by) == (160, "planner")
    assert choose(config, Layout(), "cpu", 1.0).tokens == 32, "one row is tried, whatever the plan says"


def test_on_cuda_it_is_the_largest_that_fits(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, global_batch_tokens=2**20)
    most = choose(config, Layout(), "cuda", 80 * GB)
    assert (most.tokens, most.by) == (2**20, "planner")
    result = choose(config, Layout(), "cuda", 1.2 * GB)
    assert 16_384 < result.tokens < 2**20
    for tokens, fits in ((result.tokens, True), (result.tokens + 32, False)):
        total = memory_per_rank(config, layout=Layout(), microbatch_tokens=tokens, device="cuda").total_bytes
        assert (total <= 1.2 * GB) is fits


def test_what_ran_out_before_is_not_tried_again(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path)
    result = choose(config, Layout(), "cpu", 8 * GB, limit_tokens=192)
    assert (result.tokens, result.by) == (192, "oom")
    assert choose(config, Layout(), "cpu", 8 * GB, limit_tokens=4096).by == "rule"
    given = toy_run.config(tmp_path, microbatch_tokens=96)
    assert choose(given, Layout(), "cpu", 1.0).tokens == 96
    assert choose(given, Layout(), "cpu", 8 * GB, limit_tokens=32).tokens == 32


def test_a_pipeline_gets_a_microbatch_for_each_stage(tmp_path: Path) -> None:
    assert choose(toy_run.config(tmp_path), Layout(pipeline=2), "cpu", 8 * GB).tokens == 6 * 32


def test_a_trial_of_a_number_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="microbatch_trial=true has no effect"):
        toy_run.config(tmp_path, microbatch_trial=True, microbatch_tokens=32)


# ---- the trial -------------------------------------------------------------------------------------------------------


def _bits(job: Job) -> dict[str, Any]:
    model, optimizer = job.state.model, job.state.optimizer
    result = {f"model.{name}": value.clone() for name, value in job.tensors().items()}
    result |= {f"buffer.{name}": value.clone() for name, value in model.named_buffers()}
    result |= {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    result |= {"rng": torch.get_rng_state(), "groups": str(optimizer.state_dict()["param_groups"])}
    return result


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    assert before.keys() == after.keys()
    return all(
        torch.equal(_local(value), _local(after[name])) if isinstance(value, Tensor) else value == after[name]
        for name, value in before.items()
    )


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _trial(job: Job) -> Trial:
    assert isinstance(job.config, RunConfig)
    assert isinstance(job.batches, TokenBatches)
    assert job.out_of_memory is not None
    return Trial(job.config, job.mesh.layout, job.state, job.loss, job.batches, job.out_of_memory)


def _tried(rank: int, config: RunConfig) -> dict[str, Any]:
    """Two steps with a trial between them, and two more steps after a vote that ended with one row."""
    job = build(config)
    losses = [float(train_step(job.state, job.batches.batch(0), job.loss).loss)]
    job.state.optimizer.zero_grad(set_to_none=True)
    before = _bits(job)
    tokens = _trial(job).largest(192)
    same = _same(before, _bits(job))
    losses.append(float(train_step(job.state, job.batches.batch(1), job.loss).loss))

    trial, asked = _trial(job), []

    def had_room() -> bool:
        asked.append(job)
        return rank == 0 or len(asked) > 2

    trial.had_room = had_room
    voted = trial.largest(192)
    job.batches.use_microbatch(voted)  # type: ignore[attr-defined]
    cut = (voted, len(asked), len(job.batches.batch(0)))
    job.batches.use_microbatch(192)  # type: ignore[attr-defined]
    losses.append(float(train_step(job.state, job.batches.batch(2), job.loss).loss))
    return {"same": same, "tokens": tokens, "losses": losses, "cut": cut}


def _plain_and_tried(rank: int, plain: RunConfig, tried: RunConfig) -> tuple[list[float], dict[str, Any]]:
    """The losses of the same steps without a trial, and ``_tried``."""
    job = build(plain)
    losses = [float(train_step(job.state, job.batches.batch(step), job.loss).loss) for step in (0, 1, 2)]
    return losses, _tried(rank, tried)


@pytest.mark.slow
def test_a_trial_leaves_no_trace_and_all_ranks_take_what_the_fullest_can(tmp_path: Path) -> None:
    """Rank 1 has no room with 6 rows, nor with 3. All tokens of a trial go to the experts of rank 0."""
    config = toy_run.config(tmp_path, "moe", parallel={"ranks": 2, "expert": 2, "threads": 1})
    assert config.model.moe is not None
    moe = config.model.moe.model_copy(update={"bias_update_rate": 0.01, "global_balance_loss_coef": 0.01})
    model = config.model.model_copy(update={"moe": moe, "family": "decoder"})
    config = config.model_copy(update={"model": model})
    plain = config.model_copy(update={"folder": f"{config.folder}-plain"})
    for losses, result in run_ranks(2, _plain_and_tried, plain, config):
        assert result == {"same": True, "tokens": 192, "losses": losses, "cut": (32, 3, 6)}


def test_the_trial_takes_the_fullest_step_and_documents(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, microbatch_trial=True, parallel={"threads": 1})
    job = build(config)
    trial = _trial(job)
    assert trial._fullest(384) == (12, 32, 1)
    assert trial._fullest(100) == (3, 32, 4)
    one = trial.batches.fullest(3, 32, vocab_size=toy_run.VOCAB)
    assert one.inputs.shape == (3, 32)
    assert one.documents is not None
    assert one.documents[0].tolist()[:16] == [0] * 16, "a long one"
    assert one.documents[0].diff().tolist()[15:] == [1] * 16, "and many of one token"
    assert (one.targets >= 0).all()
    resolved = next(e for e in RunFolder.read(config.run_folder).events() if e["event"] == "auto_resolved")
    assert (resolved["microbatch_tokens"], resolved["microbatch_by"]) == (384, "rule")


def test_routing_of_the_trial_is_the_worst(tmp_path: Path) -> None:
    job = build(toy_run.config(tmp_path, "moe"))
    with all_to_first(job.state.model), torch.no_grad():
        _, _, sums = job.loss(job.state.model, job.batches.batch(0)[0])
    assert (sums["moe/load"][:, 2:] == 0).all()
    assert (sums["moe/load"][:, :2] == 384).all()
    assert not any("choose" in vars(module) for module in job.state.model.modules())


# ---- memory that runs out --------------------------------------------------------------------------------------------


def _allocate() -> None:
    torch.empty(1 << 61, dtype=torch.uint8)


class _Falls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _allocate()
        return grad


def _inject(job: Job, phase: str) -> None:
    loss, update = job.loss, job.state.optimizer.step

    def falls(model: nn.Module, microbatch: Microbatch) -> Any:
        if phase == "forward":
            _allocate()
        total, weight, sums = loss(model, microbatch)
        return (_Falls.apply(total) if phase == "backward" else total), weight, sums

    job.loss = falls
    if phase == "optimizer":
        job.state.optimizer.step = lambda: (_allocate(), update())  # type: ignore[assignment, method-assign]


def test_the_phase_is_recorded_in_the_event(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, microbatch_tokens=128)
    job = build(config)
    loss, microbatches = job.loss, job.batches.batch(0)
    for phase in ("forward", "backward", "optimizer"):
        job.loss = loss
        _inject(job, phase)
        with pytest.raises(RuntimeError) as raised:
            train_step(job.state, microbatches, job.loss)
        assert is_out_of_memory(raised.value)
        assert job.state.progress.phase.name.lower() == phase
    assert job.out_of_memory is not None
    error = job.out_of_memory.report(raised.value, job.batches, microbatches, step=0, phase="optimizer")
    assert isinstance(error, OutOfMemory)
    assert "ran out of memory in optimizer after step 0, with microbatches of 128 tokens" in error.message
    events = RunFolder.read(config.run_folder).events()
    event = happened(events, 0)
    assert event is not None
    assert (event["rank"], event["phase"], event["microbatch_tokens"]) == (0, "optimizer", 128)
    assert event["next_microbatch_tokens"] == 64, "half of it"
    assert limit_tokens(events, event["of"]) == 64
    assert limit_tokens(events, {**event["of"], "microbatch_tokens": 64}) is None
    assert describe(event) == error.message
    job.folder.close()
    assert build(config).batches.microbatch_tokens == 64  # type: ignore[attr-defined]


def test_one_row_ends_with_what_would_help(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, microbatch_tokens=32)
    job = build(config)
    assert job.out_of_memory is not None
    batches, report, short = job.batches, job.out_of_memory.report, torch.OutOfMemoryError("CUDA out of memory.")
    other = RuntimeError("mat1 and mat2 shapes")
    assert report(other, batches, batches.batch(0), step=0, phase="forward") is None
    error = report(short, batches, batches.batch(0), step=7, phase="forward")
    assert isinstance(error, OneRowTooLarge)
    assert "one row does not fit" in error.message
    assert "activation_checkpointing=full" in str(error.hint)
    event = happened(RunFolder.read(config.run_folder).events(), 0)
    assert event is not None
    assert event["next_microbatch_tokens"] is None
    assert limit_tokens([event], event["of"]) == 32


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("expected Float"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it
