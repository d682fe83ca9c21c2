"""Results carry commit, date and machine, and two commits never share a file."""

import json

import pytest
import record


def test_result_carries_commit_date_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit_of", lambda root: "abc")
    path = record.record("order", {"cases": 5}, tmp_path)
    record.record("order", {"wall_s": 1.5}, tmp_path)
    found = json.loads(path.read_text())
    assert found["figures"] == {"cases": 5, "wall_s": 1.5}
    assert found["commit"] == "abc"
    assert found["date"].endswith("+00:00")
    assert {"processor", "cores", "python", "torch", "gpu"} <= set(found["machine"])


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


def test_proof_counts_follow_the_environment(proof):
    assert proof(short=3, full=7) in (3, 7)
