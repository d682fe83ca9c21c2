"""Mixtures of experts: what 16 experts, 4 of them for each token, hold, cost and can express; what they gained."""

from functools import partial

from smalti.cost.params import count
from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

_DBRX = plan.model("dbrx-132b")


def _all_experts_of_one() -> float:
    """Active MLP parameters of a token that is sent to all 16 experts, over those of one expert."""
    assert _DBRX.moe is not None
    through = [
        count(_DBRX.model_copy(update={"moe": _DBRX.moe.model_copy(update={"num_experts_per_tok": k})})).mlp_active
        for k in (16, 1)
    ]
    return through[0] / through[1]


def _times_more_in(part: str) -> float:
    """Parameters with 16 experts over those with one: of the MLPs, of a layer, of the model."""
    params = plan.params("dbrx-132b")
    expert = params.mlp / 16
    rest = {"mlp": 0.0, "layer": params.attention + params.norm, "model": params.total - params.mlp}[part]
    return (rest + params.mlp) / (rest + expert)


# fmt: off
_gain = partial(Figure, "dbrx", "The Value of Mixture-of-Experts")
_davis = partial(Figure, "roundtable", "Davis Blalock, 00:14:28 to 00:18:01")
_LAYER = "only the feed-forward networks are there 16 times; attention, norms and embeddings are there once"
_ALONE = (
    Figure("dbrx", "What is DBRX?", "dbrx-total", 35, "132B parameters", "132B", lambda: plan.params("dbrx-132b").total,
           "all parameters of the published shape"),
    Figure("dbrx", "What is DBRX?", "dbrx-active", 35, "Behaves like 36B parameters", "36B",
           lambda: plan.params("dbrx-132b").active, "those that a token meets, 4 of 16 experts"),
    _davis("feed-forward-16", 67, "duplicated ... in our case 16 times", "16x", lambda: _times_more_in("mlp"),
           "feed-forward parameters with 16 experts / with one"),
    _davis("model-16", 67, "you have 16 times more parameters", "16x", lambda: _times_more_in("model"),
           "parameters with 16 experts / with one", "wrong", _LAYER, "10.4x"),
    _davis("layer-16", 68, "16 times more parameters in each of your layers", "16x", lambda: _times_more_in("layer"),
           "the same of one layer", "wrong", _LAYER, "11.4x"),
    _davis("work-16", 70, "16 times as much work as only feeding it through one", "16x", _all_experts_of_one,
           "active feed-forward parameters, 16 experts / one"),
    _davis("one-of-16", 71, "only 16 possible ways a token can get processed", "16",
           lambda: plan.choices("dbrx-132b", 1), "1 of 16"),
    _davis("two-of-16", 71, "two out of 16 experts, you have 16 times 15 ways", "16 x 15",
           lambda: plan.choices("dbrx-132b", 2), "2 of 16 = 16 x 15 / 2", "wrong",
           "the order of the two does not matter; the talk says \"n choose k\" just before", "120"),
    _davis("four-of-16", 71, "if you use four ... really expressive combinatorial space", "four",
           lambda: plan.choices("dbrx-132b"), "4 of 16", "theirs", "no number is said", "1,820"),
    Figure("roundtable", "Denny Lee, 00:16:12", "two-of-8", 69, "it's two experts out of eight", "two of eight",
           lambda: plan.choices("mixtral-8x7b"), "2 of 8", "theirs", "65 times fewer than 4 of 16", "28"),
    _gain("moe-compute", 667, "used 1.7x less training compute", "1.7x", lambda: plan.train_flops(13e9, 2e12) / 1.7,
          "6 x 13e9 x 2e12 / 1.7", "theirs", "FLOPs of DBRX Small, from Llama2-13B's 1.56e23", "9.2e22"),
    _gain("moe-smaller", 667, "behaves like a model 2x smaller at inference time", "2x", lambda: plan.per(13e9, 6.6e9),
          "13B / 6.6B active"),
)
_THIRTEEN = _gain("moe-flops", 664, "Llama2-13B 13B 1.7x", "1.7x",
                  lambda: plan.budget("tokens", active_params=6.6e9, flops=plan.train_flops(13e9, 2e12) / 1.7),
                  "6 x 13e9 x 2e12 / 1.7 / (6 x 6.6e9)", "theirs",
                  "tokens that DBRX Small has seen if the 1.7 are of 6ND; not printed", "2.3T")
_GAINS: tuple[tuple[Cell, ...], ...] = (
    ("Llama2-13B", "13B", _THIRTEEN, "43.8%"),
    ("DBRX Small", "6.6B", "1x", "45.5%"),
)
# fmt: on

SECTIONS = (
    Section(
        "Mixtures of experts",
        "A token is sent to k of n experts of a layer: n choose k ways ([experts](../concepts/model/experts.md)).",
        (
            Table(
                "The Value of Mixture-of-Experts (dbrx, lines 663-665)",
                ("arch.", "active params", "relative FLOPs (tokens)", "Gauntlet score"),
                _GAINS,
            ),
        ),
        _ALONE,
    ),
)
