"""smalti plan flops: the table by convention, one MFU under all of them, what is refused."""

import json
from functools import partial
from typing import Any

import pytest
from cli_in_process import output_of

from smalti.base.errors import UserError
from smalti.cli.plan import app as plan
from smalti.plan.flops_conventions import CONVENTIONS

call = partial(output_of, plan.app, "flops")


def test_the_talks_row_under_every_convention() -> None:
    text = call("mpt-7b", "--seq-len", "2048", "--mfu", "0.507", "--from", "llm-foundry", "--recompute", "full",
                "--gpu", "a100-40gb", "--gpus", "64")  # fmt: skip
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert "235k tokens/s" in text
    assert text.splitlines()[0].endswith("MFU 50.7% by llm-foundry on 64 x a100-40gb: 235k tokens/s")
    for name in CONVENTIONS:
        assert name in lines
    table = {line.split()[0]: line.split()[1:] for line in text.splitlines()[3:12]}
    assert table["6n"] == ["39.9", "GFLOP", "0.925", "46.9%", "63.3%"]
    assert table["llm-foundry"][-2:] == ["50.7%", "67.6%"]


def test_json_and_a_convention_that_is_not_defined() -> None:
    value: dict[str, Any] = json.loads(call("dbrx", "--seq-len", "4096", "--mfu", "0.3", "--json"))
    rows = {row["name"]: row for row in value["conventions"]}
    assert list(rows) == list(CONVENTIONS)
    assert rows["exact"]["mfu"] == 0.3
    assert rows["megatron-2021"]["flops_per_token"] is None
    assert "experts" in rows["megatron-2021"]["why"]
    assert value["tokens_per_s"] is None
    assert "MFU" not in call("dbrx", "--seq-len", "4096").splitlines()[2]


def test_a_recipe_and_its_changes() -> None:
    more = json.loads(call("demo", "model.num_hidden_layers=8", "--json"))
    less = json.loads(call("demo", "--json"))
    assert more["conventions"][0]["flops_per_token"] > less["conventions"][0]["flops_per_token"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "palm"), "--from palm has no effect without an MFU"),
        (("--gpu", "h100"), "--gpu h100 has no effect without an MFU"),
        (("--gpus", "8"), "--gpus 8 has no effect without --gpu"),
        (("--mfu", "50.7"), "an MFU of 50.7 is out of range"),
        (("--mfu", "nan"), "an MFU of nan is out of range"),
        (("--mfu", "0.4", "--from", "foundry"), "'foundry' is not a known convention"),
        (("--mfu", "0.4", "--gpu", "h100", "--gpus", "0"), "--gpus 0 is out of range"),
        (("--mfu", "0.4", "--gpu", "apple-m4-max-36gb"), "no bf16 peak is known"),
        (("--mfu", "0.4", "--from", "megatron-2021"), "'megatron-2021' is not defined for"),
        (("--seq-len", "0"), "a sequence of 0 tokens is out of range"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call("llama-3-8b", *arguments)
