"""Windows that share their beginning are computed in one row, and get the scores that each has alone."""

import numpy as np
import pytest
import torch
from tiny_models import UniformModel, family_config, llama_config, tiny_model

from smalti.config.model import ModelConfig, RopeScalingConfig
from smalti.evals.likelihood import Window, score_greedy
from smalti.evals.prefixes import Row, can_branch, pack, rows_of

PREFIX = list(range(40, 60))


def window(*ends: int, first: int | None = None, prefix: list[int] = PREFIX) -> Window:
    return Window(np.array(prefix + list(ends), dtype=np.int64), first or len(prefix))


WINDOWS = [
    *(window(1, 2, 3), window(1, 4), window(5, 6, 7, 8, first=3), window(9), window(10)),
    window(7, 7, prefix=list(range(70, 85))),
    *(window(1, prefix=[3]), window(1, 2, prefix=[3])),
    window(3, 2, 1, prefix=PREFIX[:18]),
]


@pytest.mark.parametrize("family", ["llama", "dbrx", "mpt", "mistral", "gemma2"])
def test_scores_are_those_of_each_window_alone(family: str) -> None:
    config = llama_config() if family == "gemma2" else family_config(family)
    if family == "gemma2":  # its scores have a soft cap
        config = config.model_copy(update={"attn_logit_softcapping": 5.0})
    model = tiny_model(config)
    together = score_greedy(model, WINDOWS)
    for number, one in enumerate(WINDOWS):
        alone = score_greedy(model, [one])
        assert together.nats[number] == pytest.approx(alone.nats[0], abs=1e-5)
        assert together.n_tokens[number] == alone.n_tokens[0]
        assert together.greedy[number] == alone.greedy[0]


def test_rows_hold_what_shares_at_least_half() -> None:
    rows = rows_of(WINDOWS, branches=True)
    assert [row.numbers for row in rows] == [[0, 1, 2, 3, 4], [5], [6, 7], [8]]
    assert [(row.n_shared, row.width, row.is_plain) for row in rows] == [
        (20, 26, False),
        (16, 16, True),
        (1, 2, True),
        (20, 20, True),
    ]
    assert [row.numbers for row in rows_of(WINDOWS, branches=False)] == [[0], [1], [2], [3, 4], [5], [6], [7], [8]]


def test_a_row_is_at_most_twice_its_longest_window() -> None:
    rows = rows_of([window(*range(n, n + 10)) for n in range(30)], branches=True)
    assert sum(len(row.numbers) for row in rows) == 30
    assert max(row.width for row in rows) <= 2 * 29


def test_the_layout_of_a_row() -> None:
    windows = [window(1, 2, 3, prefix=[8, 9]), window(1, 4, prefix=[8, 9], first=1)]
    (row,) = rows_of(windows, branches=True)
    assert row == Row(3, 4, 4, [0, 1])
    windows.append(window(5, 4, prefix=[8, 9]))
    (row,) = rows_of(windows, branches=True)
    batch = pack(windows, [row])
    assert batch.ids_RT.tolist() == [[8, 9, 1, 2, 1, 5]]
    assert batch.positions_RT.tolist() == [[0, 1, 2, 3, 2, 2]]
    assert batch.parts_RT.tolist() == [[0, 0, 1, 1, 2, 3]]
    assert batch.column_N.tolist() == [1, 2, 3, 0, 1, 4, 1, 5]


def test_models_that_cannot_branch() -> None:
    def with_scaling(config: ModelConfig, kind: str) -> ModelConfig:
        return config.model_copy(update={"rope_scaling": RopeScalingConfig(rope_type=kind, factor=2.0)})

    model = tiny_model(llama_config())
    assert can_branch(model)
    assert can_branch(tiny_model(with_scaling(llama_config(), "linear")))
    assert not can_branch(tiny_model(with_scaling(llama_config(), "dynamic")))
    assert not can_branch(UniformModel())
    uniform = score_greedy(UniformModel(), WINDOWS).nats
    assert uniform == pytest.approx(np.log(257) * score_greedy(model, WINDOWS).n_tokens, rel=1e-5)
    model.hooks = type(model.hooks)(positions_of=lambda time, device: torch.arange(time, device=device)[None])
    assert not can_branch(model)
