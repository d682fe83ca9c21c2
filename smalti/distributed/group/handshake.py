"""The handshake of the ranks before they train: all are present, with the same versions, config and kind of device.

Rank 0 alone compares; each of the others writes one card and waits. Ranks that are lost later are handled by
``smalti/distributed/group/lost.py``.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smalti.base.errors import RetryableError, UserError
from smalti.config.identity import differing_rows

_POLL_S = 0.1
_MORE_S = 1.0
"""How long rank 0 waits for more ranks after the first one that differs, so that all of them are named."""
_READ_S = 10.0
"""How long rank 0, which may hold the store, waits for the others to read the verdict."""
_DIGESTS = ("run", "placement")
"""Values of a card that are digests of the config."""
_SHOWN = 6
"""Most values of the config that are named."""


@dataclass(frozen=True)
class Card:
    """Facts that a rank reports about itself."""

    host: str
    process: int
    same: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be equal on all ranks: versions, number of ranks, kind of device, digests of the config."""
    trouble: str | None = None
    """Reason why this rank cannot train, if any."""


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison, by rank 0."""

    kind: str
    """``begin``, ``refused`` (the request is wrong) or ``missing`` (the same command may be given again)."""
    text: str = ""
    allowed: str | None = None
    hint: str | None = None
    hosts: tuple[str, ...] = ()
    """The host of each rank."""


def meet(
    store: dist.Store, rank: int, world_size: int, card: Card, config: Mapping[str, Any], timeout_s: float
) -> tuple[str, ...]:
    """Wait until all ranks are present and alike, and return the host of each.

    config: dotted name -> value; compared only where the digests in the cards differ. Raises UserError on all ranks
    that are present where some differ, RetryableError where some are missing; the text is the same on all, and names
    those ranks, their hosts and the differences. Raised within seconds of the last arrival, or after ``timeout_s``
    where a rank is missing. A rank that comes after the verdict gets a RetryableError that says so.
    """
    if store.check(["verdict"]) or store.add(f"claims/{rank}", 1) > 1:
        raise _error_of_late_rank(store, rank, card)
    store.set(f"config/{rank}", json.dumps(dict(config)))
    store.set(f"card/{rank}", json.dumps(asdict(card)))
    if rank == 0:
        verdict = _judge(store, world_size, timeout_s)
        store.set("verdict", json.dumps(asdict(verdict)))
        if verdict.kind != "begin":
            _wait_for_readers(store, world_size)
    else:
        verdict = _read_verdict(store, rank, timeout_s)
    if verdict.kind == "begin":
        return tuple(verdict.hosts)
    kind = UserError if verdict.kind == "refused" else RetryableError
    raise kind(verdict.text, allowed=verdict.allowed, hint=verdict.hint)


def names_of(ranks: Iterable[int], hosts: Sequence[str] = ()) -> str:
    """Return ``ranks 2-3 (b) and 5 (c)``; without hosts ``ranks 2-3, 5``."""
    wanted = sorted(ranks)
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in wanted) if hosts else [""]:
        on_host = [rank for rank in wanted if not hosts or hosts[rank] == host]
        parts.append(_spans(on_host) + (f" ({host})" if host else ""))
    return ("rank " if len(wanted) == 1 else "ranks ") + " and ".join(parts)


def _spans(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _error_of_late_rank(store: dist.Store, rank: int, card: Card) -> RetryableError:
    who = f"rank {rank} ({card.host}, process {card.process})"
    if store.check(["verdict"]):
        verdict = _read(store)
        if verdict.kind != "begin":
            return RetryableError(
                f"{who} joins too late: the attempt has ended without it: {verdict.text}",
                hint="start all ranks again",
            )
    holder = "another process"
    if store.check([f"card/{rank}"]):
        other = json.loads(store.get(f"card/{rank}"))
        holder = f"process {other['process']} on {other['host']}"
    return RetryableError(
        f"{who} joins too late: the attempt has begun without it; {holder} is rank {rank}",
        hint="start each rank once; to start again, end the others first",
    )


def _judge(store: dist.Store, world_size: int, timeout_s: float) -> Verdict:
    """Wait for all cards and compare them with that of rank 0."""
    end_s = time.monotonic() + timeout_s
    cards: dict[int, dict[str, Any]] = {}
    missing = set(range(world_size))
    any_differs = False
    while missing:
        for rank in sorted(missing):
            if store.check([f"card/{rank}"]):
                cards[rank] = json.loads(store.get(f"card/{rank}"))
                missing.discard(rank)
                if not any_differs and _differs(cards, rank):
                    any_differs = True
                    end_s = min(end_s, time.monotonic() + _MORE_S)
        if time.monotonic() >= end_s:
            break
        if missing:
            time.sleep(_POLL_S)
    refusal = _refusal(store, cards)
    if refusal:
        return refusal
    if missing:
        hosts = [cards[rank]["host"] for rank in sorted(cards)]
        joined = f"{len(cards)} of {world_size} ranks joined, on {', '.join(dict.fromkeys(hosts))}"
        return Verdict(
            "missing",
            f"{names_of(missing)} did not join within {timeout_s:g} s; {joined}",
            hint="look at the logs of those that are missing, then start all ranks again; "
            "train.parallel.join_timeout=5min gives them more time",
        )
    return Verdict("begin", hosts=tuple(cards[rank]["host"] for rank in range(world_size)))


def _differs(cards: Mapping[int, Mapping[str, Any]], rank: int) -> bool:
    card = cards[rank]
    return bool(card["trouble"]) or (0 in cards and bool(differing_rows([cards[0]["same"], card["same"]])))


def _refusal(store: dist.Store, cards: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Name the ranks that cannot train; if none, those that differ from rank 0. None: all are alike."""
    troubled = [rank for rank in sorted(cards) if cards[rank]["trouble"]]
    if troubled:
        first = cards[troubled[0]]
        text = f"{_who(troubled, cards)}: {first['trouble']}"
        return Verdict("refused", text, hint=f"fix {first['host']} or leave it out, then start all ranks again")
    groups: dict[str, list[int]] = {}
    for rank in sorted(cards):
        if 0 in cards and _differs(cards, rank):
            groups.setdefault(_difference(store, cards, rank), []).append(rank)
    if not groups:
        return None
    text = "\n".join(
        f"{_who(ranks, cards)} {'differs' if len(ranks) == 1 else 'differ'} from rank 0: {lines}"
        for lines, ranks in groups.items()
    )
    return Verdict(
        "refused",
        text,
        allowed="one version, one config and one kind of device on all ranks",
        hint="start every rank with the same command in the same environment",
    )


def _who(ranks: Sequence[int], cards: Mapping[int, Mapping[str, Any]]) -> str:
    return names_of(ranks, [str(cards[rank]["host"]) if rank in cards else "" for rank in range(max(ranks) + 1)])


def _difference(store: dist.Store, cards: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Return ``smalti 0.1.0 -> 0.2.0``, or the values of the config that differ; rank 0's come first."""
    differences = differing_rows([cards[0]["same"], cards[rank]["same"]])
    plain = [f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in differences.items() if name not in _DIGESTS]
    if len(plain) == len(differences):
        return "; ".join(plain)
    configs = [json.loads(store.get(f"config/{which}")) for which in (0, rank)]
    lines = [f"{key}: {ours} -> {theirs}" for key, (ours, theirs) in differing_rows(configs).items()]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join([*plain, *lines[:_SHOWN]]) + more


def _read_verdict(store: dist.Store, rank: int, timeout_s: float) -> Verdict:
    """Wait for the verdict of rank 0, which may come last and then waits as long again for others."""
    seconds = timedelta(seconds=timeout_s + _MORE_S)
    try:
        store.wait(["card/0"], seconds)
        store.wait(["verdict"], seconds)
        verdict = _read(store)
        store.add("readers", 1)
    except RuntimeError as error:
        raise RetryableError(
            f"rank {rank} got no answer from rank 0 within {timeout_s:g} s: it did not start, or is gone",
            hint="look at the log of rank 0, then start all ranks again",
        ) from error
    return verdict


def _wait_for_readers(store: dist.Store, world_size: int) -> None:
    end_s = time.monotonic() + _READ_S
    came = sum(store.check([f"card/{rank}"]) for rank in range(1, world_size))
    while time.monotonic() < end_s and store.add("readers", 0) < came:
        time.sleep(_POLL_S)


def _read(store: dist.Store) -> Verdict:
    return Verdict(**json.loads(store.get("verdict")))
