"""The copying of metrics.jsonl: order, outages, values already sent, the end of an attempt, errors."""

import json
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from synthetic_run import write_run

from smalti.base.errors import UserError
from smalti.config.track import SinkName, TrackConfig
from smalti.track import trackers
from smalti.track.events import EventLog, read_events
from smalti.track.run import RunFolder
from smalti.track.sinks import feed as feed_module
from smalti.track.sinks.feed import Feed, Row
from smalti.track.sinks.jsonl import MetricsLog
from smalti.track.sinks.run_info import read_run_info


class FakeTracker:
    """Stores the rows; raises while ``down``."""

    name = "fake"
    place: Mapping[str, str] = {"page": "http://fake/1"}

    def __init__(self, has: Mapping[str, int] | None = None) -> None:
        self.has, self.rows, self.ended, self.down, self.asked = has or {}, list[Row](), "", False, 0
        self.end_s: float | None = None

    def check(self) -> None:
        pass

    def open(self) -> Mapping[str, int]:
        self._answer()
        return self.has

    def send(self, rows: Sequence[Row]) -> None:
        self._answer()
        self.rows += rows

    def close(self, state: str, end_s: float | None) -> None:
        self._answer()
        self.ended, self.end_s = state, end_s

    def _answer(self) -> None:
        self.asked += 1
        if self.down:
            raise ConnectionError("no route\nmore")

    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


def started(tracker: FakeTracker, folder: Path, *, must_answer: bool = True) -> tuple[Feed, MetricsLog]:
    folder.mkdir(exist_ok=True)
    metrics = MetricsLog(folder)
    feed = Feed(tracker, folder, EventLog(folder), every_s=0.02)
    feed.start(must_answer=must_answer)
    return feed, metrics


def wait(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder)]


def test_lines_arrive_in_order_with_their_times(tmp_path: Path) -> None:
    tracker = FakeTracker()
    feed, metrics = started(tracker, tmp_path)
    for step in range(1, 40):
        metrics.write(step, {"loss/train/total": float(step), "moe/load_imbalance": math.nan})
    metrics.write(40, {"moe/load/layer0": [0.5, 1.5]})  # lists are not sent
    assert feed.close("done", wait_s=5) == 0
    assert tracker.steps() == list(range(1, 40))
    assert (tracker.ended, tracker.end_s) == ("done", pytest.approx(tracker.rows[-1].time_s, abs=1))
    assert tracker.rows[0].values["loss/train/total"] == 1.0
    assert math.isnan(tracker.rows[0].values["moe/load_imbalance"])
    assert abs(tracker.rows[0].time_s - time.time()) < 60
    assert kinds(tmp_path) == ["tracker_opened"]


def test_an_outage_loses_nothing_and_is_reported_once(tmp_path: Path) -> None:
    tracker = FakeTracker()
    feed, metrics = started(tracker, tmp_path)
    metrics.write(1, {"loss/train/total": 1.0})
    wait(lambda: tracker.steps() == [1])
    tracker.down = True
    metrics.write(2, {"loss/train/total": 1.0})
    wait(lambda: tracker.asked >= 5)
    metrics.write(3, {"loss/train/total": 1.0})
    tracker.down = False
    wait(lambda: tracker.steps() == [1, 2, 3], 5)
    feed.close("done", wait_s=5)
    assert kinds(tmp_path) == ["tracker_opened", "tracker_lost", "tracker_back"]
    assert read_events(tmp_path)[1]["reason"] == "ConnectionError: no route"


def test_the_end_waits_for_a_limited_time_and_reports_what_is_missing(tmp_path: Path) -> None:
    tracker = FakeTracker()
    feed, metrics = started(tracker, tmp_path)
    tracker.down = True
    for step in range(1, 8):
        metrics.write(step, {"loss/train/total": 1.0})
    before_s = time.monotonic()
    assert feed.close("done", wait_s=0.5) == 7
    assert time.monotonic() - before_s < 3
    assert read_events(tmp_path)[-1]["lines"] == 7
    assert tracker.ended == ""


@pytest.mark.slow
def test_a_tracker_that_never_comes_back_from_a_request_stops_nobody(tmp_path: Path) -> None:
    tracker = FakeTracker()
    feed, metrics = started(tracker, tmp_path)
    tracker.send = lambda rows: time.sleep(20)  # type: ignore[method-assign]
    metrics.write(1, {"loss/train/total": 1.0})
    before_s = time.monotonic()
    metrics.write(2, {"loss/train/total": 1.0})
    assert time.monotonic() - before_s < 0.1
    assert feed.close("done", wait_s=0.2) == 2
    assert time.monotonic() - before_s < 5


def test_what_the_tracker_has_is_not_sent_again(tmp_path: Path) -> None:
    tracker = FakeTracker({"loss/train/total": 3, "ckpt/save_s": 2})
    metrics = MetricsLog(tmp_path)
    for step in range(1, 6):
        metrics.write(step, {"loss/train/total": float(step)})
        metrics.write(step, {"ckpt/save_s": 1.0})
    feed, _ = started(tracker, tmp_path)
    feed.close("done", wait_s=5)
    assert [(row.step, *row.values) for row in tracker.rows] == [
        (3, "ckpt/save_s"), (4, "loss/train/total"), (4, "ckpt/save_s"), (5, "loss/train/total"), (5, "ckpt/save_s"),
    ]  # fmt: skip


def test_a_torn_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    tracker = FakeTracker()
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": "x", "loss/train/total": 1}\n{"step": 2, "loss/tr')
    feed, _ = started(tracker, tmp_path)
    wait(lambda: tracker.steps() == [1])
    with path.open("a") as file:
        file.write(
            'ain/total": 2}\nnot json\n[]\n{"step": "x"}\n{"step": 3, "loss/train/total": null, "note": "text"}\n'
        )
    assert feed.close("done", wait_s=5) == 0
    assert tracker.steps() == [1, 2, 3]
    assert list(tracker.rows[-1].values) == ["loss/train/total"]


def test_only_the_first_contact_must_answer(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracker.down = True
    with pytest.raises(ConnectionError):
        started(tracker, tmp_path)
    feed, metrics = started(tracker, tmp_path, must_answer=False)
    metrics.write(1, {"loss/train/total": 1.0})
    tracker.down = False
    wait(lambda: tracker.steps() == [1])
    feed.close("stopped", wait_s=5)
    assert (tracker.ended, kinds(tmp_path)) == ("stopped", ["tracker_lost", "tracker_opened", "tracker_back"])


def test_a_long_file_is_sent_in_pieces(tmp_path: Path) -> None:
    tracker = FakeTracker()
    lines = [
        json.dumps({"step": step, "loss/train/total": 1.0}) + "\n" for step in range(feed_module._CHUNK_LINES * 3 + 7)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    feed, _ = started(tracker, tmp_path)
    assert feed.close("done", wait_s=5) == 0
    assert tracker.steps() == list(range(len(lines)))
    assert tracker.asked >= 5  # open, four pieces, close


def test_the_info_of_a_run_has_no_secret(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / "config.yaml").write_text(
        "name: demo\ndata:\n  sources: {a: 's3://key:word@host/a'}\n  stages:\n  - weights: {a: 1}\n"
        "x:\n  api_key: abc\n"
    )
    (folder / "provenance.json").write_text(
        json.dumps({"smalti": "0.1", "git": {"commit": "c0ffee", "dirty": True}, "packages": {"torch": "2.13"},
                    "command": ["smalti", "train", "--api_key=abc"]})
    )  # fmt: skip
    (folder / "logs/attempt-1").mkdir(parents=True)
    (folder / "logs/attempt-1/config.yaml").write_text("name: demo\ndata:\n  sources: {a: here}\n")
    info = read_run_info(folder)
    told = f"{info.params} {info.tags} {info.config_text}"
    assert "word" not in told
    assert "abc" not in f"{info.params} {info.tags}"
    assert info.params["data.stages.0.weights.a"] == 1
    assert info.tags["smalti.commit"] == "c0ffee"
    assert info.tags["smalti.params_total"] == "6100000"
    assert info.tags["smalti.changed_in_attempt_1"].startswith("data.sources.a: s3://***@host/a -> here")
    assert info.last_step() == 600


@pytest.mark.slow
def test_a_resumed_run_does_not_wait_for_its_tracker(tmp_path: Path) -> None:
    """Neither before its first step, nor at its end for longer than the limit."""
    tracker = FakeTracker()
    tracker.open = lambda: time.sleep(20)  # type: ignore[method-assign, assignment, return-value]
    before_s = time.monotonic()
    feed, _ = started(tracker, tmp_path, must_answer=False)
    assert time.monotonic() - before_s < 0.5
    feed.close("failed", wait_s=0.1)
    assert time.monotonic() - before_s < 3


def test_old_lines_do_not_hold_up_new_ones(tmp_path: Path) -> None:
    """A resumed run skips all rows that the tracker has at once, not one chunk per interval."""
    old = feed_module._CHUNK_LINES * 20
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss/train/total": 1.0}) + "\n" for step in range(old))
    )
    tracker = FakeTracker({"loss/train/total": old - 1})
    metrics = MetricsLog(tmp_path)
    metrics.write(old, {"loss/train/total": 1.0})
    feed = Feed(tracker, tmp_path, EventLog(tmp_path), every_s=60)
    feed.start(must_answer=False)
    wait(lambda: tracker.steps() == [old])
    time.sleep(0.2)
    assert tracker.asked == 2  # open and send: where nothing is new it waits
    feed.close("done", wait_s=5)


@pytest.mark.slow
def test_trackers_that_are_down_are_waited_for_together(tmp_path: Path) -> None:
    feeds = []
    for number in range(3):
        tracker = FakeTracker()
        feed, metrics = started(tracker, tmp_path / str(number))
        tracker.down = True
        metrics.write(1, {"loss/train/total": 1.0})
        feeds.append(feed)
    before_s = time.monotonic()
    trackers.close(feeds, "failed")
    assert time.monotonic() - before_s < 2.4  # what the parent of the ranks gives rank 0 after a death
    assert [read_events(tmp_path / str(number))[-1]["event"] for number in range(3)] == ["tracker_behind"] * 3


class Hangs:
    """An MLflow server that takes requests and never answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://bob:hunter2@127.0.0.1:{self.socket.getsockname()[1]}"


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose rank 0 died while its MLflow server hangs; there is a login in the server's address."""
    pytest.importorskip("mlflow")
    server = Hangs()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = write_run(tmp_path / "demo", steps=5)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "track: {sinks: [mlflow]}\n")
    (folder / "trackers").mkdir()
    record = {"uri": server.uri.replace("bob:hunter2", "***"), "run_id": "a" * 32, "open": True}
    (folder / "trackers/mlflow.json").write_text(json.dumps(record))
    yield folder
    server.socket.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_login_in_the_address_is_never_written(
    tracked: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_END_S", 2.0)
    trackers.complete(RunFolder(tracked, 2))
    said = "\n".join(
        [*caplog.messages, json.dumps(read_events(tracked)), *trackers.publish(tracked, tracked / "config.yaml", "x")]
    )
    assert "tracker_lost" in said
    assert "***@127.0.0.1" in said
    assert "is not uploaded" in said
    assert "hunter2" not in said


@pytest.mark.slow
def test_the_parent_does_not_wait_again_where_rank_0_has(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_start", lambda *given: pytest.fail("a tracker was asked"))
    EventLog(tracked, 2).write("tracker_behind", tracker="mlflow", lines=5)
    before = read_events(tracked)
    trackers.complete(RunFolder(tracked, 2))
    assert read_events(tracked) == before


@pytest.mark.slow
def test_an_error_at_the_end_of_an_attempt_is_a_warning(tracked: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tracked / "trackers/mlflow.json").write_text("{")
    trackers.complete(RunFolder(tracked, 2))
    assert "the end of the attempt was not sent to the trackers" in caplog.text


def test_a_folder_that_is_no_attempt_stops_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=5)
    (folder / "logs/attempt-0.bak").mkdir(parents=True)
    assert read_run_info(folder).name == "demo"


def test_an_attempt_without_the_tracker_leaves_it(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.Mlflow, "publish", lambda *given: "uploaded")
    assert trackers.publish(tracked, tracked, "x") == ["uploaded"]
    later = tracked / "logs/attempt-7"
    later.mkdir(parents=True)
    (later / "config.yaml").write_text((tracked / "config.yaml").read_text().replace("[mlflow]", "[]"))
    assert trackers.publish(tracked, tracked, "x") == []


def test_neither_home_nor_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    folder = write_run(tmp_path / "demo", steps=5)
    (folder / "config.yaml").write_text(
        "name: demo\napi_key: sk-12345 two\nhf_token: hf_abc\nblobs:\n- https://a.net/c?sv=1&sig=SIGNED\n"
        "folder: /srv/people/ada/runs\nother: [{password: 12345}, /home/bob/x]\nseed: 3\n"
    )
    made_by = {"command": ["/srv/people/ada/bin/smalti", "train", "--hf-token=hf_abc"], "packages": {}}
    (folder / "provenance.json").write_text(json.dumps(made_by))
    info = read_run_info(folder)
    for told in (str(info.params), info.config_text, str(info.tags)):
        assert not [word for word in ("12345", "two", "hf_abc", "SIGNED", "ada", "bob") if word in told], told
    assert info.tags["smalti.command"] == "~/bin/smalti train --hf-token=***"
    assert info.params["folder"] == "~/runs"
    assert info.params["seed"] == 3
    assert "seed: 3\n" in info.config_text


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ({"sinks": ["mlflow"]}, {}, "no server is named"),
        ({"sinks": ["mlflow"], "mlflow": {"uri": "http://127.0.0.1:9"}}, {}, "cannot be used: ConnectionRefusedError"),
        (
            {"sinks": ["mlflow"]},
            {"MLFLOW_TRACKING_URI": "http://a:word@127.0.0.1:9"},
            "***@127.0.0.1:9 cannot be used: Conn",
        ),
        ({"sinks": ["mlflow"]}, {"MLFLOW_TRACKING_URI": "sqlite:///x.db"}, "is not that of a server"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_anything_starts(
    given: Any, environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        trackers.check(TrackConfig(**given), tmp_path / "run")
    assert said in str(caught.value)
    assert "hint:" in str(caught.value)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_an_extra_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smalti.track.sinks import mlflow, tensorboard, wandb

    for module in (mlflow, tensorboard, wandb):
        monkeypatch.setattr(module, "find_spec", lambda package: None)
    config = TrackConfig(sinks=(name,), mlflow={"uri": "http://127.0.0.1:9"})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"pip install 'smalti\[{name}\]'"):
        trackers.check(config, tmp_path / "run")


def test_a_run_without_trackers_has_nothing_to_send_to(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    assert trackers.publish(folder, folder / "config.yaml", "config.yaml") == []
    with pytest.raises(UserError, match=r"hint: smalti runs send .* 'track.sinks=\[mlflow\]'"):
        trackers.send(folder)


def test_each_name_in_the_config_has_its_tracker() -> None:
    assert [trackers.load_tracker(name).name for name in get_args(SinkName)] == list(get_args(SinkName))


def test_a_new_tracker_is_a_module_and_a_name_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    module = SimpleNamespace(TRACKER=lambda track, info: tracker)
    monkeypatch.setitem(sys.modules, "smalti.track.sinks.fake", module)
    run = write_run(tmp_path / "run", steps=20)
    feeds = trackers.follow(TrackConfig.model_construct(sinks=("fake",)), run, EventLog(run))
    trackers.close(feeds, "done")
    assert tracker.ended == "done"
    assert tracker.steps()[-1] == 20
