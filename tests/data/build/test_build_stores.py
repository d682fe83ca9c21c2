"""Inputs in stores: S3, GCS, Azure and HTTP give the documents of the same local files; versions show changes."""

import gzip
import random
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cloud_servers import cloud_server
from planted_documents import prose
from s3_buckets import bucket
from test_build_job import config, rows

from smalti.base.errors import DataError, UserError
from smalti.data.build.inputs import find_inputs, local_files
from smalti.data.build.job import build
from smalti.data.documents import files as files_module
from smalti.data.documents.files import find_files


@pytest.fixture
def files() -> dict[str, bytes]:
    """Name -> content: text, a page, a truncated file, one of an unknown kind and a hidden one."""
    draw = random.Random(6)
    return {
        "a/one.txt": prose(draw).encode(),
        "a/b/two.html": f"<html><body><p>{prose(draw)}</p></body></html>".encode(),
        "a/three.txt.gz": gzip.compress(prose(draw).encode()),
        "broken.txt.gz": gzip.compress(prose(draw).encode())[:-40],
        "a/picture.png": b"not read",
        "a/.hidden/four.txt": b"not read",
        "ab.txt": b"beside the folder a",
    }


def local_rows(tmp_path: Path, files: dict[str, bytes], *names: str) -> dict[str, dict]:
    """The documents and drops of a build of local files."""
    for name in names or files:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(files[name])
    build(config(tmp_path, output=str(tmp_path / "local"), name="local"))
    return {**rows(tmp_path / "local", "documents"), **rows(tmp_path / "local", "drops")}


def test_s3(tmp_path, files, moto, monkeypatch):
    expected = local_rows(tmp_path, files)
    with bucket(moto, monkeypatch) as s3:
        for name, data in files.items():
            s3.write(f"raw/in/{name}", data)
        remote = config(tmp_path, inputs=[{"path": f"s3://{s3.name}/raw/in", "name": "in"}])
        report = build(remote)
        assert report.values["skipped_files"] == {"in": {".png": 1}}
        found = {**rows(tmp_path / "out", "documents"), **rows(tmp_path / "out", "drops")}
        assert (
            found.keys()
            == expected.keys()
            == {"a/one.txt", "a/b/two.html", "a/three.txt.gz", "broken.txt.gz", "ab.txt"}
        )
        reason = expected["broken.txt.gz"].pop("reason").replace(str(tmp_path / "in"), f"s3://{s3.name}/raw/in")
        assert found["broken.txt.gz"].pop("reason") == reason
        assert found == expected
        assert not build(remote).is_new
        s3.write("raw/in/a/one.txt", prose(random.Random(8)).encode())
        assert build(remote).is_new
        assert rows(tmp_path / "out", "documents")["a/one.txt"] != expected["a/one.txt"]
        assert not list((tmp_path / ".test.steps").rglob("*.tmp"))
        with pytest.raises(DataError, match="holds no documents"):
            build(config(tmp_path, inputs=[f"s3://{s3.name}/nothing"]))
        with pytest.raises(UserError, match=r"allowed: a local folder|is a URL"):
            build(config(tmp_path, inputs=[{"path": f"s3://{s3.name}/raw/in", "code": {"licences": "any"}}]))


def test_a_file_that_changes_after_it_was_listed(tmp_path, moto, monkeypatch):
    from smalti.base.errors import RetryableError
    from smalti.data.build import job

    with bucket(moto, monkeypatch) as s3:
        s3.write("in/a.txt", prose(random.Random(1)).encode())

        def then_changed(inputs):
            sources = find_inputs(inputs)
            s3.write("in/a.txt", prose(random.Random(2)).encode())
            return sources

        monkeypatch.setattr(job, "find_inputs", then_changed)
        with pytest.raises(RetryableError, match="changed after it was listed"):
            build(config(tmp_path, inputs=[f"s3://{s3.name}/in"]))


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_other_stores(tmp_path, files, kind, monkeypatch):
    with cloud_server(kind) as container:
        for name, value in container.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        container.objects |= {f"in/{name}": data for name, data in files.items()}
        (sources,) = find_inputs(config(tmp_path, inputs=[f"{kind}://box/in"]).inputs).values()
        assert [file.name for file in sources.files] == [
            "a/b/two.html",
            "a/one.txt",
            "a/three.txt.gz",
            "ab.txt",
            "broken.txt.gz",
        ]
        assert [file.n_bytes for file in sources.files] == [len(files[file.name]) for file in sources.files]
        with local_files(sources.files, tmp_path / "x") as local:
            assert [Path(file.path).read_bytes() for file in local] == [files[file.name] for file in sources.files]


@pytest.fixture
def http(tmp_path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    (tmp_path / "www").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_says_nothing_of_changes(tmp_path, http, monkeypatch):
    (tmp_path / "www" / "page.txt").write_text("text")
    hidden = SimpleHTTPRequestHandler.send_header
    monkeypatch.setattr(SimpleHTTPRequestHandler, "send_header",
                        lambda self, name, value: name != "Last-Modified" and hidden(self, name, value))  # fmt: skip
    with pytest.raises(DataError, match="neither ETag nor Last-Modified"):
        build(config(tmp_path, inputs=f"{http}/page.txt"))


def test_keys_that_no_url_names(monkeypatch):
    keys = [("a?b.txt", 4, "1"), ("a//b.txt", 4, "1"), ("c.txt", 4, "1")]
    monkeypatch.setattr(files_module.cloud, "walk", lambda url: iter(keys))
    listed = find_files("s3://box/in", for_build=True)
    assert ([file.name for file in listed.files], listed.unnamable) == (["c.txt"], ("a//b.txt", "a?b.txt"))


def test_a_file_by_http(tmp_path, http):
    text = prose(random.Random(3))
    (tmp_path / "www" / "page.txt").write_text(text)
    build(config(tmp_path, inputs=f"{http}/page.txt"))
    table = pq.read_table(tmp_path / "out" / "documents" / "page" / "train.parquet")
    assert table.column("id").to_pylist() == ["page.txt"]
    with pytest.raises(DataError, match=r"nowhere.txt does not exist"):
        build(config(tmp_path, inputs=f"{http}/nowhere.txt"))
    with pytest.raises(UserError, match="of no known kind"):
        build(config(tmp_path, inputs=f"{http}/folder"))
