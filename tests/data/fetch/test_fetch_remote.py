"""Reading from a remote store: right, wrong and missing responses; nothing is listed or requested twice."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import Faults, Objects, object_server, s3_environment

from smalti.base import store
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.data import FetchConfig
from smalti.data.fetch import Files, Range, Share, open_files

pytestmark = pytest.mark.slow

DATA = random.Random(1).randbytes(9_000_000)
OBJECTS = {"bucket/set/a.bin": DATA, "bucket/set/index.json": b"{}", "bucket/set/empty": b""}


@pytest.fixture
def server() -> Iterator[Objects]:
    with object_server(OBJECTS) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    if "server" in request.fixturenames:
        for name, value in s3_environment(request.getfixturevalue("server").url).items():
            monkeypatch.setenv(name, value)


def fetch(**options: Any) -> FetchConfig:
    return FetchConfig(**{"requests_per_s": 100_000, "timeout": "2s", "give_up": "20s", **options})


def ranges(n: int, seed: int = 0, length: int = 2000) -> list[Range]:
    chance = random.Random(seed)
    return [Range("a.bin", chance.randrange(len(DATA) - length), length) for _ in range(n)]


def right(wanted: list[Range], found: list[memoryview]) -> bool:
    return [bytes(one) for one in found] == [DATA[one.start : one.start + one.length] for one in wanted]


def opened(url: str, *mirrors: str, **options: Any) -> Files:
    return open_files(url, mirrors=mirrors, fetch=fetch(**options))


# ---- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_ranges_of_a_store(server: Objects, scheme: str) -> None:
    files = opened("s3://bucket/set" if scheme == "s3" else f"{server.url}/bucket/set/")
    wanted = [*ranges(50), Range("a.bin", 7, 0), Range("a.bin", 100, 8_500_000)]
    assert right(wanted, files.read(wanted))
    assert files.whole("index.json") == b"{}"
    assert files.whole("a.bin") == DATA
    assert files.whole("empty") == b""
    assert files.size("a.bin") == len(DATA)
    assert server.gets("index.json") == 1
    assert server.counts["LIST"] == 0
    counts = files.counts.as_dict()
    assert counts["requests"] == sum(server.counts.values())
    assert counts["retries"] == counts["cache_hits"] == 0
    files.close()
    assert files.whole("index.json") == b"{}"
    files.close()


def test_neighbours_come_in_one_request(server: Objects) -> None:
    files = opened("s3://bucket/set")
    wanted = [Range("a.bin", 5000 * number, 4000) for number in reversed(range(20))]
    assert right(wanted, files.read(wanted))
    assert server.gets("a.bin") == 1
    files.close()


def test_one_store_for_many_threads(server: Objects) -> None:
    files = opened("s3://bucket/set", concurrency=4)
    server.faults.latency_s = 0.005
    good: list[bool] = []

    def reader(seed: int) -> None:
        wanted = ranges(20, seed)
        good.append(right(wanted, files.read(wanted)))

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 8
    files.close()


# ---- what is answered -----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", ["unavailable", "slow_down", "truncate", "reset"])
def test_answers_that_may_be_better_next_time(server: Objects, fault: str) -> None:
    setattr(server.faults, fault, 0.2)
    files = opened("s3://bucket/set")
    wanted = ranges(100)
    assert right(wanted, files.read(wanted))
    assert files.whole("a.bin") == DATA
    counts = files.counts.as_dict()
    assert server.faults.done[fault] > 0
    assert counts["retries"] > 0
    assert (counts["slowdowns"] > 0) == (fault == "slow_down")
    files.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("fault", ["page", "unranged", "gone"])
def test_odd_answers_between_good_ones_are_passed_over(server: Objects, scheme: str, fault: str) -> None:
    """A store that has returned ranges is retried, whatever a proxy responds in between."""
    files = opened("s3://bucket/set" if scheme == "s3" else f"{server.url}/bucket/set")
    assert right(ranges(1), files.read(ranges(1)))
    setattr(server.faults, fault, 0.2)
    wanted = ranges(100)
    assert right(wanted, files.read(wanted))
    assert server.faults.done[fault] > 0
    assert files.counts["retries"] > 0
    setattr(server.faults, fault, 1.0)
    files.close()
    engine_gives_up = opened("s3://bucket/set" if scheme == "s3" else f"{server.url}/bucket/set", give_up="1s")
    server.faults.first = ["none"]
    assert right(ranges(1), engine_gives_up.read(ranges(1)))
    with pytest.raises(RetryableError, match=r"a\.bin of .* was requested \d+ times") as caught:
        engine_gives_up.read(wanted[:1])
    assert caught.value.exit_code == 75
    engine_gives_up.close()


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_416_for_bytes_that_are_there_is_passed_over(server: Objects, scheme: str) -> None:
    """As of a node that has not seen the whole file yet. One for a file that really ends before is final."""
    files = opened("s3://bucket/set" if scheme == "s3" else f"{server.url}/bucket/set")
    assert right(ranges(1), files.read(ranges(1)))
    server.faults.first = ["unsatisfiable"] * 3
    assert right(ranges(1, seed=1), files.read(ranges(1, seed=1)))
    with pytest.raises(DataError, match="ends before"):
        files.read([Range("a.bin", len(DATA) + 10, 5)])
    files.close()


@pytest.mark.parametrize("fault", ["page", "unranged"])
def test_odd_answers_at_the_beginning_are_passed_over(server: Objects, fault: str) -> None:
    server.faults.first = [fault] * 3
    files = opened("s3://bucket/set")
    assert right(ranges(1), files.read(ranges(1)))
    files.close()


def test_another_copy_is_read_where_one_gives_pages(server: Objects) -> None:
    with object_server(OBJECTS) as other:
        server.faults.page = 1.0
        files = opened("s3://bucket/set", f"{other.url}/bucket/set")
        wanted = ranges(20)
        assert right(wanted, files.read(wanted))
        assert files.whole("index.json", json.loads) == b"{}"
        files.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("n_pages", [1, 3, 100])
def test_a_page_instead_of_an_index(server: Objects, n_pages: int) -> None:
    """A page is requested again; repeated pages are a retryable error that shows the page."""
    server.faults.first = ["page"] * n_pages
    files = opened("s3://bucket/set")
    if n_pages < 4:
        assert files.whole("index.json") == b"{}"
    else:
        begins = "<!DOCTYPE html> <html><body>Down for"
        with pytest.raises(RetryableError, match=rf"index\.json: a page was returned .*'{begins}"):
            files.whole("index.json")
    files.close()


@pytest.mark.parametrize("large", [False, True])
def test_what_fails_its_check_is_read_again(server: Objects, large: bool) -> None:
    content = b'{"a": "' + b"b" * (9_000_000 if large else 10) + b'"}'
    objects = dict(OBJECTS, **{"bucket/set/manifest.json": content})
    server.objects = objects
    files = opened("s3://bucket/set")

    def check(data: bytes) -> None:
        if data != content:
            raise DataError("this is no manifest")

    server.faults.first = ["flip"] * 2
    assert files.whole("manifest.json", check) == content
    objects["bucket/set/manifest.json"] = b"other" + content
    with pytest.raises(DataError, match=r"this is no manifest; it begins with 'other"):
        files.whole("manifest.json", check)
    files.close()


def test_requests_that_hang_are_sent_a_second_time(server: Objects) -> None:
    # The first answers are slow, so that later none but those that hang come late, however busy the machine is.
    files = opened("s3://bucket/set", timeout="60s", concurrency=100)
    server.faults.latency_s = 0.3
    wanted = [Range("a.bin", 50_000 * number, 2000) for number in range(100)]
    files.read(wanted)
    server.faults.latency_s = 0.0
    assert files.counts["hedges"] == 0
    for one in wanted[:3]:
        server.faults.first = ["hang"]
        assert right([one], files.read([one]))
    counts = files.counts.as_dict()
    assert server.faults.done["hang"] == 3
    assert 3 <= counts["hedges"] <= 1 + 0.05 * counts["requests"]
    assert counts["retries"] == 0
    files.close()


def test_permanent_errors_are_raised_at_once(server: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened("s3://bucket/set")
    with pytest.raises(DataError, match=r"s3://bucket/set/none\.bin does not exist"):
        files.read([Range("none.bin", 0, 5)])
    with pytest.raises(DataError, match=r"a\.bin has only 9,000,000 bytes; bytes 8,999,995 to 9,000,005"):
        files.read([Range("a.bin", len(DATA) - 5, 10)])
    with pytest.raises(DataError, match="ends before the requested bytes"):
        files.read([Range("a.bin", len(DATA) + 5, 10)])
    with pytest.raises(DataError, match="leads out of its folder"):
        files.read([Range("../other/a.bin", 0, 5)])
    assert files.counts["retries"] == 1  # a short answer: a second one, before the size is asked for
    assert files.counts["requests"] == sum(server.counts.values())
    files.close()
    with pytest.raises(UserError, match="'endpiont' in s3"):
        opened("s3://bucket/set?endpiont=x").whole("index.json")
    with pytest.raises(UserError, match="names no repository"):
        opened("hf://datasets/alone").whole("index.json")
    with pytest.raises(UserError, match="R2_ACCESS_KEY_ID"):
        opened("s3://bucket/set?keys=R2").whole("index.json")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("code", "hint"), [(403, "AWS_ACCESS_KEY_ID"), (401, "AWS_ACCESS_KEY_ID"), (400, "endpoint")])
def test_credentials_that_do_not_fit(code: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(f"HTTP/1.1 {code} No") as url:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DataError) as caught:
            opened("s3://bucket/set").read(ranges(3))
    assert hint in str(caught.value.hint)
    assert str(code) in caught.value.message


def test_a_server_that_knows_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering("HTTP/1.1 200 OK") as url, pytest.raises(DataError, match="cannot be read") as caught:
        opened(f"{url}/set").read(ranges(1))
    assert "does not support range requests" in str(caught.value.hint)


def answering(status: str) -> Any:
    """A server with one fixed response."""
    from contextlib import contextmanager

    from s3_server import _Server

    async def answer(reader: Any, writer: Any) -> bool:
        await reader.readuntil(b"\r\n\r\n")
        headers = 'Content-Length: 2\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: "1"'
        writer.write(f"{status}\r\n{headers}\r\nConnection: close\r\n\r\nxx".encode())
        await writer.drain()
        return False

    @contextmanager
    def running() -> Iterator[str]:
        server = _Server(answer)
        server.start()
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.stop()

    return running()


def test_no_answer_ends_the_attempt(server: Objects, caplog: pytest.LogCaptureFixture) -> None:
    server.faults.unavailable = 1.0
    files = opened("s3://bucket/set", give_up="1s")
    with pytest.raises(RetryableError, match=r"a\.bin of s3://bucket/set was requested \d+ times in .*503") as caught:
        files.read(ranges(3))
    assert caught.value.exit_code == 75
    assert "give_up" in str(caught.value.hint)
    assert "the endpoint is that of" in str(caught.value.hint)
    files.close()


def test_a_store_that_has_answered_has_the_right_endpoint(server: Objects) -> None:
    files = opened("s3://bucket/set", give_up="1s")
    assert files.whole("index.json") == b"{}"
    server.faults.unavailable = 1.0
    with pytest.raises(RetryableError, match="was requested") as caught:
        files.read(ranges(3))
    assert "endpoint" not in str(caught.value.hint)
    files.close()


def test_a_server_that_is_killed_and_comes_back(server: Objects) -> None:
    files = opened("s3://bucket/set")
    assert files.whole("index.json") == b"{}"
    server.server.cut()
    threading.Timer(1.0, server.server.back).start()
    wanted = ranges(20)
    assert right(wanted, files.read(wanted))
    assert files.counts["retries"] > 0
    files.close()


def test_the_rate_of_the_job_is_kept(server: Objects) -> None:
    """Four ranks of a job that may ask 40 times a second."""
    all_files = [
        open_files("s3://bucket/set", fetch=fetch(requests_per_s=40), share=Share(rank, 4)) for rank in range(4)
    ]
    threads = [threading.Thread(target=files.read, args=(ranges(20, rank),)) for rank, files in enumerate(all_files)]
    begun_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun_s > 1.5
    times = sorted(at for at, _, _ in server.requests)
    assert all(after - before > 0.9 for before, after in zip(times, times[46:], strict=False))
    for files in all_files:
        files.close()


def test_closing_ends_a_read(server: Objects) -> None:
    server.faults.hang = 1.0
    files = opened("s3://bucket/set", timeout="60s")
    threading.Timer(0.3, files.close).start()
    with pytest.raises(RetryableError, match="was closed while"):
        files.read(ranges(3))


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_another_copy_takes_over_mid_run(server: Objects, caplog: pytest.LogCaptureFixture) -> None:
    with object_server({"copy/a.bin": DATA}) as other:
        files = opened("s3://bucket/set", f"{other.url}/copy")
        wanted = ranges(30)
        assert right(wanted, files.read(wanted))
        assert other.gets("a.bin") == files.counts["failovers"] == 0
        server.server.cut()
        for seed in range(4):
            wanted = ranges(30, seed)
            assert right(wanted, files.read(wanted))
        assert other.gets("a.bin") >= 100
        assert files.counts["failovers"] >= 100
        assert "s3://bucket/set is not used for a while" in caplog.text
        files.close()


def test_a_copy_that_lacks_a_file_is_passed_over(server: Objects) -> None:
    with object_server({"copy/a.bin": DATA, "copy/b.bin": b"only here"}) as other:
        files = opened("s3://bucket/set", f"{other.url}/copy", f"{other.url}/nowhere")
        assert files.whole("b.bin") == b"only here"
        with pytest.raises(DataError, match=r"s3://bucket/set/c\.bin does not exist"):
            files.whole("c.bin")
        files.close()


def test_reading_again_uses_another_replica(server: Objects) -> None:
    wrong = bytes(len(DATA))
    with object_server({"copy/a.bin": wrong}) as other:
        files = opened("s3://bucket/set", f"{other.url}/copy")
        wanted = Range("a.bin", 1000, 100)
        assert bytes(files.read([wanted])[0]) == DATA[1000:1100]
        assert bytes(files.read_again(wanted)) == wrong[:100]
        assert bytes(files.read_again(wanted)) == DATA[1000:1100]
        assert bytes(files.read_again(wanted)) == wrong[:100]
        files.close()


def test_two_s3_stores_with_their_own_endpoints_and_keys(server: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_server({"backup/set/b.bin": b"second"}) as other:
        monkeypatch.setenv("BACKUP_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("BACKUP_SECRET_ACCESS_KEY", "y")
        mirror = f"s3://backup/set?endpoint={other.url}&region=auto&keys=BACKUP"
        assert opened("s3://bucket/set", mirror).whole("b.bin") == b"second"
        assert store.read_bytes(store.join(mirror, "b.bin")) == b"second"


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_copies_of_other_kinds(server: Objects, tmp_path: Path, kind: str) -> None:
    folder = "memory://fetch/set" if kind == "memory" else str(tmp_path)
    store.write_bytes(store.join(folder, "a.bin"), DATA)
    server.faults.unavailable = 1.0
    files = opened("s3://bucket/set", folder)
    wanted = ranges(20)
    assert right(wanted, files.read(wanted))
    files.close()


def test_memory_alone() -> None:
    store.write_bytes("memory://fetch/alone/a.bin", DATA)
    files = opened("memory://fetch/alone")
    wanted = ranges(20)
    assert right(wanted, files.read(wanted))
    assert files.size("a.bin") == len(DATA)
    with pytest.raises(DataError, match="does not exist"):
        files.whole("none.bin")
    with pytest.raises(DataError, match="truncated"):
        files.read([Range("a.bin", len(DATA) - 1, 2)])
    files.close()


# ---- the node's cache -----------------------------------------------------------------------------------------------


def test_the_cache_is_shared_by_ranks_and_passed_by_when_a_check_failed(server: Objects, tmp_path: Path) -> None:
    first, second = (
        open_files("s3://bucket/set", fetch=fetch(cache=str(tmp_path)), digest="of the content") for _ in range(2)
    )
    wanted = ranges(30)
    assert right(wanted, first.read(wanted))
    asked = server.gets("a.bin")
    assert right(wanted, second.read(wanted))
    assert server.gets("a.bin") == asked
    assert second.counts["cache_hits"] == 30
    assert bytes(second.read_again(wanted[0])) == DATA[wanted[0].start :][:2000]
    assert server.gets("a.bin") == asked + 1
    first.close()
    second.close()


def test_what_has_no_digest_is_not_kept(server: Objects, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = opened("s3://bucket/set", cache=str(tmp_path / "cache"))
    wanted = Range("a.bin", 0, 1000)
    for _ in range(2):
        assert bytes(files.read([wanted])[0]) == DATA[:1000]
    assert server.gets("a.bin") == 2
    assert not (tmp_path / "cache").exists()
    assert caplog.text.count("is not kept in data.fetch.cache") == 1
    files.close()


# ---- the Hub --------------------------------------------------------------------------------------------------------


def test_the_hub(server: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub answers with a redirect to a store; the token is for the Hub alone, the range for both."""
    heads: list[str] = []

    async def answer(reader: Any, writer: Any) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        name = head.split(" ")[1].rpartition("/")[2]
        where = f"http://localhost:{server.url.rpartition(':')[2]}/bucket/set/{name}"
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return False

    from s3_server import _Server

    hub = _Server(answer)
    hub.start()
    try:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
        monkeypatch.setenv("HF_TOKEN", "secret")
        files = opened("hf://datasets/org/name@v1.2/sub")
        wanted = ranges(3)
        assert right(wanted, files.read(wanted))
        assert files.whole("index.json") == b"{}"
        files.close()
        assert opened("hf://org/model").whole("index.json") == b"{}"
    finally:
        hub.stop()
    assert heads[0].startswith("GET /datasets/org/name/resolve/v1.2/sub/a.bin ")
    assert heads[-1].startswith("GET /org/model/resolve/main/index.json ")
    assert all("authorization: bearer secret" in head.lower() for head in heads)
    assert server.tokens == []


# ---- processes ------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys
sys.path.insert(0, {tests!r})
from smalti.base.errors import SmaltiError
from smalti.data.fetch import Range, open_files
before, used = open_files("s3://bucket/set"), open_files("s3://bucket/set")
def child(files):
    pid = os.fork()
    if pid == 0:
        try:
            code = 0 if len(files.read([Range("a.bin", 0, 10)])[0]) == 10 else 1
        except SmaltiError as error:
            code = 3 if "forked" in str(error) else 4
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(child(before))
used.read([Range("a.bin", 0, 10)])
print(child(used), child(open_files("s3://bucket/set")))
"""


def test_forks(server: Objects) -> None:
    """Opened before a fork: fine. Read before a fork: an error, not a hang."""
    script = _FORK.format(tests=str(Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "3", "3"], done.stderr


_LEAVE = """
import threading, time
from smalti.config.data import FetchConfig
from smalti.data.fetch import Range, open_files
files = open_files("s3://bucket/set", fetch=FetchConfig(timeout="60s"))
threading.Thread(target=lambda: files.read([Range("a.bin", n * 100_000, 10) for n in range(20)]), daemon=True).start()
time.sleep(0.5)
print("left")
"""


def test_leaving_while_the_store_hangs(server: Objects) -> None:
    server.faults.hang = 1.0
    done = subprocess.run([sys.executable, "-c", _LEAVE], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


_HANG = """
import time
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from smalti.base.errors import RetryableError
from smalti.config.data import FetchConfig
from smalti.data.fetch import Range, open_files
class Hanging(MemoryFileSystem):
    protocol = "hang"
    def cat_file(self, *arguments, **options):
        time.sleep(600)
fsspec.register_implementation("hang", Hanging)
try:
    open_files("hang://x", fetch=FetchConfig(timeout="0.2s", give_up="0.3s")).read([Range("a", 0, 3)])
except RetryableError:
    print("left")
"""


def test_leaving_while_a_library_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", _HANG], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_threads_end_with_the_last_reader(server: Objects) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    files = opened("s3://bucket/set")
    files.whole("index.json")
    files.close()
    del files
    end_s = time.monotonic() + 10
    while {thread.ident for thread in threading.enumerate()} - before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert {thread.ident for thread in threading.enumerate()} <= before


def test_faults_have_the_configured_rate() -> None:
    faults = Faults(unavailable=0.1, flip=0.2, seed=3)
    for _ in range(1000):
        faults.draw()
    assert 60 < faults.done["unavailable"] < 140
    assert 150 < faults.done["flip"] < 250
