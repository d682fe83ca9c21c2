"""One of two ranks fails alone under another launcher: all end with its code, and the failure is recorded.

A rank that has failed alone does not destroy the process group, which would wait for the others.
"""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import toy_run
from gloo_ranks import run_ranks

from smalti.base.errors import SmaltiError, UserError
from smalti.config.run import RunConfig
from smalti.track.attempts import record_failure
from smalti.track.run import RunFolder
from smalti.train import job, loop


def _fail_alone(rank: int, config: RunConfig, failing: int, error: Exception) -> tuple[str, int | None, str]:
    asked = loop.train_step

    def train_step(state: Any, *rest: Any) -> Any:
        if rank == failing and state.step == 2:
            raise error
        return asked(state, *rest)

    loop.train_step = train_step
    with pytest.raises(Exception, match=r"lost|no room") as raised:
        job.run(config, {}, evaluation=lambda *_: None)
    assert dist.is_initialized()
    code = int(raised.value.exit_code) if isinstance(raised.value, SmaltiError) else None
    return type(raised.value).__name__, code, str(raised.value).partition("\n")[0]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [(1, UserError("no room"), 2), (1, KeyError("no room"), 1), (1, RuntimeError("no room"), 75)],
)
def test_the_others_end_with_the_code_of_the_rank_that_failed(failing, error, code, tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, parallel={"ranks": 2}, duration="6step")
    ends = run_ranks(2, _fail_alone, config, failing, error, together=False)
    assert ends[failing][0] == type(error).__name__
    kind, ended_with, reason = ends[1 - failing]
    assert (kind, ended_with) == ("LostPeer", code)
    lost = f"rank {failing} ({socket.gethostname()})"
    assert f"rank {1 - failing} lost {lost}, which ended with {type(error).__name__}: " in reason
    status = RunFolder.read(tmp_path / "runs/dense").status()
    assert (status["state"], status["reason"], status["attempt"]) == ("failed", reason, 0)


@pytest.mark.exhaustive
def test_a_failure_of_rank_0_is_recorded_with_its_message(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, parallel={"ranks": 2}, duration="6step")
    run_ranks(2, _fail_alone, config, 0, UserError("no room"), together=False)
    status = RunFolder.read(tmp_path / "runs/dense").status()
    assert (status["state"], status["reason"]) == ("failed", "no room")


def _fail_in_build(rank: int, config: RunConfig, together: bool) -> tuple[str, bool]:
    def refuse(*_: Any) -> Any:
        raise UserError("no room")

    if together:
        job.read_inputs = refuse
    elif rank == 0:
        job._token_batches = refuse
    with pytest.raises(Exception, match=r"lost|no room") as raised:
        job.run(config, {}, evaluation=lambda *_: None)
    return type(raised.value).__name__, dist.is_initialized()


@pytest.mark.parametrize("together", [False, True])
def test_a_failure_before_the_first_step_is_recorded_and_ranks_leave_only_if_it_is_of_all_ranks(
    together: bool, tmp_path: Path
) -> None:
    config = toy_run.config(tmp_path, parallel={"ranks": 2})
    first, second = run_ranks(2, _fail_in_build, config, together, together=False)
    assert first == ("UserError", not together)
    assert second == ("UserError" if together else "LostPeer", not together)
    status = RunFolder.read(tmp_path / "runs/dense").status()
    assert (status["state"], status["reason"], status["attempt"]) == ("failed", "it did not start: no room", 0)


def test_a_status_that_cannot_be_read_does_not_hide_the_error(tmp_path: Path) -> None:
    folder = RunFolder.open(toy_run.config(tmp_path), {})
    (folder.path / "status.json").write_text("{")
    record_failure(folder, RuntimeError("the first error"))
    assert (folder.path / "status.json").read_text() == "{", "left for whoever repairs it"
    folder.close()
