"""Carries the engine's outputs for the choices of one HTTP request into the event loop.

Whatever ends the request (an answer, an error, a client that disconnects, a server that stops), none of its sequences
continues in the engine. Outputs arrive in the order in which the engine made them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.request import OnOutput, RequestOutput
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.server.errors import from_engine, shutting_down
from smalti.serve.server.metrics import Clock, Metrics


@dataclass(frozen=True)
class Job:
    """One choice: its prompt and sampling parameters."""

    ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None


class ClientGone(Exception):
    """The client has disconnected."""


class Answers:
    """The outputs of one request: ``start``, iterate ``outputs`` once, ``stop`` (at any time, and again)."""

    def __init__(self, engine: EngineLoop, metrics: Metrics, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._jobs = jobs
        self._clocks = [Clock(metrics) for _ in jobs]
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | ClientGone] = asyncio.Queue()
        self._running: dict[int, int] = {}
        self._gone = False

    def start(self) -> None:
        """Submit all choices to the engine. Raises UserError where it refuses one of them, and then none runs."""
        try:
            for index, job in enumerate(self._jobs):
                self._running[index] = self._engine.submit(job.ids, job.params, self._on_output(index), job.adapter)
        except BaseException:
            self.stop()
            raise

    def _on_output(self, index: int) -> OnOutput:
        """Return a callback for the engine's thread that passes outputs to the event loop."""

        def put(output: RequestOutput) -> None:
            with suppress(RuntimeError):  # the loop has closed: nothing waits for this output
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, output))

        return put

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (choice, output) until every choice has finished. Raises ApiError when the engine fails, ClientGone."""
        unfinished = len(self._jobs)
        while unfinished:
            item = await self._queue.get()
            if isinstance(item, ClientGone):
                raise item
            index, output = item
            self._clocks[index].observe(output)
            if output.finish_reason is not None:
                del self._running[index]
                unfinished -= 1
            if output.finish_reason == "abort":
                raise shutting_down()
            if output.error is not None:
                raise from_engine(output.error) from output.error
            yield index, output

    def stop(self) -> None:
        """Abort the choices that still run and wake the iterator with ClientGone."""
        if not self._gone:
            self._gone = True
            self._queue.put_nowait(ClientGone())
            for request in self._running.values():
                self._engine.abort(request)
