"""The conformance suite of hash functions.

from octavo.testing import HashFunctionSuite

class TestSha3(HashFunctionSuite):
    hash_function = "sha3"
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, get_args

from octavo.core.interfaces import Encoding, HashFunction
from octavo.core.prefix_hash import PrefixHasher, hash_root
from octavo.errors import PluginContractError
from octavo.plugins.families import HASH_FUNCTIONS
from octavo.plugins.registry import is_same_package, scan
from octavo.testing.conformance import (
    ConformanceSuite,
    RuleBroken,
    SuiteMisusedError,
    check_contract_version,
    describe,
    reproducible,
)

IS_BYTES = "A digest is bytes, at least 16 of them and always as many."
IS_DETERMINISTIC = "The same bytes give the same digest: again, from another object, whatever was digested before."
IS_THE_SAME_EVERYWHERE = "The same bytes give the same digest in every process."
SEES_EVERYTHING = "Every bit of the input, and its length, matter to the digest."
DOES_NOT_COLLIDE = "Different inputs have different digests."
ENCODING_IS_KNOWN = "`encoding` is one of those that core knows, and `is_collision_resistant` is True or False."
TELLS_PREFIXES_APART = "The key of a block stands for its tokens and all before them."
WORKS_IN_THREADS = "Several threads may call digest at once."
LEAVES_ITS_INPUT = "digest leaves its input as it is."

# Around the block sizes of common hash functions, where padding goes wrong.
SHORT_LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 55, 56, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
LENGTHS = (*SHORT_LENGTHS, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 3000, 4095, 4096, 4097, 5000)
# Of long inputs, a bit of each so many bytes is changed.
REGION_BYTES = 32
BLOCK_SIZES = (1, 16, 32, 128, 512)
NUM_SHORT_INPUTS = 100_000
LARGE_INPUT_BYTES = 4 << 20
# Two, and one that differs from run to run.
HASH_SEEDS = ("1", "2", "random")

_IN_ANOTHER_PROCESS = """
import json, sys
from octavo.testing.hash_suite import digests_elsewhere
print(json.dumps(digests_elsewhere(json.load(sys.stdin))))
"""


class HashFunctionSuite(ConformanceSuite):
    """Holds a hash function to its contract.

    Attributes:
        hash_function: The class, or the name that it is registered under. A class has to stand at the top of its
            module, so that another process can import it.
    """

    hash_function: ClassVar[str | type[HashFunction]]

    # -- the class ----------------------------------------------------------------------------------------------

    @reproducible
    def test_the_class_states_its_contract_version_and_its_encoding(self) -> None:
        function = self._hash_class()
        check_contract_version(function, HashFunction)
        if function.encoding not in get_args(Encoding):
            raise RuleBroken(ENCODING_IS_KNOWN, f"encoding is {function.encoding!r}, not one of {get_args(Encoding)}")
        if type(function.is_collision_resistant) is not bool:
            raise RuleBroken(ENCODING_IS_KNOWN, f"is_collision_resistant is {function.is_collision_resistant!r}")

    # -- digests ------------------------------------------------------------------------------------------------

    @reproducible
    def test_digests_are_bytes_of_one_length(self) -> None:
        digest = self._make().digest
        num_bytes = None
        for data in corpus():
            found: Any = digest(data)
            if type(found) is not bytes or len(found) < 16 or len(found) != (num_bytes or len(found)):
                raise RuleBroken(
                    IS_BYTES, f"the digest of {_shown(data)} is {found!r}; those before had {num_bytes} bytes"
                )
            num_bytes = len(found)

    @reproducible
    def test_the_same_bytes_give_the_same_digest(self) -> None:
        first, second = self._make(), self._make()
        inputs = list(corpus())
        digests = [first.digest(data) for data in inputs]
        # In another order, on another object, and from other bytes objects of the same content.
        for data, digest in reversed(list(zip(inputs, digests, strict=True))):
            for function in (second, first):
                found = function.digest(bytes(bytearray(data)))
                if found != digest:
                    raise RuleBroken(
                        IS_DETERMINISTIC, f"{_shown(data)} gave {digest.hex()} and later {_as_text(found)}"
                    )

    @reproducible
    def test_every_process_gets_the_same_digests(self) -> None:
        function = self._make()
        inputs = list(corpus())
        own = [function.digest(data).hex() for data in inputs]
        for seed, found in zip(HASH_SEEDS, self._digests_of_other_processes(inputs), strict=True):
            for data, here, there in zip(inputs, own, found, strict=True):
                if here != there:
                    raise RuleBroken(
                        IS_THE_SAME_EVERYWHERE,
                        f"{_shown(data)} gives {here} here and {there} in a process with PYTHONHASHSEED={seed}",
                    )

    @reproducible
    def test_every_bit_and_the_length_matter(self) -> None:
        digest = self._make().digest
        rng = random.Random(0)
        for length in LENGTHS:
            data = rng.randbytes(length)
            seen = {digest(data): data}
            for changed in _changed(data, rng):
                found = digest(changed)
                if found in seen:
                    raise RuleBroken(SEES_EVERYTHING, f"{_shown(changed)} has the same digest as {_shown(seen[found])}")
                seen[found] = changed

    @reproducible
    def test_short_inputs_do_not_collide(self) -> None:
        digest = self._make().digest
        seen: dict[bytes, bytes] = {}
        for number in range(NUM_SHORT_INPUTS):
            # Numbers as bytes, as text, and with what is common in front: what differs is in different places.
            form = number % 3
            data = (number.to_bytes(4, "little"), b"%d" % number, bytes(40) + number.to_bytes(4, "big"))[form]
            found = digest(data)
            if found in seen:
                raise RuleBroken(DOES_NOT_COLLIDE, f"{_shown(data)} and {_shown(seen[found])}, after {number} inputs")
            seen[found] = data

    @reproducible
    def test_large_inputs_work_to_their_last_byte(self) -> None:
        digest = self._make().digest
        large = random.Random(1).randbytes(LARGE_INPUT_BYTES)
        changed = [large, large + b"\0", large[:-1], large[:-1] + bytes([large[-1] ^ 1])]
        if len({digest(data) for data in changed}) < len(changed):
            raise RuleBroken(SEES_EVERYTHING, f"inputs of {LARGE_INPUT_BYTES} bytes that differ at the end are equal")

    @reproducible
    def test_the_input_stays_as_it_is(self) -> None:
        digest = self._make().digest
        for data in corpus():
            copy = bytes(bytearray(data))
            digest(data)
            if data != copy:
                raise RuleBroken(LEAVES_ITS_INPUT, f"{_shown(copy)} became {_shown(data)}")

    @reproducible
    def test_threads_do_not_disturb_each_other(self) -> None:
        function = self._make()
        inputs = [random.Random(length).randbytes(1 + 37 * length) for length in range(64)] * 8
        alone = [function.digest(data) for data in inputs]
        interval = sys.getswitchinterval()
        try:
            # As often as it goes, so that threads meet in the middle of a call.
            sys.setswitchinterval(1e-6)
            with ThreadPoolExecutor(8) as threads:
                together = list(threads.map(function.digest, inputs))
        finally:
            sys.setswitchinterval(interval)
        wrong = [data for data, one, other in zip(inputs, alone, together, strict=True) if one != other]
        if wrong:
            raise RuleBroken(
                WORKS_IN_THREADS, f"{len(wrong)} of {len(inputs)} digests differ, that of {_shown(wrong[0])} first"
            )

    # -- keys ---------------------------------------------------------------------------------------------------

    @reproducible
    def test_keys_tell_prefixes_apart(self) -> None:
        root = hash_root(self._make(), "seed of the suite")
        keys = {
            "[1, 23] [5, 6]": self._keys(root, [1, 23, 5, 6]),
            "[12, 3] [5, 6]": self._keys(root, [12, 3, 5, 6]),
            "[3, 12] [5, 6]": self._keys(root, [3, 12, 5, 6]),
            "[5, 6] [1, 23]": self._keys(root, [5, 6, 1, 23]),
            "[1, 23] [5, 6] with a salt": self._keys(root, [1, 23, 5, 6], (("salt", "a"),)),
            "[1, 23] [5, 6] with an adapter": self._keys(root, [1, 23, 5, 6], (("lora", "a", 0),)),
            "[1, 23] [5, 6] from another root": self._keys(hash_root(self._make(), "another"), [1, 23, 5, 6]),
        }
        seen: dict[bytes, str] = {}
        for prompt, prompt_keys in keys.items():
            for block, key in enumerate(prompt_keys):
                if key in seen:
                    raise RuleBroken(TELLS_PREFIXES_APART, f"block {block} of {prompt} has the same key as {seen[key]}")
                seen[key] = f"block {block} of {prompt}"
        if self._keys(root, [1, 23, 5, 6]) != keys["[1, 23] [5, 6]"]:
            raise RuleBroken(TELLS_PREFIXES_APART, "the same prompt has other keys the second time")

    @reproducible
    def test_keys_of_blocks_of_every_size_see_each_token(self) -> None:
        root = hash_root(self._make(), "seed of the suite")
        for block_size in BLOCK_SIZES:
            rng = random.Random(block_size)
            prompt = [rng.randrange(150_000) for _ in range(3 * block_size)]
            keys = self._keys(root, prompt, block_size=block_size)
            seen = {key: f"block {block} as it was" for block, key in enumerate(keys)}
            # Tokens of the first block, so that the keys of all three differ.
            for place in range(0, block_size, max(block_size // 64, 1)):
                for changed in (prompt[place] ^ 1, prompt[place] ^ 1 << 17):
                    other = [*prompt[:place], changed, *prompt[place + 1 :]]
                    for block, key in enumerate(self._keys(root, other, block_size=block_size)):
                        what = f"block {block} with token {place} of {block_size} a block changed"
                        if key in seen:
                            raise RuleBroken(TELLS_PREFIXES_APART, f"{what} has the same key as {seen[key]}")
                        seen[key] = what
            if len({len(key) for key in seen}) > 1 or len(seen) < 3:
                lengths = sorted({len(key) for key in seen})
                raise RuleBroken(IS_BYTES, f"keys of blocks of {block_size} tokens have {lengths} bytes")

    # -- parts --------------------------------------------------------------------------------------------------

    def _hash_class(self) -> type[HashFunction]:
        return self._load(HASH_FUNCTIONS, "hash_function", HashFunction)

    def _make(self) -> HashFunction:
        function = self._hash_class()
        made: HashFunction = function(**self._options_for(function))
        return made

    def _keys(
        self,
        root: bytes,
        token_ids: Sequence[int],
        extra: Sequence[tuple[str | int | bytes, ...]] = (),
        *,
        block_size: int = 2,
    ) -> list[bytes]:
        keys: list[bytes] = []
        try:
            PrefixHasher(self._make(), block_size, root).extend(keys, array("i", token_ids), extra)
        except PluginContractError as error:
            raise RuleBroken(IS_BYTES, f"in blocks of {block_size} tokens: {error}") from error
        return keys

    def _digests_of_other_processes(self, inputs: Sequence[bytes]) -> list[list[str]]:
        """Return the digests in hexadecimal, for each of HASH_SEEDS."""
        try:
            options = json.dumps(dict(self.options), default=_as_json)
        except (TypeError, ValueError) as error:
            raise SuiteMisusedError(
                f"{type(self).__name__}.options cannot be handed to another process, which gets them as JSON: "
                f"{describe(error)}."
            ) from error
        question = json.dumps(
            {"part": self._name_elsewhere(), "options": options, "inputs": [data.hex() for data in inputs]}
        )

        def ask(seed: str) -> subprocess.CompletedProcess[str]:
            environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            return subprocess.run(
                [sys.executable, "-c", _IN_ANOTHER_PROCESS],
                input=question,
                capture_output=True,
                text=True,
                env={**os.environ, **environment},
                timeout=120,
                check=False,
            )

        # Side by side, as starting is most of it.
        with ThreadPoolExecutor(len(HASH_SEEDS) or 1) as threads:
            answers = list(threads.map(ask, HASH_SEEDS))
        for answer in answers:
            if answer.returncode:
                last_line = answer.stderr.strip().splitlines()[-1:] or [f"exit status {answer.returncode}"]
                raise RuleBroken(IS_THE_SAME_EVERYWHERE, f"another process fails: {last_line[0]}")
        return [json.loads(answer.stdout) for answer in answers]

    def _name_elsewhere(self) -> str:
        """Return what another process finds the class by: its registered name, or module:class."""
        if isinstance(self.hash_function, str):
            return self.hash_function
        function = self._hash_class()
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
            raise SuiteMisusedError(
                f"Another process cannot import {name} from {module}; put the class at the top of a module."
            )
        return f"{module}:{name}"


def digests_elsewhere(question: dict[str, Any]) -> list[str]:
    """Answer, in a process of its own, what the digests of some inputs are.

    Args:
        question: "part" is a registered name or module:class, "options" are the part's, as JSON, "inputs" are
            hexadecimal.
    """
    import importlib

    module, _, name = question["part"].rpartition(":")
    # A registered name may have a package in front of a colon too; no module has a hyphen.
    is_class = module and not _is_registered(question["part"])
    part = getattr(importlib.import_module(module), name) if is_class else scan().load(HASH_FUNCTIONS, question["part"])
    options = {} if part.Options is None else {"options": part.Options.model_validate_json(question["options"])}
    function = part(**options)
    return [function.digest(bytes.fromhex(data)).hex() for data in question["inputs"]]


def corpus() -> Iterator[bytes]:
    """Yield inputs of many lengths: zeros, ones, counting and random bytes."""
    rng = random.Random(2)
    for length in LENGTHS:
        yield bytes(length)
        if length:
            yield b"\xff" * length
            yield bytes(index % 256 for index in range(length))
            yield rng.randbytes(length)


def _changed(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield inputs that differ from `data`, and from each other, in one thing."""
    num_bits = 8 * len(data)
    bits: Sequence[int] = range(num_bits)
    if num_bits > 600:
        regions = range(0, num_bits, 8 * REGION_BYTES)
        bits = sorted(
            {0, num_bits - 1, *rng.sample(bits, 200)}.union(
                min(start + rng.randrange(8 * REGION_BYTES), num_bits - 1) for start in regions
            )
        )
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
    yield data + b"\0"
    yield data + b"\0\0"
    yield b"\1" + data + b"\0"
    if data:
        yield data[:-1]


def _as_json(option: Any) -> Any:
    """Return what stands in JSON for an option that JSON does not know, such that its model takes it."""
    from pydantic import BaseModel, SecretBytes, SecretStr
    from pydantic_core import to_jsonable_python

    if isinstance(option, SecretStr | SecretBytes):
        return option.get_secret_value()
    # Not what it dumps, which hides secrets.
    return dict(option) if isinstance(option, BaseModel) else to_jsonable_python(option)


def _is_registered(name: str) -> bool:
    package, _, plain = name.rpartition(":")
    return any(
        is_same_package(plugin.package, package) and plugin.name == plain for plugin in scan().plugins(HASH_FUNCTIONS)
    )


def _shown(data: bytes) -> str:
    shown = data.hex() if len(data) <= 16 else f"{data[:8].hex()}...{data[-8:].hex()}"
    return f"{len(data)} bytes ({shown or 'nothing'})"


def _as_text(digest: object) -> str:
    return digest.hex() if isinstance(digest, bytes) else repr(digest)
