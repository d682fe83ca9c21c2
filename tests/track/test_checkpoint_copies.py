"""Copies of checkpoints against a real S3 server (moto) whose answers are spoiled by a proxy, and in other folders."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from made_checkpoints import checkpoint, digests
from s3_buckets import Bucket, bucket
from s3_server import moto_server

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.objects import Requests
from smalti.track.checkpoints import copies as copies_module
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies, StepTaken
from smalti.track.checkpoints.copy_format import Damaged

PART = 16_384
OBJECTS = 2 * 7 + 2 + 2
"""Of a copy: the parts of two shards, two small files, the index and COMPLETE."""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket(moto, monkeypatch) as made:
        yield made


def opened(url: str, *, give_up_s: float = 20.0, rate: float = 5000.0) -> Copies:
    return Copies(url, Requests(rate, give_up_s=give_up_s), part_bytes=PART)


def part_keys(s3: Bucket, step: int) -> list[str]:
    return [key for key in s3.objects() if f"/step-{step:08d}/shards/" in key]


# ---- what is promised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
def test_a_copy_is_the_checkpoint(kind: str, tmp_path: Path, s3: Bucket) -> None:
    (tmp_path / "disk").mkdir()
    url = {"local": str(tmp_path / "disk" / "a"), "memory": f"memory://{tmp_path.name}/a", "s3": s3.url}[kind]
    copies = opened(url)
    assert copies.complete() == []
    assert copies.newest(tmp_path / "none") is None
    saved = [checkpoint(tmp_path / "run", step) for step in (5, 10)]
    for path in saved:
        copied = copies.upload(path, config="name: a\n")
        assert copied.sent_bytes == copied.bytes > 200_000
    assert copies.upload(saved[1]).sent_bytes == 0
    again = opened(url)
    assert again.complete() == ["step-00000010", "step-00000005"]
    configs: list[str | None] = []
    fetched = again.newest(tmp_path / "other", check=configs.append)
    assert fetched == tmp_path / "other" / "step-00000010"
    assert configs == ["name: a\n"]
    assert digests(fetched) == digests(saved[1])
    assert manifest.fault(fetched) is None
    assert sorted(entry.name for entry in (tmp_path / "other").iterdir()) == ["step-00000010"]
    assert digests(again.fetch(5, tmp_path / "other")) == digests(saved[0])
    with pytest.raises(DataError, match="no complete checkpoint"):
        again.fetch(7, tmp_path / "other")


def test_a_restart_needs_one_listing_and_few_reads_whatever_the_store_holds(tmp_path: Path, s3: Bucket) -> None:
    for step in range(1, 9):
        opened(s3.url).upload(checkpoint(tmp_path / "run", step, shards=1, shard_bytes=1000))
    s3.proxy.counts.clear()
    opened(s3.url).newest(tmp_path / "other")
    parts = 3  # of the shard, train_state.json and manifest.json
    assert s3.proxy.counts == {"LIST": 1, "GET": 3 + parts}


def test_a_broken_upload_is_continued_and_its_leftovers_are_removed(tmp_path: Path, s3: Bucket) -> None:
    first, second = checkpoint(tmp_path / "run", 1), checkpoint(tmp_path / "run", 2)
    for path, count in ((first, 4), (second, 6)):
        copies = opened(s3.url)
        stop_after(copies, count)
        with pytest.raises(RetryableError, match="was stopped"):
            copies.upload(path)
    sent = sum(size for key, size in s3.objects().items() if "step-00000002" in key)
    s3.write(f"runs/a/{second.name}/shards/00000.safetensors.00000-0000000000000000", b"of another saver")
    assert sent >= 4 * PART
    copied = opened(s3.url).upload(second)
    assert copied.sent_bytes == copied.bytes - sent
    keys = list(s3.objects())
    assert {key.split("/")[2] for key in keys} == {second.name}, "the older step was never completed"
    assert not any("0000000000000000" in key for key in keys)
    assert s3.unfinished_uploads() == 0
    assert digests(opened(s3.url).fetch(2, tmp_path / "other")) == digests(second)


def stop_after(copies: Copies, count: int) -> None:
    """Stop the requests once ``count`` objects were written."""
    put = copies._folder.put

    def counted(path: str, data: bytes) -> None:
        nonlocal count
        put(path, data)
        count -= 1
        if count <= 0:
            copies.requests.stop.set()

    copies._folder.put = counted  # type: ignore[method-assign]


def test_a_checkpoint_that_changed_on_disk_is_not_copied(tmp_path: Path, s3: Bucket) -> None:
    path = checkpoint(tmp_path / "run", 1)
    shard = path / "shards" / "00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[70_000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"00001\.safetensors does not match its digest, and is not copied"):
        opened(s3.url).upload(path)
    assert opened(s3.url).complete() == []
    shard.unlink()
    with pytest.raises(DataError, match="was deleted while it was copied"):
        opened(s3.url).upload(path)
    (path / "COMPLETE").unlink()
    with pytest.raises(DataError, match="it has no COMPLETE mark"):
        opened(s3.url).upload(path)


# ---- two savers -----------------------------------------------------------------------------------------------------


def test_of_two_savers_of_a_step_one_wins_and_the_other_names_it(tmp_path: Path, s3: Bucket) -> None:
    """At the same time, with different files: the store's copy is that of the winner, whole."""
    for step in range(1, 4):
        paths = [checkpoint(tmp_path / f"run-{seed}", step, seed=seed) for seed in range(2)]
        with ThreadPoolExecutor(2) as pool:
            savers = [pool.submit(opened(s3.url).upload, path) for path in paths]
        errors = [saver.exception() for saver in savers]
        assert errors.count(None) == 1, errors
        winner = paths[errors.index(None)]
        loser = next(filter(None, errors))
        assert isinstance(loser, StepTaken), loser
        assert f"was completed by process {os.getpid()} on " in loser.message
        assert digests(opened(s3.url).fetch(step, tmp_path / "other")) == digests(winner)
        assert len([key for key in s3.objects() if winner.name in key]) == OBJECTS, "only the winner's"


def test_two_savers_of_the_same_files_agree(tmp_path: Path, s3: Bucket) -> None:
    path = checkpoint(tmp_path / "run", 1)
    opened(s3.url).upload(path)
    assert opened(s3.url).upload(path).sent_bytes == 0


def test_a_store_without_conditional_writes_is_asked_first(tmp_path: Path, s3: Bucket) -> None:
    s3.proxy.refuse = lambda head, key: (501, "NotImplemented") if "if-none-match" in head.lower() else None
    opened(s3.url).upload(checkpoint(tmp_path / "run", 1))
    with pytest.raises(StepTaken, match="was completed by process"):
        opened(s3.url).upload(checkpoint(tmp_path / "again", 1, seed=1))
    assert opened(s3.url).complete() == ["step-00000001"]
    assert opened(s3.url)._folder.put_new("step-00000001/COMPLETE", b"") is False


def test_a_lost_answer_to_the_last_write_is_not_another_saver(tmp_path: Path, s3: Bucket) -> None:
    copies = opened(s3.url)
    put_new = copies._folder.put_new

    def lose_the_answer(path: str, data: bytes) -> bool:
        assert put_new(path, data)
        return put_new(path, data)  # as the request that is repeated

    copies._folder.put_new = lose_the_answer  # type: ignore[method-assign]
    copies.upload(checkpoint(tmp_path / "run", 1))
    assert copies.complete() == ["step-00000001"]


KINDS = ("unavailable", "slow_down", "reset", "cut", "truncate")


# ---- faults of the store --------------------------------------------------------------------------------------------


def test_faults_of_a_moment_are_not_felt(tmp_path: Path, s3: Bucket) -> None:
    """503s, SlowDowns, connections that are reset before, in the middle of and after a part."""
    faults = s3.proxy.faults
    faults.first = [kind for kind in KINDS * 2 for kind in (kind, "none", "none")]
    path = checkpoint(tmp_path / "run", 1)
    copies = opened(s3.url)
    copies.upload(path)
    assert digests(copies.fetch(1, tmp_path / "other")) == digests(path)
    assert faults.first == []
    assert copies.requests.failed >= 8, "all but two answers to writes, of which half is enough"
    assert copies.requests.slowed == faults.done["slow_down"] == 2
    assert len(s3.objects()) == OBJECTS


def test_a_store_that_fails_for_good_is_never_one_without_checkpoints(tmp_path: Path, s3: Bucket) -> None:
    opened(s3.url).upload(checkpoint(tmp_path / "run", 1))
    s3.proxy.faults.unavailable = 1.0
    copies = opened(s3.url, give_up_s=0.3)
    for call in (copies.complete, lambda: copies.newest(tmp_path / "other"), lambda: copies.fetch(1, tmp_path)):
        with pytest.raises(RetryableError, match=r"does not respond correctly: .*503"):
            call()
    with pytest.raises(RetryableError, match="does not respond correctly"):
        copies.upload(checkpoint(tmp_path / "run", 2))
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", r"cannot be listed, access is denied: .*AccessDenied"),
        (403, "SignatureDoesNotMatch", r"cannot be listed, access is denied"),
        (404, "NoSuchBucket", r"s3://bucket-\d+ does not exist: .*NoSuchBucket"),
    ],
)
def test_wrong_keys_and_buckets_are_named_at_once(status: int, code: str, message: str, s3: Bucket) -> None:
    s3.proxy.refuse = lambda head, key: (status, code)
    with pytest.raises(DataError, match=message):
        opened(s3.url).complete()
    assert len(s3.proxy.times) == 1


def test_a_folder_on_a_disk_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be listed: there is no folder .*/mnt"):
        opened(str(tmp_path / "mnt" / "a")).complete()
    with pytest.raises(UserError, match="cannot be written"):
        opened("https://host/folder")


def test_all_requests_stay_below_the_rate(tmp_path: Path, s3: Bucket) -> None:
    """Also those that are repeated after failures."""
    s3.proxy.faults.unavailable = 0.3
    path = checkpoint(tmp_path / "run", 1)
    s3.proxy.times.clear()
    opened(s3.url, rate=30.0).upload(path)
    times = s3.proxy.times
    assert len(times) >= 24
    for number, begin in enumerate(times):
        within = sum(time < begin + 0.5 for time in times[number:])
        assert within <= 15 + 30 * 0.25 + 2, "half a second of the rate, and a burst of a quarter"


# ---- credentials ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["file", "environment"])
def test_credentials_that_expire_during_a_save_are_renewed(
    by: str, tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old key is rejected with ExpiredToken in the middle of the upload until a new one is given."""
    file = tmp_path / "keys"

    def give(key: str) -> None:
        if by == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        else:
            text = f"export AWS_ACCESS_KEY_ID={key}\nexport AWS_SECRET_ACCESS_KEY=x\nexport AWS_SESSION_TOKEN='t'\n"
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").replace(file)

    if by == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("SMALTI_S3_CREDENTIALS", str(file))
    give("OLD")
    answered: Counter[str] = Counter()

    def refuse(head: str, key: str) -> tuple[int, str] | None:
        answered[key] += 1
        if key == "OLD" and answered["OLD"] > 6:
            if answered["OLD"] == 12:
                give("NEW")
            return (400, "ExpiredToken")
        return None

    s3.proxy.refuse = refuse
    path = checkpoint(tmp_path / "run", 1)
    copies = opened(s3.url)
    copies.upload(path)
    assert set(answered) == {"OLD", "NEW"}
    assert answered["OLD"] >= 12
    assert digests(copies.fetch(1, tmp_path / "other")) == digests(path)


def test_a_credentials_file_that_cannot_be_used_is_named(
    tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALTI_S3_CREDENTIALS", str(tmp_path / "keys"))
    with pytest.raises(UserError, match=r"SMALTI_S3_CREDENTIALS=.*No such file"):
        opened(s3.url).complete()
    (tmp_path / "keys").write_text("AWS_ACCESS_KEY_ID=a\n")
    with pytest.raises(UserError, match="lacks AWS_ACCESS_KEY_ID="):
        opened(s3.url).complete()


# ---- damage ---------------------------------------------------------------------------------------------------------


def damage(s3: Bucket, how: str, step: int) -> None:
    part = part_keys(s3, step)[3]
    index = next(key for key in s3.objects() if f"step-{step:08d}/index-" in key)
    if how == "flipped":
        data = bytearray(s3.read(part))
        data[100] ^= 4
        s3.write(part, bytes(data))
    elif how == "truncated":
        s3.write(part, s3.read(part)[:-1])
    elif how == "missing":
        s3.direct.delete_object(Bucket=s3.name, Key=part)
    elif how == "swapped":
        s3.write(part, s3.read(part_keys(s3, step)[4]))
    elif how == "index":
        s3.write(index, s3.read(index)[:-30])
    elif how == "no index":
        s3.direct.delete_object(Bucket=s3.name, Key=index)
    else:
        s3.write(f"runs/a/step-{step:08d}/COMPLETE", b"{")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flipped", r"shards/00000\.safetensors\.00003-\w+ does not match its digest"),
        ("truncated", r"shards/00000\.safetensors\.00003-\w+ has 16383 bytes; 16384 were written"),
        ("missing", r"shards/00000\.safetensors\.00003-\w+ is missing"),
        ("swapped", r"does not match its digest"),
        ("index", r"index-\w+\.json does not match its digest in COMPLETE"),
        ("no index", r"index-\w+\.json is missing"),
        ("mark", r"COMPLETE is not valid"),
    ],
)
def test_a_damaged_copy_is_named_and_the_one_before_is_used(
    how: str, reason: str, tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "_PAUSE_S", 0.01)
    saved = [checkpoint(tmp_path / "run", step) for step in (1, 2)]
    for path in saved:
        opened(s3.url).upload(path)
    damage(s3, how, 2)
    with pytest.raises(Damaged, match=reason):
        opened(s3.url).fetch(2, tmp_path / "other")
    rejected: list[tuple[str, str]] = []
    fetched = opened(s3.url).newest(tmp_path / "other", reject=lambda *of: rejected.append(of))
    assert fetched is not None
    assert digests(fetched) == digests(saved[0])
    assert [place for place, _ in rejected] == [f"{s3.url}/step-00000002"]
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["step-00000001"]
    damage(s3, how, 1)
    with pytest.raises(DataError, match=r"no checkpoint in s3://.* can be used: step-00000002: .*; step-00000001"):
        opened(s3.url).newest(tmp_path / "another")


def test_bits_that_flip_on_the_way_are_read_again(tmp_path: Path, s3: Bucket) -> None:
    path = checkpoint(tmp_path / "run", 1)
    opened(s3.url).upload(path)
    s3.proxy.faults.flip, s3.proxy.faults.only_get = 0.2, True
    copies = opened(s3.url)
    copies._folder.names = lambda: [path.name]  # type: ignore[method-assign] # a listing has no digest
    fetched = copies.newest(tmp_path / "other")
    assert fetched is not None
    assert digests(fetched) == digests(path)
    assert s3.proxy.faults.done["flip"] >= 2


def test_a_page_of_a_proxy_is_not_damage(tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(s3.url).upload(checkpoint(tmp_path / "run", 1))
    copies = opened(s3.url)
    monkeypatch.setattr(copies._folder, "get", lambda path: b"<!DOCTYPE html><html>login</html>")
    with pytest.raises(RetryableError, match="a page was returned instead of the file"):
        copies.newest(tmp_path / "other")


def test_a_copy_of_another_run_stops_the_search(tmp_path: Path, s3: Bucket) -> None:
    opened(s3.url).upload(checkpoint(tmp_path / "run", 1), config="name: b")

    def check(config: str | None) -> None:
        if config != "name: a":
            raise UserError(f"another run: {config}")

    with pytest.raises(UserError, match="another run: name: b"):
        opened(s3.url).newest(tmp_path / "other", check=check)
    with pytest.raises(UserError, match="another run: name: b"):
        opened(s3.url).check_newest(check)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, s3: Bucket) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        opened(s3.url).upload(checkpoint(tmp_path / "run", 1))
        with pytest.raises(RetryableError, match=r"the disk is full: .*/disk/a could not be written .* free"):
            opened(s3.url).newest(disk / "a")
        assert list((disk / "a").iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- kill -9 --------------------------------------------------------------------------------------------------------

_SAVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from made_checkpoints import checkpoint
from smalti.base.objects import Requests
from smalti.track.checkpoints.copies import Copies
run, url, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
copies = Copies(url, Requests(5000.0), part_bytes={part})
while True:
    path = run / f"step-{{step:08d}}"
    copies.upload(path if path.exists() else checkpoint(run, step))
    print(step, flush=True)
    step += 1
"""


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize("seed", range(20))
def test_after_kill_9_at_any_moment_the_newest_complete_copy_loads(seed: int, tmp_path: Path, s3: Bucket) -> None:
    """A saver is killed while it uploads, three times; the next one continues and removes what was left."""
    chance = random.Random(seed)
    script = tmp_path / "saver.py"
    script.write_text(_SAVER.format(tests=str(Path(__file__).parents[1]), part=PART))
    step = 1
    for _ in range(3):
        saver = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run"), s3.url, str(step)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None
        first = int(saver.stdout.readline())  # it has started, and completed one
        time.sleep(chance.uniform(0, 0.4))
        saver.send_signal(signal.SIGKILL)
        done = [first, *map(int, saver.stdout.read().split())]
        saver.wait()
        saver.stdout.close()
        fetched = opened(s3.url).newest(tmp_path / f"other-{step}")
        assert fetched is not None
        newest = int(fetched.name.removeprefix("step-"))
        assert newest in (done[-1], done[-1] + 1)  # killed between COMPLETE and the report
        assert digests(fetched) == digests(tmp_path / "run" / fetched.name)
        step = newest + 1
        incomplete = tmp_path / "run" / f"step-{step:08d}"
        if incomplete.exists() and not (incomplete / "COMPLETE").exists():  # killed while it was saved
            subprocess.run(["rm", "-r", str(incomplete)], check=True)
    opened(s3.url).upload(checkpoint(tmp_path / "last", 10_000))
    copies = opened(s3.url)
    names = copies.complete()
    per_copy = Counter(key.split("/")[2] for key in s3.objects())
    assert set(per_copy) == set(names), "no step without COMPLETE remains"
    assert set(per_copy.values()) == {OBJECTS}
    assert s3.unfinished_uploads() == 0
