"""The identity of the data of a run as JSON below 1 kB, and the check of a saved state against it.

A checkpoint saves ``state(step)``: digests of the data, of the schedule, and of the *past*, which determines the tokens
of all earlier steps. A changed past is an error; so is a changed future, unless a fork accepted it (``data.history``).
A source may be changed, added or removed before its first sequence is read.
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
_DIGEST_CHARS = 32
_SHORT_CHARS = 8

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
    """Everything that determines the tokens of a run."""

    fixed: Mapping[str, Any]
    """Plain values that no fork may change."""
    sources: Mapping[str, str]
    """Name -> digest of the source's content."""
    packs: Mapping[str, Mapping[int, str]]
    """Name -> seq_len -> digest of the source's best-fit index; empty without."""
    schedule: Schedule
    takedowns: str | None
    """Digest of the documents that are blanked. A longer list needs a fork, and changes the future only: a past step
    that is read again is masked by the new list."""
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
        """Return the identity of a stream; no fork may change ``fixed``."""
        return cls(fixed, sources, packs or {}, schedule, takedowns, history)

    def past_digest(self, step: int) -> str:
        """Digest of everything that determines the tokens of the steps before ``step``, and of nothing else."""
        read: dict[str, list[Any]] = {}
        for number, segment in enumerate(self.schedule.segments):
            if segment.start_step < step:
                taken = dict(zip(self.schedule.sources, self.schedule.counts(step, number).tolist(), strict=True))
                for name in sorted(name for name, count in taken.items() if count):
                    pack = self.packs.get(name, {}).get(segment.seq_len)
                    read.setdefault(name, [self.sources[name]]).append([segment.seq_len, pack])
        order = self.schedule.past_digest(step) if step else ""
        return digest_json([FORMAT, order, read, dict(self.fixed)])[:_DIGEST_CHARS]

    def state(self, step: int) -> dict[str, Any]:
        """Return the state as JSON below 1 kB; lists that only serve to describe a difference are omitted if long."""
        state: dict[str, Any] = {
            "format": FORMAT,
            **self.fixed,
            "data": digest_json([dict(self.sources), _in_json(self.packs)])[:_DIGEST_CHARS],
            "schedule": self.schedule.digest[:_DIGEST_CHARS],
            "past": self.past_digest(step),
            **({} if self.takedowns is None else {"takedowns": self.takedowns[:_DIGEST_CHARS]}),
        }
        for key, value in (
            ("history", [past.at_step for past in self.history]),
            ("sources", self._short_digests()),
            ("spans", [f"{span.start_step} {span.digest[:_SHORT_CHARS]}" for span in self.schedule.spans]),
        ):
            if value and len(json.dumps({**state, key: value})) < STATE_BYTES:
                state[key] = value
        assert len(json.dumps(state)) < STATE_BYTES, "the fixed fields alone are too long"
        return state

    def check(self, state: Mapping[str, Any], step: int) -> None:
        """Raise UserError with every difference between ``state``, saved after ``step`` steps, and this identity."""
        if state.get("format") != FORMAT:
            raise UserError(
                f"the state of the data has format {state.get('format')!r}",
                allowed=f"{FORMAT}",
                hint="resume with the version of Smalti that saved it, or start a new run from its weights: init_from",
            )
        mine = self.state(step)
        shown = "".join(f"\n  {line}" for line in self._differences(state, mine))
        if state.get("past") != mine["past"]:
            raise UserError(
                f"the first {step:,} steps of this run were trained on other data or in another order:{shown}",
                allowed="changes of later steps only, with --fork",
                hint="restore what changed, or start a new run (another name) from the checkpoint's weights: init_from",
            )
        saved = future_digest(state)
        now = future_digest(mine)
        replaced = {past.digest for past in self.history if past.at_step >= step}
        known = saved == now or saved in replaced
        if not known or (replaced and self.history[-1].accepted not in ("", now)):
            raise UserError(
                f"the data after step {step:,} have changed since this run was saved (saved -> now):{shown}",
                allowed="the data and the order of the saved run",
                hint="undo the change, or accept it from this step on: the same command with --fork",
            )

    def content_changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a line for each source in both whose content differs, and for takedowns, as far as ``saved`` lists
        its sources."""
        before = saved.get("sources") or {}
        lines = [
            f"content of source '{name}': digest {before[name]} -> {digest}"
            for name, digest in sorted(self._short_digests().items())
            if before.get(name, digest) != digest
        ]
        mine = None if self.takedowns is None else self.takedowns[:_DIGEST_CHARS]
        if saved.get("takedowns") != mine:
            lines.append(f"data.takedowns: digest {saved.get('takedowns')} -> {mine}")
        return lines

    def _short_digests(self) -> dict[str, str]:
        return {name: digest[:_SHORT_CHARS] for name, digest in self.sources.items()}

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
        """Return lines for added and removed sources, or for the indexes if these and ``content`` do not explain the
        digest."""
        if not isinstance(saved, dict):
            return ["the content of at least one source (the list of sources was too long to be saved)"]
        removed = sorted(set(saved) - set(self.sources))
        added = sorted(set(self.sources) - set(saved))
        lines = [f"source '{name}': removed since it was saved" for name in removed]
        lines += [f"source '{name}': added since it was saved" for name in added]
        of_sources = any(line.startswith("content of") for line in content)
        return lines or ([] if of_sources else ["a best-fit index of at least one source"])

    def _span_differences(self, saved: Any) -> list[str]:
        if not isinstance(saved, list):
            return ["the schedule (its spans were too many to be saved one by one)"]
        mine = [f"{span.start_step} {span.digest[:_SHORT_CHARS]}" for span in self.schedule.spans]
        shorter = min(len(saved), len(mine))
        same = next((i for i in range(shorter) if saved[i] != mine[i]), shorter)
        starts = [int(str(spans[same]).split()[0]) for spans in (saved, mine) if same < len(spans)]
        if not starts:
            return ["data.skip, or names of sources"]
        stage = self.schedule.spans[min(same, len(mine) - 1)].stage
        return [f"from step {min(starts):,} on: weights, batch or seq_len (now data.stages[{stage}])"]


def future_digest(state: Mapping[str, Any]) -> str:
    """Digest of the data of a run, past and future, as recorded in a saved state."""
    return digest_json([state.get(key) for key in ("data", "schedule", "takedowns")])[:_DIGEST_CHARS]


def _in_json(packs: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    return {name: {str(seq_len): digest for seq_len, digest in by_len.items()} for name, by_len in packs.items()}
