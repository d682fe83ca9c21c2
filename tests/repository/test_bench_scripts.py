"""The benchmarks of the data area start, and measure ours where no peer is installed."""

import re
import sys
from pathlib import Path

import pytest
from bench_script import ROOT, bench


def test_no_benchmark_hides_a_module_of_the_standard_library() -> None:
    # A script's folder comes first in sys.path: bench/tokenize.py would break even "import dataclasses" beside it.
    names = {path.stem for path in (ROOT / "bench").glob("*.py")}
    assert not names & sys.stdlib_module_names


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "build_corpus.py",
        "build_speed.py",
        "cross_entropy.py",
        "dedup.py",
        "experts.py",
        "memorised.py",
        "router_balance.py",
        "same_curve.py",
        "shuffle.py",
        "stability.py",
        "stream.py",
        "stream_start.py",
        "tokenizer.py",
        "tune_trl.py",
    ],
)
def test_help_says_how_to_keep_the_figures(script: str) -> None:
    assert "--record" in bench(script, "--help")


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of processes")
def test_dedup_finds_what_was_planted(tmp_path: Path) -> None:
    arguments = ["--documents", "600", "--contenders", "smalti", "--rounds", "1", "--folder", str(tmp_path)]
    table = bench("dedup.py", *arguments)
    assert "600 documents" in table
    found = next(line for line in table.splitlines() if line.startswith("smalti") and " /" in line)
    numbers = re.findall(r"[01]\.\d{4}", found)
    assert len(numbers) == 6
    assert all(float(number) >= 0.98 for number in numbers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of processes")
def test_encoders_agree_on_their_ids(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}  # Übung\n" * 50)
    arguments = ["--folder", str(tmp_path), "--rounds", "2", "--train-rounds", "2", "--vocab-size", "300"]
    table = bench("tokenizer.py", *arguments, "--without", "sentencepiece")
    assert table.count("'smalti': 20, 'tiktoken': 20, 'tokenizers': 20, 'tokenizers-fast': 20") == 2
