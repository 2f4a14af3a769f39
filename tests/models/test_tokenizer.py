"""Tokenizers from GGUF metadata and from folders, against transformers and against written-out ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.core.interfaces.model import Checkpoint, Tokenizer
from octavo.errors import CheckpointError, InvalidRequestError
from octavo.models.gguf_tokenizer import tokenizer_from_gguf
from octavo.models.tokenizer import tokenizer_from_folder
from octavo.testing import tiny_models

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces before, and two after  ",
    "In 1984 there were 12345678 of them, 3.14 each; 0x1F.",
    "naïve façade, Größe, Ελληνικά, русский, עברית, العربية",
    "漢字とひらがな、한국어",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "e\u0301 is not \u00e9; \u200b\ufeff zero width",
    "def f(x):\n\treturn  x + 1\n\n\n    # done\r\n",
    "I'm, you're, WE'LL, don't, he'd",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|endoftext|>b<|im_start|><|im_end|>",
    "\x00\x01 control \x7f",
    "!?#$%&()*+,-./:;<=>@[]^_`{|}~",
]
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Checkpoint) -> Tokenizer:
    return demo_checkpoint.tokenizer()


@pytest.fixture(scope="module")
def reference(demo_checkpoint: Checkpoint) -> Any:
    import transformers

    path: Path = demo_checkpoint.path  # type: ignore[attr-defined]
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_gives_the_ids_of_transformers(demo: Tokenizer, reference: Any, text: str) -> None:
    token_ids = demo.encode(text)
    assert token_ids == reference.encode(text)
    assert demo.decode(token_ids, skip_special_tokens=False) == reference.decode(token_ids) == text
    assert demo.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


def test_the_demo_tokenizer_takes_each_digit_alone(demo: Tokenizer) -> None:
    # As SmolLM2's own tokenizer.json does; transformers' reading of the GGUF joins "½" with the space before.
    assert [demo.decode([token_id]) for token_id in demo.encode(" 12½")[:3]] == [" ", "1", "2"]
    assert demo.encode(" ½")[0] == demo.encode(" ")[0]


def test_a_conversation_has_the_ids_of_transformers(demo: Tokenizer, reference: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>there</b> & 'you' {{ 1 + 1 }}"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye 👋"},
    ]
    for conversation in (messages, messages[1:2]):
        expected = reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
        assert demo.encode_chat(conversation) == expected


def test_a_special_token_in_the_text_is_one_id(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|>") == [1]
    assert demo.decode([1]) == ""
    assert demo.decode([1], skip_special_tokens=False) == "<|im_start|>"
    assert 1 in demo.special_token_ids


def test_ids_outside_the_vocabulary_decode_to_nothing(demo: Tokenizer) -> None:
    hello = demo.encode("Hello")
    outside = [demo.vocab_size, 10**6, -1, 1 << 32, 1 << 70]
    assert demo.decode([*outside[:2], *hello, *outside[2:]]) == "Hello"
    assert demo.decode([]) == ""
    assert demo.vocab_size == 49152


def test_half_a_character_decodes_to_the_replacement_character(demo: Tokenizer) -> None:
    token_ids = demo.encode("🎉")
    assert len(token_ids) > 1
    assert set(demo.decode(token_ids[:-1])) == {"\ufffd"}


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"], "half \ud83d of a pair"])
def test_what_is_not_text_is_refused(demo: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"[Tt]he prompt holds half|A prompt is a") as caught:
        demo.encode(text)
    assert caught.value.parameter == "prompt"


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "no list": ("Hello", "messages is a str; it has to be a list"),
    "nothing": (None, "messages is a NoneType"),
    "an empty list": ([], "messages is empty"),
    "text for a message": (["Hello"], r"messages\[0\] is a str"),
    "no role": ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
    "no content": ([{"role": "user", "content": "Hi"}, {"role": "user"}], r"messages\[1\] has no 'content'"),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        r"messages\[0\]\['content'\] is a list; only text",
    ),
    "no content at all": ([{"role": "user", "content": None}], r"\['content'\] is a NoneType"),
    "half a pair": ([{"role": "user", "content": "x\udc00"}], r"half of a surrogate pair at character 1"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_malformed_messages_are_refused(demo: Tokenizer, case: str) -> None:
    messages, text = BAD_MESSAGES[case]
    with pytest.raises(InvalidRequestError, match=text) as caught:
        demo.encode_chat(messages)
    assert caught.value.parameter == "messages"


def byte_level_metadata(pre: str | None = "gpt-2", **extra: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer: all bytes, a few merges, two special tokens, one user's."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "123 4", "Ã ©"]
    tokens = [*BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(Path("model.gguf"), metadata)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (None, ["hello", "1234", " hello"]),
        ("default", ["hello", "1234", " hello"]),
        ("smollm", ["hello", "1", "2", "3", "4", " hello"]),
        ("qwen2", ["hello", "1", "2", "3", "4", " hello"]),
        ("llama-bpe", ["<s>", "hello", "123", "4", " hello"]),
    ],
)
def test_each_pre_tokenizer_cuts_digits_its_own_way(pre: str | None, expected: list[str]) -> None:
    assert pieces(build(byte_level_metadata(pre)), "hello1234 hello") == expected


def test_qwen_composes_characters_first() -> None:
    assert pieces(build(byte_level_metadata("qwen2")), "e\u0301") == ["\u00e9"]
    assert pieces(build(byte_level_metadata("gpt-2")), "e\u0301")[0] == "e"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["hello"]),
        ({"add_bos_token": True}, ["<s>", "hello"]),
        ({"add_eos_token": True}, ["hello", "</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "hello", "</s>"]),
    ],
)
def test_what_is_added_around_a_text_is_what_the_file_says(flags: dict[str, bool], expected: list[str]) -> None:
    assert pieces(build(byte_level_metadata(**flags)), "hello") == expected


def test_a_user_defined_token_is_matched_whole_and_is_not_special() -> None:
    tokenizer = build(byte_level_metadata())
    assert pieces(tokenizer, "hello<tool>hello") == ["hello", "<tool>", "hello"]
    assert tokenizer.decode(tokenizer.encode("<s><tool>")) == "<tool>"


def test_a_conversation_gets_no_second_bos() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = byte_level_metadata(add_bos_token=True) | {"tokenizer.chat_template": template}
    tokenizer = build(metadata)
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>hello</s>"


SENTENCEPIECE_PIECES = ["▁", "a", "b", "▁a", "ab", "▁ab", "abab", "c"]


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *SENTENCEPIECE_PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(SENTENCEPIECE_PIECES)]
    # Pieces further down the list have lower scores; "abab" scores best of the merges.
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -3.0, -2.0, -4.0, -1.0, -13.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def sentencepiece_ids(*tokens: str) -> list[int]:
    vocabulary = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    return [vocabulary.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["<s>", "▁ab"]),
        ("abab", ["<s>", "▁", "abab"]),
        ("c ab", ["<s>", "▁", "c", "▁ab"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("", ["<s>"]),
        ("</s>a", ["<s>", "</s>", "▁a"]),
    ],
)
def test_sentencepiece_joins_the_neighbours_with_the_best_score(text: str, expected: list[str]) -> None:
    tokenizer = build(sentencepiece_metadata())
    token_ids = tokenizer.encode(text)
    assert token_ids == sentencepiece_ids(*expected)


def test_sentencepiece_gives_the_text_back() -> None:
    tokenizer = build(sentencepiece_metadata())
    for text in ("ab", "  ab  c", "naïve 🎉", "a\nb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_adds_no_space_where_the_file_says_so() -> None:
    tokenizer = build(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("ab") == sentencepiece_ids("ab")
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


BROKEN_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({}, "model.gguf has no tokenizer"),
    "an unknown kind": ({"tokenizer.ggml.model": "rwkv"}, "a tokenizer of the kind 'rwkv'"),
    "an unknown pre-tokenizer": (
        byte_level_metadata("chameleon"),
        "names the pre-tokenizer 'chameleon'.*Known: smollm",
    ),
    "no vocabulary": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []},
        r"no list .* tokenizer\.ggml\.tokens",
    ),
    "no merges": (byte_level_metadata(merges=None), r"no list of strings as tokenizer\.ggml\.merges"),
    "a merge of one": (byte_level_metadata(merges=["he"]), "the merge 'he', which is not a pair"),
    "a merge of strangers": (byte_level_metadata(merges=["he xyz"]), "parts do not fit together"),
    "too few types": (
        byte_level_metadata(token_type=np.ones(3)),
        r"numbers as tokenizer\.ggml\.token_type, one a token",
    ),
    "no scores": (sentencepiece_metadata(scores=None), r"numbers as tokenizer\.ggml\.scores, one a token"),
    "an end outside the vocabulary": (byte_level_metadata(eos_token_id=10**6), "1000000 as eos_token_id"),
    "a flag that is none": (byte_level_metadata(add_bos_token="yes"), "'yes' as tokenizer.ggml.add_bos_token"),
}


@pytest.mark.parametrize("case", BROKEN_METADATA)
def test_metadata_that_make_no_tokenizer_are_refused_with_the_reason(case: str) -> None:
    metadata, message = BROKEN_METADATA[case]
    with pytest.raises(CheckpointError, match=message):
        build(metadata)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer that was trained with truncation and padding."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTE_ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<plain>"])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder: Path, **config: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_from_folder(folder)


def test_a_folders_tokenizer_neither_cuts_nor_pads(folder: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert len(tokenizer.encode("abcdefghij")) == 10
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.vocab_size == 259
    assert tokenizer.special_token_ids == {256, 257}


def test_a_folders_config_decides_what_is_added(folder: Path) -> None:
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert configure(folder, **special).encode("a") == [BYTE_ALPHABET.index("a")]
    assert configure(folder, **special, add_bos_token=True).encode("a") == [256, BYTE_ALPHABET.index("a")]
    assert configure(folder, **special, add_eos_token=True).encode("") == [257]


def test_a_named_special_token_is_special_even_where_the_file_does_not_mark_it(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<plain>", "pad_token": "<absent>"}))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert tokenizer.vocab_size == 259


def test_a_template_file_goes_before_the_config(folder: Path) -> None:
    assert configure(folder).chat_template is None
    assert configure(folder, chat_template="from config").chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chosen"}]
    assert configure(folder, chat_template=named).chat_template == "chosen"
    (folder / "chat_template.jinja").write_text("from file")
    assert configure(folder, chat_template="from config").chat_template == "from file"


def test_a_model_without_a_template_takes_no_conversation(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer_from_folder(folder).encode_chat([{"role": "user", "content": "Hi"}])
    assert caught.value.parameter == "messages"


def test_a_broken_tokenizer_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        tokenizer_from_folder(folder)


@pytest.mark.parametrize("make", [tiny_models.tiny_qwen3, tiny_models.tiny_gemma3])
def test_a_folder_without_a_vocabulary_has_no_tokenizer(make: Any, tmp_path: Path) -> None:
    # transformers makes one of nothing for these families.
    folder = make(tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_folder(folder)
    assert str(caught.value) == (
        f"{folder} has no tokenizer.json, and no file that another tokenizer would be made from, such as "
        "tokenizer.model or vocab.json. Fetch the folder again, or add tokenizer.json."
    )


def test_a_vocabulary_that_makes_no_tokenizer_is_named_in_whole_sentences(tmp_path: Path) -> None:
    folder = tiny_models.tiny_llama(tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(b"no such thing")
    with pytest.raises(
        CheckpointError, match=r"cannot make one from the other files there: .+[^ .:]\. Fetch the folder"
    ):
        tokenizer_from_folder(folder)
