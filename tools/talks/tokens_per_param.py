"""Tokens for each parameter: Chinchilla's 20, and what models were trained with."""

from functools import partial

from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

# fmt: off
_ratio = partial(Figure, "dbrx", "Attempt 2: Lifecycle Compute Cost")
_CUT = "digits cut off, not rounded"
_RATIOS: tuple[Cell, ...] = (
    "TPR ratio",
    _ratio("tpr-chinchilla", 292, "Chinchilla 20", "20", lambda: plan.tokens_per_param(70e9, 1.4e12), "1.4T / 70B"),
    _ratio("tpr-llama2-7b", 292, "Llama2-7B 285", "285", lambda: plan.tokens_per_param(7e9, 2e12), "2T / 7B", "cut",
           _CUT, "285.7"),
    _ratio("tpr-llama2-70b", 292, "Llama2-70B 28.5", "28.5", lambda: plan.tokens_per_param(70e9, 2e12), "2T / 70B",
           "cut", _CUT, "28.57"),
    _ratio("tpr-llama3-8b", 292, "Llama3-8B 1875", "1875", lambda: plan.tokens_per_param(8e9, 15e12), "15T / 8B"),
    _ratio("tpr-llama3-70b", 292, "Llama3-70B 214.2", "214.2", lambda: plan.tokens_per_param(70e9, 15e12),
           "15T / 70B", "cut", _CUT, "214.29"),
)
_said = partial(Figure, "roundtable", "Abhi Venigalla, 00:30:38")
_ALONE = (
    Figure("dbrx", "Attempt 1: Training Compute Cost", "twenty", 258, "Tokens = 20 x Parameters", "20",
           lambda: plan.optimal_tokens_per_param("besiroglu-2024", 5.88e21),
           "the optimum of 5.88e21 FLOPs by the fit of Besiroglu et al. 2024", "about",
           "15.4 to 27.8 with the fit's errors; the ratio moves with the FLOPs", "20.6", within=1),
    Figure("dbrx", "Attempt 1: Training Compute Cost", "twenty-by-first-fit", 258, "Tokens = 20 x Parameters", "20",
           lambda: plan.optimal_tokens_per_param("hoffmann-2022", 5.88e21),
           "the same by the constants of Hoffmann et al. 2022", "theirs", "29.6 to 52.9 with the fit's errors", "39.6"),
    Figure("dbrx", "Attempt 1: Training Compute Cost", "twenty-by-rounded-fit", 258, "Tokens = 20 x Parameters", "20",
           lambda: plan.optimal_tokens_per_param("hoffmann-2022-rounded", 5.88e21),
           "the same by these constants as the paper prints them, rounded", "theirs",
           "the paper's rule of 20 comes from its two other approaches", "59"),
    _said("gpt-3-ratio", 103, "175 billion parameters, only 300 billion tokens", "300B",
          lambda: plan.tokens_per_param(175e9, 300e9), "300B / 175B", "theirs", "tokens per parameter", "1.7"),
    _said("hundred-billion", 104, "100 billion parameter model ... 2 trillion tokens", "2T",
          lambda: plan.chinchilla_tokens(100e9), "20 x 100B"),
    _said("llama-7b-ratio", 105, "only a 7 billion parameter model, but trained for 2 trillion tokens", "2T",
          lambda: plan.tokens_per_param(7e9, 2e12), "2T / 7B", "theirs", "beyond the 100x and 200x said before",
          "285.7"),
    _said("dbrx-ratio", 105, "132 billion total parameters and 12 trillion tokens ... pretty close to 100 x", "100x",
          lambda: plan.tokens_per_param(132e9, 12e12), "12T / 132B", "about",
          "on all parameters; a token meets 36B of them", "90.9x", within=10),
    _said("dbrx-active-ratio", 105, "132 billion total parameters and 12 trillion tokens", "12T",
          lambda: plan.tokens_per_param(36e9, 12e12), "12T / 36B active", "theirs",
          "the figure to hold against Chinchilla's 20", "333"),
    Figure("dbrx", "How to run experiments", "humaneval", 541, "a 7B model on 2T tokens to get signal", "2T",
           lambda: plan.train_flops(7e9, 2e12), "6 x 7e9 x 2e12", "theirs", "what a signal on HumanEval costs",
           "8.4e22 FLOPs"),
)
# fmt: on

SECTIONS = (
    Section(
        "Tokens per parameter",
        "How many tokens a model should see is a question of what is paid for: training alone, or inference too "
        "([scaling laws](../concepts/plan/scaling-laws.md)).",
        (
            Table(
                "Attempt 2: Lifecycle Compute Cost (dbrx, lines 291-292)",
                ("", "Chinchilla", "Llama2-7B", "Llama2-70B", "Llama3-8B", "Llama3-70B"),
                (_RATIOS,),
            ),
        ),
        _ALONE,
    ),
)
