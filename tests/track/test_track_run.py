"""The run folder: attempts, identity, the lock, its files; metrics and events survive torn lines and resume."""

import json
from pathlib import Path

import pytest

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.track import names
from smalti.track.events import EventLog, read_events
from smalti.track.provenance import provenance, redact
from smalti.track.run import RunFolder
from smalti.track.sinks.jsonl import MetricsLog, read_metrics

BASE = {
    "name": "t",
    "model": {"preset": "mpt-125m"},
    "data": {"sources": {"a": "x"}, "seq_len": 8, "stages": [{"weights": {"a": 1}}]},
    "train": {"duration": "10step", "global_batch_tokens": 64, "optimizer": {"lr": 3e-3}},
}


def open_run(tmp_path, *overrides: str) -> RunFolder:
    loaded = from_dict(RunConfig, {**BASE, "folder": str(tmp_path / "t")}, "t", overrides)
    return RunFolder.open(loaded.config, loaded.origins, argv=["smalti", "train", "t"])


def test_attempts_are_counted_and_placement_is_kept(tmp_path):
    for number, overrides in enumerate([[], [], ["train.parallel.ranks=2"]]):
        run = open_run(tmp_path, *overrides)
        assert run.attempt == number
        run.close()
    reader = RunFolder.read(tmp_path / "t")
    assert reader.attempts() == [0, 1, 2]
    assert not (tmp_path / "t/logs/attempt-1/config.yaml").exists()
    assert reader.config().train.parallel.ranks == 1
    assert reader.attempt_config(1).train.parallel.ranks == 1
    assert reader.attempt_config(2).train.parallel.ranks == 2
    assert reader.provenance()["origins"]["train.optimizer.lr"] == "t"
    assert reader.status()["state"] == "starting"
    assert reader.status()["attempt"] == 2


def test_another_identity_is_refused_with_the_difference(tmp_path):
    open_run(tmp_path).close()
    (tmp_path / "t/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError) as caught:
        open_run(tmp_path, "train.optimizer.lr=0.004")
    assert "train.optimizer.lr: 0.003 -> 0.004" in str(caught.value)
    assert "hint: start a new run with name=t-2" in str(caught.value)
    assert RunFolder.read(tmp_path / "t").attempts() == [0]
    open_run(tmp_path).close()


@pytest.mark.slow
def test_a_folder_in_which_nothing_happened_may_change_hands(tmp_path):
    open_run(tmp_path).close()
    (tmp_path / "t/logs/attempt-0/rank-000.log").write_text("error: no such thing\n")
    (tmp_path / "t/tokenizer").mkdir()
    open_run(tmp_path, "train.optimizer.lr=0.004").close()
    reader = RunFolder.read(tmp_path / "t")
    assert reader.attempts() == [0, 1]
    assert (reader.config().train.optimizer.lr, reader.attempt_config(0).train.optimizer.lr) == (0.004, 0.003)
    assert (tmp_path / "t/logs/attempt-0/rank-000.log").read_text() == "error: no such thing\n"
    assert not (tmp_path / "t/tokenizer").exists()
    (tmp_path / "t/config.yaml").write_text("of: another version\n")
    open_run(tmp_path, "train.optimizer.lr=0.005").close()


def test_a_checkpoint_alone_keeps_the_folder(tmp_path):
    run = open_run(tmp_path)
    run.close()
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    assert run.saved_step() is None
    (run.checkpoints / "step-00000010/COMPLETE").write_text("")
    assert run.saved_step() == 10
    with pytest.raises(UserError, match="holds another run"):
        open_run(tmp_path, "train.optimizer.lr=0.004")


def test_checkpoints_without_a_config_belong_to_no_recipe(tmp_path):
    """Any recipe with the same data and tensors would resume from them."""
    run = open_run(tmp_path)
    run.close()
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    (run.checkpoints / "step-00000010/COMPLETE").write_text("")
    (run.path / "config.yaml").unlink()
    loaded = from_dict(RunConfig, {**BASE, "folder": str(tmp_path / "t")}, "t", ["train.optimizer.lr=0.004"])
    for check in (lambda: RunFolder(run.path).require_free_or_same(loaded.config), lambda: open_run(tmp_path)):
        with pytest.raises(UserError, match="there is no config"):
            check()
    assert not (run.path / "config.yaml").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("content", [b"", b'{"state": "runn', bytes(9), b"[]"], ids=["empty", "torn", "zeros", "list"])
def test_a_damaged_status_does_not_keep_a_run_from_going_on(content, tmp_path):
    open_run(tmp_path).close()
    (tmp_path / "t/status.json").write_bytes(content)
    assert RunFolder.read(tmp_path / "t").status() == {}
    open_run(tmp_path).close()
    assert RunFolder.read(tmp_path / "t").status()["attempt"] == 1


def test_a_folder_that_is_moved_while_the_run_trains_is_not_made_again(tmp_path):
    run = open_run(tmp_path)
    run.path.rename(tmp_path / "moved")
    with pytest.raises(RetryableError, match="moved or deleted"):
        run.set_status("running", step=5)
    assert not run.path.exists()
    open_run(tmp_path, "train.optimizer.lr=0.004").close()
    before = (run.path / "status.json").read_bytes()
    with pytest.raises(RetryableError, match="moved or deleted"):  # another run has its name now
        run.set_status("running", step=5)
    assert (run.path / "status.json").read_bytes() == before
    run.close()


def test_lines_that_are_no_metrics_and_no_events_are_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": null}\n{"a": 1}\n{"step": "x"}\n{"step": 3}\n{"step": 4}\n')
    (tmp_path / "events.jsonl").write_text('{"x": 1}\n{"event": "eval", "attempt": 0}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [3, 4]
    MetricsLog(tmp_path, resumed_step=3).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [3]
    assert [event["event"] for event in read_events(tmp_path)] == ["eval"]


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_run(tmp_path / "runs").close()
    (tmp_path / "t").mkdir()  # a folder of that name that is no run
    assert RunFolder.read("t").path == Path("runs/t")
    assert RunFolder.read("runs/t").path == Path("runs/t")


def test_one_writer_at_a_time(tmp_path):
    first = open_run(tmp_path)
    with pytest.raises(UserError, match="is in use: process"):
        open_run(tmp_path)
    first.close()
    open_run(tmp_path).close()


def test_the_error_for_a_folder_that_is_not_a_run_lists_the_runs_beside_it(tmp_path):
    open_run(tmp_path).close()
    with pytest.raises(UserError, match="there is no run folder") as caught:
        RunFolder.read(tmp_path / "u")
    assert str(tmp_path / "t") in str(caught.value)


def test_status_keeps_the_step(tmp_path):
    run = open_run(tmp_path)
    run.set_status("running", step=7)
    run.set_status("failed", reason="rank 1 died")
    status = RunFolder.read(run.path).status()
    assert (status["state"], status["step"], status["reason"]) == ("failed", 7, "rank 1 died")
    run.close()


def test_an_object_store_is_refused_as_run_folder(tmp_path):
    with pytest.raises(UserError, match="not a local path"):
        from_dict(RunConfig, {**BASE, "folder": "s3://bucket/t"})


def test_provenance_has_no_environment_and_no_secret(monkeypatch):
    monkeypatch.setenv("CANARY_TOKEN", "canary-3141")
    record = provenance(["smalti", "train", "x", "api_key=canary-2718", "data.sources.a=s3://me:canary-1@b/c"], {})
    text = json.dumps(record)
    assert "canary" not in text
    assert record["packages"]["pydantic"]
    assert redact("train.global_batch_tokens=64") == "train.global_batch_tokens=64"


def test_metrics_of_repeated_steps_are_dropped(tmp_path):
    log = MetricsLog(tmp_path, resumed_step=-1)
    for step in range(1, 6):
        log.write(step, {"loss/train/total": 1.0 / step})
    log.close()
    log = MetricsLog(tmp_path, resumed_step=3)
    assert log.dropped_lines == 2
    log.write(4, {"loss/train/total": float("nan")})
    log.close()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss/train/total"] is None
    assert MetricsLog(tmp_path, resumed_step=-1).dropped_lines == 4
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("resumed_step", [None, 2])
def test_a_torn_last_line_is_tolerated(tmp_path, resumed_step):
    log = MetricsLog(tmp_path)
    log.write(1, {"loss/train/total": 2.0})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss/tr')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    log = MetricsLog(tmp_path, resumed_step=resumed_step)
    log.write(3, {"loss/train/total": 1.0})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_events_have_time_attempt_and_a_known_kind(tmp_path):
    log = EventLog(tmp_path, attempt=2)
    log.write("checkpoint_saved", step=3, path="p")
    with pytest.raises(SmaltiError, match="did you mean 'checkpoint_saved'"):
        log.write("checkpoint_save")
    log.close()
    (event,) = read_events(tmp_path)
    assert (event["event"], event["attempt"], event["step"]) == ("checkpoint_saved", 2, 3)
    assert event["time"].endswith("Z")


def test_two_logs_append_to_one_file(tmp_path):
    logs = [EventLog(tmp_path, attempt=0), EventLog(tmp_path, attempt=1)]
    for index in range(20):
        logs[index % 2].write("eval", step=index)
    assert [event["step"] for event in read_events(tmp_path)] == list(range(20))


@pytest.mark.parametrize(
    "name",
    ["loss/train/total", "metrics/eval/code.held-out/bits_per_byte", "lr-AdamW/group0", "data/mix/a/tokens",
     "throughput/device/mfu", "l2_norm/grad/global", "moe/load_imbalance/layer3"],
)  # fmt: skip
def test_known_names(name):
    row = names.metric(name)
    assert row.unit
    assert row.meaning


@pytest.mark.parametrize("name", ["loss/train/totl", "lr-AdamW/groupx", "data/mix/a b/tokens", "time/token(s)", ""])
def test_unknown_names_raise(name):
    with pytest.raises(SmaltiError):
        names.metric(name)


def test_the_table_is_clean():
    assert len({row.name for row in names.TABLE}) == len(names.TABLE)
    for row in names.TABLE:
        assert names.metric(row.name.replace("<i>", "0").replace("<", "").replace(">", "")) is row
        assert row.meaning.endswith(".")
