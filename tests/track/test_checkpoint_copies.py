"""Copies of checkpoints in S3 servers (moto, SeaweedFS) and other folders: continued, of two savers, after kill -9."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import checkpoint, digests
from made_copies import OBJECTS, PART, opened
from s3_buckets import BOTH_SERVERS, Bucket

from smalti.base.errors import DataError, RetryableError
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies, StepTaken
from smalti.track.checkpoints.marks import PROTECTED, is_marked, mark

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


def test_a_restore_deletes_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", 1)
    (tmp_path / "store").mkdir()
    copies = opened(str(tmp_path / "store"))
    copies.upload(saved)
    there = tmp_path / "checkpoints" / saved.name
    checkpoint(tmp_path / "checkpoints", 2).rename(there)  # as one of another run: its state says another step
    mark(there, PROTECTED)
    before = digests(there)
    assert copies.newest(tmp_path / "checkpoints") == there
    assert manifest.read_state(there)["step"] == 1
    assert not is_marked(there, PROTECTED)
    assert digests(tmp_path / "checkpoints" / f"rejected-{saved.name}") == before


def test_a_restart_needs_one_listing_and_few_reads_whatever_the_store_holds(tmp_path: Path, s3: Bucket) -> None:
    """20 jobs at once; of a job only rank 0 does this (``train.checkpoint_copies.restore``)."""
    for step in range(1, 7):
        opened(s3.url).upload(checkpoint(tmp_path / "run", step, shards=1, shard_bytes=1000))
    s3.proxy.counts.clear()
    with ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(opened(s3.url).newest, tmp_path / f"job-{number}") for number in range(20)]
    assert [job.result() for job in jobs] == [tmp_path / f"job-{number}" / "step-00000006" for number in range(20)]
    parts = 3  # of the shard, train_state.json and manifest.json
    assert s3.proxy.counts == {"LIST": 20, "GET": 20 * (3 + parts)}
    s3.proxy.counts.clear()
    assert opened(s3.url).upload(tmp_path / "run" / "step-00000006", check=lambda _: None).sent_bytes == 0
    assert s3.proxy.counts == {"GET": 6}, "the checkpoint of a job that has it is complete there: nothing is listed"


@BOTH_SERVERS
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


@pytest.mark.slow
def test_the_memory_of_an_upload_and_of_a_download_does_not_grow_with_the_file(tmp_path: Path, s3: Bucket) -> None:
    """160 MiB in parts of 4 MiB, of which few are in memory: the growth of the peak of a process of its own."""
    run = checkpoint(tmp_path / "run", 1, shards=1, shard_bytes=160 << 20)
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from smalti.base.objects import Requests
from smalti.track.checkpoints.copies import Copies
copies = Copies({s3.url!r}, Requests(5000.0), part_bytes=4 << 20)
copies.complete()
peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
copies.upload({str(run)!r})
copies.newest({str(tmp_path / "other")!r})
peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80 << 10, "in KiB"


# ---- two savers -----------------------------------------------------------------------------------------------------


@BOTH_SERVERS
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


@BOTH_SERVERS
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


# ---- kill -9 --------------------------------------------------------------------------------------------------------

_SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from made_checkpoints import checkpoint
from smalti.base.objects import Requests
from smalti.track.checkpoints.copies import Copies, StepTaken
run, url, step, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
copies = Copies(url, Requests(5000.0), part_bytes={part})
while True:
    path = run / f"step-{{step:08d}}"
    try:
        copies.upload(path if path.exists() else checkpoint(run, step, seed=seed))
    except StepTaken:
        pass
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize(("s3", "savers"), [("moto", 1), ("seaweedfs", 1), ("seaweedfs", 2)], indirect=["s3"])
@pytest.mark.slow  # processes
def test_after_kill_9_at_any_moment_the_newest_complete_copy_loads(
    s3: Bucket, savers: int, tmp_path: Path, proof: Any, record: Any
) -> None:
    """Savers are killed while they upload; the next ones continue and remove what was left. Two save other files of
    the same steps, and one of them is killed a moment before the other."""
    kills, chance = proof(short=3, full=100), random.Random(22)
    counts: Counter[str] = Counter()
    script = tmp_path / "saver.py"
    script.write_text(_SAVER.format(tests=str(Path(__file__).parents[1]), part=PART))
    runs = [tmp_path / f"run-{seed}" for seed in range(savers)]
    step = 1
    for _ in range(kills):
        reported = _kill_savers(script, [[str(run), s3.url, str(step)] for run in runs], chance)
        fetched = opened(s3.url).newest(tmp_path / "other")
        assert fetched is not None
        newest = int(fetched.name.removeprefix("step-"))
        assert newest in (reported, reported + 1)  # killed between COMPLETE and the report
        assert digests(fetched) in [digests(run / fetched.name) for run in runs if (run / fetched.name).exists()]
        step = newest + 1
        counts["while a copy was incomplete"] += any(f"/step-{step:08d}/" in key for key in s3.objects())
        for incomplete in (run / f"step-{number:08d}" for run in runs for number in range(newest - 1, step + 1)):
            if incomplete.exists() and not (incomplete / "COMPLETE").exists():
                counts["while a checkpoint was saved"] += 1
                shutil.rmtree(incomplete)
    opened(s3.url).upload(checkpoint(tmp_path / "last", 10_000))
    copies = opened(s3.url)
    names = copies.complete()
    per_copy = Counter(key.split("/")[2] for key in s3.objects())
    assert set(per_copy) == set(names), "no step without COMPLETE remains"
    assert set(per_copy.values()) == {OBJECTS}
    assert s3.unfinished_uploads() == 0
    name = ("" if savers == 1 else "two_savers_") + "copy_kills" + ("" if s3.server == "moto" else f"_{s3.server}")
    record(name, {"kills": kills, **counts, "copies": len(names)})


def _kill_savers(script: Path, arguments: list[list[str]], chance: random.Random) -> int:
    """Start savers, kill them in any order after all have completed a step, and return the last step of a report."""
    savers = [
        subprocess.Popen([sys.executable, str(script), *each, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed, each in enumerate(arguments)
    ]
    reports = [int(saver.stdout.readline()) for saver in savers if saver.stdout is not None]
    for saver in chance.sample(savers, len(savers)):
        time.sleep(chance.uniform(0, 0.4))
        saver.send_signal(signal.SIGKILL)
    for saver in savers:
        output, _ = saver.communicate()
        reports += map(int, output.split())
    return max(reports)
