"""The suite for hash functions passes what is right, and says what is wrong with the rest."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, SecretStr

from octavo.core.interfaces import CONTRACT_VERSION, HashFunction
from octavo.testing import HashFunctionSuite, conformance, hash_suite
from octavo.testing.conformance import RuleBroken, SuiteMisusedError


class Sha3(HashFunction):
    """SHA3-256."""

    contract_version = 1

    def digest(self, data):
        return hashlib.sha3_256(data).digest()


class Keyed(HashFunction):
    """BLAKE2b with a key, over CBOR."""

    contract_version = 1
    encoding: ClassVar[str] = "cbor"

    class Options(BaseModel):
        key: str

    def __init__(self, *, options):
        self._key = options.key.encode()

    def digest(self, data):
        return hashlib.blake2b(data, key=self._key, digest_size=16).digest()


class TestSha3(HashFunctionSuite):
    hash_function = Sha3


class TestKeyed(HashFunctionSuite):
    hash_function = Keyed
    options: ClassVar[dict[str, str]] = {"key": "a key for tests"}


# -- hash functions with one fault each -------------------------------------------------------------------------

MUTANTS = []


def breaks(rule):
    def register(function):
        MUTANTS.append(pytest.param(function, rule, id=function.__name__))
        return function

    return register


@breaks(hash_suite.IS_BYTES)
class IsShort(Sha3):
    def digest(self, data):
        return super().digest(data)[:8]


@breaks(hash_suite.IS_BYTES)
class IsText(Sha3):
    def digest(self, data):
        return super().digest(data).hex()


@breaks(hash_suite.IS_BYTES)
class DropsLeadingZeros(Sha3):
    def digest(self, data):
        return super().digest(data) if len(data) < 64 else super().digest(data)[1:]


@breaks(hash_suite.IS_DETERMINISTIC)
class HasASaltOfItsOwn(Sha3):
    def __init__(self):
        self._salt = os.urandom(8)

    def digest(self, data):
        return super().digest(self._salt + data)


@breaks(hash_suite.IS_DETERMINISTIC)
class GoesOnFromBefore(HashFunction):
    contract_version = 1

    def __init__(self):
        self._state = hashlib.sha256()

    def digest(self, data):
        self._state.update(data)
        return self._state.digest()


@breaks(hash_suite.IS_THE_SAME_EVERYWHERE)
class UsesPythonsHash(Sha3):
    def digest(self, data):
        return super().digest(data + str(hash(data)).encode())


SALT_OF_THE_PROCESS = os.urandom(8)


@breaks(hash_suite.IS_THE_SAME_EVERYWHERE)
class HasASaltOfItsProcess(Sha3):
    def digest(self, data):
        return super().digest(SALT_OF_THE_PROCESS + data)


@breaks(hash_suite.IS_THE_SAME_EVERYWHERE)
class FailsElsewhere(Sha3):
    def digest(self, data):
        if os.environ.get("PYTHONHASHSEED") == "2":
            raise OSError("no such machine")
        return super().digest(data)


@breaks(hash_suite.SEES_EVERYTHING)
class SeesTheFirst64Bytes(Sha3):
    def digest(self, data):
        return super().digest(data[:64])


@breaks(hash_suite.SEES_EVERYTHING)
class IgnoresZerosAtTheEnd(Sha3):
    def digest(self, data):
        return super().digest(data.rstrip(b"\0"))


@breaks(hash_suite.SEES_EVERYTHING)
class IgnoresTheHighBit(Sha3):
    def digest(self, data):
        return super().digest(bytes(byte & 0x7F for byte in data[:2000]))


@breaks(hash_suite.SEES_EVERYTHING)
class SeesTheFirstMegabyte(Sha3):
    def digest(self, data):
        return super().digest(data[: 1 << 20])


@breaks(hash_suite.SEES_EVERYTHING)
class SkipsTheMiddleOfLongInputs(Sha3):
    def digest(self, data):
        return super().digest(data if len(data) < 2000 else data[:1000] + data[-1000:] + b"%d" % len(data))


@breaks(hash_suite.SEES_EVERYTHING)
class SeesTheFirst4000BytesOfFewMore(Sha3):
    def digest(self, data):
        return super().digest(data[:4000] + b"%d" % len(data) if len(data) < 10_000 else data)


@breaks(hash_suite.TELLS_PREFIXES_APART)
class IsWrongForBlocksOf128Tokens(Sha3):
    """Sees but the first bytes of what a parent, a header and 128 tokens make."""

    def digest(self, data):
        return super().digest(data[:300] if len(data) == 12 + 32 + 4 * 128 else data)


@breaks(hash_suite.IS_BYTES)
class IsLongerForBlocksOf32Tokens(Sha3):
    def digest(self, data):
        return super().digest(data) + bytes(len(data) == 12 + 32 + 4 * 32)


@breaks(hash_suite.DOES_NOT_COLLIDE)
class Has24Bits(Sha3):
    def digest(self, data):
        return super().digest(data)[:3] * 6


@breaks(hash_suite.ENCODING_IS_KNOWN)
class EncodesInItsOwnWay(Sha3):
    encoding: ClassVar[str] = "json"


@breaks(conformance.RAISES_NOTHING)
class RefusesNothingness(Sha3):
    def digest(self, data):
        if not data:
            raise ValueError("there is nothing to digest")
        return super().digest(data)


@breaks(hash_suite.WORKS_IN_THREADS)
class SharesAnAccumulator(Sha3):
    def digest(self, data):
        self._data = data
        time.sleep(1e-5)
        return super().digest(self._data)


@breaks(hash_suite.TELLS_PREFIXES_APART)
class ForgetsTheParent(Sha3):
    """Sees the tokens of a block, and not the key before them."""

    def digest(self, data):
        return super().digest(data[44:] if len(data) == 52 else data)


@breaks(conformance.STATES_ITS_VERSION)
class FollowsTheInstalledVersion(Sha3):
    contract_version = CONTRACT_VERSION


def failures_of(function):
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": function})()
    failures = []
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except RuleBroken as broken:
                failures.append(broken)
    return failures


@pytest.mark.parametrize(("function", "rule"), MUTANTS)
def test_a_fault_is_caught_and_its_rule_is_named(function, rule, monkeypatch):
    if rule is not hash_suite.IS_THE_SAME_EVERYWHERE:
        # Starting processes is what takes time.
        monkeypatch.setattr(hash_suite, "HASH_SEEDS", ())
    if rule is not hash_suite.DOES_NOT_COLLIDE:
        monkeypatch.setattr(hash_suite, "NUM_SHORT_INPUTS", 1000)
    failures = failures_of(function)
    assert rule in {broken.rule for broken in failures}
    for broken in failures:
        assert str(broken).startswith(f"Rule broken: {broken.rule}\nFound: ")
        assert "Again: Suite().test_" in str(broken)


def test_a_hash_function_can_be_given_by_name_and_a_local_class_cannot_be_checked():
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": "octavo:blake2b"})()
    suite.test_every_process_gets_the_same_digests()

    class Local(Sha3):
        pass

    suite.hash_function = Local
    with pytest.raises(SuiteMisusedError, match="put the class at the top of a module"):
        suite.test_every_process_gets_the_same_digests()


def test_a_package_may_be_spelled_in_any_way():
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": "OCTAVO:blake2b"})()
    suite.test_every_process_gets_the_same_digests()


class WithSecrets(Sha3):
    class Options(BaseModel):
        key: SecretStr
        file: Path

    def __init__(self, *, options):
        self._start = (options.key.get_secret_value() + str(options.file)).encode()

    def digest(self, data):
        return super().digest(self._start + data)


def test_options_reach_another_process_whatever_they_are():
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": WithSecrets})()
    suite.options = {"key": SecretStr("secret"), "file": Path("some") / "file"}
    suite.test_every_process_gets_the_same_digests()


class WithAnything(Sha3):
    class Options(BaseModel):
        anything: Any

    def __init__(self, *, options):
        pass


def test_options_that_no_other_process_can_be_given_are_a_misuse():
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": WithAnything, "options": {"anything": lambda: 0}})()
    suite.test_digests_are_bytes_of_one_length()
    with pytest.raises(
        SuiteMisusedError, match=r"Suite\.options cannot be handed to another process, which gets them as JSON: "
    ):
        suite.test_every_process_gets_the_same_digests()


def test_options_for_a_hash_function_that_takes_none_are_a_misuse():
    suite = type("Suite", (HashFunctionSuite,), {"hash_function": Sha3, "options": {"key": "x", "size": 3}})()
    with pytest.raises(SuiteMisusedError) as caught:
        suite.test_digests_are_bytes_of_one_length()
    assert str(caught.value) == "Suite.options: The class Sha3 takes no options, and was given 'key', 'size'."
