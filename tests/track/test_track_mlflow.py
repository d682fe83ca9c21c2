"""A real MLflow server on SQLite: kill -9 and resume, an outage, limits, files of later commands, its pages."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from registered_folders import write_export
from synthetic_run import CONFIG, write_run
from tiny_runs import tiny_run

from smalti.base import clock
from smalti.base.errors import UserError
from smalti.config.track import MlflowConfig, TrackConfig
from smalti.track import trackers
from smalti.track.events import EventLog, read_events
from smalti.track.registry import changes
from smalti.track.registry.facts import read_facts
from smalti.track.registry.reference import Reference
from smalti.track.sinks.jsonl import MetricsLog, read_metrics

pytest.importorskip("mlflow.server", reason="the server of MLflow is not installed (mlflow-skinny has none)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

LATER = """
import sys
from smalti.cli.main import run
folder = sys.argv[1]
for arguments in (["export", folder], ["eval", "run", folder, "tasks=[heldout]"], ["runs", "report", folder]):
    assert run(arguments) == 0, arguments
"""
"""The later commands, in one process: PyTorch is imported once."""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Server:
    """A server that can be killed and started again with the same database and port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/m.db",
                   "--artifacts-destination", str(self.folder / "files"), "--host", "127.0.0.1",
                   "--port", str(self.port), "--workers", "1"]  # fmt: skip
        # Without its runner of jobs it is four processes less.
        calm = (
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("DO_NOT_TRACK", "true"),
            ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"),
        )
        quiet = {**os.environ, **dict(calm)}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=quiet, start_new_session=True)
        wait(self.answers, 90)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    result = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        result.start()
        yield result
    finally:
        result.kill()


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)


def wait(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def client(server: Server) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(server.uri)


def run_of(server: Server, folder: Path) -> Any:
    return client(server).get_run(json.loads((folder / "trackers/mlflow.json").read_text())["run_id"])


def steps_of(server: Server, folder: Path, name: str = "loss/train/total") -> list[int]:
    history = client(server).get_metric_history(run_of(server, folder).info.run_id, name)
    return sorted(metric.step for metric in history)


def train(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "smalti", "train", str(recipe), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(agent: subprocess.Popen[str]) -> int:
    print(agent.communicate(timeout=90)[0])
    return agent.returncode


def rank_0_of(agent: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(agent):
            return int(entry.name)
    raise AssertionError("no rank")


@pytest.fixture(scope="module")
def trained(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its middle, resumed, exported, measured and reported, all of it tracked."""
    root = tmp_path_factory.mktemp("run")
    folder = tiny_run(root)
    recipe = root / "recipe.yaml"
    shutil.move(folder / "config.yaml", recipe)
    shutil.rmtree(folder)
    common = [f"folder={folder}", f"data.tokenizer={root}/data/tokenizer", "train.duration=220step",
              "train.checkpoint.every=100step", "track.sinks=[mlflow]", "track.system_every_s=0.3",
              "train.parallel.threads=1", f"track.mlflow.uri={server.uri}",
              "track.mlflow.experiment=tiles", "train.restart.attempts=0"]  # fmt: skip
    agent = train(recipe, *common)
    wait(lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 110, 60)
    wait(lambda: any("ckpt/save_s" in row for row in read_metrics(folder)), 60)  # its write may last longer
    os.kill(rank_0_of(agent.pid), signal.SIGKILL)
    assert finish(agent) == 75
    assert run_of(server, folder).info.status == "FAILED"
    sent = steps_of(server, folder)
    assert sent == list(range(1, len(sent) + 1))  # what the dead rank had not sent is sent by its parent
    assert len(sent) > 100
    agent = train(recipe, *common, "track.console_every_s=5")
    assert finish(agent) == 0
    done = subprocess.run([sys.executable, "-c", LATER, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" is uploaded (") == 3, done.stderr
    assert re.search(r"mlflow: tiny/\d+ is version \d+ of the registered model tiny\n", done.stderr), done.stderr
    return folder


@pytest.mark.exhaustive
def test_killed_and_resumed_it_is_one_run_without_a_step_twice(server: Server, trained: Path) -> None:
    resumed = [event["step"] for event in read_events(trained) if event["event"] == "resumed"]
    assert resumed == [100]
    assert steps_of(server, trained) == list(range(1, 221))
    assert Counter(steps_of(server, trained, "ckpt/save_s")) == {100: 1, 200: 1, 220: 1}
    run = run_of(server, trained)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.params["train.optimizer.lr"] == "0.001"
    assert run.data.params["train.parallel.compile"] == "auto"
    assert run.data.tags["smalti.attempt"] == "1"
    assert "track.console_every_s: 10 -> 5" in run.data.tags["smalti.changed_in_attempt_1"]
    assert any(name.startswith("system/") for name in run.data.metrics)
    names = [experiment.name for experiment in client(server).search_experiments()]
    assert "tiles" in names
    host = socket.gethostname()
    assert not any(host == value for value in run.data.tags.values())


@pytest.mark.exhaustive
def test_export_results_and_report_are_files_of_the_run(server: Server, trained: Path) -> None:
    run = run_of(server, trained)
    paths: list[str] = []

    def walk(path: str | None) -> None:
        for entry in client(server).list_artifacts(run.info.run_id, path):
            walk(entry.path) if entry.is_dir else paths.append(entry.path)

    walk(None)
    assert {"config.yaml", "report.html", "export/model.safetensors", "export/tokenizer.json"} <= set(paths)
    assert any(path.startswith("evals/demo/") and path.endswith("/results.json") for path in paths)
    assert run.data.metrics["evals/demo/heldout.code/bits_per_byte"] > 0


@pytest.mark.exhaustive
def test_an_outage_loses_nothing(server: Server, tmp_path: Path) -> None:
    """For a run that continues, and for one whose second attempt is entirely within the outage."""
    other, track = tmp_path / "other", TrackConfig(sinks=("mlflow",))
    other.mkdir()
    for folder in (tmp_path, other):
        (folder / "config.yaml").write_text(CONFIG)

    def attempt(steps: range) -> int:
        metrics = MetricsLog(other, resumed_step=steps[0] - 1 or -1)
        feed = trackers.follow(track, other, EventLog(other))[0]
        for step in steps:
            metrics.write(step, {"loss/train/total": 1.0})
        return feed.close("stopped", wait_s=20)

    assert attempt(range(1, 5)) == 0
    metrics = MetricsLog(tmp_path, resumed_step=-1)
    feed = trackers.follow(TrackConfig(sinks=("mlflow",)), tmp_path, EventLog(tmp_path))[0]
    for step in range(1, 11):
        metrics.write(step, {"loss/train/total": 1.0, "moe/load_imbalance": math.nan})
    wait(lambda: len(steps_of(server, tmp_path)) == 10)
    server.kill()
    try:
        slowest_s = 0.0
        for step in range(11, 31):
            before_s = time.monotonic()
            metrics.write(step, {"loss/train/total": 1.0})
            slowest_s = max(slowest_s, time.monotonic() - before_s)
            time.sleep(0.05)
        wait(lambda: [event["event"] for event in read_events(tmp_path)][-1] == "tracker_lost")
        assert slowest_s < 0.5
        again = trackers.follow(track, other, EventLog(other))[0]
        assert again.close("failed", wait_s=0.1) == 4  # it could not ask what is there
    finally:
        server.start()
    assert feed.close("done", wait_s=60) == 0
    assert steps_of(server, tmp_path) == list(range(1, 31))
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds == ["tracker_opened", "tracker_lost", "tracker_back"]
    run = run_of(server, tmp_path)
    assert run.info.status == "FINISHED"
    assert math.isnan(run.data.metrics["moe/load_imbalance"])
    assert attempt(range(3, 9)) == 0
    assert steps_of(server, other) == list(range(1, 9))
    assert run_of(server, other).info.status == "KILLED"


def test_limits_of_the_server_and_secrets(server: Server, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=30)
    many = "".join(f"    source-{number}: 's3://key:word@host/{number}'\n" for number in range(230))
    (folder / "config.yaml").write_text(f"name: demo\ndata:\n  sources:\n{many}  note: {'x' * 7000}\n  odd%name: 1\n")
    assert trackers.send(folder, ["track.sinks=[mlflow]", "track.mlflow.experiment=limits"]) == {"mlflow": 0}
    params = run_of(server, folder).data.params
    assert len(params) == 233
    assert params["data.sources.source-7"] == "s3://***@host/7"
    assert len(params["data.note"]) == 6000
    assert params["data.odd_name"] == "1"
    assert steps_of(server, folder) == list(range(1, 31))
    last_ms = round(1000 * (clock.seconds_of(read_metrics(folder)[-1]["time"]) or 0))
    assert trackers.send(folder, ["track.sinks=[mlflow]"]) == {"mlflow": 0}  # nothing is left; the end stays
    assert run_of(server, folder).info.end_time == last_ms


def test_what_is_too_large_is_named_and_not_uploaded(server: Server, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=3)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "track: {mlflow: {upload_max_bytes: 1000}}\n")
    trackers.send(folder, ["track.sinks=[mlflow]"])
    large = tmp_path / "export"
    large.mkdir()
    (large / "model.safetensors").write_bytes(b"0" * 2000)
    (line,) = trackers.publish(folder, large, "export")
    assert line.endswith("= 1000, and is not uploaded")
    run = run_of(server, folder)
    assert "larger" in run.data.tags["smalti.not_uploaded.export"]
    assert [entry.path for entry in client(server).list_artifacts(run.info.run_id)] == ["config.yaml"]
    config.write_text(config.read_text().replace("1000", "0"))
    assert trackers.publish(folder, large, "export") == []
    server_uri = f"http://127.0.0.1:{server.port + 1}"
    config.write_text(config.read_text().replace("upload_max_bytes: 0", f"uri: {server_uri!r}"))
    (line,) = trackers.publish(folder, large, "export")
    assert line.startswith("warning: mlflow: export is not uploaded")


def test_versions_are_registered_and_tags_are_aliases(server: Server, home: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=3)
    trackers.send(folder, ["track.sinks=[mlflow]"])
    numbers = []
    for step in (2, 3):
        export = write_export(folder / "export", step=step, weights=bytes([step]) * 99, run=folder)
        version, _ = changes.add(read_facts(export), "demo")
        trackers.publish(folder, export, "export")
        for _ in range(2):  # the second finds what the first has registered
            (line,) = trackers.register(version, "export")
        assert line.startswith(f"mlflow: demo/{version.number} is version "), line
        numbers.append(re.findall(r"is version (\d+)", line)[0])
        version, _ = changes.tag(Reference("demo"), "production")
        (line,) = trackers.move_tag(version, "production")
        assert line == f"mlflow: 'production' is an alias of version {numbers[-1]} of demo"
    tagged = client(server).get_model_version_by_alias("demo", "production")
    assert numbers == ["1", "2"]
    assert (tagged.version, tagged.run_id) == ("2", run_of(server, folder).info.run_id)
    assert (tagged.tags["smalti.step"], tagged.tags["smalti.version"]) == ("3", "2")
    assert tagged.source.endswith("/artifacts/export")
    assert trackers.move_tag(changes.untag(Reference("demo"), "production"), "production", remove=True)
    assert client(server).get_registered_model("demo").aliases == {}
    elsewhere, _ = changes.add(read_facts(write_export(tmp_path / "x", weights=b"1", run=folder)), "demo")
    (line,) = trackers.move_tag(elsewhere, "candidate")
    assert "demo/3 is not registered there" in line
    config = folder / "config.yaml"
    config.write_text(config.read_text() + f"track: {{mlflow: {{uri: 'http://127.0.0.1:{server.port + 1}'}}}}\n")
    assert trackers.register(version, "export")[0].startswith("warning: mlflow: demo/2 is not registered")


def test_a_run_that_was_deleted_on_the_server_is_an_error(server: Server, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=3)
    trackers.send(folder, ["track.sinks=[mlflow]"])
    client(server).delete_run(run_of(server, folder).info.run_id)
    feed = trackers.follow(TrackConfig(sinks=("mlflow",)), folder, EventLog(folder, 2))[0]
    wait(lambda: read_events(folder)[-1]["event"] == "tracker_lost")
    assert feed.close("done", wait_s=0.1) == 3
    reason = next(event["reason"] for event in read_events(folder) if event["event"] == "tracker_lost")
    assert "is deleted" in reason
    experiment = client(server).create_experiment("gone")
    client(server).delete_experiment(experiment)
    other = write_run(tmp_path / "other", steps=3)
    track = TrackConfig(sinks=("mlflow",), mlflow=MlflowConfig(experiment="gone"))
    with pytest.raises(UserError, match="the MLflow experiment 'gone' is deleted"):
        trackers.follow(track, other, EventLog(other))


@pytest.mark.exhaustive
def test_variables_that_users_of_mlflow_know(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by-variable")
    folder = write_run(tmp_path / "demo", steps=3)
    trackers.send(folder, ["track.sinks=[mlflow]"])
    result = client(server).get_experiment_by_name("by-variable")
    assert run_of(server, folder).info.experiment_id == result.experiment_id
    mine = client(server).create_run(result.experiment_id, run_name="mine").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", mine)
    other = write_run(tmp_path / "other", steps=3)
    trackers.send(other, ["track.sinks=[mlflow]"])
    assert run_of(server, other).info.run_id == mine


@pytest.mark.exhaustive
@pytest.mark.browser
def test_pages_show_curves_parameters_tags_and_the_model(server: Server, trained: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("neither chromium nor chromium-browser nor google-chrome is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    run = run_of(server, trained)
    base = f"{server.uri}/#/experiments/{run.info.experiment_id}"
    views = {
        "runs": (f"{base}/runs", ["tiny"]),
        "overview": (f"{base}/runs/{run.info.run_id}", ["train.optimizer.lr", "smalti.commit", "loss/train/total"]),
        "charts": (f"{base}/runs/{run.info.run_id}/model-metrics", ["throughput"]),
        "system": (f"{base}/runs/{run.info.run_id}/system-metrics", ["cpu_frac"]),
        "files": (f"{base}/runs/{run.info.run_id}/artifacts", ["export", "config.yaml", "report.html"]),
    }
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        for name, (address, texts) in views.items():
            page.goto(address)
            for text in texts:
                page.get_by_text(text).first.wait_for(timeout=30_000)
                assert page.get_by_text(text).first.is_visible()
            page.wait_for_timeout(500)
            page.screenshot(path=str(tmp_path / f"mlflow-{name}.png"))
        browser.close()
