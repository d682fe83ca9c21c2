"""Every kernel of attention against one naive reference in float64, forward and backward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import dense, distance

from smalti.model.blocks.attention import choice, flex, varlen
from smalti.model.blocks.attention.flex import Flex
from smalti.model.blocks.attention.scores import Scores, alibi_slopes, document_runs, scores_of
from smalti.model.blocks.attention.sdpa import dense_rows
from smalti.model.blocks.attention.varlen import Varlen


def reference(query, key, value, config, window, documents):
    """[B, T, H, d]: one query after another, over the keys that it sees, as the words say."""
    batch, heads, time, _ = query.shape
    repeats, scale = heads // key.shape[1], config.attention_multiplier or config.width_per_head**-0.5
    slopes = alibi_slopes(heads).double().tolist() if config.position == "alibi" else [0.0] * heads
    rows = []
    for b in range(batch):
        for t in range(time):
            first = t
            while first > 0 and (documents is None or documents[b, first - 1] == documents[b, t]):
                first -= 1
            first = max(first, t - (window or time) + 1)
            seen = slice(first, t + 1)
            for h in range(heads):
                score = scale * key[b, h // repeats, seen] @ query[b, h, t]
                if config.attn_logit_softcapping is not None:
                    score = config.attn_logit_softcapping * torch.tanh(score / config.attn_logit_softcapping)
                score = score - slopes[h] * torch.arange(t - first, -1, -1, dtype=torch.float64)
                rows.append(score.softmax(0) @ value[b, h // repeats, seen])
    return torch.stack(rows).unflatten(0, (batch, time, heads))


@st.composite
def cases(draw, longest):
    alibi = draw(st.booleans())
    kv_heads, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config = dense(
        num_attention_heads=kv_heads * repeats,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([3, 5, 8] if alibi else [2, 6, 8])),
        position="alibi" if alibi else "rope",
        attention_multiplier=draw(st.sampled_from([None, 0.7])),
        attn_logit_softcapping=draw(st.sampled_from([None, 1.5])),
    )
    batch, time = draw(st.integers(1, 2)), draw(st.integers(1, longest))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    documents = None
    if draw(st.booleans()):
        ends = torch.rand(batch, time, generator=random) < draw(st.sampled_from([0.002, 0.02, 0.2]))
        documents = ends.cumsum(1)
    window = draw(st.sampled_from([None, 1, 3, 17, 130, 2000]))
    n_heads = (kv_heads * repeats, kv_heads, kv_heads)
    inputs = [torch.randn(batch, n, time, config.width_per_head, generator=random) * 2 for n in n_heads]
    return (
        config,
        window,
        documents,
        inputs,
        torch.randn(batch, time, n_heads[0], config.width_per_head, generator=random),
    )


def attend_of(kernel, config, window, documents, inputs, *, backward=True):
    like = torch.empty(inputs[0].shape[0], inputs[0].shape[2], 1, dtype=inputs[0].dtype)
    needs = choice._needs(config, window, like.shape[1], documents is not None, backward)
    kernel = kernel or choice.choose("cpu", like.dtype, needs)
    return choice._build(kernel, needs, like, scores_of(config, like.device), documents)


def both(attend, inputs, wanted):
    """What came out, and the gradients of the inputs."""
    inputs = [part.detach().requires_grad_() for part in inputs]
    mixed = attend(*inputs)
    return mixed, torch.autograd.grad(mixed, inputs, wanted)


def assert_near(ours, exact, limit):
    (mixed, gradients), (exact_mixed, exact_gradients) = ours, exact
    assert distance(mixed, exact_mixed) < limit
    for gradient, wanted in zip(gradients, exact_gradients, strict=True):
        # A softmax over few, nearly equal scores has almost no gradient; rounding is then relative to what came in.
        floor = 0.1 * math.sqrt(wanted.numel())
        assert float((gradient.double() - wanted).norm()) < limit * max(float(wanted.norm()), floor)


@pytest.mark.proof
@settings(max_examples=max(12, settings.default.max_examples // 4))
@given(case=cases(longest=25), kernel=st.sampled_from([None, "spans", "documents", "dense"]))
def test_every_kernel_equals_the_naive_reference(case, kernel):
    config, window, documents, inputs, wanted = case
    kernel = None if kernel == "documents" and documents is None else kernel
    wide = [part.double() for part in inputs]
    exact = both(lambda *parts: reference(*parts, config, window, documents), wide, wanted.double())
    assert_near(both(attend_of(kernel, config, window, documents, inputs), inputs, wanted), exact, 2e-5)
    assert_near(both(attend_of(kernel, config, window, documents, wide), wide, wanted.double()), exact, 1e-6)


@settings(max_examples=20)
@given(case=cases(longest=60))
def test_without_gradients_other_kernels_are_chosen_and_agree(case):
    config, window, documents, inputs, _ = case
    wide = [part.double() for part in inputs]
    with torch.no_grad():
        exact = attend_of("dense", config, window, documents, wide)(*wide)
        ours = attend_of(None, config, window, documents, inputs, backward=False)(*inputs)
    assert distance(ours, exact) < 2e-5


@pytest.mark.slow
@pytest.mark.proof
@settings(max_examples=max(8, settings.default.max_examples // 10))
@given(
    case=cases(longest=700),
    kernel=st.sampled_from([None, "spans", "documents"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_long_rows_in_blocks_equal_all_scores_at_once(case, kernel, dtype):
    config, window, documents, inputs, wanted = case
    kernel = None if kernel == "documents" and documents is None else kernel
    inputs = [(part / 2).to(dtype) for part in inputs]
    wide = [part.double() for part in inputs]
    exact = both(attend_of("dense", config, window, documents, wide), wide, wanted.double())
    ours = both(attend_of(kernel, config, window, documents, inputs), inputs, wanted.to(dtype))
    assert_near(ours, exact, 2e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ends", [(60, 1300, 1310), (1025,), (5, 1100)])
def test_long_documents_take_the_fused_kernel_and_agree(ends):
    config, time = dense(), 1400
    random = torch.Generator().manual_seed(0)
    documents = torch.zeros(1, time, dtype=torch.long)
    for end in ends:
        documents[:, end:] += 1
    inputs = [torch.randn(1, n, time, 8, generator=random) for n in (4, 2, 2)]
    wanted = torch.randn(1, time, 4, 8, generator=random)
    wide = [part.double() for part in inputs]
    exact = both(attend_of("dense", config, None, documents, wide), wide, wanted.double())
    for backward in (True, False):
        attend = attend_of("documents", config, None, documents, inputs, backward=backward)
        assert_near(both(attend, inputs, wanted), exact, 2e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "spans", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_call(kernel, dtype):
    config = dense() if kernel == "sdpa" else dense(position="alibi", attn_logit_softcapping=3.0)
    random = torch.Generator().manual_seed(0)
    documents = None if kernel == "sdpa" else (torch.arange(300) // 70).expand(2, -1)
    inputs = [torch.randn(2, n, 300, 8, generator=random).to(dtype) for n in (4, 2, 2)]
    wanted = torch.randn(2, 300, 4, 8, generator=random).to(dtype)
    first, again = (both(attend_of(kernel, config, None, documents, inputs), inputs, wanted) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.slow
@settings(max_examples=max(3, settings.default.max_examples // 20))
@given(case=cases(longest=200))
def test_flex_without_compiling_agrees_forward(case):
    config, window, documents, inputs, _ = case
    like = torch.empty(inputs[0].shape[0], inputs[0].shape[2], 1)
    scores = scores_of(config, like.device)
    with torch.no_grad():
        flex = Flex(like, window, scores, documents)(*inputs)
        assert distance(flex, dense_rows(like, window, scores, documents)(*inputs)) < 1e-5


@pytest.mark.parametrize("knows_groups", [True, False])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [True, False])
def test_varlen_is_told_documents_window_and_groups(monkeypatch, knows_groups, window, packed):
    """What CUDA runs, with a slow stand-in for torch's function (that of torch 2.11 has no ``enable_gqa``, and takes
    fewer keys than queries as they are)."""

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert enable_gqa or not knows_groups
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert cu_seq_q.dtype == torch.int32
        assert window_size[1] == 0
        assert max(cu_seq_q.diff()) <= max_q == max_k
        reach = window_size[0] if window_size[0] >= 0 else max_q
        parts = []
        for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
            q, k, v = (part[begin:end].transpose(0, 1) for part in (query, key, value))
            sees = torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(-reach)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=True)
            parts.append(mixed.transpose(0, 1))
        return torch.cat(parts)

    def without_groups(*args, scale, window_size):
        return attend(*args, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend if knows_groups else without_groups)
    monkeypatch.setattr("smalti.model.blocks.attention.varlen._grouped", varlen._grouped.__wrapped__)
    config, random = dense(attention_multiplier=0.3), torch.Generator().manual_seed(0)
    documents = (torch.rand(3, 20, generator=random) < 0.2).cumsum(1) if packed else None
    inputs = [torch.randn(3, n, 20, 8, generator=random) for n in (4, 2, 2)]
    like = torch.empty(3, 20, 1)
    dense_kernel = dense_rows(like, window, scores_of(config, like.device), documents)
    assert distance(Varlen(like, window, 0.3, documents)(*inputs), dense_kernel(*inputs)) < 1e-5


def test_alibi_slopes_of_six_heads_are_six_of_those_of_eight():
    assert alibi_slopes(8).log2().tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]
    assert alibi_slopes(6).log2().tolist() == [-2, -4, -6, -8, -1, -3]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 20, 25, 112])
def test_alibi_slopes_are_those_of_transformers(heads):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, 2)  # [H, 1, 2]: minus the slope, and 0
    assert torch.allclose(alibi_slopes(heads), -theirs[:, 0, 0], rtol=1e-7, atol=0)


def test_the_rule_of_choice_on_a_cpu():
    def chosen(dtype=torch.float32, *, tokens=300, documents=False, backward=True, window=None, **changes):
        needs = choice._needs(dense(**changes), window, tokens, documents, backward)
        return choice.choose("cpu", dtype, needs)

    assert chosen() == chosen(torch.bfloat16) == "spans"
    assert chosen(torch.float64) == chosen(tokens=2000) == chosen(backward=False) == "sdpa"
    assert chosen(tokens=2000, window=5000) == "sdpa"
    assert chosen(tokens=2000, window=500) == chosen(tokens=2000, position="alibi") == "spans"
    assert chosen(tokens=2000, attn_logit_softcapping=5.0) == "spans"
    assert chosen(documents=True) == chosen(documents=True, backward=False, tokens=513) == "documents"
    assert chosen(documents=True, backward=False) == "sdpa"
    assert chosen(documents=True, tokens=256) == "spans"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_reason_why_a_kernel_fails_is_returned():
    needs = choice._small_case(choice._needs(dense(), None, 512, True, True))
    assert "varlen" not in choice.kernels_on_this_machine(2048)["cpu bf16"].values()
    assert choice.probe_kernel("documents", "cpu", torch.float32, needs) is None
    assert choice.probe_kernel("varlen", "cpu", torch.float32, needs)
    assert "backward" in str(choice.probe_kernel("flex", "cpu", torch.float32, needs))
    assert choice.probe_kernel("flex", "cpu", torch.float32, needs._replace(backward=False)) is None


def test_a_failing_kernel_is_named_in_one_warning(monkeypatch, caplog):
    problems = {"varlen": "RuntimeError: needs another GPU", "flex": "InductorError: no compiler\nand more lines"}
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    monkeypatch.setattr(choice, "probe_kernel", lambda kernel, *_: problems.get(kernel))
    choice._warn_once.cache_clear()
    packed = choice._needs(dense(), None, 512, True, True)
    assert [choice.choose("cuda", torch.bfloat16, packed) for _ in range(2)] == ["dense", "dense"]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 2
    assert "'varlen' does not run here (RuntimeError: needs another GPU); 'flex' is used instead" in lines[0]
    assert "'flex' does not run here (InductorError: no compiler); 'dense' is used instead" in lines[1]
    del problems["flex"]
    assert choice.choose("cuda", torch.bfloat16, packed) == "flex"
    assert choice.choose("cuda", torch.float32, packed) == "flex"  # varlen has no float32, which is no failure
    assert choice.choose("cuda", torch.float32, packed, probe=False) == "flex"
    assert len(caplog.records) == 2
    choice._warn_once.cache_clear()


def test_names_of_the_kernel_of_each_kind_of_layer():
    config = dense(sliding_window=100, layer_types=("full_attention", "sliding_attention"))
    names = choice.kernel_names(config, torch.device("cpu"), torch.bfloat16, 2000, documents=False)
    assert names == {"full_attention": "sdpa", "sliding_attention": "spans"}
    names = choice.kernel_names(dense(sliding_window=100), torch.device("cpu"), torch.bfloat16, 2000, documents=True)
    assert names == {"sliding_attention": "documents"}


@given(st.integers(1, 4), st.integers(1, 60), st.floats(0, 1), st.integers(0, 1 << 30), st.booleans())
def test_offsets_of_varlen_are_where_documents_begin(batch, time, often, seed, given_number):
    documents = (torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < often).cumsum(1)
    begins = document_runs(documents).flatten().nonzero()[:, 0]
    n_documents = len(begins) if given_number else None
    offsets = Varlen(torch.empty(batch, time, 1), None, 1.0, documents, n_documents).offsets
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [*begins.tolist(), batch * time]


@pytest.mark.slow
def test_a_second_soft_cap_is_not_compiled_again(monkeypatch):
    """A float that is another one in the second model would become a symbol, which no kernel can be made of."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    attend, build = flex._functions(False)
    monkeypatch.setattr(flex, "_functions", lambda _: (torch.compile(attend, backend=keep), build))
    query = torch.randn(1, 2, 16, 16)
    for cap in (30.0, 5.0):
        scores = Scores(0.25, cap, None)
        mixed = Flex(query.new_empty(1, 16, 1), None, scores, None)(query, query, query)
        wanted = dense_rows(query.new_empty(1, 16, 1), None, scores, None)(query, query, query)
        torch.testing.assert_close(mixed, wanted)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("kernel", ["varlen", "flex", "dense", None])
@pytest.mark.parametrize("kind", ["documents", "window", "alibi", "cap", "all"])
def test_the_kernels_of_a_gpu_agree_with_the_reference(kernel, kind):
    simple = kind in ("documents", "window")
    if kernel == "varlen" and not simple:
        pytest.skip("varlen_attn has neither ALiBi nor a soft cap")
    config = dense(
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        position="alibi" if kind in ("alibi", "all") else "rope",
        attn_logit_softcapping=5.0 if kind in ("cap", "all") else None,
    )
    window, random = 50 if kind in ("window", "all") else None, torch.Generator().manual_seed(0)
    documents = (torch.rand(2, 300, generator=random) < 0.02).cumsum(1) if kind in ("documents", "all") else None
    inputs = [torch.randn(2, n, 300, 64, generator=random) for n in (6, 2, 2)]
    wanted, wide = torch.randn(2, 300, 6, 64, generator=random), [part.double() for part in inputs]
    exact = both(attend_of("dense", config, window, documents, wide), wide, wanted.double())
    there = [part.to("cuda", torch.bfloat16) for part in inputs]
    like = torch.empty(2, 300, 1, dtype=torch.bfloat16, device="cuda")
    needs = choice._needs(config, window, 300, documents is not None, True)
    chosen = kernel or choice.choose("cuda", like.dtype, needs)
    assert kernel or chosen == ("varlen" if simple else "flex")
    on_gpu = None if documents is None else documents.cuda()
    attend = choice._build(chosen, needs, like, scores_of(config, like.device), on_gpu)
    mixed, gradients = both(attend, there, wanted.to("cuda", torch.bfloat16))
    assert_near((mixed.cpu(), [gradient.cpu() for gradient in gradients]), exact, 3e-2)
