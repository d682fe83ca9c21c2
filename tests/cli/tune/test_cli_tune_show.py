"""``smalti tune show``: tokens with those in the loss marked, in colour, in brackets and as JSON."""

import json
from pathlib import Path

import pytest
from chat_families import FAMILIES, write_folder

from smalti.cli.main import run

CHAT = {"messages": [{"role": "user", "content": "q\x1b[31m"}, {"role": "assistant", "content": "a\nb"}]}


def test_tokens_in_the_loss_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(FAMILIES["chatml"], tmp_path / "model")
    path = tmp_path / "chats.jsonl"
    rows = [{**CHAT, "name": "a\x1b[2J"}, {"messages": CHAT["messages"][1:], "name": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["tune.examples.unreadable=drop", "heldout_frac=0", "columns.id=name"]
    arguments = ["tune", "show", str(path), *overrides, "--tokenizer", str(folder)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "\n[[a|⏎\n|b|<|im_end|>]]⏎\n" in shown
    assert shown.startswith("a\\x1b[2J (train)")
    assert "q|\\x1b|[" in shown
    lines = [line.split("  ", 1) for line in shown.splitlines() if "  " in line]
    table = {name: value.strip() for name, value in lines}
    assert table["unreadable"].startswith(f"1: {path}:2: message 1 is of assistant")
    assert table["train"].startswith("1 examples")
    assert table["train, tokens each"] == "median 28, p95 28, max 28"
    assert run([*arguments, "--color", "always"]) == 0
    shown = capsys.readouterr().out
    assert "m<|im_end|>\x1b[0m" in shown
    assert "[[" not in shown
    assert run([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    (sequence,) = value["examples"][0]["sequences"]
    assert [text for text, flag in zip(sequence["tokens"], sequence["mask"], strict=True) if flag] == [
        "a", "\n", "b", "<|im_end|>",
    ]  # fmt: skip
    assert value["report"]["splits"]["train"] == {
        "examples": 1,
        "tokens": len(sequence["ids"]),
        "loss_tokens": 4,
        "lengths": {"median": 28, "p95": 28, "max": 28},
    }


@pytest.mark.slow
def test_errors_say_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT))
    assert run(["tune", "show", str(path)]) == 2
    assert "hint: smalti tune show" in capsys.readouterr().err
    folder = write_folder(FAMILIES["chatml"], tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert run(["tune", "show", str(path), "--tokenizer", str(folder)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert run(["tune", "show", str(path), "--tokenizer", str(folder), "--template", "chatml", "turn=last"]) == 2
    assert "did you mean" in capsys.readouterr().err
