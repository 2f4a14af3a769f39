"""How the kernels are cut and scheduled: tiles, warps, stages, and how many splits a decode row gets.

Plain arithmetic on shapes and on facts about the device. Nothing here looks at a context, so that a captured step can
be replayed with others. What has been measured on no GPU is a rule of thumb, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import DTYPE_BYTES, KV_FORMATS

# Programs that decode rows should come to on each multiprocessor. About four run at a time; with many more, the last
# ones to end leave little of the GPU idle.
PROGRAMS_PER_PROCESSOR = 16
# Tokens of the block table's width below which a split is not worth its partial result.
TOKENS_PER_SPLIT = 512
# A join reads the splits one after another.
MOST_SPLITS = 64
# Narrowest side of a product, which is that of the tensor cores.
SMALLEST_TILE = 16
# Numbers of a tile in the interpreter. An operation takes it some 30 microseconds, and a load from some thousand
# addresses 400 more: few large tiles are cheap, until loads count.
INTERPRETED_NUMBERS = 8192


@dataclass(frozen=True)
class Device:
    """What the rules know of a device.

    Attributes:
        capability: Compute capability, such as (9, 0); None for a CPU, where kernels are interpreted.
        shared_bytes: Shared memory that a program can have.
        num_processors: Multiprocessors.
    """

    capability: tuple[int, int] | None
    shared_bytes: int
    num_processors: int

    @property
    def is_interpreted(self) -> bool:
        return self.capability is None


INTERPRETER = Device(None, 1 << 40, 1)


class Wishes(Protocol):
    """What a user set, None where the rules decide: see `TritonOptions`."""

    @property
    def splits(self) -> int | None: ...
    @property
    def tile_keys(self) -> int | None: ...
    @property
    def num_warps(self) -> int | None: ...
    @property
    def num_stages(self) -> int | None: ...


@dataclass(frozen=True)
class HeadDims:
    """A key's numbers as the kernels cut them: `main`, which is all that a value has, and the `rest` behind it.

    Blocks are powers of two. Only with `value_is_key_prefix` is there a rest: 576 numbers are 512 and 64, not 1024.
    """

    main: int
    rest: int
    main_block: int
    rest_block: int

    @classmethod
    def of(cls, spec: AttentionSpec, device: Device) -> HeadDims:
        main = spec.head_dim_v if spec.value_is_key_prefix else spec.head_dim
        rest = spec.head_dim - main
        narrowest = 1 if device.is_interpreted else SMALLEST_TILE
        return cls(main, rest, next_power_of_two(main, narrowest), next_power_of_two(rest, narrowest) if rest else 0)


@dataclass(frozen=True)
class Tile:
    """How one launch of the attention kernel is cut.

    Attributes:
        lines: (token, query head) pairs of a program.
        keys: Keys that it takes at a time.
        num_warps: Warps of a program.
        num_stages: Key tiles that are in flight at a time.
    """

    lines: int
    keys: int
    num_warps: int
    num_stages: int


def next_power_of_two(number: int, smallest: int = 1) -> int:
    """Return the least power of two that is neither below `number` nor below `smallest`."""
    return max(1 << (number - 1).bit_length(), smallest)


def compute_type(spec: AttentionSpec, device: Device) -> str:
    """Return the type of the operands of products, as torch names it. Sums are always float32.

    That of the layer. A cache in another float type is not rounded to it: where neither type holds all numbers of the
    other, or the cache has the wider one, both are brought to float32. Codes are exact in every one. The interpreter
    gets float32: its products of bfloat16 are wrong.
    """
    if device.is_interpreted:
        return "float32"
    if KV_FORMATS[spec.kv_dtype].is_quantised or spec.kv_dtype == spec.dtype:
        return spec.dtype
    return "float32"


def decode_tile(spec: AttentionSpec, device: Device, wishes: Wishes) -> Tile:
    """Return the tile of rows with one new token: one line for each query head of the group.

    | numbers in a head | lines | keys | warps | stages |
    |---|---|---|---|---|
    | up to 128 | the group, 16 to 64 | 32 | 4 | 5 |
    | up to 256 | the group, 16 to 32 | 32 | 4 | 5 |
    | more | the group, 16 to 32 | 32, 16 of quantised formats | 8 | 5 |

    A step is bound by reading keys and values, so tiles are as small as lets several programs run side by side. Keys
    are found through the block table, by two loads of which one waits for the other, so that the compiler has the next
    tile under way only from five stages on. In float32, whose products use no tensor cores but many registers, 16
    lines, 16 keys and 8 warps. Rules of thumb, made so that the registers suffice; where shared memory is short,
    `fitting` takes from stages, then from keys.
    """
    dims, group = HeadDims.of(spec, device), spec.num_query_heads // spec.num_kv_heads
    if device.is_interpreted:
        return _wished(Tile(min(next_power_of_two(group), 128), _interpreted_keys(dims), 4, 1), wishes)
    if dims.main_block <= 128:
        tile = Tile(min(next_power_of_two(group, SMALLEST_TILE), 64), 32, 4, 5)
    elif dims.main_block <= 256:
        tile = Tile(min(next_power_of_two(group, SMALLEST_TILE), 32), 32, 4, 5)
    else:
        keys = 16 if KV_FORMATS[spec.kv_dtype].is_quantised else 32
        tile = Tile(min(next_power_of_two(group, SMALLEST_TILE), 32), keys, 8, 5)
    if compute_type(spec, device) == "float32":
        tile = Tile(SMALLEST_TILE, SMALLEST_TILE, 8, tile.num_stages)
    return fitting(_wished(tile, wishes), spec, device)


def prefill_tile(spec: AttentionSpec, device: Device, wishes: Wishes) -> Tile:
    """Return the tile of rows with several new tokens.

    | numbers in a head | lines | keys | warps | stages |
    |---|---|---|---|---|
    | up to 128 | 128 | 64 | 8 | 5 |
    | up to 256 | 64 | 32 | 8 | 5 |
    | more | 32 | 32 | 8 | 5, 3 of quantised formats |

    For quantised formats at most 64 lines, and below compute capability 9.0 at most 32 keys. In float32 a quarter of
    the lines, at least 16, and 16 keys. Rules of thumb, made so that the registers suffice; `tuning.py` starts from
    them.
    """
    dims = HeadDims.of(spec, device)
    if device.is_interpreted:
        return _wished(Tile(128, _interpreted_keys(dims), 4, 1), wishes)
    if dims.main_block <= 128:
        tile = Tile(128, 64, 8, 5)
    elif dims.main_block <= 256:
        tile = Tile(64, 32, 8, 5)
    else:
        tile = Tile(32, 32, 8, 3 if KV_FORMATS[spec.kv_dtype].is_quantised else 5)
    if device.capability is not None and device.capability < (9, 0):
        tile = Tile(tile.lines, min(tile.keys, 32), tile.num_warps, tile.num_stages)
    if KV_FORMATS[spec.kv_dtype].is_quantised:
        tile = Tile(min(tile.lines, 64), tile.keys, tile.num_warps, tile.num_stages)
    if compute_type(spec, device) == "float32":
        tile = Tile(max(tile.lines // 4, SMALLEST_TILE), SMALLEST_TILE, 8, 2)
    return fitting(_wished(tile, wishes), spec, device)


def shared_bytes(tile: Tile, spec: AttentionSpec, device: Device) -> int:
    """Return an upper bound of the shared memory that a program takes.

    Queries, the keys and values of each stage as they are stored, one tile of them converted where they are, the
    weights on their way to the second product, and a little for sums across warps.
    """
    dims = HeadDims.of(spec, device)
    compute = DTYPE_BYTES[compute_type(spec, device)]
    stored = KV_FORMATS[spec.kv_dtype].element_bytes
    width = dims.main_block + dims.rest_block
    read = width if spec.value_is_key_prefix else 2 * dims.main_block
    queries = tile.lines * width * compute
    # Addresses come out of the block table, which is a load as well: of the stages, it takes every other one.
    staged = (tile.num_stages + 1) // 2 * tile.keys * (read * stored + 24)
    converted = tile.keys * read * compute if stored != compute else 0
    weights = tile.lines * tile.keys * compute
    return queries + staged + converted + weights + 1024


def fitting(tile: Tile, spec: AttentionSpec, device: Device) -> Tile:
    """Return the tile with stages, then keys taken away until it fits into shared memory, or can be no smaller."""
    while shared_bytes(tile, spec, device) > device.shared_bytes:
        if tile.num_stages > 1:
            tile = Tile(tile.lines, tile.keys, tile.num_warps, tile.num_stages - 1)
        elif tile.keys > SMALLEST_TILE:
            tile = Tile(tile.lines, tile.keys // 2, tile.num_warps, tile.num_stages)
        elif tile.lines > SMALLEST_TILE:
            tile = Tile(tile.lines // 2, tile.keys, tile.num_warps, tile.num_stages)
        else:
            break
    return tile


def smallest_tile_fits(spec: AttentionSpec, device: Device) -> bool:
    """Whether any tile of such heads fits into shared memory."""
    return shared_bytes(Tile(SMALLEST_TILE, SMALLEST_TILE, 4, 1), spec, device) <= device.shared_bytes


def num_splits(num_programs: int, table_tokens: int, device: Device, wishes: Wishes) -> int:
    """Return into how many parts each decode row's visible keys are split.

    As many as bring PROGRAMS_PER_PROCESSOR programs to each multiprocessor, but no more than leave TOKENS_PER_SPLIT
    tokens of the block table's width to each, nor than MOST_SPLITS. One, which needs no join, follows for many rows,
    for narrow tables, and in the interpreter.

    Args:
        num_programs: Of one split: tiles of all decode rows times KV heads.
        table_tokens: Width of the block table, in tokens.
    """
    if wishes.splits is not None:
        return wishes.splits
    if device.is_interpreted:
        return 1
    wanted = -(-PROGRAMS_PER_PROCESSOR * device.num_processors // max(num_programs, 1))
    return max(1, min(wanted, table_tokens // TOKENS_PER_SPLIT, MOST_SPLITS))


def vectors_per_program(dims: int, device: Device) -> int:
    """Return how many vectors of `dims` numbers, a power of two, a program of the other kernels takes."""
    numbers = 4 * INTERPRETED_NUMBERS if device.is_interpreted else 2048
    return max(numbers // dims, 1)


def joined_vectors_per_program(dims: int, device: Device) -> int:
    """Return how many vectors of `dims` numbers, a power of two, a program joins the splits of.

    Few: splits are many where rows are few, and are read one after another.
    """
    return vectors_per_program(dims, device) if device.is_interpreted else max(256 // dims, 1)


def _interpreted_keys(dims: HeadDims) -> int:
    # The largest power of two that is not above it: blocks of a latent and of its rest are of two sizes.
    keys = INTERPRETED_NUMBERS // (dims.main_block + dims.rest_block)
    return min(max(1 << max(keys, 1).bit_length() - 1, 32), 128)


def _wished(tile: Tile, wishes: Wishes) -> Tile:
    return Tile(
        tile.lines,
        wishes.tile_keys or tile.keys,
        wishes.num_warps or tile.num_warps,
        wishes.num_stages or tile.num_stages,
    )
