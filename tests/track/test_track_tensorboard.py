"""Event files that TensorBoard's own reader reads back: every value once, also after a crash and a resume."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import CONFIG, write_run

from smalti.config.track import TrackConfig
from smalti.track import trackers
from smalti.track.events import EventLog
from smalti.track.run import RunFolder
from smalti.track.sinks.jsonl import MetricsLog, read_metrics

pytest.importorskip("tensorboardX")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

TRACK = TrackConfig(sinks=("tensorboard",))


def read(folder: Path) -> Any:
    result = accumulator.EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    result.Reload()
    return result


def attempt(folder: Path, steps: range, *, resumed_step: int, number: float, state: str | None = "done") -> None:
    """One process life: cut the metrics, follow, log ``steps``; without a state it dies before the end."""
    metrics = MetricsLog(folder, resumed_step=resumed_step)
    feeds = trackers.follow(TRACK, folder, EventLog(folder)) if state is not None else []
    for step in steps:
        metrics.write(step, {"loss/train/total": number + step, "system/cpu_frac": math.nan})
    metrics.close()
    if state is not None:
        trackers.close(feeds, state)
        return
    (feed,) = trackers.follow(TRACK, folder, EventLog(folder))
    end_s = time.monotonic() + 10
    while feed._lines.offset < (folder / "metrics.jsonl").stat().st_size:  # all but the last words
        assert time.monotonic() < end_s
        time.sleep(0.01)


def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_values_steps_times_and_config(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    attempt(folder, range(1, 31), resumed_step=-1, number=0.5)
    result = read(folder)
    scalars = result.Scalars("loss/train/total")
    assert [(one.step, one.value) for one in scalars] == [(step, step + 0.5) for step in range(1, 31)]
    assert all(math.isnan(one.value) for one in result.Scalars("system/cpu_frac"))
    assert len(result.Scalars("system/cpu_frac")) == 30
    text = result.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global_batch_tokens: 8192" in text
    assert read_metrics(folder)[0]["time"].startswith("20")


@pytest.mark.filterwarnings("ignore:Detected out of order")
def test_steps_repeated_after_a_crash_are_sent_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    attempt(folder, range(1, 31), resumed_step=-1, number=0.5, state=None)
    assert len(read(folder).Scalars("loss/train/total")) == 30
    attempt(folder, range(21, 41), resumed_step=20, number=0.75)
    result = [(one.step, one.value) for one in read(folder).Scalars("loss/train/total")]
    assert result == [(step, step + (0.5 if step <= 20 else 0.75)) for step in range(1, 41)]


@pytest.mark.filterwarnings("ignore:Detected out of order")
def test_the_last_lines_of_a_rank_that_was_killed_are_sent_by_its_parent(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "config.yaml").write_text(CONFIG + "track: {sinks: [tensorboard]}\n")
    attempt(folder, range(1, 31), resumed_step=-1, number=0.5, state=None)
    metrics = MetricsLog(folder)
    metrics.write(31, {"loss/train/total": 31.5})
    run = RunFolder(folder, 0)
    trackers.complete(run)
    assert [one.step for one in read(folder).Scalars("loss/train/total")] == list(range(1, 32))
    files = len(list((folder / "tb").iterdir()))
    trackers.complete(run)
    assert len(list((folder / "tb").iterdir())) == files  # it is closed


def test_an_attempt_sends_what_the_previous_one_lacked(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=50)  # trained without a tracker
    assert trackers.send(folder, ["track.sinks=[tensorboard]"]) == {"tensorboard": 0}
    assert [one.step for one in read(folder).Scalars("loss/train/total")] == list(range(1, 51))
    assert trackers.send(folder, ["track.sinks=[tensorboard]"]) == {"tensorboard": 0}  # nothing twice
    assert len(read(folder).Scalars("loss/train/total")) == 50


def test_a_removed_folder_is_written_again(tmp_path: Path) -> None:
    import shutil

    folder = write_run(tmp_path / "demo", steps=20)
    trackers.send(folder, ["track.sinks=[tensorboard]"])
    shutil.rmtree(folder / "tb")
    trackers.send(folder, ["track.sinks=[tensorboard]"])
    assert len(read(folder).Scalars("loss/train/total")) == 20
