"""FLOPs as others count them: against counts by hand, published rows, and there and back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.flops import mfu as mfu_of
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count
from smalti.plan.flops_conventions import (
    CONVENTIONS,
    convention,
    convert_mfu,
    flops_per_token,
    hfu,
    tokens_per_s,
    train_flops,
)


def model(preset: str, **changes: Any) -> ModelConfig:
    return from_dict(ModelConfig, {"preset": preset, **changes}).config


def everywhere(config: ModelConfig, seq_len: int) -> dict[str, float]:
    return {name: flops_per_token(config, seq_len, name) for name in CONVENTIONS if name != "megatron-2021"}


def test_llama_3_8b_by_hand() -> None:
    """Width 4096, 32 layers, 32 heads of 128 with 8 for keys, MLP 14336, vocabulary 128256, not tied."""
    attention, mlp = 4096 * 4096 * 2 + 4096 * 1024 * 2, 3 * 4096 * 14336
    blocks, head, norms = 32 * (attention + mlp), 128256 * 4096, (2 * 32 + 1) * 4096
    assert (blocks, head, norms) == (6_979_321_856, 525_336_576, 266_240)
    whole = 12 * 32 * 4096 * 8192
    assert everywhere(model("llama-3-8b"), 8192) == {
        "exact": 6 * (blocks + head) + whole,
        "exact-causal": 6 * (blocks + head) + whole / 2,
        "6n": 6 * (blocks + 2 * head + norms),
        "6n-non-embedding": 6 * (blocks + norms),
        "palm": 6 * (blocks + 2 * head + norms) + whole,
        "llm-foundry": 6 * (blocks + head + norms) + whole,
        "torchtitan": 6 * (blocks + head + norms) + whole,
        "megatron": 6 * (blocks + head) + whole / 2,
    }


def test_gpt_3_by_hand_and_by_the_formula_of_2021() -> None:
    """96 layers of width 12288: 12 L d^2 parameters in matmuls; the tied vocabulary of 50257 is the output head."""
    config = model("gpt-3-175b")
    blocks, head = 12 * 96 * 12288**2, 50257 * 12288
    assert flops_per_token(config, 2048) == 6 * (blocks + head) + 12 * 96 * 12288 * 2048
    assert flops_per_token(config, 2048, "6n") == 6 * count(config).total
    assert flops_per_token(config, 2048, "megatron-2021") == pytest.approx(flops_per_token(config, 2048), rel=1e-12)
    printed = 96 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 50257 / (16 * 96 * 12288))
    again = hfu(1.0, config, 2048, recompute="full") * flops_per_token(config, 2048)
    assert again == pytest.approx(printed, rel=1e-12), "equation 3 of Narayanan et al. 2021, recomputation in it"


def test_gpt_3_over_its_training() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs of training on 300B tokens, 6 for each of 174.6B parameters."""
    assert train_flops(model("gpt-3-175b"), 300e9, 2048, "6n") == pytest.approx(3.14e23, rel=1e-3)


def test_dbrx_counts_active_experts() -> None:
    """40 layers of width 6144, 48 heads of 128 with 8 for keys, 4 of 16 experts of 10752, vocabulary 100352."""
    config = model("dbrx")
    attention, expert, router = 6144 * 128 * (2 * 48 + 2 * 8), 3 * 6144 * 10752, 6144 * 16
    head, norms, whole = 100352 * 6144, (2 * 40 + 1) * 6144, 12 * 40 * 6144 * 4096
    blocks = 40 * (attention + 4 * expert)
    assert flops_per_token(config, 4096) == 6 * (blocks + 40 * router + head) + whole
    assert flops_per_token(config, 4096, "megatron") == 6 * (blocks + head) + whole / 2
    assert flops_per_token(config, 4096, "torchtitan") == 6 * (blocks + 40 * router + head + norms) + whole
    assert flops_per_token(config, 4096, "6n") == pytest.approx(6 * 36.47e9, rel=1e-3)
    assert train_flops(config, 12e12, 4096, "6n") == pytest.approx(2.63e24, rel=2e-3)


FOUNDRY = [
    # model, seq_len, GPUs, peak, tokens/s, MFU, HFU, parameters, recomputes
    ("mpt-7b", 2048, 64, 312e12, 234614, 50.73, 67.64, 6658859008, True),
    ("mpt-7b", 2048, 8, 989.5e12, 85144, 46.44, 46.44, 6658859008, False),
    ("mpt-7b", 8192, 8, 989.5e12, 55481, 37.14, 49.52, 6684024832, True),
    ("mpt-7b", 65536, 8, 989.5e12, 15654, 28.59, 38.13, 6918905856, True),
    ("mpt-30b", 2048, 32, 989.5e12, 73860, 43.92, 58.57, 29975214080, True),
    ("mpt-70b", 2048, 64, 989.5e12, 66523, 42.57, 56.76, 64862437376, True),
    ("mpt-1b", 32768, 8, 989.5e12, 96203, 33.54, 33.54, 1378865152, False),
]


@pytest.mark.parametrize("row", FOUNDRY, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_rows_of_llm_foundry(row: tuple[Any, ...]) -> None:
    """scripts/train/benchmarking/README.md. Its models have learned positions and biases, which our presets have not
    (docs/concepts/model/presets.md): their parameters are put back in."""
    preset, seq_len, gpus, peak, speed, mfu, hfu_printed, params, recomputes = row
    config = model(preset)
    width, layers = config.hidden_size, config.num_hidden_layers
    missing = seq_len * width + layers * 9 * width + (2 * layers + 1) * width
    assert count(config).total + missing == params
    flops = flops_per_token(config, seq_len, "llm-foundry") + 6 * missing
    found = mfu_of(speed, flops, gpus * peak)
    assert 100 * found == pytest.approx(mfu, abs=0.02)
    share = hfu(found, config, seq_len, recompute="full" if recomputes else "none", name="llm-foundry")
    assert 100 * share == pytest.approx(hfu_printed, abs=0.02)


def test_the_row_that_the_talk_quotes_without_attention() -> None:
    """50.73 % counts attention; by 6ND alone the same run is at 46.9 %."""
    config = model("mpt-7b")
    assert convert_mfu(0.5073, config, 2048, source="llm-foundry", target="6n") == pytest.approx(0.469, abs=1e-3)
    assert mfu_of(234614, 6 * 6658859008, 64 * 312e12) == pytest.approx(0.469, abs=1e-3)


def test_palm_540b_as_its_paper_prints_it() -> None:
    """238.3K tokens/s on 6144 TPU v4 of 275 TFLOP/s: 46.2 %, and 45.7 % without attention (appendix B)."""
    config = ModelConfig(
        family="decoder", vocab_size=256_000, hidden_size=18432, intermediate_size=4 * 18432, num_hidden_layers=118,
        num_attention_heads=48, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True,
    )  # fmt: skip
    assert count(config).total == pytest.approx(540.35e9, rel=1e-4)
    peak = 6144 * 275e12
    assert mfu_of(238.3e3, flops_per_token(config, 2048, "palm"), peak) == pytest.approx(0.462, abs=5e-4)
    assert mfu_of(238.3e3, flops_per_token(config, 2048, "6n"), peak) == pytest.approx(0.457, abs=5e-4)


def test_what_the_run_reports_is_exact() -> None:
    for preset in ("llama-3-8b", "dbrx", "mpt-7b", "qwen3-30b-a3b"):
        assert flops_per_token(model(preset), 4096) == train_flops_per_token(model(preset), 4096)


def test_a_window_bounds_attention_where_the_convention_says_so() -> None:
    config = model("llama-3-8b", family="decoder", sliding_window=1024)
    plain = model("llama-3-8b")
    less = 12 * 32 * 4096 * (8192 - 1024)
    for name in ("exact", "torchtitan"):
        assert flops_per_token(plain, 8192, name) - flops_per_token(config, 8192, name) == less
    for name in ("palm", "llm-foundry", "megatron"):
        assert flops_per_token(config, 8192, name) == flops_per_token(plain, 8192, name)


def test_recomputation_by_hand() -> None:
    config = model("llama-3-8b")
    flops, scores = flops_per_token(config, 8192), 4 * 32 * 4096 * 8192
    assert hfu(0.4, config, 8192, recompute="none") == 0.4
    assert hfu(0.4, config, 8192, recompute="attention") == pytest.approx(0.4 * (flops + scores) / flops)
    blocks = 2 * 6_979_321_856 + scores
    assert hfu(0.4, config, 8192, recompute="full") == pytest.approx(0.4 * (flops + blocks) / flops)
    half = flops_per_token(config, 8192, "exact-causal")
    found = hfu(0.4, config, 8192, recompute="attention", name="exact-causal")
    assert found == pytest.approx(0.4 * (half + scores / 2) / half)
    assert hfu(0.3, config, 8192, recompute="full", name="llm-foundry") == pytest.approx(0.4)


PRESETS = st.sampled_from(("mpt-125m", "llama-3-1b", "llama-3-70b", "dbrx", "mixtral-8x7b", "olmoe-1b-7b", "moe-1b"))
NAMES = st.sampled_from([name for name in CONVENTIONS if name != "megatron-2021"])


@given(PRESETS, st.integers(1, 1_000_000), st.floats(1e-3, 1), NAMES, NAMES)
def test_there_and_back(preset: str, seq_len: int, mfu: float, source: str, target: str) -> None:
    config = model(preset)
    there = convert_mfu(mfu, config, seq_len, source=source, target=target)
    assert there * flops_per_token(config, seq_len, source) == pytest.approx(
        mfu * flops_per_token(config, seq_len, target), rel=1e-12
    )
    if there <= 1:
        assert convert_mfu(there, config, seq_len, source=target, target=source) == pytest.approx(mfu, rel=1e-12)
    speeds = [tokens_per_s(mfu, config, seq_len, name=source, peak_flops_per_s=1e15)]
    if there <= 1:
        speeds.append(tokens_per_s(there, config, seq_len, name=target, peak_flops_per_s=1e15))
    assert max(speeds) == pytest.approx(min(speeds), rel=1e-12), "the same run, so the same speed"


@given(PRESETS, st.integers(1, 1_000_000))
def test_the_order_of_the_conventions(preset: str, seq_len: int) -> None:
    found = everywhere(model(preset), seq_len)
    assert found["6n-non-embedding"] < found["6n"] < found["palm"]
    assert found["megatron"] <= found["exact-causal"] < found["exact"] < found["torchtitan"] <= found["palm"]
    assert found["torchtitan"] == pytest.approx(found["llm-foundry"], rel=0.2)


def test_names() -> None:
    assert convention("LLM_Foundry").name == "llm-foundry"
    assert convention("6N+12LHQS").name == "exact"
    assert convention(" exact-causal ").causal
    assert all(one.name == name and one.source and one.note for name, one in CONVENTIONS.items())
    with pytest.raises(UserError, match="'llm-foundary' is not a known convention") as caught:
        convention("llm-foundary")
    assert "did you mean 'llm-foundry'?" in str(caught.value)


@pytest.mark.parametrize("mfu", [0.0, -0.1, 1.01, 50.7, float("nan"), float("inf")])
def test_an_mfu_that_cannot_be(mfu: float) -> None:
    with pytest.raises(UserError, match="is out of range"):
        convert_mfu(mfu, model("mpt-125m"), 2048, source="exact", target="palm")


def test_lengths_and_models_that_cannot_be() -> None:
    for seq_len in (0, -1, 10**30):
        with pytest.raises(UserError, match="is out of range"):
            flops_per_token(model("mpt-125m"), seq_len)
    for tokens in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="are out of range"):
            train_flops(model("mpt-125m"), tokens, 2048)
    with pytest.raises(UserError, match="not defined for experts, a gated MLP"):
        flops_per_token(model("dbrx"), 2048, "megatron-2021")
