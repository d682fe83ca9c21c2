"""Which kernel attends: chosen from device, dtype and what is asked of it, built once a batch for each kind of layer.

Guarantees: a kernel that is chosen on an accelerator has run forward and backward there before, on a few tokens of the
same shape of heads (a probe, once a process); ``described`` and ``here`` return what is chosen.
``docs/concepts/model/attention.md`` has the rules with their numbers.

Shapes: B batch, T time, D hidden.
"""

from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.documents import Documents, masked_rows, whole_rows
from smalti.model.blocks.attention.flex import Flex
from smalti.model.blocks.attention.scores import ALL_HEADS, Attend, HeadPart, Scores, bias_of_rows, scores_of
from smalti.model.blocks.attention.sdpa import Fused, dense_rows
from smalti.model.blocks.attention.spans import BLOCK_TOKENS
from smalti.model.blocks.attention.varlen import Varlen

Kernel = Literal["sdpa", "spans", "documents", "varlen", "flex", "dense"]

LONGEST_KEPT_TOKENS = 1024
"""Rows up to this keep their attention probabilities for backward on a CPU."""
_LONGEST_MASKED_TOKENS, _LONGEST_MASKED_FORWARD_TOKENS = 256, 512
"""Packed rows up to this go through one mask on a CPU, with and without a backward pass (documents.py measured it)."""


class Asked(NamedTuple):
    """What a kernel must do."""

    tokens: int
    """In a row."""
    documents: bool
    """Rows are packed."""
    window: int | None
    """Absent too where it is no shorter than the rows."""
    alibi: bool
    cap: bool
    heads: int
    kv_heads: int
    head_width: int
    backward: bool
    """Gradients are wanted."""

    @property
    def plain(self) -> bool:
        """Nothing but causality within rows."""
        return not (self.documents or self.window or self.alibi or self.cap)


def kernels_of(
    config: ModelConfig,
    like_BTD: Tensor,
    documents_BT: Tensor | None,
    n_documents: int | None = None,
    *,
    part: HeadPart = ALL_HEADS,
) -> dict[int | None, Attend]:
    """The kernel of each layer of a batch, by ``config.window(layer)``; built once, without a cache.

    like_BTD: has the batch's rows and tokens, device and dtype; its width is not read. n_documents: runs of equal
    numbers in ``documents_BT``, where known: a GPU need not be asked. part: of the heads.
    """
    scores = scores_of(config, like_BTD.device, part)
    built: dict[int | None, Attend] = {}
    for window in windows_of(config):
        asked = _asked(config, window, like_BTD.shape[1], documents_BT is not None, torch.is_grad_enabled(), part)
        kernel = choose(like_BTD.device.type, like_BTD.dtype, asked)
        built[window] = _build(kernel, asked, like_BTD, scores, documents_BT, n_documents)
    return built


def _should_varlen(dtype: torch.dtype) -> bool:
    return dtype != torch.float32 and find_spec("torch.nn.attention.varlen") is not None


def windows_of(config: ModelConfig) -> set[int | None]:
    """The kinds of layers: their windows."""
    return {config.window(layer) for layer in range(config.num_hidden_layers)}


def choose(device: str, dtype: torch.dtype, asked: Asked, *, tried: bool = True) -> Kernel:
    """The fastest kernel that can do it, by docs/concepts/model/attention.md; not ``tried``: that should."""
    if device == "cpu":
        if asked.documents and not asked.backward and not asked.alibi and not asked.cap:
            return "sdpa" if asked.tokens <= _LONGEST_MASKED_FORWARD_TOKENS else "documents"
        if asked.documents and asked.tokens > _LONGEST_MASKED_TOKENS:
            return "documents"
        keeps = asked.backward and asked.tokens <= LONGEST_KEPT_TOKENS and dtype in (torch.float32, torch.bfloat16)
        return "sdpa" if asked.plain and not keeps else "spans"
    if asked.plain:
        return "sdpa"
    if device == "cuda":
        simple = not (asked.alibi or asked.cap)
        if simple and (problem("varlen", device, dtype, _small(asked)) is None if tried else _should_varlen(dtype)):
            return "varlen"
        if problem("flex", device, dtype, _small(asked)) is None if tried else find_spec("triton"):
            return "flex"
    return "dense"


@cache
def problem(kernel: Kernel, device: str, dtype: torch.dtype, asked: Asked) -> str | None:
    """Why a kernel cannot do it here; None when it ran forward and, where wanted, backward on two short rows."""
    tokens, scores = asked.tokens, _small_scores(asked, device)
    like_BTD = torch.empty(2, tokens, 1, dtype=dtype, device=device)
    documents_BT = (torch.arange(tokens, device=device) // 50).expand(2, -1) if asked.documents else None
    shapes = [(2, n_heads, tokens, asked.head_width) for n_heads in (asked.heads, asked.kv_heads, asked.kv_heads)]
    try:
        with torch.enable_grad():
            inputs = [torch.ones(shape, dtype=dtype, device=device, requires_grad=asked.backward) for shape in shapes]
            mixed_BTHd = _build(kernel, asked, like_BTD, scores, documents_BT)(*inputs)
            if asked.backward:
                mixed_BTHd.sum().backward()
            finite = bool(mixed_BTHd.isfinite().all())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if finite else "its result is not finite"


def described(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int, *, documents: bool
) -> dict[str, Kernel]:
    """The kernel of each kind of layer in training: ``full_attention`` and ``sliding_attention`` -> its name."""
    return {
        "full_attention" if window is None else "sliding_attention": choose(
            device.type, dtype, _asked(config, window, tokens, documents, True)
        )
        for window in windows_of(config)
    }


def here(tokens: int) -> dict[str, dict[str, Kernel]]:
    """Device and dtype -> what is asked -> the kernel that should train with rows of ``tokens`` on this machine; a
    run tries it first, which compiles for seconds."""
    row = Asked(tokens, False, None, False, False, 8, 2, 64, True)
    kinds = {
        "rows": row,
        "documents": row._replace(documents=True),
        "window": row._replace(window=256),
        "alibi": row._replace(alibi=True),
        "soft-cap": row._replace(cap=True),
    }
    return {
        f"{device} {name}": {kind: choose(device, dtype, asked, tried=False) for kind, asked in kinds.items()}
        for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


def _asked(
    config: ModelConfig,
    window: int | None,
    tokens: int,
    documents: bool,
    backward: bool,
    part: HeadPart = ALL_HEADS,
) -> Asked:
    return Asked(
        tokens,
        documents,
        None if window is None or window >= tokens else window,
        config.position == "alibi",
        config.attn_logit_softcapping is not None,
        part.query_heads(config),
        part.kv_heads(config),
        config.width_per_head,
        backward,
    )


def _small(asked: Asked) -> Asked:
    return asked._replace(tokens=BLOCK_TOKENS, window=asked.window and 16)


def _small_scores(asked: Asked, device: str) -> Scores:
    slopes_KG = torch.ones(asked.kv_heads, asked.heads // asked.kv_heads, device=device) if asked.alibi else None
    return Scores(asked.head_width**-0.5, 30.0 if asked.cap else None, slopes_KG)


def _build(
    kernel: Kernel,
    asked: Asked,
    like_BTD: Tensor,
    scores: Scores,
    documents_BT: Tensor | None,
    n_documents: int | None = None,
) -> Attend:
    window = asked.window
    keep = asked.backward and asked.tokens <= LONGEST_KEPT_TOKENS and not asked.cap
    if kernel == "sdpa":
        bias_BTS = None if asked.plain else bias_of_rows(like_BTD, window, scores, documents_BT)
        return Fused(scores.scale, None if bias_BTS is None else bias_BTS[:, None])
    if kernel == "varlen":
        return Varlen(like_BTD, window, scores.scale, documents_BT, n_documents)
    if kernel == "flex":
        return Flex(like_BTD, window, scores, documents_BT)
    if kernel == "dense":
        return dense_rows(like_BTD, window, scores, documents_BT)
    if documents_BT is None:
        return whole_rows(like_BTD, window, scores, keep=keep)
    if kernel == "spans":
        return masked_rows(like_BTD, window, scores, documents_BT, keep=keep)
    longest_tokens = LONGEST_KEPT_TOKENS if asked.backward else BLOCK_TOKENS
    return Documents(like_BTD, window, scores, documents_BT, keep=keep, longest_tokens=longest_tokens)
