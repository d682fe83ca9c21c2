"""GGUF's mixes of formats (``q4_k_m`` ...): which block format each tensor of a model gets, and its bytes.

Bytes are those that ``llama-quantize`` of llama.cpp writes without an importance matrix: norms, biases and routers in
fp32, rows that are not a whole number of blocks in the next larger format. Source: ``ggml-common.h`` (blocks) and
``llama-quant.cpp`` (mixes) of llama.cpp, August 2026; tests compare it with published sizes. Not counted: the file's
header with the tokenizer (some MB).
"""

from smalti.config.model import ModelConfig
from smalti.cost.weights import Weight

_BLOCKS: dict[str, tuple[int, int]] = {
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "q4_0": (32, 18), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "f16": (1, 2), "f32": (1, 4),
}  # fmt: skip
"""Block format -> weights in a block, and its bytes with scales and minima."""

_LARGER = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Format -> the format used for rows that are not a multiple of 256."""

MIXES: dict[str, str] = {
    "q2_k": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_0": "q4_0", "q4_k_s": "q4_k",
    "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k", "q6_k": "q6_k", "q8_0": "q8_0",
}  # fmt: skip
"""Mix -> the format of most of its tensors."""

_FUSED = ("dbrx", "mpt")
"""Families whose GGUF files hold query, key and value as one tensor."""


def gguf_bytes(model: ModelConfig, weight: Weight, mix: str) -> int:
    """Return the bytes of one tensor in a mix."""
    form = _fitting(weight, _chosen(model, weight, mix))
    block, size_bytes = _BLOCKS[form]
    return weight.params // block * size_bytes


def _fitting(weight: Weight, form: str) -> str:
    if weight.columns % _BLOCKS[form][0] == 0:
        return form
    larger = _LARGER.get(form, "f16")
    return larger if weight.columns % _BLOCKS[larger][0] == 0 else "f16"


def _chosen(model: ModelConfig, weight: Weight, mix: str) -> str:
    usual = MIXES[mix]
    if weight.kind in ("norm", "bias", "router"):
        return "f32"
    if weight.kind == "head" or (weight.kind == "embedding" and model.tie_word_embeddings):
        return "q8_0" if usual == "q8_0" or weight.columns % _BLOCKS[usual][0] else "q6_k"
    if weight.layer is None:
        return usual
    if weight.name == "v_proj" or (model.family in _FUSED and weight.name in ("q_proj", "k_proj")):
        return _of_values(model, weight.layer, mix)
    if weight.name == "k_proj" and _eight_experts(model):
        return "q8_0"
    if weight.name == "down_proj":
        return _of_down(model, weight.layer, mix)
    if weight.name == "o_proj":
        return _of_output(model, mix)
    return usual


def _of_values(model: ModelConfig, layer: int, mix: str) -> str:
    """Return the format of the value projection, which gets more bits because its few weights matter much."""
    if _eight_experts(model):
        return "q8_0"
    grouped = model.num_attention_heads // model.kv_heads >= 4
    form = MIXES[mix]
    if mix == "q2_k":
        form = "q4_k" if grouped else "q3_k"
    elif mix == "q3_k_m":
        form = "q5_k" if layer < 2 else "q4_k"
    elif mix == "q3_k_l" or (mix == "q4_k_s" and layer < 4):
        form = "q5_k"
    elif mix in ("q4_k_m", "q5_k_m") and _has_more_bits(model, layer):
        form = "q6_k"
    is_70b = model.family == "llama" and model.num_hidden_layers == 80 and model.kv_heads < model.num_attention_heads
    return "q5_k" if is_70b and form in ("q3_k", "q4_k") else form


def _of_down(model: ModelConfig, layer: int, mix: str) -> str:
    layers = model.num_hidden_layers
    if mix == "q2_k":
        return "q3_k"
    if mix == "q3_k_m":
        return "q5_k" if layer < layers // 16 else "q4_k"
    if mix == "q3_k_l" or (mix == "q4_k_s" and layer < layers // 8):
        return "q5_k"
    return "q6_k" if mix in ("q4_k_m", "q5_k_m") and _has_more_bits(model, layer) else MIXES[mix]


def _of_output(model: ModelConfig, mix: str) -> str:
    if _eight_experts(model):
        return "q5_k" if mix in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else MIXES[mix]
    return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mix, MIXES[mix])


def _has_more_bits(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third between."""
    eighth = model.num_hidden_layers // 8
    return layer < eighth or layer >= 7 * model.num_hidden_layers // 8 or (layer - eighth) % 3 == 2


def _eight_experts(model: ModelConfig) -> bool:
    return model.moe is not None and model.moe.num_experts == 8
