from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.detokenizer import MAX_WINDOW_IDS, REPLACEMENT, IncrementalDetokenizer
from octavo.testing.tokenizers import TableTokenizer, byte_tokenizer, token_table

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "    return  self.value\r\n\tif x:\n\n        pass",
    "příliš žluťoučký kůň úpěl ďábelské ódy",
    "你好,世界。你好吗?",
    "😀😀😀 👨‍👩‍👧‍👦 🎉🎉",
]
SPECIAL = "<|end|>"


class LibraryTokenizer(TableTokenizer):
    """A tokenizer of the `tokenizers` library behind the protocol."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.library = tokenizer
        super().__init__({}, special_token_ids=[self.id_of(SPECIAL)])

    def id_of(self, token: str) -> int:
        token_id = self.library.token_to_id(token)
        assert token_id is not None
        return int(token_id)

    @property
    def vocab_size(self) -> int:
        return int(self.library.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self.library.encode(text).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.library.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class PiecewiseTokenizer(LibraryTokenizer):
    """Decodes as the C++ SentencePiece does: each bad byte becomes U+FFFD, and no good one with it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = b""
        for token_id in token_ids:
            piece = self.library.id_to_token(token_id)
            if piece is None or (skip_special_tokens and token_id in self.special_token_ids):
                continue
            is_byte = len(piece) == 6 and piece.startswith("<0x")
            text += bytes([int(piece[3:5], 16)]) if is_byte else piece.replace("▁", " ").encode()
        return text.decode("utf-8", errors="replace").removeprefix(" ")


def byte_level_bpe() -> LibraryTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return LibraryTokenizer(tokenizer)


def sentencepiece_like(make: Callable[[Tokenizer], LibraryTokenizer], decoder: Any) -> LibraryTokenizer:
    bytes_first = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", *bytes_first, "▁", "▁▁", "▁▁▁▁", "▁the", "▁a", "a", "b", "é", "▁é", "fox", ".", "\ufffd", "世"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return make(tokenizer)


def llama_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def metaspace_decoder() -> Any:
    return decoders.Metaspace(replacement="▁", prepend_scheme="always", split=False)


BYTE_LEVEL = byte_level_bpe()
PIECEWISE = sentencepiece_like(PiecewiseTokenizer, llama_decoder())
METASPACE = sentencepiece_like(LibraryTokenizer, metaspace_decoder())
HUGGING_FACE_LLAMA = sentencepiece_like(LibraryTokenizer, llama_decoder())


def deltas_of(tokenizer: TableTokenizer, calls: Sequence[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(token_ids) for token_ids in calls), detokenizer.finish()]


def one_by_one(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


def random_split(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    calls = []
    while token_ids:
        size = rng.choice([0, 1, 1, 1, 2, 5])
        calls.append(token_ids[:size])
        token_ids = token_ids[size:]
    return calls


def random_ids(rng: random.Random, tokenizer: LibraryTokenizer, max_length: int = 60) -> list[int]:
    """Random tokens, mostly single bytes, many of them above 127, and whole characters in single bytes."""
    if tokenizer is BYTE_LEVEL:
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        byte_ids = [tokenizer.id_of(spelled.pre_tokenize_str(chr(byte))[0][0][-1]) for byte in range(128)] + [
            token_id
            for token, token_id in tokenizer.library.get_vocab().items()
            if len(token) == 1 and tokenizer.decode([token_id]) == REPLACEMENT
        ]
        by_byte = {}
    else:
        byte_ids = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in range(256)]
        by_byte = dict(enumerate(byte_ids))
    special = tokenizer.id_of(SPECIAL)
    ids: list[int] = []
    weights = [rng.random() for _ in range(5)]
    for _ in range(rng.randrange(max_length)):
        kind = rng.choices(range(5), weights)[0]
        if kind == 0:
            ids.append(rng.choice(byte_ids))
        elif kind == 1:
            ids.append(rng.choice(byte_ids[128:]))
        elif kind == 2:
            text = rng.choice("é你😀ď\n ")
            ids += [by_byte[byte] for byte in text.encode()] if by_byte else tokenizer.encode(text)
        elif kind == 3:
            ids.append(rng.randrange(tokenizer.vocab_size + 3))
        else:
            ids.append(special)
    return ids


@pytest.mark.parametrize("text", ["ď", "你", "😀", "👨‍👩‍👧‍👦", "ď你😀👨‍👩‍👧‍👦 "])
def test_a_character_shows_when_its_last_byte_is_there_and_not_before(text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer(), skip_special_tokens=True)
    shown = b""
    for count, byte in enumerate(text.encode(), start=1):
        delta = detokenizer.add([byte])
        assert REPLACEMENT not in delta
        shown += delta.encode()
        assert shown.decode() == text.encode()[:count].decode(errors="ignore")
    assert shown.decode() == text
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_half_a_character_at_the_end_is_flushed_as_decode_shows_it(num_bytes: int) -> None:
    token_ids = list(b"ab" + "😀".encode()[:num_bytes])
    deltas = deltas_of(byte_tokenizer(), one_by_one(token_ids))
    assert deltas[:2] == ["a", "b"]
    assert not any(deltas[2:-1])
    assert deltas[-1] == REPLACEMENT
    assert "".join(deltas) == byte_tokenizer().decode(token_ids)


@pytest.mark.parametrize("skip", [True, False], ids=["skipping special tokens", "keeping special tokens"])
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, PIECEWISE, METASPACE], ids=["byte-level", "sentencepiece", "metaspace"]
)
def test_deltas_of_5000_random_sequences_join_to_the_decoded_whole(tokenizer: LibraryTokenizer, skip: bool) -> None:
    rng = random.Random(20240 + skip)
    for _ in range(2500):
        token_ids = random_ids(rng, tokenizer)
        deltas = deltas_of(tokenizer, random_split(rng, token_ids), skip=skip)
        assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip), token_ids


def library_text_with_good_characters_kept(tokenizer: LibraryTokenizer, token_ids: list[int]) -> str:
    """What the Llama decoder gives, but that a run's characters before its first bad byte stay."""
    text, run = "", b""
    pieces = [tokenizer.library.id_to_token(token_id) for token_id in token_ids]
    for piece in [*(piece for piece in pieces if piece not in (None, SPECIAL)), ""]:
        if len(piece) == 6 and piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + REPLACEMENT * (len(run) - error.start)
        run = b""
        text += piece.replace("▁", " ")
    return text.removeprefix(" ")


def test_a_bad_byte_does_not_take_back_characters_that_hugging_face_would_replace() -> None:
    rng = random.Random(7)
    num_exact = 0
    for _ in range(2500):
        token_ids = [*HUGGING_FACE_LLAMA.encode("a"), *random_ids(rng, HUGGING_FACE_LLAMA, max_length=7)]
        text = "".join(deltas_of(HUGGING_FACE_LLAMA, random_split(rng, token_ids)))
        assert text == library_text_with_good_characters_kept(HUGGING_FACE_LLAMA, token_ids), token_ids
        num_exact += text == HUGGING_FACE_LLAMA.decode(token_ids)
    assert num_exact > 1250


def test_hugging_face_byte_runs_that_are_characters_come_out_exactly() -> None:
    rng = random.Random(11)
    for _ in range(500):
        text = "".join(rng.choice(["é", "你", "😀", " ", "\n", " the", "fox", "世", "𐌰𐌱"]) for _ in range(30))
        token_ids = HUGGING_FACE_LLAMA.encode("▁" + text.replace(" ", "▁"))
        deltas = deltas_of(HUGGING_FACE_LLAMA, random_split(rng, token_ids))
        assert "".join(deltas) == HUGGING_FACE_LLAMA.decode(token_ids) == text
        assert REPLACEMENT not in "".join(deltas)


@pytest.mark.parametrize("text", ["    four", " one", "\t\ttabs\t", "a\r\nb\r\n", "  a    b  ", "\n\n "])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECEWISE, HUGGING_FACE_LLAMA])
def test_white_space_comes_out_as_it_went_in(tokenizer: LibraryTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text if tokenizer is BYTE_LEVEL else "▁" + text.replace(" ", "▁"))
    assert "".join(deltas_of(tokenizer, one_by_one(token_ids))) == text


def test_a_space_after_a_skipped_special_token_is_not_lost() -> None:
    id_of = PIECEWISE.id_of
    token_ids = [id_of("a"), *[id_of(SPECIAL)] * 50, id_of("▁a")]
    assert deltas_of(PIECEWISE, one_by_one(token_ids))[-2:] == [" a", ""]


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = TableTokenizer({0: "hi", 1: "<eos>"}, special_token_ids=[1])
    assert "".join(deltas_of(tokenizer, [[0], [1]], skip=True)) == "hi"
    assert "".join(deltas_of(tokenizer, [[0], [1]], skip=False)) == "hi<eos>"


def test_a_skipped_token_in_the_middle_of_a_character_does_not_break_it() -> None:
    tokenizer = TableTokenizer({0: b"\xe4\xbd", 1: b"\xa0", 2: "<eos>"}, special_token_ids=[2])
    assert deltas_of(tokenizer, [[0], [2], [1]]) == ["", "", "你", ""]


def test_a_token_that_is_itself_a_replacement_character_is_held_for_the_next_text_only() -> None:
    tokenizer = token_table("\ufffd", "a")
    assert deltas_of(tokenizer, [[0], [1]]) == ["", "\ufffda", ""]


def test_no_more_than_three_characters_are_held_however_many_bytes_are_bad() -> None:
    detokenizer = IncrementalDetokenizer(token_table("\ufffd", b"\xff"), skip_special_tokens=True)
    shown = 0
    for count in range(1, 201):
        shown += len(detokenizer.add([count % 2]))
        assert shown >= count - 3


def test_plain_text_is_never_delayed() -> None:
    tokens = ["Hello", " wor", "ld", "!", "\n", " ", " é", "你"] * 20
    tokenizer = token_table(*tokens)
    assert deltas_of(tokenizer, one_by_one(range(len(tokens)))) == [*tokens, ""]


class CountingTokenizer(TableTokenizer):
    """Remembers how many ids were decoded at once."""

    def __init__(self, table: dict[int, str | bytes], special_token_ids: Sequence[int] = ()) -> None:
        super().__init__(table, special_token_ids=special_token_ids)
        self.longest_decode = 0
        self.num_ids_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest_decode = max(self.longest_decode, len(token_ids))
        self.num_ids_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "token", ["a", "", " ", "\ufffd", b"\xff", b"\xf0", b"\x80", b"\x80\xf0\x9f\x98", b"\x9f\xf0", "<eos>"]
)
def test_the_cost_of_a_token_does_not_grow_with_the_text(token: str | bytes) -> None:
    tokenizer = CountingTokenizer({0: token, 1: b"\xf0\x9f\x98"}, special_token_ids=[0] if token == "<eos>" else [])
    token_ids = [1] + [0] * 500
    assert "".join(deltas_of(tokenizer, one_by_one(token_ids))) == TableTokenizer.decode(tokenizer, token_ids)
    assert tokenizer.num_ids_decoded < 500 * 2 * MAX_WINDOW_IDS
    token_text_ids = [0, 0, 1] * 200
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    tokenizer.longest_decode = 0
    text = detokenizer.add(token_text_ids) + detokenizer.finish()
    assert tokenizer.longest_decode <= MAX_WINDOW_IDS + 1
    assert text == TableTokenizer.decode(tokenizer, token_text_ids)


def test_a_run_of_bad_bytes_without_end_is_let_go_of_by_the_library_tokenizer_too() -> None:
    byte_ids = [HUGGING_FACE_LLAMA.id_of(f"<0x{byte:02X}>") for byte in b"\xff" + b"a" * 300]
    deltas = deltas_of(HUGGING_FACE_LLAMA, one_by_one(byte_ids))
    shown = 0
    for count, delta in enumerate(deltas[:-1], start=1):
        shown += len(delta)
        assert shown >= count - 3
    assert "".join(deltas) == REPLACEMENT * (MAX_WINDOW_IDS + 1) + "a" * (300 - MAX_WINDOW_IDS)


@given(st.lists(st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80\xf0", b"\x80", b"\x9f", b"\xe4\xbd", b"\xff", b" a"])))
def test_tokens_that_meet_inside_characters_join_to_the_decoded_whole(tokens: list[bytes]) -> None:
    tokenizer = token_table(*tokens)
    token_ids = list(range(len(tokens)))
    assert "".join(deltas_of(tokenizer, one_by_one(token_ids))) == tokenizer.decode(token_ids)


@given(st.text(), st.data())
def test_no_delta_of_valid_text_holds_a_character_that_the_text_does_not(text: str, data: st.DataObject) -> None:
    encoded = text.replace(REPLACEMENT, "").encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))))
    tokens = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    shown = ""
    for delta in deltas_of(token_table(*tokens), one_by_one(range(len(tokens)))):
        assert REPLACEMENT not in delta
        shown += delta
    assert shown.encode() == encoded
