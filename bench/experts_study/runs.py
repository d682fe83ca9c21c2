"""Executes the runs: as many processes as jobs, one run each; what is finished is kept and not repeated.

The result of a run is a file named by a digest of its settings, its data and the code of model and optimizer, so it
outlives commits that change none of them. A run that was stopped resumes from its checkpoint. Finished runs may be kept
in ``bench/results/experts_runs.json`` too, from which another machine continues the study.
"""

import ast
import hashlib
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experts_study.order import all_runs, next_runs
from experts_study.settings import KINDS, SHARES, Place, Run, Size, config_of, evaluations_of
from smalti.base.errors import SmaltiError
from smalti.config.identity import identity
from smalti.config.run import RunConfig
from smalti.cost.flops import train_flops_per_token

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "smalti/base/rng.py",
    "smalti/cost/memory/experts.py",
    "smalti/data/order/*.py",
    "smalti/data/pack/*.py",
    "smalti/data/stream/batch.py",
    "smalti/data/stream/stream.py",
    "smalti/distributed/parallel/dtensors.py",
    "smalti/distributed/parallel/fsdp.py",
    "smalti/distributed/parallel/parallelize.py",
    "smalti/evals/in_loop.py",
    "smalti/evals/likelihood.py",
    "smalti/model/decoder.py",
    "smalti/model/dtypes.py",
    "smalti/model/init.py",
    "smalti/model/blocks/*.py",
    "smalti/model/blocks/attention/*.py",
    "smalti/model/blocks/moe/*.py",
    "smalti/train/batches.py",
    "smalti/train/cross_entropy.py",
    "smalti/train/expert_balance.py",
    "smalti/train/gradient_sums.py",
    "smalti/train/loss.py",
    "smalti/train/microbatch.py",
    "smalti/train/optim.py",
    "smalti/train/schedule.py",
    "smalti/train/step.py",
)
"""Code that a result depends on; a change of it, other than of comments and docstrings, repeats the runs."""
ATTEMPTS = 2
"""Attempts of a run that fails before it is left out."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """What is to be run, and where."""

    size: Size
    seeds: int
    grid_seeds: int
    place: Place
    data: dict[str, Any]
    """The digests of the token files."""
    code: str
    """``code_digest`` at the start."""
    commit: str
    machine: str
    recorded: dict[str, Result] = field(default_factory=dict)
    """Results of earlier, unfinished studies by the names of their folders."""
    only_recorded: bool = False
    """Whether results are those of ``recorded`` alone, by the names of runs, whatever their data and code."""

    def config(self, run: Run) -> RunConfig:
        """Return the config of a run; the name of its folder ends with its key."""
        config = config_of(self.place, self.size, run)
        return config.model_copy(update={"folder": f"{config.folder}-{self._key(run, config)}"})

    def result(self, run: Run) -> Result | None:
        """Return the result of a run; None if it is not finished."""
        if self.only_recorded:
            return self.recorded.get(run.name)
        path = result_path(self.config(run))
        return json.loads(path.read_text()) if path.exists() else self.recorded.get(path.stem)

    def results(self) -> dict[Run, Result]:
        """Return the results of all finished runs that the study calls for."""
        results: dict[Run, Result] = {}
        while True:
            runs = next_runs(scores(results), self.size, self.seeds, self.grid_seeds)
            finished = {run: result for run in runs if (result := self.result(run)) is not None}
            if not finished:
                return results
            results |= finished

    def _key(self, run: Run, config: RunConfig) -> str:
        settings = identity(config)
        del settings["name"]
        settings.pop("folder", None)
        settings["data"] = {k: v for k, v in settings["data"].items() if k not in ("tokenizer", "sources", "heldout")}
        measured = {"evaluations": evaluations_of(self.size, run.steps), "eval_tokens": self.size.eval_tokens}
        text = json.dumps([settings, measured, self.data, self.code], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the files of ``CODE`` without comments, docstrings and layout."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in root.glob(pattern)):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
        digest.update(f"{path.relative_to(root)} {ast.dump(tree)}\n".encode())
    return digest.hexdigest()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def scores(results: dict[Run, Result]) -> dict[Run, float]:
    """Return the last held-out bits per byte of each run; infinite if it diverged."""
    losses = {run: result["bits_per_byte"] for run, result in results.items()}
    return {run: math.inf if None in values else values[-1] for run, values in losses.items()}


def result_path(config: RunConfig) -> Path:
    """Return the path of a run's result, beside its folder."""
    folder = Path(config.run_folder)
    return folder.with_name(folder.name + ".json")


def train(config: RunConfig, commit: str, machine: str, keep_checkpoint: bool = False) -> Result:
    """Run or resume a training in this process; write its result, also if it diverged."""
    from smalti.evals.in_loop import heldout_hook
    from smalti.train import job
    from smalti.train.recorder import NotFinite

    logging.getLogger("smalti").setLevel(logging.WARNING)
    path = result_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    commits = path.with_suffix(".commits")
    with commits.open("a") as file:
        file.write(commit + "\n")
    try:
        job.run(config, {}, evaluation=heldout_hook)
        result = read(config)
    except NotFinite as error:
        result = {"eval_steps": [error.step], "bits_per_byte": [None], "diverged": str(error)}
    except SmaltiError as error:  # which cannot be sent between processes
        raise RuntimeError(str(error)) from None
    result |= {"machine": machine, "commits": list(dict.fromkeys(commits.read_text().split()))}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.replace(path)
    if not keep_checkpoint:
        shutil.rmtree(Path(config.run_folder) / "checkpoints", ignore_errors=True)  # none if the first step diverged
    return result


def read(config: RunConfig) -> Result:
    """Return held-out bits per byte by step (None: not finite), and time, from the metrics of a run."""
    rows = metrics(config)
    keys = {name: f"metrics/eval/{name}/bits_per_byte" for name in SHARES}
    measured = [row for row in rows if keys["code"] in row]
    return {
        "eval_steps": [row["step"] for row in measured],
        "bits_per_byte": [_weighted({name: row[keys[name]] for name in SHARES}) for row in measured],
        "by_source": {name: measured[-1][keys[name]] for name in SHARES},
        "flops_per_step": train_flops_per_token(config.model, config.data.seq_len) * config.train.global_batch_tokens,
        **rate(rows),
    }


def _weighted(losses: dict[str, float | None]) -> float | None:
    values = [SHARES[name] * loss for name, loss in losses.items() if loss is not None]
    return sum(values) if len(values) == len(losses) else None


def metrics(config: RunConfig) -> list[dict[str, Any]]:
    """Return the metrics of each step; a step that was repeated after a stop counts once."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        by_step[row["step"]] = by_step.get(row["step"], {}) | row
    return [by_step[step] for step in sorted(by_step)]


def rate(rows: list[dict[str, Any]], first: float = 0.0) -> dict[str, float]:
    """Return the training time, without evaluations and saves, and tokens per second after the share ``first``."""
    timed = [(row["time/token"], row["time/train"] * 3600) for row in rows if "time/train" in row]
    begin = timed[int(first * len(timed))] if first else (0, 0.0)
    return {"train_s": timed[-1][1], "tokens_per_s": (timed[-1][0] - begin[0]) / (timed[-1][1] - begin[1])}


def measure(config: RunConfig) -> float:
    """Return tokens per second in the second half of a short run without evaluations."""
    from smalti.train import job

    logging.getLogger("smalti").setLevel(logging.WARNING)
    shutil.rmtree(config.run_folder, ignore_errors=True)
    job.run(config, {}, evaluation=lambda *_: None)
    return rate(metrics(config), first=0.5)["tokens_per_s"]


def speeds(study: Study) -> dict[str, dict[str, float]]:
    """Measure each MoE beside a dense run at the same time; return kind -> both tokens per second and their ratio.

    The ratio is of the time that a FLOP takes. It always takes two processes. A measurement of the same code, size and
    machine is not repeated.
    """
    if rows := stored_speeds(study):
        return rows
    size, steps = study.size, study.size.measured_steps
    place = replace(study.place, folder=study.place.folder / "speed")
    runs = {kind: Run(kind, steps, size.rates[0], seed=0) for kind in KINDS}
    configs = {kind: config_of(place, size, run) for kind, run in runs.items()}
    flops = {kind: train_flops_per_token(config.model, size.seq_len) for kind, config in configs.items()}
    with pool(2) as executor:
        for kind, config in configs.items():
            if kind != "dense":
                twin = configs["dense"].model_copy(update={"folder": f"{config.folder}-dense"})
                dense, moe = executor.map(measure, [twin, config])
                ratio = dense * flops["dense"] / (moe * flops[kind])
                rows[kind] = {"dense_tokens_per_s": dense, "tokens_per_s": moe, "time_per_flop": ratio}
    shutil.rmtree(place.folder)
    _speed_path(study).write_text(json.dumps(rows))
    return rows


def stored_speeds(study: Study) -> dict[str, dict[str, float]]:
    """Return the speeds that were measured before; empty if there are none."""
    path = _speed_path(study)
    return json.loads(path.read_text()) if path.exists() else {}


def _speed_path(study: Study) -> Path:
    key = hashlib.sha256(f"{study.code} {study.machine} {study.size!r}".encode()).hexdigest()[:12]
    return study.place.folder / f"speed-{key}.json"


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool whose processes end, after a checkpoint, when this process is killed."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # a run in progress saves a checkpoint
        time.sleep(30)
        os._exit(75)

    threading.Thread(target=watch, daemon=True).start()


class Forecast:
    """The time that runs take, by the measured speeds, corrected by the runs that have ended since the start."""

    def __init__(self, study: Study, rows: dict[str, dict[str, float]]) -> None:
        self._study = study
        self._tokens_per_s = {kind: row["tokens_per_s"] for kind, row in rows.items()}
        self._tokens_per_s["dense"] = statistics.mean(row["dense_tokens_per_s"] for row in rows.values())
        self._actual_s = self._predicted_s = 0.0

    def seconds(self, runs: list[Run]) -> float:
        """Return the seconds of the runs one after another."""
        correction = self._actual_s / self._predicted_s if self._predicted_s else 1.0
        return correction * sum(map(self._seconds, runs))

    def correct(self, run: Run, actual_s: float) -> None:
        """Use the time that a run took."""
        self._actual_s += actual_s
        self._predicted_s += self._seconds(run)

    def _seconds(self, run: Run) -> float:
        size = self._study.size
        forwards = evaluations_of(size, run.steps) * len(SHARES) * size.eval_tokens
        # A forward pass is a third of a training step; 5 s for building, saving and reading.
        return (run.steps * size.batch_tokens + forwards / 3) / self._tokens_per_s[run.kind] + 5


def run_all(
    study: Study,
    executor: ProcessPoolExecutor,
    jobs: int,
    forecast: Forecast,
    report: Callable[[str], None],
    keep: Callable[[dict[Run, Result]], None] = lambda _: None,
) -> dict[Run, Result]:
    """Execute all runs, ``jobs`` at a time; return the results of those that succeeded.

    A run that fails is tried again after the others, and then left out with a message. ``keep`` is called with all
    results after each run.
    """
    results = study.results()
    failures: Counter[Run] = Counter()
    running: dict[Future[Result], tuple[Run, float]] = {}
    while True:
        called = next_runs(scores(results), study.size, study.seeds, study.grid_seeds)
        busy = [run for run, _ in running.values()]
        pending = [run for run in called if run not in busy and failures[run] < ATTEMPTS]
        for run in sorted(pending, key=lambda run: failures[run])[: jobs - len(running)]:
            longest = run.steps == study.size.lengths[-1].steps
            future = executor.submit(train, study.config(run), study.commit, study.machine, longest)
            running[future] = (run, time.perf_counter())
        if not running:
            return results
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            run, begin_s = running.pop(future)
            try:
                results[run] = future.result()
            except RuntimeError as error:
                failures[run] += 1
                report(f"{run.name} failed: {error}")
                continue
            forecast.correct(run, time.perf_counter() - begin_s)
            report(_progress(study, run, results, forecast, jobs))
            keep(results)


def _progress(study: Study, run: Run, results: dict[Run, Result], forecast: Forecast, jobs: int) -> str:
    every = all_runs(scores(results), study.size, study.seeds, study.grid_seeds)
    left_h = forecast.seconds([other for other in every if other not in results]) / jobs / 3600
    score = scores(results)[run]
    return f"{len(results)} of {len(every)} runs, {left_h:.1f} h left: {run.name}: {score:.4f} bits per byte"


def by_name(study: Study, results: dict[Run, Result]) -> dict[str, Result]:
    """Return the results by the names of their folders, which hold the key of settings, data and code."""
    return {result_path(study.config(run)).stem: result for run, result in results.items()}


def as_rows(results: dict[Run, Result]) -> list[dict[str, Any]]:
    """Return a row for each run, for the recorded result."""
    return [asdict(run) | result for run, result in results.items()]
