"""The load of experts: how often it is recorded, and which loads are a collapse."""

import itertools
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from torch import Tensor

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.model.blocks.moe.choices import replaced_choices
from smalti.track.events import read_events
from smalti.track.report import write_report
from smalti.track.sinks.jsonl import read_metrics
from smalti.train import Hook, build, expert_load, fit
from smalti.train.expert_load import CollapseWatch, expert_loads, expert_metrics, loads_due
from smalti.train.loop import Job
from smalti.train.step import StepResult

LAYERS, EXPERTS = 2, 8
EVEN = [1.0] * EXPERTS
TWO = [4.0, 4.0] + [0.0] * 6
SOME = [3.2, 2.4] + [0.4] * 6
FIRST_TWO = torch.tensor([0, 1])
DEAD = [0.0] + [8 / 7] * 7


class Events:
    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        assert kind == "router_collapsed"
        self.written.append(fields)


def config(num_experts_per_tok: int = 2, **train: Any) -> RunConfig:
    tree = {
        "name": "load",
        "model": {
            "family": "decoder", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "moe": {"num_experts": EXPERTS, "num_experts_per_tok": num_experts_per_tok},
        },
        "data": {"sources": {"code": "x"}, "seq_len": 32, "stages": [{"weights": {"code": 1}}]},
        "train": {"duration": "1000step", "global_batch_tokens": 384, "optimizer": {"lr": 4e-3}, **train},
    }  # fmt: skip
    return from_dict(RunConfig, tree, "load").config


def load(step: int, shares: list[float]) -> Tensor:
    """The load of an even layer, and of one with these shares; both with deterministic noise of about 20 %."""
    noise = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(step)) * 0.4 + 0.8
    return torch.tensor([EVEN, shares], dtype=torch.float64) * noise * 1000


def collapses(phases: dict[int, list[float]], *, start: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Return the events of steps ``start`` to the last key, if the shares are those of the next key."""
    events = Events()
    watch = CollapseWatch(options.pop("config", config()), events, warns=False, **options)
    for step in range(start, max(phases) + 1):
        watch.add(step, load(step, phases[min(end for end in phases if end >= step)]))
    return events.written


def test_an_even_load_with_noise_is_no_collapse() -> None:
    assert collapses({1000: EVEN}) == []
    assert collapses({100: TWO, 1000: EVEN}) == [], "before step 100"
    assert collapses({150: EVEN, 155: TWO, 1000: EVEN}) == [], "five steps"


def test_a_collapse_is_reported_once_with_what_to_type() -> None:
    (event,) = collapses({1000: TWO})
    assert (event["step"], event["layers"]) == (120, [1])
    assert 3 < event["load_imbalance"][0] <= 4.5
    assert event["without_tokens"] == {"layer1": [2, 3, 4, 5, 6, 7]}
    for option in ("balance_loss_coef=0.1", "router_lr_frac=0.1", "optimizer.lr=0.002", "schedule.warmup", "--fork"):
        assert option in event["hint"]
    assert len(event["hint"]) <= 200, "the report cuts longer values"


@pytest.mark.parametrize(("chosen", "shares", "events"), [(5, [1.4], 0), (5, [1.59], 1), (8, [1.0], 0)])
def test_an_imbalance_below_one_and_a_half_is_no_collapse(chosen: int, shares: list[float], events: int) -> None:
    """However small the largest possible imbalance is: 1.6 for 5 of 8 experts, 1 where all are chosen."""
    watched = Events()
    watch = CollapseWatch(config(num_experts_per_tok=chosen), watched, warns=False)
    rest = [(EXPERTS - sum(shares)) / (EXPERTS - 1)] * (EXPERTS - 1)
    for step in range(1, 301):
        watch.add(step, torch.tensor([shares + rest] * LAYERS, dtype=torch.float64))
    assert len(watched.written) == events


def test_a_slow_collapse_is_reported_when_the_median_is_above_the_bound() -> None:
    watched = Events()
    watch = CollapseWatch(config(), watched, warns=False)
    for step in range(1, 801):
        share = min(step / 800, 1)
        mixed = [share * worst + 1 - share for worst in TWO]
        watch.add(step, torch.tensor([EVEN, mixed], dtype=torch.float64))
    (event,) = watched.written
    assert event["step"] == 280, "1 + 3 x step / 800 is 2 at step 266; the median of 261 to 280 is above it"
    assert "without_tokens" not in event


def test_it_is_reported_again_only_after_a_recovery() -> None:
    again = {200: SOME, 260: EVEN, 400: SOME}
    assert [event["step"] for event in collapses(again)] == [120, 280]
    flapping = {200: SOME, 215: EVEN, 235: SOME, 255: EVEN, 400: SOME}
    assert [event["step"] for event in collapses(flapping)] == [120], "no window without an uneven step"


def test_experts_without_tokens_are_a_collapse_if_they_are_the_same_in_all_steps() -> None:
    (event,) = collapses({200: DEAD})
    assert event["without_tokens"] == {"layer1": [0]}
    events = Events()
    watch = CollapseWatch(config(), events, warns=False)
    for step in range(1, 301):
        shares = torch.full((LAYERS, EXPERTS), 8 / 7, dtype=torch.float64)
        shares[:, step % EXPERTS] = 0
        watch.add(step, shares)
    assert events.written == [], "another expert in each step"


def test_it_looks_at_steps_after_the_warmup() -> None:
    (event,) = collapses({1000: TWO}, config=config(schedule={"warmup": "310step"}))
    assert event["step"] == 340, "the first whole window is 321 to 340"


def test_a_resumed_run_repeats_no_event() -> None:
    assert collapses({400: TWO}, start=251, collapsed=[1]) == []
    (event,) = collapses({400: TWO}, start=251)
    assert event["step"] == 280, "241 to 260 is not whole"
    assert [event["step"] for event in collapses({300: EVEN, 400: TWO}, start=251, collapsed=[1])] == [320]


def test_the_warning_is_on_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    for warns in (False, True):
        watch = CollapseWatch(config(), Events(), warns=warns)
        with caplog.at_level(logging.WARNING, logger="smalti"):
            for step in range(1, 201):
                watch.add(step, load(step, TWO))
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("step 120: the router of layer 1 has collapsed")
    assert "no token for experts [2, 3, 4, 5, 6, 7] of layer1; hint: in a new run model.moe" in text


@pytest.mark.parametrize("total", [1, 7, 200, 201, 1000, 12_345])
def test_the_load_is_recorded_at_most_201_times_in_a_run(total: int) -> None:
    steps = [step for step in range(1, total + 1) if loads_due(step, total)]
    assert len(steps) <= 201
    assert (steps[0], steps[-1]) == (1, total)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps, default=0) <= -(-total // 200)


def test_the_load_is_a_ratio_in_which_only_unused_experts_are_0() -> None:
    loads = expert_loads(torch.tensor([[0.0, 1.0, 99_999.0, 300_000.0]], dtype=torch.float64))
    assert loads == {"moe/load/layer0": [0.0, 1e-05, 1.0, 3.0]}
    assert len(json.dumps(expert_loads(torch.rand(40, 256)))) < 100_000


def test_metrics_of_a_layer() -> None:
    metrics = expert_metrics(torch.tensor([EVEN, TWO]), torch.tensor([0.9, 0.5]))
    assert metrics["moe/load_imbalance"] == metrics["moe/load_imbalance/layer1"] == 4
    assert metrics["moe/dead_experts_frac/layer0"] == 0
    assert metrics["moe/dead_experts_frac/layer1"] == 0.75
    assert metrics["moe/router_entropy"] == pytest.approx(0.7)


class Stopped(Hook):
    def on_step(self, job: Job, result: StepResult) -> None:
        if job.state.step == 45:
            raise RuntimeError("stopped")


@pytest.mark.slow
def test_a_run_whose_router_collapses_writes_the_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "_FIRST_STEP", 0)
    run = toy_run.config(tmp_path, "moe", duration="60step", checkpoint={"every": "20step"})
    for hooks in ([Stopped()], []):
        job = build(run, hooks=hooks)
        with (
            replaced_choices(job.state.model, lambda router: lambda scores: FIRST_TWO.expand(*scores.shape[:-1], 2)),
            pytest.raises(RuntimeError, match="stopped") if hooks else nullcontext(),
        ):
            fit(job)
    (event,) = [event for event in read_events(run.run_folder) if event["event"] == "router_collapsed"]
    assert (event["step"], event["layers"], event["load_imbalance"]) == (40, [0, 1], [2.0, 2.0])
    assert event["without_tokens"] == {"layer0": [2, 3], "layer1": [2, 3]}
    saved = json.loads((Path(run.run_folder) / "checkpoints/step-00000060/train_state.json").read_text())
    assert saved["collapsed_layers"] == [0, 1]
    loads = [row for row in read_metrics(run.run_folder) if "moe/load/layer0" in row]
    assert [row["step"] for row in loads] == list(range(1, 61))
    assert loads[0]["moe/load/layer0"] == [2.0, 2.0, 0.0, 0.0]
    assert "The routers of some layers have collapsed: step 40" in Path(write_report(run.run_folder)).read_text()
