"""The tables of ``smalti demo --chat``, and the options that it refuses."""

import json
from pathlib import Path

import pytest

from smalti.cli import demo, demo_chat
from smalti.cli.eval import run as eval_run
from smalti.cli.main import run
from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.serve.folders import ModelFolder


def _results(folder: Path, accuracy: float, bits: float) -> str:
    path = folder / "evals/instructions/20260101T000000Z"
    path.mkdir(parents=True)
    scores = {
        "instructions": {
            **{"metric": "accuracy", "value": accuracy, "interval": [accuracy - 0.05, accuracy + 0.05], "n": 40},
            "categories": {"swap": {"accuracy": accuracy, "n": 20, "interval": [0.1, 0.2]}},
        },
        "heldout/code": {"metric": "bits_per_byte", "value": bits, "interval": None},
        "brackets": {"metric": "accuracy", "value": 0.5, "interval": [0.4, 0.6]},
    }
    (path / "results.json").write_text(json.dumps({"tasks": scores}))
    sample = {"task": "instructions", "category": "swap", "prompt": "User: Swap: a b\n\nAssistant:", "answers": ["b a"]}
    rows = [{"task": "brackets"}, {**sample, "answer": " b a", "correct": True}]
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_the_tables_show_answers_before_and_after_and_what_was_lost(tmp_path: Path) -> None:
    text = demo_chat.summary(_results(tmp_path / "a", 0.05, 1.5), _results(tmp_path / "b", 0.92, 1.65))
    lines = [line.split() for line in text.splitlines()]
    assert "exact answers to 40 held-out instructions" in text
    assert ["swap", "0.050", "[0.100,", "0.200]", "0.920", "[0.100,", "0.200]"] in lines
    assert ["heldout/code", "bits", "per", "byte", "1.500", "1.650", "+10.00", "%"] in lines
    assert lines[[line[:1] for line in lines].index(["brackets"])][-1] == "+0.000"
    assert "User: Swap: a b\n\nAssistant: b a\n" in text


def test_a_repeated_demo_saves_no_answer_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("smalti.tune.instructions.write", lambda folder: None)
    monkeypatch.setattr(demo_chat, "summary", lambda before, after: "")
    Path(demo_chat.CHAT_RUN).mkdir(parents=True)
    Path(demo_chat.CHAT_RUN, "samples.jsonl").write_text(json.dumps({"prompt": demo_chat.PROMPTS[0]}) + "\n")
    stages: list[tuple[str, ...]] = []
    demo_chat.tune("runs/demo", (), lambda title, *command: stages.append(command))
    assert ["--save" in command for command in stages if command[0] == "chat"] == [False, True, True]


def test_a_finished_demo_takes_no_gauntlet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("smalti.evals.tasks.find.find_tasks", lambda config: [])
    monkeypatch.setattr(demo, "run_child", lambda command: pytest.fail(f"a stage was started: {command}"))
    Path(demo.RUN).mkdir(parents=True)
    Path(demo.RUN, "report.html").touch()
    assert run(["demo", "--chat", "--gauntlet", str(tmp_path)]) == 2
    assert "--gauntlet has no effect with --chat, as runs/demo is finished" in capsys.readouterr().err


def test_held_out_examples_of_a_tuned_run_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation/examples.json").write_text("{}")
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    config = load(RunConfig, "demo", [f"data.heldout.validation={tmp_path / 'validation'}"]).config
    (folder / "config.yaml").write_text(dump(config))
    suite = eval_run._config("demo", ModelFolder(str(folder / "export"), str(folder)), [])
    assert sorted(suite.heldout) == ["code", "prose"]
