"""What would have helped is computed from the run's own times, and is nothing for a run without a fault."""

from dataclasses import replace

import pytest

from smalti.plan.failures.goodput import goodput_frac
from smalti.plan.failures.hindsight import hindsight, measured_timing
from smalti.track.goodput import BUCKETS, Interruption, Ledger

_FAULT = Interruption(0, 100.0, 5, {}, detect_s=60.0, lost_s=500.0, restart_s=240.0, idle_s=0.0, resumed_step=1,
                      by_itself=True)  # fmt: skip
_SAVES = [{"event": "checkpoint_saved", "step": n, "seconds": 12.0, "blocked_s": 2.0} for n in range(10)]


def _ledger(**seconds: float) -> Ledger:
    """Two ranks; ``seconds`` are of the job."""
    by_bucket = dict.fromkeys(BUCKETS, 0.0) | {name: 2 * time_s for name, time_s in seconds.items()}
    return Ledger(0.0, sum(seconds.values()), by_bucket, 2 * sum(seconds.values()), (_FAULT, _FAULT))


_RUN = _ledger(train=8980.0, lost_work=1000.0, checkpoint=20.0, detect=120.0, restart=480.0)


def test_the_times_are_means_of_the_job() -> None:
    timing = measured_timing(_RUN, _SAVES)
    assert timing is not None
    assert (timing.mtbf_s, timing.stall_s, timing.interval_s, timing.upload_s) == pytest.approx((5000, 2, 998, 10))
    (recovery,) = timing.recoveries
    assert (recovery.detect_s, recovery.restart_s) == (60, 240)


def test_changes_are_ordered_by_what_they_save() -> None:
    result = hindsight(_RUN, _SAVES)
    assert result is not None
    assert result.goodput_frac == goodput_frac(result.timing)
    assert [change.words for change in result.changes] == [
        "half as many interruptions",
        "a checkpoint every 2m20s instead of 16m38s",
        "restart in 2m00s, half",
        "detection in 30.0s, half",
    ]
    best = result.changes[0]
    assert best.goodput_frac is not None
    assert best.saved_s == pytest.approx(_RUN.total_s * (1 - result.goodput_frac / best.goodput_frac))


def test_no_change_saves_more_than_the_buckets_it_shortens() -> None:
    run = _ledger(train=100.0, lost_work=1.0, checkpoint=0.1, detect=2.0, restart=10.0, init=500.0)
    result = hindsight(run, [])
    assert result is not None
    most_s = {"detection": 2 * 1.0, "restart": 2 * 5.0, "half as": 13.0, "a checkpoint": 2 * 1.1}
    assert len(result.changes) > 2
    for change in result.changes:
        (bound_s,) = (seconds for words, seconds in most_s.items() if change.words.startswith(words))
        assert 0 < change.saved_s <= bound_s
        assert change.goodput_frac == pytest.approx(result.goodput_frac / (1 - change.saved_s / run.total_s))


def test_nothing_is_said_of_what_was_not_measured() -> None:
    """Saves where there was none, their interval after a recovery from memory, and a restart where none followed."""

    def rows(events: list[dict], ledger: Ledger = _RUN) -> set[str]:
        result = hindsight(ledger, events)
        assert result is not None
        return {change.words.split()[1] for change in result.changes}

    assert "checkpoint" in rows(_SAVES)
    assert "checkpoint" not in rows([])
    assert "checkpoint" not in rows([*_SAVES, {"event": "resumed", "step": 6, "source": "peer memory"}])
    ended = replace(_FAULT, resumed_step=None)
    assert "in" in rows(_SAVES), "restart in ..."
    assert not any(
        change.words.startswith("restart in")
        for change in hindsight(replace(_RUN, interruptions=(ended, ended)), _SAVES).changes  # type: ignore[union-attr]
    )


def test_idle_after_a_fault_would_have_been_saved_whole() -> None:
    run = _ledger(train=8980.0, lost_work=1000.0, checkpoint=20.0, detect=120.0, restart=480.0, idle=7200.0)
    run = replace(run, interruptions=(replace(_FAULT, idle_s=7200.0), _FAULT))
    result = hindsight(run, _SAVES)
    assert result is not None
    assert result.changes[0].saved_s == pytest.approx(2 * 7200)
    assert result.changes[0].goodput_frac is None


def test_a_run_without_a_fault_has_no_hindsight() -> None:
    assert hindsight(replace(_RUN, interruptions=()), _SAVES) is None
    assert hindsight(_ledger(init=5.0), []) is None
