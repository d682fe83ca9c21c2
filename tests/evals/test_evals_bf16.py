"""bfloat16 for held-out text: only a copy, only where a sample gives the same figure, only where it pays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import ByteTokenizer, dbrx_config, llama_config, tiny_model, write_byte_tokens
from torch import nn

from smalti.config.eval import EvalConfig
from smalti.evals import bf16
from smalti.evals.likelihood import Window
from smalti.evals.tasks import heldout
from smalti.serve.engine.engine import Engine


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "_SAMPLE_TOKENS", 512)


def _windows(n: int) -> list[Window]:
    generator = np.random.default_rng(0)
    return [Window(generator.integers(0, 256, size=33), 1) for _ in range(n)]


def _copy(model: nn.Module, windows: Sequence[Window]) -> nn.Module | None:
    return bf16.copy_that_agrees(model, windows, bytes_per_token=1.0, batch_tokens=512)


@pytest.mark.slow
def test_a_text_is_scored_in_bf16_to_the_same_figure(
    small_sample: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        bf16, "_AGREE_BITS", 0.01
    )  # weights that know nothing leave much of their rounding in so short a text
    folder = write_byte_tokens(tmp_path / "t", ["a text of some words, again and again " * 5] * 30)
    for config in (llama_config(), dbrx_config()):
        engine = Engine(tiny_model(config), ByteTokenizer())
        scores = [heldout.run("s", folder, engine, EvalConfig(), 32, try_bf16=tried).score for tried in (False, True)]
        assert [score["compute_dtype"] for score in scores] == ["fp32", "bf16"]
        assert scores[1]["value"] == pytest.approx(scores[0]["value"], abs=0.01)
        assert next(engine.model.parameters()).dtype == torch.float32


def test_a_model_that_bf16_changes_stays_in_fp32(small_sample: None) -> None:
    model = tiny_model(llama_config())
    windows = _windows(100)
    with torch.no_grad():  # logits in the hundreds, whose rounding is whole nats
        model.lm_head.weight.mul_(1000)
    assert _copy(model, windows) is None


def test_neither_a_short_text_nor_another_dtype_is_tried(small_sample: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "score", lambda *given, **more: pytest.fail("was scored"))
    assert _copy(tiny_model(llama_config()), _windows(63)) is None
    assert _copy(tiny_model(llama_config()).to(torch.bfloat16), _windows(100)) is None


@pytest.mark.parametrize(
    ("features", "native"),
    [([], False), (["avx2", "avx512f"], False), (["avx512f", "avx512_bf16"], True), (["bf16"], True)],
)
def test_a_cpu_is_known_by_its_instructions(features: list[str], native: bool) -> None:
    assert bf16.is_native(tiny_model(llama_config()), features) is native
