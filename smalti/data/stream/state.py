"""What identifies the data of a run, in less than 1 kB of JSON, and the check of a saved state against it.

A checkpoint keeps ``state(step)``: digests of the data, of the schedule, and of its *past*, all that chose the tokens
of the steps before. A changed past is always an error; a changed future too, unless a fork has accepted it
(``data.history``). A longer list of takedowns changes the future only: a step of the past that is read again is masked
by the new list. A source may change, come or go before its first sequence is read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.data.order.schedule import Schedule

if TYPE_CHECKING:
    from smalti.config.data import PastConfig

FORMAT = 2
STATE_BYTES = 1000
_DIGEST, _SHORT = 32, 8

_WORDS = {
    "seed": "seed",
    "mask_documents": "data.mask_documents",
    "tokenizer": "digest of the tokenizer",
    "eod_id": "eod_id of data.sources",
    "packing": "data.packing",
    "shuffle": "data.shuffle",
}


@dataclass(frozen=True)
class Identity:
    """All that chooses the tokens of a run."""

    fixed: Mapping[str, Any]
    """Plain values that hold from the first step to the last."""
    sources: Mapping[str, str]
    """Name -> digest of the source's content."""
    packs: Mapping[str, Mapping[int, str]]
    """Name -> seq_len -> digest of the source's best-fit index; empty without."""
    schedule: Schedule
    takedowns: str | None
    """Digest of the documents that are not learned from. A longer list needs a fork and masks from there on."""
    history: "Sequence[PastConfig]"

    @classmethod
    def of(
        cls,
        sources: Mapping[str, str],
        schedule: Schedule,
        *,
        history: "Sequence[PastConfig]" = (),
        packs: Mapping[str, Mapping[int, str]] | None = None,
        takedowns: str | None = None,
        **fixed: Any,
    ) -> Self:
        """The identity of a stream; ``fixed`` may change in no fork."""
        return cls(fixed, sources, packs or {}, schedule, takedowns, history)

    def past_digest(self, step: int) -> str:
        """Names every token of the steps before ``step``, and nothing of what comes later."""
        read: dict[str, list[Any]] = {}
        for number, segment in enumerate(self.schedule.segments):
            if segment.start_step < step:
                taken = dict(zip(self.schedule.sources, self.schedule.counts(step, number).tolist(), strict=True))
                for name in sorted(name for name, count in taken.items() if count):
                    pack = self.packs.get(name, {}).get(segment.seq_len)
                    read.setdefault(name, [self.sources[name]]).append([segment.seq_len, pack])
        order = self.schedule.past_digest(step) if step else ""
        return digest_json([FORMAT, order, read, dict(self.fixed)])[:_DIGEST]

    def state(self, step: int) -> dict[str, Any]:
        """JSON of less than 1 kB; the lists that only serve to name a difference are left out where they are long."""
        state: dict[str, Any] = {
            "format": FORMAT,
            **self.fixed,
            "data": digest_json([dict(self.sources), _in_json(self.packs)])[:_DIGEST],
            "schedule": self.schedule.digest[:_DIGEST],
            "past": self.past_digest(step),
            **({} if self.takedowns is None else {"takedowns": self.takedowns[:_DIGEST]}),
        }
        for key, value in (
            ("history", [past.at_step for past in self.history]),
            ("sources", self._short_digests()),
            ("spans", [f"{span.start_step} {span.digest[:_SHORT]}" for span in self.schedule.spans]),
        ):
            if value and len(json.dumps({**state, key: value})) < STATE_BYTES:
                state[key] = value
        assert len(json.dumps(state)) < STATE_BYTES, "the fixed fields alone are too long"
        return state

    def check(self, state: Mapping[str, Any], step: int) -> None:
        """Raises UserError with every difference between ``state``, saved after ``step`` steps, and this identity."""
        if state.get("format") != FORMAT:
            raise UserError(
                f"the state of the data has format {state.get('format')!r}",
                allowed=f"{FORMAT}",
                hint="go on with the version of Smalti that saved it, or start a new run from its weights: init_from",
            )
        mine = self.state(step)
        shown = "".join(f"\n  {line}" for line in self._differences(state, mine))
        if state.get("past") != mine["past"]:
            raise UserError(
                f"the first {step:,} steps of this run were trained on other data or in another order:{shown}",
                allowed="the past as it was; only what comes later may change, with --fork",
                hint="restore what changed, or start a new run (another name) from the checkpoint's weights: init_from",
            )
        saved, now = future_digest(state), future_digest(mine)
        replaced = {past.digest for past in self.history if past.at_step >= step}
        known = saved == now or saved in replaced
        if not known or (replaced and self.history[-1].accepted not in ("", now)):
            raise UserError(
                f"the data after step {step:,} have changed since this run was saved (saved -> now):{shown}",
                allowed="the data and the order that it was saved with",
                hint="take the change back; or accept it from here on: the same command with --fork",
            )

    def content_changes(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs in the content of sources that are in both, and of takedowns, a line each; as far as ``saved``
        names its sources."""
        before = saved.get("sources") or {}
        lines = [
            f"content of source '{name}': digest {before[name]} -> {digest}"
            for name, digest in sorted(self._short_digests().items())
            if before.get(name, digest) != digest
        ]
        mine = None if self.takedowns is None else self.takedowns[:_DIGEST]
        if saved.get("takedowns") != mine:
            lines.append(f"data.takedowns: digest {saved.get('takedowns')} -> {mine}")
        return lines

    def _short_digests(self) -> dict[str, str]:
        return {name: digest[:_SHORT] for name, digest in self.sources.items()}

    def _differences(self, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
        lines = [
            f"{_WORDS.get(key, key)}: {saved.get(key)!r} -> {self.fixed.get(key)!r}"
            for key in {**_WORDS, **self.fixed}
            if saved.get(key) != self.fixed.get(key)
        ]
        content = self.content_changes(saved)
        if saved.get("data") != mine["data"]:
            lines += self._names(saved.get("sources"), content)
        lines += content
        if saved.get("schedule") != mine["schedule"]:
            lines += self._span_differences(saved.get("spans"))
        return lines or ["an earlier part of the schedule (data.history)"]

    def _names(self, saved: Any, content: Sequence[str]) -> list[str]:
        """Sources that came or went; where neither they nor ``content`` say it, what else the digest stands for."""
        if not isinstance(saved, dict):
            return ["the content of at least one source (the list of sources was too long to be saved)"]
        gone, new = sorted(set(saved) - set(self.sources)), sorted(set(self.sources) - set(saved))
        lines = [f"source '{name}': saved, not given now" for name in gone]
        lines += [f"source '{name}': given now, not saved" for name in new]
        of_sources = any(line.startswith("content of") for line in content)
        return lines or ([] if of_sources else ["a best-fit index of at least one source"])

    def _span_differences(self, saved: Any) -> list[str]:
        if not isinstance(saved, list):
            return ["the schedule (its spans were too many to be saved one by one)"]
        mine = [f"{span.start_step} {span.digest[:_SHORT]}" for span in self.schedule.spans]
        shorter = min(len(saved), len(mine))
        same = next((i for i in range(shorter) if saved[i] != mine[i]), shorter)
        starts = [int(str(spans[same]).split()[0]) for spans in (saved, mine) if same < len(spans)]
        if not starts:
            return ["data.skip, or names of sources"]
        stage = self.schedule.spans[min(same, len(mine) - 1)].stage
        return [f"from step {min(starts):,} on: weights, batch or seq_len (data.stages[{stage}] of now)"]


def future_digest(state: Mapping[str, Any]) -> str:
    """Names all that a saved state says of the data of a run, past and future."""
    return digest_json([state.get(key) for key in ("data", "schedule", "takedowns")])[:_DIGEST]


def _in_json(packs: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    return {name: {str(seq_len): digest for seq_len, digest in found.items()} for name, found in packs.items()}
