"""FLOPs per token: the formula against counts by hand and against torch's own counter."""

import pytest
from example_config import example_config

from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.flops import FORMULA, mfu, train_flops_per_token, train_flops_per_token_causal
from smalti.cost.params import count


def test_the_published_example() -> None:
    """A Llama-3-8B token at 8,192: 57.9 GFLOP, and 51.5 with attention halved (see the module's docstring)."""
    config = from_dict(ModelConfig, {"preset": "llama-3-8b"}).config
    assert train_flops_per_token(config, 8192) == pytest.approx(57.9e9, rel=2e-3)
    assert train_flops_per_token_causal(config, 8192) == pytest.approx(51.5e9, rel=2e-3)


def test_by_hand() -> None:
    config = example_config().model
    matmuls = 3 * (4 * 128 * 128 + 3 * 128 * 344) + 4096 * 128
    assert train_flops_per_token(config, 256) == 6 * matmuls + 12 * 3 * 128 * 256


def test_only_the_chosen_experts_count() -> None:
    dense = example_config().model
    moe = example_config("model.family=decoder", "model.moe={num_experts: 8, num_experts_per_tok: 2}").model
    extra = train_flops_per_token(moe, 256) - train_flops_per_token(dense, 256)
    assert extra == 6 * 3 * (3 * 128 * 344 + 128 * 8)


def test_shared_experts_count_and_plain_layers_have_their_own_width() -> None:
    moe = "{num_experts: 8, num_experts_per_tok: 2, num_shared_experts: 1, intermediate_size: 40, mlp_only_layers: [0]}"
    config = example_config("model.family=decoder", f"model.moe={moe}").model
    matmuls = 3 * 4 * 128 * 128 + 3 * 128 * 344 + 2 * ((2 + 1) * 3 * 128 * 40 + 128 * 8) + 4096 * 128
    assert train_flops_per_token(config, 256) == 6 * matmuls + 12 * 3 * 128 * 256


def test_a_window_bounds_attention_of_its_layers() -> None:
    whole = example_config("model.family=decoder").model
    window, types = "model.sliding_window=64", "[sliding_attention, full_attention, sliding_attention]"
    slides = example_config("model.family=decoder", window).model
    mixed = example_config("model.family=decoder", window, f"model.layer_types={types}").model
    for config, layers in ((slides, 3), (mixed, 2)):
        less = train_flops_per_token(whole, 256) - train_flops_per_token(config, 256)
        assert less == 12 * layers * 128 * (256 - 64)
        assert train_flops_per_token(config, 64) == train_flops_per_token(whole, 64)
        less = train_flops_per_token_causal(whole, 256) - train_flops_per_token_causal(config, 256)
        pairs = sum(min(t, 64) for t in range(256))  # of a token with those before it
        assert less == pytest.approx(12 * layers * 128 * (256 * 255 / 2 - pairs) / 256, rel=0.01)


def test_what_is_elementwise_costs_nothing() -> None:
    changes = ("attention_bias", "mlp_bias", "embedding_norm")
    more = example_config("model.family=decoder", "model.position=alibi", *(f"model.{name}=true" for name in changes))
    assert train_flops_per_token(more.model, 256) == train_flops_per_token(example_config().model, 256)


def test_a_tied_head_costs_as_much() -> None:
    tied = example_config("model.tie_word_embeddings=true").model
    assert train_flops_per_token(tied, 256) == train_flops_per_token(example_config().model, 256)


@pytest.mark.parametrize("changes", [(), ("model.family=decoder", "model.attention_bias=true", "model.gated=false")])
def test_equal_to_what_torch_counts(changes: tuple[str, ...]) -> None:
    """torch counts every matmul of a forward pass; attention on explicit scores, not halved, as in the formula."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from smalti.model.decoder import Decoder

    config, rows, seq_len = example_config(*changes).model, 2, 32
    torch.manual_seed(0)
    model = Decoder(config)
    ids = torch.randint(0, config.vocab_size, (rows, seq_len))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids).value.sum().backward()
    expected = train_flops_per_token(config, seq_len) * rows * seq_len
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_mfu_and_its_name() -> None:
    assert mfu(1000.0, 5e9, 1e13) == pytest.approx(0.5)
    assert FORMULA == "6N+12LHQS"


def test_frozen_weights_have_no_gradient() -> None:
    config = from_dict(ModelConfig, {"preset": "llama-2-7b"}).config
    n = count(config).matmul_active
    assert train_flops_per_token(config, 512) - train_flops_per_token(config, 512, frozen=True) == 2 * n
