"""The state of a stream: small, bound to what was read; a changed past is refused, a changed future unless forked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_tokens import write_source

from smalti.base.errors import UserError
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.stream.state import future_digest
from smalti.data.stream.stream import Stream

ROWS, STEPS, SEQ_LEN = 11, 12, 16
STAGES: list[dict[str, Any]] = [
    {"until": "6step", "weights": {"code": 0.5, "prose": 0.5}},
    {"weights": {"code": 0.8, "prose": 0.1, "math": 0.1}},
]
SOURCES = {"code": 30, "prose": 60, "math": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("sources"))


def _written(root: Path, **other_seeds: int) -> Path:
    for seed, (name, n_documents) in enumerate(SOURCES.items()):
        write_source(root / name, n_documents, seed=other_seeds.get(name, seed), file_tokens=700)
    return root


def _stream(root: Path, *, length: RunLength | None = None, rank: int = 0, world: int = 1, **changes: Any) -> Stream:
    seed = changes.pop("seed", 17)
    stages = changes.pop("stages", STAGES)
    past = [stage for entry in changes.get("history", []) for stage in entry["stages"]]
    names = sorted({name for stage in [*stages, *past] for name in stage["weights"]})
    sources = {name: str(root / name) for name in names}
    data = DataConfig(**{"sources": sources, "seq_len": SEQ_LEN, "stages": stages, **changes})
    length = length or RunLength(STEPS, ((0, ROWS * SEQ_LEN),))
    return Stream(data, seed=seed, length=length, rank=rank, world_size=world, microbatch_tokens=64)


def _saved(root: Path, step: int, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(_stream(root, **changes).state(step)))
    return found


def test_it_is_small_json_and_accepted_on_any_ranks(root: Path) -> None:
    for step in (1, 6, STEPS):
        state = _saved(root, step)
        assert len(json.dumps(state)) < 1000
        _stream(root, rank=2, world=5).check(state, step)


def test_it_stays_small_with_many_sources_and_stages(tmp_path: Path) -> None:
    names = [f"a-source-with-quite-a-long-name-{i:02d}" for i in range(40)]
    for name in names:
        write_source(tmp_path / name, 3)
    stages = [{"until": f"{i + 1}step", "weights": dict.fromkeys(names, i + 1.0)} for i in range(11)]
    length = RunLength(STEPS, ((0, 80 * SEQ_LEN),))
    stream = _stream(tmp_path, stages=[*stages, {"weights": {names[0]: 1}}], length=length)
    state = stream.state(12)
    assert len(json.dumps(state)) < 1000
    stream.check(state, 12)
    with pytest.raises(UserError, match=r"at least one source .*too long to be saved"):
        stream.check({**state, "data": "0" * 32}, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 18}, "seed: 17 -> 18"),
        ({"mask_documents": False}, r"data\.mask_documents: True -> False"),
        ({"seq_len": 11, "length": RunLength(STEPS, ((0, 121),))}, "from step 0 on: weights, batch or seq_len"),
        ({"length": RunLength(STEPS, ((0, 160),))}, "from step 0 on"),
        ({"stages": [STAGES[1]]}, r"from step 0 on: weights, batch or seq_len \(now data.stages\[0\]\)"),
        ({"stages": [{"weights": {"code": 1, "prose": 1}}, ]}, None),
        ({"skip": [[40, 50]]}, "data.skip"),
    ],
)  # fmt: skip
def test_a_changed_past_is_always_an_error(root: Path, changes: dict[str, Any], message: str | None) -> None:
    state = _saved(root, 6)
    if message is None:  # the first six steps are the same: only their future differs
        with pytest.raises(UserError, match="have changed since this run was saved") as caught:
            _stream(root, **changes).check(state, 6)
        assert "source 'math': removed since it was saved" in str(caught.value)
        return
    with pytest.raises(UserError, match="were trained on other data") as caught:
        _stream(root, **changes).check(state, 6)
    text = str(caught.value)
    assert message.replace("\\", "") in text
    assert "--fork" in (caught.value.allowed or "")
    assert "init_from" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": [STAGES[0], {"weights": {"code": 0.7, "prose": 0.2, "math": 0.1}}]},
        {"stages": [{**STAGES[0], "until": "8step"}, STAGES[1]]},
        {"stages": [STAGES[0], {**STAGES[1], "seq_len": 8}]},
        {"skip": [[11 * 7, 11 * 8]]},
    ],
)
def test_a_changed_schedule_is_refused_with_the_hint(root: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="have changed since this run was saved") as caught:
        _stream(root, **changes).check(_saved(root, 4), 4)
    assert "--fork" in (caught.value.hint or "")


def test_a_source_may_change_before_it_is_read_but_only_with_a_fork(root: Path, tmp_path: Path) -> None:
    other = _written(tmp_path, math=100)
    with pytest.raises(UserError, match="have changed since this run was saved") as caught:
        _stream(other).check(_saved(root, 5), 5)
    assert "content of source 'math'" in str(caught.value)
    past = {
        "at_step": 5, "digest": future_digest(_saved(root, 5)), "duration": "12step", "global_batch_tokens": 176,
        "seq_len": SEQ_LEN, "stages": STAGES, "lr": 1.0,
    }  # fmt: skip
    _stream(other, history=[past]).check(_saved(root, 5), 5)
    with pytest.raises(UserError, match="were trained on other data"):
        _stream(other).check(_saved(root, 8), 8)


def test_a_changed_source_that_was_read_is_named(root: Path, tmp_path: Path) -> None:
    other = _written(tmp_path, prose=100)
    with pytest.raises(UserError, match="were trained on other data") as caught:
        _stream(other).check(_saved(root, 1), 1)
    assert "content of source 'prose'" in str(caught.value)
    assert "'code'" not in str(caught.value)


def test_an_eod_id_of_the_config_is_part_of_the_past(tmp_path: Path) -> None:
    """Masks and positions of rows that were learned depend on it, and no digest of the files does."""
    (tmp_path / "code").mkdir()
    np.save(tmp_path / "code/a.npy", np.arange(5_000, dtype=np.uint16) % 97)

    def made(**options: int) -> Stream:
        data = DataConfig(
            sources={"code": {"path": str(tmp_path / "code"), **options}}, seq_len=SEQ_LEN,
            stages=[{"weights": {"code": 1}}],
        )  # fmt: skip
        return Stream(data, seed=17, length=RunLength(STEPS, ((0, ROWS * SEQ_LEN),)), microbatch_tokens=64)

    made(eod_id=5).check(made(eod_id=5).state(4), 4)
    for before, now, line in (({"eod_id": 5}, {"eod_id": 6}, "5 -> 6"), ({}, {"eod_id": 6}, "None -> 6"),
                              ({"eod_id": 5}, {}, "5 -> None")):  # fmt: skip
        with pytest.raises(UserError, match=f"were trained on other data(?s:.*)eod_id of data.sources: {line}"):
            made(**now).check(made(**before).state(4), 4)


def test_the_same_data_may_be_in_another_folder(root: Path, tmp_path: Path) -> None:
    _stream(_written(tmp_path)).check(_saved(root, 8), 8)


def test_a_longer_run_with_the_same_stages_is_the_same_stream(root: Path) -> None:
    stages = [{"until": "6step", "weights": {"code": 1}}, {"weights": {"prose": 1}}]
    short, longer = (
        _stream(root, stages=stages, length=RunLength(n, ((0, ROWS * SEQ_LEN),))) for n in (STEPS, 2 * STEPS)
    )
    longer.check(short.state(STEPS), STEPS)
    assert short.order_hash(0, STEPS) == longer.order_hash(0, STEPS)


def test_the_past_of_a_forked_stream_is_that_of_the_former(root: Path) -> None:
    """Another mixture, batch and sequence length from step 5 on, twice; a source that was not there before."""
    first = _stream(root, stages=[STAGES[0], {"weights": {"code": 1}}])
    past = {
        "at_step": 5, "digest": future_digest(first.state(5)), "duration": "12step", "global_batch_tokens": 176,
        "seq_len": SEQ_LEN, "stages": [STAGES[0], {"weights": {"code": 1}}], "lr": 1.0,
    }  # fmt: skip
    length = RunLength(STEPS, ((0, 176), (5, 160)))
    second = _stream(root, stages=[{"weights": {"math": 1, "code": 3}}], seq_len=8, length=length, history=[past])
    second.check(first.state(5), 5)
    assert second.order_hash(0, 5) == first.order_hash(0, 5)
    assert second.batch(5)[0].inputs.shape[1] == 8
    later = {**past, "at_step": 8, "digest": future_digest(second.state(8)), "global_batch_tokens": 160, "seq_len": 8,
             "stages": [{"weights": {"math": 1, "code": 3}}]}  # fmt: skip
    third = _stream(root, stages=[{"weights": {"prose": 1}}], length=RunLength(20, ((0, 176), (5, 160), (8, 320))),
                    history=[past, later])  # fmt: skip
    third.check(second.state(8), 8)
    third.check(first.state(5), 5)
    assert third.order_hash(0, 8) == second.order_hash(0, 8)
    with pytest.raises(UserError, match="were trained on other data"):
        third.check(first.state(6), 6)
    assert third.state(9)["history"] == [5, 8]
    assert len(json.dumps(third.state(9))) < 1000


def test_a_state_of_another_format_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match="format 1"):
        _stream(root).check({**_saved(root, 3), "format": 1}, 3)
