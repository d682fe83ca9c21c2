"""Reads the ``oom`` events of a run, for the agent and for the next attempt.

An ``oom`` event holds rank, phase, step, ``microbatch_tokens``, ``next_microbatch_tokens`` (None: the microbatch was a
single row) and ``of``, its placement. The rank that ran out of memory writes it.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def happened(events: Iterable[Mapping[str, Any]], attempt: int | None) -> Mapping[str, Any] | None:
    """Return the attempt's event with the smallest next microbatch; None where no rank ran out of memory."""
    matching = [event for event in events if event["event"] == "oom" and event["attempt"] == attempt]
    return min(matching, key=lambda event: event["next_microbatch_tokens"] or 0, default=None)


def limit_tokens(events: Iterable[Mapping[str, Any]], of: Mapping[str, Any]) -> int | None:
    """Return the largest microbatch that earlier attempts on the same placement allow; None where none ran out.

    Events under another device, other axes or another ``train.microbatch_tokens`` are ignored.
    """
    matching = [event for event in events if event["event"] == "oom" and event["of"] == dict(of)]
    limits = [event["next_microbatch_tokens"] or event["microbatch_tokens"] for event in matching]
    # An event without either is of a training whose microbatch Smalti does not set.
    return min((tokens for tokens in limits if tokens is not None), default=None)


def describe(event: Mapping[str, Any]) -> str:
    """Return ``rank 1 ran out of memory in backward after step 12, with microbatches of 4,096 tokens``."""
    size = event["microbatch_tokens"]
    microbatch = "" if size is None else f", with microbatches of {size:,} tokens"
    return f"rank {event['rank']} ran out of memory in {event['phase']} after step {event['step']}{microbatch}"
