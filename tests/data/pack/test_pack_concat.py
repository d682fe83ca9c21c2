import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from smalti.data.pack import n_sequences, split

EOD = 0


@pytest.mark.parametrize(("n_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (4_000_001, 10**6)])
def test_number_of_sequences(n_tokens: int, expected: int) -> None:
    assert n_sequences(n_tokens, 4) == expected


def test_a_document_begins_at_each_end_token() -> None:
    inputs, targets, positions, documents = split(np.array([[5, 6, EOD, 7, EOD, EOD, 8]]), EOD)
    assert inputs.tolist() == [[5, 6, EOD, 7, EOD, EOD]]
    assert targets.tolist() == [[6, EOD, 7, EOD, EOD, 8]]
    assert positions.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert documents.tolist() == [[0, 0, 1, 1, 2, 3]]
    assert [array.dtype for array in (inputs, targets, positions, documents)] == [np.int64] * 2 + [np.int32] * 2


def test_without_masks_a_row_is_one_document() -> None:
    _, _, positions, documents = split(np.array([[5, EOD, 6, 7]] * 2), EOD, mask_documents=False)
    assert positions.tolist() == [[0, 1, 2]] * 2
    assert documents.tolist() == [[0, 0, 0]] * 2


@pytest.mark.proof
@given(stn.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(2, 30)), elements=st.integers(0, 3)))
def test_split_equals_a_loop_over_tokens(rows: np.ndarray) -> None:
    before = rows.copy()
    inputs, targets, positions, documents = split(rows, EOD)
    assert np.array_equal(rows, before)
    assert np.array_equal(np.concatenate([inputs, targets[:, -1:]], axis=1), rows)
    for row in range(rows.shape[0]):
        position, document = -1, 0
        for column, token in enumerate(inputs[row].tolist()):
            position = 0 if token == EOD else position + 1
            document += token == EOD
            assert (positions[row, column], documents[row, column]) == (position, document)


def test_every_token_but_the_first_is_a_target_once() -> None:
    tokens, length = np.arange(1, 30), 4
    rows = np.stack([tokens[i * length : i * length + length + 1] for i in range(n_sequences(tokens.size, length))])
    _, targets, _, _ = split(rows, EOD)
    assert targets.ravel().tolist() == tokens[1 : 1 + targets.size].tolist()
