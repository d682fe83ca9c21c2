import json
from pathlib import Path

import numpy as np
import pytest

from smalti.cli.main import run
from smalti.data.tokens import TokenWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "web", vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        for _ in range(50):
            writer.add(rng.integers(1, 512, rng.integers(1, 80)))
    return tmp_path / "web"


def test_dry_run_compares_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    assert run(["data", "pack", str(folder), "--seq-len", "64", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "best-fit" in text
    assert "nothing was written" in text
    assert sorted(folder.rglob("*")) == before


def test_the_index_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "pack", str(folder), "--seq-len", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 50
    assert (folder / "packs/64/pack.json").exists()
