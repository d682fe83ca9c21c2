"""Decides after each attempt whether the next one follows, and on how many ranks.

Not repeated: usage and failed checks (2, 3), a requested stop, and an exception whose traceback was seen before at the
same step. Attempts in a row without a newer checkpoint end the command, whatever their causes. A run on fewer ranks
grows again after some time.
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from smalti.base.errors import ExitCode, RetryableError
from smalti.config.durations import to_seconds
from smalti.config.restart import RestartConfig
from smalti.fleet.agent.outcome import Outcome
from smalti.track.checkpoints.names import complete, step_of
from smalti.track.run import RunFolder

_WAIT_S = {"disk": 10.0, "reported": 2.0}
"""Seconds before the first restart after causes that take time to pass; each further one doubles them."""
_MOST_WAIT_S = 300.0
_SAME_RANK = 2
"""A rank that fails so many times in a row moves to a spare node, or is left out, if ``min_ranks`` allows."""
_ADDRESS = re.compile(r"0x[0-9a-f]+|\b(pid|process) \d+|:\d{4,5}\b")


class Restarts:
    """Counts the attempts of one command."""

    def __init__(
        self,
        config: RestartConfig,
        folder: RunFolder,
        ranks: int,
        fits: Callable[[int], bool] = lambda ranks: True,
        memory: Path | None = None,
        replace_node: Callable[[int], bool] | None = None,
    ):
        """ranks: of the run. fits: whether it can be laid out on so many. memory: folder of copies in shared memory.
        replace_node: leaves out the node of a rank; returns whether another one takes its place."""
        self.config = config
        self._fits, self._memory, self._replace_node = fits, memory, replace_node
        self._wanted, self._shrunk = ranks, 0
        self._used: Counter[str] = Counter()
        self._tracebacks: set[tuple[int, str]] = set()
        self._saved = self._saved_step(folder)
        self._without_progress = 0
        self._failed: list[int | None] = []
        """The rank that failed in each attempt since the last restart on fewer ranks."""

    def grow_after_s(self, ranks: int) -> float | None:
        """Return how long an attempt on so many ranks lasts before the run grows again; None: for ever."""
        after_s = to_seconds(self.config.grow_after)
        assert after_s is not None
        return None if ranks == self._wanted or not self._shrunk else after_s * 2 ** (self._shrunk - 1)

    def decide(self, outcome: Outcome, folder: RunFolder, ranks: int) -> Outcome:
        """Return the outcome with the next attempt (``restarts``, ``next_ranks``, ``wait_s``), or with the reason why
        there is none."""
        if outcome.code not in (ExitCode.BUG, ExitCode.RETRY) or outcome.cause is None or outcome.cause == "oom":
            return outcome
        if outcome.cause == "grow":
            hint = f"the next attempt starts by itself on all {self._wanted} ranks"
            return replace(outcome, restarts=True, next_ranks=self._wanted, hint=hint)
        if outcome.cause == "leave":
            return replace(outcome, restarts=True, hint="the next attempt starts by itself, without that node")
        stopped = [event for event in folder.events() if event["event"] == "stopped"]
        if outcome.cause not in ("slow", "node") and any(event["attempt"] == folder.attempt for event in stopped):
            return outcome
        self._count_progress(folder)
        final = self._why_not(outcome)
        if final is not None:
            return final
        assert outcome.cause is not None
        self._used[outcome.cause] += 1
        self._failed.append(outcome.rank)
        fewer = self._fewer(ranks)
        wait_s = min(_MOST_WAIT_S, _WAIT_S.get(outcome.cause, 0.0) * 2 ** (self._used[outcome.cause] - 1))
        on = "" if fewer is None else f" on {fewer} of {ranks} ranks, without rank {outcome.rank}"
        when = f" in {wait_s:.0f} s" if wait_s else ""
        since = "the beginning" if self._saved is None else f"the checkpoint of step {self._saved:,}"
        hint = f"the next attempt starts by itself{when}{on}, from {since}"
        return replace(outcome, restarts=True, next_ranks=fewer, wait_s=wait_s, hint=hint)

    def _count_progress(self, folder: RunFolder) -> None:
        saved = self._saved_step(folder)
        began = [
            event["step"]
            for event in folder.events()
            if event["event"] == "resumed" and event["attempt"] == folder.attempt
        ]
        before = began[-1] if began else self._saved
        has_more = saved is not None and (before is None or saved > before)
        self._without_progress = 0 if has_more else self._without_progress + 1
        self._saved = saved

    def _why_not(self, outcome: Outcome) -> Outcome | None:
        """Return the outcome of the command if no attempt follows."""
        config, cause = self.config, outcome.cause
        assert cause is not None and cause != "oom" and cause != "grow" and cause != "leave"
        if config.attempts == 0:
            return outcome
        if cause == "exception":
            seen = (outcome.step, _ADDRESS.sub("", outcome.traceback or outcome.reason))
            if seen in self._tracebacks:
                return replace(outcome, reason=f"{outcome.reason}: the same error at the same step twice")
            self._tracebacks.add(seen)
        if self._without_progress >= config.no_progress:
            reason = f"{outcome.reason}; {self._without_progress} attempts in a row saved no newer checkpoint"
            hint = "see logs/attempt-N in the run folder; the same command tries again"
            return replace(outcome, code=ExitCode.NO_PROGRESS, reason=reason, hint=hint)
        limit = min(config.attempts, config.budget.get(cause, config.attempts))
        if self._used.total() >= config.attempts or self._used[cause] >= limit:
            name = "attempts" if limit == config.attempts else f"budget.{cause}"
            return replace(outcome, reason=f"{outcome.reason}; train.restart.{name}={limit} is used up")
        return None

    def _fewer(self, ranks: int) -> int | None:
        """Return the number of ranks without the one that keeps failing; None to stay on all."""
        least, last = self.config.min_ranks, self._failed[-_SAME_RANK:]
        if len(last) < _SAME_RANK or last[0] is None or len(set(last)) > 1:
            return None
        if self._replace_node is not None and self._replace_node(last[0]):
            self._failed.clear()
            return None
        if least is None:
            return None
        fewer = next((count for count in range(ranks - 1, least - 1, -1) if self._fits(count)), None)
        if fewer is not None:
            self._shrink()
        return fewer

    def on_fewer_nodes(self, room: int) -> int | None:
        """Return the number of ranks for nodes that have ``room`` for so many; None to wait for a node."""
        least = self.config.min_ranks
        fewer = None if least is None else next((n for n in range(room, least - 1, -1) if self._fits(n)), None)
        if fewer is not None:
            self._shrink()
        return fewer

    def _shrink(self) -> None:
        self._failed.clear()
        self._without_progress = 0
        self._shrunk += 1

    def _saved_step(self, folder: RunFolder) -> int | None:
        """Return the step of the newest checkpoint, in the run folder or in memory."""
        steps = [] if self._memory is None else list(map(step_of, complete(self._memory)))
        with suppress(RetryableError):  # the disk fails: no checkpoint that can be used
            steps += [step for step in [folder.saved_step()] if step is not None]
        return max(steps, default=None)
