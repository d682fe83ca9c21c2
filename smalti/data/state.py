"""What fixes the order of the data, in less than 1 kB of JSON, and the refusal to go on with anything else."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.data.mixture import Schedule
from smalti.data.tokens.manifest import Manifest

FORMAT = 1
STATE_BYTES = 1000
_SHORT = 8

_WORDS = {
    "format": "format of the state",
    "seed": "seed",
    "seq_len": "data.seq_len",
    "global_batch_sequences": "sequences in a global batch (train.global_batch_tokens / data.seq_len)",
    "mask_documents": "data.mask_documents",
    "tokenizer": "digest of the tokenizer",
}


@dataclass(frozen=True)
class Identity:
    """Digests and numbers that, together with a step, name every token of a run."""

    fields: Mapping[str, Any]
    """Plain values, compared one by one."""
    sources: Mapping[str, str]
    """Name -> digest of the source's manifest."""
    stages: tuple[str, ...]
    """Digest of each stage."""
    schedule: str

    @classmethod
    def of(
        cls,
        manifests: Mapping[str, Manifest],
        schedule: Schedule,
        *,
        seed: int,
        seq_len: int,
        global_batch_sequences: int,
        mask_documents: bool,
    ) -> Self:
        """The identity of a stream."""
        tokenizer = next(iter(manifests.values())).tokenizer_digest
        fields = {
            "format": FORMAT,
            "seed": seed,
            "seq_len": seq_len,
            "global_batch_sequences": global_batch_sequences,
            "mask_documents": mask_documents,
            "tokenizer": tokenizer,
        }
        sources = {name: manifest.digest for name, manifest in manifests.items()}
        return cls(fields, sources, tuple(stage.digest for stage in schedule.stages), schedule.digest)

    @property
    def data_digest(self) -> str:
        """Names all token files of all sources."""
        return digest_json(dict(self.sources))

    def state(self) -> dict[str, Any]:
        """JSON of less than 1 kB; the lists that only serve to name a difference are left out where they are long."""
        state: dict[str, Any] = {**self.fields, "data": self.data_digest, "schedule": self.schedule}
        for key, value in (
            ("sources", {name: digest[:_SHORT] for name, digest in self.sources.items()}),
            ("stages", [digest[:_SHORT] for digest in self.stages]),
        ):
            if len(json.dumps({**state, key: value})) < STATE_BYTES:
                state[key] = value
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises UserError with every difference between ``state`` (saved) and this identity (given now)."""
        mine = self.state()
        found = [
            f"{word}: saved {state.get(key)!r}, now {mine[key]!r}"
            for key, word in _WORDS.items()
            if state.get(key) != mine[key]
        ]
        if state.get("data") != mine["data"]:
            found += self._source_differences(state.get("sources"))
        if state.get("schedule") != mine["schedule"]:
            found += self._stage_differences(state.get("stages"))
        if found:
            raise UserError(
                "the data of this run is not the data that it was saved with:\n  " + "\n  ".join(found),
                hint="restore what changed, or start a new run (another name) from the checkpoint's weights: init_from",
            )

    def _source_differences(self, saved: Any) -> list[str]:
        if not isinstance(saved, dict):
            return ["the token files of at least one source (the list of sources was too long to be saved)"]
        mine = {name: digest[:_SHORT] for name, digest in self.sources.items()}
        lines = []
        for name in sorted(set(saved) | set(mine)):
            if name not in mine:
                lines.append(f"source '{name}': saved, not given now")
            elif name not in saved:
                lines.append(f"source '{name}': given now, not saved")
            elif saved[name] != mine[name]:
                lines.append(f"token files of source '{name}': saved digest {saved[name]}, now {mine[name]}")
        return lines or ["the token files of at least one source"]

    def _stage_differences(self, saved: Any) -> list[str]:
        if not isinstance(saved, list):
            return ["the mixture (its stages were too many to be saved one by one)"]
        if len(saved) != len(self.stages):
            return [f"the mixture: saved {len(saved)} stages, now {len(self.stages)}"]
        changed = [i for i, digest in enumerate(self.stages) if saved[i] != digest[:_SHORT]]
        return [f"the mixture: begin or weights of data.stages[{i}]" for i in changed] or [
            "the mixture: names of its sources"
        ]
