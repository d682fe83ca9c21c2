"""Ids above the model's vocabulary, in sources that do not say which vocabulary they have."""

from pathlib import Path

import numpy as np
import pytest
import torch

from smalti.base.errors import DataError
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.sources.vocabulary import check_samples
from smalti.data.stream.stream import Stream
from smalti.train.batches import TokenBatches


def _stream(folder: Path, ids: np.ndarray, **source: object) -> Stream:
    folder.mkdir()
    np.save(folder / "tokens.npy", ids)
    data = {"sources": {"n": {"path": str(folder), "format": "raw", "files": ["tokens.npy"], **source}}}
    config = DataConfig.model_validate({**data, "seq_len": 8, "stages": [{"weights": {"n": 1}}]})
    return Stream(config, seed=1, length=RunLength(4, ((0, 64),)), microbatch_tokens=64)


def test_a_source_that_does_not_say_its_vocabulary_is_checked_as_it_is_read(tmp_path: Path) -> None:
    ids = np.arange(100_000, dtype=np.int32)
    ids[70_000] = 999_999
    stream = _stream(tmp_path / "n", ids % 4096)
    TokenBatches(stream, torch.device("cpu"), mask_documents=True, vocab_size=4096).read(0)
    with pytest.raises(DataError) as error:
        TokenBatches(stream, torch.device("cpu"), mask_documents=True, vocab_size=16).read(2)
    for words in ("source 'n' holds the token id", "position 16 (step 2;", "model.vocab_size=16", "n.dtype"):
        assert words in str(error.value)
    check_samples(stream.opened, 4096)
    with pytest.raises(DataError, match="its token"):
        check_samples(_stream(tmp_path / "m", ids).opened, 4096)


def test_a_source_with_a_known_vocabulary_is_not_sampled(tmp_path: Path) -> None:
    stream = _stream(tmp_path / "n", np.arange(1000, dtype=np.int32), vocab_size=1000)
    check_samples(stream.opened, 5)
    (rows,) = TokenBatches(stream, torch.device("cpu"), mask_documents=True, vocab_size=5).read(0)
    assert int(rows.tokens.max()) >= 5


def test_an_end_of_document_that_the_model_does_not_have(tmp_path: Path) -> None:
    stream = _stream(tmp_path / "n", np.zeros(1000, dtype=np.int32), eod_id=7)
    with pytest.raises(DataError, match="eod_id=7"):
        TokenBatches(stream, torch.device("cpu"), mask_documents=True, vocab_size=5)
