"""Whose request an id means, and what ending one early leaves of it and of others."""

import threading

import pytest

from octavo import EngineConfig, SamplingParams
from octavo.assembly import build_engine
from octavo.core.engine_core import EngineCore
from octavo.core.outputs import RequestOutput
from octavo.engine_thread import EngineThread, Mailbox
from octavo.errors import InvalidRequestError
from octavo.prompts import ParsedPrompt
from octavo.testing.engines import assert_nothing_leaks


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture
def engine_thread(tiny_folder):
    thread = EngineThread(lambda: build_engine(EngineConfig.from_flat(model=str(tiny_folder), num_kv_blocks=200)))
    yield thread
    assert_nothing_leaks(thread.assembly.engine)
    thread.stop()


def test_when_a_request_of_three_choices_is_left_all_three_end_at_once_and_others_go_on(engine_thread):
    engine = engine_thread.assembly.engine
    three = Mailbox([ParsedPrompt(None, [5, 6, 7])], [greedy(400, n=3, seed=1)], wants_updates=True)
    other = Mailbox([ParsedPrompt(None, [8, 9])], [greedy(60)], wants_updates=False)
    engine_thread.submit(three)
    engine_thread.submit(other)
    for _ in range(6):
        three.next_news()
    assert engine_thread.call(engine.stats).running == 4
    engine_thread.close(three)
    stats = engine_thread.call(engine.stats)
    assert (stats.running, stats.waiting, stats.added_requests, stats.ended_requests) == (1, 0, 4, 3)
    output = other.next_news()
    assert isinstance(output, RequestOutput)
    assert len(output.outputs[0].token_ids) == 60
    # The last word on the three is one result, with what they had by then.
    news = three.next_news()
    while not isinstance(news, RequestOutput):
        news = three.next_news()
    assert [choice.finish_reason for choice in news.outputs] == ["abort"] * 3
    assert all(2 <= len(choice.token_ids) < 400 for choice in news.outputs)
    assert three.news.empty()


def test_a_request_that_ends_by_itself_is_not_aborted(make_llm, tiny_folder, monkeypatch):
    aborted = []
    abort_request = EngineCore.abort_request

    def noted(self, request_id):
        aborted.append(request_id)
        return abort_request(self, request_id)

    monkeypatch.setattr(EngineCore, "abort_request", noted)
    llm = make_llm(tiny_folder, num_kv_blocks=100)
    llm.generate(["one", "two"], greedy(4, n=2, seed=1), use_tqdm=False)
    stream = llm.stream("three", greedy(4))
    list(stream)
    stream.close()
    stream.close()
    stats = llm.stats()
    assert aborted == []
    assert (stats.added_requests, stats.ended_requests) == (5, 5)


def test_an_id_can_be_used_again_as_soon_as_its_last_piece_is_there(make_llm, tiny_folder):
    llm = make_llm(tiny_folder, num_kv_blocks=100)
    answers = []
    for _ in range(5):
        stream = llm.stream({"prompt": "one", "request_id": "mine"}, greedy(4))
        while stream.output is None:
            next(stream, None)
        answers.append(stream.output.outputs[0].token_ids)
    assert answers == [answers[0]] * 5


def test_a_second_request_with_the_id_of_one_under_way_is_refused_and_the_first_is_untouched(make_llm, tiny_folder):
    llm = make_llm(tiny_folder, num_kv_blocks=100)
    expected = "".join(llm.stream("one", greedy(80)))
    stream = llm.stream({"prompt": "one", "request_id": "mine"}, greedy(80))
    pieces = [next(stream)]
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate({"prompt": "two", "request_id": "mine"}, greedy(4), use_tqdm=False)
    assert caught.value.parameter == "request_id"
    assert "'mine' is in use" in str(caught.value)
    assert "".join([*pieces, *stream]) == expected


def test_an_empty_id_is_refused_and_names_what_an_id_is(make_llm, tiny_folder):
    llm = make_llm(tiny_folder, num_kv_blocks=20)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate({"prompt": "one", "request_id": ""}, greedy(2), use_tqdm=False)
    assert caught.value.parameter == "request_id"


def test_callers_that_give_no_id_all_complete_each_with_its_own_parameters(make_llm, tiny_folder):
    llm = make_llm(tiny_folder, num_kv_blocks=200)
    expected = {
        number: llm.generate("the same prompt", greedy(3 + number), use_tqdm=False)[0].outputs[0].token_ids
        for number in range(8)
    }
    answers: dict[int, list[int]] = {}
    request_ids = set()
    barrier = threading.Barrier(8)

    def ask(number):
        barrier.wait()
        (output,) = llm.generate("the same prompt", greedy(3 + number), use_tqdm=False)
        request_ids.add(output.request_id)
        answers[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected
    assert [len(answers[number]) for number in range(8)] == list(range(3, 11))
    assert len(request_ids) == 8
