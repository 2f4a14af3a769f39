"""Octavo's own request queues."""

import random
from dataclasses import dataclass
from itertools import permutations, product

import pytest
from fake_packages import fresh_scan
from hypothesis import example, given
from hypothesis import strategies as st

import octavo
from octavo import EngineConfig, PluginChoice
from octavo.assembly import build_engine
from octavo.cli.options import make_config
from octavo.errors import PluginOptionsError
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.selection.select import select
from octavo.testing import RequestQueueSuite


class TestFCFS(RequestQueueSuite):
    queue = "fcfs"


class TestPriority(RequestQueueSuite):
    queue = "priority"


class TestPriorityWithAgeing(RequestQueueSuite):
    queue = "priority"
    options = {"ageing": 4}

    def outranks(self, one, other):
        return one.priority < other.priority and one.arrival < other.arrival + 4 * (other.priority - one.priority)


@dataclass(frozen=True)
class Waiting:
    request_id: str
    arrival: int
    priority: int = 0
    num_tokens: int = 1


def ids(queue):
    return [request.request_id for request in queue]


def queue_of(*requests, ageing=None):
    queue = PriorityQueue(PriorityQueue.Options(ageing=ageing))
    for request in requests:
        queue.add_request(request)
    return queue


# -- fcfs -------------------------------------------------------------------------------------------------------


def test_requests_come_out_in_order_of_arrival():
    queue = FCFSQueue()
    for number in range(3):
        queue.add_request(Waiting(f"r{number}", number))
    assert [queue.pop_request().request_id for _ in range(3)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("returning", [[2, 1, 0], [0, 1, 2], [1, 2, 0]])
def test_preempted_requests_take_back_their_places_whatever_the_order_of_their_return(returning):
    queue = FCFSQueue()
    queue.add_request(Waiting("new", 9))
    for number in returning:
        queue.prepend_request(Waiting(f"r{number}", number))
    assert ids(queue) == ["r0", "r1", "r2", "new"]


def test_with_fcfs_nobody_is_displaced():
    assert not FCFSQueue().displaces(Waiting("a", 0, -5), Waiting("b", 1, 5))


# -- priority: the order ----------------------------------------------------------------------------------------


def test_the_lowest_priority_number_comes_first_then_the_first_to_arrive_then_the_smaller_id():
    requests = [
        Waiting("low", 0, 7),
        Waiting("second", 3),
        Waiting("first", 2),
        Waiting("twin b", 5, 1),
        Waiting("twin a", 5, 1),
        Waiting("urgent", 9, -1),
    ]
    for order in permutations(requests):
        queue = queue_of(*order)
        assert ids(queue) == ["urgent", "first", "second", "twin a", "twin b", "low"]


def test_priorities_may_be_of_any_size():
    priorities = [10**30, -(10**30), 2**63, -(2**63), 0, 10**30 + 1]
    queue = queue_of(*(Waiting(str(priority), 0, priority) for priority in priorities), ageing=3)
    assert [queue.pop_request().priority for _ in priorities] == sorted(priorities)


@pytest.mark.parametrize("ageing", [None, 1, 100])
def test_a_preempted_request_takes_the_place_that_its_priority_and_arrival_give_it(ageing):
    requests = [Waiting(f"r{number}", number, number % 3) for number in range(30)]
    expected = ids(queue_of(*requests, ageing=ageing))
    random.Random(1).shuffle(requests)
    queue = queue_of(*requests[10:], ageing=ageing)
    for request in requests[:10]:
        queue.prepend_request(request)
    assert ids(queue) == expected


def test_looking_changes_nothing_and_popping_gives_what_is_shown():
    queue = queue_of(Waiting("b", 1), Waiting("a", 0), Waiting("c", 2, -1))
    assert bool(queue)
    assert (ids(queue), len(queue), queue.peek_request().request_id) == (["c", "a", "b"], 3, "c")
    assert [queue.pop_request().request_id for _ in range(3)] == ["c", "a", "b"]
    assert not queue


@pytest.mark.parametrize("removed", range(12))
def test_a_request_can_be_removed_from_anywhere(removed):
    requests = [Waiting(f"r{number}", number, number // 4 - 1) for number in range(12)]
    queue = queue_of(*requests)
    queue.remove_request(requests[removed])
    assert list(queue) == [request for request in requests if request is not requests[removed]]


@pytest.mark.parametrize(
    "absent",
    [Waiting("a", 0, -9), Waiting("z", 99, 99), Waiting("between", 3), Waiting("r2", 2)],
    ids=["before all", "behind all", "between two", "the numbers of one that waits"],
)
def test_removing_a_request_that_does_not_wait_is_a_value_error_and_changes_nothing(absent):
    requests = [Waiting(f"r{number}", number) for number in (1, 2, 4)]
    queue = queue_of(*requests)
    with pytest.raises(ValueError, match=f"^the request '{absent.request_id}' does not wait here$"):
        queue.remove_request(absent)
    assert list(queue) == requests


def test_an_empty_queue_raises_an_index_error():
    queue = queue_of(Waiting("a", 0))
    queue.pop_request()
    for method in (queue.peek_request, queue.pop_request):
        with pytest.raises(IndexError):
            method()
    with pytest.raises(ValueError, match="does not wait here"):
        queue.remove_request(Waiting("a", 0))


# -- priority: ageing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "first"), [(99, "urgent"), (100, "old"), (101, "old")])
def test_with_an_ageing_of_100_a_request_passes_a_more_urgent_one_that_arrived_100_later(later, first):
    queue = queue_of(Waiting("urgent", later, 0), Waiting("old", 0, 1), ageing=100)
    assert ids(queue)[0] == first


def passes(one, other, ageing):
    """As docs/scheduling.md has it, for a request that is less urgent by any number."""
    return other.arrival - one.arrival >= ageing * (one.priority - other.priority)


def some_requests(size):
    """Return a strategy for that many requests, often near to each other."""
    numbers = st.tuples(st.integers(-3, 3) | st.integers(), st.integers(0, 40) | st.integers(0))
    drawn = st.lists(numbers, min_size=size, max_size=size, unique_by=lambda pair: pair[1])
    return drawn.map(lambda pairs: [Waiting(f"r{arrival}", arrival, priority) for priority, arrival in pairs])


AGEINGS = st.integers(1, 12) | st.integers(1)


@given(some_requests(2), AGEINGS)
@example([Waiting("urgent", 41, -1), Waiting("old", 20, 2)], 7)
@example([Waiting("urgent", 40, -1), Waiting("old", 20, 2)], 7)
def test_a_request_passes_exactly_those_that_arrived_late_enough(requests, ageing):
    urgent, other = sorted(requests, key=lambda request: request.priority)
    first = queue_of(*requests, ageing=ageing).peek_request()
    if urgent.priority < other.priority:
        assert (first is other) == passes(other, urgent, ageing)
    else:
        assert first.arrival == min(request.arrival for request in requests)


@given(some_requests(6), AGEINGS, st.randoms(use_true_random=False))
def test_the_order_of_two_requests_stays_whatever_comes_and_goes(requests, ageing, rng):
    queue = queue_of(*requests, ageing=ageing)
    place = {request: index for index, request in enumerate(queue)}
    for step in range(20):
        # One that ran comes back, among newcomers that the six know nothing of.
        again = rng.choice(requests)
        queue.remove_request(again)
        queue.add_request(Waiting(f"new{step}", 100 + step, rng.randint(-9, 9)))
        queue.prepend_request(again)
        assert [place[request] for request in queue if request in place] == list(range(6))


# -- priority: displacement -------------------------------------------------------------------------------------


@given(some_requests(5), st.none() | AGEINGS)
def test_displacement_is_a_strict_order_of_which_the_queue_is_one_continuation(requests, ageing):
    queue = queue_of(*requests, ageing=ageing)
    displaced = {pair for pair in product(requests, repeat=2) if queue.displaces(*pair)}
    line = list(queue)
    for one, other in displaced:
        assert one is not other
        assert (other, one) not in displaced
        assert one.priority < other.priority
        assert line.index(one) < line.index(other)
        # Whom the other one displaces, this one does.
        assert {(one, third) for second, third in displaced if second is other} <= displaced


@given(some_requests(2))
def test_without_ageing_a_lower_priority_number_always_displaces(requests):
    one, other = requests
    assert queue_of().displaces(one, other) == (one.priority < other.priority)


@given(some_requests(2), AGEINGS)
@example([Waiting("urgent", 41, -1), Waiting("old", 20, 2)], 7)
@example([Waiting("urgent", 40, -1), Waiting("old", 20, 2)], 7)
def test_with_ageing_a_request_that_is_passed_displaces_nobody_who_passes_it(requests, ageing):
    urgent, other = sorted(requests, key=lambda request: request.priority)
    if urgent.priority < other.priority:
        assert queue_of(ageing=ageing).displaces(urgent, other) == (not passes(other, urgent, ageing))


def test_displaces_may_be_asked_about_anybody_and_changes_nothing():
    queue = queue_of(Waiting("a", 0), Waiting("b", 1))
    assert queue.displaces(Waiting("elsewhere", 7, -1), Waiting("gone", 3, 2))
    assert not queue.displaces(Waiting("gone", 3, 2), Waiting("elsewhere", 7, -1))
    assert ids(queue) == ["a", "b"]


# -- priority: options ------------------------------------------------------------------------------------------

SUBJECT = f"request queue priority (octavo.request_queues:PriorityQueue, from octavo {octavo.__version__})"


def configs_with(written, path):
    """Return the configuration with some options, as TOML has them, written in Python, in a file and as a flag."""
    choice = f'{{ name = "priority", options = {written} }}'
    path.write_text(f"[scheduler]\nrequest_queue = {choice}\n")
    in_file = EngineConfig.from_toml(path)
    in_python = EngineConfig.from_flat(
        request_queue=PluginChoice("priority", dict(in_file.scheduler.request_queue.options))
    )
    return in_python, in_file, make_config(None, {"request_queue": choice})


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("{ ageing = 0 }", f"The option 'ageing' of the {SUBJECT} is 0: input should be greater than or equal to 1."),
        ("{ ageing = -1 }", f"The option 'ageing' of the {SUBJECT} is -1: input should be greater than or equal to 1."),
        ("{ ageing = 1.5 }", f"The option 'ageing' of the {SUBJECT} is 1.5: input should be a valid integer."),
        ("{ ageing = 1.0 }", f"The option 'ageing' of the {SUBJECT} is 1.0: input should be a valid integer."),
        ("{ ageing = true }", f"The option 'ageing' of the {SUBJECT} is True: input should be a valid integer."),
        ('{ ageing = "100" }', f"The option 'ageing' of the {SUBJECT} is '100': input should be a valid integer."),
        (
            "{ aging = 100 }",
            f"The {SUBJECT} does not take the option 'aging'. Did you mean 'ageing'? It takes: ageing.",
        ),
        ("{ x = 100 }", f"The {SUBJECT} does not take the option 'x'. It takes: ageing."),
    ],
)
def test_an_option_that_cannot_be_is_said_however_it_was_written(written, sentence, tmp_path):
    for config in configs_with(written, tmp_path / "octavo.toml"):
        with pytest.raises(PluginOptionsError) as caught:
            select(config, fresh_scan())
        assert str(caught.value) == sentence


def test_ageing_reaches_the_queue_from_python_a_file_and_a_flag_alike(tiny_folder, tmp_path):
    for config in configs_with("{ ageing = 2 }", tmp_path / "octavo.toml"):
        engine = build_engine(config.with_settings(model=str(tiny_folder), num_kv_blocks=20)).engine
        queue = engine.scheduler.waiting
        for request in (Waiting("urgent", 3, 0), Waiting("old", 0, 1)):
            queue.add_request(request)
        assert ids(queue) == ["old", "urgent"]


def test_without_options_nobody_ages(tiny_folder):
    config = EngineConfig.from_flat(model=str(tiny_folder), num_kv_blocks=20, request_queue="priority")
    queue = build_engine(config).engine.scheduler.waiting
    for request in (Waiting("urgent", 10**9, 0), Waiting("old", 0, 1)):
        queue.add_request(request)
    assert ids(queue) == ["urgent", "old"]
