"""Blocks as integers: what a matmul needs to multiply in 8 bits, and how rows are packed for it.

Every block type here is w = d q + m with a small unsigned integer q: a type with signed integers has them raised (the
file itself does so, save for Q8_0), and m = -d times what was added. So with activations x = s p, p an integer of -127
to 127 and s one scale for 32 of them,

    sum of w x  =  s (d (sum of q p)  +  m (sum of p))

The first sum is of integers, exact, and many to an instruction; the second is known once per token. Where integers were
raised, the first sum may as well begin at minus what was added times the second, and m is not needed.

Blocks lie as the file has them (common/quants.py shows the layouts), or packed by `pack`, sixteen rows side by side.
The row_ functions of common/intrinsics.py read either.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from common import quants
from common.intrinsics import (
    AHEAD,
    LANES,
    QUAD,
    ROWS,
    both,
    dots_of_panel,
    dots_of_tokens,
    largest,
    load_lanes,
    multiply_add,
    nearest,
    no_sums,
    of_tile,
    prefetch,
    row_bits,
    row_bytes,
    row_halves,
    row_store,
    row_words,
    signed_byte,
    store_lanes,
    store_quads,
    sum_of,
    sums_as_floats,
    total,
)
from common.jit import njit
from common.quants import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, lane, unpack

# See common/quants.py; and as a call, with its arrays' many fields to pass, one would cost as much as its work.
kernel = partial(njit, _nrt=False, forceinline=True)

STEP = 32  # activations that share a scale
GROUP = 16  # weights that share d and m in every type; in all but Q6_K, 32 do
QUADS = GROUP // QUAD
REGISTER = QUAD * LANES  # 8-bit integers in a register
SMALLEST = np.float32(1e-30)  # below it the inverse of a step overflows; such activations count as zero


class Rounded(NamedTuple):
    """Activations x = s p in tiles of so many tokens: for each quad of p, each step or each group the tile's tokens.

    Zeros fill the last tile, and each row up to a whole register of p and of sums.
    """

    p: Any  # (tiles, K / 4, tokens, 4) int8
    scales: Any  # (tiles, K / 32, tokens) float32: s
    sums: Any  # (tiles, K / 16, tokens) int32, of p
    offsets: Any  # (tiles, K / 32, tokens) float32: s times the sum of 32 p


@njit
def to_int8(x, tokens=1):  # (T, K) -> Rounded
    """Activations as integers, in tiles of `tokens`."""
    found = unrounded(len(x), x.shape[1], tokens)
    for t in range(len(x)):
        round_token(x, t, found)
    return found


@njit
def unrounded(T, K, tokens):
    """Room for (T, K) activations in tiles of `tokens`, all zeros."""
    tiles, width = whole(T, tokens) // tokens, whole(K, REGISTER)
    groups = whole(K // GROUP, LANES)
    return Rounded(
        np.zeros((tiles, width // QUAD, tokens, QUAD), np.int8),
        np.zeros((tiles, groups // 2, tokens), np.float32),
        np.zeros((tiles, groups, tokens), np.int32),
        np.zeros((tiles, groups // 2, tokens), np.float32),
    )


@kernel
def round_token(x, t, out):
    """Token t of x (T, K) to its place in out.

    p = round(x / s), s = the largest |x| of 32 / 127: so p is never -128. NaN and infinity pass on as a scale.
    """
    tokens = out.scales.shape[2]
    tile, i = t // tokens, t % tokens
    for k in range(0, x.shape[1], STEP):
        low, high = load_lanes(x, (t, k)), load_lanes(x, (t, k + LANES))
        most = largest(low, high)
        scale = most * np.float32(1 / 127)
        inverse = np.float32(127) / most if most > SMALLEST else np.float32(0)
        out.scales[tile, k // STEP, i] = scale
        low, high = nearest(low * inverse), nearest(high * inverse)
        store_quads(out.p, (tile, k // QUAD, i, 0), low)
        store_quads(out.p, (tile, k // QUAD + QUADS, i, 0), high)
        out.sums[tile, k // GROUP, i], out.sums[tile, k // GROUP + 1, i] = sum_of(low), sum_of(high)
        out.offsets[tile, k // STEP, i] = scale * np.float32(sum_of(low) + sum_of(high))


@kernel
def whole(count, unit):
    """count, up to the next multiple of unit."""
    return (count + unit - 1) // unit * unit


INTEGER = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)  # ids of the types that have this form


@kernel
def has_integers(kind):
    return kind in INTEGER


@kernel
def by_type(body, kind, *args):
    """body(kind, …), a copy of it for each type: kind is a constant there, and its branches cost nothing."""
    if kind == Q4_0:
        body(Q4_0, *args)
    elif kind == Q4_1:
        body(Q4_1, *args)
    elif kind == Q5_0:
        body(Q5_0, *args)
    elif kind == Q5_1:
        body(Q5_1, *args)
    elif kind == Q8_0:
        body(Q8_0, *args)
    elif kind == Q4_K:
        body(Q4_K, *args)
    elif kind == Q5_K:
        body(Q5_K, *args)
    elif kind == Q6_K:
        body(Q6_K, *args)


@kernel
def integers(kind, raw, at, g):
    """q of the g-th sixteen weights of the block at `at` of raw (bytes,)."""
    if kind == Q4_0:
        return row_bytes(raw, at + 2, 16) >> 4 * g & 15
    if kind == Q4_1:
        return row_bytes(raw, at + 4, 16) >> 4 * g & 15
    if kind == Q5_0:
        return row_bytes(raw, at + 6, 16) >> 4 * g & 15 | row_bits(row_words(raw, at + 2), 16 * g) << 4
    if kind == Q5_1:
        return row_bytes(raw, at + 8, 16) >> 4 * g & 15 | row_bits(row_words(raw, at + 4), 16 * g) << 4
    if kind == Q8_0:
        return row_bytes(raw, at + 2 + 16 * g, 16) ^ 128  # the sign bit turned over adds 128
    step, side = g // 2, 16 * (g % 2)
    if kind == Q6_K:  # of 128 weights, 64 bytes hold two times 32 low halves and two times 32 high, 32 all upper bits
        low = row_bytes(raw, at + 64 * (step // 4) + 32 * (step % 2) + side, 16) >> 4 * (step // 2 % 2) & 15
        return low | (row_bytes(raw, at + 128 + 32 * (step // 4) + side, 16) >> 2 * (step % 4) & 3) << 4
    if kind == Q5_K:
        low = row_bytes(raw, at + 48 + 32 * (step // 2) + side, 16) >> 4 * (step % 2) & 15
        return low | (row_bytes(raw, at + 16 + side, 16) >> step & 1) << 4
    return row_bytes(raw, at + 16 + 32 * (step // 2) + side, 16) >> 4 * (step % 2) & 15


@kernel
def scales_of(kind, raw, at, g):
    """d and m of the g-th sixteen weights of the block at `at`."""
    if kind in (Q4_1, Q5_1):
        return row_halves(raw, at), row_halves(raw, at + 2)
    if kind in (Q4_K, Q5_K):
        return scale_and_min(raw, at, g // 2)
    if kind == Q6_K:
        d = row_halves(raw, at + 208) * number(signed_byte(row_words(raw, at + 192 + g // 4 * 4), g % 4))
    else:
        d = row_halves(raw, at)
    return d, d * -raised(kind)


@kernel
def scale_and_min(raw, at, j):
    """The j-th scale and min of a Q4_K or Q5_K block, as quants.scale_and_min, from three words."""
    s, t = row_words(raw, at + 4), row_words(raw, at + 8)
    if j < 4:
        a, b = s >> 8 * j & 63, t >> 8 * j & 63
    else:
        u = row_words(raw, at + 12) >> 8 * (j - 4)
        a, b = u & 15 | (s >> 8 * j - 26 & 3) << 4, u >> 4 & 15 | (t >> 8 * j - 26 & 3) << 4
    return row_halves(raw, at) * number(a), row_halves(raw, at + 2) * number(b) * -1


number = sums_as_floats


@kernel
def row_apart(kind, raw, at, K, length, size, q, d, m):
    """A row of blocks from `at` of raw on: q (K,), and d and m (K / 16,) for each sixteen."""
    here = 0
    for b in range(K // length):
        for g in range(length // GROUP):
            row_store(q, here * GROUP, integers(kind, raw, at + b * size, g))
            scale, least = scales_of(kind, raw, at + b * size, g)
            row_store(d, here, scale)
            row_store(m, here, least)
            here += 1


@kernel
def raised(kind):
    """What was added to a type's signed integers; 0 for a type that has an m of its own."""
    if kind == Q4_0:
        return 8
    if kind == Q5_0:
        return 16
    if kind == Q8_0:
        return 128
    return 32 if kind == Q6_K else 0


@kernel
def span(kind):
    """Weights that share d and m."""
    return GROUP if kind == Q6_K else STEP


# Packed: sixteen rows side by side, word by word (32 bits; a float16 by itself). Before that, each row's own block is
# written anew: its scales first, then its weights in order. Sixteen weights are eight bytes, byte i of which holds the
# low halves of i and i + 8; Q8_0's are a byte each, raised. Four bytes of upper bits come before them: for each sixteen
# of Q6_K, for each 32 of Q5_0, Q5_1 and Q5_K, those of weight 4 k + i in byte i. strip_scales shows what becomes of
# scales. So memory is read from front to back, and each shift is the same for all. No byte is added.


@kernel
def head(kind):
    """Bytes of scales at the front of a packed block."""
    if kind == Q6_K:
        return 18
    if kind in (Q4_K, Q5_K):
        return 16
    return 2 if raised(kind) > 0 else 4


@kernel
def strip_integers(kind, raw, at, g):
    """q of the g-th sixteen weights of sixteen rows, from the packed block at `at` of raw (bytes, 16)."""
    at += head(kind)
    if kind == Q8_0:
        return row_bytes(raw, at + 16 * g, 16)
    if kind == Q6_K:
        low, high = row_bytes(raw, at + 12 * g + 4, 8), row_bytes(raw, at + 12 * g, 4)
        upper = both(both(high & 3, high >> 2 & 3), both(high >> 4 & 3, high >> 6))
    elif kind in (Q5_0, Q5_1, Q5_K):
        at, side = at + 20 * (g // 2), g % 2
        low, high = row_bytes(raw, at + 4 + 8 * side, 8), row_bytes(raw, at, 4) >> 4 * side
        upper = both(both(high & 1, high >> 1 & 1), both(high >> 2 & 1, high >> 3 & 1))
    else:
        low = row_bytes(raw, at + 8 * g, 8)
        return both(low & 15, low >> 4)
    return both(low & 15, low >> 4) | upper << 4


@kernel
def strip_scales(kind, raw, at, g):
    """d and m of the g-th sixteen weights of sixteen rows, from the packed block at `at`."""
    if kind in (Q4_K, Q5_K):
        j = g // 2  # four bits a byte of both, and four more of both in the last word
        low, high = row_words(raw, at + 4 + j // 4 * 4) >> 8 * (j % 4), row_words(raw, at + 12) >> 4 * j
        d = row_halves(raw, at) * number(low & 15 | (high & 3) << 4)
        return d, row_halves(raw, at + 2) * number(low >> 4 & 15 | (high >> 2 & 3) << 4) * -1
    if kind == Q6_K:
        d = row_halves(raw, at + 16) * number(signed_byte(row_words(raw, at + g // 4 * 4), g % 4))
    else:
        d = row_halves(raw, at)
    return d, row_halves(raw, at + 2) if raised(kind) == 0 else d * -raised(kind)


@kernel
def begin(kind, lanes, x, tile, g):
    """Where the dots of the sixteen weights g, or of all that share their scales, begin: see the top."""
    if raised(kind) == 0:
        return no_sums(lanes)
    sums = of_tile(lanes, x.sums, (tile, g))
    if span(kind) > GROUP:
        sums = sums + of_tile(lanes, x.sums, (tile, g + 1))
    return sums * np.int32(-raised(kind))


@kernel
def strip_dots(kind, raw, at, g, x, tile, here, lanes):
    """Sums for the weights that share the scales of the g-th sixteen of the packed block at `at`, and a tile's tokens.

    `here` is the g-th sixteen's number in the row; `lanes` has room for the tokens.
    """
    q, sums = strip_integers(kind, raw, at, g), begin(kind, lanes, x, tile, here)
    if kind == Q6_K:
        return add_dots(kind, sums, q, x, tile, here)
    return add_dots(kind, sums, both(q, strip_integers(kind, raw, at, g + 1)), x, tile, here)


@kernel
def add_dots(kind, sums, q, x, tile, here):
    index = tile, here * QUADS
    if kind == Q8_0:
        return dots_of_tokens(sums, q, x.p, index, 255)
    if kind == Q6_K:
        return dots_of_tokens(sums, q, x.p, index, 63)
    if kind in (Q5_0, Q5_1, Q5_K):
        return dots_of_tokens(sums, q, x.p, index, 31)
    return dots_of_tokens(sums, q, x.p, index, 15)


@kernel
def panel_dots(kind, q, g, x, tile, here, lanes):
    """The same from integers taken apart: q is (K, 16) in bytes, which lie as (K / 4, 16 rows, 4)."""
    sums, k, index = begin(kind, lanes, x, tile, here), g * GROUP, (tile, here * QUADS)
    if kind == Q8_0:
        return dots_of_panel(sums, q, k, STEP, x.p, index, 255)
    if kind == Q6_K:
        return dots_of_panel(sums, q, k, GROUP, x.p, index, 63)
    if kind in (Q5_0, Q5_1, Q5_K):
        return dots_of_panel(sums, q, k, STEP, x.p, index, 31)
    return dots_of_panel(sums, q, k, STEP, x.p, index, 15)


@kernel
def ask(raw, asked, end):
    """Ask for the cache lines of raw (bytes, 16) from `asked` to AHEAD after `end`; returns the first not asked for.

    `asked`, `end` and what is returned count bytes of one row, AHEAD those of all sixteen.
    """
    while AHEAD > 0 and asked < end + AHEAD // ROWS:
        prefetch(raw, (asked, 0))
        asked += 64 // ROWS
    return asked


@kernel
def store_rows(out, t, n, lanes):
    """Sixteen rows' sums of token t; not those beyond the last row."""
    if n + ROWS <= out.shape[1]:
        store_lanes(out, (t, n), lanes)
    else:
        for row in range(out.shape[1] - n):
            out[t, n + row] = lane(lanes, row)


@njit
def packed_bytes(N, K, length, size):
    """Bytes of a matrix of such blocks when packed."""
    return whole(N, ROWS) * (K // length) * size


def pack(kind, raw, N, blocks, size, out):  # (bytes,) -> out (bytes / 16, 16)
    """Blocks of N rows in the file's order as strips of sixteen rows; out, zeros, also has room for rows that lack."""
    packer(kind)(raw, N, blocks, size, out)


@cache
def packer(kind):
    """`pack` compiled for one type: for all at once it would take as long as all stages together."""

    @njit
    def pack(raw, N, blocks, size, out):
        q, scratch = np.empty(STEP, np.uint8), np.empty(12, np.uint8)
        for n in range(N):
            for b in range(blocks):
                at, to = (n * blocks + b) * size, (n // ROWS * blocks + b) * size
                pack_block(kind, raw, at, out, to, n % ROWS, size, q, scratch)

    return pack


@kernel
def pack_block(kind, raw, at, out, to, row, size, q, scratch):
    if kind == Q6_K:
        for i in range(0, 16, QUAD):
            put(out, to + i, row, raw[at + 192 + i : at + 192 + i + QUAD])
        put(out, to + 16, row, raw[at + 208 : at + 210])
    else:
        put(out, to, row, raw[at : at + 2])
        if raised(kind) == 0:
            put(out, to + 2, row, raw[at + 2 : at + 4])
    if kind in (Q4_K, Q5_K):
        scratch[8:] = 0
        for j in range(8):
            pair = quants.scale_and_min(raw, at + 4, j)
            scale, least = np.int64(pair[0]), np.int64(pair[1])
            scratch[j] = scale & 15 | (least & 15) << 4
            scratch[8 + j // 2] |= (scale >> 4 | least >> 4 << 2) << 4 * (j % 2)
        for i in range(0, 12, QUAD):
            put(out, to + 4 + i, row, scratch[i : i + QUAD])
    end, to, g = to + size, to + head(kind), 0
    while to < end:
        row_store(q, 0, integers(kind, raw, at, g))
        row_store(q, GROUP, integers(kind, raw, at, g + 1))
        if kind == Q8_0:
            for i in range(0, STEP, QUAD):
                put(out, to + i, row, q[i : i + QUAD])
            to += STEP
        elif kind in (Q5_0, Q5_1, Q5_K):
            for i in range(QUAD):
                scratch[i] = 0
                for k in range(STEP // QUAD):
                    scratch[i] |= q[QUAD * k + i] >> 4 << k
            put(out, to, row, scratch[:QUAD])
            to += QUAD
        for first in range(0, STEP if kind != Q8_0 else 0, GROUP):
            if kind == Q6_K:
                for i in range(QUAD):
                    scratch[i] = 0
                    for k in range(GROUP // QUAD):
                        scratch[i] |= q[first + QUAD * k + i] >> 4 << 2 * k
                put(out, to, row, scratch[:QUAD])
                to += QUAD
            for i in range(8):
                scratch[i] = q[first + i] & 15 | (q[first + 8 + i] & 15) << 4
            put(out, to, row, scratch[:QUAD])
            put(out, to + QUAD, row, scratch[QUAD:8])
            to += 8
        g += 2


@kernel
def put(out, to, row, field):
    """A row's field, a word or a float16, beside the same of the other rows."""
    flat = out.reshape(-1)
    for i in range(len(field)):
        flat[to * ROWS + row * len(field) + i] = field[i]


@njit
def unpacked(kind, packed, N, K, length, size):  # (bytes / 16, 16) -> (N, K)
    """The weights of what `pack` made, as floats."""
    weights = np.empty((N + ROWS, K), np.float32)
    q, d, m = np.empty((GROUP, ROWS), np.uint8), np.empty((1, ROWS), np.float32), np.empty((1, ROWS), np.float32)
    for n in range(0, N, ROWS):
        for k in range(0, K, GROUP):
            by_type(
                take_apart, kind, packed, (n // ROWS * (K // length) + k // length) * size, k % length // GROUP, q, d, m
            )
            for row in range(ROWS):
                for i in range(GROUP):
                    integer = q.reshape(GROUP // QUAD, ROWS, QUAD)[i // QUAD, row, i % QUAD]
                    weights[n + row, k + i] = d[0, row] * integer + m[0, row]
    return weights[:N]


@kernel
def take_apart(kind, packed, at, g, q, d, m):
    row_store(q, 0, strip_integers(kind, packed, at, g))
    scale, least = strip_scales(kind, packed, at, g)
    row_store(d, 0, scale)
    row_store(m, 0, least)


@njit
def float_matmul(x, w):  # (T, K), (N, K) -> (T, N)
    """A matrix of a type without integers: quantized's matmul."""
    N, K, kind, length, size, raw = w
    T, blocks, full = x.shape[0], K // length, length - length % LANES
    out, sums = np.empty((T, N), np.float32), np.empty((T, LANES), np.float32)
    block = np.empty(length, np.float32)
    for n in range(N):
        sums[:] = 0
        for b in range(blocks):
            unpack(kind, raw, (n * blocks + b) * size, block)
            for t in range(T):
                lanes = load_lanes(sums, (t, 0))
                for i in range(0, full, LANES):
                    lanes = multiply_add(load_lanes(x, (t, b * length + i)), load_lanes(block, i), lanes)
                store_lanes(sums, (t, 0), lanes)
                for i in range(full, length):
                    sums[t, 0] += x[t, i] * block[i]
        for t in range(T):
            out[t, n] = total(load_lanes(sums, (t, 0)))
    return out
