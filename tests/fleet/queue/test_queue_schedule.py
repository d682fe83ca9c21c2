"""Which runs start, where, and which are preempted: examples, and what holds for every queue."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from smalti.fleet.queue import schedule as scheduling
from smalti.fleet.queue.schedule import Entry, Room, Schedule

FOUR = Room(cores=4)


def plan(start: tuple[int, ...] = (), preempt: tuple[int, ...] = ()) -> Schedule:
    """What to do on one machine."""
    return Schedule(dict.fromkeys(start, ""), preempt)


def schedule(entries: Iterable[Entry], room: Room) -> Schedule:
    """The schedule of one machine."""
    return scheduling.schedule(entries, {"": room})


def waiting(number: int, cores: int = 1, priority: int = 50, preemptible: bool = False) -> Entry:
    return Entry(number, "waiting", Room(cores=cores), priority, preemptible)


def running(number: int, cores: int = 1, priority: int = 50, preemptible: bool = False, at: float = 0.0) -> Entry:
    return Entry(number, "running", Room(cores=cores), priority, preemptible, at)


def test_priority_first_then_the_order_of_launch() -> None:
    entries = [waiting(1, priority=10), waiting(2, cores=2), waiting(3, cores=2), waiting(4, priority=90)]
    assert schedule(entries, FOUR) == plan(start=(4, 2))


def test_nothing_overtakes_a_run_that_lacks_room() -> None:
    entries = [running(1, cores=2), waiting(2, cores=4), waiting(3), waiting(4, priority=10)]
    assert schedule(entries, FOUR) == plan()


def test_a_preemptible_run_of_lower_priority_uses_the_room_that_another_waits_for() -> None:
    entries = [running(1, cores=2), waiting(2, cores=4), waiting(3, priority=10, preemptible=True)]
    assert schedule(entries, FOUR) == plan(start=(3,))
    same = [running(1, cores=2), waiting(2, cores=4), waiting(3, preemptible=True)]
    assert schedule(same, FOUR) == plan()


def test_the_lowest_priority_is_preempted_first_then_the_last_started() -> None:
    low = [running(n, priority=10, preemptible=True, at=n) for n in (1, 2)]
    entries = [*low, running(3, priority=20, preemptible=True, at=9), running(4), waiting(5, priority=90)]
    assert schedule(entries, FOUR) == plan(preempt=(2,))


def test_no_more_are_preempted_than_needed() -> None:
    entries = [
        running(1, priority=10, preemptible=True), running(2, cores=3, priority=20, preemptible=True),
        waiting(3, cores=3, priority=90),
    ]  # fmt: skip
    assert schedule(entries, FOUR) == plan(preempt=(2,))


def test_nothing_is_preempted_where_that_would_not_make_the_room() -> None:
    entries = [running(1, cores=3), running(2, priority=10, preemptible=True), waiting(3, cores=4, priority=90)]
    assert schedule(entries, FOUR) == plan()


def test_equal_priority_and_runs_that_are_not_preemptible_stay() -> None:
    assert schedule([running(1, cores=4, preemptible=True), waiting(2)], FOUR) == plan()
    assert schedule([running(1, cores=4, priority=10), waiting(2)], FOUR) == plan()


def test_room_that_is_coming_is_waited_for_and_not_given_away() -> None:
    leaving = Entry(1, "leaving", Room(cores=3), 10, True)
    entries = [leaving, waiting(2, cores=4, priority=90), waiting(3, priority=10, preemptible=True)]
    assert schedule(entries, FOUR) == plan()


def test_a_run_larger_than_the_machine_holds_up_no_other() -> None:
    assert schedule([waiting(1, cores=5, priority=90), waiting(2)], FOUR) == plan(start=(2,))


def test_cores_and_gpus_are_counted_apart() -> None:
    gpu = Entry(1, "waiting", Room(gpus=2), 50, False)
    assert schedule([gpu, waiting(2, cores=4)], Room(4, 2)) == plan(start=(1, 2))
    assert schedule([gpu, waiting(2, cores=4)], Room(4, 1)) == plan(start=(2,))


# ---- several machines -----------------------------------------------------------------------------------------------


HOSTS = ("a", "b", "c")
THREE = dict.fromkeys(HOSTS, FOUR)


def on_hosts(*entries: Entry, rooms: Mapping[str, Room] = THREE) -> Schedule:
    return scheduling.schedule([replace(entry, hosts=HOSTS) for entry in entries], rooms)


def at(host: str, entry: Entry) -> Entry:
    return replace(entry, host=host)


def low(number: int, cores: int = 4, priority: int = 10, at: float = 0.0) -> Entry:
    return running(number, cores, priority=priority, preemptible=True, at=at)


def test_the_machine_with_the_fewest_to_stop_is_chosen_then_the_lowest_priority_then_the_last_start() -> None:
    urgent = waiting(9, cores=4, priority=90)
    busy = [at("a", low(1, 2)), at("a", low(2, 2)), at("b", low(3, at=1.0)), at("c", low(4, at=2.0))]
    assert on_hosts(*busy, urgent) == Schedule(preempt=(4,))
    assert on_hosts(*busy[:-1], at("c", low(4, priority=20, at=2.0)), urgent) == Schedule(preempt=(3,))
    assert on_hosts(*busy[:2], at("b", running(3, 4)), at("c", running(4, 4)), urgent) == Schedule(preempt=(2, 1))
    assert on_hosts(*busy, waiting(9, cores=2, priority=90)) == Schedule(preempt=(4,)), "the last started of all"


def test_no_run_of_a_machine_is_stopped_where_another_has_room_or_is_to_be_left() -> None:
    urgent = waiting(9, cores=4, priority=90)
    busy = [at("a", low(1)), at("b", low(2))]
    assert on_hosts(*busy, urgent) == Schedule(start={9: "c"})
    leaving = replace(at("c", low(3)), phase="leaving")
    assert on_hosts(*busy, leaving, urgent, waiting(10)) == Schedule(), "room that is coming is not given away"


def test_room_that_is_coming_is_not_given_to_another_cluster() -> None:
    busy = [at(host, low(number)) for number, host in enumerate(HOSTS)]
    both = [waiting(8, 4, priority=90), replace(waiting(9, 4, priority=90), cluster="other")]
    assert on_hosts(*busy, *both) == Schedule(preempt=(2, 1))
    leaving = [replace(entry, phase="leaving") for entry in busy[:1]]
    taken = [at(host, running(number, 4)) for number, host in enumerate(HOSTS) if number]
    assert on_hosts(*leaving, *taken, *both) == Schedule()
    assert on_hosts(*taken, *both).start == {8: "a"}


def test_another_machine_than_that_of_the_attempt_before_is_taken_if_there_is_one() -> None:
    assert on_hosts(at("a", waiting(1))) == Schedule(start={1: "b"})
    assert on_hosts(at("a", waiting(1)), rooms={"a": FOUR}) == Schedule(start={1: "a"})


# ---- every queue ----------------------------------------------------------------------------------------------------


rooms = st.builds(Room, st.integers(0, 4), st.integers(0, 2))
entries_of_queues = st.lists(
    st.builds(
        Entry, st.integers(), st.sampled_from(["waiting", "running", "leaving"]), rooms,
        st.sampled_from([10, 50, 90]), st.booleans(), st.floats(0, 9), host=st.sampled_from(HOSTS),
        hosts=st.just(HOSTS),
    ),
    max_size=9, unique_by=lambda entry: entry.number,
)  # fmt: skip
machines = st.dictionaries(st.sampled_from(HOSTS), st.builds(Room, st.integers(0, 8), st.integers(0, 4)))


def used(entries: Iterable[Entry], host: str) -> Room:
    return sum((entry.need for entry in entries if entry.host == host and entry.phase != "waiting"), Room())


@given(entries_of_queues, machines)
def test_every_queue(entries: list[Entry], rooms: dict[str, Room]) -> None:
    planned = scheduling.schedule(entries, rooms)
    by_number = {entry.number: entry for entry in entries}
    assert len({*planned.start, *planned.preempt}) == len(planned.start) + len(planned.preempt)
    assert all(by_number[number].phase == "waiting" for number in planned.start)
    for host, room in rooms.items():  # what starts fits beside what runs
        started = [by_number[number].need for number, where in planned.start.items() if where == host]
        if room.holds(used(entries, host)):
            assert room.holds(used(entries, host) + sum(started, Room()))
    fits = [entry for entry in entries if entry.phase == "waiting" and any(r.holds(entry.need) for r in rooms.values())]
    left = [entry for entry in fits if entry.number not in planned.start]
    for number in planned.preempt:
        victim = by_number[number]
        assert victim.phase == "running"
        assert victim.preemptible
        assert victim.host in rooms
        assert any(entry.priority > victim.priority for entry in left)
    for number in planned.start:  # what overtakes can be preempted by whom it overtook
        started_entry = by_number[number]
        for passed in left:
            before = (-passed.priority, passed.number) < (-started_entry.priority, started_entry.number)
            if before:
                assert started_entry.preemptible
    if not any(entry.phase != "waiting" for entry in entries) and fits:
        assert planned.start, "an empty machine is idle"


@given(entries_of_queues, machines)
def test_every_queue_is_emptied(entries: list[Entry], rooms: dict[str, Room]) -> None:
    """Preempted runs leave, and what runs ends by itself: in the end only what is larger than a machine waits.

    A run that was asked to stop is a round later gone; meanwhile its room is given to no one else.
    """
    state = {entry.number: entry for entry in entries}
    for _ in range(4 * len(entries) + 4):
        planned = scheduling.schedule(state.values(), rooms)
        for number, host in planned.start.items():
            state[number] = replace(state[number], phase="running", host=host, preemptible=True)
        left = [number for number, entry in state.items() if entry.phase == "leaving"]
        for number in planned.preempt:
            state[number] = replace(state[number], phase="leaving", preemptible=True)
        for number in left:
            state[number] = replace(state[number], phase="waiting", preemptible=True)
        if not planned.start and not planned.preempt and not left:
            active = [number for number, entry in state.items() if entry.phase != "waiting"]
            if not active:
                break
            del state[active[0]]
    assert not any(room.holds(entry.need) for entry in state.values() for room in rooms.values())
