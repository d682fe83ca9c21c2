"""Runs with faults end with the weights of a run without any, to the bit."""

import hashlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_run
from forked_command import start

from smalti.config.chaos import ChaosConfig
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.evals import in_loop
from smalti.track.progress import Phase, read_slots, slot_file
from smalti.track.run import RunFolder

pytestmark = pytest.mark.slow

STEPS = 120
TIMEOUT_S = 8
Record = Callable[[str, dict[str, Any]], None]
ALARMS = ("rank_died", "rank_hung", "rank_unresponsive", "straggler")


def _recipe(root: Path, **train: Any) -> tuple[Path, Path]:
    parallel = {"ranks": 2, "threads": 1, "timeout": f"{TIMEOUT_S}s"}
    config: RunConfig = toy_run.config(root, parallel=parallel, duration=f"{STEPS}step", **train)
    (root / "r.yaml").write_text(dump(config))
    return root / "r.yaml", Path(config.run_folder)


def _weights(folder: Path) -> dict[str, str]:
    """Digests of the tensors of the last checkpoint: weights and moments."""
    shards = (folder / "checkpoints" / f"step-{STEPS:08d}" / "shards").glob("*.safetensors")
    return {shard.name: hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards}


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of a run without faults."""
    recipe, folder = _recipe(tmp_path_factory.mktemp("unhurt"))
    code, output = start("train", str(recipe)).finish()
    assert code == 0, output
    weights = _weights(folder)
    assert len(weights) == 2
    return weights


def _planned(seed: int) -> tuple[str, ...]:
    return ("chaos.mix=llama3", "chaos.count=5", f"chaos.seed={seed}")


@pytest.mark.exhaustive
def test_a_mix_of_faults_ends_with_the_weights_of_a_run_without_faults(
    tmp_path: Path, unhurt: dict[str, str], proof: Callable[..., int], record: Record
) -> None:
    seeds = proof(short=1, full=21)
    kinds = Counter[str]()
    for seed in range(1, 1 + seeds):
        recipe, folder = _recipe(tmp_path / str(seed))
        code, output = start("train", str(recipe), *_planned(seed)).finish(400)
        assert code == 0, output
        assert _weights(folder) == unhurt
        injected = [event for event in RunFolder(folder).events() if event["event"] == "fault_injected"]
        assert len(injected) == len(_kinds(seed))
        kinds.update(_kinds(seed))
    record("soak", {"runs": seeds, "equal_to_the_bit": seeds, "faults": kinds.total(), **kinds})


def _kinds(seed: int) -> list[str]:
    """The kinds of faults that a seed draws."""
    drawn = ChaosConfig(mix="llama3", count=5, seed=seed).planned(total_steps=STEPS, ranks=2)
    return [fault.kind for fault in drawn]


def test_a_kill_of_the_agent_or_of_the_whole_tree_at_any_moment_loses_nothing(
    tmp_path: Path, unhurt: dict[str, str], proof: Callable[..., int], record: Record
) -> None:
    """No rank of the command before is left when the next one starts its own."""
    rng = random.Random(7)
    kills = left = proof(short=2, full=100)
    number = trees = 0
    while left:
        number += 1
        recipe, folder = _recipe(tmp_path / str(number))
        commands = 0
        while True:
            command, commands = start("train", str(recipe)), commands + 1
            whole_tree = rng.random() < 0.5
            if left and _is_killed_after(command.pid, rng.uniform(0.0, 4.0), whole_tree=whole_tree):
                left -= 1
                trees += whole_tree
                assert command.finish()[0] == -signal.SIGKILL
                continue
            code, output = command.finish()
            assert code == 0, output
            break
        started = [event["attempt"] for event in RunFolder(folder).events() if event["event"] == "attempt_started"]
        assert started == sorted(set(started)), "no attempt is started twice"
        assert len(started) <= commands, "no rank has failed but those that were killed"
        assert _weights(folder) == unhurt
    record(
        "agent_kills", {"kills": kills, "agent": kills - trees, "whole_tree": trees, "runs_equal_to_the_bit": number}
    )


def _is_killed_after(agent: int, seconds: float, *, whole_tree: bool) -> bool:
    """Kill an agent, and with ``whole_tree`` its ranks; return False where it has ended by itself before."""
    end_s = time.monotonic() + seconds
    process = psutil.Process(agent)
    while time.monotonic() < end_s:
        if _has_ended(process):
            return False
        time.sleep(0.02)
    ranks = [] if _has_ended(process) else process.children(recursive=True)
    if _has_ended(process):
        return False
    os.kill(agent, signal.SIGKILL)
    for rank in ranks if whole_tree else []:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    return True


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _slow_evaluation() -> None:
    """Each pass of an evaluation takes 1.2 s longer."""
    logits_of = in_loop.logits_of

    def slow_logits_of(*args: Any, **options: Any) -> Any:
        time.sleep(1.2)
        return logits_of(*args, **options)

    in_loop.logits_of = slow_logits_of  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_evaluations_checkpoints_compilation_and_a_pause_of_3_seconds_are_no_fault(
    tmp_path: Path, proof: Callable[..., int], record: Record
) -> None:
    """An evaluation takes longer than the limit of a phase. 30 minutes in ``make prove``: as many runs as fit, every
    other one compiles its model."""
    began_s, most_s = time.monotonic(), proof(short=1, full=1800)
    for number in itertools.count():
        root = tmp_path / str(number)
        toy_run.write_tokens(root / "heldout", n_documents=800, seed=1)
        recipe, folder = _recipe(root, eval_every="60step", checkpoint={"every": "2step"})
        options = [f"data.heldout={{new: {root / 'heldout'}}}", "train.restart.hang_floor=6s"]
        if number % 2:
            options += ["train.parallel.compile=true", "train.parallel.timeout=5min"]
        command = start("train", str(recipe), *options, f"chaos.faults=[{_pauses(number)}]", in_rank=_slow_evaluation)
        code, output = command.finish(600)
        assert code == 0, output
        events = RunFolder(folder).events()
        kinds = [event["event"] for event in events]
        assert kinds.count("fault_injected") == 3
        assert kinds.count("attempt_started") == 1
        assert not set(ALARMS) & set(kinds)
        (slot, _) = read_slots(slot_file(RunFolder(folder).log_folder(0), 0))
        assert slot.spent_s(Phase.EVAL) > kinds.count("eval") * TIMEOUT_S
        passed_s = time.monotonic() - began_s
        if passed_s >= most_s:
            break
    record(
        "no_false_alarm", {"minutes": round(passed_s / 60, 1), "runs": number + 1, "pauses_of_3_s": 3 * (number + 1)}
    )


def _pauses(number: int) -> str:
    """Three pauses of 3 s, at steps, phases and ranks that the number of the run draws."""
    rng = random.Random(number)
    phases = rng.sample(("data", "forward", "backward", "optimizer", "checkpoint", "eval"), 3)
    return ", ".join(
        f"{{kind: sigstop, rank: {rng.randrange(2)}, step: {rng.randint(10, 60)}, phase: {phase}, duration: 3s}}"
        for phase in phases
    )
