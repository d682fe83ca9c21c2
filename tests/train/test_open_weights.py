"""Rank 0 decides the kind of the folder ``init_from``: ranks that saw different kinds would wait for ever."""

import os
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks

from smalti.base.errors import DataError
from smalti.train.weights import open_weights


def _open(rank: int, folder: Path) -> str:
    if rank == 1:  # its mount lags behind
        os.path.isfile = lambda path: False  # type: ignore[assignment]
    with pytest.raises(DataError) as raised:
        open_weights(str(folder), torch.nn.Linear(1, 1))
    return str(raised.value)


def test_a_rank_that_does_not_see_the_folder_goes_the_way_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first, second = run_ranks(2, _open, tmp_path)
    assert first == second
    assert "is none of" not in first  # it was read as a Hugging Face folder
