"""The engine ssh: hosts with room, attempts that outlive connections, and hostile names; with real sshd at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from network_nodes import wait_for
from ssh_hosts import Hosts, hosts, why_not
from train_process import one_rank, write_recipe
from typer.testing import CliRunner

from smalti.base import database
from smalti.base.errors import UserError
from smalti.cli.fleet.app import app
from smalti.cli.fleet.text import to_json
from smalti.config.clusters import ClustersConfig
from smalti.config.launch import LaunchConfig
from smalti.config.load import from_dict
from smalti.fleet.controller import start
from smalti.fleet.controller.decide import Job, Move, decide
from smalti.fleet.launch import ssh
from smalti.fleet.launch.ssh import Attempt, Refused, Stopping, Unreachable, folder_of
from smalti.fleet.queue import changes, runs
from smalti.fleet.queue.runs import Run
from smalti.fleet.queue.schedule import Room

HOSTILE = "it's; touch pwned $(touch pwned) `touch pwned` \"&| \n-oProxyCommand=x"


# ---- where a run is started -----------------------------------------------------------------------------------------


def job(number: int, state: Any = "QUEUED", node: str | None = None, held: tuple[int, ...] = (), **run: Any) -> Job:
    """A run that needs a core, on one of two hosts with two cores and two GPUs each."""
    values: dict[str, Any] = {
        "number": number, "name": "r", "cluster": "lab", "host": "q", "state": state, "cause": None, "code": None,
        "priority": 50, "preemptible": False, "max_duration_s": None, "retries": 3, "retries_by_cause": {}, "cores": 1,
        "gpus": 0, "command": ("true",), "recipe": None, "directory": "/", "folder": None, "code_commit": None,
        "retried": {}, "not_before_s": 0.0, "time": "", "engine": "ssh", "hosts": runs.Hosts(("n2", "n3"), 2, 2),
    }  # fmt: skip
    values |= run
    attempts = () if node is None else (runs.Attempt(number, 0, f"n{number}", held, 9, "p", 1.0, None, None, None),)
    if node is not None and state not in ("RUNNING", "STARTING", "TERMINATING"):
        attempts = (replace(attempts[0], ended_s=2.0),)
    return Job(Run(**values), tuple(replace(attempt, node=node) for attempt in attempts))


def moves_of(*jobs: Job, cordoned: tuple[str, ...] = ()) -> list[Move]:
    return decide(jobs, Room(cores=1), 100.0, cordoned)


def starts(*jobs: Job, cordoned: tuple[str, ...] = ()) -> list[tuple[int, str | None, tuple[int, ...] | None]]:
    moves = moves_of(*jobs, cordoned=cordoned)
    assert all(move.state == "STARTING" for move in moves)
    return [(move.run.number, move.node, move.gpus) for move in moves]


def test_runs_are_spread_over_hosts_and_wait_without_room() -> None:
    assert starts(*(job(number) for number in range(1, 7))) == [
        (1, "n2", ()), (2, "n3", ()), (3, "n2", ()), (4, "n3", ()),
    ]  # fmt: skip
    assert starts(job(1, "RUNNING", "n2", cores=2), job(2, cores=2), job(3)) == [(2, "n3", ())]


def test_a_run_gets_gpus_that_no_other_has_on_that_host() -> None:
    held = job(1, "RUNNING", "n2", (0,), cores=0, gpus=1)
    wants = [Job(replace(job(number, cores=0).run, gpus=count), ()) for number, count in ((2, 2), (3, 1))]
    assert starts(held, *wants) == [(2, "n3", (0, 1)), (3, "n2", (1,))]


def test_the_highest_priority_is_first_and_none_overtakes_it() -> None:
    assert starts(job(1, "RUNNING", "n2"), job(2), job(3, priority=90, cores=2))[0] == (3, "n3", ())
    busy = [job(1, "RUNNING", "n2"), job(2, "RUNNING", "n3")]
    assert starts(*busy, job(3), job(4, priority=90, cores=2)) == []
    assert starts(*busy, job(3, cluster="other"), job(4, priority=90, cores=2)) == [(3, "n2", ())]


def test_no_run_is_started_on_a_cordoned_host() -> None:
    assert starts(job(1), cordoned=("n2",)) == [(1, "n3", ())]
    assert starts(job(1), cordoned=("n2", "n3")) == []
    assert starts(job(1), cordoned=("q",)) == [(1, "n2", ())]


def test_the_attempt_after_a_fault_is_on_another_host_if_there_is_one() -> None:
    assert starts(job(1, "RECOVERING", "n2")) == [(1, "n3", ())]
    assert starts(job(1, "RECOVERING", "n2"), cordoned=("n3",)) == [(1, "n2", ())]


def test_a_run_of_higher_priority_stops_one_that_is_preemptible_and_takes_its_host() -> None:
    low = {"cores": 2, "priority": 10, "preemptible": True}
    busy = [job(1, "RUNNING", "n2", **low), job(2, "RUNNING", "n3", cores=2)]
    urgent = job(3, priority=90, cores=2)
    (stopped,) = moves_of(*busy, urgent)
    assert (stopped.run.number, stopped.state, stopped.cause) == (1, "TERMINATING", "preempted")
    leaving = job(1, "TERMINATING", "n2", **low)
    assert moves_of(leaving, busy[1], urgent, job(4, **low | {"cores": 1})) == [], "its room is on its way"
    assert starts(job(1, "QUEUED", "n2", **low), busy[1], urgent) == [(3, "n2", ())]
    assert moves_of(*busy, urgent, cordoned=("n2",)) == []


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"engine": "ssh"}, "without hosts"),
        ({"engine": "ssh", "hosts": ["n1"]}, "without hosts, or without what they have"),
        ({"engine": "ssh", "hosts": ["-oProxyCommand=x"], "cores_per_host": 1}, "hosts"),
        ({"engine": "ssh", "hosts": ["a b"], "cores_per_host": 1}, "hosts"),
        ({"engine": "ssh", "hosts": ["n1"], "cores_per_host": 1, "ranks_per_node": 2}, "ranks_per_node has no effect"),
        ({"engine": "local", "hosts": ["n1"]}, "hosts has no effect with engine: local"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(ClustersConfig, {"clusters": {"c": cluster}}, "clusters.yaml")


def test_a_launch_keeps_the_hosts_and_refuses_what_no_host_has(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "ensure", lambda: None)
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, one_rank())
    home.mkdir()
    lab = {"engine": "ssh", "hosts": ["n2", "n3"], "cores_per_host": 2, "options": ["-oPort=2222"]}
    (home / "clusters.yaml").write_text(json.dumps({"clusters": {"lab": lab}}))
    done = CliRunner().invoke(app, ["launch", "r.yaml", "--on", "lab", "--pack", "--json"])
    assert done.exit_code == 0, done.output
    run = runs.read(json.loads(done.stdout)["id"])
    assert run.hosts == runs.Hosts(("n2", "n3"), 2, 0, ("-oPort=2222",))
    assert (run.engine, run.cores, run.command[-1]) == ("ssh", 1, "{recipe}")
    refused = CliRunner().invoke(app, ["launch", "r.yaml", "--on", "lab", "--pack", "ranks=4", "name=b"])
    assert isinstance(refused.exception, UserError)
    assert refused.exception.message == "the run needs 4 cores, and each host of lab has 2"
    for node in ("n2", "n3"):
        CliRunner().invoke(app, ["cordon", node, "--reason", "fan"])
    shown = CliRunner().invoke(app, ["show", run.id])
    assert "n2, n3 is cordoned by" in shown.stderr


# ---- an attempt, with a script in the place of ssh that hands the last argument to a shell, as sshd does -----------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run; a file ``cut`` in the folder of the script makes ssh fail."""
    place = tmp_path / "bin"
    place.mkdir()
    script = f"#!/bin/sh\n[ -e {place}/cut ] && {{ echo 'no route to host' >&2; exit 255; }}\n"
    (place / "ssh").write_text(script + 'echo "$*" >> "$0.log"\nfor last; do :; done\nexec /bin/sh -c "$last"\n')
    (place / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    return folder


def request(place: Path, number: int, command: list[str], host: str = "n2") -> str:
    output = place / f"attempt-{number}.log"
    return ssh.request_of(
        place, number, host, ["-oPort=22"], command=command, directory=str(place), output=output,
        environment=dict(os.environ),
    )  # fmt: skip


def begin(place: Path, number: int, *command: str) -> "subprocess.Popen[str]":
    """The process that runs an attempt, as the process of an attempt in the queue starts it."""
    process = subprocess.Popen([sys.executable, "-m", "smalti.fleet.launch.ssh"], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(request(place, number, list(command)))
    process.stdin.close()
    return process


def sh(text: str, *arguments: str) -> list[str]:
    return ["/bin/sh", "-c", text, "sh", *arguments]


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


SAVES = 'trap "echo saved; exit 75" TERM; echo begun; while :; do sleep 0.1; done'


def test_output_and_exit_code_are_those_of_the_command_and_no_shell_reads_a_hostile_name(shell: Path) -> None:
    process = begin(shell, 0, *sh('echo "$1"; exit 7', HOSTILE))
    assert process.wait(60) == 7
    assert (shell / "attempt-0.log").read_text() == HOSTILE + "\n"
    assert ssh.end_of(shell, 0, 7)[0] == 7
    log = (shell.parent / "bin" / "ssh.log").read_text()
    assert "pwned" not in log
    assert "-oPort=22 -- n2 env PYTHONPATH=" in log
    assert not list(shell.parent.rglob("pwned"))


@pytest.mark.slow
def test_a_stop_saves_first_and_a_signal_of_the_command_is_known(shell: Path) -> None:
    """Processes of an attempt, each with the start of Python twice."""
    process = begin(shell, 0, *sh(SAVES))
    until(lambda: (shell / "attempt-0.log").exists() and "begun" in (shell / "attempt-0.log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert (shell / "attempt-0.log").read_text() == "begun\nsaved\n"
    killed = begin(shell, 1, *sh("kill -9 $$"))
    assert killed.wait(60) == 137
    assert ssh.end_of(shell, 1, 137) == (-9, None)


@pytest.mark.slow
def test_an_attempt_survives_its_connection_and_its_client_and_the_next_one_waits_for_its_end(shell: Path) -> None:
    """Only real processes show that nothing runs twice: both attempts write when they begin and end."""
    cut = shell.parent / "bin" / "cut"
    slow = 'trap "sleep 1; echo end >> log; exit 75" TERM; echo begin >> log; while :; do sleep 0.1; done'
    first = begin(shell, 0, *sh(slow))
    until(lambda: (shell / "log").exists())
    cut.touch()
    time.sleep(1.0)
    assert first.poll() is None
    first.kill()  # the machine of the queue is switched off
    first.wait()
    assert (shell / "log").read_text() == "begin\n"
    cut.unlink()
    second = begin(shell, 1, *sh("echo begin >> log; echo end >> log"))
    assert second.wait(60) == 0
    assert (shell / "log").read_text() == "begin\nend\nbegin\nend\n"


@pytest.mark.slow
def test_a_start_that_is_repeated_starts_nothing_and_a_host_that_is_away_is_a_fault(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost answer of ssh: the request is sent again."""
    folder = folder_of(shell, 0)
    folder.mkdir()
    remote = json.loads(request(shell, 0, sh("echo x >> log; sleep 0.3")))["remote"]
    for _ in range(3):
        ssh.ask("n2", (), {**remote, "verb": "start", "folder": str(folder)})
    until(lambda: Attempt(folder).end is not None)
    assert (shell / "log").read_text() == "x\n"
    (shell.parent / "bin" / "cut").touch()
    monkeypatch.setattr(ssh, "_TRY_WAIT_S", 0.0)
    with pytest.raises(Unreachable, match="no route to host"):
        ssh._start("n2", (), {**remote, "verb": "start", "folder": str(folder)}, Stopping())


@pytest.mark.slow
def test_a_host_without_the_shared_folder_is_named(shell: Path) -> None:
    """As remote.py reports it; needs the start of Python."""
    with pytest.raises(Refused, match="SMALTI_HOME must be on a file system that all hosts share"):
        ssh.ask("n2", (), {"verb": "start", "folder": str(shell / "nowhere")})


def test_an_attempt_is_lost_if_its_host_says_so_or_two_witnesses_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_LOOK_S", 0.05)
    monkeypatch.setattr(ssh, "_POLL_S", 0.01)
    asked: list[Any] = []

    def ask(host: str, options: object, request: dict[str, Any]) -> dict[str, Any]:
        answer = asked.pop(0) if len(asked) > 1 else asked[0]
        if answer is None:
            raise Unreachable("no route to host")
        return {"running": answer}

    monkeypatch.setattr(ssh, "ask", ask)
    asked[:] = [True, None, True, None, False]
    end = Attempt(tmp_path).wait("n2", (), Stopping())
    assert end == {"code": 75, "reason": "it was killed on n2, or n2 was restarted"}
    assert (tmp_path / "stop").exists()
    monkeypatch.setattr(ssh, "_SILENT_S", 0.5)
    asked[:] = [None]
    began_s = time.monotonic()
    end = Attempt(tmp_path).wait("n2", (), Stopping())
    assert time.monotonic() - began_s > 0.5
    assert "n2 does not answer, and the run has shown no sign of life for" in end["reason"]


# ---- real sshd ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


class Fleet:
    """``smalti fleet`` on the machine of the queue."""

    def __init__(self, cluster: Hosts, work: Path) -> None:
        self.cluster, self.work = cluster, work
        self.env = {"SMALTI_HOME": str(work / "home"), "HF_TOKEN": "CANARY"}
        (work / "home").mkdir()
        lab = {"engine": "ssh", "hosts": list(cluster.names), "cores_per_host": 1, "options": list(cluster.options)}
        (work / "home" / "clusters.yaml").write_text(json.dumps({"clusters": {"lab": lab}}))

    def call(self, *arguments: str, timeout_s: float = 120) -> str:
        command = [sys.executable, "-m", "smalti", "fleet", *arguments]
        return self.cluster.call(*command, cwd=self.work, env=self.env, timeout_s=timeout_s)

    def show(self, run: str) -> dict[str, Any]:
        """What ``smalti fleet show --json`` prints, without its start of Python."""
        with database.transaction(write=False) as db:
            row = runs.get(db, run)
            return to_json(row, runs.attempts(db, row.number), [])

    def until(self, run: str, *states: str, seconds: float = 600) -> dict[str, Any]:
        end_s = time.monotonic() + seconds
        while (shown := self.show(run))["state"] not in states:
            assert time.monotonic() < end_s, (shown, self.call("events", run), self.call("logs", run))
            time.sleep(0.5)
        return shown


ENDED = ("COMPLETED", "FAILED", "STOPPED")


@pytest.mark.slow
@pytest.mark.exhaustive  # real sshd, controller and training: what a person types
def test_a_run_on_a_host_of_ssh_completes_and_another_stops_and_resumes(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "it's; touch pwned"
    work.mkdir()
    monkeypatch.setenv("SMALTI_HOME", str(work / "home"))
    write_recipe(work, one_rank("30step"))
    fleet = Fleet(cluster, work)
    launch = ("launch", "r.yaml", "--on", "lab", "--pack", "secrets=[HF_TOKEN]")
    fleet.call("cordon", "n2", "--reason", "test")
    fleet.call(*launch, "name=long", "train.duration=100000step")
    wait_for(work / "runs/long/checkpoints/latest", seconds=600)
    fleet.call("stop", "long-1", "--yes")
    stopped = fleet.until("long-1", *ENDED)
    assert (stopped["state"], stopped["cause"], stopped["attempts"][0]["code"]) == ("STOPPED", "user", 75)
    fleet.call("clone", "long-1", "name=short", "train.duration=30step", "--pack")
    short = fleet.until("short-2", *ENDED)
    assert (short["state"], short["attempts"][0]["node"]) == ("COMPLETED", "n3"), fleet.call("logs", "short-2")
    assert "done, 30 steps" in fleet.call("logs", "short-2")
    assert not list(tmp_path.rglob("pwned"))
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and "secrets" not in file.parts]
    assert not [file for file in kept if b"CANARY" in file.read_bytes()]


SCRIPT = """
trap 'echo saved >> log; exit 75' TERM
echo "begin $(hostname)" >> log
while [ ! -e finish ]; do sleep 0.1; done
echo end >> log
"""


@pytest.mark.slow
@pytest.mark.exhaustive  # the only test with a network that is cut and a host that is lost; ssh is asked after 30 s
def test_a_run_survives_a_cut_network_and_a_lost_host(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("smalti.fleet.queue.changes.this_host", lambda: "n1")
    log, name = tmp_path / "log", "it's; touch pwned"
    run = changes.add(
        name, ["/bin/sh", "-c", SCRIPT], LaunchConfig(), Room(cores=1), directory=str(tmp_path), cluster="lab",
        engine="ssh", hosts=runs.Hosts(cluster.names, 1, 0, cluster.options),
    )  # fmt: skip
    output = open(tmp_path / "controller.txt", "w")  # noqa: SIM115 - of the controller
    command = [sys.executable, "-m", "smalti.fleet.controller"]
    cluster.nodes.start("n1", command, env={"SMALTI_HOME": str(tmp_path / "home")}, output=output)

    def lines() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    def attempts() -> list[runs.Attempt]:
        with database.transaction(write=False) as db:
            return runs.attempts(db, run.number)

    until(lambda: lines() == ["begin n2"], 300)
    cluster.nodes.cut("n2")  # the run continues; only the connection is gone
    time.sleep(3)
    cluster.nodes.restore("n2")
    assert [attempt.ended_s for attempt in attempts()] == [None]

    cluster.nodes.kill("n2")  # the host is restarted
    cluster.boot("n2")
    until(lambda: lines() == ["begin n2", "begin n3"], 300)
    assert [attempt.node for attempt in attempts()] == ["n2", "n3"]
    assert attempts()[0].reason == "it was killed on n2, or n2 was restarted"

    changes.stop(run.id)
    until(lambda: runs.read(run.id).is_ended, 300)
    assert lines()[-1] == "saved"
    assert (runs.read(run.id).state, attempts()[-1].code) == ("STOPPED", 75)
    changes.resume(run.id)
    cluster.nodes.start("n1", command, env={"SMALTI_HOME": str(tmp_path / "home")}, output=output)
    (tmp_path / "finish").touch()
    until(lambda: runs.read(run.id).is_ended, 300)
    assert (runs.read(run.id).state, lines()[-1], len(attempts())) == ("COMPLETED", "end", 3)
    assert not list(tmp_path.rglob("pwned"))
    output.close()
