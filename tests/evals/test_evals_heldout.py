"""Bits per byte: exact on a uniform model, equal to brute force in float64, documents as they were written."""

import gzip
import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import ByteTokenizer, UniformModel, dbrx_config, llama_config, tiny_model, write_byte_tokens

from smalti.base.errors import DataError, UserError
from smalti.config.eval import EvalConfig
from smalti.config.model import ModelConfig
from smalti.evals.likelihood import Window, score
from smalti.evals.tasks import heldout
from smalti.model.decoder import Decoder
from smalti.serve.engine.engine import Engine

TEXTS = ["def f():\n    return 1\n", "é€😀 " * 20, "x", "", "a longer one " * 30, "b" * 63, "c" * 64, "d" * 65]


def test_uniform_model_by_hand(tmp_path: Path) -> None:
    folder = write_byte_tokens(tmp_path / "t", TEXTS)
    found = heldout.run("code", folder, Engine(UniformModel(), ByteTokenizer()), EvalConfig(), 16).score
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    n_tokens = n_bytes + len(TEXTS)  # a token for each byte, and the end of each document
    assert found["n_bytes"] == n_bytes
    assert found["n_tokens"] == n_tokens
    assert found["value"] == pytest.approx(n_tokens * math.log2(257) / n_bytes, rel=1e-6)
    joined = "".join(TEXTS).encode()
    assert found["gzip_bits_per_byte"] == 8 * len(gzip.compress(joined, 9, mtime=0)) / n_bytes
    assert found["xz_bits_per_byte"] == 8 * len(lzma.compress(joined, preset=9)) / n_bytes


@pytest.mark.parametrize(("seq_len", "overlap"), [(2, 0), (2, 1), (3, 1), (7, 6), (16, 4), (16, 8)])
@pytest.mark.parametrize("length", [2, 3, 8, 9, 17, 50])
def test_windows_score_each_target_once_with_enough_context(seq_len: int, overlap: int, length: int) -> None:
    ids = np.arange(length)
    scored: list[int] = []
    for window in heldout.sliding_windows(ids, seq_len, overlap):
        assert len(window.ids) - 1 <= seq_len
        start = int(window.ids[0])
        scored += window.ids[window.first :].tolist()
        context = window.first
        assert start == 0 or context > overlap
    assert scored == list(range(1, length))


def _with_loop_kernel(config: ModelConfig) -> ModelConfig:
    moe = config.moe and config.moe.model_copy(update={"kernel": "loop"})
    return config.model_copy(update={"moe": moe})


def _brute_force_nats(model, ids: list[int], seq_len: int, stride: int) -> float:
    """Each target by its own forward over the window that the rule names, float64."""
    double = Decoder(_with_loop_kernel(model.config)).double().eval()  # grouped_mm takes no float64
    double.load_state_dict(model.state_dict())
    total = 0.0
    for target in range(1, len(ids)):
        window = 0
        while window * stride + seq_len < target:
            window += 1
        context = torch.tensor([ids[window * stride : target]])
        with torch.no_grad():
            total -= float(double(context).value[0, -1].log_softmax(-1)[ids[target]])
    return total


@pytest.mark.sample(2)
@pytest.mark.parametrize(("overlap_frac", "stride"), [(0.25, 12), (0.5, 8), (0.0, 16), (0.99, 1)])
@pytest.mark.parametrize("config", [llama_config, dbrx_config], ids=["llama", "dbrx"])
def test_equals_brute_force(config, overlap_frac: float, stride: int, tmp_path: Path) -> None:
    texts = ["abcdef" * 7, "xy", "", "é" * 15]
    engine = Engine(tiny_model(config()), ByteTokenizer())
    suite = EvalConfig(batch_tokens=40, overlap_frac=overlap_frac)
    found = heldout.run("s", write_byte_tokens(tmp_path / "t", texts), engine, suite, 16)
    for text, sample in zip(texts, found.samples, strict=True):
        ids = [256, *text.encode(), 256]
        assert sample["nats"] == pytest.approx(_brute_force_nats(engine.model, ids, 16, stride), rel=1e-5)
    total = sum(sample["nats"] for sample in found.samples)
    assert found.score["value"] == pytest.approx(total / math.log(2) / sum(len(text.encode()) for text in texts))


def test_a_long_document_is_read_four_thirds_times(tmp_path: Path) -> None:
    read: list[int] = []
    folder, engine = write_byte_tokens(tmp_path / "t", ["x" * 6000]), Engine(UniformModel(), ByteTokenizer())
    found = heldout.run("s", folder, engine, EvalConfig(), 64, lambda done, total: read.append(total)).score
    assert read[-1] == pytest.approx(found["n_tokens"] * 4 / 3, rel=0.01)
    assert (found["seq_len"], found["overlap_tokens"]) == (64, 16)


def test_batching_changes_nothing() -> None:
    model = tiny_model(dbrx_config())
    generator = np.random.default_rng(0)
    windows = [
        Window(generator.integers(0, 256, size=n), int(generator.integers(1, n))) for n in (2, 30, 5, 17, 30, 3, 9)
    ]
    one = score(model, windows, batch_tokens=1)
    assert score(model, windows, batch_tokens=60) == pytest.approx(one, rel=1e-5)
    assert score(model, windows[::-1], batch_tokens=10_000)[::-1] == pytest.approx(one, rel=1e-5)


def test_a_model_of_nan_is_refused() -> None:
    model = UniformModel()
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not a finite number"):
        score(model, [Window(np.arange(4), 1)])


def test_documents_come_back_and_the_cap_takes_whole_ones(tmp_path: Path) -> None:
    texts = [f"document {i} " * (1 + i % 7) for i in range(60)]
    folder = write_byte_tokens(tmp_path / "t", texts)
    every = heldout.load_documents("s", folder, ByteTokenizer(), seed=1, max_bytes=None)
    assert [document.text.decode() for document in every] == texts
    some = heldout.load_documents("s", folder, ByteTokenizer(), seed=1, max_bytes=1000)
    assert 700 < sum(len(document.text) for document in some) <= 1000
    assert [document.index for document in some] == sorted(document.index for document in some)
    assert all(document.text.decode() == texts[document.index] for document in some)
    again = heldout.load_documents("s", folder, ByteTokenizer(), seed=1, max_bytes=1000)
    other = heldout.load_documents("s", folder, ByteTokenizer(), seed=2, max_bytes=1000)
    assert [document.index for document in again] == [document.index for document in some]
    assert [document.index for document in other] != [document.index for document in some]
    assert len(heldout.load_documents("s", folder, ByteTokenizer(), seed=1, max_bytes=1)) == 1


def test_bytes_that_do_not_come_back_are_an_error(tmp_path: Path) -> None:
    class Lossy(ByteTokenizer):
        def decode(self, ids: list[int]) -> str:
            return super().decode(ids).lower()[:-1]

    folder = write_byte_tokens(tmp_path / "t", ["Some Text"])
    with pytest.raises(DataError, match="decode to 8 bytes, but their manifest has 9"):
        heldout.load_documents("s", folder, Lossy(), seed=1, max_bytes=None)


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        heldout.load_documents(
            "s", write_byte_tokens(tmp_path / "t", ["", ""]), ByteTokenizer(), seed=1, max_bytes=None
        )


def _documents(path: str) -> list[tuple[int, bytes, list[int]]]:
    documents = heldout.load_documents("s", path, ByteTokenizer(), seed=1, max_bytes=100)
    return [(document.index, document.text, document.ids.tolist()) for document in documents]


def test_text_files_are_the_same_documents(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "id": 1}, ensure_ascii=False) + "\n" for text in TEXTS))
    assert _documents(str(rows)) == _documents(write_byte_tokens(tmp_path / "t", TEXTS))
    (tmp_path / "a.txt").write_text(TEXTS[1])
    assert _documents(str(tmp_path / "a.txt")) == _documents(write_byte_tokens(tmp_path / "one", TEXTS[1:2]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"a.jsonl:2: there is no text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: the text is not Unicode"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        _documents(str(tmp_path / name))


def test_one_document_has_no_error(tmp_path: Path) -> None:
    engine = Engine(UniformModel(), ByteTokenizer())
    found = heldout.run("s", write_byte_tokens(tmp_path / "t", ["abc"]), engine, EvalConfig(), 16).score
    assert found["stderr"] is None
    assert found["interval"] is None
