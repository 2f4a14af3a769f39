from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.outputs import CompletionOutput, EngineOutput, FinishReason, RequestOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.output_processor import OutputProcessor, RequestUpdate
from octavo.stop_strings import StopStringMatcher
from octavo.testing.tokenizers import TableTokenizer, byte_tokenizer, token_table

# ---- stop strings --------------------------------------------------------------------------------------------------

few_letters = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@dataclass
class Matched:
    text: str
    string: str | None


def feed(stops: Sequence[str], deltas: Sequence[str]) -> Matched:
    matcher = StopStringMatcher(stops)
    text = "".join([matcher.add(delta) for delta in deltas]) + matcher.finish()
    return Matched(text, matcher.match.string if matcher.match else None)


def earliest_start(stops: Sequence[str], text: str) -> Matched:
    places = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not places:
        return Matched(text, None)
    start, _, stop = min(places)
    return Matched(text[:start], stop)


@given(stop_lists, few_letters)
def test_the_earliest_start_wins_and_of_those_the_first_complete(stops: list[str], text: str) -> None:
    assert feed(stops, [text]) == earliest_start(stops, text)


@given(stop_lists, few_letters, st.data())
def test_neither_cuts_nor_order_change_the_match(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed(data.draw(st.permutations(stops)), deltas) == feed(stops, [text])


@given(stop_lists, few_letters)
def test_exactly_what_may_still_be_part_of_a_stop_string_is_held(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for count, char in enumerate(text, start=1):
        shown += matcher.add(char)
        seen = text[:count]
        if matcher.match is not None:
            assert shown == earliest_start(stops, seen).text
            return
        may_begin = [at for at in range(count) if any(stop.startswith(seen[at:]) for stop in stops)]
        complete = [seen.find(stop) for stop in stops if stop in seen]
        assert shown == seen[: min([*may_begin, *complete, count])]
        assert not complete or min(may_begin, default=count) < min(complete), "a certain match must be reported"


@given(stop_lists, few_letters)
def test_nothing_is_shown_after_a_match(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    matcher.add(text)
    if matcher.match is not None:
        assert matcher.add("more") == "" == matcher.finish()


def test_a_match_waits_for_a_stop_string_that_started_earlier() -> None:
    matcher = StopStringMatcher(["bc", "abcd"])
    assert [matcher.add(char) for char in "xabc"] == ["x", "", "", ""]
    assert matcher.match is None
    assert matcher.pending is not None
    assert matcher.pending.string == "bc"
    assert matcher.add("d") == ""
    assert matcher.match is not None
    assert (matcher.match.string, matcher.match.start, matcher.match.end) == ("abcd", 1, 5)
    assert matcher.pending is None


def test_a_waiting_match_counts_when_the_text_ends_or_goes_another_way() -> None:
    assert feed(["bc", "abcd"], list("xabc")) == Matched("xa", "bc")
    assert feed(["bc", "abcd"], list("xabcx")) == Matched("xa", "bc")


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"], ["ab", "b", "ab"]])
@pytest.mark.parametrize("deltas", [["ab"], ["a", "b"]])
def test_b_and_ab_in_ab_match_ab(stops: list[str], deltas: list[str]) -> None:
    assert feed(stops, deltas) == Matched("", "ab")


@pytest.mark.parametrize(("stop", "text"), [("aab", "aaaab!"), ("aabaaax", "aabaaabaaax!")])
def test_a_match_that_begins_inside_a_failed_one_is_found(stop: str, text: str) -> None:
    assert feed([stop], list(text)) == Matched(text[: text.index(stop)], stop)


def test_a_stop_string_that_begins_with_another_never_gets_its_turn() -> None:
    matcher = StopStringMatcher(["abc", "ab"])
    assert matcher.add("xab") == "x"
    assert matcher.match is not None
    assert matcher.match.string == "ab"


# ---- the processor -------------------------------------------------------------------------------------------------


class Engine:
    """Plays an engine's outputs to a processor and collects what the caller gets."""

    def __init__(self, tokenizer: TableTokenizer | None, **params: Any) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.updates: list[RequestUpdate] = []
        self.finished: list[RequestOutput] = []
        self.to_abort: list[str] = []
        self.core_ids = self.add("r", **params)

    def add(self, request_id: str, **params: Any) -> list[str]:
        return self.processor.add_request(request_id, "prompt", [7, 8], SamplingParams(**params))

    def step(
        self,
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        core_id: str = "r",
        **columns: Any,
    ) -> str:
        output = EngineOutput()
        output.add(core_id, list(token_ids), finish_reason=finish_reason, **columns)
        processed = self.processor.process(output)
        self.updates += processed.updates
        self.finished += processed.finished
        self.to_abort += processed.core_ids_to_abort
        return "".join(update.new_text for update in processed.updates)

    @property
    def choice(self) -> CompletionOutput:
        """The only choice of the only finished request, once its updates were found to add up to it."""
        (output,) = self.finished
        (choice,) = output.outputs
        assert output.finished
        assert "".join(update.new_text for update in self.updates) == choice.text
        assert [token_id for update in self.updates for token_id in update.new_token_ids] == choice.token_ids
        assert [update.finish_reason for update in self.updates[:-1]] == [None] * (len(self.updates) - 1)
        assert (self.updates[-1].finish_reason, self.updates[-1].stop_reason) == (
            choice.finish_reason,
            choice.stop_reason,
        )
        if choice.logprobs is not None:
            assert [entry for update in self.updates for entry in update.new_logprobs or []] == choice.logprobs
            assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        return choice


QRS = token_table(" QR", "S", "TU", "V")


def test_no_part_of_a_stop_string_shows() -> None:
    engine = Engine(QRS, stop="QRSTUV")
    assert [engine.step([token_id]) for token_id in range(4)] == [" ", "", "", ""]
    assert engine.choice.text == " "
    assert engine.choice.finish_reason == "stop"
    assert engine.choice.stop_reason == "QRSTUV"
    assert engine.choice.token_ids == [0, 1, 2, 3]
    assert engine.to_abort == ["r"]


def test_held_text_is_released_once_it_cannot_match() -> None:
    engine = Engine(QRS, stop="QRSX")
    assert [engine.step([0]), engine.step([1]), engine.step([2]), engine.step([3], "length")] == [
        " ",
        "",
        "QRSTU",
        "V",
    ]
    assert engine.choice.text == " QRSTUV"
    assert engine.to_abort == []


def test_text_that_no_stop_string_begins_in_is_not_delayed() -> None:
    engine = Engine(QRS, stop="ZZZZZZZZ")
    assert [engine.step([token_id]) for token_id in range(4)] == [" QR", "S", "TU", "V"]


def test_the_prompt_is_no_part_of_a_match() -> None:
    processor = OutputProcessor(token_table("D"))
    processor.add_request("r", "...EN", [1], SamplingParams(stop="END"))
    output = EngineOutput()
    output.add("r", [0], finish_reason="length")
    (finished,) = processor.process(output).finished
    assert (finished.outputs[0].text, finished.outputs[0].finish_reason) == ("D", "length")


@pytest.mark.parametrize("stop", [["b", "ab"], ["ab", "b"]])
def test_the_stop_string_that_starts_earliest_is_the_stop_reason(stop: list[str]) -> None:
    engine = Engine(token_table("ab"), stop=stop)
    engine.step([0])
    assert (engine.choice.text, engine.choice.stop_reason) == ("", "ab")


def logprobs_of(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5 - token_id) for token_id in token_ids]


@pytest.mark.parametrize("finish_reason", [None, "length"])
def test_ids_and_logprobs_end_with_the_token_that_completed_the_stop_string(finish_reason: FinishReason | None) -> None:
    engine = Engine(token_table("ok EN", "D", "x", "y", "z"), stop="END", logprobs=0)
    engine.step([0, 1, 2, 3, 4], finish_reason, logprobs=logprobs_of(range(5)))
    assert engine.choice.token_ids == [0, 1]
    assert engine.choice.text == "ok "
    assert engine.choice.logprobs == logprobs_of([0, 1])
    assert engine.choice.cumulative_logprob == -2.0
    assert engine.choice.finish_reason == "stop"
    assert engine.to_abort == ([] if finish_reason else ["r"])


@pytest.mark.parametrize(
    ("last", "text", "stop_reason", "token_ids"),
    [("e", "x", "abcde", [0, 1, 2, 3]), ("f", "xa", "bc", [0, 1]), (None, "xa", "bc", [0, 1])],
)
def test_ids_after_a_match_that_had_to_wait_are_never_handed_out(
    last: str | None, text: str, stop_reason: str, token_ids: list[int]
) -> None:
    engine = Engine(token_table("xab", "c", "d", last or ""), stop=["bc", "abcde"], logprobs=0)
    for token_id in range(3):
        engine.step([token_id], logprobs=logprobs_of([token_id]))
    engine.step([3], "length" if last is None else None, logprobs=logprobs_of([3]))
    choice = engine.choice
    assert (choice.text, choice.stop_reason, choice.token_ids) == (text, stop_reason, token_ids)


def test_a_stop_string_can_stay_in_the_text_but_nothing_after_it_can() -> None:
    engine = Engine(token_table("a E", "ND b"), stop="END", include_stop_str_in_output=True)
    assert [engine.step([0]), engine.step([1])] == ["a ", "END"]
    assert engine.choice.text == "a END"
    in_one_step = Engine(token_table("a E", "ND b"), stop="END", include_stop_str_in_output=True)
    assert in_one_step.step([0, 1, 1, 0]) == "a END"
    assert in_one_step.choice == engine.choice


def test_a_stop_string_before_min_tokens_is_text_and_the_search_starts_after_it() -> None:
    # "END" in tokens 1 and 2 does not count, nor does the one that begins in token 2; the one after it does.
    engine = Engine(token_table("a END", " EN", "D", "x", "END"), stop="END", min_tokens=2)
    assert [engine.step([token_id]) for token_id in range(5)] == ["a END", " EN", "D", "x", ""]
    assert (engine.choice.text, engine.choice.token_ids) == ("a END END" + "x", [0, 1, 2, 3, 4])


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "END"), (2, "ENDEND")])
def test_the_token_after_min_tokens_is_the_first_that_can_stop(min_tokens: int, text: str) -> None:
    engine = Engine(token_table("END"), stop="END", min_tokens=min_tokens)
    engine.step([0, 0, 0])
    assert engine.choice.text == text
    assert len(engine.choice.token_ids) == min_tokens + 1


@pytest.mark.parametrize("finish_reason", ["length", "abort", "stop", "error"])
@pytest.mark.parametrize("tail", [b"EN", "é".encode()[:1], b"EN" + "😀".encode()[:3]])
def test_whatever_is_held_is_released_at_the_end(finish_reason: FinishReason, tail: bytes) -> None:
    tokenizer = TableTokenizer({0: b"ok ", 1: tail, 2: "<eos>"}, special_token_ids=[2])
    engine = Engine(tokenizer, stop="END")
    assert engine.step([0, 1]) == "ok "
    engine.step([2], finish_reason) if finish_reason == "stop" else engine.step([], finish_reason)
    assert engine.choice.text == "ok " + tail.decode(errors="replace")
    assert engine.choice.finish_reason == finish_reason
    assert engine.choice.stop_reason is None


def test_a_stream_that_ends_inside_a_character_equals_the_text_that_is_not_streamed() -> None:
    token_ids = list("hi 😀".encode()[:-1])
    engine = Engine(byte_tokenizer())
    for token_id in token_ids[:-1]:
        engine.step([token_id])
    engine.step(token_ids[-1:], "length")
    assert engine.choice.text == byte_tokenizer().decode(token_ids)


def test_flushed_text_can_complete_a_stop_string() -> None:
    engine = Engine(TableTokenizer({0: "a", 1: b"\xff", 2: "<eos>"}, special_token_ids=[2]), stop="\ufffd", logprobs=0)
    engine.step([0, 1], logprobs=logprobs_of([0, 1]))
    engine.step([2], "stop", logprobs=logprobs_of([2]))
    assert (engine.choice.text, engine.choice.stop_reason, engine.choice.token_ids) == ("a", "\ufffd", [0, 1])


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi</s>")])
def test_end_of_sequence_stays_in_the_ids_and_is_text_only_when_not_skipped(skip: bool, text: str) -> None:
    for special in [[1], []]:
        engine = Engine(TableTokenizer({0: "hi", 1: "</s>"}, special_token_ids=special), skip_special_tokens=skip)
        engine.step([0])
        engine.step([1], "stop")
        assert engine.choice.token_ids == [0, 1]
        assert engine.choice.text == text
        assert engine.choice.stop_reason is None


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_stays_in_the_ids_and_is_text_only_when_included(include: bool, text: str) -> None:
    engine = Engine(token_table("hi", "!"), stop_token_ids=[1], include_stop_str_in_output=include, logprobs=0)
    engine.step([0, 1], "stop", stop_reason=1, logprobs=logprobs_of([0, 1]))
    assert (engine.choice.token_ids, engine.choice.text, engine.choice.stop_reason) == ([0, 1], text, 1)


def test_an_update_carries_all_tokens_of_its_step_and_deltas_are_never_sliced() -> None:
    engine = Engine(token_table("ab", "cd", "ef", "gh", "ij", "kl", "mn"))
    assert engine.step(range(5)) == "abcdefghij"
    assert engine.step([5, 6], "length") == "klmn"
    assert [len(update.new_token_ids) for update in engine.updates] == [5, 2]
    assert engine.choice.text == "abcdefghijklmn"


def test_without_detokenizing_there_are_ids_and_no_text() -> None:
    engine = Engine(None, detokenize=False, logprobs=1)
    engine.step([3, 4], logprobs=logprobs_of([3, 4]))
    engine.step([5], "stop", logprobs=logprobs_of([5]))
    assert (engine.choice.text, engine.choice.token_ids) == ("", [3, 4, 5])
    assert engine.choice.cumulative_logprob == -13.5


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        Engine(None)
    assert caught.value.parameter == "detokenize"


def test_logprobs_are_none_unless_asked_for() -> None:
    engine = Engine(token_table("a"))
    engine.step([0], "length")
    assert engine.choice.logprobs is None
    assert engine.choice.cumulative_logprob is None
    assert engine.updates[0].new_logprobs is None


def test_an_entry_without_news_makes_no_update() -> None:
    engine = Engine(token_table("a"))
    engine.step([])
    assert engine.updates == []


def test_the_choices_of_a_request_are_gathered_by_index() -> None:
    engine = Engine(token_table("a", "b", "c", "END"), n=3, stop="END")
    assert engine.core_ids == ["r#0", "r#1", "r#2"]
    engine.step([2], "length", core_id="r#2", num_preemptions=2, num_cached_tokens=5)
    engine.step([0], core_id="r#0", num_preemptions=1, num_cached_tokens=4)
    engine.step([1, 3], core_id="r#1")
    assert engine.finished == []
    assert engine.processor.abort("r") == ["r#0"]
    engine.step([0], "abort", core_id="r#0", num_preemptions=1, num_cached_tokens=4)
    (output,) = engine.finished
    assert [(choice.index, choice.text, choice.finish_reason) for choice in output.outputs] == [
        (0, "aa", "abort"),
        (1, "b", "stop"),
        (2, "c", "length"),
    ]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", [7, 8])
    assert (output.num_cached_tokens, output.num_preemptions) == (4, 3)
    assert [(update.index, update.num_cached_tokens) for update in engine.updates] == [(2, 5), (0, 4), (1, 0), (0, 4)]
    assert engine.to_abort == ["r#1"]


def test_snapshots_do_not_change_when_the_request_goes_on() -> None:
    engine = Engine(token_table("a", "b"), logprobs=0)
    engine.step([0], logprobs=logprobs_of([0]))
    before = engine.processor.output_of("r")
    update = engine.updates[0]
    assert before is not None
    engine.step([1], "length", logprobs=logprobs_of([1]))
    (choice,) = before.outputs
    assert (choice.text, choice.token_ids, choice.logprobs, choice.cumulative_logprob) == (
        "a",
        [0],
        logprobs_of([0]),
        -0.5,
    )
    assert not before.finished
    assert update.new_token_ids == [0]
    assert engine.processor.output_of("r") is None


def test_nothing_is_left_when_all_requests_have_ended() -> None:
    engine = Engine(token_table("a", "END"), n=2, stop="END")
    processor = engine.processor
    assert processor.has_unfinished
    assert processor.live_request_ids == {"r"}
    assert processor.live_core_ids == {"r#0", "r#1"}
    engine.step([0], "length", core_id="r#0")
    engine.step([1], core_id="r#1")
    assert not processor.has_unfinished
    assert processor.live_request_ids == frozenset()
    assert processor.live_core_ids == {"r#1"}, "the engine has not ended it yet"
    engine.step([], "abort", core_id="r#1")
    assert processor.live_core_ids == frozenset()
    assert len(engine.finished) == 1


def test_late_entries_of_a_request_that_a_stop_string_ended_are_ignored() -> None:
    engine = Engine(token_table("END", "x"), stop="END")
    engine.step([0])
    assert engine.step([1]) == ""
    assert engine.step([1], "length") == ""
    assert len(engine.updates) == len(engine.finished) == 1
    assert engine.choice.token_ids == [0]


def test_an_id_can_be_used_again_right_after_its_final_output() -> None:
    engine = Engine(token_table("a"))
    engine.step([0], "length")
    assert engine.add("r") == ["r"]
    assert engine.step([0, 0]) == "aa"


def test_late_entries_of_a_stopped_request_do_not_reach_the_next_one_of_that_id() -> None:
    engine = Engine(token_table("END", "x"), stop="END")
    engine.step([0])
    (core_id,) = engine.add("r")
    assert core_id != "r"
    assert engine.step([1], "abort", core_id="r") == ""
    assert engine.step([1], core_id=core_id) == "x"
    assert engine.processor.live_core_ids == {core_id}


@pytest.mark.parametrize(
    ("first", "n_first", "second", "n_second"),
    [("r", 1, "r", 1), ("r", 2, "r", 2), ("s#1", 1, "s", 2), ("s", 2, "s#1", 1), ("s#0", 2, "s", 2)],
)
def test_an_id_that_is_in_use_is_refused_and_nothing_is_registered(
    first: str, n_first: int, second: str, n_second: int
) -> None:
    processor = OutputProcessor(token_table("a"))
    core_ids = processor.add_request(first, None, [1], SamplingParams(n=n_first))
    with pytest.raises(InvalidRequestError, match="take another id") as caught:
        processor.add_request(second, None, [1], SamplingParams(n=n_second))
    assert caught.value.parameter == "request_id"
    assert processor.live_request_ids == {first}
    assert processor.live_core_ids == set(core_ids)


def test_aborting_names_the_core_requests_and_ends_nothing_by_itself() -> None:
    engine = Engine(token_table("a"))
    engine.step([0])
    assert engine.processor.abort("r") == ["r"]
    assert engine.processor.abort("no such request") == []
    assert engine.finished == []
    engine.step([], "abort")
    assert (engine.choice.text, engine.choice.finish_reason) == ("a", "abort")
    assert engine.processor.abort("r") == []


def test_entries_of_unknown_requests_are_ignored() -> None:
    engine = Engine(token_table("a"))
    assert engine.step([0], core_id="other") == ""
    assert engine.step([], "abort", core_id="other") == ""
    assert engine.updates == []


@given(
    st.lists(st.sampled_from(["a", "b", "ab", b"\xc3", b"\xa9", "é", ""]), max_size=12),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    st.integers(0, 4),
    st.data(),
)
def test_how_tokens_fall_into_steps_changes_nothing(
    tokens: list[str | bytes], stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    ids = list(range(len(tokens)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    results = []
    for bounds in ([], cuts):
        engine = Engine(token_table(*tokens), stop=stop, min_tokens=min_tokens)
        for start, end in zip([0, *bounds], bounds, strict=False):
            engine.step(ids[start:end])
        if not engine.finished:
            engine.step(ids[bounds[-1] if bounds else 0 :], "length")
        results.append(engine.choice)
    assert results[0] == results[1]
