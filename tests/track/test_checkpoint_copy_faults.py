"""Faults of a store and of copies of checkpoints: reported by name, never taken for a store without checkpoints."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from made_checkpoints import checkpoint, digests
from made_copies import OBJECTS, opened
from s3_buckets import Bucket

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.track.checkpoints import copies as copies_module
from smalti.track.checkpoints.copies import THREADS
from smalti.track.checkpoints.copy_format import Damaged

pytestmark = pytest.mark.slow  # a server for each, and waits between attempts
KINDS = ("unavailable", "slow_down", "reset", "cut", "truncate")


def part_keys(s3: Bucket, step: int) -> list[str]:
    return [key for key in s3.objects() if f"/step-{step:08d}/shards/" in key]


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


def test_keys_without_the_right_to_write_are_named_at_once(tmp_path: Path, s3: Bucket) -> None:
    s3.proxy.refuse = lambda head, key: (403, "AccessDenied") if head.startswith("PUT") else None
    with pytest.raises(DataError, match=r"cannot be written, access is denied: .*AccessDenied"):
        opened(s3.url).upload(checkpoint(tmp_path / "run", 1))
    assert s3.proxy.counts["PUT"] <= THREADS


def test_keys_without_the_right_to_delete_leave_leftovers_with_a_warning(
    tmp_path: Path, s3: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    s3.proxy.refuse = lambda head, key: (403, "AccessDenied") if head.startswith(("POST", "DELETE")) else None
    s3.write("runs/a/step-00000001/shards/left", b"over")
    opened(s3.url).upload(checkpoint(tmp_path / "run", 2))
    assert "leftovers in s3://" in caplog.text
    assert opened(s3.url).complete() == ["step-00000002"]


def test_a_process_ends_while_a_store_does_not_answer(tmp_path: Path, s3: Bucket) -> None:
    """The requests in flight are not waited for, by the copy nor at the end of the interpreter."""
    s3.proxy.faults.hang, s3.proxy.faults.only_get = 1.0, False
    run = checkpoint(tmp_path / "run", 1)
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from made_copies import opened
from smalti.track.checkpoints import background
background._CLOSE_S = 0.5
class Events:
    def write(self, kind, **fields): print(kind)
copies = opened({s3.url!r})
copies._mark, copies._present = lambda name: None, lambda name: {{}}
copier = background.BackgroundCopies(copies, Events(), config="", check=None)
copier.start({str(run)!r})
time.sleep(1)
copier.close()
"""
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert s3.proxy.counts["PUT"] == THREADS, "all are in flight"
    assert time.monotonic() - began_s < 20


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


class Role(BaseHTTPRequestHandler):
    """The metadata service of a machine with a role; each answer has the next key, which expires within a minute."""

    given = 0

    def do_PUT(self) -> None:
        """A session token."""
        self.answer(b"session")

    def do_GET(self) -> None:
        """The name of the role, or its keys."""
        if self.path.endswith("/security-credentials/"):
            self.answer(b"role")
            return
        Role.given += 1
        expires = (datetime.now(UTC) + timedelta(seconds=50)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": f"KEY{Role.given}", "SecretAccessKey": "x", "Token": "t", "Expiration": expires}
        self.answer(json.dumps({**keys, "LastUpdated": expires, "Code": "Success", "Type": "AWS-HMAC"}).encode())

    def answer(self, body: bytes) -> None:
        """Send a body."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_keys_of_a_machine_with_a_role_are_renewed_before_they_expire(
    tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By obstore; a key that is older than the one before the newest is rejected here."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with ThreadingHTTPServer(("127.0.0.1", 0), Role) as metadata:
        thread = threading.Thread(target=metadata.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{metadata.server_port}")
        newest = lambda: (f"KEY{Role.given}", f"KEY{Role.given - 1}")  # noqa: E731
        s3.proxy.refuse = lambda head, key: None if key in newest() else (400, "ExpiredToken")
        s3.proxy.faults.latency_s = 0.05
        path = checkpoint(tmp_path / "run", 1)
        opened(s3.url).upload(path)
        metadata.shutdown()
        thread.join()
    assert Role.given >= 3
    assert any(key.endswith("/COMPLETE") for key in s3.objects())


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
    for step, seed in ((1, 0), (2, 1)):  # the copy of this step, and the newest
        with pytest.raises(UserError, match="another run: name: b"):
            opened(s3.url).upload(checkpoint(tmp_path / "again", step, seed=seed), check=check)


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
