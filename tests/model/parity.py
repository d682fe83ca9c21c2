"""A model of transformers with random weights, and ours that is read from the folder it saves, side by side.

What is drawn: odd head counts, grouped queries, head widths, biases, windows shorter than the row, every scaling of the
rotary frequencies, tied heads, clipped projections, uneven routing (rows of the router differ in length), weights of
norms that are not 1 and biases that are not 0.

Shapes: B batch, T time, V vocabulary, N = B * T tokens, E experts, k experts per token.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smalti.model.blocks.moe.choices import forced_choices
from smalti.model.blocks.moe.router import Router
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder

DENSE = ("llama", "mistral", "qwen3", "olmo2", "mpt")
MIXTURES = ("dbrx", "mixtral", "olmoe", "qwen3_moe")
FAMILIES = DENSE + MIXTURES
ALIBI = ("mpt",)
LENGTH = 16
"""The longest sequence that the models are meant for; rows are up to half as long again."""
CALM = 0.5
"""Factor on the blocks' weights where rounding itself comes near the bound: with the full weights transformers' own two
ways of attention differ by 1e-2 in bfloat16, and each side's float32 gradients from those in float64 by 1e-5."""
NEAR_TIE = 1e-5
"""Scores closer than this may be ranked either way."""

MODELS = max(2, settings.default.max_examples // 20)
"""Drawn for each family and test."""
drawn = settings(max_examples=MODELS, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Decorates a test. Hypothesis does not look for a smaller model that fails too: that takes minutes."""

Options = dict[str, Any]


class Pair(NamedTuple):
    """The same weights twice."""

    theirs: nn.Module
    ours: Decoder
    folder: Path
    """What ``save_pretrained`` wrote."""


# ---- what a model is drawn from -------------------------------------------------------------------------------------


@st.composite
def options(draw: st.DrawFn, family: str) -> Options:
    """Arguments of the family's config class."""
    return draw({"mpt": _mpt, "dbrx": _dbrx}[family]() if family in ("mpt", "dbrx") else _rotary_family(family))


@st.composite
def _rotary_family(draw: st.DrawFn, family: str) -> Options:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * group
    free_width = family in ("mistral", "qwen3", "mixtral", "qwen3_moe", "llama")
    head_dim = draw(st.sampled_from([4, 6, 8, 10] if free_width else [8, 16]))
    hidden = heads * 8 if family == "llama" or not free_width else draw(st.sampled_from([16, 24, 40]))
    if not free_width:
        hidden = heads * head_dim
    found: Options = {
        "vocab_size": draw(st.integers(11, 50)),
        "hidden_size": hidden,
        "intermediate_size": draw(st.sampled_from([8, 24, 40])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"])),
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(_rope(head_dim)),
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if free_width:
        found["head_dim"] = head_dim
    if family in ("llama", "qwen3", "olmo2", "olmoe", "qwen3_moe"):
        found["attention_bias"] = draw(st.booleans())
    return found | draw(_own(family, found["num_hidden_layers"]))


@st.composite
def _own(draw: st.DrawFn, family: str, layers: int) -> Options:
    """The options that only some families have."""
    window = st.sampled_from([None, 1, 3, 8, 64])
    found: Options = {}
    if family == "llama":
        found["mlp_bias"] = draw(st.booleans())
    elif family in ("mistral", "mixtral"):
        found["sliding_window"] = draw(window)
    elif family == "qwen3":
        found |= {"use_sliding_window": draw(st.booleans()), "sliding_window": draw(st.sampled_from([3, 8]))}
        found["max_window_layers"] = draw(st.integers(0, layers))
    elif family == "olmoe":
        found["clip_qkv"] = draw(st.sampled_from([None, 0.5, 2.0]))
    elif family == "qwen3_moe":
        found |= {"use_sliding_window": draw(st.booleans()), "sliding_window": draw(st.sampled_from([3, 8]))}
        step = found["decoder_sparse_step"] = draw(st.sampled_from([1, 1, 2])) if layers > 1 else 1
        plain = draw(st.sets(st.integers(0, layers - 1), max_size=layers))
        found["mlp_only_layers"] = sorted(plain - {step - 1})  # at least one layer has experts
        found["moe_intermediate_size"] = draw(st.sampled_from([8, 16]))
    if family in MIXTURES:
        experts = draw(st.integers(2, 6))
        found["num_local_experts" if family == "mixtral" else "num_experts"] = experts
        found["num_experts_per_tok"] = draw(st.integers(1, experts))
    if family in ("olmoe", "qwen3_moe"):
        found["norm_topk_prob"] = draw(st.booleans())
    return found


@st.composite
def _mpt(draw: st.DrawFn) -> Options:
    heads = draw(st.sampled_from([1, 2, 3, 5, 6, 8]))
    clip, scale = draw(st.sampled_from([None, 0.5, 2.0])), draw(st.sampled_from([None, 0.2]))
    return {
        "vocab_size": draw(st.integers(11, 50)),
        "d_model": heads * draw(st.sampled_from([4, 5, 8])),
        "n_heads": heads,
        "n_layers": draw(st.integers(1, 3)),
        "max_seq_len": 2 * LENGTH,
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "attn_config": {"clip_qkv": clip, "softmax_scale": scale},
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@st.composite
def _dbrx(draw: st.DrawFn) -> Options:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    experts, rope = draw(st.integers(2, 6)), draw(_rope(8))
    return {
        "vocab_size": draw(st.integers(11, 50)),
        "d_model": kv_heads * group * 8,
        "n_heads": kv_heads * group,
        "n_layers": draw(st.integers(1, 3)),
        "max_seq_len": LENGTH,
        "attn_config": {
            "kv_n_heads": kv_heads,
            "clip_qkv": draw(st.sampled_from([0.5, 2.0, 65504.0])),
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "ffn_act_fn": {"name": draw(st.sampled_from(["silu", "gelu"]))},
            "ffn_hidden_size": draw(st.sampled_from([8, 24])),
            "moe_num_experts": experts,
            "moe_top_k": draw(st.integers(1, experts)),
            "moe_normalize_expert_weights": draw(st.sampled_from([None, 1.0, 2.0, 3.0])),
        },
        "rope_parameters": rope,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@st.composite
def _rope(draw: st.DrawFn, head_dim: int) -> Options:
    kind = draw(st.sampled_from(["default", "default", "linear", "dynamic", "yarn", "llama3", "longrope"]))
    found: Options = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 10_000.0]))}
    if kind != "default":
        found["factor"] = draw(st.sampled_from([1.5, 2.0, 8.0]))
    if kind in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = draw(st.sampled_from([4, 8]))
    if kind in ("yarn", "longrope") and draw(st.booleans()):
        found["attention_factor"] = 1.25
    if kind == "yarn":
        found |= draw(
            st.sampled_from(
                [{}, {"beta_fast": 4.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"truncate": False}]
            )
        )
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))}
    if kind == "longrope":
        divisors = st.lists(st.floats(1, 4), min_size=head_dim // 2, max_size=head_dim // 2)
        found |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
    return found


# ---- the two models -------------------------------------------------------------------------------------------------


@contextmanager
def pair(family: str, chosen: Options, dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Iterator[Pair]:
    """Both in eval mode; in bfloat16 both are read from the float32 folder. ``gain``: see ``CALM``."""
    with tempfile.TemporaryDirectory() as name:
        theirs = their_model(family, chosen, gain)
        theirs.save_pretrained(name)
        if dtype != torch.float32:
            theirs = stock(Path(name), dtype)
        yield Pair(theirs, load_folder(name, dtype), Path(name))


def their_model(family: str, chosen: Options, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """With random weights that hide no mistake: see the head of the file."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **json.loads(json.dumps(chosen)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            elif name.endswith(("wte.weight", "embed_tokens.weight")):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            if "post_" in name:  # OLMo 2's norms of what is written would undo the gain
                parameter.mul_(gain**2)
            if name.endswith(("mlp.gate.weight", "router.layer.weight")):
                parameter.mul_(torch.linspace(0.5, 3.0, parameter.shape[0])[:, None])
    return model


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What transformers reads of a folder, without code of the folder's and without anything missing or left over."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False, dtype=dtype
    )
    assert not any(info.values()), info
    return model.eval()


# ---- running them ---------------------------------------------------------------------------------------------------


def their_logits(theirs: nn.Module, ids_BT: Tensor, **arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, V] and the choices of each mixture [B, T, k]."""
    _forget_longest(theirs)
    choices: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: choices.append(inputs[1]))
        for name, module in theirs.named_modules()
        if name.endswith(".experts")
    ]
    try:
        logits_BTV = theirs(input_ids=ids_BT, use_cache=False, **arguments).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits_BTV, [choice.view(*ids_BT.shape, -1) for choice in choices]


def _forget_longest(theirs: nn.Module) -> None:
    """With dynamic scaling transformers continues with the frequencies of the longest row that it has seen."""
    for module in theirs.modules():
        if hasattr(module, "max_seq_len_cached"):
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()


def our_logits(
    ours: Decoder,
    ids_BT: Tensor,
    choices: list[Tensor],
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    real_BT: Tensor | None = None,
) -> Tensor:
    """Logits [B, T, V] with these choices; in float32 those of ``real_BT`` tokens are ours too, but for near ties."""
    scores: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, routing: scores.append((routing.score_BTE, routing.expert_BTk)))
        for module in ours.modules()
        if isinstance(module, Router)
    ]
    try:
        with forced_choices(ours, choices):
            logits_BTV: Tensor = ours(ids_BT, positions_BT, documents_BT).value
    finally:
        for hook in hooks:
            hook.remove()
    for score_BTE, expert_BTk in scores if logits_BTV.dtype == torch.float32 else []:
        chosen_BT = score_BTE.gather(-1, expert_BTk).amin(-1)
        best_BT = score_BTE.topk(expert_BTk.shape[-1], dim=-1).values.amin(-1)
        near_BT = chosen_BT >= best_BT - NEAR_TIE
        assert bool(near_BT[slice(None) if real_BT is None else real_BT.bool()].all()), "they choose other experts"
    return logits_BTV
