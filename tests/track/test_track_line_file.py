"""Lines are whole or absent on a full or failing disk or after half a line; two processes never mix theirs."""

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smalti.base import store
from smalti.base.errors import RetryableError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.track import line_file
from smalti.track.events import EventLog
from smalti.track.line_file import LineFile, disk_trouble, read_lines
from smalti.track.run import RunFolder

FILLS_UP = """
import resource, sys
from smalti.base.errors import RetryableError
from smalti.track.line_file import LineFile
log = LineFile(sys.argv[1])
log.write({"n": 0, "text": "x" * 50})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # the next line fits half
try:
    log.write({"n": 1, "text": "x" * 50})
except RetryableError as error:
    print(error.message)
with open(sys.argv[1], "rb") as file:
    print(len(file.read()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write({"n": 2})
"""

TWO_WRITERS = """
import sys
from smalti.track.line_file import LineFile
log = LineFile(sys.argv[1])
for n in range(300):
    log.write({"who": int(sys.argv[2]), "n": n, "text": "y" * (n * 37 % 5000)})
"""

RUN = {
    "name": "t",
    "model": {"preset": "mpt-125m"},
    "data": {"sources": {"a": "x"}, "seq_len": 8, "stages": [{"weights": {"a": 1}}]},
    "train": {"duration": "10step", "global_batch_tokens": 64, "optimizer": {"lr": 3e-3}},
}


def test_half_a_line_is_removed_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", FILLS_UP, str(path)], capture_output=True, text=True, check=True)
    message, size = done.stdout.splitlines()
    assert message == f"{path} could not be written: File too large"
    first = {"n": 0, "text": "x" * 50}
    assert int(size) == len(json.dumps(first)) + 1
    assert list(read_lines(path)) == [first, {"n": 2}]


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    write = os.write
    log = LineFile(tmp_path / "lines.jsonl")
    monkeypatch.setattr(line_file.os, "write", lambda file, data: write(file, bytes(data)[:7]))
    for n in range(3):
        log.write({"n": n, "text": "twenty characters..."})
    monkeypatch.undo()
    log.close()
    assert [line["n"] for line in read_lines(tmp_path / "lines.jsonl")] == [0, 1, 2]


def test_a_line_torn_by_another_process_does_not_damage_the_next_one(tmp_path):
    log = LineFile(tmp_path / "lines.jsonl")
    log.write({"n": 0})
    with open(tmp_path / "lines.jsonl", "a") as file:
        file.write('{"n": 1, "te')
    log.write({"n": 2})
    log.close()
    assert [line["n"] for line in read_lines(tmp_path / "lines.jsonl")] == [0, 2]


def test_two_processes_never_mix_their_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    both = [subprocess.Popen([sys.executable, "-c", TWO_WRITERS, str(path), str(who)]) for who in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    lines = list(read_lines(path))
    assert all([line["n"] for line in lines if line["who"] == who] == list(range(300)) for who in range(2))
    assert len(path.read_text().splitlines()) == 600


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_75_with_what_to_do():
    log = LineFile("/dev/full")
    with pytest.raises(RetryableError, match="/dev/full could not be written: No space left on device") as caught:
        log.write({"n": 1})
    log.close()
    assert caught.value.exit_code == 75
    assert "free space" in str(caught.value.hint)
    assert "run the same command again" in str(caught.value.hint)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_what_a_disk_does_is_75_and_what_we_do_stays_a_bug(number):
    with pytest.raises(RetryableError), disk_trouble("p"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), disk_trouble("p"):
        raise FileNotFoundError(errno.ENOENT, "gone")


def open_run(tmp_path: Path) -> RunFolder:
    loaded = from_dict(RunConfig, {**RUN, "folder": str(tmp_path / "t")})
    return RunFolder.open(loaded.config, loaded.origins, argv=["smalti"])


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_at_the_start_leaves_a_run_that_can_be_started_again(tmp_path, monkeypatch):
    write_text = store.write_text

    def all_but_the_config(path, text):
        full() if str(path).endswith("config.yaml") else write_text(path, text)

    monkeypatch.setattr(store, "write_text", all_but_the_config)
    with pytest.raises(RetryableError, match="No space left"):
        open_run(tmp_path)
    monkeypatch.undo()
    run = open_run(tmp_path)
    assert run.attempt == 0
    assert run.provenance()["command"] == ["smalti"]
    run.close()


def test_a_status_that_does_not_fit_is_75_and_the_previous_one_remains(tmp_path, monkeypatch):
    run = open_run(tmp_path)
    run.set_status("running", step=3)
    monkeypatch.setattr(store.os, "replace", full)
    with pytest.raises(RetryableError, match=r"status\.json could not be written"):
        run.set_status("running", step=4)
    monkeypatch.undo()
    assert run.status()["step"] == 3
    assert [path.name for path in run.path.glob(".*tmp")] == []
    run.close()


def test_metrics_cut_on_a_full_disk_are_75_and_as_they_were(tmp_path, monkeypatch):
    log = EventLog(tmp_path)
    log.write("eval", step=1)
    log.write("eval", step=2)
    log.close()
    monkeypatch.setattr(store.os, "replace", full)
    with pytest.raises(RetryableError):
        line_file.rewrite(tmp_path / "events.jsonl", lambda line: line["step"] < 2)
    monkeypatch.undo()
    assert [line["step"] for line in read_lines(tmp_path / "events.jsonl")] == [1, 2]


def test_threads_do_not_mix_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's own lock keeps processes apart; threads of one share the descriptor and pass it."""
    inside = [0]

    def slow(file: int, data: bytes) -> None:
        inside[0] += 1
        assert inside[0] == 1
        time.sleep(0.02)
        inside[0] -= 1

    monkeypatch.setattr(line_file, "_write_all", slow)
    file = line_file.LineFile(tmp_path / "lines.jsonl")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: file.write({"step": number}), range(8)))
    file.close()
