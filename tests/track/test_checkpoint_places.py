"""Commands on the copies in an object store: found, verified, protected, deleted, copied; a failing store is named."""

from pathlib import Path

import pytest
from made_checkpoints import checkpoint, digests
from made_copies import opened
from s3_buckets import Bucket

from smalti.base.errors import SmaltiError, UserError
from smalti.track.checkpoint_places import OfStore, open_place


def silent(name: str, done: int, total: int) -> None:
    """Show nothing."""


@pytest.fixture
def place(tmp_path: Path, s3: Bucket) -> OfStore:
    """The copies of steps 5, 10 and 15 in a bucket."""
    for step in (5, 10, 15):
        opened(s3.url).upload(checkpoint(tmp_path / "run/checkpoints", step))
    return open_place(s3.url)  # type: ignore[return-value]


def test_copies_are_listed_and_found_by_step_and_word(place: OfStore, s3: Bucket) -> None:
    place.protect("step-00000005", off=False)
    rows = {each.step: each for each in place.facts()}
    assert list(rows) == [5, 10, 15]
    assert (rows[15].newest, rows[5].protected, rows[10].here) == (True, True, False)
    assert rows[10].locations == (f"{s3.url}/step-00000010",)
    assert (rows[10].bytes or 0) > 200_000
    assert place.named([]) == ["step-00000005", "step-00000010", "step-00000015"]
    assert place.named(["newest", "5"]) == ["step-00000015", "step-00000005"]
    with pytest.raises(UserError, match=r"has no complete checkpoint '7'") as caught:
        place.named(["7"])
    assert caught.value.allowed == "5, 10, 15, newest"


def test_damage_in_a_store_is_named(place: OfStore, s3: Bucket) -> None:
    assert place.verify("step-00000010", silent) is None
    part = next(key for key in s3.objects() if "step-00000010/shards" in key)
    data = s3.read(part)
    s3.write(part, bytes([data[0] ^ 1]) + data[1:])
    assert "does not match its digest" in str(place.verify("step-00000010", silent))
    assert part in str(place.verify("step-00000010", silent))


def test_deletion_in_a_store_spares_what_is_kept(place: OfStore, s3: Bucket) -> None:
    place.protect("step-00000005", off=False)
    with pytest.raises(UserError, match="is kept as protected"):
        place.remove(["step-00000010", "step-00000005"], force=False)
    with pytest.raises(UserError, match="is kept as newest"):
        place.remove(["step-00000015"], force=False)
    assert len(place.named([])) == 3, "all or none"
    place.remove(["step-00000010"], force=False)
    assert not any("step-00000010" in key for key in s3.objects())
    place.remove(["step-00000005"], force=True)
    assert open_place(s3.url).named([]) == ["step-00000015"]


def test_a_copy_comes_back_to_a_folder_and_goes_to_another_store(place: OfStore, s3: Bucket, tmp_path: Path) -> None:
    saved = digests(tmp_path / "run/checkpoints/step-00000010")
    back = place.copy("step-00000010", str(tmp_path / "back"), silent)
    assert digests(Path(back)) == saved
    with pytest.raises(UserError, match="exists"):
        place.copy("step-00000010", str(tmp_path / "back"), silent)
    other = f"s3://{s3.name}/other"
    assert place.copy("step-00000010", other, silent) == f"{other}/step-00000010"
    assert place.copy("step-00000010", other, silent) == f"{other}/step-00000010"
    assert digests(opened(other).fetch(10, tmp_path / "fetched")) == saved


def test_a_store_that_fails_is_not_one_without_checkpoints(
    place: OfStore, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SmaltiError, match="does not exist"):
        open_place("s3://no-such-bucket/a").facts()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(SmaltiError):
        open_place(s3.url).named([])
