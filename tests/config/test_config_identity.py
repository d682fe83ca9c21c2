"""Identity: it excludes placement, and a difference has the key and both values."""

import pytest

from smalti.base.errors import UserError
from smalti.config.identity import difference, identity, placement_difference
from smalti.config.load import from_dict
from smalti.config.run import RunConfig

BASE = {
    "name": "t",
    "model": {"preset": "gpt-3-125m"},
    "data": {"sources": {"a": "x"}, "seq_len": 8, "stages": [{"weights": {"a": 1}}]},
    "train": {"duration": "10step", "global_batch_tokens": 64, "optimizer": {"lr": 3e-3}},
}


def config(*overrides: str) -> RunConfig:
    return from_dict(RunConfig, BASE, "t", overrides).config


@pytest.mark.parametrize(
    "override",
    ["train.parallel.ranks=4", "train.microbatch_tokens=16", "folder=elsewhere", "train.checkpoint.every=2step",
     "track.console=false", "data.fetch.prefetch=5s", "data.takedowns=elsewhere.jsonl"],
)  # fmt: skip
def test_placement_is_not_identity(override):
    assert difference(config(), config(override)) == []
    assert identity(config()) == identity(config(override))
    assert len(placement_difference(config(), config(override))) == 1


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.optimizer.lr=0.004", "train.optimizer.lr: 0.003 -> 0.004"),
        ("seed=3", "seed: 17 -> 3"),
        ("data.heldout.h=y", "data.heldout: {} -> {h: y}"),
        ("data.stages.0.weights.a=2", "data.stages.0.weights.a: 1.0 -> 2.0"),
        ("model.tie_word_embeddings=false", "model.tie_word_embeddings: true -> false"),
        ("train.global_batch_tokens=128", "train.global_batch_tokens: 64 -> 128"),
    ],
)
def test_a_difference_is_a_line(override, line):
    assert difference(config(), config(override)) == [line]
    assert identity(config()) != identity(config(override))


def test_the_kernel_of_the_experts_is_placement():
    moe = "model.moe={num_experts: 4, num_experts_per_tok: 2}"
    assert difference(config(moe), config(moe, "model.moe.kernel=loop")) == []
    assert placement_difference(config(moe), config(moe, "model.moe.kernel=loop")) == [
        "model.moe.kernel: grouped -> loop"
    ]


def test_a_section_that_comes_is_shown_whole():
    lines = difference(config(), config("model.moe={num_experts: 4, num_experts_per_tok: 2}"))
    assert len(lines) == 1
    assert lines[0].startswith("model.moe: null -> {num_experts: 4, num_experts_per_tok: 2")


def test_identity_holds_no_placement_and_no_empty_section():
    values = identity(config())
    assert "folder" not in values
    assert "track" not in values
    assert "parallel" not in values["train"]
    assert values["data"]["stages"] == [{"until": "1run", "weights": {"a": 1.0}, "weights_end": None, "seq_len": None}]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("{lst: 3}", "unknown key train.checkpoint.keep.lst = 3"),
        ("{last: 0}", r"train\.checkpoint\.keep\.last = 0 is not allowed"),
        ("{every: 10min}", "keep.every = 10min: '10min' has the unit 'min'"),
        ("{every: 0step}", "keep.every = 0step: '0step' is no length; it must be above 0"),
        ("0", r"allowed: a whole number at least 1, or a section with the keys last, every, blessed, blessed_after"),
    ],
)
def test_a_number_or_a_section_that_is_wrong_is_named_by_its_key(keep: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config(f"train.checkpoint.keep={keep}")
    assert "problems" not in str(caught.value), "it is one problem, whichever of the two was meant"


def test_another_number_or_section_of_checkpoints_to_keep_is_placement() -> None:
    number = config("train.checkpoint.keep=3")
    section = config("train.checkpoint.keep.every=1e6tok")
    assert (number.train.checkpoint.keep_section.last, number.train.checkpoint.keep_section.blessed) == (3, 0)
    assert section.train.checkpoint.keep_section.blessed == 1
    assert not difference(number, section)
    assert placement_difference(number, section)
    assert config("train.checkpoint={keep: 2}", "train.checkpoint.keep.last=4").train.checkpoint.keep_section.last == 4
