"""Examples in a temporary file: those that were written, by number and in order."""

from array import array
from contextlib import closing
from pathlib import Path

import pytest

from smalti.data.examples import Example
from smalti.tune.spool import Computed, Spool


def test_examples_are_read_back_by_number(tmp_path: Path) -> None:
    examples = [
        Example(((array("i", range(n + 2)), array("B", [0] + [1] * (n + 1))),), {"label": n / 2}, f"row {n}", n)
        for n in range(5)
    ]
    with closing(Spool(tmp_path)) as spool:
        for number, example in enumerate(examples):
            spool.append(example)
            assert spool[number] == example  # read between writes
        assert list(spool) == examples
        assert len(spool) == 5
        assert spool[-1] == examples[-1]
        with pytest.raises(IndexError):
            spool[5]
        assert list(Computed(len(spool), lambda number: spool[number].id)) == [example.id for example in examples]
        assert not list(tmp_path.iterdir()), "no process can leave the file behind"
