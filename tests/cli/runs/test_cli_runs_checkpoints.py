"""``smalti runs checkpoints``: the list, verification, protection, deletion, copies, and exit codes."""

import json
from pathlib import Path

import pytest
import toy_run
from cli_in_process import run_cli
from synthetic_checkpoint import steps_in, write_checkpoint
from synthetic_run import write_run

from smalti.track.run import config_text


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """``runs/demo`` with checkpoints of steps 150, 300 and 450."""
    write_run(tmp_path / "runs/demo")
    for step in (150, 300, 450):
        write_checkpoint(tmp_path / "runs/demo/checkpoints", step)
    return tmp_path


def folder(work: Path) -> Path:
    return work / "runs/demo/checkpoints"


def test_the_list_is_the_default_command(work: Path) -> None:
    done = run_cli(work, "runs", "checkpoints", "demo")
    assert done.returncode == 0, done.stderr
    head, first, *_, last = done.stdout.splitlines()
    assert " ".join(head.split()) == "checkpoint saved (UTC) tokens size blocked verified (UTC) parent kept as"
    assert " ".join(first.split()) == "150 2026-03-01 12:01:16 1.2k 136 B 310ms 2026-03-01 12:02:31 -"
    assert last.split()[-1] == "newest"
    rows = json.loads(run_cli(work, "runs", "checkpoints", "--json", "runs/demo").stdout)
    assert [row["step"] for row in rows] == [150, 300, 450]
    assert rows[0]["block_s"] == 0.31
    assert json.loads(run_cli(work, "runs", "show", "demo", "--json").stdout)["checkpoints"] == rows
    assert "450                    -    3.6k  136 B  newest" in run_cli(work, "runs", "show", "demo").stdout
    assert run_cli(work, "runs", "checkpoints", "nothing").returncode == 2


def test_what_the_section_keep_keeps_is_named(work: Path) -> None:
    keep = {"last": 2, "every": "150step", "blessed": 0}
    config = toy_run.config(work, duration="600step", checkpoint={"every": "150step", "keep": keep})
    (work / "runs/demo/config.yaml").write_text(config_text(config))
    rows = json.loads(run_cli(work, "runs", "checkpoints", "--json", "runs/demo").stdout)
    assert [(row["newest"], row["last"], row["every"]) for row in rows] == [
        (False, False, True), (False, True, True), (True, False, True),
    ]  # fmt: skip
    lines = run_cli(work, "runs", "checkpoints", "runs/demo").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == ["kept as", "every", "last, every", "newest, every"]


def test_damage_is_exit_code_3(work: Path) -> None:
    done = run_cli(work, "runs", "checkpoints", "verify", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every file matches its digest") == 3
    with (work / "runs/demo/events.jsonl").open("a") as events:
        events.write('{"attempt": 0, "event": "checkpoint_saved", "step": 450}\n')
    (folder(work) / "step-00000450/COMPLETE").rename(work / "COMPLETE")
    done = run_cli(work, "runs", "checkpoints", "verify", "demo")
    assert "note: runs/demo/checkpoints/step-00000450 was saved, and is missing or not complete" in done.stderr
    (work / "COMPLETE").rename(folder(work) / "step-00000450/COMPLETE")
    (folder(work) / "step-00000300/shards/__0_0.distcp").write_bytes(b"x")
    done = run_cli(work, "runs", "checkpoints", "verify", "demo", "--json")
    assert done.returncode == 3
    assert "1 of 3 checkpoints cannot be used: step-00000300" in done.stderr
    assert [each["fault"] is None for each in json.loads(done.stdout)] == [True, False, True]
    assert run_cli(work, "runs", "checkpoints", "verify", "demo", "newest").returncode == 0


def test_protection_and_deletion(work: Path) -> None:
    def rm(*arguments: str) -> tuple[int, str]:
        done = run_cli(work, "runs", "checkpoints", "rm", "demo", *arguments)
        return done.returncode, done.stdout + done.stderr

    assert run_cli(work, "runs", "checkpoints", "keep", "demo", "150").returncode == 0
    assert "is kept as protected" in rm("150", "--yes")[1]
    code, text = rm("300", "--dry-run")
    assert (code, text.partition(" (")[0]) == (0, "would delete step-00000300 of runs/demo")
    code, text = rm("300")
    assert code == 2, "no terminal to ask at"
    assert "--yes deletes" in text
    assert rm("450", "--yes")[0] == 2
    assert steps_in(folder(work)) == [150, 300, 450]
    assert run_cli(work, "runs", "checkpoints", "keep", "demo", "150", "--off").returncode == 0
    assert rm("150", "300", "--yes")[0] == 0
    assert steps_in(folder(work)) == [450]
    assert rm("newest", "--yes", "--force")[0] == 0
    assert run_cli(work, "runs", "checkpoints", "demo").stdout == "no checkpoint in runs/demo\n"


def test_a_copy_is_printed(work: Path) -> None:
    done = run_cli(work, "runs", "checkpoints", "copy", "demo", "newest", "copies")
    assert (done.returncode, done.stdout) == (0, "copies/step-00000450\n"), done.stderr
    assert "copy of 450: copies/step-00000450" in run_cli(work, "runs", "checkpoints", "demo").stdout


def test_a_folder_of_copies_is_listed_verified_and_copied_on(work: Path) -> None:
    for step in ("150", "newest"):
        assert run_cli(work, "runs", "checkpoints", "copy", "demo", step, "copies/demo").returncode == 0
    listed = json.loads(run_cli(work, "runs", "checkpoints", "copies/demo", "--json").stdout)
    assert [(row["step"], row["newest"], row["here"]) for row in listed] == [(150, False, True), (450, True, True)]
    assert run_cli(work, "runs", "checkpoints", "verify", "copies/demo").stdout.count("every file matches") == 2
    (work / "copies/demo/step-00000150/train_state.json").write_text("{}")
    assert run_cli(work, "runs", "checkpoints", "verify", "copies/demo").returncode == 3
    assert run_cli(work, "runs", "checkpoints", "copy", "copies/demo", "450", "again").returncode == 0
    assert "is kept as newest" in run_cli(work, "runs", "checkpoints", "rm", "copies/demo", "450", "--yes").stderr
    assert run_cli(work, "runs", "checkpoints", "rm", "copies/demo", "150", "--yes").returncode == 0
    assert steps_in(work / "copies/demo") == [450]


def test_a_url_is_the_place_of_copies(work: Path) -> None:
    (work / "store").mkdir()
    url = f"file://{work}/store/demo"
    for step in ("150", "300", "450"):
        assert run_cli(work, "runs", "checkpoints", "copy", "demo", step, url).returncode == 0
    assert run_cli(work, "runs", "checkpoints", "rm", "demo", "150", "--yes").returncode == 0
    for command in (("runs", "checkpoints", "demo"), ("runs", "show", "demo")):
        text = run_cli(work, *command).stdout
        assert f"copy of 150: {url}/step-00000150" in text, "the only copy is shown too"
    [first, *_] = json.loads(run_cli(work, "runs", "checkpoints", "demo", "--json").stdout)
    assert (first["step"], first["here"], first["locations"]) == (150, False, [f"{url}/step-00000150"])

    done = run_cli(work, "runs", "checkpoints", url)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["150", "300", "450"]
    assert run_cli(work, "runs", "checkpoints", "verify", url).returncode == 0
    done = run_cli(work, "runs", "checkpoints", "copy", url, "150", str(folder(work)))
    assert done.returncode == 0, done.stderr
    assert steps_in(folder(work)) == [150, 300, 450]
    assert run_cli(work, "runs", "checkpoints", "verify", "demo", "150").returncode == 0
    assert run_cli(work, "runs", "checkpoints", "keep", url, "150").returncode == 0
    assert run_cli(work, "runs", "checkpoints", "rm", url, "150", "--yes").returncode == 2
    assert "would delete step-00000300" in run_cli(work, "runs", "checkpoints", "rm", url, "300", "--dry-run").stdout
    assert run_cli(work, "runs", "checkpoints", "rm", url, "300", "--yes").returncode == 0
    part = next((work / "store/demo/step-00000150").rglob("*distcp*"))
    part.write_bytes(b"x")
    done = run_cli(work, "runs", "checkpoints", "verify", url)
    assert done.returncode == 3
    assert "1 of 2 checkpoints cannot be used" in done.stderr
