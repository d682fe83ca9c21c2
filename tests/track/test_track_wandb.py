"""W&B offline: the files in the folder, read by the rules of the format. No request was sent to the site."""

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import CONFIG

from smalti.config.track import TrackConfig, WandbConfig
from smalti.track import trackers
from smalti.track.events import EventLog
from smalti.track.sinks.jsonl import MetricsLog

pytest.importorskip("wandb")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCK = 32768
HEADER = 7


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a ``.wandb`` file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # full, last; 2 and 3 are the first and the middle of a longer one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def attempt(folder: Path, track: TrackConfig, steps: range, resumed_step: int, state: str) -> None:
    metrics = MetricsLog(folder, resumed_step=resumed_step)
    feeds = trackers.follow(track, folder, EventLog(folder))
    for step in steps:
        metrics.write(step, {"loss/train/total": step / 4, "system/cpu_frac": math.nan})
    trackers.close(feeds, state)


KILLED = """
import os, signal, sys, time
from pathlib import Path
from smalti.config.track import TrackConfig
from smalti.track import trackers
from smalti.track.events import EventLog
from smalti.track.sinks.jsonl import MetricsLog
folder = Path(sys.argv[1])
metrics = MetricsLog(folder, resumed_step=-1)
for step in range(1, 301):
    metrics.write(step, {"loss/train/total": step / 4})
feed = trackers.follow(TrackConfig(sinks=("wandb",)), folder, EventLog(folder))[0]
while feed._lines.offset < (folder / "metrics.jsonl").stat().st_size:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_what_its_process_lost_by_a_kill_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.yaml").write_text(CONFIG)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    record = json.loads((tmp_path / "trackers/wandb.json").read_text())
    assert (record["open"], record["sent"]["loss/train/total"]) == (True, 300)
    time.sleep(1.1)
    attempt(tmp_path, TrackConfig(sinks=("wandb",)), range(251, 401), 250, "done")
    rows = [row for row in history(tmp_path) if "loss/train/total" in row]
    assert {row["time/batch"] for row in rows} == set(range(1, 401))
    assert all(row["loss/train/total"] == row["time/batch"] / 4 for row in rows)
    assert len(rows) < 400 + 150  # its process may still have written some while we looked
    print(f"{len(rows) - 400} lines twice")


def test_a_run_of_two_attempts_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "not-this")
    (tmp_path / "config.yaml").write_text(CONFIG)
    track = TrackConfig(sinks=("wandb",), wandb=WandbConfig(project="tiles"))
    attempt(tmp_path, track, range(1, 13), -1, "stopped")
    time.sleep(1.1)  # the folders of attempts are named by the second
    attempt(tmp_path, track, range(9, 21), 8, "done")  # steps 9 to 12 are done again
    rows = history(tmp_path)
    assert [row["time/batch"] for row in rows] == list(range(1, 21))
    assert [row["loss/train/total"] for row in rows] == [step / 4 for step in range(1, 21)]
    assert {str(row["system/cpu_frac"]).lower() for row in rows} == {"nan"}
    result = [record.run for path in tmp_path.glob("wandb/offline-run-*/*.wandb") for record in records(path)
             if record.WhichOneof("record_type") == "run"]  # fmt: skip
    assert {(run.run_id, run.project, run.display_name, run.host) for run in result} == {
        (json.loads((tmp_path / "trackers/wandb.json").read_text())["run_id"], "tiles", "demo", "-")
    }
    config = {item.key: json.loads(item.value_json) for item in result[0].config.update}
    assert config["train.global_batch_tokens"] == 8192
