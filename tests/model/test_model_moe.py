"""Mixture of experts: the grouped kernel against the loop, exact sums under any split, float32 routing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, distance, ids, sparse

from smalti.base.errors import UserError
from smalti.model.blocks.moe import MoE
from smalti.model.blocks.moe.balance import router_stats
from smalti.model.blocks.moe.experts import Experts
from smalti.model.blocks.moe.router import Router, Routing
from smalti.model.decoder import Decoder


def _experts(config, dtype) -> Experts:
    torch.manual_seed(3)
    return Experts(config).to(dtype)


def _run(experts: Experts, kernel: str, x, expert, weight):
    experts.kernel = kernel
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = experts(x, expert, weight)
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, weight, *experts.parameters()], wanted)]


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(2, 9),
    data=st.data(),
    gated=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_equals_loop_also_with_empty_experts(tokens, experts, data, gated, seed, dtype):
    top_k = data.draw(st.integers(1, experts))
    used = data.draw(st.integers(top_k, experts))  # experts from ``used`` on get no token
    config = sparse(gated=gated, moe={"num_experts": experts, "num_experts_per_tok": top_k})
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, config.hidden_size, generator=random).to(dtype)
    expert = torch.stack([torch.randperm(used, generator=random)[:top_k] for _ in range(tokens)])
    weight = torch.rand(tokens, top_k, generator=random) + 0.1
    module = _experts(config, dtype)
    grouped, loop = _run(module, "grouped", x, expert, weight), _run(module, "loop", x, expert, weight)
    for index, (ours, reference) in enumerate(zip(grouped, loop, strict=True)):
        assert ours.dtype == reference.dtype
        # The gradient of a weight is a dot product, which may cancel: its rounding is relative to its factors.
        factors = 0.5 * config.hidden_size**0.5 * float(grouped[0].detach().norm()) if index == 2 else 0.0
        size = max(float(reference.detach().norm()), factors)
        difference = (ours.double() - reference.double()).detach()
        assert float(difference.norm()) <= size * (1e-5 if dtype == torch.float32 else 3e-2)
    for gradient in grouped[3:]:
        assert torch.count_nonzero(gradient[used:]) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_whole_models_with_either_kernel_agree(tied):
    losses = []
    for kernel in ("grouped", "loop"):
        config = sparse(tie_word_embeddings=tied, moe={"kernel": kernel})
        model = built(config)
        output = model(ids(config, 2, 17))
        (output.value.logsumexp(-1).sum() + output.router.balance_sum + output.router.z_sum).backward()
        losses.append([output.value, *output.router, *(p.grad for p in model.parameters())])
    assert all(distance(a, b) < 1e-5 for a, b in zip(*losses, strict=True))


def _sums(model: Decoder, tokens, positions, documents, mask):
    output = model(tokens, positions, documents, mask_BT=mask)
    return output.router, list(
        torch.autograd.grad(output.router[0] + 0.1 * output.router[1], list(model.parameters())[:-1], allow_unused=True)
    )


@pytest.mark.proof
@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cuts=st.sets(st.integers(1, 5)), seed=st.integers(0, 1000), padded=st.booleans())
def test_any_split_of_a_batch_adds_up_to_the_same_sums_and_gradients(cuts, seed, padded):
    config = sparse()
    model, tokens = built(config, seed), ids(config, 6, 11, seed)
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 11, generator=random) > 0.3
    mask[1] = False  # a row that does not count at all
    documents = (torch.rand(6, 11, generator=random) > 0.8).cumsum(1)
    rows = (tokens, torch.arange(11).expand(6, -1), documents, mask)
    whole, whole_gradients = _sums(model, *rows)
    spans = list(itertools.pairwise([0, *sorted(cuts), 6]))
    parts = [_sums(model, *(tensor[a:b] for tensor in rows)) for a, b in spans]
    if padded:  # the microbatch of a rank that is short of rows
        parts.append(_sums(model, *(tensor[:1] for tensor in rows[:3]), torch.zeros(1, 11, dtype=torch.bool)))
    for index in range(3):
        assert distance(sum(stats[index] for stats, _ in parts), whole[index]) < 1e-5
    for index, gradient in enumerate(whole_gradients):
        if gradient is not None:
            assert distance(sum(gradients[index] for _, gradients in parts), gradient) < 1e-5
    assert int(whole.load_LE.sum()) == int(mask.sum()) * 2 * config.num_hidden_layers


def test_sums_by_hand():
    logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    probability = logits.softmax(-1)
    chosen = probability.topk(2, dim=-1).indices
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    stats = router_stats(Routing(logits, probability, chosen, None), mask)
    balance = z = 0.0
    load = [0] * 4
    for row, length in ((0, 3), (1, 5)):
        for expert in range(4):
            slots = int((chosen[row, :length] == expert).sum())
            load[expert] += slots
            balance += length * 4 * (slots / (length * 2)) * float(probability[row, :length, expert].mean())
        z += float((logits[row, :length].exp().sum(-1).log() ** 2).sum())
    assert float(stats.balance_sum) == pytest.approx(balance, rel=1e-5)
    assert float(stats.z_sum) == pytest.approx(z, rel=1e-5)
    assert stats.load_LE.tolist() == load
    assert (
        distance(
            router_stats(Routing(logits, probability, chosen, None), torch.ones(2, 5, dtype=torch.bool)).balance_sum,
            router_stats(Routing(logits, probability, chosen, None), None).balance_sum,
        )
        < 1e-6
    )


def test_perfect_balance_gives_one_per_token():
    probability = torch.full((1, 8, 4), 0.25)
    chosen = torch.arange(8).remainder(4)[None, :, None]
    assert float(
        router_stats(Routing(probability.log(), probability, chosen, None), None).balance_sum
    ) == pytest.approx(8)


def test_router_works_in_float32_under_bfloat16_weights():
    router = Router(sparse()).to(torch.bfloat16)
    x = torch.randn(1, 3, 32).to(torch.bfloat16)
    logits = router(x).logits_BTE
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.nn.functional.linear(x.float(), router.weight.float()))
    logits.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == torch.bfloat16


def test_aux_gradient_does_not_run_through_the_counts():
    config = sparse()
    moe = MoE(config)
    x = torch.randn(1, 6, 32)
    _, stats = moe(x)
    assert not stats.load_LE.requires_grad
    (gradient,) = torch.autograd.grad(stats.balance_sum, moe.router.weight)
    assert gradient.abs().sum() > 0


def test_odd_width_is_refused_for_the_grouped_kernel_only():
    with pytest.raises(UserError, match="intermediate_size=20"):
        MoE(sparse().model_copy(update={"intermediate_size": 20}))
    MoE(sparse(moe={"kernel": "loop"}).model_copy(update={"intermediate_size": 20}))
