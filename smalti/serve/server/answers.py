"""The choices of one HTTP request on their way through the engine, seen from the event loop.

Promises: whatever ends the request (an answer, an error, a client that went away, a server that stops), no sequence of
it goes on in the engine. Pieces come in the order in which the engine made them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.sequence import Piece
from smalti.serve.server.errors import from_engine, shutting_down
from smalti.serve.server.metrics import Clock, Metrics


@dataclass(frozen=True)
class Job:
    """One choice: its prompt and how it is drawn."""

    ids: tuple[int, ...]
    params: SamplingParams


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answers:
    """Started with ``start``; iterated once; ended with ``stop``, which may be called at any time and again."""

    def __init__(self, engine: EngineLoop, metrics: Metrics, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._jobs = jobs
        self._clocks = [Clock(metrics) for _ in jobs]
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece] | ClientGone] = asyncio.Queue()
        self._running: dict[int, int] = {}
        self._gone = False

    def start(self) -> None:
        """Hand all choices to the engine. UserError where it does not take one of them, and then none runs."""
        try:
            for index, job in enumerate(self._jobs):
                self._running[index] = self._engine.submit(job.ids, job.params, self._listener(index))
        except BaseException:
            self.stop()
            raise

    def _listener(self, index: int) -> Callable[[Piece], None]:
        """Carries pieces from the engine's thread to ours; a loop that has closed has nobody waiting."""

        def hear(piece: Piece) -> None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

        return hear

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) until every choice has finished. Raises ApiError when the engine fails, ClientGone."""
        left = len(self._jobs)
        while left:
            found = await self._queue.get()
            if isinstance(found, ClientGone):
                raise found
            index, piece = found
            self._clocks[index].piece(piece)
            if piece.finish_reason is not None:
                del self._running[index]
                left -= 1
            if piece.finish_reason == "abort":
                raise shutting_down()
            if piece.error is not None:
                raise from_engine(piece.error) from piece.error
            yield index, piece

    def stop(self) -> None:
        """Abort what still runs and wake whoever iterates."""
        if not self._gone:
            self._gone = True
            self._queue.put_nowait(ClientGone())
            for request in self._running.values():
                self._engine.abort(request)
