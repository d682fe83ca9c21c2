"""What the events of a run say of memory that ran out: for the agent, which goes on, and for the next attempt.

An event ``oom`` holds rank, phase, step, ``microbatch_tokens``, ``next_microbatch_tokens`` (None: it was one row) and
``of``, the placement that it happened on. Any rank writes it, the one that ran out.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def happened(events: Iterable[Mapping[str, Any]], attempt: int | None) -> Mapping[str, Any] | None:
    """The event of that attempt, the one that leaves the least where several ranks ran out; None where none did."""
    found = [event for event in events if event["event"] == "oom" and event["attempt"] == attempt]
    return min(found, key=lambda event: event["next_microbatch_tokens"] or 0, default=None)


def limit_tokens(events: Iterable[Mapping[str, Any]], of: Mapping[str, Any]) -> int | None:
    """The most tokens in a microbatch that earlier attempts on the same placement leave; None where none ran out.

    Another device, other axes or another ``train.microbatch_tokens`` begin anew.
    """
    found = [event for event in events if event["event"] == "oom" and event["of"] == dict(of)]
    left = [event["next_microbatch_tokens"] or event["microbatch_tokens"] for event in found]
    return min((tokens for tokens in left if tokens is not None), default=None)  # None: not ours to cut


def words(event: Mapping[str, Any]) -> str:
    """``rank 1 ran out of memory in backward after step 12, with microbatches of 4,096 tokens``."""
    size = event["microbatch_tokens"]
    beside = "" if size is None else f", with microbatches of {size:,} tokens"
    return f"rank {event['rank']} ran out of memory in {event['phase']} after step {event['step']}{beside}"
