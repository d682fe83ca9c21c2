"""``smalti eval compare`` as it is typed."""

import json
from pathlib import Path

import pytest
from reading_samples import example

from smalti.cli.main import run as smalti


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(example(tmp_path / "one")), str(example(tmp_path / "two", shift=1))]
    assert smalti(["eval", "compare", *both]) == 0
    out = capsys.readouterr().out
    for text in (
        "A: one, step 5",
        "B: two, step 5",
        "heldout/prose  bits per byte",
        "no difference shown",
        "comparisons (Holm)",
    ):
        assert text in out, text
    assert smalti(["eval", "compare", *both, "--task", "colours", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values["comparisons"]) == ["colours"]
    assert {"a", "b", "difference", "interval", "smallest_detectable_difference", "p", "verdict"} <= set(
        values["comparisons"]["colours"]
    )


def test_refused_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example(tmp_path / "one")
    one = str(tmp_path / "one")
    assert smalti(["eval", "compare", one, one]) == 2
    err = capsys.readouterr().err
    assert "A and B are the same results" in err
    assert f"hint: smalti eval compare {one} OTHER" in err
    assert smalti(["eval", "compare", one, str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
