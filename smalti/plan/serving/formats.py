"""Bytes of a tensor in the formats of weights and of the KV cache.

Bytes are exact for each scheme, scales and zero points included. The schemes of GPU engines quantise the matrices of
attention and MLPs; embedding, head, router, norms and biases stay in bf16. GGUF quantises almost all (``gguf.py``).
"""

from dataclasses import dataclass

from smalti.base.errors import UserError, nearest
from smalti.config.model import ModelConfig
from smalti.cost.weights import Kind, Weight
from smalti.plan.serving.gguf import MIXES, gguf_bytes

QUANTISED: tuple[Kind, ...] = ("attention", "mlp", "expert")
"""Kinds of weights that the schemes quantise."""


@dataclass(frozen=True)
class Scheme:
    """A weight format: ``bits`` per weight, plus ``scale_bits`` per ``group`` inputs of a row (0: the whole row)."""

    bits: float
    group: int
    scale_bits: float
    source: str
    everything: bool = False
    """True if it applies to all tensors, not only to ``QUANTISED``."""

    def bytes_of(self, weight: Weight) -> int:
        """Return the bytes of one tensor, rounded up."""
        if not self.everything and weight.kind not in QUANTISED:
            return 2 * weight.params
        groups = -(-weight.columns // self.group) if self.group else 1
        rows = weight.rows * weight.count
        return -(-int(weight.params * self.bits + rows * groups * self.scale_bits) // 8)


SCHEMES: dict[str, Scheme] = {
    "fp32": Scheme(32, 0, 0, "4 bytes", everything=True),
    "bf16": Scheme(16, 0, 0, "2 bytes", everything=True),
    "fp8": Scheme(8, 0, 32, "E4M3, an fp32 scale for each output (FP8_DYNAMIC of llm-compressor)"),
    "int8": Scheme(8, 0, 16, "a 16-bit scale for each output (W8A16 of llm-compressor)"),
    "int4": Scheme(4, 128, 16 + 4, "groups of 128 with a 16-bit scale and a 4-bit zero (GPTQ, AWQ): 4.156 bits"),
    "nf4": Scheme(4, 64, 8 + 32 / 256, "blocks of 64, their 8-bit scales in blocks of 256 (QLoRA): 4.127 bits"),
    "mxfp4": Scheme(4, 32, 8, "blocks of 32 with an 8-bit scale (OCP Microscaling 1.0): 4.25 bits"),
    "nvfp4": Scheme(4, 16, 8, "blocks of 16 with an FP8 scale (NVIDIA NVFP4): 4.5 bits"),
}
"""Name -> scheme. 'llm-compressor' is that of vLLM; QLoRA is Dettmers et al. 2023 (arXiv 2305.14314), section 3."""

WEIGHT_FORMATS = (*SCHEMES, *MIXES)
"""All names that ``--weights`` takes."""


@dataclass(frozen=True)
class KVFormat:
    """A cache format: ``bits`` per number, and additional bits per head and token."""

    bits: float
    head_bits: int
    source: str


KV_FORMATS: dict[str, KVFormat] = {
    "fp32": KVFormat(32, 0, "4 bytes; this engine on a CPU"),
    "bf16": KVFormat(16, 0, "2 bytes"),
    "fp8": KVFormat(8, 0, "one scale per layer (vLLM)"),
    "int8": KVFormat(8, 32, "a 16-bit scale and zero for each head and token (LMDeploy)"),
    "q8_0": KVFormat(8.5, 0, "blocks of 32 with a 16-bit scale (llama.cpp)"),
    "q4_0": KVFormat(4.5, 0, "blocks of 32 with a 16-bit scale (llama.cpp)"),
}
"""Name -> format."""


def tensor_bytes(model: ModelConfig, weight: Weight, form: str) -> int:
    """Return the bytes of one tensor in a weight format."""
    return gguf_bytes(model, weight, form) if form in MIXES else SCHEMES[form].bytes_of(weight)


def kv_bytes_per_token(model: ModelConfig, form: str) -> float:
    """Return the bytes of keys and values of one token in one layer: 2 x key/value heads x head width, and scales."""
    known = KV_FORMATS[form]
    return 2 * model.kv_heads * (model.width_per_head * known.bits + known.head_bits) / 8


def weight_format(name: str) -> str:
    """Return the name of a weight format in lower case. Raises UserError for an unknown one."""
    return _known(name, WEIGHT_FORMATS, "weights")


def kv_format(name: str) -> str:
    """Return the name of a cache format in lower case. Raises UserError for an unknown one."""
    return _known(name, tuple(KV_FORMATS), "kv")


def _known(name: str, allowed: tuple[str, ...], what: str) -> str:
    lowered = name.strip().lower()
    if lowered not in allowed:
        close = nearest(lowered, allowed)
        raise UserError(
            f"{what} = '{name}' is not a known format",
            allowed=", ".join(allowed),
            hint=f"did you mean {close}?" if close else None,
        )
    return lowered
