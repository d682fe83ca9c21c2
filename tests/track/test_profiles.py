"""Profiles: parts add up, hidden collectives do not count, the bottleneck, the round trip of the file."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.cli.main import run as smalti
from smalti.config.profile import ProfileConfig
from smalti.track.profiles import (
    HOST,
    NETWORK,
    Operator,
    Part,
    Summary,
    Traffic,
    folder_of,
    joined,
    read,
    split,
    write,
)

_SPANS = st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1])))


@given(_SPANS, _SPANS)
def test_time_is_split_as_by_counting_every_moment(busy: list[tuple[int, int]], sent: list[tuple[int, int]]) -> None:
    window = np.zeros((2, 50), dtype=bool)
    for row, spans in zip(window, (busy, sent), strict=True):
        for begin, end in spans:
            row[max(begin, 0) : max(end, 0)] = True
    network_s, idle_s = split((0, 50), busy, sent)
    assert network_s == (~window[0] & window[1]).sum()
    assert idle_s == (~window[0] & ~window[1]).sum()
    apart = joined(busy, (0, 50))
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(apart))


def made(**parts_s: float) -> Summary:
    """A summary of a window of one second in two steps."""
    parts = tuple(Part(name.replace("_", " "), s, 4) for name, s in parts_s.items())
    traffic = (Traffic("all_gather", "shard", 8, 4096, 0.01),)
    return Summary(10, 11, 0, "cpu", 1.0, parts, (Operator("aten::mm", 0.5, 40),), traffic, None)


def test_the_bottleneck_is_what_is_not_the_models_own_work() -> None:
    result = made(matrix_products=0.6, copies_and_casts=0.25, norms=0.15)
    assert result.bottleneck.name == "copies and casts"
    assert result.gain(result.bottleneck) == pytest.approx(1 / 0.75)
    assert made(matrix_products=0.95, norms=0.05).bottleneck.name == "matrix products"


def test_a_profile_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary(
        **{**made().__dict__, "parts": (Part(NETWORK, 0.7, 0), Part("matrix products", 0.2, 6), Part(HOST, 0.1, 0))}
    )
    folder = folder_of(tmp_path, 10, 11, 0)
    folder.mkdir(parents=True)
    write(folder, summary)
    assert read(tmp_path) == [summary]
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert smalti(["runs", "profile", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "bottleneck: network, not hidden, 70% of the time" in shown
    assert "at most 3.33 times as fast" in shown
    assert "all_gather" in shown
    with pytest.raises(UserError, match="no profile"):
        read(tmp_path / "elsewhere")


@pytest.mark.parametrize("wrong", [{"steps": [5, 4]}, {"steps": [0, 3]}, {"steps": [1, 500]}, {"ranks": "all"}])
def test_windows_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"profile\."):
        ProfileConfig.model_validate(wrong)
    assert ProfileConfig(steps=(3, 4), ranks="all").of_rank(7)
    assert not ProfileConfig(steps=(3, 4)).of_rank(1)
    assert not ProfileConfig().of_rank(0)
