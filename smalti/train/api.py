"""``build`` and ``fit`` for scripts and notebooks.

Options that cannot take effect raise UserError: ranks that were not started, held-out sets without an evaluation.
Errors are recorded as by ``smalti train``, and a lost rank is named. A rank that fails while others wait for it ends
its process with the script.
"""

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from smalti.base import env, log
from smalti.base.errors import SmaltiError, UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.group import world as worlds
from smalti.track.run import RunFolder
from smalti.train import job as jobs
from smalti.train import loop
from smalti.train.batches import Batches
from smalti.train.hooks import Hook
from smalti.train.job import MakeEvaluate, MakeLoss, MakeTasks
from smalti.train.loop import Evaluate, Job
from smalti.train.step import Loss


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run."""

    folder: Path
    """The run folder."""
    step: int
    """Updates done."""
    metrics: Mapping[str, float]
    """The last value of each metric, by its name in ``metrics.jsonl``."""

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.metrics.items() if name == _LOSS or name.startswith(_EVAL)}
        return f"{self.folder}: step {self.step}" + "".join(f"\n  {name} {value:.4f}" for name, value in shown.items())


_LOSS, _EVAL = "loss/train/total", "metrics/eval/"


def build(
    config: JobConfig,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    make_loss: MakeLoss | None = None,
    batches: Batches | None = None,
    evaluate: Evaluate | None = None,
    evaluation: MakeEvaluate | None = None,
    tasks: MakeTasks | None = None,
    hooks: Sequence[Hook] = (),
    origins: Mapping[str, str] | None = None,
    fork: bool = False,
) -> Job:
    """Build all that ``fit`` needs, resumed from the newest checkpoint of the run folder if there is one.

    Arguments that are None are built from the config. model: any module that ``loss`` can call, with the weights of
    rank 0. loss: ``(model, microbatch) -> (sum, weight, metrics)``. make_loss: builds the loss of ``tune``, as
    ``smalti.tune.run.Tuning.loss`` does. batches: has ``batch(step)``, ``state(step)`` and
    ``check(state, step)``. evaluate: ``(model, step) -> metrics``. evaluation: builds ``evaluate``, as
    ``smalti.evals.in_loop.heldout_hook`` does. tasks: builds the evaluation of ``evals`` and its hooks, as
    ``smalti.evals.in_loop_suite.suite_hook`` does. origins: origin of each config value, for the provenance and the
    check of ``init_from``. fork: as ``--fork``.
    """
    config = _with_ranks_of_world(config)
    _check_evaluations(config, evaluate, evaluation, tasks)
    attempt = jobs.Attempt()
    with _cleanup(attempt):
        try:
            job = jobs.build(
                config, model=model, loss=loss, make_loss=make_loss, batches=batches, evaluate=evaluate,
                hooks=hooks, origins=origins, fork=fork, attempt=attempt,
            )  # fmt: skip
            if evaluation is not None:
                assert isinstance(config, RunConfig)
                job.evaluate = evaluation(config, job.indexes, job.mesh)
            if tasks is not None:
                assert isinstance(config, RunConfig)
                jobs.set_tasks(job, config, tasks)
        except BaseException:
            if attempt.folder is not None:
                attempt.folder.close()
            raise
    return job


def fit(job: Job) -> Result:
    """Train until the end of the run, and release its folder.

    Raises Preempted after SIGTERM and Interrupted after Ctrl-C, both with a checkpoint saved; NotFinite where a
    loss or a gradient norm is not finite; LostPeer where another rank has died or does not respond.
    """
    try:
        with _cleanup(jobs.Attempt(job.hosts, job.folder)):
            loop.fit(job)
    finally:
        job.folder.close()
    return Result(job.folder.path, job.state.step, job.recorder.latest or _recorded(job.folder))


def _check_evaluations(
    config: JobConfig, evaluate: Evaluate | None, evaluation: MakeEvaluate | None, tasks: MakeTasks | None
) -> None:
    """Raise UserError for an evaluation without effect, and for a part of the config without its evaluation."""
    if isinstance(config, RunConfig) and config.data.heldout and evaluate is None and evaluation is None:
        raise UserError(
            f"data.heldout names {', '.join(config.data.heldout)}, but build() was given no evaluation",
            allowed="evaluate= (the function that measures), evaluation= (which builds it), or no data.heldout",
            hint="build(config, evaluation=heldout_hook), after 'from smalti.evals.in_loop import heldout_hook'",
        )
    if evaluation is not None and (evaluate is not None or not isinstance(config, RunConfig)):
        raise UserError(
            "build() was given evaluation=, which has no effect "
            + ("beside evaluate=" if evaluate is not None else "for a JobConfig, which names no held-out sets"),
            allowed="evaluate= (the function that measures), or evaluation= (which builds it from a RunConfig)",
        )
    evals = config.evals if isinstance(config, RunConfig) else None
    if (evals is None) != (tasks is None):
        raise UserError(
            "build() was given " + ("tasks=, but no config with evals" if tasks else "no tasks= for evals"),
            allowed="both, or neither",
            hint="build(config, tasks=suite_hook), after 'from smalti.evals.in_loop_suite import suite_hook'",
        )


def _with_ranks_of_world(config: JobConfig) -> JobConfig:
    """Return the config with the number of ranks of this world, as a script cannot start others."""
    parallel = config.train.parallel
    ranks = dist.get_world_size() if dist.is_initialized() else env.world().world_size
    if ranks == 1 < parallel.ranks and not env.inside_world():
        raise UserError(
            f"train.parallel.ranks={parallel.ranks}, and this process is one rank: Python code starts no others",
            allowed="as many as a launcher has started, or 1",
            hint=f"torchrun --nproc-per-node {parallel.ranks} SCRIPT.py, or load(RECIPE, 'train.parallel.ranks=1')",
        )
    if ranks == parallel.ranks:
        return config
    if parallel.ranks != 1 and env.world().is_first:
        log.get("train").warning(
            "%s has started %d ranks, but train.parallel.ranks=%d; the launcher's number is used",
            env.world().launcher, ranks, parallel.ranks,
        )  # fmt: skip
    train = config.train.model_copy(update={"parallel": parallel.model_copy(update={"ranks": ranks})})
    return config.model_copy(update={"train": train})


@contextmanager
def _cleanup(attempt: jobs.Attempt) -> Iterator[None]:
    try:
        with jobs.recorded(attempt):
            yield
    except BaseException as error:
        if not worlds.may_leave(error):
            _end_at_exit(error)
        raise


def _end_at_exit(error: BaseException) -> None:
    """End the process at the end of its script with the code of ``error``, without destroying the process group, which
    would wait for dead ranks. ``error`` is kept until then, as its frames hold work of the group."""

    def leave(error: BaseException) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(int(error.exit_code) if isinstance(error, SmaltiError) else 1)

    atexit.register(leave, error)


def _recorded(folder: RunFolder) -> dict[str, float]:
    """Return the last metrics of a run that was already finished."""
    latest: dict[str, float] = {}
    for row in folder.metrics():
        latest |= {name: value for name, value in row.items() if not isinstance(value, list)}
    latest.pop("step", None)
    return latest
