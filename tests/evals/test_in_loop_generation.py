"""Tasks with generated answers during training: the queue of checkpoints, the child process, and their ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_loop_runs import GENERATED, RANKED, events_of, metrics_of, on_export, run_config, scores_of

from smalti.base.errors import UserError
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.evals import in_loop_generation
from smalti.evals.in_loop_generation import Generation
from smalti.evals.in_loop_suite import suite_hook
from smalti.evals.samples import read_results
from smalti.train import build, fit

SCORE = {"value": 0.5, "stderr": None, "interval": None, "truncated_frac": 0.25}
MIXED = ("arithmetic", *GENERATED)


class Child:
    """A child process that ends when the test says so."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.folder = Path(command[3])
        self.returncode: int | None = None
        self.options = options

    def poll(self) -> int | None:
        return self.returncode

    def finish(self, code: int = 0) -> None:
        if code == 0:
            value = {"tasks": {"sums": SCORE}, "folder": "evals/demo/now", "seconds": 1.0}
            (self.folder / "scores.json").write_text(json.dumps(value))
        self.returncode = code

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL

    def wait(self, timeout: float) -> None:
        assert self.returncode is not None


class Run:
    """A job of ten steps without training: what the hook needs of it."""

    def __init__(self, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = run_config(root, tasks=MIXED, train={"duration": "10step"}, every="3step")
        self.config = config.model_copy(update={"folder": str(folder)})
        self.folder = Path(self.config.run_folder)
        self.children: list[Child] = []
        self.events: list[tuple[str, int]] = []
        self.rows: list[dict[str, Any]] = []
        files = SimpleNamespace(
            path=self.folder,
            checkpoints=self.folder / "checkpoints",
            checkpoint=lambda step: self.folder / f"checkpoints/step-{step:08d}",
            log_folder=lambda: self.folder,
            metrics=lambda: self.rows,
        )
        self.job: Any = SimpleNamespace(
            config=self.config,
            is_first=True,
            length=self.config.length,
            folder=files,
            state=SimpleNamespace(step=0),
            recorder=SimpleNamespace(write=lambda step, metrics: self.rows.append({"step": step, **metrics})),
            events=SimpleNamespace(write=lambda kind, step, **fields: self.events.append((kind, step))),
        )
        names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
        monkeypatch.setattr(in_loop_generation, "subprocess", SimpleNamespace(Popen=self._start, **names))
        self.hook = self.new_hook()

    def _start(self, command: list[str], **options: Any) -> Child:
        self.children.append(Child(command, **options))
        return self.children[-1]

    def new_hook(self) -> Generation:
        """The hook of another attempt."""
        _, hooks = suite_hook(self.config)
        assert isinstance(hooks[0], Generation)
        return hooks[0]

    def save(self, step: int) -> None:
        folder = self.job.folder.checkpoint(step)
        (folder / "shards").mkdir(parents=True)
        for name in ("COMPLETE", "shards/weights"):
            (folder / name).write_text("x")

    def train(self, *steps: int) -> None:
        """Train up to each of these steps and save a checkpoint."""
        for step in steps:
            while self.job.state.step < step:
                self.job.state.step += 1
                self.hook.on_step(self.job, None)  # type: ignore[arg-type]
            self.save(step)
            self.hook.on_checkpoint(self.job, str(self.job.folder.checkpoint(step)))

    @property
    def kept(self) -> list[int]:
        """Steps whose checkpoints are kept for the child."""
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoints/.in_loop").glob("step-*"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(root, tmp_path, monkeypatch)


def test_a_checkpoint_is_evaluated_once_a_step_before_it_was_due(run: Run) -> None:
    run.hook.on_start(run.job)
    run.train(1, 2)
    assert run.children == []
    run.train(3, 4, 5)
    child = run.children[0]
    assert child.options["env"]["OMP_NUM_THREADS"] == "1"
    assert run.kept == [3]
    child.finish()
    run.train(7)  # 6 was due, and had no checkpoint
    assert run.rows == [{"step": 3, "icl/metrics/demo/sums": 0.5, "icl/metrics/demo/sums/truncated_frac": 0.25}]
    assert run.events == [("eval_generated", 3)]
    assert run.kept == [7]


def test_a_newer_checkpoint_replaces_one_that_waits_and_not_one_that_runs(run: Run) -> None:
    run.hook.on_start(run.job)
    run.train(3, 6, 9)
    assert (run.kept, run.events) == ([3, 9], [("eval_skipped", 6)])
    assert len(run.children) == 1
    assert run.hook.is_busy(run.job)
    run.children[0].finish()
    assert run.hook.is_busy(run.job)
    assert run.children[1].folder.name == "step-00000009"
    run.children[1].finish()
    assert not run.hook.is_busy(run.job)
    assert [row["step"] for row in run.rows] == [3, 9]


def test_a_checkpoint_whose_write_ends_after_the_next_one_is_due(run: Run) -> None:
    run.hook.on_start(run.job)
    for step in (3, 6):
        run.save(step)
    for step in range(1, 7):
        run.job.state.step = step
        run.hook.on_step(run.job, None)  # type: ignore[arg-type]
    for step in (3, 6):
        run.hook.on_checkpoint(run.job, str(run.job.folder.checkpoint(step)))
    assert run.kept == [3, 6]


def test_the_deletion_of_a_checkpoint_leaves_what_the_child_reads(run: Run) -> None:
    run.hook.on_start(run.job)
    run.train(3)
    (run.job.folder.checkpoint(3) / "shards/weights").unlink()
    assert (run.children[0].folder / "shards/weights").read_text() == "x"


def test_a_child_that_fails_is_started_once_more(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.hook.on_start(run.job)
    run.train(3)
    (run.folder / "eval-step-00000003.log").write_text("error: no luck\n")
    run.children[0].finish(code=1)
    run.train(4)
    assert len(run.children) == 2
    run.children[1].finish(code=-9)
    run.train(5)
    assert run.events == [("eval_failed", 3), ("eval_failed", 3)]
    assert (run.kept, run.rows, len(run.children)) == ([], [], 2)
    assert not run.hook.is_busy(run.job)


def test_the_next_attempt_resumes_what_is_not_finished(run: Run) -> None:
    run.hook.on_start(run.job)
    run.train(3, 6)
    run.hook.close(run.job)
    assert run.children[0].returncode == -signal.SIGKILL
    (run.folder / "checkpoints/.in_loop/step-00000008.tmp").mkdir()
    run.hook = run.new_hook()
    run.hook.on_start(run.job)
    assert run.kept == [3, 6]
    assert run.children[1].folder.name == "step-00000003"
    run.hook.close(run.job)
    run.job.state.step = 5  # resumed from an older checkpoint: the steps after it are repeated
    run.hook = run.new_hook()
    run.hook.on_start(run.job)
    assert run.kept == [3]


@pytest.mark.parametrize(("scored", "step", "starts"), [(3, 5, False), (3, 6, True), (9, 10, True), (10, 10, False)])
def test_the_newest_checkpoint_is_evaluated_if_it_was_due(run: Run, scored: int, step: int, starts: bool) -> None:
    """As after a kill between a save and the start of its evaluation, also once all steps are done."""
    run.rows.append({"step": scored, "icl/metrics/demo/sums": 0.5})
    run.job.state.step = step
    run.save(step)
    assert run.hook.is_busy(run.job) == starts
    assert len(run.children) == starts


def test_other_ranks_start_nothing(run: Run) -> None:
    run.job.is_first = False
    run.hook.on_start(run.job)
    run.train(3, 10)
    assert not run.hook.is_busy(run.job)
    run.hook.close(run.job)
    assert run.children == []


def test_all_tasks_may_be_generated_or_none(root: Path) -> None:
    evaluate, hooks = suite_hook(run_config(root, tasks=GENERATED))
    assert (evaluate, len(hooks)) == (None, 1)
    evaluate, hooks = suite_hook(run_config(root))
    assert (evaluate is None, len(hooks)) == (False, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": [GENERATED[0] | {"max_new_tokens": 64}]}, "sums: an answer has up to 64 tokens"),
        ({"tasks": [GENERATED[1] | {"file": "sums.jsonl"}]}, "sums.jsonl"),
        ({"tasks": GENERATED, "seq_len": 20, "cut_prompts": False}, "rules: "),
        ({"tasks": GENERATED, "seq_len": 512}, "evals.seq_len=512 is longer than"),
        ({"tasks": RANKED, "threads": 2}, "evals.threads=2 has no effect: no task generates answers"),
        ({"tasks": RANKED, "priority": "normal"}, "evals.priority=normal has no effect"),
    ],
)
def test_wrong_tasks_are_refused_before_the_first_step(root: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        suite_hook(run_config(root, **changes))


# ---- real processes -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_scores_are_those_of_the_checkpoint_and_training_does_not_wait(tmp_path: Path) -> None:
    every = {"checkpoint": {"every": "2step", "keep": 1}}
    config = run_config(tmp_path, tasks=MIXED, train=every, priority="normal")
    fit(build(config, tasks=suite_hook))
    rows, results = scores_of(config), on_export(config)
    assert rows[5] == pytest.approx(metrics_of(results), rel=1e-5)
    assert {step: "icl/metrics/demo/rules" in row for step, row in rows.items()} == {2: True, 4: False, 5: True}
    assert [event["step"] for event in events_of(config, "eval_skipped")] == [4]
    assert not list(Path(config.run_folder, "checkpoints/.in_loop").iterdir())
    folders = (events_of(config, "eval_generated")[-1]["folder"], results["folder"])
    answers = [
        [sample.completion for sample in read_results(Path(folder)).samples if sample.completion is not None]
        for folder in folders
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 9


def _start(recipe: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "smalti", "train", str(recipe)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


def _wait(condition: Callable[[], Any], timeout_s: float = 180) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def _children(config: RunConfig) -> list[tuple[int, int]]:
    """Process ids of the child processes of this run that evaluate, each with its parent's."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text()
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if f"in_loop_child\0{config.run_folder}" in command and state != "Z":
            result.append((int(entry.name), int(parent)))
    return result


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_kills_lose_no_evaluation_and_leave_no_child(tmp_path: Path) -> None:
    """The child is killed, then rank 0 during the second try, then SIGTERM stops the next attempt in its wait."""
    train = {"duration": "40step", "checkpoint": {"every": "20step"}, "restart": {"attempts": 0}}
    config = run_config(tmp_path, ranks=2, tasks=MIXED, train=train, every="20step", priority="normal")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(config))
    first = _start(recipe)
    child, rank = _wait(lambda: _children(config))[0]
    os.kill(child, signal.SIGKILL)
    _wait(lambda: [pid for pid, _ in _children(config) if pid != child])
    os.kill(rank, signal.SIGKILL)
    code, output = _finish(first)
    assert code == 75, output
    _wait(lambda: not _children(config), timeout_s=20)
    failure = events_of(config, "eval_failed")[0]
    assert (failure["step"], failure["again"], failure["reason"]) == (20, True, "it was killed by signal 9")

    second = _start(recipe)
    _wait(lambda: events_of(config, "eval_generated"))
    _wait(lambda: _children(config))
    second.send_signal(signal.SIGTERM)
    code, output = _finish(second)
    assert code == 75, output
    assert "all steps are done; waiting for generated answers at step 20 and 40" in output
    _wait(lambda: not _children(config), timeout_s=20)

    parallel = config.train.parallel.model_copy(update={"ranks": 1})
    alone = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    fit(build(alone, tasks=suite_hook))  # all steps are done
    assert [event["step"] for event in events_of(config, "eval_generated")] == [20, 40]
    rows = scores_of(config)
    assert {step: "icl/metrics/demo/rules" in row for step, row in rows.items()} == {20: True, 40: True}
    assert rows[40] == pytest.approx(metrics_of(on_export(config)), rel=1e-5)
