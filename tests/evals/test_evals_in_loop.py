"""Held-out loss in the loop: exact on a uniform model, equal to a direct computation, the same over ranks."""

import math
import os
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from s3_server import object_server
from tiny_models import UniformModel, dbrx_config, llama_config, tiny_model, write_byte_tokens

from smalti.base.errors import DataError
from smalti.config.run import RunConfig
from smalti.data import pack
from smalti.data.stream.inputs import heldout_key
from smalti.data.tokens.manifest import FILE_NAME
from smalti.data.tokens.reader import TokenSource
from smalti.evals.in_loop import heldout_hook

TEXTS = ["def f():\n    return 1\n", "é€😀 " * 20, "x" * 40, "a longer one " * 30]


def _config(
    folder: str, *, eval_tokens: int = 10_000, mask_documents: bool = True, cache: str | None = None
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "r",
            "model": llama_config().model_dump(),
            "data": {
                "sources": {"code": folder},
                "heldout": {"code": folder},
                "seq_len": 16,
                "stages": [{"weights": {"code": 1}}],
                "mask_documents": mask_documents,
                "fetch": {"cache": cache, "requests_per_s": 10_000},
            },
            "train": {
                "duration": "1step",
                "global_batch_tokens": 32,
                "optimizer": {"lr": 1e-3},
                "eval_tokens": eval_tokens,
            },
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_byte_tokens(tmp_path / "tokens", TEXTS)


def test_uniform_model_by_hand(folder: str) -> None:
    hook = heldout_hook(_config(folder))
    assert hook is not None
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert hook(UniformModel(), 3) == {
        "metrics/eval/code/LanguageCrossEntropy": pytest.approx(math.log(257), rel=1e-6),
        "metrics/eval/code/LanguagePerplexity": pytest.approx(257, rel=1e-4),
        "metrics/eval/code/bits_per_byte": pytest.approx(math.log2(257) * (n_bytes + 4) / n_bytes, rel=1e-6),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("eval_tokens", [1, 33, 10_000])
def test_equals_a_direct_computation(folder: str, mask_documents: bool, eval_tokens: int) -> None:
    config = _config(folder, eval_tokens=eval_tokens, mask_documents=mask_documents)
    model = tiny_model(dbrx_config()).train()
    hook = heldout_hook(config)
    assert hook is not None
    found = hook(model, 0)["metrics/eval/code/LanguageCrossEntropy"]
    source = TokenSource(folder)
    all_rows = pack.n_sequences(source.n_tokens, 16)
    rows = min(all_rows, math.ceil(eval_tokens / 16))
    total = 0.0
    for row in range(rows):
        cut = source.read(row * all_rows // rows * 16, 17)[None]
        inputs, targets, positions, documents = map(
            torch.from_numpy, pack.split(cut, 256, mask_documents=mask_documents)
        )
        with torch.no_grad():
            logits = model(inputs, positions.long(), documents.long() if mask_documents else None).value
        total += float(torch.nn.functional.cross_entropy(logits[0].double(), targets[0], reduction="sum"))
    assert found == pytest.approx(total / (16 * rows), rel=1e-5)
    assert model.training


def test_windows_are_spread_over_all_of_the_text(tmp_path: Path) -> None:
    """The head is easy and the tail is hard: half of the tokens must give about what all of them give."""
    seq_len, model = 16, tiny_model(llama_config())
    folder = write_byte_tokens(tmp_path / "t", ["a" * 40 * seq_len, bytes(range(32, 127)).decode() * 7])
    whole, half = (heldout_hook(_config(folder, eval_tokens=n)) for n in (10_000, 40 * seq_len))
    assert whole is not None
    assert half is not None
    name = "metrics/eval/code/bits_per_byte"
    assert half(model, 0)[name] == pytest.approx(whole(model, 0)[name], rel=0.05)


def _measured(rank: int, config: RunConfig) -> dict[str, float]:
    hook = heldout_hook(config)
    assert hook is not None
    return hook(tiny_model(llama_config()), 0)


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same(folder: str) -> None:
    config = _config(folder, eval_tokens=16 * 5)  # five windows: three ranks get two, two and one
    hook = heldout_hook(config)
    assert hook is not None
    alone = hook(tiny_model(llama_config()), 0)
    for metrics in run_ranks(3, _measured, config):
        assert metrics == pytest.approx(alone, rel=1e-6)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than one sequence"):
        heldout_hook(_config(write_byte_tokens(tmp_path / "t", ["short"])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("known", [True, False])
def test_the_cache_of_the_node_keeps_heldout_blocks(folder: str, tmp_path: Path, known: bool) -> None:
    objects = {f"set/{path.name}": path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    indexes = {heldout_key("code"): objects[f"set/{FILE_NAME}"]} if known else None
    with object_server(objects) as server:
        config = _config(f"{server.url}/set", cache=os.fspath(tmp_path / "cache"))
        hooks, asked = [], []
        for _ in range(2):
            hooks.append(heldout_hook(config, indexes))
            asked.append(server.gets(".tok"))
        assert server.gets(FILE_NAME) == (0 if known else 2)
    assert asked[0] == asked[1] > 0
    model, alone = UniformModel(), heldout_hook(_config(folder))
    assert alone is not None
    assert all(hook is not None and hook(model, 0) == alone(model, 0) for hook in hooks)


def test_no_heldout_no_hook(folder: str) -> None:
    config = _config(folder)
    assert heldout_hook(config.model_copy(update={"data": config.data.model_copy(update={"heldout": {}})})) is None
