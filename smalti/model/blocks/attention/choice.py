"""Chooses the attention kernel of each kind of layer from device, dtype and what the layer needs.

Guarantees: on an accelerator a kernel is chosen only if it has run forward and backward there, on a few tokens with
heads of the same shape (a probe, once a process); a kernel that fails is named in a warning.
``docs/concepts/model/attention.md`` has the rules with their numbers.

Shapes: B batch, T time, D hidden.
"""

from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from smalti.base import log
from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.documents import Documents, masked_rows, whole_rows
from smalti.model.blocks.attention.flex import Flex
from smalti.model.blocks.attention.scores import ALL_HEADS, Attend, HeadPart, Scores, bias_of_rows, scores_of
from smalti.model.blocks.attention.sdpa import Fused, dense_rows
from smalti.model.blocks.attention.spans import BLOCK_TOKENS
from smalti.model.blocks.attention.varlen import Varlen

Kernel = Literal["sdpa", "spans", "documents", "varlen", "flex", "dense"]

LONGEST_KEPT_TOKENS = 1024
"""On a CPU, rows up to this length save their attention probabilities for the backward pass."""
_LONGEST_MASKED_TOKENS, _LONGEST_MASKED_FORWARD_TOKENS = 256, 512
"""On a CPU, packed rows up to this length use one mask, with and without a backward pass (measured in
docs/concepts/model/attention.md)."""


class Needs(NamedTuple):
    """The needs of a layer, for the choice of its kernel."""

    tokens: int
    """Tokens of a row."""
    documents: bool
    """True if rows are packed: a token attends within its document only."""
    window: int | None
    """Sliding window in tokens; None also if it is as long as the rows."""
    alibi: bool
    cap: bool
    heads: int
    kv_heads: int
    head_width: int
    backward: bool
    """True if gradients are needed."""

    @property
    def plain(self) -> bool:
        """True if nothing but causality is needed."""
        return not (self.documents or self.window or self.alibi or self.cap)


def kernels_of(
    config: ModelConfig,
    like_BTD: Tensor,
    documents_BT: Tensor | None,
    n_documents: int | None = None,
    *,
    part: HeadPart = ALL_HEADS,
) -> dict[int | None, Attend]:
    """Build the kernels of a batch without a cache; ``config.window(layer)`` is the key of a layer's kernel.

    like_BTD: a tensor with the batch's rows, tokens, device and dtype; its width is not used. n_documents: runs of
    equal numbers in ``documents_BT``; if it is None, counting them may wait for a GPU. part: of the heads.
    """
    scores = scores_of(config, like_BTD.device, part)
    kernels: dict[int | None, Attend] = {}
    for window in windows_of(config):
        needs = _needs(config, window, like_BTD.shape[1], documents_BT is not None, torch.is_grad_enabled(), part)
        kernel = choose(like_BTD.device.type, like_BTD.dtype, needs)
        kernels[window] = _build(kernel, needs, like_BTD, scores, documents_BT, n_documents)
    return kernels


def windows_of(config: ModelConfig) -> set[int | None]:
    """Return the windows of all layers; None is full attention."""
    return {config.window(layer) for layer in range(config.num_hidden_layers)}


def choose(device: str, dtype: torch.dtype, needs: Needs, *, probe: bool = True) -> Kernel:
    """Return the fastest kernel that can do it; with ``probe`` False, the one that is expected to run."""
    if device == "cpu":
        if needs.documents and not needs.backward and not needs.alibi and not needs.cap:
            return "sdpa" if needs.tokens <= _LONGEST_MASKED_FORWARD_TOKENS else "documents"
        if needs.documents and needs.tokens > _LONGEST_MASKED_TOKENS:
            return "documents"
        keeps = needs.backward and needs.tokens <= LONGEST_KEPT_TOKENS and dtype in (torch.float32, torch.bfloat16)
        return "sdpa" if needs.plain and not keeps else "spans"
    if needs.plain:
        return "sdpa"
    kernels = _cuda_kernels(dtype, needs, probe=probe) if device == "cuda" else []
    for kernel, next_kernel in pairwise([*kernels, "dense"]):
        problem = probe_kernel(kernel, device, dtype, _small_case(needs)) if probe else None
        if problem is None:
            return kernel
        _warn_once(kernel, next_kernel, problem)
    return "dense"


def _cuda_kernels(dtype: torch.dtype, needs: Needs, *, probe: bool) -> list[Kernel]:
    """Return the kernels to try on CUDA, fastest first: ``varlen`` has no float32, and ``flex`` needs Triton."""
    kernels: list[Kernel] = []
    if dtype != torch.float32 and not (needs.alibi or needs.cap) and find_spec("torch.nn.attention.varlen") is not None:
        kernels.append("varlen")
    if probe or find_spec("triton") is not None:
        kernels.append("flex")
    return kernels


@cache
def _warn_once(kernel: Kernel, next_kernel: Kernel, problem: str) -> None:
    """Log, once a process, that a kernel fails; ``next_kernel`` is used or tried instead."""
    slower = "slower, and its memory grows with the square of the row" if next_kernel == "dense" else "slower"
    log.get("model").warning(
        "attention kernel '%s' does not run here (%s); '%s' is used instead, which is %s",
        *(kernel, problem.partition("\n")[0], next_kernel, slower),
    )


@cache
def probe_kernel(kernel: Kernel, device: str, dtype: torch.dtype, needs: Needs) -> str | None:
    """Run a kernel forward and, if needed, backward on two short rows. Returns why it failed, or None."""
    tokens, scores = needs.tokens, _small_scores(needs, device)
    like_BTD = torch.empty(2, tokens, 1, dtype=dtype, device=device)
    documents_BT = (torch.arange(tokens, device=device) // 50).expand(2, -1) if needs.documents else None
    shapes = [(2, n_heads, tokens, needs.head_width) for n_heads in (needs.heads, needs.kv_heads, needs.kv_heads)]
    try:
        with torch.enable_grad():
            inputs = [torch.ones(shape, dtype=dtype, device=device, requires_grad=needs.backward) for shape in shapes]
            mixed_BTHd = _build(kernel, needs, like_BTD, scores, documents_BT)(*inputs)
            if needs.backward:
                mixed_BTHd.sum().backward()
            finite = bool(mixed_BTHd.isfinite().all())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if finite else "its result is not finite"


def kernel_names(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int, *, documents: bool
) -> dict[str, Kernel]:
    """Return the kernel of each kind of layer in training: ``full_attention`` and ``sliding_attention`` -> its name."""
    return {
        "full_attention" if window is None else "sliding_attention": choose(
            device.type, dtype, _needs(config, window, tokens, documents, True)
        )
        for window in windows_of(config)
    }


def kernels_on_this_machine(tokens: int) -> dict[str, dict[str, Kernel]]:
    """Return, for each device and dtype, need -> the kernel that is expected to train rows of ``tokens``.

    Nothing is probed, because that compiles for seconds; a run does it.
    """
    rows = Needs(tokens, False, None, False, False, 8, 2, 64, True)
    kinds = {
        "rows": rows,
        "documents": rows._replace(documents=True),
        "window": rows._replace(window=256),
        "alibi": rows._replace(alibi=True),
        "soft-cap": rows._replace(cap=True),
    }
    return {
        f"{device} {name}": {kind: choose(device, dtype, needs, probe=False) for kind, needs in kinds.items()}
        for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


def _needs(
    config: ModelConfig,
    window: int | None,
    tokens: int,
    documents: bool,
    backward: bool,
    part: HeadPart = ALL_HEADS,
) -> Needs:
    return Needs(
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


def _small_case(needs: Needs) -> Needs:
    return needs._replace(tokens=BLOCK_TOKENS, window=needs.window and 16)


def _small_scores(needs: Needs, device: str) -> Scores:
    slopes_KG = torch.ones(needs.kv_heads, needs.heads // needs.kv_heads, device=device) if needs.alibi else None
    return Scores(needs.head_width**-0.5, 30.0 if needs.cap else None, slopes_KG)


def _build(
    kernel: Kernel,
    needs: Needs,
    like_BTD: Tensor,
    scores: Scores,
    documents_BT: Tensor | None,
    n_documents: int | None = None,
) -> Attend:
    window = needs.window
    keep = needs.backward and needs.tokens <= LONGEST_KEPT_TOKENS and not needs.cap
    if kernel == "sdpa":
        bias_BTS = None if needs.plain else bias_of_rows(like_BTD, window, scores, documents_BT)
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
    longest_tokens = LONGEST_KEPT_TOKENS if needs.backward else BLOCK_TOKENS
    return Documents(like_BTD, window, scores, documents_BT, keep=keep, longest_tokens=longest_tokens)
