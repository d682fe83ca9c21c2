"""The list of tensors equals the module; formats equal their published bits and the sizes of published files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_params import models

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.params import count
from smalti.cost.weights import Weight, weights
from smalti.plan.serving.formats import (
    KV_FORMATS,
    SCHEMES,
    WEIGHT_FORMATS,
    kv_bytes_per_token,
    kv_format,
    tensor_bytes,
    weight_format,
)
from smalti.plan.serving.memory import Load, Served


def preset(name: str, *overrides: str) -> ModelConfig:
    return from_dict(ModelConfig, {"preset": name}, name, overrides).config


def file_bytes(model: ModelConfig, form: str) -> int:
    return sum(tensor_bytes(model, weight, form) for weight in weights(model))


@pytest.mark.proof
@given(models())
def test_tensors_are_those_of_the_module(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    with torch.device("meta"):
        module = Decoder(config)
    found: dict[str, tuple[int, ...]] = {}
    for weight in weights(config):
        block = "" if weight.layer is None else f"blocks.{weight.layer}."
        name, _, bias = weight.name.partition(".")
        if weight.layer is not None and weight.kind in ("mlp", "expert", "router", "bias", "attention", "norm"):
            inner = "attention." if name[0] in "qkvo" else "" if name.endswith("norm") else "mlp."
            if weight.kind == "mlp" and config.has_experts(weight.layer):
                inner += "shared_experts."
            if weight.kind == "expert":
                inner += "experts."
            block += inner
        one_row = weight.kind in ("norm", "bias")
        shape = (weight.columns,) if one_row else (weight.rows, weight.columns)
        if weight.kind == "expert":  # the module keeps each expert's down projection turned
            assert config.moe is not None
            assert weight.count == config.moe.num_experts
            shape = (weight.count, *(reversed(shape) if name == "down_proj" else shape))
        found[f"{block}{name}{'' if weight.kind == 'expert' else '.' + (bias or 'weight')}"] = shape
    assert found == {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@given(models())
def test_kinds_add_up_to_the_count(config: ModelConfig) -> None:
    params, sums = count(config), dict[str, int]()
    for weight in weights(config):
        sums[weight.kind] = sums.get(weight.kind, 0) + weight.params
    assert sum(sums.values()) == params.total
    assert sums.get("mlp", 0) + sums.get("expert", 0) == params.mlp
    for kind in ("embedding", "head", "attention", "router", "norm", "bias"):
        assert sums.get(kind, 0) == getattr(params, kind)


# llama.cpp, tools/quantize/README.md: bits/weight of Llama-3.1-8B (the shape of Llama-3-8B), to four digits.
LLAMA_3_8B = {
    "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_l": 4.2979, "q4_k_s": 4.6672, "q4_k_m": 4.8944, "q5_k_s": 5.5704,
    "q5_k_m": 5.7036, "q6_k": 6.5633, "q8_0": 8.5008,
}  # fmt: skip
# The same of Llama 2 7B, in an older version of that page; its q2_k was another mix.
LLAMA_2_7B = {
    "q3_k_s": 3.50, "q3_k_m": 3.91, "q3_k_l": 4.27, "q4_k_s": 4.58, "q4_k_m": 4.84, "q5_k_s": 5.52, "q5_k_m": 5.68,
    "q6_k": 6.56,
}  # fmt: skip
# GB of files on the Hugging Face Hub: mradermacher/dbrx-instruct-i1-GGUF and dbrx-instruct-GGUF, parts added up, each
# part printed to 0.1.
DBRX = {"q3_k_m": 63.1, "q4_k_s": 74.9, "q4_k_m": 79.9, "q6_k": 107.9}


@pytest.mark.parametrize(("form", "bits"), LLAMA_3_8B.items())
def test_gguf_of_llama_3_8b(form: str, bits: float) -> None:
    model = preset("llama-3-8b")
    assert 8 * file_bytes(model, form) / count(model).total == pytest.approx(bits, abs=5e-5)


@pytest.mark.parametrize(("form", "bits"), LLAMA_2_7B.items())
def test_gguf_of_llama_2_7b(form: str, bits: float) -> None:
    model = preset("llama-2-7b")
    assert 8 * file_bytes(model, form) / count(model).total == pytest.approx(bits, abs=5e-3)


@pytest.mark.parametrize(("form", "gb"), DBRX.items())
def test_gguf_of_dbrx(form: str, gb: float) -> None:
    assert file_bytes(preset("dbrx-132b"), form) / 1e9 == pytest.approx(gb, abs=0.15)


def test_rows_that_are_no_whole_blocks_get_a_larger_format() -> None:
    model = preset("llama-3-8b", "hidden_size=96", "num_attention_heads=3", "num_key_value_heads=3",
                   "intermediate_size=24")  # fmt: skip
    sizes = {weight.name: 8 * tensor_bytes(model, weight, "q4_k_m") / weight.params for weight in weights(model)}
    assert sizes["k_proj"] == 5.5, "q5_0: 96 is three blocks of 32"
    assert sizes["lm_head"] == 8.5
    assert sizes["down_proj"] == 16, "24 is no whole block at all"


def test_bits_of_the_schemes() -> None:
    wide = Weight("q_proj", "attention", 0, 4096, 4096)
    bits = {name: 8 * scheme.bytes_of(wide) / wide.params for name, scheme in SCHEMES.items()}
    assert bits["int4"] == 4 + 16 / 128 + 4 / 128
    # Dettmers et al. 2023, section 3: double quantisation takes 8/64 + 32/(64 x 256) = 0.127 bits, instead of 32/64
    assert bits["nf4"] - 4 == pytest.approx(0.127, abs=5e-4)
    assert (bits["mxfp4"], bits["nvfp4"], bits["bf16"], bits["fp32"]) == (4.25, 4.5, 16, 32)
    assert bits["int8"] == 8 + 16 / 4096


def test_what_is_quantised_and_what_is_not() -> None:
    model = preset("dbrx-132b")
    params, found = count(model), Served(model, "int4").bytes_by_kind
    assert found["embedding"] == 2 * params.embedding
    assert found["head"] == 2 * params.head
    assert found["router"] == 2 * params.router
    assert found["norm"] == 2 * params.norm
    assert 8 * found["expert"] / params.mlp == pytest.approx(4.15625, abs=1e-3)


@given(models(), st.sampled_from([name for name in WEIGHT_FORMATS if name != "fp32"]))
def test_no_format_is_larger_than_fp32(config: ModelConfig, form: str) -> None:
    for weight in weights(config):
        size = tensor_bytes(config, weight, form)
        # a row of one input pays its scale alone
        assert 0 < size <= max(4 * weight.params, tensor_bytes(config, weight, "fp32")) + 5 * weight.rows * weight.count


def test_cache_of_a_token() -> None:
    model = preset("llama-3-8b")
    each = {form: kv_bytes_per_token(model, form) * model.num_hidden_layers for form in KV_FORMATS}
    assert each["bf16"] == 131_072, "2 x 32 layers x 8 heads x 128 x 2 bytes"
    assert each["fp8"] == 65_536
    assert each["int8"] == 65_536 * (128 + 4) / 128
    assert each["q8_0"] == 65_536 * 8.5 / 8


def test_unknown_formats_are_refused() -> None:
    assert weight_format(" Q4_K_M ") == "q4_k_m"
    assert Load(16, kv="BF16") == Load(16)
    with pytest.raises(UserError, match="weights = 'q4km'") as raised:
        weight_format("q4km")
    assert "q4_k_m" in str(raised.value.hint)
    with pytest.raises(UserError, match="kv = 'bf61'"):
        kv_format("bf61")
