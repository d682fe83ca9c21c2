"""The demo's stages: their exit codes, and that a stopped demo leaves a saved run and no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROVE
from train_process import write_recipe

from smalti.cli import demo
from smalti.track.run import RunFolder

DRIVER = """
import sys, typer
from smalti.cli import children, demo
if sys.argv[1] == "stage":
    call = lambda: demo.stage("a title", *sys.argv[2:])
else:
    call = lambda: sys.exit(children.run_child(sys.argv[2:]))
try:
    call()
except typer.Exit as leave:
    sys.exit(leave.exit_code)
"""
LISTENS = """
import signal, sys, time
heard = 0
def hear(number, frame):
    global heard
    heard += 1
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
open("ready", "w").close()
while not heard:
    time.sleep(0.02)
time.sleep(0.5)
print("heard", heard)
sys.exit(40 + heard)
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def drive(work: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        cwd=work,
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def send(process: subprocess.Popen[str], number: signal.Signals, *, to_group: bool) -> None:
    os.killpg(process.pid, number) if to_group else process.send_signal(number)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def living_in(folder: Path) -> list[int]:
    """Processes whose working folder it is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_partial_core_average_is_named() -> None:
    mean = {"value": 0.1, "interval": None, "n_missing": 29}
    results = {"tasks": {"copa": {}, "siqa": {}}, "gauntlet": {"core_average": mean}}
    assert demo._core_average(results) == [
        ("core average", "0.100 above chance"),
        ("", "partial: without 29 benchmarks of the Gauntlet; it has copa, siqa"),
    ]
    assert demo._core_average({"tasks": {}}) == []


@pytest.mark.slow
def test_the_code_of_a_stage_is_the_demos_and_the_command_is_named(tmp_path):
    process = drive(tmp_path, "stage", "runs", "report", "nowhere")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "== a title\n$ smalti runs report nowhere" in out
    stopped = "the demo has stopped (run again, it continues here): this command exited with code 2:\n  "
    assert f"{stopped}smalti runs report nowhere\n" in err


def test_a_stage_that_dies_of_a_signal_is_128_and_its_number(tmp_path):
    process = drive(tmp_path, "run", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    process.communicate(timeout=60)
    assert process.returncode == 137


@pytest.mark.sample(1)
@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [True, False])
def test_a_signal_reaches_the_stage_just_once(tmp_path, number, to_group):
    process = drive(tmp_path, "run", sys.executable, "-c", LISTENS)
    wait_for(tmp_path / "ready", process)
    send(process, number, to_group=to_group)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (41, "heard 1\n"), err
    assert living_in(tmp_path) == []


@pytest.mark.slow
@linux
def test_a_stop_that_comes_as_a_stage_ends_well_stops_the_demo(tmp_path):
    process = drive(tmp_path, "run", sys.executable, "-c", LISTENS.replace("sys.exit(40 + heard)", ""))
    wait_for(tmp_path / "ready", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.slow
@linux
def test_a_killed_demo_takes_its_stage_with_it(tmp_path):
    process = drive(tmp_path, "run", sys.executable, "-c", LISTENS)
    wait_for(tmp_path / "ready", process)
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 10
    while living_in(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert living_in(tmp_path) == []


@pytest.mark.exhaustive
@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group", "code", "state"),
    [(signal.SIGINT, True, 130, "interrupted"), (signal.SIGTERM, False, 75, "stopped"),
     *([(signal.SIGINT, False, 130, "interrupted")] if PROVE else [])],
)  # fmt: skip
def test_training_that_is_stopped_through_the_demo_is_saved_and_goes_on(tmp_path, number, to_group, code, state):
    write_recipe(tmp_path)
    command = ("stage", "train", "r.yaml", "train.duration=20000step", "train.checkpoint.every=1run")
    process, folder = drive(tmp_path, *command), RunFolder(tmp_path / "runs/t")
    while not folder.metrics():
        wait_for(tmp_path, process)
        time.sleep(0.05)
    send(process, number, to_group=to_group)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"exited with code {code}" in err
    assert folder.status()["state"] == state
    saved = [event["step"] for event in folder.events() if event["event"] == "checkpoint_saved"]
    assert len(saved) == 1
    assert (folder.checkpoints / f"step-{saved[0]:08d}" / "COMPLETE").exists()
    assert living_in(tmp_path) == []


def test_the_demo_takes_changes_to_track_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from smalti.cli.main import run

    monkeypatch.chdir(tmp_path)
    assert run(["demo", "track.sinks=[tensorboard]", "train.optimizer.lr=1e-3"]) == 2
    assert "hint: after the demo: smalti train demo name=mine train.optimizer.lr=1e-3" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "hint"),
    [("track.sinks=[tensorbord]", "did you mean 'tensorboard'?"), ("track.snks=[mlflow]", "did you mean track.sinks?")],
)
def test_a_wrong_override_is_refused_before_the_first_stage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    hint: str,
) -> None:
    from smalti.cli import demo
    from smalti.cli.main import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_child", lambda command: pytest.fail(f"a stage was started: {command}"))
    assert run(["demo", override]) == 2
    assert f"hint: {hint}" in capsys.readouterr().err


def test_a_folder_without_the_gauntlet_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from smalti.cli import demo
    from smalti.cli.main import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_child", lambda command: pytest.fail(f"a stage was started: {command}"))
    assert run(["demo", "--gauntlet", str(tmp_path)]) == 2
    assert "has none of the Gauntlet's files" in capsys.readouterr().err


def test_the_command_of_a_failed_stage_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from smalti.cli import demo

    monkeypatch.setattr(demo, "run_child", lambda command: 2)
    with pytest.raises(typer.Exit):
        demo.stage("a title", "train", "demo", "track.sinks=[x]")
    assert capsys.readouterr().err.splitlines()[-1].strip() == "smalti train demo 'track.sinks=[x]'"


@pytest.mark.parametrize(("state", "line"), [("done", "is finished"), ("stopped", "is continued")])
def test_the_run_of_an_earlier_demo_keeps_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, line: str
) -> None:
    from smalti.base.store import write_json
    from smalti.cli import demo
    from smalti.config.load import dump, load
    from smalti.config.run import RunConfig

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / demo.RUN
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(load(RunConfig, "demo", ["train.duration=68step"]).config))
    write_json(folder / "status.json", {"state": state})
    assert demo._duration(0.05) == (("train.duration=68step",), ())
    output = capsys.readouterr().out
    assert f"{demo.RUN} {line}" in output
    assert "--minutes" in output


def test_a_rank_is_killed_soon_after_the_first_checkpoint() -> None:
    from smalti.cli import demo

    for steps, at in ((20, 10), (68, 22), (1200, 320)):
        assert demo._kill((f"train.duration={steps}step",)) == (
            f"chaos.faults=[{{kind: sigkill, rank: 1, step: {at}}}]",
        )
    assert demo._kill(("train.duration=2e6tok",)) == ()
