"""Results carry command, commit, date and machine, come from committed code, and two commits never share a file."""

import argparse
import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import conftest
import pytest
import record

RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted(record.RESULTS.glob("*.json"))}


def test_result_carries_commit_date_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit_of", lambda root: "abc")
    path = record.record("order", {"cases": 5}, tmp_path)
    record.record("order", {"wall_s": 1.5}, tmp_path)
    found = json.loads(path.read_text())
    assert found["figures"] == {"cases": 5, "wall_s": 1.5}
    assert found["commit"] == "abc"
    assert found["date"].endswith("+00:00")
    assert {"processor", "cores", "python", "torch", "gpu"} <= set(found["machine"])
    assert found["command"]


def test_another_commit_replaces_the_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit_of", lambda root: "abc")
    record.record("order", {"cases": 5}, tmp_path)
    monkeypatch.setattr(record, "commit_of", lambda root: "def")
    path = record.record("order", {"wall_s": 1.5}, tmp_path)
    assert json.loads(path.read_text())["figures"] == {"wall_s": 1.5}


@pytest.mark.parametrize("name", ["", "../order", "a b"])
def test_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name"):
        record.record(name, {}, tmp_path)


def test_commit_of_a_folder_without_git_is_unknown(tmp_path):
    assert record.commit_of(tmp_path) == "unknown"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed file of code."""
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)  # set where the tests run as a hook of git
    (tmp_path / "smalti").mkdir()
    (tmp_path / "smalti/order.py").write_text("n = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return tmp_path


def test_committed_code_is_recorded(checkout):
    assert re.fullmatch(r"[0-9a-f]{40}", record.committed(checkout))
    for name in ("bench/results/order.json", "docs/pictures/order.svg"):  # what recording itself writes
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("{}")
    assert re.fullmatch(r"[0-9a-f]{40}", record.committed(checkout))


@pytest.mark.parametrize("name", ["smalti/order.py", "smalti/new.py", "bench/new.py"])
def test_uncommitted_code_is_refused_and_named(checkout, name, monkeypatch):
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("n = 2\n")
    with pytest.raises(record.Uncommitted, match=rf"{name}(.|\n)*hint: git commit"):
        record.committed(checkout)
    monkeypatch.setattr(record, "commit_of", lambda root: "abc-dirty")
    with pytest.raises(record.Uncommitted, match="committed code only"):
        record.record("order", {"cases": 5}, checkout)
    assert not (checkout / "order.json").exists()


def test_a_copy_without_git_needs_to_be_given_its_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    with pytest.raises(record.Uncommitted, match="hint: record in a checkout, or set BENCH_COMMIT"):
        record.committed(tmp_path)
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert record.committed(tmp_path) == "abc"


def test_the_option_refuses_before_anything_is_measured(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action=record.RecordOption)
    assert parser.parse_args([]).record is False
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert parser.parse_args(["--record"]).record is True
    monkeypatch.setenv("BENCH_COMMIT", "abc-dirty")
    with pytest.raises(SystemExit):
        parser.parse_args(["--record"])
    assert "hint: git commit" in capsys.readouterr().err


def test_every_script_that_records_refuses_uncommitted_code():
    for path in (record.ROOT / "bench").glob("*.py"):
        assert path.read_text().count('"--record", action=RecordOption') == 1, path


def test_make_prove_refuses_uncommitted_code_before_the_proofs(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc-dirty")
    monkeypatch.setattr(conftest, "RECORD", True)
    with pytest.raises(pytest.UsageError, match="hint: git commit"):
        conftest.pytest_configure()
    monkeypatch.setattr(conftest, "RECORD", False)  # make prove RECORD=no, and every other use
    conftest.pytest_configure()


def test_results_that_are_kept_come_from_commits_of_this_history():
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(record.ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole history of the repository")
    history = set(git("rev-list", "HEAD").split())
    strange = {name: result["commit"] for name, result in RESULTS.items() if result["commit"] not in history}
    assert strange == {}


def test_a_result_that_is_kept_is_cited():
    """By the name of its file in a page, where ``*`` may stand for several, or by a page that is written from it."""
    cited = re.compile(r"results/([\w.*-]+)\.json|make (?:prove|bench) (?:NAME=)?(\w+)|figures\(\"([\w-]+)\"\)")
    paths = [*(record.ROOT / "docs").rglob("*.md"), *(record.ROOT / "tools").rglob("*.py")]
    names = {name for path in paths for found in cited.findall(path.read_text()) for name in found if name}
    assert [name for name in RESULTS if not any(fnmatch(name, pattern) for pattern in names)] == []


def test_proof_counts_follow_the_environment(proof):
    assert proof(short=3, full=7) in (3, 7)
