"""What batch invariance to the bit rests on: matmuls and attention in which a row is independent of the others."""

import random
from typing import Any

import pytest
import torch
from tiny_models import llama_config, tiny_model
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.model.blocks.mlp import activation as activation_of
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.scores import SampledIds

SHAPES = [(64, 32), (257, 32), (512, 128), (768, 768), (768, 3072), (5000, 256)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.usefixtures("threads")
def test_a_row_of_a_matmul_of_whole_sixteens_is_the_same_among_any_others(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
        rows = torch.randn(32, inputs, generator=draw).to(dtype)
        expected = torch.cat([F.linear(sixteen, weight) for sixteen in rows.split(16)])
        for n_rows in (16, 32):
            assert torch.equal(F.linear(rows[:n_rows], weight), expected[:n_rows])
            assert torch.equal(F.linear(rows[:n_rows].roll(3, 0), weight), expected[:n_rows].roll(3, 0))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.usefixtures("threads")
def test_logits_of_a_row_do_not_depend_on_length_or_number_of_the_others(dtype: torch.dtype) -> None:
    config = ModelConfig(
        vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=700, initializer_range=0.1,
    )  # fmt: skip
    model = tiny_model(config).to(dtype)
    lengths = [1, 3, 60, 64, 65, 127, 200, 5, 600, 12]
    prompts = [[(index + 31 * place) % 1000 for place in range(length)] for index, length in enumerate(lengths)]

    def decoded(rows: list[int]) -> dict[int, torch.Tensor]:
        runner = Runner(model, SampledIds(1000), step_rows=16)
        for row in rows:
            runner.prefill(row, prompts[row], lengths[row])
            runner.start(row)
        steps = []
        for step in range(3):
            requests, logits = runner.decode({row: step + row for row in rows})
            steps.append(dict(zip(requests, logits, strict=True)))
        return {row: torch.stack([step[row] for step in steps]) for row in rows}

    together = decoded(list(range(len(lengths))))
    for rows in ([0], [3, 4], [8], [2, 5, 9]):
        for row, logits in decoded(rows).items():
            assert torch.equal(logits, together[row])


def _alone_and_batched(config: ModelConfig, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
    """Decode each prompt alone and all together; the logits of each step must be equal to the bit."""
    model, vocab = tiny_model(config).to(dtype), config.vocab_size
    prompts = [[(index + 31 * place) % vocab for place in range(length)] for index, length in enumerate(lengths)]

    def decoded(rows: list[int]) -> dict[int, torch.Tensor]:
        runner = Runner(model, SampledIds(vocab), step_rows=16)
        for row in rows:
            runner.prefill(row, prompts[row], lengths[row])
            runner.start(row)
        steps = []
        for step in range(2):
            requests, logits = runner.decode(dict.fromkeys(rows, step))
            steps.append(dict(zip(requests, logits, strict=True)))
        return {row: torch.stack([step[row] for step in steps]) for row in rows}

    together = decoded(list(range(len(lengths))))
    for row in range(len(lengths)):
        assert torch.equal(decoded([row])[row], together[row]), (lengths[row], lengths)


HEADS = [
    (12, 2, 64), (10, 2, 64), (14, 2, 64), (20, 5, 64), (4, 1, 16), (8, 1, 16), (8, 2, 16), (16, 2, 16),
    (5, 1, 16), (6, 1, 16), (7, 1, 16), (2, 2, 10), (6, 3, 6), (3, 1, 10), (6, 2, 14),
]  # fmt: skip
"""Query heads, key/value heads, width: 4 and 8 to 1; one key head, that threads might share; widths off the vectors."""


@pytest.mark.sample(3, 8)
@pytest.mark.parametrize("heads", HEADS, ids=["-".join(map(str, heads)) for heads in HEADS])
@pytest.mark.usefixtures("threads")
def test_attention_of_a_row_does_not_depend_on_the_others_with_any_heads(heads: tuple[int, int, int]) -> None:
    query, kv, width = heads
    config = ModelConfig(
        family="decoder", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=query, num_key_value_heads=kv, head_dim=width, max_position_embeddings=300,
        initializer_range=0.3,
    )  # fmt: skip
    _alone_and_batched(config, [127, 20, 250, 200])


@pytest.mark.parametrize("n_threads", [1, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_an_activation_of_a_row_does_not_depend_on_its_place(activation: Any, n_threads: int) -> None:
    """torch gives what a thread has left after whole vectors to other code: where those are depends on all rows."""
    function = activation_of(llama_config().model_copy(update={"activation": activation}))
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        for width in (33, 688, 2816):
            rows = torch.randn(32, 1, width, generator=torch.Generator().manual_seed(width))
            expected = function(rows)
            assert torch.allclose(expected, function(rows[:, 0])[:, None], atol=1e-6)
            assert torch.equal(function(rows[:16].clone()), expected[:16])
            assert torch.equal(function(rows[16:].clone()), expected[16:])
            for shift in (1, 3, 15):
                assert torch.equal(function(rows.roll(shift, 0)), expected.roll(shift, 0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_logits_of_any_model_do_not_depend_on_the_others(proof: Any) -> None:
    """Random shapes of heads, activations, biases, positions and lengths."""
    for case in range(proof(short=3, full=300)):
        draw = random.Random(case)
        kv = draw.choice([1, 1, 2, 3, 5])
        alibi = draw.random() < 0.3
        config = ModelConfig(
            family="decoder",
            vocab_size=draw.choice([64, 101, 257]),
            hidden_size=draw.choice([32, 48, 72]),
            intermediate_size=draw.choice([48, 50, 91, 700]),
            num_hidden_layers=draw.choice([1, 2]),
            num_attention_heads=kv * draw.randint(1, 9),
            num_key_value_heads=kv,
            head_dim=draw.choice([5, 7, 10, 16, 32, 36, 50]) if alibi else draw.choice([6, 10, 16, 32, 36, 50, 80]),
            position="alibi" if alibi else "rope",
            sliding_window=draw.choice([None, None, 3, 70]),
            attn_logit_softcapping=draw.choice([None, None, 2.0]),
            activation=draw.choice(["silu", "gelu", "gelu_tanh"]),
            mlp_bias=draw.random() < 0.3,
            max_position_embeddings=draw.choice([200, 700]),
            initializer_range=0.2,
        )
        n_rows = draw.randint(2, 9) if case % 10 else 20
        lengths = [draw.randint(1, config.max_position_embeddings - 3) for _ in range(n_rows)]
        before = torch.get_num_threads()
        torch.set_num_threads(draw.choice([1, 2, 3, 8]))
        try:
            _alone_and_batched(config, lengths, draw.choice([torch.float32, torch.float32, torch.bfloat16]))
        except AssertionError as error:
            raise AssertionError(f"case {case}: {config}") from error
        finally:
            torch.set_num_threads(before)


_LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 70,
    "short_factor": (1.0,) * 4,
    "long_factor": (1.0, 2.0, 4.0, 9.0),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "alibi", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5},
        {"sliding_window": 20, "layer_types": ("sliding_attention", "full_attention")},
        {"position": "alibi", "sliding_window": 3, "attn_logit_softcapping": 2.0, "attention_multiplier": 0.7},
        {"rope_scaling": _LONGROPE, "final_logit_softcapping": 3.0},
    ],
    ids=["alibi", "windows", "alibi, window, soft cap", "longrope"],
)
def test_with_every_option_cached_logits_are_batch_invariant_and_equal_one_forward(changes: dict[str, Any]) -> None:
    fields = {
        "family": "decoder", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 200, "initializer_range": 0.3,
    }  # fmt: skip
    model = tiny_model(ModelConfig(**(fields | changes)))
    lengths = [1, 66, 69, 130]
    prompts = [[(7 * index + place) % 64 for place in range(length)] for index, length in enumerate(lengths)]

    def decoded(rows: list[int]) -> dict[int, torch.Tensor]:
        runner = Runner(model, SampledIds(64), step_rows=16)
        for row in rows:
            for begin in range(0, lengths[row], 50):
                chunk = prompts[row][begin : begin + 50]
                runner.prefill(row, chunk, lengths[row], max_cached_tokens=lengths[row] + 3)
            runner.start(row)
        for step in range(3):
            requests, logits = runner.decode(dict.fromkeys(rows, step))
        return dict(zip(requests, logits, strict=True))

    together = decoded([0, 1, 2, 3])
    for row, prompt in enumerate(prompts):
        assert torch.equal(decoded([row])[row], together[row])
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, 0, 1, 2]])).value[0, -1]
        assert torch.allclose(together[row], whole, atol=1e-4)


def test_what_a_row_leaves_behind_does_not_meet_the_next() -> None:
    runner = Runner(tiny_model(llama_config()), SampledIds(257), step_rows=16)
    for request in range(6):
        runner.prefill(request, [1, 2, 3], 3)
        runner.start(request)
    with torch.inference_mode():
        for keys, values in runner._cache._bucket_of[5].layers:
            keys[5].fill_(torch.nan)
            values[5].fill_(torch.inf)
    runner.free(5)
    runner.prefill(7, [4, 5, 6], 3)
    runner.start(7)
    requests, logits = runner.decode(dict.fromkeys((0, 1, 2, 3, 4, 7), 9))
    assert requests == [0, 1, 2, 3, 4, 7]
    assert logits.isfinite().all()


def test_the_row_that_takes_a_place_over_brings_nothing_of_the_one_that_left() -> None:
    model = tiny_model(llama_config())
    runner = Runner(model, SampledIds(257), step_rows=16)
    for request, length in enumerate((30, 5, 3)):
        runner.prefill(request, [1] * length, length)
        runner.start(request)
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
    _, logits = runner.decode({0: 7, 1: 2, 2: 3})
    assert not logits[0].isfinite().any()
    runner.free(0)  # its NaN stands behind the last token of the shorter row that moves to its place
    requests, logits = runner.decode({1: 2, 2: 3})
    assert requests == [2, 1]
    assert logits.isfinite().all()


def test_memory_grows_with_the_rows_and_is_given_back() -> None:
    runner = Runner(tiny_model(llama_config(context=1024)), SampledIds(257), step_rows=16)
    cache = runner._cache

    def rows() -> dict[int, int]:
        return {capacity: bucket.layers[0][0].shape[0] for capacity, bucket in cache._buckets.items()}

    for request, length in enumerate([5] * 10 + [500] * 2):
        runner.prefill(request, [1] * length, length)
        runner.start(request)
    assert rows() == {64: 11, 512: 2}
    for request in range(1, 12):
        runner.free(request)
    assert rows() == {64: 1}
    for _ in range(60):
        runner.decode({0: 1})
    assert rows() == {128: 1}
    runner.free(0)
    assert rows() == {}
    assert not runner._prompts
