"""Presets: each is built whole on the meta device and has the number of parameters that was published for it."""

import pytest

from smalti.config.find import preset_names
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.params import count


def preset(name: str, **changes: object) -> ModelConfig:
    return from_dict(ModelConfig, {"preset": name, **changes}).config


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", preset_names())
def test_built_whole_on_the_meta_device(name: str) -> None:
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    config = preset(name)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count(config).total


# Bytes of all weights as "total_size" in the model.safetensors.index.json of the models' Hugging Face folders, over 2
# (bf16); for llama-3-1b, llama-2-7b and olmoe-1b-7b what the Hub counts in the files. DBRX's is not at hand: its model
# card prints "132B total parameters of which 36B parameters are active on any input".
EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-1b": 1_235_814_400,
    "llama-3-8b": 16_060_522_496 // 2,
    "llama-3-70b": 141_107_412_992 // 2,
    "mixtral-8x7b": 93_405_585_408 // 2,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 61_064_245_248 // 2,
}


@pytest.mark.parametrize("name", EXACT)
def test_total_is_that_of_the_published_weights(name: str) -> None:
    assert count(preset(name)).total == EXACT[name]


# Total and active parameters in billions and the unit of the last printed digit.
PRINTED = [
    ("dbrx-132b", 132, 36, 1),  # DBRX's model card
    ("mixtral-8x7b", 47, 13, 1),  # Jiang et al. 2024, "Mixtral of Experts" (arXiv:2401.04088), section 1
    ("olmoe-1b-7b", 6.9, 1.3, 0.1),  # Muennighoff et al. 2024, "OLMoE" (arXiv:2409.02060), section 2
    ("qwen3-30b-a3b", 30.5, 3.3, 0.1),  # its model card; the second is cut, not rounded, from 3.353
]


@pytest.mark.parametrize(("name", "total", "active", "digit"), PRINTED)
def test_total_and_active_as_printed(name: str, total: float, active: float, digit: float) -> None:
    params = count(preset(name))
    assert params.total / 1e9 == pytest.approx(total, abs=digit / 2)
    assert params.active / 1e9 == pytest.approx(active, abs=digit / 2 + 0.05 * digit)


def test_active_of_dbrx_by_hand() -> None:
    # 40 layers of attention 6144 x (2 x 48 + 2 x 8) x 128, four experts of 3 x 6144 x 10752, router, norms; both ends
    layer = 6144 * (2 * 48 + 2 * 8) * 128 + 4 * 3 * 6144 * 10752 + 6144 * 16 + 2 * 6144
    assert count(preset("dbrx")).active == 40 * layer + 6144 + 2 * 100352 * 6144


# LLM Foundry, scripts/train/benchmarking/README.md, column NumParams of the rows with SeqLen 2048 (commit 8c8dd48f7).
LLM_FOUNDRY = {
    "125m": 125_311_488,
    "350m": 355_985_408,
    "760m": 760_470_528,
    "1b": 1_315_950_592,
    "3b": 2_651_837_440,
    "7b": 6_658_859_008,
    "13b": 12_853_954_560,
    "30b": 29_975_214_080,
    "70b": 64_862_437_376,
}


@pytest.mark.parametrize("size", LLM_FOUNDRY)
def test_llm_foundrys_tables(size: str) -> None:
    """Its benchmarks had learned positions in place of ALiBi and biases everywhere: with these the counts are equal."""
    config = preset(f"mpt-{size}")
    layers, hidden = config.num_hidden_layers, config.hidden_size
    positions = 2048 * hidden
    biases = layers * (3 + 1 + 4 + 1) * hidden  # of query, key and value; of the output; of both matrices of the MLP
    norm_biases = (2 * layers + 1) * hidden
    assert count(config).total + positions + biases + norm_biases == LLM_FOUNDRY[size]


def test_mpt_7b_as_released() -> None:
    """ "6.7B parameters" (model card of mosaicml/mpt-7b), with ALiBi, without biases, and a larger vocabulary."""
    params = count(preset("mpt-7b", vocab_size=50432))
    assert params.total == 50432 * 4096 + 32 * (12 * 4096**2 + 2 * 4096) + 4096
    assert params.total / 1e9 == pytest.approx(6.7, abs=0.06)


# Brown et al. 2020 (arXiv:2005.14165), table D.1: parameters in millions; and the unit of the last digit that is not 0.
GPT_3 = [
    ("125m", 125, 1),
    ("350m", 356, 1),
    ("760m", 760, 1),
    ("1.3b", 1_320, 10),
    ("2.7b", 2_650, 10),
    ("6.7b", 6_660, 10),
    ("13b", 12_850, 10),
    ("175b", 174_600, 100),
]


@pytest.mark.parametrize(("size", "millions", "digit"), GPT_3)
def test_gpt_3s_ladder(size: str, millions: int, digit: int) -> None:
    """What the presets leave out is added: learned positions, and the biases of the norms."""
    config = preset(f"gpt-3-{size}")
    left_out = 2048 * config.hidden_size + (2 * config.num_hidden_layers + 1) * config.hidden_size
    assert (count(config).total + left_out) / 1e6 == pytest.approx(millions, abs=digit / 2)


def test_small_mixtures_are_what_they_say() -> None:
    small = count(preset("dbrx-5b"))
    assert small.total / 1e9 == pytest.approx(5.2, abs=0.05)
    assert small.active / 1e9 == pytest.approx(1.6, abs=0.05)
    assert preset("dbrx") == preset("dbrx-132b")
    big, quarter = preset("dbrx"), preset("dbrx-5b")
    assert quarter.moe is not None
    assert big.moe is not None
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(quarter, field) == getattr(big, field) // 4
    assert (quarter.moe.num_experts, quarter.moe.num_experts_per_tok) == (16, 4)
