"""Octavo's own hash functions."""

import hashlib
import sys

import pytest

from octavo.errors import MissingExtraError
from octavo.hash_functions import Blake2b, Sha256, Sha256Cbor, Xxh3, Xxh3Cbor
from octavo.testing import HashFunctionSuite


class TestSha256(HashFunctionSuite):
    hash_function = "sha256"


class TestBlake2b(HashFunctionSuite):
    hash_function = "blake2b"


class TestSha256Cbor(HashFunctionSuite):
    hash_function = "sha256_cbor"


class TestXxh3(HashFunctionSuite):
    hash_function = "xxh3_128"


class TestXxh3Cbor(HashFunctionSuite):
    hash_function = "xxh3_128_cbor"


def test_digests_are_those_of_the_named_algorithms():
    assert Sha256().digest(b"x") == hashlib.sha256(b"x").digest()
    assert Blake2b().digest(b"x") == hashlib.blake2b(b"x", digest_size=32).digest()
    assert len(Xxh3().digest(b"x")) == 16


def test_only_xxh3_is_known_to_have_constructible_collisions():
    assert [f.is_collision_resistant for f in (Sha256, Blake2b, Sha256Cbor, Xxh3, Xxh3Cbor)] == [True] * 3 + [False] * 2


def test_without_xxhash_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'octavo\[xxhash\]'"):
        Xxh3()
