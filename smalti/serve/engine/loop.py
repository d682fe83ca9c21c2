"""A thread that steps the engine, so that requests may come from any thread at any time.

Promises: ``submit`` and ``abort`` return without waiting for a step and may be called from any thread; ``on_piece`` is
called in the engine's thread, so it must not block; every request that was taken in gets a last piece, whatever
happens: an error of one request ends that request alone, an error of the engine ends all of them with that error and
stays in ``error``. An idle engine costs nothing: the thread sleeps until something is submitted.
"""

import threading
from collections.abc import Sequence as Rows

from smalti.base import log
from smalti.base.errors import RetryableError
from smalti.serve.engine.engine import Counts, Engine
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.sequence import OnPiece


class EngineLoop:
    """Owns the stepping of ``engine`` until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        """What ended the engine; None while it works."""
        self._wake = threading.Event()
        self._gate = threading.Lock()
        """Held while a request comes in, and to shut: no request comes in after the last ones were ended."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: str | Rows[int], params: SamplingParams, on_piece: OnPiece) -> int:
        """Take a request in; returns its number. The first piece may come before this returns.

        Raises UserError for a prompt that does not fit, QueueFull when too many requests are open, and RetryableError
        once the engine has ended.
        """
        with self._gate:
            if self.error is not None:
                raise RetryableError(f"the engine has ended: {self.error}") from self.error
            if self._closing:
                raise RetryableError("the engine is shutting down")
            request = self.engine.submit(prompt, params, on_piece)
        self._wake.set()
        return request

    def abort(self, request: int) -> None:
        """End a request between two steps; its last piece says ``abort``. Nothing for one that has ended."""
        self.engine.abort(request)
        self._wake.set()

    def counts(self) -> Counts:
        """The engine's numbers, for /metrics."""
        return self.engine.counts()

    def close(self) -> None:
        """End what still runs (``abort``) and join the thread. May be called again."""
        self._shut(None)
        self._wake.set()
        self._thread.join()

    def _shut(self, error: BaseException | None) -> None:
        with self._gate:
            self._closing = True
            self.error = error or self.error

    def _run(self) -> None:
        failed = None
        try:
            while not self._closing:
                if not self.engine.step():
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            failed = error
            log.get("serve").exception("the engine failed; every open request ends")
        self._shut(failed)
        self.engine.end_all(failed)
