"""A folder's content is replaced whole, and only what was written by us is ever removed."""

import json

import pytest

from smalti.base.errors import DataError, UserError
from smalti.data.documents.publish import publication, read_record


def publish(folder, entries, kind="curate", **record):
    with publication(str(folder), kind=kind, record_name="report.json") as result:
        for name, text in entries.items():
            (result.work / name).mkdir()
            (result.work / name / "x").write_text(text)
        result.record = record


def read(folder, kind="curate"):
    return read_record(str(folder), kind=kind, record_name="report.json", verb="smalti data curate")


def test_replaces_whole_and_keeps_what_is_not_ours(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    publish(tmp_path, {"a": "1", "b": "1"}, n=1)
    publish(tmp_path, {"b": "2"}, n=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "mine.txt", "report.json"]
    assert (tmp_path / "b" / "x").read_text() == "2"
    assert read(tmp_path)["n"] == 2


def test_foreign_entries_are_refused(tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.doc").write_text("years of work")
    with pytest.raises(UserError, match="documents exists and was not written by"):
        publish(tmp_path, {"documents": "x"})
    (tmp_path / "report.json").write_text('{"results": 1}')
    with pytest.raises(UserError, match=r"report\.json exists and was not written by"):
        publish(tmp_path, {"other": "x"})
    assert (tmp_path / "documents" / "thesis.doc").read_text() == "years of work"


def test_an_error_leaves_the_old_result(tmp_path):
    publish(tmp_path, {"a": "1"})

    def fails():
        with publication(str(tmp_path), kind="curate", record_name="report.json") as result:
            (result.work / "a").mkdir()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (tmp_path / "a" / "x").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.json"]


def test_cut_off_in_the_middle_is_seen_and_mended(tmp_path, monkeypatch):
    publish(tmp_path, {"a": "1", "b": "1"})
    with monkeypatch.context() as patch:
        real = __import__("os").replace

        def dies(source, target):
            if str(target).endswith("/c"):
                raise KeyboardInterrupt
            real(source, target)

        patch.setattr("smalti.data.documents.publish.os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, {"b": "2", "c": "2"})
    with pytest.raises(DataError, match="is incomplete"):
        read(tmp_path)
    publish(tmp_path, {"b": "2", "c": "2"})
    assert read(tmp_path)["entries"] == ["b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "report.json"]


def test_two_writers_are_refused(tmp_path):
    with (
        publication(str(tmp_path), kind="curate", record_name="report.json"),
        pytest.raises(UserError, match="another process is writing"),
    ):
        publish(tmp_path, {"a": "1"})


def test_a_record_cannot_point_outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "out"
    publish(folder, {"a": "1"})
    record = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**record, "entries": ["../outside", "..", "", "a"]}))
    publish(folder, {"a": "2"})
    assert outside.is_dir()
    assert (folder / "a" / "x").read_text() == "2"


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match="write it with 'smalti data curate'"):
        read(tmp_path)
    publish(tmp_path, {"a": "1"}, kind="tokenize")
    with pytest.raises(DataError, match="is not the record of"):
        read(tmp_path)
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="is a file"):
        publish(tmp_path / "f", {})
    with pytest.raises(UserError, match="local folder"):
        publish("s3://bucket/x", {})
