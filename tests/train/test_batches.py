"""The trainer's tensors of the stream's rows equal those computed from the rows themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smalti.data.pack.rows import Joints
from smalti.data.stream.batch import Batch
from smalti.model.blocks.attention.scores import document_runs
from smalti.train.batches import TokenBatches

EOD = 0


class _Rows:
    """A stream of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.rows = batch

    def batch(self, step: int) -> list[Batch]:
        return [self.rows]


def _compare(batch: Batch, device: str) -> None:
    (microbatch,) = TokenBatches(_Rows(batch), torch.device(device), mask_documents=batch.mask_documents).batch(0)  # type: ignore[arg-type]
    for tensor in microbatch[:4]:
        assert tensor is None or (tensor.dtype == torch.int64 and tensor.is_contiguous())
    assert np.array_equal(microbatch.inputs.cpu().numpy(), batch.inputs)
    assert np.array_equal(microbatch.targets.cpu().numpy(), batch.targets)
    assert np.array_equal(microbatch.positions.cpu().numpy(), batch.positions)
    if batch.mask_documents and (batch.eod_id is not None or batch.joints is not None):
        assert microbatch.documents is not None
        assert np.array_equal(microbatch.documents.cpu().numpy(), batch.documents)
        assert batch.runs == int(document_runs(microbatch.documents).sum())
        assert microbatch.n_documents == (None if device == "cpu" else batch.runs)
    else:
        assert microbatch.documents is None
        assert microbatch.n_documents is None


def _batch(rng: np.random.Generator, dtype: str, *, packed: bool, masked: bool, **fields: Any) -> Batch:
    n, length = int(rng.integers(1, 5)), int(rng.integers(2, 40))
    highest = np.iinfo(dtype).max
    tokens = rng.choice([EOD, 1, 2, 40_000, highest], (n, length + 1)).astype(dtype)
    joints = None
    if packed:
        begins = rng.random((n, length)) < 0.2
        begins[:, 0] = True
        row, column = np.nonzero(begins)
        joints = Joints(row, column, rng.integers(0, highest, row.size))
    return Batch(
        tokens, np.zeros(n, dtype=np.int16), 0, joints=joints,
        masked=rng.random((n, length)) < 0.3 if masked else None, **fields,
    )  # fmt: skip


@given(
    st.integers(0, 1 << 30), st.sampled_from(["<u2", "<u4"]), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([EOD, None, 40_000]),
)  # fmt: skip
def test_tensors_are_those_of_the_rows(
    seed: int, dtype: str, packed: bool, masked: bool, mask_documents: bool, eod_id: int | None
) -> None:
    rng = np.random.default_rng(seed)
    _compare(_batch(rng, dtype, packed=packed, masked=masked, mask_documents=mask_documents, eod_id=eod_id), "cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_rows_on_a_device_come_with_the_number_of_their_documents(packed: bool) -> None:
    """The meta device stands for a GPU: it has no values that could be counted."""
    batch = _batch(np.random.default_rng(2), "<u2", packed=packed, masked=False, mask_documents=True, eod_id=EOD)
    n_documents = {}
    for device in ("cpu", "meta"):
        batches = TokenBatches(_Rows(batch), torch.device(device), mask_documents=True)  # type: ignore[arg-type]
        (result,) = batches.batch(0)
        assert result.documents is not None
        n_documents[device] = result.n_documents
        if device == "cpu":
            assert batch.runs == int(document_runs(result.documents).sum())
    assert n_documents == {"cpu": None, "meta": batch.runs}


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_those_of_the_rows() -> None:
    rng = np.random.default_rng(1)
    for case in range(64):
        options = {"packed": bool(case & 1), "masked": bool(case & 2), "mask_documents": bool(case & 4)}
        _compare(_batch(rng, "<u4" if case & 8 else "<u2", **options, eod_id=None if case & 16 else EOD), "cuda")
