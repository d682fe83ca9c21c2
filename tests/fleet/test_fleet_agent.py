"""The agent with small children in place of training: who is named, which code, how fast, and that nobody stays."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smalti.base.errors import RetryableError
from smalti.fleet import agent
from smalti.fleet.agent import judge, record
from smalti.track.run import RunFolder

DRIVER = """
import sys
from smalti.fleet import agent
from smalti.track.run import RunFolder
path, ranks, stop_s, child = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
folder = RunFolder.join(path, 0)
outcome = agent.run([sys.executable, child, path], ranks=ranks, folder=folder, threads=1, grace_s=0.5, stop_s=stop_s)
agent.announce(outcome)
sys.exit(outcome.code)
"""

DRIVERS: list[subprocess.Popen[str]] = []  # those that the present test has started

HEAD = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
folder = sys.argv[1]
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
"""

SAVES = """
def leave(number, frame):
    if rank == 0:
        with open(f"{folder}/events.jsonl", "a") as file:
            file.write('{"event": "checkpoint_saved", "attempt": 0, "step": 7}\\n')
    open(f"{folder}/saved-{rank}", "w").close()
    os._exit(75 if number == signal.SIGTERM else 130)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
open(f"{folder}/ready-{rank}", "w").close()
time.sleep(60)
"""

UNSAVED = """
def leave(number, frame):
    os._exit(CODE)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
open(f"{folder}/ready-{rank}", "w").close()
time.sleep(60)
"""


def script(tmp_path: Path, body: str, head: str = HEAD) -> str:
    path = tmp_path / "child.py"
    path.write_text(head + textwrap.dedent(body))
    return str(path)


def run(tmp_path: Path, body: str, ranks: int = 2, **options) -> tuple[agent.Outcome, RunFolder]:
    folder = RunFolder.join(tmp_path, 0)
    command = [sys.executable, script(tmp_path, body), str(tmp_path)]
    return agent.run(command, ranks=ranks, folder=folder, threads=1, **{"grace_s": 0.5, **options}), folder


@pytest.fixture(autouse=True)
def _no_driver_stays() -> Iterator[None]:
    yield
    while DRIVERS:
        with DRIVERS.pop() as process:  # closes its pipe and waits for it
            process.kill()


def drive(tmp_path: Path, body: str, ranks: int = 2, stop_s: float = 10.0) -> subprocess.Popen[str]:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [
        sys.executable,
        str(tmp_path / "driver.py"),
        str(tmp_path),
        str(ranks),
        str(stop_s),
        script(tmp_path, body),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    DRIVERS.append(process)
    return process


def wait_for(*paths: Path, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not all(
        path.exists() and (path.suffix or path.name.startswith(("ready", "saved")) or path.read_text())
        for path in paths
    ):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids(tmp_path: Path, ranks: int = 2) -> list[int]:
    wait_for(*(tmp_path / f"pid-{rank}" for rank in range(ranks)))
    return [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(ranks)]


def test_all_done_is_0_and_the_ranks_know_their_place(tmp_path):
    outcome, folder = run(
        tmp_path,
        """
        keys = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SMALTI_ATTEMPT OMP_NUM_THREADS"
        open(f"{folder}/place-{rank}", "w").write(" ".join(os.environ[key] for key in keys.split()))
        """,
        ranks=3,
    )
    assert outcome.code == 0
    places = [(tmp_path / f"place-{rank}").read_text().split() for rank in range(3)]
    port = places[0][5]
    assert places == [[str(r), str(r), "3", "3", "127.0.0.1", port, "0", "1"] for r in range(3)]
    assert [event["event"] for event in folder.events()] == ["attempt_started", "attempt_ended"]
    assert folder.status()["state"] == "done"


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_others_end_with_it(tmp_path, victim):
    started = time.monotonic()
    outcome, folder = run(
        tmp_path,
        f"""
        print("before the end", flush=True)
        if rank == {victim}:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        ranks=3,
    )
    assert time.monotonic() - started < 8
    assert outcome.code == 75
    assert not outcome.printed
    assert outcome.reason == f"rank {victim} (pid {pids(tmp_path)[victim]}) was killed by SIGKILL after step 0"
    if victim:
        assert outcome.details == ("before the end",)
    died = next(event for event in folder.events() if event["event"] == "rank_died")
    assert (died["rank"], died["signal"], died["attempt"]) == (victim, "SIGKILL", 0)
    assert not any(is_alive(pid) for pid in pids(tmp_path, 3))
    assert folder.status()["state"] == "failed"
    assert folder.status()["reason"] == outcome.reason


@pytest.mark.slow
def test_the_signal_is_blamed_not_the_ranks_that_lost_their_peer(tmp_path):
    outcome, _ = run(
        tmp_path,
        """
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(76 if rank == 0 else 1)
        """,
        ranks=3,
    )
    assert outcome.code == 75
    assert outcome.reason.startswith("rank 2 (pid")


def test_ranks_that_lost_each_other_are_75_and_nobody_is_blamed(tmp_path):
    outcome, folder = run(tmp_path, "sys.exit(76)")
    assert (outcome.code, outcome.printed) == (75, False)
    assert outcome.reason == "the ranks lost the connection to each other after step 0"
    assert [event["event"] for event in folder.events()] == ["attempt_started", "attempt_ended"]
    ended = folder.events()[-1]
    assert (ended["code"], ended["codes"]) == (75, [75] * len(ended["codes"]))
    assert "76" not in ended["reason"] + folder.status()["reason"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", [1, 2, 3, 75])
def test_a_code_that_all_ranks_agree_on_is_the_code(tmp_path, code):
    outcome, _ = run(tmp_path, f"sys.exit({code})")
    assert (outcome.code, outcome.printed) == (code, True)


@pytest.mark.slow
def test_one_rank_with_a_user_error_is_2_with_its_log(tmp_path, capsys):
    outcome, _ = run(tmp_path, "print('error: bad value') if rank else time.sleep(60)\nsys.exit(2)")
    assert outcome.code == 2
    agent.announce(outcome)
    text = capsys.readouterr().err
    assert "rank 1" in text
    assert "error: bad value" in text


def test_a_code_nobody_knows_is_75(tmp_path):
    assert run(tmp_path, "sys.exit(41 if rank else 0)")[0].code == 75


def test_output_of_the_other_ranks_goes_to_their_logs_and_appends(tmp_path):
    _, folder = run(tmp_path, "print('out', rank); print('err', rank, file=sys.stderr)")
    assert folder.rank_log(1).read_text().splitlines() == ["out 1", "err 1"]
    assert folder.rank_log(0).read_text() == ""


@pytest.mark.slow
def test_a_taken_port_starts_the_ranks_again(tmp_path):
    outcome, folder = run(
        tmp_path,
        """
        mark = f"{folder}/tried-{rank}"
        if not os.path.exists(mark):
            open(mark, "w").close()
            print("listen failed: EADDRINUSE")
            sys.exit(75)
        """,
    )
    assert outcome.code == 0
    assert [event["event"] for event in folder.events()] == ["attempt_started", "attempt_ended"]


@pytest.mark.slow
def test_children_of_a_rank_go_with_it(tmp_path):
    outcome, _ = run(
        tmp_path,
        """
        import subprocess
        if rank == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open(f"{folder}/pid-9", "w").write(str(child.pid))
            time.sleep(60)
        while not os.path.exists(f"{folder}/pid-9"):
            time.sleep(0.02)
        sys.exit(1)
        """,
    )
    assert outcome.code == 1
    time.sleep(0.1)
    assert not is_alive(int((tmp_path / "pid-9").read_text()))


def test_children_of_a_rank_that_has_died_go_too(tmp_path):
    outcome, _ = run(
        tmp_path,
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(f"{folder}/pid-9", "w").write(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ranks=1,
    )
    assert outcome.code == 75
    time.sleep(0.1)
    assert not is_alive(int((tmp_path / "pid-9").read_text()))


def test_sigterm_is_passed_on_and_the_ranks_save(tmp_path):
    process = drive(tmp_path, SAVES)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


@pytest.mark.slow
def test_the_first_ctrl_c_is_passed_on_once(tmp_path):
    process = drive(tmp_path, SAVES)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert (tmp_path / "saved-1").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_whose_checkpoint_does_not_fit_is_75(tmp_path, number):
    process = drive(tmp_path, UNSAVED.replace("CODE", "75"))
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(number)
    assert process.wait(10) == 75
    status = RunFolder.join(tmp_path, 0).status()
    assert status["state"] == "stopped"
    assert "nothing of this attempt was saved" in status["reason"]


@pytest.mark.slow
def test_130_of_ranks_that_did_not_save_is_143(tmp_path):
    process = drive(tmp_path, UNSAVED.replace("CODE", "130"))
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 143
    assert "nothing of this attempt was saved" in process.stderr.read()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_the_ranks_train_is_143_and_says_so(tmp_path, number):
    body = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if rank == 0 else signal.SIG_IGN)
    open(f"{folder}/ready-{rank}", "w").close()
    while rank == 0 or not os.path.exists(f"{folder}/ready-0"):
        time.sleep(0.02)
    while os.path.exists(f"/proc/{open(folder + '/pid-0').read()}/fd/0"):
        time.sleep(0.02)
    sys.exit(76)  # it has lost rank 0
    """
    process = drive(tmp_path, body)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(number)
    assert process.wait(10) == 143
    text = process.stderr.read()
    assert f"stopped by {number.name} before the first step; nothing was saved" in text
    assert "it starts from the beginning" in text


@pytest.mark.slow
def test_an_outcome_that_cannot_be_written_down_is_returned_all_the_same(tmp_path, monkeypatch, caplog):
    def full(*_: object, **__: object) -> None:
        raise RetryableError("the disk is full")

    folder = RunFolder.join(tmp_path, 0)
    monkeypatch.setattr(record, "write_end", full)
    assert run(tmp_path, "sys.exit(75)")[0].code == 75
    monkeypatch.undo()
    monkeypatch.setattr(RunFolder, "set_status", full)
    assert run(tmp_path, "sys.exit(75)")[0].code == 75
    assert run(tmp_path, "pass")[0].code == 0
    assert folder.status() == {}
    assert "is not recorded: the disk is full" in caplog.text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_disk_that_is_full_at_the_start_starts_nobody(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(RetryableError, match="No space left"):
        run(tmp_path, "pass")
    assert not (tmp_path / "pid-0").exists()


@pytest.mark.slow
def test_the_second_ctrl_c_kills_at_once(tmp_path):
    deaf = SAVES.replace("os._exit(75 if number == signal.SIGTERM else 130)", "pass").replace(
        "time.sleep(60)", "end = time.time() + 60\nwhile time.time() < end: time.sleep(0.1)"
    )
    process = drive(tmp_path, deaf)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "saved-0", tmp_path / "saved-1")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - started < 5
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    text = process.stderr.read()
    assert text.startswith("error: stopped at once by the second Ctrl-C after step 0; nothing of this run was saved")
    assert "hint: run the same command again" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_message_begins_on_a_line_of_its_own_with_the_cursor_shown(monkeypatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal("step 3/40")
    screen.seek(0, io.SEEK_END)
    monkeypatch.setattr(sys, "stderr", screen)
    agent.announce(agent.Outcome(75, "rank 0 was killed"))
    assert screen.getvalue() == "step 3/40\n\x1b[?25herror: rank 0 was killed\n"


def test_the_second_ctrl_c_names_the_checkpoint_that_there_is(tmp_path):
    (tmp_path / "checkpoints/step-00000020").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000020/COMPLETE").write_text("")
    outcome = judge._killed_at_once(RunFolder.join(tmp_path, 0), 27)
    assert "after step 27; nothing since the checkpoint of step 20 was saved" in outcome.reason
    assert "continues from the newest checkpoint" in outcome.hint


@pytest.mark.slow
def test_ranks_that_do_not_save_in_time_are_143(tmp_path):
    deaf = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/ready-{rank}", "w").close()
    time.sleep(60)
    """
    process = drive(tmp_path, deaf, stop_s=0.5)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    who = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in enumerate(pids(tmp_path)))
    assert f"{who} did not end in time" in process.stderr.read()


@pytest.mark.slow
def test_sigterm_before_the_ranks_listen_is_143_and_quick(tmp_path):
    process = drive(tmp_path, "open(f'{folder}/ready-{rank}', 'w').close()\ntime.sleep(60)")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
def test_a_killed_agent_leaves_no_rank_behind(tmp_path):
    process = drive(tmp_path, "open(f'{folder}/ready-{rank}', 'w').close()\ntime.sleep(60)")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    ranks = pids(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in ranks)


def test_a_command_that_cannot_start_leaves_nobody(tmp_path):
    with pytest.raises(FileNotFoundError):
        agent.run(["/nonexistent/python"], ranks=2, folder=RunFolder.join(tmp_path, 0), threads=1)


def test_signals_after_the_ranks_are_gone_leave_the_exit_code_alone(tmp_path: Path) -> None:
    """Work at the end, such as reporting to trackers, may take seconds."""

    def send(outcome: agent.Outcome) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    outcome, _ = run(tmp_path, "sys.exit(75)", ranks=1, at_end=send)
    assert outcome.code == 75
