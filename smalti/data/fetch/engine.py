"""Requests of one process: an event loop in one thread, shared by all sources, that sends, waits, and sends again.

Promises: at most ``concurrency`` ranges at a time, each by one request, and the process's share of ``requests_per_s``;
one that takes longer than nearly all others is sent a second time on top, where the rate leaves room, a twentieth of
all; a request that fails in a way that may pass is sent again after a pause with full jitter, at another copy where
there is one; nothing waits longer than ``give_up``. Uses no shared memory, no file lock and no process.
"""

import asyncio
import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smalti.base import cloud, log
from smalti.base.errors import DataError, RetryableError, SmaltiError
from smalti.config.data import FetchConfig
from smalti.config.durations import to_seconds
from smalti.data.fetch.copies import Copies, Copy, OddAnswer
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.files import Share
from smalti.data.fetch.pace import Bucket, Latency, may_hedge, pause_s

T = TypeVar("T")
Send = Callable[[Copy], Coroutine[Any, Any, T]]

_MOST_AT_ONCE = 4
"""Requests for one range: where one in twenty hangs, all of them do so once in 160,000 ranges."""
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 60.0


class Engine:
    """See above; made by ``shared``. It ends when nobody holds it."""

    def __init__(self, fetch: FetchConfig, share: Share) -> None:
        self.pid, self.fetch, self.share = os.getpid(), fetch, share
        self.timeout_s, self.give_up_s = _seconds(fetch.timeout), _seconds(fetch.give_up)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(fetch.concurrency)
        self._bucket = Bucket(fetch.requests_per_s, share, self._loop.time())
        self._latency = Latency()
        self._chance = random.Random(f"fetch {share.rank} {self.pid}")
        self._sent = self._hedged = 0
        self._told_s = -_TELL_EVERY_S
        threading.Thread(target=_turn, args=(self._loop,), name="fetch", daemon=True).start()
        # not at exit: cancelled requests make obstore's threads call an interpreter that is ending, and they panic
        weakref.finalize(self, _stop, self._loop).atexit = False

    def take_share(self, share: Share) -> None:
        """From now on this process is one of many."""
        self.share = share
        self._bucket = Bucket(self.fetch.requests_per_s, share, self._now_s())

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin work in the loop; may be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(
        self, copies: Copies, what: str, send: Send[T], counts: Counts, *, length: int | None, first: int = 0
    ) -> T:
        """What ``send`` gives for one of the copies, asked until it answers.

        length: of the answer, where it is known: such requests may be hedged. first: the copy to begin with. Raises
        DataError where every copy says that it has no such thing; RetryableError after ``give_up``.
        """
        asked = _Asked(copies, what, counts)
        refused = asked.refused
        failures, since_s = 0, None
        while True:
            index = copies.pick(self._now_s(), first=first, without=refused)
            async with self._slots:
                await self._bucket.take()
                since_s = self._now_s() if since_s is None else since_s
                found, failed = await self._send(asked, index, send, length)
            if found:
                return found[0]
            if len(refused) == len(copies):
                first_retryable = (error for error in refused.values() if isinstance(error, RetryableError))
                raise next(first_retryable, refused[min(refused)]) from failed[-1][1]
            passing = [(which, error) for which, error in failed if which not in refused]
            if not passing:
                continue
            which, error = passing[-1]
            failures += len(passing)
            counts.add("retries")
            asked_s = self._now_s() - since_s
            wait_s = pause_s(failures // len(copies), self._chance)
            if asked_s + wait_s > self.give_up_s:
                raise _gave_up(copies, what, failures, asked_s, error) from error
            self._tell(copies[which].url, what, asked_s, error)
            await asyncio.sleep(wait_s)

    async def _send(
        self, asked: "_Asked", index: int, send: Send[T], length: int | None
    ) -> tuple[list[T], list[tuple[int, Exception]]]:
        """One request, and a second one where the first takes long: the answer that comes first, or none, and what
        each copy failed with. A copy that says for good that it cannot is added to ``asked.refused``."""
        sent = {asyncio.ensure_future(self._once(asked, index, send, length)): index}
        running, failed = set(sent), list[tuple[int, Exception]]()
        after_s = None if length is None else self._latency.hedge_after_s(length, self.timeout_s)
        try:
            while running:
                done, running = await asyncio.wait(running, timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    error = one.exception()
                    if isinstance(error, Exception):
                        failed.append((sent[one], error))
                        self._settle(asked, sent[one], error)
                good = [one.result() for one in done if one.exception() is None]
                if good:
                    return good[:1], failed
                all_refused = len(asked.refused) == len(asked.copies)
                if done or after_s is None or all_refused or not self._may_hedge(len(running)):
                    continue
                after_s *= 2
                asked.counts.add("hedges")
                index = asked.copies.pick(self._now_s(), first=index + 1, without=asked.refused)
                hedge = asyncio.ensure_future(self._once(asked, index, send, length))
                sent[hedge] = index
                running.add(hedge)
            return [], failed
        finally:
            for one in running:
                one.cancel()

    def _settle(self, asked: "_Asked", index: int, error: Exception) -> None:
        """Take note of what one copy failed with."""
        copies, url = asked.copies, asked.copies[index].url
        if asked.is_final(index, error):
            known = error.final if isinstance(error, OddAnswer) else error
            told = known if isinstance(known, SmaltiError) else cloud.told(store_path(url, asked.what), error)
            asked.refused[index] = told
            return
        if cloud.trouble(error) == "slow":
            asked.counts.add("slowdowns")
            self._bucket.slow_down(self._now_s())
        if copies.failed(index, self._now_s()):
            log.get("data").warning("%s is left alone for a while: %s", url, cloud.reason(error))

    def _may_hedge(self, n_running: int) -> bool:
        """Leave for one request more, where that waits for nothing; taken at once."""
        now_s = self._now_s()
        allowed = n_running < _MOST_AT_ONCE and self._bucket.is_free(now_s) and may_hedge(self._sent, self._hedged)
        if allowed:
            self._bucket.wait_s(now_s)
            self._hedged += 1
        return allowed

    async def _once(self, asked: "_Asked", index: int, send: Send[T], length: int | None) -> T:
        self._sent += 1
        asked.counts.add("requests")
        begun_s = self._now_s()
        deadline_s = self._latency.deadline_s(length or 0, self.timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                found = await send(asked.copies[index])
        except TimeoutError as error:
            self._latency.took_too_long(length or 0)
            what = f"{length:,} bytes did not come" if length else "no answer"
            raise TimeoutError(f"{what} within {deadline_s:.0f} s") from error
        if length is not None:
            self._latency.took(length, self._now_s() - begun_s)
        asked.copies.answered(index, asked.what, ranged=length is not None)
        if index > 0:
            asked.counts.add("failovers")
        return found

    async def leave(self, counts: Counts) -> None:
        """Wait for leave to send one request more, from inside ``send``; it is counted."""
        await self._bucket.take()
        self._sent += 1
        counts.add("requests")

    def _tell(self, url: str, what: str, asked_s: float, error: BaseException) -> None:
        """A warning, now and then, that a store does not answer."""
        if asked_s > _TELL_AFTER_S and self._now_s() - self._told_s > _TELL_EVERY_S:
            self._told_s = self._now_s()
            left_s = self.give_up_s - asked_s
            log.get("data").warning(
                "%s has not answered for %.0f s (%s); asking on for %.0f s",
                store_path(url, what),
                asked_s,
                cloud.reason(error),
                left_s,
            )

    def _now_s(self) -> float:
        return self._loop.time()


_shared: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_sharing = threading.Lock()


def shared(fetch: FetchConfig, share: Share) -> Engine:
    """The engine of this process for these settings: one, however many sources are read, since the rate is for all.

    Who does not know of other ranks (``Share()``: an index, a held-out set) has the share of whoever does.
    """
    alone = Share()
    with _sharing:
        mine = [engine for engine in _shared if (engine.pid, engine.fetch) == (os.getpid(), fetch)]
        for engine in mine:
            if engine.share == share or share == alone:
                return engine
        for engine in mine:
            if engine.share == alone:
                engine.take_share(share)
                return engine
        engine = Engine(fetch, share)
        _shared.add(engine)
        return engine


@dataclass
class _Asked:
    """What is asked for, and what was answered so far."""

    copies: Copies
    what: str
    counts: Counts
    refused: dict[int, SmaltiError] = field(default_factory=dict)
    """Copies that cannot answer, and why."""
    odd: Counter[int] = field(default_factory=Counter)
    """Odd answers of each copy."""

    def is_final(self, index: int, error: Exception) -> bool:
        """True if asking this copy again cannot help. What it could do before it will do again (a proxy errs, keys are
        renewed, a clock is set): ``give_up`` ends that."""
        kind = "odd" if isinstance(error, OddAnswer) else cloud.trouble(error)
        if kind in ("odd", "unranged"):
            self.odd[index] += 1
            if self.odd[index] < cloud.ODD_ANSWERS:
                return False
            if isinstance(error, OddAnswer):
                return isinstance(error.final, DataError) or not self.copies.has_answered(index)
            return not self.copies.has_given_ranges(index)
        if kind == "short" and self.copies.has_served(index, self.what):
            self.odd[index] += 1
            return self.odd[index] == cloud.ODD_ANSWERS
        if isinstance(error, DataError):
            return True
        if kind in ("keyless", "forbidden"):
            return not self.copies.has_answered(index)
        return kind == "short" or (kind in ("missing", "refused") and not self.copies.has_served(index, self.what))


def store_path(url: str, what: str) -> str:
    """A file of a copy, for messages."""
    return f"{url.partition('?')[0].rstrip('/')}/{what}"


def _gave_up(copies: Copies, what: str, failures: int, asked_s: float, error: BaseException) -> RetryableError:
    where = ", ".join(copies[index].url for index in range(len(copies)))
    hint = "when the store is well, run the same command again; data.fetch.give_up says how long to try"
    if not any(copies.has_answered(index) for index in range(len(copies))):
        hint += f"; {cloud.unreachable_hint(copies[0].url)}"
    return RetryableError(
        f"{what} of {where} was asked for {failures} times in {asked_s:.0f} s; the last answer: {cloud.reason(error)}",
        hint=hint,
    )


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def _seconds(text: str) -> float:
    found = to_seconds(text)
    assert found is not None
    return found
