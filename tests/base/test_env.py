"""Environment variables: those of torchrun, those of Smalti, and invalid values."""

import os
from collections.abc import Iterator

import pytest

from smalti.base import env, machine
from smalti.base.errors import UserError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SMALTI_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT", "CI", "NO_COLOR", "SMALTI_HOME", "SMALTI_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return


def set_all(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_a_world_of_one() -> None:
    assert not env.inside_world()
    assert env.world() == env.World()
    assert env.world().is_first


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4, MASTER_ADDR="10.0.0.1")
    set_all(monkeypatch, MASTER_PORT=29500, TORCHELASTIC_RESTART_COUNT=2)
    assert env.inside_world()
    world = env.world()
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, 4)
    assert (world.attempt, world.master_addr, world.master_port) == (2, "10.0.0.1", 29500)
    assert not world.is_first


def test_our_attempt_wins_over_torchruns_count(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK=0, WORLD_SIZE=1, SMALTI_ATTEMPT=7, TORCHELASTIC_RESTART_COUNT=2)
    assert env.world().attempt == 7


def test_rank_alone_is_not_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK=3)
    assert env.world().world_size == 1


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("0", "two"), ("2", "2"), ("-1", "2"), ("", "1")])
def test_a_place_that_cannot_be(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    set_all(monkeypatch, RANK=rank, WORLD_SIZE=size)
    with pytest.raises(UserError) as caught:
        env.world()
    wrong = f"WORLD_SIZE={size!r}" if size == "two" else f"RANK={rank!r}" if rank in ("x", "") else f"RANK={rank}"
    assert wrong in str(caught.value)


_QUIET = {"DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0", "DAFT_SHOW_QUERY_ID": "0"}


@pytest.mark.parametrize("set_by_user", [(), *((name,) for name in _QUIET), tuple(_QUIET)])
def test_quiet_daft_sets_what_is_unset_and_keeps_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, set_by_user: tuple[str, ...]
) -> None:
    for name in _QUIET:
        monkeypatch.setenv(name, "of the user")  # also for those deleted next: so that they are restored at the end
        if name not in set_by_user:
            monkeypatch.delenv(name)
    env.quiet_daft()
    expected = {name: "of the user" if name in set_by_user else quiet for name, quiet in _QUIET.items()}
    assert {name: os.environ[name] for name in _QUIET} == expected


def test_child_environment_leaves_ours_alone() -> None:
    child = env.child_environment({"RANK": "1"})
    assert child["RANK"] == "1"
    assert "RANK" not in os.environ
    assert child["PATH"] == os.environ["PATH"]


def test_output(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not env.plain_output()
    assert not env.no_color()
    set_all(monkeypatch, NO_COLOR="")
    assert not env.no_color(), "an empty NO_COLOR does not count (no-color.org)"
    set_all(monkeypatch, NO_COLOR=1, TERM="dumb")
    assert env.no_color()
    assert env.plain_output()
    set_all(monkeypatch, TERM="xterm", CI="true")
    assert env.plain_output()


def test_our_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.log_level() == "INFO"
    assert env.user_folder() == os.path.expanduser("~/.smalti")
    set_all(monkeypatch, SMALTI_LOG_LEVEL="debug", SMALTI_HOME="/tmp/smalti-home")
    assert env.log_level() == "DEBUG"
    assert env.user_folder() == "/tmp/smalti-home"


def test_cpu_count_is_what_this_process_may_use() -> None:
    assert 1 <= machine.cpu_count() <= (os.cpu_count() or 1)


def test_an_empty_variable_of_a_store_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.setenv(name, "")
    env.drop_empty_store_variables()
    settings = env.store_settings()
    assert "AWS_ENDPOINT_URL" not in os.environ
    assert not [value for value in settings.signature if value and value.startswith("AWS_ENDPOINT_URL")]
    assert (settings.s3_endpoint, settings.hub_endpoint) == (None, "https://huggingface.co")


def test_segments_grow_unless_the_user_has_set_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    env.grow_gpu_segments()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    env.grow_gpu_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == ""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    env.grow_gpu_segments()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
