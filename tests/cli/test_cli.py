"""The `octavo` command: what the flags become, what is printed, and the exit status."""

import io
import json
import os
import subprocess
import sys

import pytest

import octavo
from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.cli.app import run
from octavo.cli.chat import Conversation
from octavo.cli.main import main
from octavo.cli.options import make_config
from octavo.cli.outcome import exit_if_broken_off
from octavo.config import EngineConfig, PluginChoice, field_sections
from octavo.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from octavo.testing import installed

# A flag's value for each field, and what it becomes.
FLAGS = {
    "model": (["some/model"], "some/model"),
    "dtype": (["bfloat16"], "bfloat16"),
    "device": (["cpu"], "cpu"),
    "max_model_len": (["4096"], 4096),
    "seed": (["7"], 7),
    "attention_backend": (['{ name = "flash", options = { tile = 64 } }'], PluginChoice("flash", {"tile": 64})),
    "attention_backends": (
        ['{ full_attention = "flash", window = { name = "b", options = { k = 1 } } }'],
        {"full_attention": PluginChoice("flash"), "window": PluginChoice("b", {"k": 1})},
    ),
    "model_impl": (["llama"], PluginChoice("llama")),
    "enforce_eager": ([], True),
    "cudagraph_capture_sizes": (["1, 2,16"], (1, 2, 16)),
    "hooks": (["metrics, trace"], (PluginChoice("metrics"), PluginChoice("trace"))),
    "block_size": (["32"], 32),
    "num_kv_blocks": (["100"], 100),
    "kv_cache_memory_bytes": (["1073741824"], 2**30),
    "gpu_memory_utilization": (["0.5"], 0.5),
    "cpu_memory_share": (["0.125"], 0.125),
    "kv_cache_dtype": (["fp8_e4m3"], "fp8_e4m3"),
    "kv_cache_scales": (["per_head"], "per_head"),
    "enable_prefix_caching": (None, False),
    "disable_hybrid_kv_cache_manager": ([], True),
    "verify_prefix_cache": ([], True),
    "hash_function": (["blake2b"], PluginChoice("blake2b")),
    "hash_seed": (["123"], "123"),
    "kv_managers": (
        ["full_attention=mine, other = theirs"],
        {"full_attention": PluginChoice("mine"), "other": PluginChoice("theirs")},
    ),
    "max_num_seqs": (["8"], 8),
    "max_num_batched_tokens": (["512"], 512),
    "enable_chunked_prefill": (None, False),
    "long_prefill_token_threshold": (["64"], 64),
    "watermark": (["0.125"], 0.125),
    "async_scheduling": ([], True),
    "request_queue": (["priority"], PluginChoice("priority")),
}


class FakeLLM:
    """Answers with the words of the prompt, and remembers what it was made and asked with."""

    made: list["FakeLLM"]
    error: Exception | None

    def __init__(self, model=None, *, config):
        if self.error:
            raise self.error
        self.config = config
        self.asked = []
        self.is_open = False
        self.made.append(self)

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *error):
        self.is_open = False

    def generate(self, prompt, params, *, use_tqdm):
        assert not use_tqdm, "a progress bar would be mixed with the answer"
        self.asked.append((prompt, params))
        choice = CompletionOutput(0, "blau ü", [5, 6], [TokenLogprobs(5, -0.5, ((5, -0.5),))], -0.5, "stop", None)
        return [RequestOutput("request-0", prompt, [1, 2], finished=True, outputs=[choice])]

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        return FakeStream("blue", " and", " green")

    def stream_chat(self, messages, params):
        self.asked.append((messages, params))
        if messages[-1]["content"] == "too long":
            raise InvalidRequestError("The prompt has 9 tokens; shorten it.", parameter="prompt")
        return FakeStream("answer ", str(len(messages)))


class FakeStream:
    """Gives pieces of text, raises what is among them, and has a result once all have been taken."""

    def __init__(self, *pieces, finish_reason="stop", stop_reason=None):
        self.pieces = list(pieces)
        choice = CompletionOutput(0, "", [5, 6], None, None, finish_reason, stop_reason)
        self.result = RequestOutput("request-0", None, [1, 2], finished=True, outputs=[choice])
        self.output = None

    def __iter__(self):
        return self

    def __next__(self):
        if not self.pieces:
            self.output = self.result
            raise StopIteration
        piece = self.pieces.pop(0)
        if isinstance(piece, BaseException):
            raise piece
        return piece


@pytest.fixture
def fake_llm(monkeypatch):
    """Stands in for the model; has what was made in the test as `made`."""

    class Fake(FakeLLM):
        made = []
        error = None

    monkeypatch.setattr("octavo.llm.LLM", Fake)
    return Fake


def type_in(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def value_of(config, name):
    section = field_sections()[name]
    return getattr(getattr(config, section) if section else config, name)


# -- flags become a config --------------------------------------------------------------------------------------


def test_the_table_of_this_test_covers_every_field():
    assert list(FLAGS) == list(field_sections())


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("name", FLAGS)
def test_every_config_field_is_a_flag_of_its_name_with_dashes(fake_llm, command, name):
    values, expected = FLAGS[name]
    flag = name.replace("_", "-")
    arguments = [f"--no-{flag}"] if values is None else [f"--{flag}", *values]
    # Scales need something that they scale.
    needed = {"kv_cache_dtype": "int8"} if name == "kv_cache_scales" else {}
    beside = [f"--{other.replace('_', '-')}={value}" for other, value in needed.items()]
    assert run([command, "Hello", *arguments, *beside]) == 0
    (llm,) = fake_llm.made
    assert value_of(llm.config, name) == expected
    assert llm.config.source_of(name) == f"flag --{flag}"
    assert llm.config == EngineConfig.from_flat(**{name: expected}, **needed)


def test_without_flags_the_config_is_the_default(fake_llm):
    assert run(["generate", "Hello"]) == 0
    assert fake_llm.made[0].config == EngineConfig()


def test_a_switch_can_be_turned_on_again_over_a_file(fake_llm, tmp_path):
    path = tmp_path / "octavo.toml"
    path.write_text("[cache]\nenable_prefix_caching = false\n")
    assert run(["generate", "Hello", "--config", str(path)]) == 0
    assert run(["generate", "Hello", "--config", str(path), "--enable-prefix-caching"]) == 0
    assert [llm.config.cache.enable_prefix_caching for llm in fake_llm.made] == [False, True]


def test_flags_go_before_the_file_and_the_file_before_the_defaults(fake_llm, tmp_path):
    path = tmp_path / "octavo.toml"
    path.write_text('model = "theirs"\nseed = 3\n[cache]\nblock_size = 32\n[scheduler]\nmax_num_seqs = 4\n')
    assert run(["generate", "Hello", "--config", str(path), "--seed", "9", "--max-num-seqs", "5"]) == 0
    assert fake_llm.made[0].config == EngineConfig.from_flat(model="theirs", seed=9, block_size=32, max_num_seqs=5)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("4096", 4096), ("2", 2)])
def test_max_model_len_is_a_number_or_auto(text, value):
    assert make_config(None, {"max_model_len": text}).max_model_len == value


@pytest.mark.parametrize("text", ["long", "--5", "4.5", "\u00b2", "", "1" * 5000])
def test_max_model_len_is_nothing_else(text):
    with pytest.raises(ConfigError, match=r"^max_model_len is "):
        make_config(None, {"max_model_len": text})


@pytest.mark.parametrize(
    "text", ["mine", "full_attention", "full_attention=", "=mine", "a=b,", "a=b,c", "a= ", " =b", ""]
)
@pytest.mark.parametrize("flag", ["--kv-managers", "--attention-backends"])
def test_parts_by_kind_are_pairs(flag, text):
    with pytest.raises(ConfigError) as caught:
        make_config(None, {flag[2:].replace("-", "_"): text})
    assert str(caught.value) == f"{flag} is {text!r}; it must be pairs such as full_attention=my_part, with commas."


def test_hooks_are_names_or_what_a_file_would_have():
    one, two = PluginChoice("one"), PluginChoice("two", {"path": "x,y"})
    assert make_config(None, {"hooks": "one"}).hooks == (one,)
    assert make_config(None, {"hooks": '["one", { name = "two", options = { path = "x,y" } }]'}).hooks == (one, two)
    assert make_config(None, {"hooks": '{ name = "two", options = { path = "x,y" } }'}).hooks == (two,)
    with pytest.raises(ConfigError) as caught:
        make_config(None, {"hooks": "one,"})
    assert str(caught.value) == "hooks.1 is '': the name is empty."


def test_the_help_names_the_formats_of_the_kv_cache_and_what_auto_takes(capsys):
    assert run(["generate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert 'quantised to a byte a number, as "fp8_e4m3" or "int8"; "auto" is the model\'s dtype.' in shown
    assert '"auto" takes the checkpoint\'s where it has some, else is "per_token_head".' in shown


def test_a_flag_takes_the_place_of_the_files_value_as_its_source(tmp_path):
    path = tmp_path / "octavo.toml"
    path.write_text("seed = 3\n[cache]\nblock_size = 32\n")
    config = make_config(path, {"seed": 4})
    assert [config.source_of(name) for name in ("seed", "block_size", "dtype")] == ["flag --seed", str(path), "default"]


def test_a_name_that_looks_like_a_number_stays_a_name():
    config = make_config(None, {"hash_seed": "123", "model": "7"})
    assert (config.cache.hash_seed, config.model) == ("123", "7")


# -- errors -----------------------------------------------------------------------------------------------------


def assert_one_line(capsys, start):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"octavo: {start}")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["generate", "x", "--block-size", "0"], "block_size is 0: "),
        (["generate", "x", "--dtype", "int8"], "dtype is 'int8': "),
        (["generate", "x", "--top-p", "0"], "top_p must be "),
        (["generate", "x", "--temperature", "nan"], "temperature must be "),
        (["generate", "x", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens is 9, "),
        (["generate", "x", "--stop", ""], "stop must be "),
        (["generate", "x", "--config", "/no/such/file.toml"], "The config file '/no/such/file.toml' cannot be read: "),
        (["chat", "x", "--top-k", "-2"], "top_k must be "),
        (["chat", "x", "--max-model-len", "long"], "max_model_len is 'long': "),
    ],
)
def test_a_wrong_value_is_one_line_on_standard_error_and_no_model_is_loaded(fake_llm, capsys, arguments, start):
    assert run(arguments) == 2
    assert_one_line(capsys, start)
    assert fake_llm.made == []


def test_what_the_engine_refuses_is_one_line_without_a_traceback(fake_llm, capsys):
    fake_llm.error = ModelNotFoundError("There is no model 'x' here.")
    assert run(["generate", "Hello", "--model", "x"]) == 2
    assert_one_line(capsys, "There is no model 'x' here.\n")


def test_a_request_that_is_refused_closes_the_model(fake_llm, capsys):
    assert run(["chat", "too long"]) == 2
    assert_one_line(capsys, "The prompt has 9 tokens; shorten it.")
    assert not fake_llm.made[0].is_open


@pytest.mark.parametrize(
    "arguments", [["generate", "x", "--nope"], ["generate"], ["nope"], ["generate", "x", "--block-size", "many"], []]
)
def test_wrong_usage_exits_with_2_and_says_how_to_get_help(fake_llm, capsys, arguments):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: octavo" in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert fake_llm.made == []


def test_an_unknown_flag_is_named(fake_llm, capsys):
    assert run(["generate", "x", "--blok-size", "16"]) == 2
    said = capsys.readouterr().err
    assert "No such option: --blok-size" in said
    assert "--block-size" in said


def test_an_unexpected_error_keeps_its_traceback(fake_llm):
    fake_llm.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(["generate", "Hello"])


# -- help and version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_help_has_every_flag_in_full_with_its_default(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    text = " ".join(words)
    for name in field_sections():
        assert "--" + name.replace("_", "-") in words
        default = value_of(EngineConfig(), name)
        assert f"[default: {'none' if default is None or default in ({}, ()) else default}]" in text
    assert "Tokens in a block. [default: 16]" in text
    assert "Requests that run at a time. [default: 64]" in text


@pytest.mark.parametrize("arguments", [["--version"], ["-V"], ["--verbose", "--version"]])
def test_the_version_is_printed_before_anything_else_is_wanted(capsys, arguments):
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_main_exits_with_the_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", "x", "--top-p", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2


def test_the_version_alone_is_answered_without_importing_anything_heavy():
    code = (
        "import sys; sys.argv = ['octavo', '--version']; from octavo.cli.main import main; main(); "
        "assert not {'torch', 'pydantic', 'typer'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (f"octavo {octavo.__version__}\n", "", 0)


# -- generate ---------------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_ends_the_line(fake_llm, capsys):
    assert run(["generate", "Hello"]) == 0
    assert capsys.readouterr().out == "blue and green\n"
    (llm,) = fake_llm.made
    assert llm.asked == [("Hello", SamplingParams(max_tokens=128, temperature=0.0))]
    assert not llm.is_open


def test_sampling_flags_reach_the_request(fake_llm):
    arguments = "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --ignore-eos"
    assert run(["generate", "Hello", *arguments.split(), "--stop", "a", "--stop", "b c"]) == 0
    assert fake_llm.made[0].asked[0][1] == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        ignore_eos=True,
        stop=["a", "b c"],
    )


def test_a_dash_reads_the_prompt_from_standard_input_less_a_final_newline(fake_llm, monkeypatch):
    type_in(monkeypatch, "  two\nlines\n")
    assert run(["generate", "-"]) == 0
    assert fake_llm.made[0].asked[0][0] == "  two\nlines"


def test_json_is_the_whole_result_and_nothing_else(fake_llm, capsys):
    assert run(["generate", "Hello", "--json"]) == 0
    out = capsys.readouterr().out
    assert "blau ü" in out
    result = json.loads(out)
    assert result["prompt"] == "Hello"
    assert result["finished"] is True
    (choice,) = result["outputs"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("blau ü", [5, 6], "stop")
    assert choice["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]}]


NON_FINITE = (
    "octavo: the answer broke off: the logits are not finite numbers. The fault is in the weights, in the dtype, or in "
    "the attention backend; try --dtype float32 or --attention-backend torch_sdpa.\n"
)


class NanBackend(TorchSDPABackend):
    """Right for up to 40 tokens; past that, what it returns is no number."""

    contract_version = 1

    def attend(self, query, kv_cache, plan, **more):
        output = super().attend(query, kv_cache, plan, **more)
        return output * float("nan") if self.is_long else output

    def plan(self, batch):
        self.is_long = max(batch.context_lens_host) > 40
        return super().plan(batch)


@pytest.fixture
def nan_flags(tiny_folder):
    """Flags of a real model whose attention ends in NaN once there are more than 40 tokens."""
    with installed({"octavo.attention_backends": {"nan": NanBackend}}):
        yield ["--model", str(tiny_folder), "--num-kv-blocks", "40", "--attention-backend", "nan"]


def test_an_answer_that_breaks_off_is_said_and_exits_with_2(nan_flags, capsys):
    assert run(["generate", "x" * 60, *nan_flags]) == 2
    assert capsys.readouterr() == ("\n", NON_FINITE)


def test_what_came_before_an_answer_broke_off_is_printed(nan_flags, capsys):
    assert run(["generate", "x" * 20, "--ignore-eos", "--json", *nan_flags]) == 2
    before = json.loads(capsys.readouterr().out)["outputs"][0]
    assert len(before["token_ids"]) > 10
    assert run(["generate", "x" * 20, "--ignore-eos", *nan_flags]) == 2
    assert capsys.readouterr() == (f"{before['text']}\n", NON_FINITE)


def test_an_answer_that_breaks_off_is_still_json(nan_flags, capsys):
    assert run(["generate", "x" * 60, "--json", *nan_flags]) == 2
    shown = capsys.readouterr()
    (choice,) = json.loads(shown.out)["outputs"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("error", "non_finite_logits")
    assert shown.err == NON_FINITE


def test_a_chat_message_whose_answer_breaks_off_exits_with_2(nan_flags, capsys):
    assert run(["chat", "x" * 60, *nan_flags]) == 2
    assert capsys.readouterr() == ("", NON_FINITE)


def test_a_conversation_goes_on_after_an_answer_that_broke_off(nan_flags, monkeypatch, capsys):
    type_in(monkeypatch, f"{'x' * 60}\n/new\nhi\n/quit\n")
    assert run(["chat", "--max-tokens", "3", *nan_flags]) == 0
    shown = capsys.readouterr()
    assert shown.err == NON_FINITE
    assert shown.out


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [("detokenizer_failed", "the tokenizer cannot make text of the tokens"), ("no_such_reason", "no_such_reason")],
)
def test_each_reason_why_an_answer_breaks_off_has_its_sentence(capsys, reason, sentence):
    conversation = Conversation(
        lambda messages, params: FakeStream("half", finish_reason="error", stop_reason=reason), SamplingParams(), None
    )
    conversation.try_to_say("hello")
    assert capsys.readouterr() == ("half\n", f"octavo: the answer broke off: {sentence}.\n")
    conversation.try_to_say("again")
    assert contents(conversation.messages) == ["hello", "half", "again", "half"]


def test_an_answer_that_comes_to_its_end_is_no_fault(capsys):
    for reason in ("stop", "length", "abort"):
        exit_if_broken_off(FakeStream(finish_reason=reason, stop_reason="kv_cache_full").result)
    exit_if_broken_off(None)
    assert capsys.readouterr() == ("", "")


# -- chat -------------------------------------------------------------------------------------------------------


def contents(messages):
    return [message["content"] for message in messages]


def test_a_message_on_the_command_line_is_answered_once(fake_llm, capsys):
    assert run(["chat", "Hello", "--system", "Be brief.", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "answer 2\n"
    assert fake_llm.made[0].asked == [
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            SamplingParams(max_tokens=5, temperature=0.0),
        )
    ]


def test_a_conversation_goes_on_until_quit_and_each_turn_knows_those_before(fake_llm, monkeypatch, capsys):
    type_in(monkeypatch, "one\n\n  two  \n/quit\nnever\n")
    assert run(["chat"]) == 0
    assert capsys.readouterr().out == "answer 1\nanswer 3\n"
    (llm,) = fake_llm.made
    assert [contents(messages) for messages, _ in llm.asked] == [["one"], ["one", "answer 1", "two"]]
    assert [message["role"] for message in llm.asked[1][0]] == ["user", "assistant", "user"]


def test_new_starts_over_with_the_system_message(fake_llm, monkeypatch):
    type_in(monkeypatch, "one\n/new\ntwo\n")
    assert run(["chat", "--system", "Be brief."]) == 0
    asked = [contents(messages) for messages, _ in fake_llm.made[0].asked]
    assert asked == [["Be brief.", "one"], ["Be brief.", "two"]]


def test_a_turn_that_is_refused_is_reported_and_the_conversation_goes_on_without_it(fake_llm, monkeypatch, capsys):
    type_in(monkeypatch, "one\ntoo long\ntwo\n")
    assert run(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "answer 1\nanswer 3\n"
    assert captured.err == "octavo: The prompt has 9 tokens; shorten it. /new starts over.\n"
    assert contents(fake_llm.made[0].asked[-1][0]) == ["one", "answer 1", "two"]


@pytest.mark.parametrize("error", [InvalidRequestError("no"), KeyboardInterrupt()])
def test_a_turn_that_fails_half_way_leaves_no_trace(capsys, error):
    def stream_chat(messages, params):
        return FakeStream("half", *([error] if messages[-1]["content"] == "fails" else []))

    conversation = Conversation(stream_chat, SamplingParams(), system="Be brief.")
    conversation.say("works")
    before = list(conversation.messages)
    with pytest.raises(type(error)):
        conversation.say("fails")
    assert conversation.messages == before
    assert contents(before) == ["Be brief.", "works", "half"]
    # The next prompt begins on a line of its own.
    assert capsys.readouterr().out == "half\nhalf\n"
    conversation.start_over()
    assert contents(conversation.messages) == ["Be brief."]


def test_conversations_do_not_share_their_messages():
    def stream_chat(messages, params):
        messages.append({"role": "user", "content": "meddling"})
        return FakeStream("x")

    first, second = (Conversation(stream_chat, SamplingParams(), system=None) for _ in range(2))
    first.start_over()
    assert first.messages == second.messages == []
    assert first.messages is not second.messages


def test_input_that_cannot_be_read_is_one_line(fake_llm, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert run(["generate", "-"]) == 2
    assert_one_line(capsys, "There is no standard input")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert run(["generate", "-"]) == 2
    assert_one_line(capsys, "Standard input is not text in utf-8")


def test_output_that_cannot_be_written_is_one_line(tiny_folder):
    command = [sys.executable, "-m", "octavo", "generate", "one", "--model", str(tiny_folder), "--num-kv-blocks", "20"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("octavo: writing the answer failed: ")
    assert "Traceback" not in done.stderr


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(tiny_folder):
    command = [sys.executable, "-c", "from octavo.cli.app import run; run(['--version']); print('h\u00e9')"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "h?"


def test_an_interrupt_while_the_command_line_is_imported_is_no_traceback(monkeypatch):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "octavo.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "octavo.cli.app")
    monkeypatch.setattr("sys.meta_path", [Interrupting(), *sys.meta_path])
    monkeypatch.setattr("sys.argv", ["octavo", "generate", "x"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130


def test_an_interrupted_turn_is_forgotten_and_the_conversation_goes_on(capsys):
    def interrupted(messages, params):
        return FakeStream("half an", KeyboardInterrupt())

    conversation = Conversation(interrupted, SamplingParams(), None)
    conversation.try_to_say("hello")
    assert conversation.messages == []
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("half an\n", "octavo: interrupted; the turn is forgotten\n")


def test_words_with_a_slash_are_commands_and_never_messages(fake_llm, monkeypatch, capsys):
    type_in(monkeypatch, "/help me\n/quit\n")
    assert run(["chat"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "octavo: there is no command /help. /new starts over, /quit leaves.\n"
    assert shown.out == ""
