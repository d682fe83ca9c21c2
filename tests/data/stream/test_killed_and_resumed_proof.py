"""Proof: a stream that is killed, resumed on other ranks and forked has the tokens of one uninterrupted rank.

Ranks, microbatches, ramps and stages are random. Losses: ``tests/train/test_rank_counts_agree.py``.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_tokens import write_source

from smalti.base.errors import UserError
from smalti.config.fork import fork
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.stream.open import read_indexes
from smalti.data.stream.state import future_digest
from smalti.data.stream.stream import Stream

pytestmark = pytest.mark.slow

SOURCES = {"code": 40, "prose": 90, "math": 12, "web": 25}
SEQ_LENS = (8, 16, 32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for seed, (name, n_documents) in enumerate(SOURCES.items()):
        write_source(root / name, n_documents, seed=seed, file_tokens=700)
    return root


class Case:
    """One random run, and how it is carried out."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self.rng = rng
        while True:  # a stage may come out without a step
            try:
                self.config = self._drawn(root, {})
                self.stream = _opened(self.config)
                break
            except UserError:
                continue
        self.root, self.total_steps = root, self.config.length.total_steps

    def _drawn(self, root: Path, kept: dict[str, Any]) -> RunConfig:
        rng, steps = self.rng, int(self.rng.integers(6, 30))
        final = 32 * int(rng.integers(1, 7))
        ramp, start = [], 0
        for _ in range(int(rng.integers(0, 3))):
            start += int(rng.integers(1, 5))
            until = f"{start}step" if rng.random() < 0.6 else f"{start * 32 * 3}tok"
            ramp.append({"until": until, "global_batch_tokens": 32 * int(rng.integers(1, 5))})
        stages: list[dict[str, Any]] = []
        cuts = sorted(rng.choice(np.arange(1, steps), int(rng.integers(0, 4)), replace=False).tolist())
        for cut in [*cuts, None]:
            stage: dict[str, Any] = {"weights": _weights(rng)}
            if cut is not None:
                forms = (f"{cut}step", f"{cut / steps:.6f}run", f"{cut * final}tok")
                stage["until"] = forms[int(rng.integers(3))]
            if rng.random() < 0.3:
                stage["weights_end"] = _weights(rng)
            if rng.random() < 0.4:
                stage["seq_len"] = int(rng.choice(SEQ_LENS))
            stages.append(stage)
        used = {name for stage in stages for part in ("weights", "weights_end") for name in stage.get(part, {})}
        duration = f"{steps}step" if rng.random() < 0.5 else f"{steps * final - 5}tok"
        tree = {
            "name": "case", "seed": int(rng.integers(100)),
            "model": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                      "num_attention_heads": 2},
            "data": {"sources": {name: str(root / name) for name in sorted(used)}, "seq_len": int(rng.choice(SEQ_LENS)),
                     "stages": stages},
            "train": {"duration": duration, "global_batch_tokens": final, "batch_ramp": ramp, "optimizer": {"lr": 1.0},
                      "schedule": {"warmup": "0step", "decay": "0step"}},
            **kept,
        }  # fmt: skip
        return from_dict(RunConfig, tree, "case").config

    def carried_out(self) -> list[bytes]:
        """The rows of each step, as they were learned last: every attempt resumes from a checkpoint that lies some
        steps before the kill, with its own ranks and microbatches. One of them may be forked."""
        rng, learned = self.rng, [b""] * 1000
        forks_at = int(rng.integers(0, 3)) if rng.random() < 0.4 else None
        step, state = 0, None
        for attempt in range(3):
            if attempt == forks_at and step > 0:
                self._fork(step, state)
            end = self.total_steps if attempt == 2 else int(rng.integers(step, self.total_steps + 1))
            saved_at = int(rng.integers(step, end + 1))
            world, micro = int(rng.integers(1, 10)), int(rng.choice([1, 8, 16, 40, 64, 200]))
            indexes = read_indexes(self.config.data)
            ranks = [_opened(self.config, indexes, rank, world, micro) for rank in range(world)]
            if state is not None:
                for stream in ranks:
                    stream.check(state, step)
            for at in range(step, end):
                parts = [stream.batch(at) for stream in ranks]
                assert len({len(batches) for batches in parts}) == 1, "a rank has another number of microbatches"
                rows = [batch.tokens for batches in parts for batch in batches if batch.source[0] >= 0]
                learned[at] = np.concatenate(rows).astype("<i8").tobytes()
            if attempt < 2 and saved_at > step:
                step, state = saved_at, json.loads(json.dumps(ranks[-1].state(saved_at)))
                assert len(json.dumps(state)) < 1000
            for stream in ranks:
                stream.close()
        return learned[: self.total_steps]

    def _fork(self, step: int, state: Any) -> None:
        while True:
            try:
                wanted = self._drawn(self.root, {"seed": self.config.seed})
                self.config = fork(self.config, wanted, step, future_digest(state)).after
                self.stream = _opened(self.config)
                break
            except UserError:  # over before the fork, or a stage without a step
                continue
        self.stream.check(state, step)
        self.total_steps = self.config.length.total_steps


def _weights(rng: np.random.Generator) -> dict[str, float]:
    names = rng.choice(sorted(SOURCES), int(rng.integers(1, len(SOURCES) + 1)), replace=False).tolist()
    return {name: round(float(rng.uniform(0.05, 1)), 2) for name in names}


def _opened(config: RunConfig, indexes: Any = None, rank: int = 0, world: int = 1, micro: int = 64) -> Stream:
    return Stream(
        config.data, seed=config.seed, length=config.length, rank=rank, world_size=world, microbatch_tokens=micro,
        indexes=indexes,
    )  # fmt: skip


def test_elastic_runs_learn_the_same_tokens_in_the_same_order(root: Path, proof: Any, record: Any) -> None:
    n_cases, counts = proof(short=8, full=200), {"ramps": 0, "lengths": 0, "weight_ramps": 0, "forks": 0}
    for number in range(n_cases):
        case = Case(root, np.random.default_rng([4, number]))
        learned = case.carried_out()
        expected = case.stream.order_hash(0, case.total_steps)  # of one rank, from the first step to the last
        assert sha256(b"".join(learned)).hexdigest() == expected, f"case {number}"
        case.stream.close()
        config = case.config
        counts["ramps"] += len(config.length.batches) > 1
        counts["lengths"] += len(config.seq_len_parts) > 1
        counts["weight_ramps"] += any(stage.weights_end is not None for stage in config.data.stages)
        counts["forks"] += bool(config.data.history)
    assert all(counts.values()), counts
    record("stream_elastic", {"cases": n_cases, "kills": 2 * n_cases, "different": 0, **counts})
