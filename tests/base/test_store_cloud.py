"""Files in an object store: written whole or not at all, missing files, no listing unless requested."""

import os
from collections.abc import Iterator

import pytest
from s3_server import Faults, Proxy, fault_proxy, moto_server, object_server, s3_environment

from smalti.base import cloud, store
from smalti.base.errors import DataError, RetryableError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with moto_server() as moto, fault_proxy(moto, Faults()) as proxy:
        for name, value in s3_environment(moto).items():
            monkeypatch.setenv(name, value)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        client.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.mark.slow
def test_round_trips(server: Proxy) -> None:
    path = "s3://bucket/run/a/b.bin"
    assert not store.exists(path)
    store.write_bytes(path, b"0123456789")
    assert store.exists(path)
    assert store.size_bytes(path) == 10
    assert store.read_bytes(path) == b"0123456789"
    assert [store.read_range(path, *one) for one in ((3, 4), (8, 9), (4, 0), (10, 2))] == [b"3456", b"89", b"", b""]
    store.write_json("s3://bucket/run/c.json", {"a": 1})
    assert store.read_json("s3://bucket/run/c.json") == {"a": 1}
    assert server.counts["LIST"] == 0
    assert store.list_folder("s3://bucket/run") == ["a", "c.json"]
    assert store.list_folder("s3://bucket/") == ["run"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("read", [store.read_bytes, store.read_text, store.size_bytes, store.list_folder])
def test_a_missing_file_is_named(server: Proxy, read: object) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/nowhere\.bin does not exist"):
        read("s3://bucket/nowhere.bin")  # type: ignore[operator]
    with pytest.raises(DataError, match="does not exist"):
        store.read_range("s3://bucket/nowhere.bin", 0, 5)


def test_a_block_that_raises_leaves_nothing(server: Proxy) -> None:
    def half() -> None:
        with store.open_write("s3://bucket/half") as file:
            file.write(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert not store.exists("s3://bucket/half")


def test_faults_of_a_moment_are_not_felt(server: Proxy) -> None:
    store.write_bytes("s3://bucket/file", b"x" * 1000)
    server.faults.unavailable = 0.4
    assert [store.read_bytes("s3://bucket/file") for _ in range(10)] == [b"x" * 1000] * 10


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("s3://bucket/a/b/", "s3://bucket", "a/b"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/a?endpoint=http://x:1", "s3://bucket?endpoint=http://x:1", "a"),
        ("s3://bucket/a#1/b?region=x", "s3://bucket?region=x", "a#1/b"),
        ("https://host:8/a/b", "https://host:8", "a/b"),
        ("hf://datasets/org/name/a/b", "hf://datasets/org/name/resolve/main", "a/b"),
        ("hf://datasets/org/name@v1", "hf://datasets/org/name/resolve/v1", ""),
        ("hf://org/name/a", "hf://org/name/resolve/main", "a"),
        ("hf://buckets/org/name/a", "hf://buckets/org/name/resolve", "a"),
    ],
)
def test_addresses(url: str, root: str, path: str) -> None:
    assert cloud.split(url) == (root, path)
    assert cloud.is_cloud(url)


def test_names_with_options() -> None:
    assert store.join("s3://bucket/a/?endpoint=http://x", "b", "c") == "s3://bucket/a/b/c?endpoint=http://x"
    assert not cloud.is_cloud("memory://a")
    assert not cloud.is_cloud("/s3/a")
    assert not cloud.is_cloud("s3")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>", "slow"),
        ("Server returned non-2xx status code: 503 Service Unavailable: ", "again"),
        ("Server returned non-2xx status code: 429 Too Many Requests", "slow"),
        ("Server returned non-2xx status code: 500 Internal", "again"),
        ("Server returned non-2xx status code: 408 Request Timeout", "again"),
        ("Server returned non-2xx status code: 416 Range Not Satisfiable", "short"),
        ("Server returned non-2xx status code: 400 Bad Request: ExpiredToken", "forbidden"),
        ("Error performing PUT http://169.254.169.254/latest/api/token", "keyless"),
        ("HTTP error: error sending request", "again"),
    ],
)
def test_what_errors_mean(text: str, kind: str) -> None:
    assert cloud.trouble(Exception(text)) == kind


def test_odd_answers_of_a_moment_are_not_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page instead of a file, or a whole file instead of a range; if it persists, the error quotes it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with object_server({"bucket/a.json": b'{"a": 1}'}) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cloud.time, "sleep", lambda seconds: None)
        server.faults.first = ["page", "page"]
        assert store.read_json("s3://bucket/a.json") == {"a": 1}
        server.faults.first = ["unranged", "page"]
        assert store.read_range("s3://bucket/a.json", 1, 3) == b'"a"'
        server.faults.page = 1.0
        with pytest.raises(RetryableError, match=r"a page was returned instead .* begins with '<!DOCTYPE html>"):
            store.read_json("s3://bucket/a.json")
        with pytest.raises(DataError, match="cannot be read: 4 times"):
            store.read_range("s3://bucket/a.json", 1, 3)


def test_an_unreachable_s3_names_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    error = Exception("HTTP error: error sending request")
    assert "set AWS_ENDPOINT_URL" in str(cloud.final_error("s3://bucket/a", error).hint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert "AWS_ENDPOINT_URL=http://minio:9000: check it" in str(cloud.final_error("s3://bucket/a", error).hint)
    assert "AWS" not in str(cloud.final_error("https://host/a", error).hint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:secret@minio:9000")
    assert "AWS_ENDPOINT_URL=http://***@minio:9000: check it" in str(cloud.final_error("s3://bucket/a", error).hint)
