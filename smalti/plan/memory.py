"""Bytes on one rank while training, by formula, to first depth.

Promises: weights, gradients and moments exactly as FSDP2 shards them (up to padding); activations and logits by the
tensors that autograd keeps in an eager step, which is an upper estimate under torch.compile. Not counted: the
allocator's fragmentation, the CUDA context and NCCL's buffers (together 2-6 GB on a GPU), the peak of a temporary.
"""

from dataclasses import asdict, dataclass

from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.plan.params import count

MICROBATCH_LIMIT_TOKENS = 16_384
"""What ``microbatch_tokens: auto`` never goes above."""

SHORT_ROW_TOKENS = 1024
SCORE_BLOCK_TOKENS = 128
"""Rows up to the first keep their attention probabilities on a CPU, cut in blocks of the second, as
``model/blocks/attention/spans.py`` does (a test holds both equal)."""

_BYTES = {"fp32": 4, "bf16": 2}
_MOMENTS = {"adamw": 2, "lion": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    params_bytes: int
    """Master weights, sharded."""
    grads_bytes: int
    """Gradients in the master format, sharded."""
    moments_bytes: int
    """The moments of the optimizer, sharded: two of AdamW, one of Lion."""
    gathered_bytes: int
    """Weights in the compute format that are whole at one time: embedding and head, and two blocks."""
    activations_bytes: int
    """What one microbatch keeps for the backward pass."""
    logits_bytes: int
    """Logits that exist at one time and what is made of them: at most ``train.loss.chunk_bytes``."""
    microbatch_tokens: int
    """The microbatch that the last two are for."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        parts = (self.params_bytes, self.grads_bytes, self.moments_bytes, self.gathered_bytes)
        return sum(parts) + self.activations_bytes + self.logits_bytes

    def to_json(self) -> dict[str, int]:
        """A JSON object with the parts and their sum."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def memory_per_rank(config: RunConfig, *, ranks: int | None = None) -> Memory:
    """Predict the bytes on one rank of ``ranks`` (absent: as in the config)."""
    train, parallel = config.train, config.train.parallel
    world = ranks or parallel.ranks
    shards = max(1, world // parallel.replicate)
    params = count(config.model)
    compute = _BYTES[train.precision.compute]
    block = (params.total - params.embedding - params.head) / config.model.num_hidden_layers
    whole = params.embedding + params.head + 2 * block
    microbatch = microbatch_tokens(config, ranks=world)
    return Memory(
        params_bytes=_split(params.total * _BYTES[train.precision.master], shards),
        grads_bytes=_split(params.total * _BYTES[train.precision.master], shards),
        moments_bytes=_split(params.total * _MOMENTS[train.optimizer.name] * _BYTES[train.precision.moments], shards),
        gathered_bytes=int(whole * compute) if shards > 1 or compute != 4 else 0,
        activations_bytes=activation_bytes(
            config.model,
            microbatch,
            compute_bytes=compute,
            checkpointing=parallel.activation_checkpointing == "full",
            kept_scores_tokens=_kept_scores_tokens(config),
        ),
        logits_bytes=min(train.loss.chunk_bytes, microbatch * config.model.vocab_size * _logit_bytes(config)),
        microbatch_tokens=microbatch,
    )


def microbatch_tokens(config: RunConfig, *, ranks: int | None = None) -> int:
    """Tokens in one forward pass on one rank; ``auto`` is the rank's share, at most 16,384, in whole sequences.

    Where batches or lengths of sequences change, it is the most that any step asks for.
    """
    train = config.train
    if isinstance(train.microbatch_tokens, int):
        return train.microbatch_tokens
    world = ranks or train.parallel.ranks
    return max(
        min(_split(batch // seq_len, world), max(1, MICROBATCH_LIMIT_TOKENS // seq_len)) * seq_len
        for batch, seq_len in config.batches_and_lengths
    )


def activation_bytes(
    model: ModelConfig, tokens: int, *, compute_bytes: int, checkpointing: bool, kept_scores_tokens: int = 0
) -> int:
    """Bytes that the blocks keep for the backward pass of ``tokens`` tokens.

    For each token and layer, in the compute format: the inputs and outputs of both norms (4 hidden); rotated query,
    key, value and the attention output ((2 heads + 2 kv_heads) x head_dim), and what ``qk_norm`` and ``clip_qkv`` read;
    in a plain MLP, and in the shared experts, gate, activated gate, up and product (4 intermediate; 2 when not gated);
    in each expert that it is sent to gate, up and the output (``model/blocks/moe/experts.py``). In fp32 the attention's
    log-sum-exp and the router's probabilities. After Korthikanti et al. 2022 (arXiv 2205.05198), without dropout;
    attention keeps no scores but on a CPU over short rows, where each head keeps ``kept_scores_tokens`` of them a
    token, or those of a block's window. ``checkpointing`` keeps one hidden row for each layer, and one layer in full.
    """
    layers = range(model.num_hidden_layers)
    kept = [_layer_bytes(model, layer, compute_bytes, kept_scores_tokens) for layer in layers]
    if checkpointing:
        return tokens * (model.num_hidden_layers * model.hidden_size * compute_bytes + max(kept))
    return tokens * sum(kept)


def _layer_bytes(model: ModelConfig, layer: int, compute_bytes: int, kept_scores_tokens: int) -> int:
    """Of one token."""
    hidden, heads, kv_heads, width = (
        model.hidden_size, model.num_attention_heads, model.kv_heads, model.width_per_head
    )  # fmt: skip
    window, inner = model.window(layer), 4 if model.gated else 2
    scores = kept_scores_tokens if window is None else min(kept_scores_tokens, window + SCORE_BLOCK_TOKENS)
    kept = 4 * hidden + 2 * (heads + kv_heads) * width + heads * scores
    kept += (heads + kv_heads) * width if model.qk_norm else 0
    kept += (heads + 2 * kv_heads) * width if model.clip_qkv else 0
    in_fp32 = heads
    if model.moe is not None and model.has_experts(layer):
        chosen, shared = model.moe.num_experts_per_tok, model.moe.num_shared_experts
        kept += chosen * (inner // 2 * model.expert_width + hidden) + shared * inner * model.expert_width
        in_fp32 += 2 * model.moe.num_experts
    else:
        kept += inner * model.intermediate_size
    return kept * compute_bytes + in_fp32 * 4


def _logit_bytes(config: RunConfig) -> int:
    """The logit, in fp32 too, and its probability; with a soft cap three in fp32 (``train/cross_entropy.py``)."""
    return 12 if config.model.final_logit_softcapping else {"fp32": 8, "bf16": 10}[config.train.precision.compute]


def _kept_scores_tokens(config: RunConfig) -> int:
    """Attention probabilities that a head keeps for each token (``model/blocks/attention/spans.py``): a CPU's alone."""
    seq_len = min(config.data.seq_lens)  # it keeps most for each token where rows are short
    if config.train.parallel.device != "cpu" or seq_len > SHORT_ROW_TOKENS or config.model.attn_logit_softcapping:
        return 0
    return (seq_len + min(seq_len, SCORE_BLOCK_TOKENS)) // 2


def _split(amount: int, shares: int) -> int:
    return -(-amount // shares)
