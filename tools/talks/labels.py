"""Cost of examples written or judged by people."""

from functools import partial

from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

# fmt: off
_build = partial(Figure, "build", "After-Training Data Cost")
_PRICES: tuple[tuple[Cell, ...], ...] = (
    ("instruction-response pair", _build("pair", 79, "1 instruction-response pair: $30", "$30",
                                         lambda: plan.label_usd("pairs", 27_540), "27,540 x $30", "theirs",
                                         right="$826,200"), "27,540, all of Llama 2's"),
    ("pairwise comparison", _build("comparison", 81, "1 pairwise comparison for RLHF: $8", "$8",
                                   lambda: plan.label_usd("comparisons", 1_000_000), "1M x $8", "theirs",
                                   right="$8,000,000"), "1,000,000, \"over 1 million\" of Llama 2's"),
    ("multi-turn chat conversation", _build("chat", 83, "1 multi-turn chat conversation: $130", "$130",
                                            lambda: plan.label_usd("chats", 27_540), "27,540 x $130", "theirs",
                                            right="$3,580,200"), "27,540"),
)
_dbrx = partial(Figure, "dbrx", "Attempt 3: Compute + Data Cost")
_ALONE = (
    _dbrx("instructions-low", 366, "10K-100K instructions ... Human Annotation O($10-100)", "$10",
          lambda: plan.label_usd("pairs", 10e3, 10), "10,000 x $10", "theirs", "from", "$100,000"),
    _dbrx("instructions-high", 366, "10K-100K instructions ... Human Annotation O($10-100)", "$100",
          lambda: plan.label_usd("pairs", 100e3, 100), "100,000 x $100", "theirs",
          "to; $30 of the other talk lies between", "$10,000,000"),
    _dbrx("preferences-low", 437, "10K-100K preferences ... Human Annotation O($5-20)", "$5",
          lambda: plan.label_usd("comparisons", 10e3, 5), "10,000 x $5", "theirs", "from", "$50,000"),
    _dbrx("preferences-high", 437, "10K-100K preferences ... Human Annotation O($5-20)", "$20",
          lambda: plan.label_usd("comparisons", 100e3, 20), "100,000 x $20", "theirs",
          "to; $8 of the other talk lies between", "$2,000,000"),
    _dbrx("batches", 453, "14 batches ... weekly ... over 1 million", "14 batches", lambda: plan.per(1e6, 14),
          "1,000,000 / 14", "theirs", "comparisons a week", "71,429"),
)
# fmt: on

SECTIONS = (
    Section(
        "Labelling",
        "Cost = examples x price of one. `smalti plan phases` adds it to the compute of four phases "
        "([phases](../concepts/plan/phases.md)).",
        (
            Table(
                "After-Training Data Cost (build, lines 79-83)",
                ("one example", "price (for so many)", "so many"),
                _PRICES,
            ),
        ),
        _ALONE,
    ),
)
