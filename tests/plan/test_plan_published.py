"""`smalti plan data` against the mixtures that were published: MPT-7B, MPT-30B, LLaMA.

Each row is held to the digits that it was printed with: half of the last digit either way.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from example_config import VALUES

from smalti.cli.main import run
from smalti.config.load import load
from smalti.config.run import RunConfig


class Printed(NamedTuple):
    """A row: tokens in the source and taken in billions, weight in percent; None where nothing was printed."""

    source: str
    holds: float
    weight: float
    takes: float | None
    epochs: float


# MosaicML, "Introducing MPT-7B" (blog, May 2023), the table of the pretraining mix; 1T tokens in sequences of 2,048.
MPT_7B = (
    Printed("mc4", 2417.99, 33, 330, 0.14),
    Printed("c4-semdedup", 100.42, 29.9, 299, 2.98),
    Printed("redpajama-commoncrawl", 878.45, 10, 100, 0.11),
    Printed("stack-selected", 463.78, 10, 100, 0.22),
    Printed("redpajama-wikipedia", 4.87, 4, 40, 8.21),
    Printed("stack-markdown", 107.07, 3.5, 35, 0.33),
    Printed("s2orc", 48.95, 3.3, 33, 0.68),
    Printed("redpajama-books", 26.02, 3, 30, 1.15),
    Printed("redpajama-arxiv", 28.10, 1.9, 19, 0.68),
    Printed("redpajama-stackexchange", 20.54, 1.4, 14, 0.68),
)

# The same authors' table for MPT-30B (blog, June 2023; slides of 2023 without the first weight): 1T tokens at 2,048.
# The first weight is that of its 335B tokens.
MPT_30B = (
    Printed("mc4", 2417.99, 33.5, 335, 0.14),
    Printed("c4-semdedup", 100.42, 29.9, 299, 2.98),
    Printed("redpajama-commoncrawl", 878.45, 8.5, 85, 0.10),
    Printed("stack-selected", 463.78, 10, 100, 0.22),
    Printed("redpajama-wikipedia", 4.87, 4, 40, 8.21),
    Printed("stack-markdown", 107.07, 4.5, 45, 0.42),
    Printed("s2orc", 48.95, 3.3, 33, 0.67),
    Printed("redpajama-books", 26.02, 3, 30, 1.15),
    Printed("redpajama-arxiv", 28.10, 1.9, 19, 0.68),
    Printed("redpajama-stackexchange", 20.54, 1.4, 14, 0.68),
)

# Touvron et al. 2023, "LLaMA" (arXiv 2302.13971), table 1: weights and epochs "when training on 1.4T tokens", in
# sequences of 2,048 and steps of 4M tokens. It prints sizes on disk and no token counts: these are the counts that
# its weights and epochs imply, to three digits.
LLAMA = (
    Printed("commoncrawl", 853, 67.0, None, 1.10),
    Printed("c4", 198, 15.0, None, 1.06),
    Printed("github", 98.4, 4.5, None, 0.64),
    Printed("wikipedia", 25.7, 4.5, None, 2.45),
    Printed("books", 28.3, 4.5, None, 2.23),
    Printed("arxiv", 33.0, 2.5, None, 1.06),
    Printed("stackexchange", 27.2, 2.0, None, 1.03),
)
LLAMA_DISK_GB = (3300, 783, 328, 83, 85, 92, 78)

TABLES = {"mpt-7b": (MPT_7B, "1e12tok"), "mpt-30b": (MPT_30B, "1e12tok"), "llama": (LLAMA, "14e11tok")}

CONTRADICTS_ITSELF = {("mpt-7b", "s2orc")}
"""The table of MPT-7B takes 33B of 48.95B tokens, 0.674 epochs, and prints 0.68; that of MPT-30B prints 0.67."""


def planned(folder: Path, capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> tuple[int, dict]:
    """The plan of a published mixture, from its token counts and weights."""
    rows, duration = TABLES[name]
    values = json.loads(json.dumps(VALUES)) | {"name": name}
    values["model"] |= {"vocab_size": 50432 if name != "llama" else 32000, "max_position_embeddings": 2048}
    values["data"] = {
        "sources": {row.source: f"s3://bucket/{row.source}" for row in rows},
        "seq_len": 2048,
        "stages": [{"weights": {row.source: row.weight for row in rows}}],
    }
    values["train"] |= {"duration": duration, "global_batch_tokens": 2**22}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (folder / "tokens.yaml").write_text(yaml.safe_dump({row.source: row.holds * 1e9 for row in rows}))
    code = run(["plan", "data", str(folder / f"{name}.yaml"), "--tokens", str(folder / "tokens.yaml"), *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_published_table(name, tmp_path, capsys):
    code, plan = planned(tmp_path, capsys, name, "--json")
    assert code == 0
    found = {source["name"]: source for source in plan["sources"]}
    assert len(found) == len(TABLES[name][0])
    for row in TABLES[name][0]:
        ours = found[row.source]
        assert ours["share_frac"] * 100 == pytest.approx(row.weight, abs=0.05), row
        if row.takes is not None:
            assert ours["tokens"] / 1e9 == pytest.approx(row.takes, abs=0.5), row
        error = abs(ours["epochs"] - row.epochs)
        if (name, row.source) in CONTRADICTS_ITSELF:
            assert row.takes / row.holds == pytest.approx(ours["epochs"], abs=1e-3)
            assert 0.005 < error < 0.015, row
        else:
            assert error <= 0.005, (row, ours["epochs"])


def test_wikipedia_of_mpt_is_warned_of(tmp_path, capsys):
    _, plan = planned(tmp_path, capsys, "mpt-7b", "--json")
    wikipedia = next(source for source in plan["sources"] if source["name"] == "redpajama-wikipedia")
    # 8.21 epochs: U = 4.87B, R_D = 7.21, so D' = 4.87 (1 + 15.39 (1 - e^(-7.21 / 15.39))) = 32.9B of 40B
    assert wikipedia["effective_tokens"] / 1e9 == pytest.approx(32.9, abs=0.1)
    assert wikipedia["worth_frac"] == pytest.approx(0.82, abs=0.01)
    assert run(["plan", "data", str(tmp_path / "mpt-7b.yaml"), "--tokens", str(tmp_path / "tokens.yaml")]) == 0
    out = capsys.readouterr().out
    assert "warning: source 'redpajama-wikipedia' is repeated for 8.21 epochs (passes 4 in stage 0)" in out
    assert out.count("warning") == 1


def test_counts_implied_by_llama_fit_its_sizes_on_disk_and_not_its_text():
    per_token = [size / row.holds for size, row in zip(LLAMA_DISK_GB, LLAMA, strict=True)]
    assert all(2.7 < n_bytes < 4.0 for n_bytes in per_token), "bytes a token, as a tokenizer of 32,000 makes them"
    # the text says "roughly 1.4T tokens after tokenization" of the whole data set; the table's counts add up to less
    assert sum(row.holds for row in LLAMA) == pytest.approx(1263, abs=2)


def test_twice_the_tokens_of_mpt_are_refused(tmp_path, capsys):
    code, plan = planned(tmp_path, capsys, "mpt-7b", "train.duration=2e12tok", "--json")
    assert code == 3
    assert max(source["epochs"] for source in plan["sources"]) == pytest.approx(16.43, abs=0.01)
    code, _ = planned(tmp_path, capsys, "mpt-7b", "train.duration=2e12tok", "--json", "--allow-repeats")
    assert code == 0


def test_recipe_without_token_files_says_how_to_give_counts(tmp_path, capsys):
    planned(tmp_path, capsys, "llama", "--json")
    recipe = tmp_path / "llama.yaml"
    given = [f"--tokens={row.source}=1e9" for row in LLAMA[1:]]
    for arguments, message in (
        ([*given, f"data.sources.commoncrawl={tmp_path}/none"], "--tokens commoncrawl=1e9"),
        (["--tokens", "wikipdia=1e9"], "--tokens wikipedia=1e9"),
        (["--tokens", "wikipedia=many"], "wikipedia=many is not a number"),
        (["--tokens", "wikipedia=-1"], "is not a positive number"),
        (["--tokens", "wikipedia=1e30"], "out of range"),
        ([*given, "--tokens", "commoncrawl=1e9", "--usd-per-gib-month", "inf"], "less than or equal to"),
        (["--tokens", "none.yaml"], "SOURCE=N, or a .yaml file"),
        ([*given, "--tokens", "commoncrawl=2000"], "less than one sequence"),
    ):
        assert run(["plan", "data", str(recipe), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert load(RunConfig, str(recipe)).config.data.seq_len == 2048
