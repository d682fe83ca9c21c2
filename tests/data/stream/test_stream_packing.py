"""Best-fit rows, changing lengths and takedowns, as the stream hands them out."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tokens import EOD, config, write_source

from smalti.base.errors import DataError
from smalti.config.durations import RunLength
from smalti.data.pack import IGNORE
from smalti.data.pack.build import pack_source
from smalti.data.stream.batch import Batch
from smalti.data.stream.open import read_indexes
from smalti.data.stream.stream import Stream
from smalti.data.tokens import TokenSource

SEQ_LENS = (16, 64, 256)
BATCH = 512
STEPS = 12
STAGES = [
    {"until": "4step", "weights": {"code": 1, "prose": 1}, "seq_len": 16},
    {"until": "8step", "weights": {"code": 1, "prose": 2}, "seq_len": 64},
    {"weights": {"code": 1}, "seq_len": 256},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    write_source(root / "code", 60, seed=1, file_tokens=700)
    write_source(root / "prose", 40, seed=2)
    for name in ("code", "prose"):
        for seq_len in SEQ_LENS:
            pack_source(TokenSource(root / name), seq_len).write()
    return root


def _stream(
    root: Path, stages: list[Any] = STAGES, *, micro: int = 128, steps: int = STEPS, batch: int = BATCH, **data: Any
) -> Stream:
    options = {key: data.pop(key) for key in ("rank", "world_size", "indexes") if key in data}
    described = config(root, stages, **{"seq_len": 256, **data})
    return Stream(described, seed=3, length=RunLength(steps, ((0, batch),)), microbatch_tokens=micro, **options)


def _pairs(tokens: np.ndarray, begin: int, end: int) -> list[tuple[int, int]]:
    """(input, target) of tokens [begin, end) of a source."""
    return [(int(tokens[t - 1]) if t else EOD, int(tokens[t])) for t in range(begin, end)]


@pytest.mark.slow
@pytest.mark.proof
@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 600))
def test_every_token_is_a_target_once(root: Path, which: int, world: int, micro: int) -> None:
    """One epoch of one source: all inputs and targets of all ranks, against the pieces that the index names."""
    seq_len = SEQ_LENS[which]
    source = TokenSource(root / "code")
    tokens = source.read(0, source.n_tokens)
    rows = pack_source(source, seq_len).rows.starts.size - 1
    ranks = [
        _stream(
            root, [{"weights": {"code": 1}, "seq_len": seq_len}], packing="best-fit", steps=1, batch=rows * seq_len,
            micro=micro, rank=rank, world_size=world,
        )
        for rank in range(world)
    ]  # fmt: skip
    expected = [_pairs(tokens, *piece) for row in ranks[0].rows_of(0) for piece in row.pieces]
    found = [pair for stream in ranks for b in stream.batch(0) for pair in _seen(b)]
    assert found == [pair for pairs in expected for pair in pairs]
    assert sorted(t for row in ranks[0].rows_of(0) for a, b in row.pieces for t in range(a, b)) == list(
        range(tokens.size)
    )
    assert [row for rank in range(world) for row in ranks[0].rows_of(0, rank)] == ranks[0].rows_of(0)


def _seen(b: Batch) -> list[tuple[int, int]]:
    counted = b.targets != IGNORE
    assert np.array_equal(counted, b.loss_mask)
    return list(zip(b.inputs[counted].tolist(), b.targets[counted].tolist(), strict=True))


def test_positions_documents_and_lengths_of_packed_rows(root: Path) -> None:
    stream = _stream(root, packing="best-fit", micro=256)
    for step in (0, 5, 9):
        rows = iter(stream.rows_of(step))
        for b in stream.batch(step):
            lengths = []
            for row in range(b.source.size):
                pieces = [end - begin for begin, end in next(rows).pieces]
                pieces += [b.seq_len - sum(pieces)] * (sum(pieces) < b.seq_len)
                assert b.positions[row].tolist() == [at for n in pieces for at in range(n)]
                assert b.documents[row].tolist() == [number for number, n in enumerate(pieces, 1) for _ in range(n)]
                lengths += pieces
            starts = np.flatnonzero(b.positions.ravel() == 0)
            assert np.diff(starts, append=b.positions.size).tolist() == lengths


def test_one_copy_of_the_tokens_serves_all_lengths(root: Path) -> None:
    """The same folders at three lengths in one run, in both ways of packing; batches stay the same in tokens."""
    for packing in ("concat", "best-fit"):
        stream = _stream(root, packing=packing)
        assert [segment.seq_len for segment in stream.schedule.segments] == list(SEQ_LENS)
        for step in range(STEPS):
            seq_len = SEQ_LENS[step // 4]
            batches = stream.batch(step)
            assert {b.tokens.shape[1] for b in batches} == {seq_len + 1}
            assert [b.source.size for b in batches] == [max(1, 128 // seq_len)] * (BATCH // max(128, seq_len))
            assert len(stream.rows_of(step)) * seq_len == BATCH
        assert stream.tokens_by_source(STEPS)["code"] + stream.tokens_by_source(STEPS)["prose"] == STEPS * BATCH


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_rows_and_their_inverse_name_what_was_read(root: Path, packing: str) -> None:
    stream = _stream(root, packing=packing)
    tokens = {name: TokenSource(root / name).read(0, TokenSource(root / name).n_tokens) for name in stream.sources}
    for step in range(STEPS):
        rows, segment = stream.rows_of(step), stream.schedule.segment(step)
        read = [pair for b in stream.batch(step) for pair in _seen(b)]
        assert read == [pair for row in rows for piece in row.pieces for pair in _pairs(tokens[row.source], *piece)]
        for row in rows:
            for begin, end in row.pieces:
                for at in (begin, end - 1):
                    assert stream.sequences_holding(row.source, at, at + 1, segment).tolist() == [row.index]
            position = stream.order.position_of(stream.sources.index(row.source), row.epoch, [row.index])
            assert position.tolist() == [row.position]


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_other_ranks_and_microbatches_read_the_same(root: Path, packing: str) -> None:
    whole = _stream(root, packing=packing, micro=10_000)
    expected = [_flat(whole.batch(step)) for step in range(STEPS)]
    for world, micro in ((2, 16), (3, 100), (5, 600)):
        ranks = [_stream(root, packing=packing, micro=micro, rank=r, world_size=world) for r in range(world)]
        for step in range(STEPS):
            batches = [stream.batch(step) for stream in ranks]
            assert len({len(own) for own in batches}) == 1
            assert _flat([b for own in batches for b in own if b.source[0] >= 0]) == expected[step]
        assert ranks[-1].order_hash(0, STEPS) == whole.order_hash(0, STEPS)


def _flat(batches: list[Batch]) -> list[list[Any]]:
    return [
        np.concatenate([getattr(b, name) for b in batches]).tolist()
        for name in ("inputs", "targets", "positions", "documents", "source")
    ]


def test_with_indexes_no_file_is_opened_before_the_first_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = config(root, STAGES, seq_len=256, packing="best-fit", takedowns=str(_list(root, [("code", 3)])))
    indexes = read_indexes(described)
    expected = _stream(root, packing="best-fit", takedowns=described.takedowns).order_hash(0, STEPS)

    def refuse(*args: object, **kwargs: object) -> int:
        raise AssertionError("a file was opened")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr("builtins.open", refuse)
        stream = _stream(root, packing="best-fit", takedowns=described.takedowns, indexes=indexes)
        assert stream.sources == ("code", "prose")
    assert stream.order_hash(0, STEPS) == expected


def test_the_error_for_a_missing_index_has_the_command(root: Path) -> None:
    with pytest.raises(DataError, match="has no best-fit index for sequences of 32 tokens") as caught:
        _stream(root, [{"weights": {"code": 1}, "seq_len": 32}], packing="best-fit")
    assert caught.value.hint == f"smalti data pack {root / 'code'} --seq-len 32"


def test_a_source_needs_only_the_lengths_that_it_is_read_in(root: Path, tmp_path: Path) -> None:
    """Too short for the second stage, and without an index for it; it is read in the first alone."""
    write_source(tmp_path / "short", 3, seed=1)
    write_source(tmp_path / "long", 60, seed=2)
    for name, seq_len in (("short", 16), ("long", 256)):
        pack_source(TokenSource(tmp_path / name), seq_len).write()
    stages = [{"until": "6step", "weights": {"short": 1}, "seq_len": 16}, {"weights": {"long": 1}, "seq_len": 256}]
    assert TokenSource(tmp_path / "short").n_tokens < 256
    for packing in ("concat", "best-fit"):
        stream = _stream(tmp_path, stages, packing=packing)
        assert {row.source for step in range(STEPS) for row in stream.rows_of(step)} == {"short", "long"}
        stream.order_hash(0, STEPS)


def test_packing_is_part_of_the_identity(root: Path) -> None:
    streams = [_stream(root, packing=packing) for packing in ("concat", "best-fit")]
    assert streams[0].identity.state(1)["past"] != streams[1].identity.state(1)["past"]
    assert len(json.dumps(streams[1].state(1))) < 1000


# --------------------------------------------------------------------------------------------- takedowns


def _list(root: Path, documents: list[tuple[str, int]]) -> Path:
    path = root / f"takedowns-{len(documents)}.jsonl"
    path.write_text("".join(json.dumps({"source": s, "document": d}) + "\n" for s, d in documents))
    return path


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("mask_documents", [True, False])
def test_taken_down_documents_never_reach_the_model(root: Path, packing: str, mask_documents: bool) -> None:
    gone = [("code", 0), ("code", 7), ("code", 8), ("code", 59), ("prose", 20)]
    spans = {
        name: [TokenSource(root / name).document_span(d) for n, d in gone if n == name] for name in ("code", "prose")
    }
    tokens = {name: TokenSource(root / name).read(0, TokenSource(root / name).n_tokens) for name in spans}
    options = {"packing": packing, "mask_documents": mask_documents}
    before = _stream(root, **options)
    after = _stream(root, takedowns=str(_list(root, gone)), **options)
    met = 0
    for step in range(STEPS):
        assert after.rows_of(step) == before.rows_of(step)
        rows = after.rows_of(step)
        inputs, targets = ([], [])
        for row in rows:
            wanted: list[tuple[int, int]] = []
            for begin, end in row.pieces:
                is_gone = np.zeros(tokens[row.source].size, dtype=bool)
                for a, b in spans[row.source]:
                    is_gone[a:b] = True
                for t in range(begin, end):
                    given = EOD if t == 0 or is_gone[t - 1] else int(tokens[row.source][t - 1])
                    met += int(is_gone[t])
                    wanted.append((given, IGNORE if is_gone[t] else int(tokens[row.source][t])))
            padding = after.schedule.seq_len(step) - len(wanted)
            inputs.append([given for given, _ in wanted] + [EOD] * padding)
            targets.append([target for _, target in wanted] + [IGNORE] * padding)
        found = after.batch(step)
        assert np.concatenate([b.inputs for b in found]).tolist() == inputs
        assert np.concatenate([b.targets for b in found]).tolist() == targets
        others = before.batch(step)
        for b, other in zip(found, others, strict=True):
            counted = b.loss_mask
            assert np.array_equal(b.positions[counted], other.positions[counted])
    assert met > 100
    assert after.identity.takedowns is not None
    assert before.identity.takedowns is None
