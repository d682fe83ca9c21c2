"""Choices of the router: taken down from one model, forced on another."""

import pytest
import torch
from model_cases import built, distance, ids, sparse

from smalti.base.errors import UserError
from smalti.model.blocks.moe.choices import forced_choices, recorded_choices


def test_recorded_choices_are_one_per_layer_and_forcing_them_changes_nothing():
    config = sparse()
    model, tokens = built(config), ids(config, 2, 7)
    with recorded_choices(model) as choices:
        plain = model(tokens).value
    assert [tuple(one.shape) for one in choices] == [(2, 7, 2)] * config.num_hidden_layers
    assert all(one.dtype == torch.int64 for one in choices)
    with forced_choices(model, choices):
        assert torch.equal(model(tokens).value, plain)
    model(tokens)
    assert len(choices) == config.num_hidden_layers


def test_weights_of_forced_experts_come_from_the_own_scores():
    config = sparse(num_hidden_layers=1)
    model, tokens = built(config), ids(config, 1, 5)
    router = model.blocks[0].mlp.router
    forced = torch.tensor([0, 3]).expand(1, 5, 2)
    seen = []
    router.register_forward_hook(lambda _module, _inputs, routing: seen.append(routing))
    with forced_choices(model, [forced]):
        model(tokens)
    (routing,) = seen
    assert torch.equal(routing.expert_BTk, forced)
    wanted = routing.score_BTE[..., [0, 3]]
    assert distance(routing.weight_BTk, wanted / wanted.sum(-1, keepdim=True)) < 1e-6


def test_forced_choices_bring_rounded_models_together():
    config = sparse(num_hidden_layers=4, moe={"num_experts": 16, "num_experts_per_tok": 4})
    model, tokens = built(config), ids(config, 4, 32)
    rounded = built(config, dtype=torch.bfloat16)
    with recorded_choices(model) as choices:
        exact = model(tokens).value
    with recorded_choices(rounded) as own:
        free = distance(rounded(tokens).value, exact)
    assert any(not torch.equal(a, b) for a, b in zip(choices, own, strict=True))
    with forced_choices(rounded, choices):
        assert distance(rounded(tokens).value, exact) < free


def test_choices_that_do_not_fit_are_refused():
    config = sparse()
    model, tokens = built(config), ids(config, 2, 7)
    with recorded_choices(model) as choices:
        model(tokens)
    with pytest.raises(UserError, match="more often than the 1"), forced_choices(model, choices[:1]):
        model(tokens)
    with pytest.raises(UserError, match="1 of 3 forced"), forced_choices(model, [*choices, choices[0]]):
        model(tokens)
    with pytest.raises(UserError, match="shape"), forced_choices(model, choices):
        model(tokens[:1])
    model(tokens)
