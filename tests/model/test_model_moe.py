"""Mixture of experts: the kernels against a naive float64 loop, exact sums under any split, float32 routing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, distance, ids, sparse

from smalti.model.blocks.moe import MoE
from smalti.model.blocks.moe.experts import Experts, slots
from smalti.model.blocks.moe.router import Router, Routing
from smalti.model.blocks.moe.router_stats import router_stats
from smalti.model.decoder import Decoder

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def _naive(weights, activation, x, expert, weight):
    """Token by token and choice by choice, in float64; no sorting, no grouping."""
    gate, up, down = weights
    rows = []
    for token in range(len(x)):
        row = torch.zeros_like(x[token])
        for choice, index in enumerate(expert[token].tolist()):
            inner = up[index] @ x[token]
            inner = activation(inner) if gate is None else activation(gate[index] @ x[token]) * inner
            row = row + weight[token, choice] * (inner @ down[index])
        rows.append(row)
    return torch.stack(rows)


def _with_gradients(run, x, weight, weights, upstream):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    weights = [None if w is None else w.detach().clone().requires_grad_() for w in weights]
    out = run(weights, x, weight)
    leaves = [x, weight, *(w for w in weights if w is not None)]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def _through(module, expert):
    def run(weights, x, weight):
        named = dict(zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True))
        return torch.func.functional_call(
            module, {n: w for n, w in named.items() if w is not None}, (x, expert, weight)
        )

    return run


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples)
@given(
    tokens=st.integers(1, 24),
    experts=st.integers(2, 9),
    data=st.data(),
    gated=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    widths=st.sampled_from([(32, 24), (16, 40), (30, 21), (4, 3)]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kernel=st.sampled_from(["grouped", "grouped", "loop"]),
)
def test_any_kernel_equals_a_naive_loop_in_float64(
    tokens, experts, data, gated, activation, widths, seed, dtype, kernel
):
    top_k = data.draw(st.integers(1, experts))
    used = data.draw(st.integers(top_k, experts))  # experts from ``used`` on get no token; one may get them all
    config = sparse(gated=gated, activation=activation, moe={"num_experts": experts, "num_experts_per_tok": top_k})
    config = config.model_copy(update={"hidden_size": widths[0], "intermediate_size": widths[1]})
    torch.manual_seed(seed)
    module = Experts(config).to(dtype)
    module.kernel = kernel
    x, upstream = torch.randn(2, tokens, widths[0]).to(dtype)
    expert = torch.stack([torch.randperm(used)[:top_k] for _ in range(tokens)])
    weight = torch.rand(tokens, top_k).to(dtype).float() + 0.125
    weights = (module.gate_proj, module.up_proj, module.down_proj)
    found = _with_gradients(_through(module, expert), x, weight, weights, upstream)
    doubles = [None if w is None else w.double() for w in weights]
    act = ACTIVATIONS[activation]
    wanted = _with_gradients(
        lambda ws, x, weight: _naive(ws, act, x, expert, weight), x.double(), weight.double(), doubles, upstream
    )
    for index, (ours, reference) in enumerate(zip(found, wanted, strict=True)):
        assert ours.dtype == (torch.float32 if index == 2 else dtype)
        # The gradient of a choice's weight is a dot product, which may cancel: its rounding is relative to its factors.
        factors = float(upstream.double().norm() * wanted[0].norm()) / tokens**0.5 if index == 2 else 0.0
        size = max(float(reference.norm()), factors)
        assert float((ours.double() - reference).norm()) <= size * (1e-5 if dtype == torch.float32 else 2e-2)
    for gradient in found[3:]:
        assert torch.count_nonzero(gradient[used:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_input_gives_the_same_bits(dtype):
    config = sparse(moe={"num_experts": 6, "num_experts_per_tok": 3})
    torch.manual_seed(3)
    module = Experts(config).to(dtype)
    x, upstream = torch.randn(2, 500, 32).to(dtype)
    expert, weight = torch.rand(500, 6).topk(3).indices, torch.rand(500, 3)
    weights = (module.gate_proj, module.up_proj, module.down_proj)
    first, *others = (_with_gradients(_through(module, expert), x, weight, weights, upstream) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_the_output_has_the_same_bits(dtype):
    layer = MoE(sparse(moe={"num_experts": 6, "num_experts_per_tok": 3})).to(dtype)
    x = torch.randn(2, 50, 32).to(dtype)
    expected = layer(x)[0]
    with torch.no_grad():
        assert torch.equal(layer(x)[0], expected)


def test_slots_are_sorted_by_expert_and_then_in_order_and_end_with_the_last():
    expert = torch.tensor([[4, 1], [1, 0], [4, 0]])
    order, slot, end = slots(expert, 6)
    assert order.tolist() == [3, 5, 1, 2, 0, 4]
    assert end.tolist() == [2, 4, 4, 4, 6, 6]
    assert torch.equal(order[slot], torch.arange(6).view(3, 2))


def test_padded_slots_begin_at_multiples_and_lead_to_the_same_rows():
    expert = torch.tensor([[4, 1], [1, 0], [4, 0]])
    order, slot, end = slots(expert, 6, 4)
    assert end.tolist() == [4, 8, 8, 8, 12, 12]
    assert slot.tolist() == [[8, 4], [5, 0], [9, 1]]
    assert torch.equal(order[slot], torch.arange(6).view(3, 2))
    assert order.tolist() == [3, 5, 0, 0, 1, 2, 0, 0, 0, 4] + [0] * (6 + 6 * 3 - 10)


def test_experts_with_padded_rows_compute_what_the_loop_does():
    """In bfloat16 on a CPU, with many rows; one expert gets no token."""
    config = sparse(moe={"num_experts": 4, "num_experts_per_tok": 2})
    torch.manual_seed(3)
    module = Experts(config).bfloat16()
    x, upstream = torch.randn(2, 300, 32).bfloat16()
    expert, weight = torch.rand(300, 3).topk(2).indices, torch.rand(300, 2)
    weights = (module.gate_proj, module.up_proj, module.down_proj)
    results = []
    for module.kernel in ("grouped", "loop"):
        results.append(_with_gradients(_through(module, expert), x, weight, weights, upstream))
    assert all(distance(a.float(), b.float()) < 2e-2 for a, b in zip(*results, strict=True))
    assert all(torch.count_nonzero(gradient[3:]) == 0 for gradient in results[0][3:])


def test_backward_keeps_gate_up_and_output_of_each_slot_and_no_more():
    config = sparse(moe={"num_experts": 6, "num_experts_per_tok": 2})
    module, kept = Experts(config), {}
    x = torch.randn(100, 32, requires_grad=True)
    expert, weight = torch.rand(100, 6).topk(2).indices, torch.rand(100, 2, requires_grad=True)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x, expert, weight)
    given = sum(t.untyped_storage().nbytes() for t in (x, weight, *module.parameters()))
    indices = 200 * 8 * 2 + 6 * 4
    assert sum(kept.values()) == given + indices + 200 * (2 * 24 + 32) * 4


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


def test_router_of_bfloat16_keeps_no_float32_copy_and_has_the_gradient_of_one():
    router = Router(sparse()).to(torch.bfloat16)
    x = torch.randn(2, 9, 32).to(torch.bfloat16).requires_grad_()
    upstream, kept = torch.randn(2, 9, 6), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits = router(x).logits_BTE
    assert not any(tensor.dtype == torch.float32 and tensor.numel() == x.numel() for tensor in kept)
    ours = torch.autograd.grad(logits, [x, router.weight], upstream)
    doubles = [t.detach().double().requires_grad_() for t in (x, router.weight)]
    wanted = torch.autograd.grad(torch.nn.functional.linear(*doubles), doubles, upstream.double())
    assert all(distance(a, b) < 4e-3 for a, b in zip(ours, wanted, strict=True))


def test_shared_experts_add_an_mlp_of_their_joint_width():
    config = sparse(moe={"num_shared_experts": 2, "routed_scaling_factor": 2.5})
    moe, x = MoE(config), torch.randn(2, 5, 32)
    assert moe.shared_experts.up_proj.weight.shape == (2 * config.expert_width, 32)
    routed = moe.experts(x.flatten(0, 1), *(part.flatten(0, 1) for part in moe.router(x)[2:]))
    assert distance(moe(x)[0], routed.view_as(x) + moe.shared_experts(x)) < 1e-6


@pytest.mark.parametrize("p", [None, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_the_chosen_scores_over_their_norm_times_the_factor(score, p):
    norm = {"norm_topk_prob": False} if p is None else {"norm_topk_p": p}
    config = sparse(moe={"num_experts_per_tok": 3, "score": score, "routed_scaling_factor": 2.5, **norm})
    router, x = Router(config), torch.randn(2, 4, 32)
    routing = router(x)
    logits = torch.nn.functional.linear(x, router.weight)
    scores = logits.softmax(-1) if score == "softmax" else 1 / (1 + torch.exp(-logits))
    best = scores.sort(dim=-1, descending=True).values[..., :3]
    assert (
        distance(routing.weight_BTk, 2.5 * best / (1 if p is None else (best**p).sum(-1, keepdim=True) ** (1 / p)))
        < 1e-5
    )


def test_aux_gradient_does_not_run_through_the_counts():
    config = sparse()
    moe = MoE(config)
    x = torch.randn(1, 6, 32)
    _, stats = moe(x)
    assert not stats.load_LE.requires_grad
    (gradient,) = torch.autograd.grad(stats.balance_sum, moe.router.weight)
    assert gradient.abs().sum() > 0
