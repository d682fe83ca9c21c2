"""An MoE beside its dense twin of equal active size on the CPU, 1 thread: training step, prefill and decode.

    make bench NAME=moe_twin ARGS='--record'       # about 8 minutes
    python bench/moe_twin.py --shape demo-moe --where  # also where the time of a step goes

The twin has an MLP as wide as the experts of a token together. Both train on the same random tokens by ``train_step``,
in bf16 as a recipe does by default, at a small learning rate, so that the load of the experts stays near even and
changes from step to step. Both answer the same prompts by the engine with its defaults, in fp32: the twin decodes in
steps of 16 rows, the MoE without padding. They take turns in one process. Beside the ratio of times is that of
processor times, which other processes disturb less.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from engine import Numbers
from paired import Ratio, ratio_of
from record import RecordOption, record
from torch.profiler import ProfilerActivity, profile

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES
from smalti.model.init import init_weights
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams
from smalti.track.progress import NoProgress, Phase
from smalti.train.batches import Microbatch
from smalti.train.job import build
from smalti.train.loop import Job
from smalti.train.step import train_step

SEQUENCES, TOKENS, VOCABULARY, LAYERS = 8, 256, 4096, 3
WARM_STEPS = 15
SHAPES = {"demo-moe": (128, 192, 8, 2), "128": (128, 96, 16, 4), "256": (256, 176, 16, 4), "512": (512, 352, 16, 4)}
"""Hidden size, width of an expert, experts, experts of a token. ``demo-moe`` is that of the recipe."""
SERVED = {
    "prefill 240": (1, 240, 1),
    "prefill 8 x 240": (8, 240, 1),
    "decode": (1, 8, 48),
    "decode 8 rows": (8, 8, 48),
    "decode 16 rows": (16, 8, 48),
}
"""Prompts, tokens of each, new tokens."""
SLOWEST = 15

Turn = Callable[[], object]
Times = tuple[float, float]


def main() -> None:
    """Print the ratios of each shape; ``--record`` also writes bench/results/moe_twin.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="of training")
    parser.add_argument("--pairs", type=int, default=21, help="turns of each pair")
    parser.add_argument("--where", action="store_true", help="also profile a step of both")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/moe_twin.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    figures: dict[str, Any] = {}
    for shape in options.shape or SHAPES:
        configs = {name: config_of(shape, options.precision, name) for name in ("moe", "dense")}
        with ExitStack() as stack:
            jobs = {name: stack.enter_context(job_of(config)) for name, config in configs.items()}
            steps = {name: stepper(job) for name, job in jobs.items()}
            for _ in range(WARM_STEPS):
                steps["moe"](), steps["dense"]()
            figures |= show(f"{shape} {options.precision} step", steps, options.pairs)
            report_phases(jobs, steps, options.pairs)
            if options.where:
                report_operators(steps)
        engines = {name: engine_of(config) for name, config in configs.items()}
        for work, (rows, prompt_tokens, new_tokens) in SERVED.items():
            params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
            random = torch.Generator().manual_seed(17)
            prompts = torch.randint(VOCABULARY - 1, (rows, prompt_tokens), generator=random).tolist()
            turns: dict[str, Turn] = {
                name: lambda engine=engine, prompts=prompts, params=params: generate(engine, prompts, params)  # type: ignore[misc]
                for name, engine in engines.items()
            }
            figures |= show(f"{shape} {work}", turns, options.pairs)
    if options.record:
        print("wrote", record("moe_twin", figures))


def config_of(shape: str, precision: str, name: str) -> RunConfig:
    """Return the run of the MoE or of its dense twin."""
    width, inner, experts, top_k = SHAPES[shape]
    moe = {"num_experts": experts, "num_experts_per_tok": top_k} if name == "moe" else None
    values = {
        "name": name,
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner if moe else inner * top_k,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": TOKENS * 2,
            "family": "decoder", "norm": "layernorm", "moe": moe,
        },
        "data": {"sources": {"random": "random"}, "seq_len": TOKENS, "stages": [{"weights": {"random": 1}}]},
        "train": {
            "duration": "1000000step", "global_batch_tokens": SEQUENCES * TOKENS, "optimizer": {"lr": 1e-4},
            "schedule": {"warmup": "0step", "decay": "0step"}, "precision": {"compute": precision},
            "parallel": {"device": "cpu", "threads": 1},
        },
    }  # fmt: skip
    return from_dict(RunConfig, values).config


# ---- training -------------------------------------------------------------------------------------------------------


class Random:
    """Batches of random tokens, small ids more often, as one microbatch a step."""

    def batch(self, step: int) -> list[Microbatch]:
        """Inputs, and the tokens that follow them."""
        random = torch.Generator().manual_seed(step)
        rows = (torch.rand(SEQUENCES, TOKENS + 1, generator=random) ** 3 * VOCABULARY).long()
        positions = torch.arange(TOKENS).expand(SEQUENCES, TOKENS).contiguous()
        return [Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, None)]

    def state(self, step: int) -> dict[str, Any]:
        """Nothing to resume."""
        return {}

    def check(self, state: dict[str, Any], step: int) -> None:
        """Nothing to compare."""


@contextmanager
def job_of(config: RunConfig) -> Iterator[Job]:
    """Context manager: a job on random tokens in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="moe-twin-") as folder:
        yield build(config.model_copy(update={"folder": f"{folder}/run"}), batches=Random())


def stepper(job: Job) -> Turn:
    """Return a function that runs the next step."""
    steps = count()
    return lambda: float(train_step(job.state, job.batches.batch(next(steps)), job.loss).loss)


def report_phases(jobs: dict[str, Job], steps: dict[str, Turn], pairs: int) -> None:
    """Print the processor time of the phases of a step."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in jobs}
    for _ in range(pairs):
        for name, job in jobs.items():
            state = job.state
            timed = state.progress = _Timed()
            steps[name]()
            timed.enter(Phase.OTHER)
            state.progress = NoProgress()
            for phase, spent in timed.times.items():
                seconds[name].setdefault(phase, []).append(spent)
    for phase, values in seconds["moe"].items():
        moe_s, dense_s = statistics.median(values), statistics.median(seconds["dense"][phase])
        print(f"  {phase:10} {moe_s * 1e3:8.1f} ms of processor time, dense {dense_s * 1e3:8.1f}", flush=True)


class _Timed(NoProgress):
    """Adds up the processor time of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, float] = {}
        self._began_s: float | None = None

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Add the time since the last call to the phase that ends."""
        now = time.process_time()
        if self._began_s is not None:
            name = self.phase.name.lower()
            self.times[name] = self.times.get(name, 0.0) + now - self._began_s
        self._began_s = now
        super().enter(phase)


def report_operators(steps: dict[str, Turn]) -> None:
    """Print the operators whose own time differs most between the two, in a median step."""
    by_name: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for _ in range(9):
        for name, step in steps.items():
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step()
            for event in profiler.key_averages():
                by_name[name].setdefault(event.key, []).append(event.self_cpu_time_total / 1e3)
    own_ms = {name: {key: statistics.median(v) for key, v in keys.items()} for name, keys in by_name.items()}
    more_ms = {key: value - own_ms["dense"].get(key, 0.0) for key, value in own_ms["moe"].items()}
    for key in sorted(more_ms, key=lambda key: -more_ms[key])[:SLOWEST]:
        print(
            f"  {more_ms[key]:+8.2f} ms: {own_ms['moe'][key]:8.2f}, dense {own_ms['dense'].get(key, 0.0):8.2f}  {key}"
        )


# ---- serving and times ----------------------------------------------------------------------------------------------


def engine_of(config: RunConfig) -> Engine:
    """Return an engine with random weights in fp32."""
    model = Decoder(config.model)
    init_weights(model, config.model, 1)
    tokenizer: Any = Numbers(VOCABULARY)
    return Engine(model, tokenizer)


def show(name: str, turns: dict[str, Turn], pairs: int) -> dict[str, Any]:
    """Run both by turns; print and return the ratio MoE / dense of times and of processor times."""
    times: dict[str, list[Times]] = {key: [] for key in turns}
    for turn in range(-1, pairs):
        for key in ("moe", "dense") if turn % 2 else ("dense", "moe"):
            begin = time.perf_counter(), time.process_time()
            turns[key]()
            spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
            if turn >= 0:  # the first one warms up
                times[key].append(spent)
    ratios: dict[str, Ratio] = {}
    for index, clock in enumerate(("time", "processor time")):
        moe_s, dense_s = ([spent[index] for spent in times[key]] for key in ("moe", "dense"))
        ratios[clock] = ratio_of(moe_s, dense_s, names=("moe", "dense"))
        print(f"{name}, {clock}: {ratios[clock]}; of the smallest {min(moe_s) / min(dense_s):.2f}", flush=True)
    return {f"{name}, {clock}": ratio.figures() for clock, ratio in ratios.items()}


if __name__ == "__main__":
    main()
