"""A thread that steps the engine, so that requests may be submitted from any thread at any time.

Guarantees: ``submit`` and ``abort`` do not wait for a step. Every submitted request gets a last output: an error of a
request ends that request alone, an error of the engine ends all of them with that error, which stays in ``error``. The
thread sleeps while no request is open.
"""

import threading
from collections.abc import Sequence

from smalti.base import log
from smalti.base.errors import RetryableError
from smalti.serve.engine.engine import Counts, Engine
from smalti.serve.engine.request import OnOutput
from smalti.serve.engine.sampling import SamplingParams


class EngineLoop:
    """Steps ``engine`` in a thread of its own until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        """The error that ended the engine; None while it works."""
        self._wake = threading.Event()
        self._gate = threading.Lock()
        """Held while a request is submitted, and to close: no request is submitted after the open ones were ended."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams, on_output: OnOutput, adapter: str | None = None
    ) -> int:
        """Submit a request; returns its number.

        ``on_output`` is called in the engine's thread, so it must not block; it may be called before this returns.

        Raises UserError for a prompt that does not fit, QueueFull if too many requests are open, and RetryableError
        once the engine has ended.
        """
        with self._gate:
            if self.error is not None:
                raise RetryableError(f"the engine has ended: {self.error}") from self.error
            if self._closing:
                raise RetryableError("the engine is shutting down")
            request_id = self.engine.submit(prompt, params, on_output, adapter)
        self._wake.set()
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request between two steps with a last output. Does nothing for one that has ended."""
        self.engine.abort(request_id)
        self._wake.set()

    def counts(self) -> Counts:
        """Return the engine's load and totals, for /metrics."""
        return self.engine.counts()

    def close(self) -> None:
        """Abort the open requests and join the thread. May be called again."""
        self._stop_accepting(None)
        self._wake.set()
        self._thread.join()

    def _stop_accepting(self, error: BaseException | None) -> None:
        with self._gate:
            self._closing = True
            self.error = error or self.error

    def _run(self) -> None:
        failure = None
        try:
            while not self._closing:
                if not self.engine.step():
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            failure = error
            log.get("serve").exception("the engine failed; every open request ends")
        self._stop_accepting(failure)
        self.engine.end_all(failure)
