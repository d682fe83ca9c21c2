"""Tasks with generated answers during training, run by a child process on an export of a checkpoint.

Training waits for the child only after its last step. One child runs at a time; one checkpoint may wait for it, and a
newer one replaces that. ``checkpoints/.in_loop`` has hard links to both, so that ``train.checkpoint.keep`` does not
delete them and the next attempt resumes what was not finished. A child that fails is started once more.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smalti.base import log, store
from smalti.base.env import child_environment
from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.evals import in_loop_child
from smalti.evals.graders.ifeval.rows import load_rows
from smalti.evals.tasks import generation, instructions
from smalti.evals.tasks.find import FileTask
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.windows import Encoder
from smalti.model.huggingface import FAMILIES
from smalti.track.checkpoints.names import complete, folder_name, is_name, step_of
from smalti.train.cadence import Cadence
from smalti.train.hooks import Hook
from smalti.train.loop import Job
from smalti.train.step import StepResult

FOLDER = ".in_loop"
_MEASURES = ("gold_probability", "bits_per_byte", "n_missing", "truncated_frac")
_TRIES = 2
_TAIL_LINES = 15
_KILL_WAIT_S = 5.0


def check(task: FileTask, evals: EvalConfig, encoder: Encoder, seq_len: int) -> None:
    """Raise DataError for a wrong row, and TooLong for prompts that do not fit."""
    items = read_items(task.config)
    if task.config.kind == "ifeval":
        load_rows(task.config.file)
        n_new = task.config.max_new_tokens or instructions.MAX_NEW_TOKENS
    else:
        n_new = generation.max_new_tokens(task.config, items, encoder, evals.mode)
    generation.prompt_rows(task.config, items, encoder, evals, seq_len, None, n_new=n_new)


def task_metrics(group: str, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the scores of tasks, by name; without those that a small n does not give."""
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        key = f"icl/metrics/{group}/{name}"
        low, high = score["interval"] or (None, None)
        values = {key: score["value"], f"{key}/stderr": score["stderr"], f"{key}/low": low, f"{key}/high": high}
        values |= {f"{key}/{measure}": score.get(measure) for measure in _MEASURES}
        metrics |= {name: value for name, value in values.items() if value is not None}
    return metrics


class Generation(Hook):
    """Starts the child on rank 0 after the checkpoints that are due, and writes its scores at their steps."""

    def __init__(self, config: RunConfig, tasks: Sequence[FileTask], seq_len: int, group: str) -> None:
        """Raises UserError for a model that cannot be exported, and for contexts that are longer than its longest."""
        evals, model = config.evals, config.model
        assert evals is not None
        if model.family not in FAMILIES:
            raise UserError(
                f"evals has tasks with generated answers ({tasks[0].name}), which need an export, and the family "
                f"{model.family} has no Hugging Face form",
                hint="leave these tasks out of evals.tasks",
            )
        if seq_len > model.max_position_embeddings:
            raise UserError(
                f"evals.seq_len={seq_len} is longer than model.max_position_embeddings={model.max_position_embeddings}"
            )
        named = [task.config.model_copy(update={"name": task.name}).model_dump(mode="json") for task in tasks]
        values = evals.model_dump(mode="json", include=set(EvalConfig.model_fields))
        self._suite = from_dict(EvalConfig, values | {"tasks": named, "seq_len": seq_len}, "evals").config
        self._evals, self._group, self._merge = evals, group, config.adapter is not None
        self._names = [f"icl/metrics/{group}/{task.name}" for task in tasks]
        self._when: Cadence | None = None
        self._last = 0
        """Step of the newest checkpoint that was scored or queued."""
        self._folder = Path()
        self._queue: list[int] = []
        """Steps of the checkpoints to evaluate; the first one is running, or runs next."""
        self._failures: Counter[int] = Counter()
        self._says_it_waits = False
        self.child: subprocess.Popen[bytes] | None = None
        """The child process, while it runs."""

    def on_start(self, job: Job) -> None:
        """Resume the evaluations that an earlier attempt has not finished."""
        if job.is_first:
            self._open(job)
            self._advance(job)

    def on_step(self, job: Job, result: StepResult) -> None:
        """Write the scores of a child that has finished."""
        if job.is_first:
            self._advance(job)

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Evaluate the checkpoint if a step since the last evaluated one was due; always the last one."""
        if job.is_first and self._is_due(job, step_of(path)):
            self._add(job, path)
            self._advance(job)

    def is_busy(self, job: Job) -> bool:
        """Return whether an evaluation is not finished, on rank 0."""
        if not job.is_first:
            return False
        self._open(job)
        self._advance(job)
        if self._queue and not self._says_it_waits:
            steps = " and ".join(map(str, self._queue))
            log.get("evals").info("all steps are done; waiting for generated answers at step %s", steps)
            self._says_it_waits = True
        return bool(self._queue)

    def close(self, job: Job) -> None:
        """End the child; the next attempt resumes what it has not finished."""
        if self.child is not None:
            self.child.kill()
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(_KILL_WAIT_S)
            self.child = None
        if self._queue:
            steps = " and ".join(map(str, self._queue))
            log.get("evals").info("the tasks with generated answers at step %s run in the next attempt", steps)

    def _open(self, job: Job) -> None:
        """Find unfinished evaluations, and whether the newest checkpoint needs one."""
        if self._when is not None:
            return
        self._when = Cadence(self._evals.every, job.length)
        self._folder = job.folder.checkpoints / FOLDER
        step = job.state.step
        for path in self._folder.glob("*"):
            if not (is_name(path.name) and (path / "COMPLETE").exists() and step_of(path) <= step):
                shutil.rmtree(path, ignore_errors=True)
        self._queue = sorted(map(step_of, complete(self._folder)))
        scored = [row["step"] for row in job.folder.metrics() if any(name in row for name in self._names)]
        self._last = max((*scored, *self._queue), default=0)
        if self._is_due(job, step):
            self._add(job, str(job.folder.checkpoint(step)))

    def _is_due(self, job: Job, step: int) -> bool:
        """Return whether the checkpoint of a step is the last one, or an evaluation was due since the newest one."""
        assert self._when is not None
        due = any(map(self._when.due, range(self._last + 1, step + 1)))
        return due or (self._last < step and step >= job.length.total_steps)

    def _add(self, job: Job, path: str) -> None:
        """Queue a checkpoint in place of those that wait, but not of the first."""
        step = step_of(path)
        for waiting in self._queue[1:]:
            self._remove(waiting)
            job.events.write("eval_skipped", step=waiting, newer=step)
        temporary = self._folder / f"{folder_name(step)}.tmp"
        try:
            shutil.copytree(path, temporary, copy_function=_link)
            os.replace(temporary, self._folder / folder_name(step))
        except (OSError, shutil.Error) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            log.get("evals").warning("the checkpoint of step %d cannot be evaluated: %s", step, error)
            return
        self._last = step
        self._queue.append(step)

    def _advance(self, job: Job) -> None:
        """Take the scores of a child that has ended; start the next one."""
        if self.child is not None and self.child.poll() is not None:
            code, self.child = self.child.returncode, None
            self._finish(job, code)
        if self.child is None and self._queue:
            self._start(job)

    def _start(self, job: Job) -> None:
        folder = self._folder / folder_name(self._queue[0])
        request = {
            "run": str(job.folder.path),
            "merge": self._merge,
            "suite": self._suite.model_dump(mode="json"),
            "threads": self._evals.threads,
            "priority": self._evals.priority,
        }
        try:
            store.write_json(folder / in_loop_child.REQUEST, request)
            with open(self._log(job), "ab") as output:
                # Without preexec_fn the child is not a fork, which would copy the page tables of a large process.
                self.child = subprocess.Popen(
                    [sys.executable, "-m", in_loop_child.__name__, str(folder), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=child_environment({"OMP_NUM_THREADS": str(self._evals.threads)}),
                )
        except OSError as error:
            self._fail(job, f"it could not be started: {error}")

    def _finish(self, job: Job, code: int) -> None:
        step = self._queue[0]
        scores = self._folder / folder_name(step) / in_loop_child.SCORES
        if not scores.exists():
            self._fail(job, f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}")
            return
        results = store.read_json(scores)
        metrics = task_metrics(self._group, results["tasks"])
        job.recorder.write(step, metrics)
        about = {"seconds": results["seconds"], "folder": results["folder"]}
        job.events.write("eval_generated", step=step, **about, metrics=metrics)
        self._remove(step)

    def _fail(self, job: Job, reason: str) -> None:
        step = self._queue[0]
        self._failures[step] += 1
        again = self._failures[step] < _TRIES
        then = "it is started again" if again else "this step has no scores of them"
        lines = log.last_lines(self._log(job), _TAIL_LINES)
        log.get("evals").warning(
            "the child process that generates answers at step %d has failed: %s; %s%s",
            *(step, reason, then, "".join(f"\n  {line}" for line in lines)),
        )
        job.events.write("eval_failed", step=step, reason=reason, again=again, lines=lines)
        if not again:
            self._remove(step)

    def _log(self, job: Job) -> Path:
        return job.folder.log_folder() / f"eval-{folder_name(self._queue[0])}.log"

    def _remove(self, step: int) -> None:
        self._queue.remove(step)
        folder = self._folder / folder_name(step)
        with suppress(OSError):
            (folder / "COMPLETE").unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy on a file system that has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
