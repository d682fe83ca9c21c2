"""What every test may use: the fixtures ``proof`` and ``record``, and hypothesis made deterministic.

A *proof* is a test over many cases (property, brute force, fault injection). ``make test`` runs a seeded sample of at
most 15 s of each; ``make prove`` sets SMALTI_PROVE=1, runs them at full count and writes bench/results/NAME.json, from
committed code only; ``make prove RECORD=no`` writes nothing.
A test that takes the ``proof`` fixture gets the mark ``proof`` by itself; a @given test is marked by hand.
"""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from record import Uncommitted, committed
from record import record as write_record

PROVE = os.environ.get("SMALTI_PROVE") == "1"
RECORD = PROVE and os.environ.get("SMALTI_RECORD") != "no"
PROVE_NAME = os.environ.get("SMALTI_PROVE_NAME") or "proofs"

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "test", derandomize=True, deadline=None, max_examples=25, database=None, suppress_health_check=_quiet
)
settings.register_profile(
    "prove", derandomize=False, deadline=None, max_examples=2000, print_blob=True, suppress_health_check=_quiet
)
settings.load_profile("prove" if PROVE else "test")

_ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow", re.MULTILINE)
_outcomes: dict[str, dict[str, Any]] = {}
_NO_FREEZING = SimpleNamespace(**{**vars(gc), "freeze": lambda: None, "unfreeze": lambda: None})


@pytest.fixture(scope="session")
def proof() -> Callable[..., int]:
    """``proof(short=50, full=5000)`` is the number of cases to run: ``full`` under SMALTI_PROVE=1, else ``short``."""

    def cases(short: int = 50, full: int = 5000) -> int:
        return full if PROVE else short

    return cases


@pytest.fixture(scope="session")
def record() -> Callable[[str, dict[str, Any]], None]:
    """``record(name, figures)`` writes bench/results/<name>.json under ``make prove``, and nothing otherwise."""

    def write(name: str, figures: dict[str, Any]) -> None:
        if RECORD:
            write_record(name, figures)

    return write


@pytest.fixture(autouse=True, scope="session")
def _user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes to the folder of the user (the model registry, tracebacks); commands that tests start neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMALTI_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of the user, for this test alone."""
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of moto's S3, which is in this process and in memory."""
    from s3_server import moto_server

    with moto_server() as url:
        yield url


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of SeaweedFS's S3: a server of its own, on a disk."""
    from seaweed_server import seaweed_server, why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with seaweed_server(tmp_path_factory.mktemp("seaweedfs")) as url:
        yield url


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of this test behind a proxy that counts requests and makes faults (``s3_buckets.Bucket``).

    Of moto; of each server where the test has the mark ``s3_buckets.BOTH_SERVERS``.
    """
    from s3_buckets import bucket

    server = getattr(request, "param", "moto")
    with bucket(request.getfixturevalue(server), monkeypatch, server) as made:
        yield made


@pytest.fixture(params=["rows", "masks"])
def tokens_of_heads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output heads read the tokens that count, as on a CPU; then all, and mask the others, as on a GPU."""
    if request.param == "masks":
        for module in ("train.cross_entropy", "tune.heads.divergence", "tune.heads.log_probs"):
            monkeypatch.setattr(f"smalti.{module}.counted_rows", lambda _: None)


@pytest.fixture
def no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """``smalti train --dry-run`` prints the plan alone: the rehearsed step takes a second."""
    monkeypatch.setattr("smalti.cli.train.rehearsal.rehearsal_lines", lambda *_, **__: [])


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_no_process_group() -> Iterator[None]:
    """A job that a fixture of a module builds in this process leaves its process group open."""
    yield
    _close_process_group()


@pytest.fixture(autouse=True)
def _test_leaves_no_process_group() -> Iterator[None]:
    """A test that builds a job in its own process leaves a process group open, which later tests would join."""
    before = _process_group_is_open()
    yield
    if not before:
        _close_process_group()


def _close_process_group() -> None:
    if _process_group_is_open():
        sys.modules["torch.distributed"].destroy_process_group()


def _process_group_is_open() -> bool:
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def pytest_configure() -> None:
    """Refuse to record from an uncommitted checkout before the proofs take their time."""
    if RECORD:
        try:
            committed()
        except Uncommitted as error:
            raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, leave out files of slow tests alone: some take seconds to import."""
    wanted = str(config.option.markexpr)
    if collection_path.suffix != ".py" or not wanted.startswith("not slow") or " or " in wanted:
        return None
    return True if _ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes the ``proof`` fixture as a proof; put the cases beyond ``sample(n)`` into the next class."""
    seen = Counter[str]()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            last = seen[test] > sample.args[-1] and (len(sample.args) > 1 or item.get_closest_marker("slow"))
            if seen[test] > sample.args[0]:
                item.add_marker(pytest.mark.exhaustive if last else pytest.mark.slow)
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
        if "proof" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.proof)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect no garbage while test files are imported, and leave half a million objects of modules out of every later
    garbage collection, 0.3 s each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_logstart() -> None:
    """Jobs of tests do not measure how fast this CPU multiplies, a second for each: see gloo_ranks.py. And what is
    frozen here stays frozen after them."""
    garbage_collection = sys.modules.get("smalti.train.garbage_collection")
    if garbage_collection is not None:
        garbage_collection.gc = _NO_FREEZING  # type: ignore[attr-defined]
    rank_setup = sys.modules.get("smalti.train.rank_setup")
    if rank_setup is not None:
        rank_setup.matmul_rate = lambda device, precision: (1e11, 1024)  # type: ignore[attr-defined]


def pytest_runtest_logfinish() -> None:
    """A job that a test builds in this process sets torch's threads for good; the tests after it took ten times as long
    with two threads where the cores were busy."""
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit():
        torch.set_num_threads(int(threads))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep outcome and time of every proof, for the result file."""
    report = yield
    if PROVE and report.when == "call" and item.get_closest_marker("proof"):
        _outcomes[item.nodeid] = {"outcome": report.outcome, "wall_s": round(report.duration, 3)}
    return report


def pytest_sessionfinish() -> None:
    """Write which proofs ran, with outcome and time."""
    if RECORD and _outcomes:
        write_record(PROVE_NAME, {"proofs": _outcomes})
