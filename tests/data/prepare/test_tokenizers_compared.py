"""Tokens, costs and exactness of tokenizers are those counted by hand; numbers and indentation by known rules."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from smalti.base.errors import DataError, UserError
from smalti.cli.main import run
from smalti.data.prepare.tokenizers.compare import compare_tokenizers, labels, ratio
from smalti.data.prepare.tokenizers.probes import digit_rule
from smalti.data.tokenizer.encode import Tokenizer as Loaded
from smalti.data.tokenizer.train import train_bpe


def save(path: Path, inner: Tokenizer) -> str:
    Loaded(inner, "<|endoftext|>").save(path)
    return str(path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> str:
    """256 bytes and a merge or two: a token is a byte, but for "the"."""
    return save(tmp_path_factory.mktemp("tokenizers") / "bytes", train_bpe(["the the the the"], 260))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words of a list, in lower case, one token each; others are <unk>."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "the", "cat", "1", "2", "<|endoftext|>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return save(tmp_path_factory.mktemp("tokenizers") / "words", inner)


def test_counts_are_those_made_by_hand(byte_level: str, words: str, tmp_path: Path) -> None:
    rows = [{"text": "cat dog"}, {"text": "cat cat cat"}]
    (tmp_path / "en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ja.txt").write_text("吾輩は猫である。\n", encoding="utf-8")
    values = compare_tokenizers([byte_level, f"w={words}"], [str(tmp_path / "en.jsonl"), f"jp={tmp_path / 'ja.txt'}"])
    en, jp, both = values["groups"]["en"], values["groups"]["jp"], values["groups"]["all"]
    assert (en["documents"], en["bytes"], en["words"], en["unit"]) == (2, 18, 5, "word")
    assert en["scores"]["bytes"] | {"first_difference": None} == {
        "tokens": 18, "bytes_per_token": 1.0, "bytes_per_token_interval": None, "tokens_per_unit": 18 / 5,
        "relative_cost": 1.0, "relative_cost_interval": None, "inexact_documents": 0, "first_difference": None,
    }  # fmt: skip
    assert en["scores"]["w"]["tokens"] == 5
    assert en["scores"]["w"]["relative_cost"] == 5 / 18
    assert en["scores"]["w"]["inexact_documents"] == 2
    assert en["scores"]["w"]["first_difference"] == {"text": "cat dog", "decoded": "cat<unk>"}
    assert (jp["unit"], jp["scores"]["bytes"]["tokens_per_unit"]) == ("character", 25 / 8)
    assert both["scores"]["bytes"]["tokens"] == 18 + 25


def test_rules_of_numbers_and_indentation_are_recognised(byte_level: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the")
    values = compare_tokenizers([byte_level, words], [str(tmp_path)])["tokenizers"]
    plain, lower = values["bytes"], values["words"]
    assert (plain["digits"], plain["tokens_per_digit"]) == ("each digit", 1.0)
    assert plain["pieces"]["2026"] == ["2", "0", "2", "6"]
    assert plain["indent_tokens"] == {2: 2, 4: 4, 8: 8, 16: 16}
    assert (plain["longest_blank_run"], plain["changed"]) == (1, [])
    assert {"two blanks", "capitals", "a tab"} <= set(lower["changed"])


def groups_of_three(number: str) -> list[int]:
    inner = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*$)"), "isolated")
    return [end - begin for begin, end in inner.encode(number).offsets]


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ([[1], [1, 1]], "each digit"),
        ([[3], [3, 1], [3, 3, 2]], "groups of 3 from the left"),
        ([groups_of_three(number) for number in ("123", "1234", "12345678")], "groups of 3 from the right"),
        ([[3], [1, 2], [2, 1]], "learned pieces of up to 3"),
    ],
)
def test_a_rule_of_numbers(sizes: Sequence[Sequence[int]], rule: str) -> None:
    assert digit_rule(sizes) == rule


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        below = generator.gamma(2.0, 100.0, 60)
        _, interval = ratio(below * 1.2 + generator.normal(0, 20, 60), below)
        assert interval is not None
        covered += interval[0] < 1.2 < interval[1]
    assert 0.91 < covered / 400 < 0.98


def test_labels_are_as_short_as_they_can_be() -> None:
    assert labels(["m/llama/tokenizer.json", "m/qwen/"]) == ["llama", "qwen"]
    assert labels(["a/tokens/tokenizer", "b/tokens"]) == ["a/tokens", "b/tokens"]


def test_a_sample_is_drawn_of_a_large_group(byte_level: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "the cat"}) + "\n" for _ in range(1000)))
    (group,) = compare_tokenizers([byte_level], [str(tmp_path)], limit_bytes=4000)["groups"].values()
    assert 120 < group["documents"] < 280


def test_subfolders_and_languages_are_groups(byte_level: str, tmp_path: Path) -> None:
    for name, text in (("a.txt", "The cat and the dog of the farm are in it."), ("b.py", "x = 1\n")):
        (tmp_path / "on" / name[0]).mkdir(parents=True)
        (tmp_path / "on" / name[0] / name).write_text(text)
    assert list(compare_tokenizers([byte_level], [str(tmp_path / "on")])["groups"]) == ["a", "b", "all"]


def test_wrong_input_is_refused(byte_level: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="two groups are named 'a'"):
        compare_tokenizers([byte_level], [str(tmp_path / "a.txt")] * 2)
    with pytest.raises(UserError, match="two tokenizers are named 'x'"):
        compare_tokenizers([f"x={byte_level}"] * 2, [str(tmp_path / "a.txt")])
    with pytest.raises(DataError, match="hold no text"):
        compare_tokenizers([byte_level], [str(tmp_path / "a.txt")])
    with pytest.raises(DataError, match="does not exist"):
        compare_tokenizers([str(tmp_path / "none")], [str(tmp_path / "a.txt")])


def test_the_command_prints_and_plots(
    byte_level: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The cat and the dog of the farm are in it.")
    (tmp_path / "b.py").write_text("x = 1\n")
    command = ["data", "tokenizers", "compare", byte_level, words, "--on", str(tmp_path)]
    assert run([*command, "--by-language", "--plot", str(tmp_path / "plot.svg")]) == 0
    printed = capsys.readouterr().out
    assert "code" in printed
    assert "loses text of 1 of 1 documents" in printed
    assert "en: bytes per token" in (tmp_path / "plot.svg").read_text()
    assert run([*command, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["groups"]) == [tmp_path.name]
