"""Examples in rows: each target once with its mask, pairs together and in order, values beside them, any split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import TEXTS, tiny_tokenizer, write_tokens

from smalti.base.errors import DataError, UserError
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.config.load import from_dict
from smalti.config.train import TrainConfig
from smalti.data.examples import Example
from smalti.data.examples.folder import ExamplesRecord, check_files, write_examples
from smalti.data.examples.source import ExampleSource
from smalti.data.pack.examples import ExampleRows
from smalti.data.stream.batch import Batch
from smalti.data.stream.stream import Stream
from smalti.train.batches import TokenBatches

TOKENIZER = tiny_tokenizer()


def examples_of(rng: np.random.Generator, n: int, sequences: int, longest: int) -> list[Example]:
    """Examples of ``sequences`` sequences, whose tokens differ between sequences as far as the vocabulary allows."""
    made = []
    for number in range(n):
        parts = []
        for _ in range(sequences):
            size = int(rng.integers(2, max(3, longest // sequences + 1)))
            mask = rng.integers(0, 2, size)
            mask[0], mask[-1] = 0, 1
            parts.append((rng.integers(0, TOKENIZER.vocab_size, size).tolist(), mask.tolist()))
        made.append(Example(tuple(parts), {"label": float(number), "margin": float(-number)}, f"file:{number}"))
    return made


def opened(folder: Path) -> ExampleSource:
    return ExampleSource(str(folder), ExamplesRecord.load(folder))


def sequences_in(batch: Batch) -> list[tuple[int, int, list[int], list[int], float]]:
    """(row, document, ids, mask, label) of each sequence with a target in the loss, from what a model is given."""
    found = []
    for row in range(len(batch.tokens)):
        for document in np.unique(batch.documents[row]).tolist():
            at = np.flatnonzero(batch.documents[row] == document)
            mask = batch.loss_mask[row, at]
            if not mask.any():
                continue
            assert batch.positions[row, at].tolist() == list(range(at.size))
            ids = [*batch.inputs[row, at].tolist(), int(batch.tokens[row, at[-1] + 1])]
            assert (batch.inputs[row, at[1:]] == batch.tokens[row, at[1:]]).all()
            label = float(batch.values["label"][row, document - 1])
            found.append((row, document, ids, [0, *mask.astype(int).tolist()], label))
    return found


@given(st.integers(0, 1 << 30), st.integers(1, 30), st.sampled_from([1, 2]), st.sampled_from([8, 24]))
@settings(max_examples=40, deadline=None)
def test_rows_hold_every_example_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, sequences: int, seq_len: int
) -> None:
    folder = tmp_path_factory.mktemp("examples")
    examples = examples_of(np.random.default_rng(seed), n, sequences, seq_len)
    write_examples(folder, examples, TOKENIZER)
    source = opened(folder)
    rows = ExampleRows(source, seq_len, TOKENIZER.eod_id)
    indexes = np.random.default_rng(seed).permutation(rows.size)
    out = np.empty((rows.size, seq_len + 1), dtype=source.dtype)
    info = rows.read(indexes, out)
    batch = Batch(out, np.zeros(rows.size, np.int16), 0, 0, True, info.joints, info.masked, info.values)
    by_label: dict[float, list[tuple[int, int, list[int], list[int]]]] = {}
    for row, document, ids, mask, label in sequences_in(batch):
        by_label.setdefault(label, []).append((row, document, ids, mask))
    assert sorted(by_label) == [float(number) for number in range(n)]
    for number, example in enumerate(examples):
        found = by_label[number]
        assert [(ids, mask) for _, _, ids, mask in found] == [(list(i), list(m)) for i, m in example.sequences]
        if sequences == 2:  # in one row, the chosen first, at an odd number
            assert found[0][0] == found[1][0]
            assert found[0][1] % 2 == 1
            assert found[1][1] == found[0][1] + 1
    pieces = rows.pieces(indexes)
    for begin, length in zip(pieces.begin[:5].tolist(), pieces.length[:5].tolist(), strict=True):
        assert indexes[pieces.row[pieces.begin == begin]].tolist() == rows.holding(begin, begin + length).tolist()


def _stream(root: Path, weights: dict[str, float], *, rank: int = 0, world: int = 1, micro: int = 48) -> Stream:
    data = from_dict(
        DataConfig,
        {
            "sources": {name: str(root / name) for name in weights},
            "seq_len": 24,
            "stages": [{"weights": weights}],
        },
    ).config
    train = from_dict(
        TrainConfig, {"duration": "6step", "global_batch_tokens": 120, "optimizer": {"lr": 1e-3}}, "train"
    ).config
    return Stream(data, seed=3, length=RunLength.of(train, ()), rank=rank, world_size=world, microbatch_tokens=micro)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    write_examples(folder / "chats", examples_of(np.random.default_rng(5), 40, 2, 24), TOKENIZER)
    write_tokens(folder / "text", TOKENIZER, TEXTS * 4)
    return folder


@pytest.mark.parametrize("weights", [{"chats": 1.0}, {"chats": 0.6, "text": 0.4}])
def test_the_split_over_ranks_and_microbatches_changes_nothing(root: Path, weights: dict[str, float]) -> None:
    def rows(world: int, micro: int) -> list[list[Any]]:
        streams = [_stream(root, weights, rank=rank, world=world, micro=micro) for rank in range(world)]
        seen: list[list[Any]] = []
        for step in range(6):
            for stream in streams:
                for b in stream.batch(step):
                    for row in np.flatnonzero(b.source >= 0).tolist():
                        values = b.values["label"][row].tolist() if b.values else []
                        parts = (b.inputs, b.targets, b.positions, b.documents)
                        seen.append([part[row].tolist() for part in parts] + [[x for x in values if x]])
        return seen

    expected = rows(1, 1000)
    assert rows(1, 24) == expected
    assert rows(2, 48) == expected
    assert _stream(root, weights).state(0) == _stream(root, weights, micro=24).state(0)


def test_text_beside_examples_keeps_its_documents(root: Path) -> None:
    stream = _stream(root, {"chats": 0.5, "text": 0.5}, micro=1000)
    text = stream.sources.index("text")
    (batch,) = stream.batch(0)
    for row in np.flatnonzero(batch.source == text).tolist():
        begins = np.flatnonzero(batch.inputs[row] == TOKENIZER.eod_id)
        assert (batch.positions[row, begins] == 0).all()
        assert batch.loss_mask[row].all()
        assert len(np.unique(batch.documents[row])) == len({*begins.tolist(), 0})


def test_a_microbatch_has_the_targets_and_values(root: Path) -> None:
    import torch

    stream = _stream(root, {"chats": 1.0}, micro=1000)
    (batch,) = stream.batch(1)
    (placed,) = TokenBatches(stream, torch.device("cpu"), mask_documents=True).place([batch])
    assert placed.targets.numpy().tolist() == batch.targets.tolist()
    assert placed.documents is not None
    assert placed.documents.numpy().tolist() == batch.documents.tolist()
    assert placed.values["label"].numpy().tolist() == batch.values["label"].tolist()
    assert sorted(placed.values) == ["label", "margin"]


def test_an_empty_row_has_the_columns_and_an_epoch_its_padding(root: Path) -> None:
    import torch

    streams = [_stream(root, {"chats": 1.0}, rank=rank, world=2, micro=24) for rank in range(2)]
    batches = [stream.batch(0) for stream in streams]  # 5 rows: one rank lacks the last
    assert [len(rows) for rows in batches] == [3, 3]
    for b in (b for rows in batches for b in rows):
        assert sorted(b.values) == ["label", "margin"]
    rows = ExampleRows(opened(root / "chats"), 24, TOKENIZER.eod_id)
    tokens = TokenBatches(streams[0], torch.device("cpu"), mask_documents=True)
    assert tokens.epochs(5) == 5 * 120 / (rows.size * 24)
    assert sorted(tokens.fullest(2, 24, vocab_size=300).values) == ["label", "margin"]


def test_examples_need_the_masks_of_documents(root: Path) -> None:
    stream = _stream(root, {"chats": 1.0})
    config = stream.config.model_copy(update={"mask_documents": False})
    with pytest.raises(UserError, match=r"mask_documents=false with the examples of source 'chats'"):
        Stream(config, seed=3, length=RunLength(6, ((0, 120),)), microbatch_tokens=48)


def test_bad_examples_are_refused(tmp_path: Path) -> None:
    def write(*examples: Example) -> None:
        write_examples(tmp_path / "bad", examples, TOKENIZER)

    with pytest.raises(DataError, match="no examples"):
        write()
    with pytest.raises(DataError, match="a:1 has no token in the loss"):
        write(Example((([1, 2], [0, 0]),), id="a:1"))
    with pytest.raises(DataError, match="first token in the loss"):
        write(Example((([1, 2], [1, 1]),)))
    with pytest.raises(DataError, match="outside the vocabulary"):
        write(Example((([1, TOKENIZER.vocab_size], [0, 1]),)))
    with pytest.raises(DataError, match="has the values"):
        write(Example((([1, 2], [0, 1]),), {"label": 1.0}), Example((([1, 2], [0, 1]),)))
    assert not (tmp_path / "bad" / "examples.json").exists()


def test_a_long_example_and_damage_are_reported(tmp_path: Path) -> None:
    write_examples(tmp_path / "x", [Example((([1] * 30, [0] * 29 + [1]),))], TOKENIZER)
    with pytest.raises(DataError, match=r"1 of 1 examples .* are longer than a row: 29 targets, data.seq_len=24"):
        ExampleRows(opened(tmp_path / "x"), 24, 0)
    array = tmp_path / "x" / "in_loss.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match=r"in_loss.npy is corrupt"):
        check_files(tmp_path / "x", ExamplesRecord.load(tmp_path / "x"))
    record = tmp_path / "x" / "examples.json"
    record.write_text(record.read_text().replace('"longest": 29', '"longest": 2'))
    with pytest.raises(DataError, match="was changed after it was written"):
        ExamplesRecord.load(tmp_path / "x")


def test_files_are_those_of_numpy(tmp_path: Path) -> None:
    for count in (1, 40):  # another number of digits
        examples = examples_of(np.random.default_rng(count), count, 2, 24)
        write_examples(tmp_path / f"{count}", examples, TOKENIZER)
        sequences = [sequence for example in examples for sequence in example.sequences]
        np.save(tmp_path / "tokens.npy", np.concatenate([ids for ids, _ in sequences]).astype("<u2"))
        np.save(tmp_path / "in_loss.npy", np.concatenate([mask for _, mask in sequences]).astype(bool))
        for name in ("tokens.npy", "in_loss.npy"):
            assert (tmp_path / f"{count}" / name).read_bytes() == (tmp_path / name).read_bytes()
