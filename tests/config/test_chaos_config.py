"""The section ``chaos``: which faults it takes, and the mix."""

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from smalti.base.errors import UserError
from smalti.config.chaos import LLAMA_3, ChaosConfig, FaultConfig, _kind
from smalti.config.identity import difference
from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.plan.failures import causes

TREE = {
    "name": "x",
    "train": {"duration": "40step", "global_batch_tokens": 8, "optimizer": {"lr": 1e-3}, "parallel": {"ranks": 2}},
}


def _job(**chaos: Any) -> JobConfig:
    return from_dict(JobConfig, TREE | {"chaos": chaos}).config


def test_every_cause_of_llama_3_has_a_kind_and_its_count() -> None:
    assert [(name, n) for name, n, _ in LLAMA_3] == [(cause.name, cause.n) for cause in causes.LLAMA_3]
    assert sum(n for _, n, _ in LLAMA_3) == causes.UNEXPECTED == 419


def test_kinds_are_drawn_as_often_as_their_causes_were_counted() -> None:
    counted = Counter[str]()
    for _, n, kind in LLAMA_3:
        counted[kind] += n
    assert Counter(_kind(ordinal) for ordinal in range(419)) == counted


def test_a_mix_is_a_function_of_its_seed_with_one_fault_in_each_part_of_the_run() -> None:
    drawn = [ChaosConfig(mix="llama3", seed=seed, count=8).planned(total_steps=400, ranks=4) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    firsts = [fault for fault in drawn[0] if fault.step]
    parts = Counter((fault.step - 1) // 50 for fault in firsts)
    assert sorted(parts) == list(range(8))
    assert {fault.rank for fault in firsts} <= set(range(4))
    assert all(2 <= fault.step <= 400 for fault in firsts)


def test_kinds_and_steps_of_a_mix_are_the_same_on_any_number_of_ranks() -> None:
    mix = ChaosConfig(mix="llama3", seed=3, count=50)
    schedules = {
        ranks: [(fault.kind, fault.step) for fault in mix.planned(total_steps=1000, ranks=ranks)]
        for ranks in (2, 3, 8, 3072)
    }
    assert all(schedule == schedules[2] for schedule in schedules.values())
    alone = [(fault.kind, fault.step) for fault in mix.planned(total_steps=1000, ranks=1)]
    assert alone == [("sigkill" if kind == "deadlock" else kind, step) for kind, step in schedules[2]]


def test_a_mix_of_one_rank_has_no_deadlock() -> None:
    faults = ChaosConfig(mix="llama3", count=200).planned(total_steps=4000, ranks=1)
    assert "deadlock" not in {fault.kind for fault in faults}
    assert "deadlock" in {each.kind for each in ChaosConfig(mix="llama3", count=200).planned(total_steps=4000, ranks=2)}


def test_faults_change_no_identity_and_are_absent_by_default() -> None:
    bare = from_dict(JobConfig, TREE).config
    assert bare.chaos is None
    assert difference(bare, _job(faults=[{"kind": "sigkill", "step": 3}])) == []


@pytest.mark.parametrize(
    ("chaos", "message"),
    [
        ({"faults": [{"kind": "sigkil", "step": 3}]}, "sigkill"),
        ({"faults": [{"kind": "sigkill"}]}, "without a step"),
        ({"faults": [{"kind": "sigkill", "step": 3, "phase": "init"}]}, "no effect with phase=init"),
        ({"faults": [{"kind": "stuck_data", "step": 3, "phase": "eval"}]}, "stuck_data with phase=eval"),
        ({"faults": [{"kind": "sigkill", "step": 3, "duration": "2s"}]}, "duration=2s has no effect on sigkill"),
        ({"faults": [{"kind": "sigkill", "step": 3, "slowdown": 2}]}, "slowdown has no effect"),
        ({"faults": [{"kind": "sigkill", "step": 3, "rank": 2}]}, "of rank 2 of 2"),
        ({"faults": [{"kind": "sigkill", "step": 41}]}, "at step 41 of 40"),
        ({"faults": [{"kind": "sigkill", "step": 4}] * 2}, "twice"),
        ({"seed": 3}, "no effect without chaos.mix"),
        ({"mix": "llama3", "count": 20}, "20 faults in 40 steps"),
    ],
)
def test_what_cannot_happen_is_refused_with_a_hint(chaos: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _job(**chaos)


def test_a_deadlock_needs_two_ranks() -> None:
    tree = TREE | {"train": TREE["train"] | {"parallel": {"ranks": 1}}}  # type: ignore[operator]
    with pytest.raises(UserError, match="in a run of one rank"):
        from_dict(JobConfig, tree | {"chaos": {"faults": [{"kind": "deadlock", "step": 3}]}})


def test_a_label_names_what_where_and_when() -> None:
    assert FaultConfig(kind="sigkill", rank=1, step=20).label == "sigkill of rank 1 at step 20 in forward"
    assert FaultConfig(kind="sigkill", phase="init", attempt=1).label == "sigkill of rank 0 in init of attempt 1"
    with pytest.raises(ValidationError):
        FaultConfig(kind="sigkill", step=0)
