"""Where the promise of equal bits comes from: matmuls and attention that do not see the rows beside a row."""

from typing import Any

import pytest
import torch
from tiny_models import llama_config, tiny_model
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.scores import Vocabulary

SHAPES = [(64, 32), (257, 32), (512, 128), (768, 768), (768, 3072), (5000, 256)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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
        runner = Runner(model, step_rows=16)
        for row in rows:
            runner.read(row, prompts[row], lengths[row], (), 0, Vocabulary(1000))
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
def test_with_every_option_a_request_reads_what_one_forward_reads_in_any_company(changes: dict[str, Any]) -> None:
    fields = {
        "family": "decoder", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 200, "initializer_range": 0.3,
    }  # fmt: skip
    model = tiny_model(ModelConfig(**(fields | changes)))
    lengths = [1, 66, 69, 130]
    prompts = [[(7 * index + place) % 64 for place in range(length)] for index, length in enumerate(lengths)]

    def decoded(rows: list[int]) -> dict[int, torch.Tensor]:
        runner = Runner(model, step_rows=16)
        for row in rows:
            for begin in range(0, lengths[row], 50):
                piece = prompts[row][begin : begin + 50]
                runner.read(row, piece, lengths[row], (), 0, Vocabulary(64), most_tokens=lengths[row] + 3)
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
    runner = Runner(tiny_model(llama_config()), step_rows=16)
    for request in range(6):
        runner.read(request, [1, 2, 3], 3, (), 0, Vocabulary(257))
        runner.start(request)
    with torch.inference_mode():
        for keys, values in runner._slots._shelf_of[5].layers:
            keys[5].fill_(torch.nan)
            values[5].fill_(torch.inf)
    runner.free(5)
    runner.read(7, [4, 5, 6], 3, (), 0, Vocabulary(257))
    runner.start(7)
    requests, logits = runner.decode(dict.fromkeys((0, 1, 2, 3, 4, 7), 9))
    assert requests == [0, 1, 2, 3, 4, 7]
    assert logits.isfinite().all()


def test_the_row_that_takes_a_place_over_brings_nothing_of_the_one_that_left() -> None:
    model = tiny_model(llama_config())
    runner = Runner(model, step_rows=16)
    for request, length in enumerate((30, 5, 3)):
        runner.read(request, [1] * length, length, (), 0, Vocabulary(257))
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
    runner = Runner(tiny_model(llama_config(context=1024)), step_rows=16)
    slots = runner._slots

    def rows() -> dict[int, int]:
        return {capacity: shelf.layers[0][0].shape[0] for capacity, shelf in slots._shelves.items()}

    for request, length in enumerate([5] * 10 + [500] * 2):
        runner.read(request, [1] * length, length, (), 0, Vocabulary(257))
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
