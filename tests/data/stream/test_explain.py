"""The explanation of a batch agrees with the batch, and the sightings of a document with where it is learned."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from random_tokens import config, write_source

from smalti.base.errors import UserError
from smalti.config.durations import RunLength
from smalti.data.pack.build import pack_source
from smalti.data.pack.concat import IGNORE
from smalti.data.stream.explain import Explanation
from smalti.data.stream.open import read_indexes, takedowns_of
from smalti.data.stream.stream import Stream
from smalti.data.tokens import TokenSource

STAGES = [{"until": "0.5run", "weights": {"a": 3, "b": 1}}, {"weights": {"a": 1, "b": 1}}]
LONGER = [STAGES[0], {**STAGES[1], "seq_len": 32}]
LENGTH = RunLength(12, ((0, 128), (4, 256)))

CASES = {
    "concat": {"stages": STAGES},
    "another seq_len": {"stages": LONGER},
    "skip": {"stages": LONGER, "skip": ((20, 50), (3, 5))},
    "takedowns": {"stages": STAGES, "takedowns": "down.jsonl"},
    "other people's": {"stages": [{"weights": {"mds": 3, "litdata": 1}}]},
    "best-fit": {"stages": LONGER, "packing": "best-fit", "takedowns": "down.jsonl"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("explain")
    write_source(root / "a", 12, seed=1)  # small: gone through more than once
    write_source(root / "b", 60, seed=2)
    for name in ("a", "b"):
        for seq_len in (16, 32):
            pack_source(TokenSource(root / name), seq_len).write()
    fixtures = Path(__file__).parents[1] / "fixtures"
    shutil.copytree(fixtures / "mds-varied-any-gz", root / "mds")
    shutil.copytree(fixtures / "litdata-numpy-uint16", root / "litdata")
    lines = [{"source": "a", "document": 3}, {"source": "b", "document": 0}]
    (root / "down.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def explained(root: Path, *, world_size: int = 3, **fields: object) -> Explanation:
    fields = {key: str(root / value) if key == "takedowns" else value for key, value in fields.items()}
    data = config(root, **fields)
    indexes = read_indexes(data)
    stream = Stream(data, seed=7, length=LENGTH, microbatch_tokens=1 << 20, indexes=indexes)
    return Explanation(stream, world_size=world_size, takedowns=takedowns_of(indexes))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_what_its_batch_holds(root, case):
    told = explained(root, **CASES[case])
    for step in range(LENGTH.total_steps):
        (batch,) = told.stream.batch(step)
        rows = told.step(step)["rows"]
        assert [row["row"] for row in rows] == list(range(len(batch.source)))
        for row, source, targets in zip(rows, batch.source, batch.targets, strict=True):
            assert told.stream.sources[source] == row["source"]
            learned = np.full(targets.size, IGNORE)
            for part in row["documents"]:
                tokens = np.empty((1, part["end"] - part["begin"]), told.stream.opened[row["source"]].dtype)
                told.stream.opened[row["source"]].read_rows(np.array([part["begin"]]), tokens)
                span = told.document(row["source"], str(part["number"]))
                assert span.begin <= part["begin"] < part["end"] <= span.end
                assert part["closed"] == (part["end"] == span.end)
                assert part["taken_down"] == told.is_taken_down(span)
                if not part["taken_down"]:
                    learned[part["column"] : part["column"] + tokens.size] = tokens[0]
            assert learned.tolist() == targets.tolist()
            assert sum(p["end"] - p["begin"] for p in row["documents"]) + row["padding_tokens"] == targets.size


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_a_document_is_learned_at_its_sightings(root, case):
    told = explained(root, **CASES[case])
    found: dict[tuple[str, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    epochs: dict[int, int] = {}
    for step in range(LENGTH.total_steps):
        for row in told.step(step)["rows"]:
            epochs[row["position"]] = row["epoch"]
            for part in row["documents"]:
                found[row["source"], part["number"]][row["position"]] += part["end"] - part["begin"]
    for name, source in told.stream.opened.items():
        for number in range(source.n_documents):
            sightings = told.sightings(told.document(name, str(number)))
            assert {one["position"]: one["learned_tokens"] for one in sightings} == found[name, number]
            for one in sightings:
                assert epochs[one["position"]] == one["epoch"]
                assert told.place(one["position"]).step == one["step"]
                assert all(0 <= begin < end for begin, end in one["tokens"])


def test_ranks_share_the_rows_as_the_stream_does(root):
    for world_size in (1, 2, 3, 5, 16, 40):
        told = explained(root, stages=STAGES, world_size=world_size)
        ranks = [row["rank"] for row in told.step(5)["rows"]]
        for rank in range(world_size):
            own = [row for row, of in enumerate(ranks) if of == rank]
            assert own == list(told.rows_of_rank(5, rank))
            stream = Stream(
                told.stream.config, seed=7, length=LENGTH, microbatch_tokens=64, rank=rank, world_size=world_size
            )
            batches = [batch for batch in stream.batch(5) if batch.source[0] >= 0]
            assert sum(len(batch.source) for batch in batches) == len(own)
            if own:
                assert batches[0].first_position == told.stream.schedule.first_position(5) + own[0]


def test_what_cannot_be_answered(root):
    told = explained(root, stages=STAGES)
    for call, message in (
        (lambda: told.step(12), "step 12"),
        (lambda: told.step(0, rows=[8]), "row 8 is outside a batch of 8"),
        (lambda: told.place(10**9), "1,000,000,000"),
        (lambda: told.rows_of_rank(0, 3), "rank 3 is outside a world of 3"),
        (lambda: told.document("c", "1"), "'c' is not a source"),
        (lambda: told.document("a", "12"), "source 'a' has no document 12"),
        (lambda: told.document("a", "readme.md"), "ids.parquet"),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert message in str(caught.value)
