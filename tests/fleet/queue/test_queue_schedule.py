"""Which runs start and which are preempted: examples, and what holds for every queue."""

from hypothesis import given
from hypothesis import strategies as st

from smalti.fleet.queue.schedule import Entry, Room, Schedule, schedule

FOUR = Room(cores=4)


def waiting(number: int, cores: int = 1, priority: int = 50, preemptible: bool = False) -> Entry:
    return Entry(number, "waiting", Room(cores=cores), priority, preemptible)


def running(number: int, cores: int = 1, priority: int = 50, preemptible: bool = False, at: float = 0.0) -> Entry:
    return Entry(number, "running", Room(cores=cores), priority, preemptible, at)


def test_priority_first_then_the_order_of_launch() -> None:
    entries = [waiting(1, priority=10), waiting(2, cores=2), waiting(3, cores=2), waiting(4, priority=90)]
    assert schedule(entries, FOUR) == Schedule(start=(4, 2))


def test_nothing_overtakes_a_run_that_lacks_room() -> None:
    entries = [running(1, cores=2), waiting(2, cores=4), waiting(3), waiting(4, priority=10)]
    assert schedule(entries, FOUR) == Schedule()


def test_a_preemptible_run_of_lower_priority_uses_the_room_that_another_waits_for() -> None:
    entries = [running(1, cores=2), waiting(2, cores=4), waiting(3, priority=10, preemptible=True)]
    assert schedule(entries, FOUR) == Schedule(start=(3,))
    same = [running(1, cores=2), waiting(2, cores=4), waiting(3, preemptible=True)]
    assert schedule(same, FOUR) == Schedule()


def test_the_lowest_priority_is_preempted_first_then_the_last_started() -> None:
    low = [running(n, priority=10, preemptible=True, at=n) for n in (1, 2)]
    entries = [*low, running(3, priority=20, preemptible=True, at=9), running(4), waiting(5, priority=90)]
    assert schedule(entries, FOUR) == Schedule(preempt=(2,))


def test_no_more_are_preempted_than_needed() -> None:
    entries = [
        running(1, priority=10, preemptible=True), running(2, cores=3, priority=20, preemptible=True),
        waiting(3, cores=3, priority=90),
    ]  # fmt: skip
    assert schedule(entries, FOUR) == Schedule(preempt=(2,))


def test_nothing_is_preempted_where_that_would_not_make_the_room() -> None:
    entries = [running(1, cores=3), running(2, priority=10, preemptible=True), waiting(3, cores=4, priority=90)]
    assert schedule(entries, FOUR) == Schedule()


def test_equal_priority_and_runs_that_are_not_preemptible_stay() -> None:
    assert schedule([running(1, cores=4, preemptible=True), waiting(2)], FOUR) == Schedule()
    assert schedule([running(1, cores=4, priority=10), waiting(2)], FOUR) == Schedule()


def test_room_that_is_coming_is_waited_for_and_not_given_away() -> None:
    leaving = Entry(1, "leaving", Room(cores=3), 10, True)
    entries = [leaving, waiting(2, cores=4, priority=90), waiting(3, priority=10, preemptible=True)]
    assert schedule(entries, FOUR) == Schedule()


def test_a_run_larger_than_the_machine_holds_up_no_other() -> None:
    assert schedule([waiting(1, cores=5, priority=90), waiting(2)], FOUR) == Schedule(start=(2,))


def test_cores_and_gpus_are_counted_apart() -> None:
    gpu = Entry(1, "waiting", Room(gpus=2), 50, False)
    assert schedule([gpu, waiting(2, cores=4)], Room(4, 2)).start == (1, 2)
    assert schedule([gpu, waiting(2, cores=4)], Room(4, 1)).start == (2,)


rooms = st.builds(Room, st.integers(0, 4), st.integers(0, 2))
entries_of_queues = st.lists(
    st.builds(
        Entry, st.integers(), st.sampled_from(["waiting", "running", "leaving"]), rooms,
        st.sampled_from([10, 50, 90]), st.booleans(), st.floats(0, 9),
    ),
    max_size=9, unique_by=lambda entry: entry.number,
)  # fmt: skip


@given(entries_of_queues, st.builds(Room, st.integers(0, 8), st.integers(0, 4)))
def test_every_queue(entries: list[Entry], room: Room) -> None:
    planned = schedule(entries, room)
    by_number = {entry.number: entry for entry in entries}
    assert len({*planned.start, *planned.preempt}) == len(planned.start) + len(planned.preempt)
    used = sum((entry.need for entry in entries if entry.phase != "waiting"), Room())
    if room.holds(used):  # what starts fits beside what runs
        assert room.holds(used + sum((by_number[number].need for number in planned.start), Room()))
    assert all(by_number[number].phase == "waiting" for number in planned.start)
    fits = [entry for entry in entries if entry.phase == "waiting" and room.holds(entry.need)]
    left = [entry for entry in fits if entry.number not in planned.start]
    for number in planned.preempt:
        victim = by_number[number]
        assert victim.phase == "running"
        assert victim.preemptible
        assert any(entry.priority > victim.priority for entry in left)
    for number in planned.start:  # what overtakes can be preempted by whom it overtook
        started = by_number[number]
        for passed in left:
            before = (-passed.priority, passed.number) < (-started.priority, started.number)
            if before:
                assert started.preemptible
    if not any(entry.phase != "waiting" for entry in entries) and fits:
        assert planned.start, "an empty machine is idle"


@given(entries_of_queues, st.builds(Room, st.integers(0, 8), st.integers(0, 4)))
def test_every_queue_is_emptied(entries: list[Entry], room: Room) -> None:
    """Preempted runs leave, and what runs ends by itself: in the end only what is larger than the machine waits."""
    state = {entry.number: entry for entry in entries}
    for _ in range(3 * len(entries) + 3):
        planned = schedule(state.values(), room)
        for number in planned.start:
            state[number] = Entry(number, "running", state[number].need, state[number].priority, True)
        for number in planned.preempt:
            state[number] = Entry(number, "waiting", state[number].need, state[number].priority, True)
        if not planned.start and not planned.preempt:
            active = [number for number, entry in state.items() if entry.phase != "waiting"]
            if not active:
                break
            del state[active[0]]
    assert not any(room.holds(entry.need) for entry in state.values())
