"""``smalti runs`` as it is typed: lists are filtered and sorted, broken folders are shown, runs are compared."""

import json
import re
from pathlib import Path

import pytest
from example_config import example_config
from synthetic_run import write_run

from smalti.cli.main import run as smalti
from smalti.cli.runs import show
from smalti.config.load import dump


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/{base,lr-low,broken,waiting}``."""
    root = tmp_path_factory.mktemp("place")
    for name, lr, steps in (("base", "3e-3", 100), ("lr-low", "1e-3", 60)):
        run = write_run(root / "runs" / name, steps=steps)
        config = example_config(f"name={name}", f"train.optimizer.lr={lr}", "train.duration=200step")
        (run / "config.yaml").write_text(dump(config))
        status = {"state": "done" if name == "base" else "running", "attempt": 1, "step": steps}
        (run / "status.json").write_text(json.dumps(status | {"heartbeat": f"2026-03-0{len(name) - 3}T12:00:00.000Z"}))
    (root / "runs" / "broken").mkdir()
    (root / "runs" / "broken" / "config.yaml").write_text("model: [\n")
    (root / "runs" / "waiting").mkdir()
    (root / "runs" / "waiting" / "config.yaml").write_text(dump(example_config("name=waiting")))
    return root


@pytest.fixture(autouse=True)
def _in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert smalti(["runs", "ls", "--json", *arguments]) == 0
    return [run["name"] for run in json.loads(capsys.readouterr().out)]


def test_ls_shows_every_run_and_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "ls"]) == 0
    shown = capsys.readouterr()
    for text in ("100/200", "60/200", "bits/byte @60", "running, silent", "broken", "MFU", "-/100"):
        assert text in shown.out, text
    assert "note: runs/broken is broken: while parsing" in shown.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), ["lr-low", "base", "broken", "waiting"]),
        (("--where", "state=done"), ["base"]),
        (("--where", "run=lr-*"), ["lr-low"]),
        (("--where", "step>50", "--sort", "step"), ["lr-low", "base"]),
        (("--where", "time>1s", "--where", "time<99h", "--where", "loss<99900%", "--sort", "step"), ["lr-low", "base"]),
        (("--where", "step>50", "--sort", "step", "--reverse"), ["base", "lr-low"]),
        (("--sort", "train.optimizer.lr"), ["lr-low", "base", "waiting", "broken"]),
        (("--where", "train.optimizer.lr=1e-3"), ["lr-low"]),
        (("--where", "loss/train/total<99", "--limit", "1"), ["lr-low"]),
        (("--where", "state!=done", "--where", "loss<99"), ["lr-low"]),
    ],
)
def test_ls_filters_and_sorts(
    arguments: tuple[str, ...], wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, *arguments) == wanted


def test_ls_takes_metrics_and_config_keys_as_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "ls", "--where", "state=done", "--columns", "run,train.optimizer.lr,lr-AdamW/group0"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "train.optimizer.lr", "lr-AdamW/group0"]
    assert row.split()[:2] == ["base", "0.003"]
    assert smalti(["runs", "ls", "--where", "state=done", "--columns", "+seed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["seed"] == 17


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--columns", "losss"], ("'losss' is not a column", "did you mean 'loss'?")),
        (["--sort", "sped"], ("did you mean 'speed'?",)),
        (["--where", "done"], ("--where 'done' is not a condition", "hint: --where state=done")),
        (["--where", "state<done"], ("'done' is not a number",)),
        (["nowhere"], ("there is no folder 'nowhere'",)),
    ],
)
def test_ls_says_what_is_wrong(
    arguments: list[str], texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smalti(["runs", "ls", *arguments]) == 2
    err = capsys.readouterr().err
    for text in texts:
        assert text in err


def test_ls_of_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "ls", "--where", "state=failed"]) == 0
    assert capsys.readouterr().out == "none of the 4 runs in runs matches\n"


def test_show_says_how_attempts_ended_and_what_lies_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "show", "base"]) == 0
    out = capsys.readouterr().out
    for text in ("100 of 200", "rank 1, signal SIGKILL", "finished", "95 % interval",
                 "bits per byte", "best held-out", "run_finished", "on disk:", "gzip -9 1.810"):  # fmt: skip
        assert text in out, text
    assert smalti(["runs", "show", "base", "--json", "--events", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [event["event"] for event in found["events"]] == ["resumed", "run_finished"]
    assert [one["from_step"] for one in found["attempts"]] == [0, 150]
    assert found["bytes"]["evals"] > 0


@pytest.mark.parametrize("name", ["broken", "waiting"])
def test_show_takes_what_there_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "show", name]) == 0
    assert f"runs/{name}" in capsys.readouterr().out


def test_diff_prints_what_differs_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "curves.html"
    assert smalti(["runs", "diff", "base", "lr-low", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for text in ("train.optimizer.lr", "0.003", "0.001", "at step 60", "heldout/code"):
        assert text in out, text
    assert plot.stat().st_size > 10_000
    assert smalti(["runs", "diff", "base", "lr-low", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] == "base"


def test_compare_is_one_table_and_one_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "losses.svg"
    assert smalti(["runs", "compare", "base", "lr-low", "--plot", str(plot)]) == 0
    head, base, low, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "step"]
    assert base.split()[:3] == ["base", "done", "100/200"]
    assert low.split()[:2] == ["lr-low", "running,"]
    assert plot.read_text().startswith("<svg")
    assert smalti(["runs", "compare", "base", "lr-low", "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["base", "lr-low"]
    assert smalti(["runs", "compare", "base", "bsae"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["base"], "two runs or more"),
        (["base", "lr-low", "--x", "time"], "are options of --plot"),
        (["base", "lr-low", "--plot", "a.pdf"], ".html, .svg"),
        (["base", "nothing"], "there is no run folder 'nothing'"),
        (["base", "lrlow"], "did you mean 'runs/lr-low'?"),
    ],
)
def test_diff_says_what_is_wrong(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "diff", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["runs show", "plan verify", "export", "eval run", "chat", "serve"])
@pytest.mark.parametrize(("run", "nearest"), [("runs/bsae", "runs/base"), ("bsae", "runs/base")])
def test_a_missing_run_folder_has_a_hint(
    command: str, run: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smalti([*command.split(), run]) == 2
    error = capsys.readouterr().err
    assert re.search(f"there is no (run )?folder '{run}'", error)
    assert f"hint: did you mean '{nearest}'?" in error


def test_report_of_one_and_of_several(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["runs", "report", "base"]) == 0
    assert capsys.readouterr().out == "runs/base/report.html\n"
    assert smalti(["runs", "report", "base", "lr-low"]) == 0
    assert capsys.readouterr().out == "runs/report.html\n"
    assert smalti(["runs", "report", "base", "lr-low", "--output", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()


def test_only_the_newest_attempt_may_be_still_running() -> None:
    attempts = [{"attempt": number, "from_step": 0} for number in range(2)]
    first, newest = show._attempts_text(attempts, state="running").splitlines()[-2:]
    assert first.endswith("killed: no end was recorded")
    assert newest.endswith("still running, or killed with its machine")
    assert show._attempts_text(attempts, state="killed").endswith("killed: no end was recorded")
