"""Proofs of fetching, through the stream: thousands of ranks and one metadata request; minutes of faults, none felt."""

import faulthandler
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from random_tokens import config, write_source
from s3_server import Faults, fault_proxy, moto_server, object_server, s3_environment

from smalti.base import store
from smalti.config.data import DataConfig, FetchConfig, SourceConfig
from smalti.config.durations import RunLength
from smalti.data.stream.batch import Batch
from smalti.data.stream.open import read_indexes
from smalti.data.stream.stream import Stream
from smalti.train.read_ahead import ReadAhead

pytestmark = pytest.mark.slow

SEQ_LEN = 64
Record = Callable[[str, dict[str, Any]], None]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    write_source(root / "web", 20_000, seed=1)
    return root


def objects(tokens: Path) -> dict[str, bytes]:
    """The folder in a bucket."""
    return {f"bucket/web/{path.name}": path.read_bytes() for path in (tokens / "web").iterdir()}


def data(tokens: Path, path: str, mirrors: tuple[str, ...] = (), **fetch: Any) -> DataConfig:
    local = config(tokens, [{"weights": {"web": 1}}], seq_len=SEQ_LEN)
    source = SourceConfig(path=path, mirrors=mirrors)
    return local.model_copy(update={"sources": {"web": source}, "fetch": FetchConfig(**fetch)})


def stream(data: DataConfig, rows: int, steps: int, **place: Any) -> Stream:
    length = RunLength(steps, ((0, rows * SEQ_LEN),))
    return Stream(data, seed=7, length=length, microbatch_tokens=rows * SEQ_LEN, **place)


def digest(batches: list[Batch]) -> bytes:
    return hashlib.sha256(b"".join(batch.tokens.tobytes() for batch in batches)).digest()


# ---- one request for all ranks --------------------------------------------------------------------------------------


def test_a_start_of_many_ranks_reads_one_index_and_lists_nothing(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[..., int], record: Record
) -> None:
    """Every rank is built from what rank 0 has read, and reads its first microbatch."""
    n_ranks = proof(short=48, full=3072)
    expected = stream(data(tokens, str(tokens / "web")), n_ranks, 10).batch(0)[0].tokens
    with object_server(objects(tokens)) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        asked = data(tokens, "s3://bucket/web", requests_per_s=1e6)
        indexes = read_indexes(asked)

        def first_microbatch(rank: int) -> bool:
            mine = stream(asked, n_ranks, 10, rank=rank, world_size=n_ranks, indexes=indexes)
            try:
                (batch,) = mine.batch(0)
                return batch.tokens.tobytes() == expected[rank : rank + 1].tobytes()
            finally:
                mine.close()

        with ThreadPoolExecutor(8) as ranks:
            assert all(ranks.map(first_microbatch, range(n_ranks)))
        metadata = {what: n for what, n in server.counts.items() if not what.endswith(".tok")}
        reads = sum(server.counts.values()) - sum(metadata.values())
    assert metadata == {"GET /bucket/web/manifest.json": 1}
    assert reads <= 1.1 * n_ranks + 1
    figures = {"ranks": n_ranks, "metadata_gets": 1, "lists": 0, "heads": 0, "reads": reads}
    record("fetch_start", {**figures, "index_bytes": sum(len(index) for index in indexes.values())})


# ---- a run through faults -------------------------------------------------------------------------------------------


def run_through(
    far: DataConfig, near: DataConfig, *, seconds: float, step_s: float = 0.1, rows: int = 8
) -> tuple[dict[str, float], dict[str, float]]:
    """Train for a while, which here is to sleep, and compare every step with the local read; the longest wait, and what
    fetching cost."""
    steps = max(20, int(seconds / step_s))
    ours, local = stream(far, rows, steps), stream(near, rows, steps)
    prefetch_s = float(far.fetch.prefetch.removesuffix("s"))
    waits: list[float] = []
    wrong = 0
    with ReadAhead(
        ours.batch, 0, steps, prefetch_s=prefetch_s, prefetch_bytes=1 << 30, threads=8, interrupt=ours.close
    ) as batches:
        for step in range(steps):
            begun_s = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - begun_s)
            wrong += digest(batch) != digest(local.batch(step))
            time.sleep(step_s)
    ours.close()
    assert wrong == 0
    waited = {"steps": steps, "longest_wait_s": round(max(waits[1:]), 3), "waited_s": round(sum(waits[1:]), 3)}
    return waited, ours.fetch_counts.as_dict()


@contextmanager
def after(seconds: float, what: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, what)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_five_in_a_hundred_answers_are_bad(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[..., int], record: Record
) -> None:
    """503, no answer at all, half an answer: a real S3 server behind a proxy that spoils answers."""
    seconds = proof(short=6, full=300)
    faulthandler.cancel_dump_traceback_later()  # the full proof takes as long as a test that hangs
    faults = Faults(unavailable=0.05 / 3, hang=0.05 / 3, truncate=0.05 / 3)
    with moto_server() as moto, fault_proxy(moto, faults) as proxy:
        for name, value in s3_environment(moto).items():
            monkeypatch.setenv(name, value)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for path, content in objects(tokens).items():
            store.write_bytes(f"s3://{path}", content)
        client.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        far = data(tokens, "s3://bucket/web")
        found, spent = run_through(far, data(tokens, str(tokens / "web")), seconds=seconds)
        lists = proxy.counts["LIST"]
    assert lists == 0
    assert sum(faults.done.values()) > 0.02 * spent["requests"]
    assert spent["hedges"] <= 1 + 0.06 * spent["requests"]
    assert found["longest_wait_s"] < 10  # the prefetch
    record("fetch_faults", {"seconds": seconds, **found, "faults": dict(faults.done), **spent})


@pytest.mark.exhaustive
def test_slow_down_for_everyone(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[..., int], record: Record
) -> None:
    """The store refuses everybody for longer than what is read ahead: the job waits, retries rarely, and continues."""
    outage_s = proof(short=3, full=60)
    with object_server(objects(tokens)) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        far = data(tokens, "s3://bucket/web", prefetch="1s", requests_per_s=200)
        faults = server.faults
        edges: list[float] = []

        def begin() -> None:
            faults.slow_down = 1.0
            edges.append(time.monotonic())

        def end() -> None:
            faults.slow_down = 0.0
            edges.append(time.monotonic())

        with after(2, begin), after(2 + outage_s, end):
            found, _ = run_through(far, data(tokens, str(tokens / "web")), seconds=outage_s + 4)
        asked = sum(edges[0] <= at <= edges[1] for at, _, _ in server.requests)
    assert found["longest_wait_s"] > outage_s / 4
    assert found["longest_wait_s"] < outage_s + 10
    assert asked < 200 * outage_s * 0.6
    record("fetch_slow_down", {"outage_s": outage_s, "requests_during": asked, "requests_per_s": 200, **found})


@pytest.mark.exhaustive
def test_a_copy_dies_and_comes_back_mid_run(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[..., int], record: Record
) -> None:
    """The first copy is cut and comes back, then the second: at no moment does the trainer wait for long."""
    part_s = proof(short=2, full=20)
    with object_server(objects(tokens)) as first, object_server(objects(tokens)) as second:
        for name, value in s3_environment(first.url).items():
            monkeypatch.setenv(name, value)
        far = data(tokens, "s3://bucket/web", (f"{second.url}/bucket/web",), prefetch="2s")
        acts = (first.server.cut, first.server.back, second.server.cut, second.server.back)
        with after(part_s, acts[0]), after(2 * part_s, acts[1]), after(3 * part_s, acts[2]), after(4 * part_s, acts[3]):
            found, spent = run_through(far, data(tokens, str(tokens / "web")), seconds=5 * part_s)
        gets = {"first": first.gets(".tok"), "second": second.gets(".tok")}
    assert spent["retries"] > 0  # the cuts were felt
    assert gets["second"] > 0
    assert found["longest_wait_s"] < 10
    record("fetch_failover", {"part_s": part_s, **found, **gets})


@pytest.mark.exhaustive
def test_the_one_store_is_cut_and_comes_back(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_server(objects(tokens)) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        far = data(tokens, "s3://bucket/web", prefetch="1s")
        with after(1, server.server.cut), after(3, server.server.back):
            _, spent = run_through(far, data(tokens, str(tokens / "web")), seconds=4)
    assert spent["retries"] > 0  # the cut was felt


def test_flipped_bits_on_the_way_are_read_again(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_server(objects(tokens)) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        far = data(tokens, "s3://bucket/web")
        indexes = read_indexes(far)
        server.faults.flip = 0.1
        ours, local = stream(far, 8, 20, indexes=indexes), stream(data(tokens, str(tokens / "web")), 8, 20)
        assert [digest(ours.batch(step)) for step in range(20)] == [digest(local.batch(step)) for step in range(20)]
        assert server.faults.done["flip"] > 3
        ours.close()
