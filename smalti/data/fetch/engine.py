"""Sends the requests of one process from an event loop in one thread, which all sources share.

At most ``concurrency`` ranges are requested at a time, at the process's share of ``requests_per_s``. A request that
takes longer than nearly all others is hedged by a second one; at most a twentieth of all requests are hedges. A
transient failure is retried after a back-off with full jitter, from another replica if there is one, until ``give_up``.
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
from smalti.base.rate_limit import RateLimiter, backoff_s
from smalti.config.data import FetchConfig
from smalti.config.durations import to_seconds
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.files import Share
from smalti.data.fetch.latency import Latency, hedge_allowed
from smalti.data.fetch.replicas import Replica, Replicas, WrongContent

T = TypeVar("T")
Send = Callable[[Replica], Coroutine[Any, Any, T]]

_MAX_PARALLEL = 4
"""Parallel requests for one range: if one in twenty hangs, all four do so for one range in 160,000."""
_WARN_AFTER_S = 5.0
_WARN_EVERY_S = 60.0


class Engine:
    """The event loop and its limits; created by ``shared``, and stopped when it is no longer referenced."""

    def __init__(self, fetch: FetchConfig, share: Share) -> None:
        self.pid = os.getpid()
        self.fetch = fetch
        self.share = share
        self.timeout_s = _seconds(fetch.timeout)
        self.give_up_s = _seconds(fetch.give_up)
        self._loop = asyncio.new_event_loop()
        self._semaphore = asyncio.Semaphore(fetch.concurrency)
        self._rate_limit = RateLimiter(fetch.requests_per_s, self._loop.time(), **share._asdict())
        self._latency = Latency()
        self._rng = random.Random(f"fetch {share.rank} {self.pid}")
        self._sent = self._hedged = 0
        self._warned_s = -_WARN_EVERY_S
        threading.Thread(target=_run_loop, args=(self._loop,), name="fetch", daemon=True).start()
        # Not at exit: after a cancelled request obstore's threads call into the ending interpreter, which panics.
        weakref.finalize(self, _stop, self._loop).atexit = False

    def take_share(self, share: Share) -> None:
        """Set the share of the job's rate that this process has."""
        self.share = share
        self._rate_limit = RateLimiter(self.fetch.requests_per_s, self._now_s(), **share._asdict())

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start work in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def request(
        self, replicas: Replicas, what: str, send: Send[T], counts: Counts, *, length: int | None, first: int = 0
    ) -> T:
        """Send a request to one replica after another until one responds; returns the result of ``send``.

        length: the length of the response, if known; only such requests are hedged. first: the first replica to try.
        Raises DataError if no replica has the file; RetryableError after ``give_up``.
        """
        attempts = _Attempts(replicas, what, counts)
        refused = attempts.refused
        failures = 0
        since_s = None
        while True:
            index = replicas.pick(self._now_s(), first=first, without=refused)
            async with self._semaphore:
                await self._rate_limit.take()
                since_s = self._now_s() if since_s is None else since_s
                responses, failed = await self._send(attempts, index, send, length)
            if responses:
                return responses[0]
            if len(refused) == len(replicas):
                first_retryable = (error for error in refused.values() if isinstance(error, RetryableError))
                raise next(first_retryable, refused[min(refused)]) from failed[-1][1]
            transient = [(which, error) for which, error in failed if which not in refused]
            if not transient:
                continue
            which, error = transient[-1]
            failures += len(transient)
            counts.add("retries")
            elapsed_s = self._now_s() - since_s
            wait_s = backoff_s(failures // len(replicas), self._rng)
            if elapsed_s + wait_s > self.give_up_s:
                raise _gave_up(replicas, what, failures, elapsed_s, error) from error
            self._warn(replicas[which].url, what, elapsed_s, error)
            await asyncio.sleep(wait_s)

    async def _send(
        self, attempts: "_Attempts", index: int, send: Send[T], length: int | None
    ) -> tuple[list[T], list[tuple[int, Exception]]]:
        """Send one request, and hedges if it takes long.

        Returns [the first response], or [] if all failed, and the (replica, error) of each failure. A replica whose
        failure is final is added to ``attempts.refused``.
        """
        sent = {asyncio.ensure_future(self._once(attempts, index, send, length)): index}
        running = set(sent)
        failed: list[tuple[int, Exception]] = []
        after_s = None if length is None else self._latency.hedge_after_s(length, self.timeout_s)
        try:
            while running:
                done, running = await asyncio.wait(running, timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if isinstance(error, Exception):
                        failed.append((sent[task], error))
                        self._record_failure(attempts, sent[task], error)
                good = [task.result() for task in done if task.exception() is None]
                if good:
                    return good[:1], failed
                all_refused = len(attempts.refused) == len(attempts.replicas)
                if done or after_s is None or all_refused or not self._may_hedge(len(running)):
                    continue
                after_s *= 2
                attempts.counts.add("hedges")
                index = attempts.replicas.pick(self._now_s(), first=index + 1, without=attempts.refused)
                hedge = asyncio.ensure_future(self._once(attempts, index, send, length))
                sent[hedge] = index
                running.add(hedge)
            return [], failed
        finally:
            for task in running:
                task.cancel()

    def _record_failure(self, attempts: "_Attempts", index: int, error: Exception) -> None:
        """Record the error of a replica."""
        replicas = attempts.replicas
        url = replicas[index].url
        if attempts.is_final(index, error):
            known = error.final if isinstance(error, WrongContent) else error
            final = (
                known if isinstance(known, SmaltiError) else cloud.final_error(store_path(url, attempts.what), error)
            )
            attempts.refused[index] = final
            return
        if cloud.trouble(error) == "slow":
            attempts.counts.add("slowdowns")
            self._rate_limit.slow_down(self._now_s())
        if replicas.failed(index, self._now_s()):
            log.get("data").warning("%s is not used for a while: %s", url, cloud.reason(error))

    def _may_hedge(self, n_running: int) -> bool:
        """Whether a hedge may be sent now; if so, a request is reserved for it."""
        now_s = self._now_s()
        allowed = (
            n_running < _MAX_PARALLEL and self._rate_limit.is_free(now_s) and hedge_allowed(self._sent, self._hedged)
        )
        if allowed:
            self._rate_limit.wait_s(now_s)
            self._hedged += 1
        return allowed

    async def _once(self, attempts: "_Attempts", index: int, send: Send[T], length: int | None) -> T:
        self._sent += 1
        attempts.counts.add("requests")
        begun_s = self._now_s()
        deadline_s = self._latency.deadline_s(length or 0, self.timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                response = await send(attempts.replicas[index])
        except TimeoutError as error:
            self._latency.add_timeout(length or 0)
            what = f"{length:,} bytes did not arrive" if length else "no response"
            raise TimeoutError(f"{what} within {deadline_s:.0f} s") from error
        if length is not None:
            self._latency.add(length, self._now_s() - begun_s)
        attempts.replicas.answered(index, attempts.what, ranged=length is not None)
        if index > 0:
            attempts.counts.add("failovers")
        return response

    async def acquire(self, counts: Counts) -> None:
        """Wait until one more request may be sent, and count it; for further requests inside ``send``."""
        await self._rate_limit.take()
        self._sent += 1
        counts.add("requests")

    def _warn(self, url: str, what: str, elapsed_s: float, error: BaseException) -> None:
        """Warn, at most once a minute, that a store does not respond."""
        if elapsed_s > _WARN_AFTER_S and self._now_s() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = self._now_s()
            left_s = self.give_up_s - elapsed_s
            log.get("data").warning(
                "%s has not responded for %.0f s (%s); retrying for another %.0f s",
                store_path(url, what),
                elapsed_s,
                cloud.reason(error),
                left_s,
            )

    def _now_s(self) -> float:
        return self._loop.time()


_shared: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_sharing = threading.Lock()


def shared(fetch: FetchConfig, share: Share) -> Engine:
    """Return the engine of this process for these settings: one for all sources, because they share the rate.

    A caller with the default ``Share()`` (of an index, a held-out set) uses the share of callers that know their rank.
    """
    alone = Share()
    with _sharing:
        engines = [engine for engine in _shared if (engine.pid, engine.fetch) == (os.getpid(), fetch)]
        for engine in engines:
            if engine.share == share or share == alone:
                return engine
        for engine in engines:
            if engine.share == alone:
                engine.take_share(share)
                return engine
        engine = Engine(fetch, share)
        _shared.add(engine)
        return engine


@dataclass
class _Attempts:
    """The attempts to read one range or file."""

    replicas: Replicas
    what: str
    counts: Counts
    refused: dict[int, SmaltiError] = field(default_factory=dict)
    """Replica -> its final error."""
    odd: Counter[int] = field(default_factory=Counter)
    """Replica -> number of responses with wrong content."""

    def is_final(self, index: int, error: Exception) -> bool:
        """Whether an error of this replica is final.

        A replica that has responded before may recover until ``give_up``: a proxy fails, keys are renewed, a clock is
        set.
        """
        kind = "odd" if isinstance(error, WrongContent) else cloud.trouble(error)
        if kind in ("odd", "unranged"):
            self.odd[index] += 1
            if self.odd[index] < cloud.ODD_ANSWERS:
                return False
            if isinstance(error, WrongContent):
                return isinstance(error.final, DataError) or not self.replicas.has_answered(index)
            return not self.replicas.has_given_ranges(index)
        if kind == "short" and self.replicas.has_served(index, self.what):
            self.odd[index] += 1
            return self.odd[index] == cloud.ODD_ANSWERS
        if isinstance(error, DataError):
            return True
        if kind in ("keyless", "forbidden"):
            return not self.replicas.has_answered(index)
        return kind == "short" or (kind in ("missing", "refused") and not self.replicas.has_served(index, self.what))


def store_path(url: str, what: str) -> str:
    """Path of a file of a replica, for messages."""
    return f"{url.partition('?')[0].rstrip('/')}/{what}"


def _gave_up(replicas: Replicas, what: str, failures: int, elapsed_s: float, error: BaseException) -> RetryableError:
    where = ", ".join(replicas[index].url for index in range(len(replicas)))
    hint = "run the same command again when the store responds; data.fetch.give_up sets how long to try"
    if not any(replicas.has_answered(index) for index in range(len(replicas))):
        hint += f"; {cloud.unreachable_hint(replicas[0].url)}"
    return RetryableError(
        f"{what} of {where} was requested {failures} times in {elapsed_s:.0f} s without success; "
        f"the last error: {cloud.reason(error)}",
        hint=hint,
    )


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
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
    seconds = to_seconds(text)
    assert seconds is not None
    return seconds
