"""Keys of the prefix cache: what they depend on, and what they do not."""

import os
import subprocess
import sys
from array import array

import pytest

from octavo.core.interfaces import HashFunction
from octavo.core.prefix_hash import PrefixHasher, check_hash_function, hash_root, hash_seed_from_environment
from octavo.errors import PluginContractError
from octavo.hash_functions import Blake2b, Sha256, Sha256Cbor, Xxh3, Xxh3Cbor

ALL = [Sha256, Blake2b, Sha256Cbor, Xxh3, Xxh3Cbor]


def keys_of(token_ids, *, function=Sha256, block_size=2, root=b"r" * 32, extra=()):
    keys: list[bytes] = []
    PrefixHasher(function(), block_size, root).extend(keys, array("i", token_ids), extra)
    return keys


@pytest.mark.parametrize("function", ALL)
def test_only_full_blocks_have_a_key_and_digests_have_sixteen_bytes_or_more(function):
    keys = keys_of([1, 2, 3, 4, 5], function=function)
    assert len(keys) == 2
    assert len({len(key) for key in keys}) == 1
    assert len(keys[0]) >= 16


@pytest.mark.parametrize("function", ALL)
def test_a_key_stands_for_its_block_and_everything_before_it(function):
    first = keys_of([1, 2, 3, 4], function=function)
    assert keys_of([1, 2, 3, 5], function=function)[0] == first[0]
    assert keys_of([1, 2, 3, 5], function=function)[1] != first[1]
    # The second block is equal, the first one is not.
    assert not set(keys_of([9, 2, 3, 4], function=function)) & set(first)


@pytest.mark.parametrize("function", ALL)
def test_ids_cannot_run_into_each_other(function):
    assert keys_of([1, 23], function=function) != keys_of([12, 3], function=function)
    assert keys_of([0, 0], function=function) != keys_of([0, 256], function=function)


@pytest.mark.parametrize("function", ALL)
def test_extra_keys_of_two_kinds_with_the_same_text_do_not_collide(function):
    plain = keys_of([1, 2], function=function)
    salted = keys_of([1, 2], function=function, extra=(("salt", "x"),))
    adapter = keys_of([1, 2], function=function, extra=(("lora", "x", 0),))
    other_epoch = keys_of([1, 2], function=function, extra=(("lora", "x", 1),))
    digest = keys_of([1, 2], function=function, extra=(("embeds", b"x"),))
    as_text = keys_of([1, 2], function=function, extra=(("embeds", "x"),))
    two = keys_of([1, 2], function=function, extra=(("salt",), ("x",)))
    assert len({keys[0] for keys in (plain, salted, adapter, other_epoch, digest, as_text, two)}) == 7


def test_an_extra_key_of_another_type_is_refused():
    with pytest.raises(TypeError, match="not float"):
        keys_of([1, 2], extra=(("salt", 1.5),))


def test_a_salt_in_the_first_block_separates_all_later_ones():
    assert not set(keys_of([1, 2, 3, 4], extra=(("salt", "a"),))) & set(keys_of([1, 2, 3, 4]))


def test_extending_goes_on_where_it_stopped():
    hasher = PrefixHasher(Sha256(), 2, b"root")
    keys: list[bytes] = []
    hasher.extend(keys, array("i", [1, 2, 3]))
    assert len(keys) == 1
    hasher.extend(keys, array("i", [1, 2, 3, 4, 5, 6]))
    whole: list[bytes] = []
    hasher.extend(whole, array("i", [1, 2, 3, 4, 5, 6]))
    assert keys == whole


def test_the_framed_encoding_is_fixed_so_that_keys_outlive_releases():
    assert keys_of([1, 2], root=b"root")[0].hex() == (
        __import__("hashlib")
        .sha256(bytes.fromhex("040000000200000000000000") + b"root" + bytes.fromhex("0100000002000000"))
        .hexdigest()
    )


def test_the_cbor_encoding_is_the_deterministic_array_of_parent_ids_and_extra_keys():
    # 83 array(3); 44 bytes(4) "root"; 82 array(2) 01 18 18; f6 null
    expected = Sha256().digest(b"\x83\x44root\x82\x01\x18\x18\xf6")
    assert keys_of([1, 24], function=Sha256Cbor, root=b"root") == [expected]


def test_roots_are_random_unless_a_seed_fixes_them():
    function = Sha256()
    assert hash_root(function, None) != hash_root(function, None)
    assert hash_root(function, "7") == hash_root(function, "7")
    assert hash_root(function, "7") != hash_root(function, "8")
    assert len(hash_root(function, "\ud800")) == 32
    # The documented value, which other programs can reproduce.
    assert hash_root(function, "7") == function.digest(b"octavo prefix root\0" + b"7")


@pytest.mark.parametrize(("value", "seed"), [("", None), ("random", None), ("0", "0"), ("42", "42")])
def test_pythonhashseed_fixes_the_root_where_it_fixes_a_seed(monkeypatch, value, seed):
    monkeypatch.setenv("PYTHONHASHSEED", value)
    assert hash_seed_from_environment() == seed


def test_two_processes_with_different_hash_seeds_agree_on_keys():
    program = (
        "from array import array\n"
        "from octavo.core.prefix_hash import PrefixHasher, hash_root\n"
        "from octavo.hash_functions import Sha256\n"
        "keys = []\n"
        "PrefixHasher(Sha256(), 2, hash_root(Sha256(), 'shared')).extend("
        "keys, array('i', range(6)), (('salt', 'a'), ('lora', 'n', 1)))\n"
        "print(b''.join(keys).hex())\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


# -- what a hash function must be -------------------------------------------------------------------------------


class Odd(HashFunction):
    """Makes digests as a test says, and counts them."""

    def __init__(self, digest):
        self._digest = digest
        self.num_calls = 0

    def digest(self, data):
        self.num_calls += 1
        return self._digest(data, self.num_calls)


def sha(data):
    return Sha256().digest(data)


@pytest.mark.parametrize("function", ALL)
def test_octavos_own_hash_functions_make_keys(function):
    check_hash_function(function())


def test_digests_of_sixteen_bytes_are_enough():
    check_hash_function(Odd(lambda data, _: sha(data)[:16]))


@pytest.mark.parametrize("digest", [b"", b"x" * 15, "x" * 32, bytearray(32), 5, None])
def test_a_digest_that_is_no_key_is_refused(digest):
    with pytest.raises(PluginContractError) as caught:
        check_hash_function(Odd(lambda *_: digest))
    assert str(caught.value) == (
        f"The hash function Odd returns {digest!r} as a digest; it must be bytes, at least 16 of them."
    )


@pytest.mark.parametrize(
    ("digest", "sizes", "num_different"),
    [
        (lambda data, _: sha(data) + data[:1], [32, 33, 33, 33], 4),
        (lambda *_: b"x" * 20, [20, 20, 20, 20], 1),
        (lambda data, _: sha(data[1:]), [32, 32, 32, 32], 3),
    ],
    ids=["of several lengths", "always the same", "without the first byte"],
)
def test_digests_that_do_not_tell_inputs_apart_are_refused(digest, sizes, num_different):
    with pytest.raises(PluginContractError) as caught:
        check_hash_function(Odd(digest))
    assert str(caught.value) == (
        f"The hash function Odd returns digests of {sizes} bytes, {num_different} different ones for 4 inputs; each "
        "input must have its own, and all must be of one length."
    )


def test_digests_that_change_from_call_to_call_are_refused():
    with pytest.raises(PluginContractError) as caught:
        check_hash_function(Odd(lambda data, num_calls: sha(data + bytes([num_calls]))))
    assert str(caught.value) == (
        "The hash function Odd returns another digest when it is asked again; the same bytes must give the same one."
    )


def test_what_a_hash_function_raises_is_not_hidden():
    with pytest.raises(OverflowError, match="too much"):
        check_hash_function(Odd(lambda *_: (_ for _ in ()).throw(OverflowError("too much"))))


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("extra", [(), (("salt", "x"),)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_keys_do_not_depend_on_how_many_blocks_are_hashed_at_a_time(function, extra, block_size):
    token_ids = array("i", [(7 * number) % 1000 for number in range(16 * 9 + 5)])
    hasher = PrefixHasher(function(), block_size, b"r" * 32)
    at_once: list[bytes] = []
    hasher.extend(at_once, token_ids, extra)
    one_by_one: list[bytes] = []
    for end in range(len(token_ids) + 1):
        hasher.extend(one_by_one, token_ids[:end], extra)
    in_two: list[bytes] = []
    hasher.extend(in_two, token_ids[:40], extra)
    hasher.extend(in_two, token_ids, extra)
    assert at_once == one_by_one == in_two
    assert len(set(at_once)) == len(token_ids) // block_size


class ShortForBlocks(Sha256):
    """Returns something else for the bytes of a block of two tokens."""

    answer: object = b""

    def digest(self, data):
        return super().digest(data) if len(data) < 50 else self.answer


@pytest.mark.parametrize("answer", [b"", b"short", "text" * 8, None])
@pytest.mark.parametrize("num_tokens", [2, 4, 6])
def test_a_digest_of_another_length_than_before_is_refused_before_it_becomes_a_key(answer, num_tokens):
    function = type("Odd", (ShortForBlocks,), {"answer": answer})()
    keys: list[bytes] = []
    with pytest.raises(PluginContractError) as caught:
        PrefixHasher(function, 2, b"r" * 32).extend(keys, array("i", range(num_tokens)))
    assert str(caught.value) == (
        f"The hash function Odd returns {answer!r} as a digest, and returned 32 bytes before; it must return as many "
        "bytes for each input."
    )
    assert keys == []


def test_a_request_can_still_get_tokens_while_the_error_of_a_hash_function_is_at_hand():
    tokens = array("i", range(6))
    calls: list[bytes] = []

    def fails_at_the_third_block(data, _):
        calls.append(data)
        if len(calls) == 4:
            raise OverflowError("too much")
        return sha(data)

    keys: list[bytes] = []
    with pytest.raises(OverflowError) as caught:
        PrefixHasher(Odd(fails_at_the_third_block), 2, b"r" * 32).extend(keys, tokens)
    tokens.append(6)
    assert caught.value.__traceback__ is not None
    assert len(keys) == 2
