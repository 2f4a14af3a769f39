"""Paged attention: one kernel for decode rows, for prefill rows, and for the splits of long contexts.

    a program        queries of one row and one KV head ──► the row's keys, a tile at a time ──► output, log-sum-exp

    its queries      one line for each pair of a new token and a query head of the KV head's group,
                     flattened: line = token * GROUP + head. BLOCK_M consecutive lines.

    its key tiles    |front|        skipped        |      near      |
                     0     keep_first              lower            end

Softmax is online, in base 2: after each tile, `acc` and `total` are sums of weights 2 ** (score - highest).
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.attention_backends.triton.formats import INTERPRETED, load_numbers, loop_bound, round_to

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_tile(
    acc,
    highest,
    total,
    queries,
    queries_rest,
    query_positions,
    first_key,
    lower,
    end,
    keys,
    values,
    key_scales,
    value_scales,
    table_row,
    stride_page,
    stride_slot,
    stride_page_scale,
    stride_slot_scale,
    score_factor,
    cap,
    IS_MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_MAIN: tl.constexpr,
    HEAD_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP_FIRST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take BLOCK_N keys from position `first_key` on into the sums; return acc, highest and total.

    Slots that no query of the program may see are not read. With IS_MASKED, each query sees its own part of the others;
    without, every one sees all.
    """
    positions = first_key + tl.arange(0, BLOCK_N)
    if IS_MASKED:
        is_read = (positions < end) & ((positions >= lower) | (positions < KEEP_FIRST))
        block_ids = tl.load(table_row + positions // BLOCK_SIZE, mask=is_read, other=0)
        # Entry 0 is the null block: nothing is in it.
        is_read = is_read & (block_ids != 0)
    else:
        # True, in a form that costs nothing: masks that hide nothing take a quarter of the loop's instructions.
        is_read = positions >= 0
        block_ids = tl.load(table_row + positions // BLOCK_SIZE)
    slots = block_ids.to(tl.int64) * stride_page + (positions % BLOCK_SIZE) * stride_slot
    dims = tl.arange(0, BLOCK_D)
    in_tile = is_read[:, None]
    if HEAD_MAIN != BLOCK_D:
        in_tile = in_tile & (dims < HEAD_MAIN)[None, :]
    HAS_MASK: tl.constexpr = IS_MASKED or HEAD_MAIN != BLOCK_D
    places = slots[:, None] + dims[None, :]

    key = load_numbers(keys + places, in_tile, HAS_MASK, FORMAT, HAS_SCALES, COMPUTE)
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
    if HEAD_REST > 0:
        rest_dims = tl.arange(0, BLOCK_REST)
        rest = load_numbers(
            keys + HEAD_MAIN + slots[:, None] + rest_dims[None, :],
            is_read[:, None] & (rest_dims < HEAD_REST)[None, :],
            True,
            FORMAT,
            HAS_SCALES,
            COMPUTE,
        )
        scores += tl.dot(queries_rest, tl.trans(rest), input_precision="ieee")
    if HAS_SCALES:
        scale_slots = block_ids.to(tl.int64) * stride_page_scale + (positions % BLOCK_SIZE) * stride_slot_scale
        key_scale = tl.load(key_scales + scale_slots, mask=is_read, other=0.0)
        scores = scores * key_scale[None, :]
    scores = scores * score_factor
    if HAS_CAP:
        # cap * tanh(x): the factor makes scores of 2 * log2(e) * x. Where x is small, the first terms of the series,
        # since the difference has no digits left there.
        x = scores * (0.5 * LN_2)
        square = x * x
        series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        scores = cap * tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp2(scores) + 1.0))

    if IS_MASKED:
        is_near = positions[None, :] <= query_positions[:, None]
        is_seen = is_read[None, :] & is_near
        if WINDOW > 0:
            is_near = is_near & (positions[None, :] > query_positions[:, None] - WINDOW)
        if CHUNK > 0:
            is_near = is_near & (positions[None, :] >= (query_positions - query_positions % CHUNK)[:, None])
        if WINDOW > 0 or CHUNK > 0:
            is_seen = is_seen & (is_near | (positions < KEEP_FIRST)[None, :])
        scores = tl.where(is_seen, scores, float("-inf"))

    # numpy warns of a maximum of NaN alone.
    comparable = tl.where(scores == scores, scores, float("-inf")) if INTERPRETED else scores
    new_highest = tl.maximum(highest, tl.max(comparable, 1))
    # A line that has seen nothing yet has -inf, and -inf - -inf is NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    value = key if VALUE_IS_KEY else load_numbers(values + places, in_tile, HAS_MASK, FORMAT, HAS_SCALES, COMPUTE)
    if HAS_SCALES:
        value_scale = key_scale if VALUE_IS_KEY else tl.load(value_scales + scale_slots, mask=is_read, other=0.0)
        weights = weights * value_scale[None, :]
    acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision="ieee")
    return acc, new_highest, total


# Numbers that change from step to step: compiling the kernel again for multiples of 16 would gain nothing.
@triton.jit(do_not_specialize=["stride_table", "num_tokens", "num_splits"])
def attention_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    output,
    lse,
    query_starts,
    context_lens,
    block_table,
    tiles,
    stride_query_token,
    stride_query_head,
    stride_page,
    stride_slot,
    stride_head,
    stride_page_scale,
    stride_slot_scale,
    stride_head_scale,
    stride_table,
    num_tokens,
    num_splits,
    score_factor,
    cap,
    IS_DECODE: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_MAIN: tl.constexpr,
    HEAD_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP_FIRST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend from BLOCK_M lines of one row and one KV head. Grid: (tiles, KV heads, splits).

    Args:
        query: [num_tokens, query heads, HEAD_MAIN + HEAD_REST]
        keys: First number of the first key of all pages; those of fp8 as uint8.
        values: Likewise; not read with VALUE_IS_KEY, where a value is the key's first HEAD_MAIN numbers.
        key_scales: Likewise, with HAS_SCALES.
        value_scales: Likewise.
        sinks: [query heads]
        output: [num_splits, num_tokens, query heads, HEAD_MAIN]
        lse: Natural log-sum-exp of what the split saw, -inf for nothing. [num_splits, num_tokens, query heads]
        tiles: Row and first line of each tile; not read with IS_DECODE, where each row has one token and TILES_PER_ROW
            tiles. [num_tiles, 2]
        score_factor: What makes a product of query and key a score in base 2; with HAS_CAP see `_attend_tile`.
        cap: In base 2.
    """
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_DECODE:
        row = pid // TILES_PER_ROW
        first_line = (pid % TILES_PER_ROW) * BLOCK_M
        first_token = row
        query_len = 1
    else:
        row = tl.load(tiles + 2 * pid)
        first_line = tl.load(tiles + 2 * pid + 1)
        first_token = tl.load(query_starts + row)
        query_len = tl.load(query_starts + row + 1) - first_token
    context_len = tl.load(context_lens + row)
    table_row = block_table + row.to(tl.int64) * stride_table

    lines = first_line + tl.arange(0, BLOCK_M)
    is_line = lines < query_len * GROUP
    tokens = lines // GROUP
    heads = kv_head * GROUP + lines % GROUP
    query_positions = context_len - query_len + tokens

    # What some line sees: [0, KEEP_FIRST) and [lower, end).
    last_line = tl.minimum(first_line + BLOCK_M, query_len * GROUP) - 1
    end = context_len - query_len + last_line // GROUP + 1
    first_position = tl.maximum(context_len - query_len + first_line // GROUP, 0)
    lower = 0
    if WINDOW > 0:
        lower = tl.maximum(first_position - (WINDOW - 1), 0)
    if CHUNK > 0:
        lower = tl.maximum(first_position - first_position % CHUNK, lower)
    first_near_tile = lower // BLOCK_N
    num_front_tiles = tl.minimum((KEEP_FIRST + BLOCK_N - 1) // BLOCK_N, first_near_tile)
    num_skipped = first_near_tile - num_front_tiles
    num_tiles = tl.maximum((end + BLOCK_N - 1) // BLOCK_N - num_skipped, 0)
    first_tile = 0
    last_tile = num_tiles
    if IS_SPLIT:
        tiles_per_split = (num_tiles + num_splits - 1) // num_splits
        first_tile = split * tiles_per_split
        last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)

    query_places = (first_token + tokens).to(tl.int64) * stride_query_token + heads * stride_query_head
    dims = tl.arange(0, BLOCK_D)
    in_query = is_line[:, None] & (dims < HEAD_MAIN)[None, :]
    queries = load_numbers(query + query_places[:, None] + dims[None, :], in_query, True, "float", False, COMPUTE)
    queries_rest = queries
    if HEAD_REST > 0:
        rest_dims = tl.arange(0, BLOCK_REST)
        queries_rest = load_numbers(
            query + HEAD_MAIN + query_places[:, None] + rest_dims[None, :],
            is_line[:, None] & (rest_dims < HEAD_REST)[None, :],
            True,
            "float",
            False,
            COMPUTE,
        )

    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a score with no value, which the first split alone counts.
        sink = tl.load(sinks + heads, mask=is_line, other=float("-inf")).to(tl.float32) * LOG2_E
        highest = tl.where(split == 0, sink, float("-inf")) if IS_SPLIT else sink
        total = tl.where(highest == float("-inf"), 0.0, 1.0)

    keys += kv_head.to(tl.int64) * stride_head
    if not VALUE_IS_KEY:
        values += kv_head.to(tl.int64) * stride_head
    if HAS_SCALES:
        key_scales += kv_head.to(tl.int64) * stride_head_scale
        if not VALUE_IS_KEY:
            value_scales += kv_head.to(tl.int64) * stride_head_scale

    # Tiles that every line sees whole need no mask. With windows and chunks few are, and of decode rows most are,
    # where masking costs nothing.
    first_masked = first_tile
    if not IS_DECODE and WINDOW == 0 and CHUNK == 0:
        first_masked = tl.minimum((first_position + 1) // BLOCK_N, last_tile)
        for tile in range(loop_bound(first_tile), loop_bound(first_masked)):
            acc, highest, total = _attend_tile(
                acc,
                highest,
                total,
                queries,
                queries_rest,
                query_positions,
                tile * BLOCK_N,
                lower,
                end,
                keys,
                values,
                key_scales,
                value_scales,
                table_row,
                stride_page,
                stride_slot,
                stride_page_scale,
                stride_slot_scale,
                score_factor,
                cap,
                False,
                BLOCK_SIZE,
                HEAD_MAIN,
                HEAD_REST,
                BLOCK_D,
                BLOCK_REST,
                BLOCK_N,
                WINDOW,
                CHUNK,
                KEEP_FIRST,
                HAS_CAP,
                FORMAT,
                HAS_SCALES,
                VALUE_IS_KEY,
                COMPUTE,
            )
    for number in range(loop_bound(first_masked), loop_bound(last_tile)):
        tile = number
        if KEEP_FIRST > 0:
            tile = number + num_skipped * (number >= num_front_tiles)
        elif WINDOW > 0 or CHUNK > 0:
            tile = number + num_skipped
        acc, highest, total = _attend_tile(
            acc,
            highest,
            total,
            queries,
            queries_rest,
            query_positions,
            tile * BLOCK_N,
            lower,
            end,
            keys,
            values,
            key_scales,
            value_scales,
            table_row,
            stride_page,
            stride_slot,
            stride_page_scale,
            stride_slot_scale,
            score_factor,
            cap,
            True,
            BLOCK_SIZE,
            HEAD_MAIN,
            HEAD_REST,
            BLOCK_D,
            BLOCK_REST,
            BLOCK_N,
            WINDOW,
            CHUNK,
            KEEP_FIRST,
            HAS_CAP,
            FORMAT,
            HAS_SCALES,
            VALUE_IS_KEY,
            COMPUTE,
        )

    # Not `total > 0`: NaN must come out as NaN.
    saw_nothing = total == 0.0
    acc = acc / tl.where(saw_nothing, 1.0, total)[:, None]
    lines_out = (split * num_tokens + first_token + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    tl.store(
        output + lines_out[:, None] * HEAD_MAIN + dims[None, :],
        round_to(acc, output.dtype.element_ty),
        mask=in_query,
    )
    if HAS_LSE:
        tl.store(lse + lines_out, tl.where(saw_nothing, float("-inf"), (highest + tl.log2(total)) * LN_2), mask=is_line)
