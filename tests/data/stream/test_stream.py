import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tokens import EOD, TOKENIZER, config, write_source

from smalti.base.errors import DataError, UserError
from smalti.config.durations import RunLength
from smalti.data.order.schedule import tokens_by_source
from smalti.data.pack import IGNORE
from smalti.data.stream.stream import Batch, Stream
from smalti.data.tokens import TokenSource

SEQ_LEN = 16
SEQUENCES = 11
STEPS = 12
STAGES = [
    {"until": "0.5run", "weights": {"code": 0.5, "prose": 0.5}},
    {"weights": {"code": 0.8, "prose": 0.1, "math": 0.1}},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for seed, (name, n_documents) in enumerate({"code": 30, "prose": 60, "math": 5}.items()):
        write_source(root / name, n_documents, seed=seed, file_tokens=700)
    return root


def _stream(root: Path, *, stages: list[dict[str, object]] = STAGES, micro: int = 4, **kwargs: object) -> Stream:
    data = {key: kwargs.pop(key) for key in ("seq_len", "mask_documents") if key in kwargs}
    steps, batch = kwargs.pop("total_steps", STEPS), kwargs.pop("global_batch_tokens", SEQUENCES * SEQ_LEN)
    described = config(root, stages, **{"seq_len": SEQ_LEN, **data})
    options = {"seed": 17, "length": RunLength(steps, ((0, batch),)), **kwargs}
    return Stream(described, microbatch_tokens=micro * described.seq_len, **options)


def _rows(batches: list[Batch]) -> list[np.ndarray]:
    return [np.concatenate([b.inputs, b.targets[:, -1:]], axis=1) for b in batches if b.source[0] >= 0]


@pytest.mark.slow
@pytest.mark.proof
@given(st.data())
def test_order_is_the_same_for_any_ranks_microbatches_and_restarts(root: Path, data: st.DataObject) -> None:
    """The run is cut at random steps; each attempt has its own ranks and microbatch; nothing is lost or repeated."""
    expected = _stream(root).order_hash(0, STEPS)
    digest, step = hashlib.sha256(), 0
    while step < STEPS:
        stop = data.draw(st.integers(step + 1, STEPS), label="killed after step")
        world = data.draw(st.integers(1, 14), label="ranks")
        micro = data.draw(st.integers(1, 13), label="microbatch")
        ranks = [_stream(root, rank=rank, world_size=world, micro=micro) for rank in range(world)]
        for at in range(step, stop):
            per_rank = [stream.batch(at) for stream in ranks]
            assert len({len(batches) for batches in per_rank}) == 1
            rows = [row for batches in per_rank for row in _rows(batches)]
            digest.update(np.concatenate(rows).tobytes())
        for stream in ranks:
            stream.check(json.loads(json.dumps(ranks[0].state(step))), step)
            stream.close()
        step = stop
    assert digest.hexdigest() == expected


def test_shapes_types_and_positions(root: Path) -> None:
    stream = _stream(root, rank=1, world_size=2, micro=4)
    batches = stream.batch(3)
    assert [b.inputs.shape for b in batches] == [(4, SEQ_LEN), (2, SEQ_LEN)]
    assert [b.first_position for b in batches] == [3 * SEQUENCES + 5, 3 * SEQUENCES + 9]
    for b in batches:
        assert (b.inputs.dtype, b.targets.dtype) == (np.int64, np.int64)
        assert (b.positions.dtype, b.documents.dtype, b.source.dtype) == (np.int32, np.int32, np.int16)
        expected, _, _ = stream.order.locate(np.arange(b.first_position, b.first_position + b.source.size))
        assert np.array_equal(b.source, expected)
        assert np.all((b.positions == 0) | (b.inputs != EOD))


def test_rows_are_the_tokens_of_their_source(root: Path) -> None:
    stream = _stream(root)
    rows = np.concatenate([row for step in range(STEPS) for row in _rows(stream.batch(step))]).reshape(-1, SEQ_LEN + 1)
    source, _, sequence = stream.order.locate(np.arange(SEQUENCES * STEPS))
    tokens = [TokenSource(root / name).read(0, TokenSource(root / name).n_tokens) for name in stream.sources]
    for row, which, index in zip(rows, source, sequence, strict=True):
        assert np.array_equal(row, tokens[which][index * SEQ_LEN : index * SEQ_LEN + SEQ_LEN + 1])


def test_a_short_rank_gets_empty_microbatches(root: Path) -> None:
    per_rank = [_stream(root, rank=rank, world_size=13, micro=1).batch(0) for rank in range(13)]
    assert [len(batches) for batches in per_rank] == [1] * 13
    empty = [batches[0] for batches in per_rank if batches[0].source[0] < 0]
    assert len(empty) == 2
    for b in empty:
        assert b.inputs.shape == (1, SEQ_LEN)
        assert np.all(b.targets == IGNORE)
        assert b.source.tolist() == [-1]
    uneven = [_stream(root, rank=rank, world_size=2, micro=5).batch(0) for rank in range(2)]
    assert [[0 if b.source[0] < 0 else b.source.size for b in batches] for batches in uneven] == [[5, 0], [5, 1]]


@pytest.mark.parametrize(("world", "micro"), [(13, 1), (2, 5), (3, 4), (4, 2), (1, 4)])
def test_equal_rows_fill_up_what_a_rank_lacks_and_change_nothing_else(root: Path, world: int, micro: int) -> None:
    def per_rank(**options: object) -> list[list[Batch]]:
        return [_stream(root, rank=rank, world_size=world, micro=micro, **options).batch(2) for rank in range(world)]

    plain, equal = per_rank(), per_rank(equal_rows=True)
    assert len({tuple(b.inputs.shape for b in batches) for batches in equal}) == 1
    for short, full in zip((b for one in plain for b in one), (b for one in equal for b in one), strict=True):
        rows = short.source.size
        assert np.array_equal(short.tokens, full.tokens[:rows])
        assert np.array_equal(short.targets, full.targets[:rows])
        assert (full.first_position, full.tokens.dtype) == (short.first_position, short.tokens.dtype)
        assert np.all(full.targets[rows:] == IGNORE)
        assert np.all(full.source[rows:] == -1)


def test_nothing_repeats_before_a_source_is_exhausted(root: Path) -> None:
    stream = _stream(root)
    source, epoch, sequence = stream.order.locate(np.arange(SEQUENCES * STEPS))
    triples = list(zip(source.tolist(), epoch.tolist(), sequence.tolist(), strict=True))
    assert len(set(triples)) == len(triples)
    for which, size in enumerate(stream.order.sizes[0]):
        first_epoch = sequence[(source == which) & (epoch == 0)]
        assert np.unique(first_epoch).size == min((source == which).sum(), size)


def test_tokens_by_source_are_those_that_were_read(root: Path) -> None:
    stream = _stream(root)
    seen = dict.fromkeys(stream.sources, 0)
    assert stream.tokens_by_source(0) == seen
    for step in range(STEPS):
        for b in stream.batch(step):
            for which in b.source.tolist():
                seen[stream.sources[which]] += SEQ_LEN
        assert stream.tokens_by_source(step + 1) == seen
    assert tokens_by_source(stream.config, RunLength(STEPS, ((0, SEQUENCES * SEQ_LEN),))) == seen


def test_same_tokens_serve_any_sequence_length(root: Path) -> None:
    for seq_len in (2, 5, 64):
        stream = _stream(root, seq_len=seq_len, global_batch_tokens=seq_len * 4)
        assert stream.batch(0)[0].inputs.shape == (4, seq_len)


def test_without_document_masks(root: Path) -> None:
    b = _stream(root, mask_documents=False).batch(0)[0]
    assert np.array_equal(b.positions, np.tile(np.arange(SEQ_LEN), (4, 1)))
    assert not b.documents.any()


def test_seed_changes_the_order_and_nothing_else(root: Path) -> None:
    one, other = _stream(root), _stream(root, seed=18)
    assert one.order_hash(0, STEPS) != other.order_hash(0, STEPS)
    assert one.tokens_by_source(STEPS) == other.tokens_by_source(STEPS)


# --------------------------------------------------------------------------------------------- refusals


def test_sources_of_two_tokenizers_are_refused(root: Path, tmp_path: Path) -> None:
    write_source(tmp_path / "code", 20)
    write_source(tmp_path / "prose", 20, tokenizer_digest="cd" * 32)
    with pytest.raises(DataError, match=f"source 'prose'.*tokenizer_digest={'cd' * 32}.*{TOKENIZER}"):
        _stream(tmp_path, stages=[{"weights": {"code": 1, "prose": 1}}])


def test_source_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "code", 1)
    n_tokens = TokenSource(tmp_path / "code").n_tokens
    with pytest.raises(DataError, match=rf"source 'code' .* has {n_tokens} tokens, less than one sequence"):
        _stream(tmp_path, stages=[{"weights": {"code": 1}}], seq_len=200, global_batch_tokens=400)


def test_missing_folder_and_wrong_sizes_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist|holds no token files"):
        _stream(root, stages=[{"weights": {"nothing": 1}}])
    with pytest.raises(UserError, match="the global batch of 17 tokens"):
        _stream(root, global_batch_tokens=17)
    with pytest.raises(UserError, match="microbatch_tokens=0"):
        _stream(root, micro=0)
    for step in (-1, STEPS):
        with pytest.raises(UserError, match=f"step {step}"):
            _stream(root).batch(step)


# --------------------------------------------------------------------------------------------- threads


def test_threads_may_ask_for_any_step(root: Path) -> None:
    stream = _stream(root)
    expected = [stream.batch(step)[0].inputs for step in range(STEPS)]
    steps = list(range(STEPS)) * 5
    with ThreadPoolExecutor(4) as pool:
        for step, batches in zip(steps, pool.map(stream.batch, steps), strict=True):
            assert np.array_equal(batches[0].inputs, expected[step])
