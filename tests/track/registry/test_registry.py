"""The model registry: numbers, tags and their moves, what a folder says of itself, folders that change or vanish."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from registered_folders import write_export, write_results, write_run

from smalti.base import database
from smalti.base.errors import DataError, UserError
from smalti.track.checkpoints.marks import is_registered
from smalti.track.registry import changes, versions
from smalti.track.registry.facts import read_facts
from smalti.track.registry.reference import Reference, check_name, check_tag, parse
from smalti.track.registry.scores import scores_of

pytestmark = pytest.mark.usefixtures("home")


def add(folder: Path, name: str = "demo") -> versions.Version:
    return changes.add(read_facts(folder), name)[0]


def test_facts_of_an_export_and_of_a_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/demo")
    facts = read_facts(run / "export")
    assert (facts.kind, facts.run, facts.run_folder, facts.step, facts.tokens) == ("model", "demo", str(run), 20, 1280)
    assert facts.data == {"digest": "d1", "past": "p1", "tokenizer": "t1",
                          "sources": {"code": {"path": "data/code", "digest": "c1"}}}  # fmt: skip
    assert facts.scores["demo"]["sums"] == {
        "metric": "accuracy", "value": 0.5, "interval": [0.4, 0.6], "n": 100, "time": "2026-01-01"
    }  # fmt: skip
    checkpoint = read_facts(run / "checkpoints/step-00000020")
    assert (checkpoint.kind, checkpoint.run, checkpoint.step) == ("checkpoint", "demo", 20)
    assert (checkpoint.tokens, checkpoint.data, checkpoint.scores) == (1280, facts.data, facts.scores)
    shutil.rmtree(run / "checkpoints")  # pruned: the tokens follow from the config
    pruned = read_facts(run / "export")
    assert (pruned.tokens, pruned.data) == (1280, {"sources": {"code": {"path": "data/code", "digest": None}}})


def test_scores_are_those_of_the_same_weights(tmp_path: Path) -> None:
    """An export of the moving average has not the scores of the checkpoint of that step, nor the other way round."""
    run = write_run(tmp_path / "runs/demo")
    write_export(run / "ema", weights=b"e" * 9000, run=run, ema=True)
    assert read_facts(run / "ema").scores == {}
    results = write_results(run / "evals/demo/2026-01-03", step=20, value=0.7, n=200)
    (run / "evals/demo/2026-01-03/results.json").write_text(json.dumps(results | {"weights": "moving average"}))
    assert read_facts(run / "ema").scores["demo"]["sums"]["value"] == 0.7
    assert read_facts(run / "export").scores["demo"]["sums"]["value"] == 0.5


def test_a_registered_checkpoint_is_marked_until_its_last_version_is_removed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs/demo") / "checkpoints/step-00000020"
    first, second = add(path), add(path, "other")
    assert is_registered(path)
    moved = path.with_name("step-00000020-moved")
    path.rename(moved)
    assert add(moved).label == first.label
    changes.remove(Reference(second.name, number=1), files=False)
    assert is_registered(moved)
    changes.remove(Reference(first.name, number=1), files=False)
    assert not is_registered(moved)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_checkpoint_in_a_read_only_folder_is_registered_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_run(tmp_path / "runs/demo") / "checkpoints/step-00000020"
    path.chmod(0o500)
    assert add(path).number == 1
    assert "its run may delete it" in caplog.text


def test_facts_of_a_folder_from_elsewhere(tmp_path: Path) -> None:
    facts = read_facts(write_export(tmp_path / "llama"))
    assert (facts.kind, facts.run, facts.step, facts.data, facts.scores) == ("model", None, None, {}, {})


def test_what_is_no_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo")
    with pytest.raises(DataError, match="is not a model") as caught:
        read_facts(run)
    assert caught.value.hint == f"smalti models add {run}/export"
    (run / "checkpoints/step-00000020/COMPLETE").unlink()
    with pytest.raises(DataError, match="is not a model") as caught:
        read_facts(run / "checkpoints/step-00000020")
    assert "not written to its end" in str(caught.value.hint)
    (run / "export/model.safetensors").unlink()
    with pytest.raises(DataError, match="is not a model"):
        read_facts(run / "export")
    with pytest.raises(DataError, match="there is no folder"):
        read_facts(tmp_path / "nowhere")


def test_other_weights_in_the_folder_are_another_version(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    assert add(folder).label == "demo/1"
    assert add(folder).label == "demo/1"
    write_export(folder, weights=b"x" * 9000)
    assert add(folder).label == "demo/2"
    first, second = versions.get(Reference("demo", 1)), versions.get(Reference("demo"))
    assert (first.replaced_by, second.label, second.replaced_by) == ("demo/2", "demo/2", None)
    with pytest.raises(DataError, match="has changed since demo/1 was registered; it holds demo/2 now"):
        versions.resolve("models:/demo/1")
    write_export(folder)
    assert add(folder).label == "demo/1"
    assert versions.resolve("models:/demo/1").replaced_by is None


def test_a_change_in_any_shard_or_in_the_config_is_noticed(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", weights=bytes(500_000))
    (folder / "model-2.safetensors").write_bytes(bytes(10))
    (folder / "model.safetensors.index.json").write_text("{}")
    version = add(folder)
    for name in ("model.safetensors", "model-2.safetensors", "model.safetensors.index.json", "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + b"\1")
        assert str(version.problem()).startswith(f"{folder} has changed"), name
        (folder / name).write_bytes(content)
    assert version.problem() is None
    (folder / "README.md").write_text("a card is no part of the model")
    assert version.problem() is None
    (folder / "model-2.safetensors").unlink()
    assert version.problem() is not None


def test_a_moved_folder_keeps_its_number_and_what_was_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo")
    before = add(run / "export")
    (run / "export").rename(tmp_path / "elsewhere")
    shutil.rmtree(run)
    with pytest.raises(DataError, match="export is gone") as caught:
        versions.resolve("models:/demo")
    assert "smalti models add FOLDER --name demo" in str(caught.value.hint)
    moved = add(tmp_path / "elsewhere")
    assert (moved.label, moved.path) == ("demo/1", str(tmp_path / "elsewhere"))
    assert (moved.tokens, moved.data, moved.scores) == (before.tokens, before.data, before.scores)
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "copy")
    assert add(tmp_path / "copy").label == "demo/2"


def test_a_tag_is_on_one_version_and_its_moves_are_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        add(write_export(tmp_path / str(number), weights=bytes([number]) * 99))
    assert changes.tag(Reference("demo", 1), "production")[1] is None
    version, before = changes.tag(Reference("demo"), "production")
    assert (version.label, version.tags, before) == ("demo/2", ("production",), 1)
    assert changes.tag(Reference("demo"), "production")[1] == 2  # no move
    assert versions.get(Reference("demo", 1)).tags == ()
    assert versions.resolve("models:/demo@production").number == 2
    assert [each.label for each in versions.versions(tag="production")] == ["demo/2"]
    changes.untag(Reference("demo", tag="production"), "production")
    with pytest.raises(DataError, match="no version of demo has the tag 'production'"):
        versions.resolve("models:/demo@production")
    moves = [(move.tag, move.from_version, move.to_version) for move in versions.moves("demo")]
    assert moves == [("production", None, 1), ("production", 1, 2), ("production", 2, None)]
    with pytest.raises(UserError, match="demo/1 has no tag 'production'"):
        changes.untag(Reference("demo", 1), "production")
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(DataError, match="is gone"):
        changes.tag(Reference("demo", 1), "production")


def test_numbers_are_not_used_again(tmp_path: Path) -> None:
    for number in (1, 2):
        add(write_export(tmp_path / str(number), weights=bytes([number]) * 99))
    assert changes.remove(Reference("demo", 2), files=False).label == "demo/2"
    assert (tmp_path / "2").is_dir()
    assert add(tmp_path / "2").label == "demo/3"
    assert [version.number for version in versions.versions(name="demo")] == [3, 1]
    with pytest.raises(DataError, match="there is no version 2 of demo") as caught:
        versions.get(Reference("demo", 2))
    assert caught.value.allowed == "demo/1, demo/3"


def test_files_are_deleted_only_if_they_are_those_of_this_version_alone(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    add(folder)
    add(folder, "other")
    with pytest.raises(UserError, match=f"{folder} is also other/1"):
        changes.remove(Reference("demo", 1), files=True)
    changes.remove(Reference("other", 1), files=False)
    changes.tag(Reference("demo", 1), "production")
    with pytest.raises(UserError, match="demo/1 has the tag 'production'"):
        changes.remove(Reference("demo", 1), files=True)
    changes.untag(Reference("demo", 1), "production")
    write_export(folder, weights=b"others")
    with pytest.raises(DataError, match="has changed"):
        changes.remove(Reference("demo", 1), files=True)
    assert folder.is_dir()
    write_export(folder)
    changes.remove(Reference("demo", 1), files=True)
    assert not any(tmp_path.glob("*export*"))
    assert versions.versions(name="demo") == []
    with pytest.raises(DataError, match="demo has no version left"):
        versions.get(Reference("demo"))


def test_a_removal_that_is_not_committed_keeps_the_files(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    add(folder)
    with database.transaction() as db:  # the commit fails: a row refers to the version that is removed
        db.execute("CREATE TABLE uses (name, version, FOREIGN KEY (name, version) REFERENCES model_versions "
                   "DEFERRABLE INITIALLY DEFERRED)")  # fmt: skip
        db.execute("INSERT INTO uses VALUES ('demo', 1)")
    with pytest.raises(Exception, match="FOREIGN KEY constraint failed"):
        changes.remove(Reference("demo", 1), files=True)
    assert versions.resolve("models:/demo/1").path == str(folder)


def test_scores_of_a_later_evaluation(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    assert changes.add_scores(folder, {}) == []
    assert not database.location().exists()  # an evaluation makes no database
    add(folder)
    fewer = write_results(tmp_path / "fewer", step=1, value=0.7, n=10)
    for results in (write_results(tmp_path / "all", step=1, value=0.5), fewer):
        assert [version.label for version in changes.add_scores(folder, scores_of(results))] == ["demo/1"]
    assert versions.get(Reference("demo")).scores["demo"]["sums"]["value"] == 0.5
    write_export(folder, weights=b"another model")
    assert changes.add_scores(folder, scores_of(fewer)) == []


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("models:/demo", Reference("demo")),
        ("demo/12", Reference("demo", number=12)),
        ("models:/a.b-c_1@production", Reference("a.b-c_1", tag="production")),
    ],
)
def test_references(text: str, reference: Reference) -> None:
    assert parse(text) == reference
    assert parse(reference.text) == reference


@pytest.mark.parametrize("text", ["models:/", "models:/a/b", "models:/a@", "models:/a/1@b", "models://a/1", "a/-1", ""])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UserError, match="not a reference") as caught:
        parse(text)
    assert "models:/NAME@TAG" in str(caught.value.allowed)


def test_names_and_tags() -> None:
    check_name("Demo-1.5_b")
    check_tag("production")
    for name in ("", "a/b", "a@b", ".a", "a b", "x" * 101):
        with pytest.raises(UserError, match="cannot be the name of a model"):
            check_name(name)
    for tag in ("", "3", "v3", "V3", "latest", "a b", "a@b", "a/b"):
        with pytest.raises(UserError, match="cannot be a tag"):
            check_tag(tag)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    add(write_export(tmp_path / "export"))
    with pytest.raises(DataError, match="there is no registered model 'dmeo'") as caught:
        versions.resolve("models:/dmeo@production")
    assert (caught.value.allowed, caught.value.hint) == ("demo", "did you mean demo?")


ADD = """
import sys, time
from pathlib import Path
from smalti.track.registry import changes
from smalti.track.registry.facts import read_facts
from smalti.track.registry.reference import Reference
while not Path("go").exists():
    time.sleep(0.001)
for folder in sys.argv[1:]:
    version, _ = changes.add(read_facts(folder), "demo")
    changes.tag(Reference("demo", number=version.number), "newest")
"""


def test_processes_that_register_at_once(tmp_path: Path) -> None:
    """Each gets numbers of its own, the tag is on one version, and its moves are a chain."""
    started = []
    for process in range(2):
        folders = [
            str(write_export(tmp_path / f"{process}-{number}", weights=bytes([process, number]) * 99))
            for number in range(5)
        ]
        started.append(subprocess.Popen([sys.executable, "-c", ADD, *folders], cwd=tmp_path, stderr=subprocess.PIPE))
    (tmp_path / "go").touch()
    for each in started:
        _, errors = each.communicate(timeout=60)
        assert each.returncode == 0, errors
    listed = versions.versions(name="demo")
    assert [version.number for version in listed] == list(range(10, 0, -1))
    assert len({version.path for version in listed}) == 10
    moves = versions.moves("demo")
    assert [move.from_version for move in moves] == [None, *(move.to_version for move in moves[:-1])]
    assert [version.number for version in listed if version.tags] == [moves[-1].to_version]
    assert json.dumps([version.to_json() for version in listed])
