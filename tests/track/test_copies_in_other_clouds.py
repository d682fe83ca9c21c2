"""Copies in Google Cloud Storage and Azure, as far as a server by their documentation shows: tests/cloud_servers.py."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_servers import Container, cloud_server
from made_checkpoints import checkpoint, digests
from made_copies import OBJECTS, opened

from smalti.base.errors import DataError, RetryableError
from smalti.track.checkpoints.copies import StepTaken


@pytest.fixture(params=["gs", "az"])
def container(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with cloud_server(request.param) as made:
        for variable, value in made.environment(tmp_path).items():
            monkeypatch.setenv(variable, value)
        yield made


def test_a_copy_is_the_checkpoint_and_a_restart_lists_once(container: Container, tmp_path: Path) -> None:
    url = f"{container.kind}://box/runs/a"
    assert opened(url).complete() == []
    saved = [checkpoint(tmp_path / "run", step) for step in (5, 10)]
    for path in saved:
        assert opened(url).upload(path).sent_bytes > 200_000
    container.counts.clear()
    fetched = opened(url).newest(tmp_path / "other")
    assert container.counts == {"LIST": 1, "GET": OBJECTS - 2 + 3}
    assert fetched == tmp_path / "other" / "step-00000010"
    assert digests(fetched) == digests(saved[1])
    assert opened(url).upload(saved[1]).sent_bytes == 0


def test_of_two_savers_the_first_wins_and_the_store_keeps_its_copy_alone(container: Container, tmp_path: Path) -> None:
    """The mark is written by a conditional request; nothing of the other saver remains."""
    url = f"{container.kind}://box/runs/a"
    first, second = (checkpoint(tmp_path / f"run-{seed}", 1, seed=seed) for seed in range(2))
    opened(url).upload(first)
    loser = opened(url)
    loser._mark = lambda name: None  # type: ignore[method-assign] # as if the mark was written a moment later
    loser._present = lambda name: {}  # type: ignore[method-assign]
    with pytest.raises(RetryableError):
        loser.upload(second)
    assert opened(url)._folder.put_new("step-00000001/COMPLETE", b"of the second") is False
    with pytest.raises(StepTaken, match="was completed by process"):
        opened(url).upload(second)
    assert digests(opened(url).fetch(1, tmp_path / "other")) == digests(first)
    assert len(container.objects) == OBJECTS


def test_a_broken_upload_continues_and_leftovers_are_deleted(container: Container, tmp_path: Path) -> None:
    url = f"{container.kind}://box/runs/a"
    paths = [checkpoint(tmp_path / "run", step) for step in (1, 2)]
    for path in paths:
        copies = opened(url)
        put, left = copies._folder.put, [5]

        def some(where: str, data: bytes, put=put, left=left, copies=copies) -> None:  # type: ignore[no-untyped-def]
            put(where, data)
            left[0] -= 1
            if left[0] <= 0:
                copies.requests.stop.set()

        copies._folder.put = some  # type: ignore[method-assign]
        with pytest.raises(RetryableError, match="was stopped"):
            copies.upload(path)
    copied = opened(url).upload(paths[1])
    assert 0 < copied.sent_bytes < copied.bytes
    assert {key.split("/")[2] for key in container.objects} == {"step-00000002"}
    opened(url).remove("step-00000002")
    assert container.objects == {}


def test_what_is_absent_is_no_error_to_delete_and_a_missing_container_is_named(container: Container) -> None:
    folder = opened(f"{container.kind}://box/runs/a")._folder
    folder.put("x/1", b"")
    folder.put("x/2", b"")
    folder.delete(["x/none", "x/1", "x/gone", "x/2"])
    assert container.objects == {}
    other = opened(f"{container.kind}://other/runs/a")
    for request in (other.complete, lambda: other._folder.get("x"), lambda: other._folder.put("x", b"")):
        with pytest.raises(DataError, match="//other does not exist"):
            request()
