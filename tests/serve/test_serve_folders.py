"""Which model is meant: a run, its name, or a Hugging Face folder."""

from pathlib import Path

import pytest

from smalti.base.errors import DataError, UserError
from smalti.serve.folders import find


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/demo"
    (run / "export").mkdir(parents=True)
    (run / "config.yaml").write_text("name: demo\n")
    (run / "export/config.json").write_text("{}")
    (run / "export/export.json").write_text('{"run": "demo", "step": 7}')
    return run


def test_a_run_by_path_or_name(run: Path, tmp_path: Path) -> None:
    for name in (str(run), "demo"):
        found = find(name, runs=str(tmp_path / "runs"))
        assert (found.folder, found.run_folder) == (str(run / "export"), str(run))
        assert found.record["step"] == 7
        assert found.name == "demo"


def test_a_folder_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    found = find(str(tmp_path / "other"))
    assert (found.run_folder, found.record, found.name) == (None, {}, "other")


def test_a_run_without_export_says_what_to_type(run: Path) -> None:
    (run / "export/config.json").unlink()
    with pytest.raises(UserError, match="no exported model") as caught:
        find(str(run))
    assert caught.value.hint == f"smalti export {run}"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder 'nowhere'"):
        find("nowhere", runs=str(tmp_path))
    with pytest.raises(DataError, match="neither a run nor a model"):
        find(str(tmp_path))
