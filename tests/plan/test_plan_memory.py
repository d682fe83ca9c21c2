"""Memory: shards add up, activations grow as they must, and a real step keeps about what is predicted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_config import made_config

from smalti.plan.memory import activation_bytes, memory_per_rank, microbatch_tokens
from smalti.plan.params import count


def test_weights_gradients_moments_by_hand() -> None:
    total = count(made_config().model).total
    one = memory_per_rank(made_config())
    assert (one.params_bytes, one.grads_bytes, one.moments_bytes) == (4 * total, 4 * total, 8 * total)
    four = memory_per_rank(made_config("train.parallel.ranks=4"))
    assert four.params_bytes == -(-4 * total // 4)


def test_lion_has_one_moment() -> None:
    adamw, lion = memory_per_rank(made_config()), memory_per_rank(made_config("train.optimizer.name=lion"))
    assert adamw.moments_bytes == 2 * lion.moments_bytes


def test_logits_take_what_the_loss_is_given() -> None:
    assert memory_per_rank(made_config("train.loss.chunk_bytes=1000000")).logits_bytes == 1_000_000
    config, one_tile = made_config(), memory_per_rank(made_config("train.loss.chunk_bytes=1e15")).logits_bytes
    assert one_tile == microbatch_tokens(config) * config.model.vocab_size * 10, "bf16 and fp32 logits, probabilities"


def test_replicas_do_not_shard() -> None:
    sharded = memory_per_rank(made_config("train.parallel.ranks=4"))
    replicated = memory_per_rank(made_config("train.parallel.ranks=4", "train.parallel.replicate=2"))
    assert replicated.params_bytes == pytest.approx(2 * sharded.params_bytes, abs=4)


def test_the_sum_is_the_sum() -> None:
    parts = memory_per_rank(made_config()).to_json()
    total = parts.pop("total_bytes")
    assert total == sum(value for name, value in parts.items() if name.endswith("_bytes"))


def test_microbatch() -> None:
    assert microbatch_tokens(made_config()) == 8192
    assert microbatch_tokens(made_config("train.parallel.ranks=3")) == 11 * 256, "32 sequences over 3 ranks"
    assert microbatch_tokens(made_config("train.global_batch_tokens=262144")) == 16_384
    assert microbatch_tokens(made_config("train.microbatch_tokens=512")) == 512


@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from([64, 1000, 16_384, 20_000]))
def test_auto_microbatch_is_what_it_says(sequences: int, ranks: int, seq_len: int) -> None:
    """The largest number of whole sequences in the rank's share and in 16,384 tokens, at least one."""
    found = microbatch_tokens(
        made_config(
            f"data.seq_len={seq_len}",
            "model.max_position_embeddings=20000",
            f"train.global_batch_tokens={sequences * seq_len}",
        ),
        ranks=ranks,
    )
    share = math.ceil(sequences / ranks)
    fitting = [n for n in range(1, share + 1) if n * seq_len <= 16_384]
    assert found == seq_len * max(fitting, default=1)


def test_activations_are_linear_in_tokens_and_layers() -> None:
    model = made_config().model
    deeper = made_config("model.num_hidden_layers=6").model
    base = activation_bytes(model, 100, compute_bytes=2, checkpointing=False)
    assert activation_bytes(model, 300, compute_bytes=2, checkpointing=False) == 3 * base
    assert activation_bytes(deeper, 100, compute_bytes=2, checkpointing=False) == 2 * base


def test_short_rows_keep_their_scores_on_a_cpu() -> None:
    from smalti.model.blocks.attention import choice, spans
    from smalti.plan import memory

    assert choice.LONGEST_KEPT_TOKENS == memory.SHORT_ROW_TOKENS
    assert spans.BLOCK_TOKENS == memory.SCORE_BLOCK_TOKENS
    config = made_config("train.parallel.device=cpu")
    seq_len, model = config.data.seq_len, config.model
    scores = config.model.num_attention_heads * (seq_len + min(seq_len, 128)) // 2 * 4
    tokens = memory.microbatch_tokens(config)
    more = memory.memory_per_rank(config).activations_bytes
    less = memory.memory_per_rank(made_config("train.parallel.device=cuda")).activations_bytes
    bytes_each = 2 if config.train.precision.compute == "bf16" else 4
    assert seq_len > 1024 or more - less == tokens * model.num_hidden_layers * scores // 4 * bytes_each


def test_checkpointing_saves_with_depth() -> None:
    deep = made_config("model.num_hidden_layers=32").model
    whole = activation_bytes(deep, 100, compute_bytes=2, checkpointing=False)
    assert activation_bytes(deep, 100, compute_bytes=2, checkpointing=True) < whole / 10


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.family=decoder", "model.gated=false"),
        ("model.family=decoder", "model.moe={num_experts: 4, num_experts_per_tok: 2}"),
        (
            "model.family=decoder",
            "model.moe={num_experts: 8, num_experts_per_tok: 2, intermediate_size: 64, num_shared_experts: 1, "
            "mlp_only_layers: [1]}",
        ),
        ("model.family=decoder", "model.qk_norm=full", "model.clip_qkv=4.0", "model.norm_placement=post"),
        ("model.family=decoder", "model.position=alibi", "model.sliding_window=16", "model.attention_bias=true"),
        ("model.family=decoder", "model.attn_logit_softcapping=20.0", "model.num_key_value_heads=2"),
    ],
)
def test_activations_of_a_real_step(changes: tuple[str, ...]) -> None:
    """What autograd saves in the blocks, counted by storage: within a factor of 1.3 of the prediction."""
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    config, seq_len = made_config(*changes).model, 64
    model = Decoder(config)
    ids = torch.randint(0, config.vocab_size, (2, seq_len))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: "torch.Tensor") -> "torch.Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids, head=lambda hidden, weight: hidden.sum())
    scores = 0 if config.attn_logit_softcapping else seq_len
    predicted = activation_bytes(config, 2 * seq_len, compute_bytes=4, checkpointing=False, kept_scores_tokens=scores)
    assert output.value is not None
    assert 1 / 1.3 < sum(saved.values()) / predicted < 1.3
