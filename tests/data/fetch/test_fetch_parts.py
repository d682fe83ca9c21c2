"""Parts of fetching without a network: local files, requests for ranges, the pace, copies that rest."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.base.errors import DataError, RetryableError
from smalti.base.rate_limit import RateLimiter, backoff_s
from smalti.config.data import FetchConfig
from smalti.data.fetch import Range, Share, open_files
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.engine import Engine, shared
from smalti.data.fetch.files import confined
from smalti.data.fetch.latency import Latency, hedge_allowed
from smalti.data.fetch.replicas import Replicas
from smalti.data.fetch.requests import GAP_BYTES, MAX_REQUEST_BYTES, RequestPlan

# ---- local files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "a.bin").write_bytes(bytes(range(200)))
    (tmp_path / "here" / "sub" / "b.bin").write_bytes(b"0123456789")
    return tmp_path / "here"


def test_local_ranges(folder: Path) -> None:
    files = open_files(str(folder))
    wanted = [Range("sub/b.bin", 3, 4), Range("a.bin", 198, 2), Range("a.bin", 0, 0), Range("sub/b.bin", 0, 10)]
    assert [bytes(one) for one in files.read(wanted)] == [b"3456", bytes([198, 199]), b"", b"0123456789"]
    assert files.whole("sub/b.bin") == b"0123456789"
    assert bytes(files.read_again(wanted[0])) == b"3456"
    files.close()
    assert bytes(files.read(wanted)[0]) == b"3456"
    files.close()


def test_local_errors_name_the_file(folder: Path) -> None:
    files = open_files(str(folder))
    with pytest.raises(DataError, match=r"a\.bin has only 200 bytes; bytes 190 to 210"):
        files.read([Range("a.bin", 190, 20)])
    with pytest.raises(DataError, match=r"none\.bin does not exist"):
        files.whole("none.bin")
    for name in ("../a.bin", "/etc/passwd", "sub/../../x", "", "a\0b", "..\\x"):
        with pytest.raises(DataError, match="leads out of its folder"):
            files.read([Range(name, 0, 1)])
    assert confined("sub/b..bin") == "sub/b..bin"


def test_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number}.bin" for number in range(300)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr("resource.getrlimit", lambda which: (400, 400))
    most = 100
    files = open_files(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    assert [files.whole(name).decode() for name in names * 2] == names * 2
    assert len(os.listdir("/proc/self/fd")) - before <= most
    files.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_many_folders_share_the_descriptors_of_the_process(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.bin").write_bytes(b"%02d" % number)
    script = _FEW.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "all read\nthis process uses all its 64 descriptors\n", done.stderr


_FEW = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from smalti.base.errors import UserError
from smalti.data.fetch import Range, open_files
folders = [open_files({folder!r}) for _ in range(6)]
for number in range(30):
    for files in folders:
        assert bytes(files.read([Range(f"{{number}}.bin", 0, 2)])[0]) == b"%02d" % number
print("all read")
for files in folders:
    files.close()
held = []
try:
    while True:
        held.append(os.open("/", os.O_RDONLY))
except OSError:
    pass
try:
    folders[0].whole("0.bin")
except UserError as error:
    print(str(error.message).partition(": ")[2])
"""


def test_closing_under_threads_that_read(tmp_path: Path) -> None:
    """No descriptor is closed, and given to another file, while a thread reads through it."""
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    files, wrong, interval_s = open_files(str(tmp_path)), [], sys.getswitchinterval()

    def reader(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(2000):
            number = chance.randrange(4)
            try:
                if bytes(files.read([Range(f"{number}.bin", 0, 9)])[0]) != bytes([number]) * 9:
                    wrong.append("bytes")
            except (DataError, RetryableError) as error:
                wrong.append(str(error))

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            files.close()
    finally:
        sys.setswitchinterval(interval_s)
    assert wrong == []


def test_a_local_folder_with_a_mirror(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "there"
    other.mkdir()
    (other / "a.bin").write_bytes(b"x" * 200)
    (other / "c.bin").write_bytes(b"c")
    files = open_files(str(folder), mirrors=[str(other)])
    assert bytes(files.read([Range("a.bin", 0, 2)])[0]) == b"\0\1"
    again = [bytes(files.read_again(Range("a.bin", 0, 2))) for _ in range(3)]
    assert again == [b"xx", b"\0\1", b"xx"]
    assert bytes(files.read_again(Range("sub/b.bin", 0, 2))) == b"01"
    assert files.whole("c.bin") == b"c"
    files.close()


# ---- which requests bring which ranges ------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 3 * MAX_REQUEST_BYTES),
            st.sampled_from([0, 1, 5000, MAX_REQUEST_BYTES * 2]),
        ),
        max_size=12,
    )
)
def test_ranges_are_put_together_again(asked: list[tuple[str, int, int]]) -> None:
    """With bytes that encode their offset; every requested byte is in one request, and no request is too long."""
    wanted = [Range(*one) for one in asked]
    plan = RequestPlan(wanted)
    assert all(0 < request.length <= MAX_REQUEST_BYTES for request in plan.requests)

    content = {name: random.Random(name).randbytes(1 << 16) for name in "ab"}

    def answer(name: str, start: int, length: int) -> memoryview:
        first = start % len(content[name])
        repeated = content[name] * (-(-(first + length) // len(content[name])))
        return memoryview(repeated)[first : first + length]

    parts = plan.parts([answer(*request) for request in plan.requests])
    assert parts == [answer(*one) for one in wanted]


def test_neighbours_come_together() -> None:
    near, far = 1000 + GAP_BYTES, 1000 + 2 * GAP_BYTES + 101
    plan = RequestPlan([Range("a", far, 10), Range("a", 0, 1000), Range("b", 0, 5), Range("a", near, 100)])
    assert [tuple(request) for request in plan.requests] == [("a", 0, near + 100), ("a", far, 10), ("b", 0, 5)]


# ---- pace -----------------------------------------------------------------------------------------------------------


def sent_in(bucket: RateLimiter, begin_s: float, seconds: float) -> int:
    """Requests that a process which always wants more may send in a time."""
    now_s, n = begin_s, 0
    while True:
        now_s += bucket.wait_s(now_s)
        if now_s >= begin_s + seconds:
            return n
        n += 1


def test_all_ranks_together_keep_to_the_rate() -> None:
    """Each rank starts at its own time, so that no second exceeds the rate, from the first on."""
    starts: list[float] = []
    for rank in range(300):
        bucket, now_s = RateLimiter(100.0, 0.0, rank=rank, world_size=300), 0.0
        while now_s < 9:
            now_s += bucket.wait_s(now_s)
            starts.append(now_s)
    for second in range(8):
        assert 90 <= sum(second <= start < second + 1 for start in starts) <= 110


def test_after_a_pause_a_burst_is_small() -> None:
    bucket = RateLimiter(100.0, 0.0)
    assert sent_in(bucket, 0.0, 1.0) == 100
    assert 100 <= sent_in(bucket, 60.0, 1.0) <= 126


def test_the_rate_drops_after_slow_down_and_recovers_gradually() -> None:
    bucket = RateLimiter(100.0, 0.0)
    for _ in range(50):  # many hear it together: one cut
        bucket.slow_down(10.0)
    assert bucket.rate_per_s(10.0) == pytest.approx(70)
    assert bucket.rate_per_s(12.0) == pytest.approx(80)
    assert bucket.rate_per_s(100.0) == 100
    for second in range(60):
        bucket.slow_down(200.0 + second)
    assert 5 <= bucket.rate_per_s(259.0) <= 20
    assert bucket.rate_per_s(300.0) == 100


def test_pauses_have_full_jitter() -> None:
    chance = random.Random(0)
    for failures, bound in ((0, 0.1), (1, 0.2), (3, 0.8), (50, 5.0)):
        found = [backoff_s(failures, chance) for _ in range(500)]
        assert 0 <= min(found) < 0.1 * bound
        assert 0.9 * bound < max(found) <= bound


def test_when_a_second_request_is_worth_it() -> None:
    latency = Latency()
    assert latency.hedge_after_s(16_384, 20.0) == 5.0
    for number in range(1000):
        latency.add(16_384, 0.1 if number % 20 else 2.0)
    for _ in range(30):
        latency.add(4 << 20, 1.0)
    assert 0.15 <= latency.hedge_after_s(16_384, 20.0) <= 3.0
    assert latency.hedge_after_s(8 << 20, 20.0) == pytest.approx(1.5)
    assert latency.hedge_after_s(1 << 20, 20.0) == pytest.approx(1.5)  # larger ones are a bound for smaller ones
    assert hedge_allowed(0, 0)
    assert not hedge_allowed(0, 1)
    assert hedge_allowed(1000, 50)
    assert not hedge_allowed(1000, 51)


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_that_fails_rests_and_is_tried_again() -> None:
    copies = Replicas((object(), object(), object()))  # type: ignore[arg-type]
    assert copies.pick(0.0) == 0
    assert [copies.failed(0, 1.0) for _ in range(3)] == [False, False, True]
    assert copies.pick(1.0) == 1
    assert copies.pick(1.0, without=[1]) == 2
    assert copies.pick(6.5) == 0
    assert copies.failed(0, 6.5)
    assert copies.pick(12.0) == 1  # longer this time
    assert copies.pick(17.0) == 0
    copies.answered(0, "a", ranged=True)
    assert not copies.failed(0, 18.0)
    for index in range(3):
        for _ in range(3):
            copies.failed(index, 20.0 + index)
    assert copies.pick(20.0) == 0  # all rest: the one whose rest ends first


def test_one_copy_never_rests() -> None:
    copies = Replicas((object(),))  # type: ignore[arg-type]
    assert not any(copies.failed(0, 0.0) for _ in range(10))
    assert copies.pick(0.0) == 0


# ---- the engine -----------------------------------------------------------------------------------------------------


class Answers:
    """A replica with scripted responses: seconds to wait, then bytes or an error; the last one repeats."""

    def __init__(self, url: str, *answers: tuple[float, bytes | Exception]) -> None:
        self.url = url
        self.n_asked = 0
        self._answers = answers

    async def range(self) -> bytes:
        self.n_asked += 1
        wait_s, answer = self._answers[min(self.n_asked, len(self._answers)) - 1]
        await asyncio.sleep(wait_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked(*copies: Answers, length: int = 100, **options: str) -> bytes:
    engine = Engine(FetchConfig(**{"requests_per_s": 1e5, "timeout": "0.4s", "give_up": "3s", **options}), Share())
    both: Any = Replicas(copies)  # type: ignore[arg-type]
    send: Any = Answers.range
    work = engine.request(both, "a.bin", send, Counts(), length=length)
    return bytes(engine.start(work).result(10))


@pytest.mark.slow
def test_a_refused_hedge_does_not_fail_the_first_request() -> None:
    first = Answers("s3://first", (0.3, RuntimeError("status code: 503")), (0.3, b"ok"))
    mirror = Answers("s3://mirror", (0.01, FileNotFoundError("404")))
    assert asked(first, mirror) == b"ok"
    assert mirror.n_asked == 1  # asked by the hedge, and not again
    assert first.n_asked >= 2


def test_a_file_that_no_copy_has_is_an_error_though_a_second_request_was_sent() -> None:
    with pytest.raises(DataError, match=r"first/a\.bin does not exist"):
        asked(Answers("s3://first", (0.2, FileNotFoundError())), Answers("s3://mirror", (0.0, FileNotFoundError())))


def test_keys_that_were_good_will_be_good_again() -> None:
    """An expired token may be renewed; keys that never worked are an error at once."""
    first = Answers("s3://first", (0, b"ok"), (0, PermissionError("status code: 403")), (0, b"again"))
    engine, both = Engine(FetchConfig(give_up="3s"), Share()), Replicas((first,))  # type: ignore[arg-type]
    send: Any = Answers.range
    found = [engine.start(engine.request(both, "a.bin", send, Counts(), length=9)).result(10) for _ in range(2)]
    assert found == [b"ok", b"again"]
    expired = RuntimeError("status code: 400 Bad Request, body: <Code>ExpiredToken</Code>")
    with pytest.raises(DataError, match="access is denied"):
        asked(Answers("s3://first", (0, expired)))


@pytest.mark.slow
def test_a_long_answer_over_a_slow_link_gets_its_time() -> None:
    latency = Latency()
    assert latency.deadline_s(8192, 20.0) == pytest.approx(20, abs=0.1)
    assert latency.deadline_s(8 << 20, 20.0) == pytest.approx(28.4, abs=0.1)
    latency.add_timeout(8192)
    assert latency.deadline_s(8 << 20, 20.0) == pytest.approx(28.4, abs=0.1)
    latency.add_timeout(8 << 20)
    assert latency.deadline_s(8 << 20, 20.0) == pytest.approx(36.8, abs=0.1)
    latency.add(8 << 20, 2.0)
    assert latency.deadline_s(8 << 20, 20.0) == pytest.approx(28.4, abs=0.1)
    with pytest.raises(RetryableError, match="9,000 bytes did not arrive within 0 s"):
        asked(Answers("s3://first", (9, b"")), give_up="0.5s", length=9000)


def test_one_rate_limit_for_a_process() -> None:
    """Rank 0 reads the indexes before it knows of other ranks; a held-out set is opened by who does not."""
    fetch = FetchConfig(requests_per_s=77)
    alone = shared(fetch, Share())
    many = shared(fetch, Share(3, 8))
    assert many is alone
    assert many.share == Share(3, 8)
    assert shared(fetch, Share()) is many
    assert shared(FetchConfig(requests_per_s=78), Share()) is not many
