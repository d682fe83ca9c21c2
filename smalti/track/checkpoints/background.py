"""Copies checkpoints to a store in a thread, during training.

Guarantees: training never waits for the store and never fails because of it; a checkpoint that waits or is being copied
is not deleted under the copy, which reads hard links of its files; of checkpoints that wait, only the newest is copied.
The disk holds up to two checkpoints more than are kept.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smalti.base import log
from smalti.base.errors import SmaltiError
from smalti.base.objects import Stopped
from smalti.track.checkpoints.copies import Check, Copied, Copies
from smalti.track.checkpoints.names import step_of

_PREFIX = ".copying-"
_CLOSE_S = 10.0
"""Time that ``close`` gives to the request in flight."""


class Events(Protocol):
    """A log of events."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""


@dataclass
class _Held:
    """The files of a checkpoint, which exist until ``release``."""

    name: str
    folder: Path
    temporary: Path | None = None
    files: ExitStack = field(default_factory=ExitStack)

    def release(self) -> None:
        """Remove what holds them."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.files.close()


class BackgroundCopies:
    """A queue of one checkpoint, the newest, and the thread that copies it.

    config: ``config.yaml`` of the run, which each copy holds. check: raises where the store holds another run
    (``Copies.upload``); None where that is known. prune: is called with the step after each copy; an error is a
    warning.
    """

    def __init__(
        self,
        copies: Copies,
        events: Events,
        *,
        config: str,
        check: Check | None,
        prune: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._copies = copies
        self._events = events
        self._config = config
        self._check = check
        self._prune = prune
        self._busy = False
        self._results: list[tuple[str, Copied | Exception]] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._held: _Held | None = None

    def start(self, path: str | Path) -> None:
        """Copy the checkpoint at ``path``, after the one that is being copied, instead of one that waits."""
        with self._change:
            if self._closed:
                return
            replaced, self._held = self._held, _hold(Path(path))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="smalti-copies", daemon=True)
                self._thread.start()
            self._change.notify_all()
        if replaced is not None:
            log.get("checkpoint").info("%s is not copied: a newer one is", replaced.name)
            replaced.release()

    def poll(self) -> None:
        """Write the events of copies that have ended."""
        with self._change:
            results, self._results = self._results, []
        for name, result in results:
            if isinstance(result, Copied):
                self._events.write(
                    "checkpoint_copied",
                    step=step_of(name), url=result.url, bytes=result.bytes, sent_bytes=result.sent_bytes,
                    seconds=round(result.seconds, 3), requests_failed=self._copies.requests.failed,
                )  # fmt: skip
            else:
                text = result.message if isinstance(result, SmaltiError) else f"{type(result).__name__}: {result}"
                log.get("checkpoint").warning("%s was not copied to %s: %s", name, self._copies.url, text)
                self._events.write("checkpoint_copy_failed", step=step_of(name), url=self._copies.url, reason=text)

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint waits or is copied."""
        with self._change:
            return self._held is not None or self._busy

    def close(self) -> None:
        """Stop the copy that runs, within seconds; what was sent remains, and the next attempt continues."""
        with self._change:
            self._closed = True
            waiting, self._held = self._held, None
            self._change.notify_all()
        if waiting is not None:
            waiting.release()
        self._copies.requests.stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self.poll()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._held is not None or self._closed)
                if self._held is None:
                    return
                held, self._held, self._busy = self._held, None, True
            try:
                result: Copied | Exception | None = self._copy(held)
            except Stopped:
                result = None
            except Exception as error:  # training continues without the copy, whatever it is
                result = error
            held.release()
            with self._change:
                self._busy = False
                if result is not None:
                    self._results.append((held.name, result))

    def _copy(self, held: _Held) -> Copied:
        copied = self._copies.upload(held.folder, config=self._config, named=held.name, check=self._check)
        self._check = None
        try:
            self._prune(step_of(held.name))
        except Stopped:
            pass  # the copy is complete; the next one prunes
        except (SmaltiError, OSError) as error:
            text = error.message if isinstance(error, SmaltiError) else str(error)
            log.get("checkpoint").warning("old copies in %s were not deleted: %s", self._copies.url, text)
        return copied


def remove_links(checkpoints: Path, name: str = "") -> None:
    """Remove the links, of one checkpoint or all, that an attempt left which was killed while it copied."""
    for folder in checkpoints.glob(f"{_PREFIX}{name}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _hold(checkpoint: Path) -> _Held:
    """Hold the files of a checkpoint by hard links, or, where there are none, by open files."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{checkpoint.name}-", dir=checkpoint.parent))
        shutil.copytree(checkpoint, folder, copy_function=os.link, dirs_exist_ok=True)
    except (OSError, shutil.Error):
        remove_links(checkpoint.parent, checkpoint.name)
        return _hold_open(checkpoint)
    return _Held(checkpoint.name, folder, folder)


def _hold_open(checkpoint: Path) -> _Held:
    """Hold open files, in a folder of links to their descriptors; nothing where the limit of open files is reached or
    the temporary folder takes no files."""
    held = _Held(checkpoint.name, checkpoint)
    try:
        held.folder = held.temporary = folder = Path(tempfile.mkdtemp(prefix="smalti-copy-"))
        for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
            file = held.files.enter_context(open(path, "rb"))  # noqa: SIM115
            link = folder / path.relative_to(checkpoint)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/proc/self/fd/{file.fileno()}")
    except OSError:
        held.release()
        return _Held(checkpoint.name, checkpoint)
    return held
