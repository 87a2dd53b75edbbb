"""Blocks as integers: what a matmul needs to multiply in 8 bits, and how rows are packed for it.

Every block type here is w = d q + m with a small unsigned integer q: a type with signed integers has them raised, and
m = -d times what was added. So with activations x = s p, p an integer of -127 to 127 and s one scale for 32 of them,

    sum of w x  =  d s (sum of q p)  +  m (s sum of p)

The first sum is of integers, exact, and many to an instruction; the second is known once per token. d and m are for 16
weights, since Q6_K has a scale for as few.

The same code reads the blocks of one row as the file has them, or of sixteen rows packed (`pack`), where the values of
all rows are side by side: see the row_ functions of common/intrinsics.py. Layouts are told in common/quants.py.
"""

from functools import partial

import numpy as np

from common.intrinsics import (
    LANES,
    QUAD,
    ROWS,
    as_int8,
    both,
    largest,
    load_lanes,
    multiply_add,
    nearest,
    row_bits,
    row_bytes,
    row_halves,
    row_store,
    row_words,
    signed_byte,
    store_lanes,
    sum_of,
    sums_as_floats,
    total,
)
from common.jit import njit
from common.quants import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, unpack

# See common/quants.py; and as a call, with its arrays' many fields to pass, one would cost as much as its work.
kernel = partial(njit, _nrt=False, forceinline=True)

STEP = 32  # activations that share a scale
GROUP = 16  # weights that share d and m
REGISTER = QUAD * LANES  # 8-bit integers in a register
SMALLEST = np.float32(1e-30)  # below it the inverse of a step overflows; such activations count as zero


@njit
def to_int8(x, unit=1):  # (T, K) -> (T, K) int8, (T, K / 32) and (T, K / 16) float32
    """Activations as integers p, their scales s, and s times the sum of each 16 p; with zeros up to whole registers
    and, where a unit is given, up to the next multiple of it in tokens.

    p = round(x / s), s = the largest |x| of 32 / 127: so p is never -128. NaN and infinity pass on as a scale.
    """
    T, K = x.shape
    rows, width = whole(T, unit), whole(K, REGISTER)
    integers, scales = np.zeros((rows, width), np.int8), np.zeros((rows, width // STEP), np.float32)
    sums = np.zeros((rows, whole(K // GROUP, LANES)), np.float32)
    for t in range(T):
        for k in range(0, K, STEP):
            low, high = load_lanes(x, (t, k)), load_lanes(x, (t, k + LANES))
            most = largest(low, high)
            scale = most * np.float32(1 / 127)
            inverse = np.float32(127) / most if most > SMALLEST else np.float32(0)
            scales[t, k // STEP] = scale
            low, high = nearest(low * inverse), nearest(high * inverse)
            store_lanes(integers, (t, k), as_int8(low))
            store_lanes(integers, (t, k + LANES), as_int8(high))
            sums[t, k // GROUP] = scale * np.float32(sum_of(low))
            sums[t, k // GROUP + 1] = scale * np.float32(sum_of(high))
    return integers, scales, sums


@kernel
def whole(count, unit):
    """count, up to the next multiple of unit."""
    return (count + unit - 1) // unit * unit


# One block each: q, weight by weight from k on, and d and m for each 16 of them. See `to_integers`.


@kernel
def integers_q4_0(raw, at, q, d, m, k):
    scale = row_halves(raw, at)
    halves = row_bytes(raw, at + 2)
    row_store(q, k, both(halves & 15, halves >> 4))
    scale_32(d, m, k, scale, scale * -8)


@kernel
def integers_q4_1(raw, at, q, d, m, k):
    halves = row_bytes(raw, at + 4)
    row_store(q, k, both(halves & 15, halves >> 4))
    scale_32(d, m, k, row_halves(raw, at), row_halves(raw, at + 2))


@kernel
def integers_q5_0(raw, at, q, d, m, k):
    scale, high = row_halves(raw, at), row_words(raw, at + 2)
    halves = row_bytes(raw, at + 6)
    row_store(q, k, both(halves & 15 | row_bits(high, 0) << 4, halves >> 4 | row_bits(high, 16) << 4))
    scale_32(d, m, k, scale, scale * -16)


@kernel
def integers_q5_1(raw, at, q, d, m, k):
    high, halves = row_words(raw, at + 4), row_bytes(raw, at + 8)
    row_store(q, k, both(halves & 15 | row_bits(high, 0) << 4, halves >> 4 | row_bits(high, 16) << 4))
    scale_32(d, m, k, row_halves(raw, at), row_halves(raw, at + 2))


@kernel
def integers_q8_0(raw, at, q, d, m, k):
    scale = row_halves(raw, at)
    # The sign bit turned over adds 128.
    row_store(q, k, both(row_bytes(raw, at + 2) ^ 128, row_bytes(raw, at + 18) ^ 128))
    scale_32(d, m, k, scale, scale * -128)


@kernel
def scales_k(raw, at, d, m, k):
    """The scales and mins of a Q4_K or Q5_K block, as quants.scale_and_min, from three words."""
    scale, least = row_halves(raw, at), row_halves(raw, at + 2) * -1
    s, t, u = row_words(raw, at + 4), row_words(raw, at + 8), row_words(raw, at + 12)
    for j in range(4):
        scale_32(d, m, k + 32 * j, scale * number(s >> 8 * j & 63), least * number(t >> 8 * j & 63))
    for j in range(4):
        a, b = u >> 8 * j & 15 | (s >> 8 * j + 6 & 3) << 4, u >> 8 * j + 4 & 15 | (t >> 8 * j + 6 & 3) << 4
        scale_32(d, m, k + 128 + 32 * j, scale * number(a), least * number(b))


@kernel
def integers_q4_k(raw, at, q, d, m, k):
    scales_k(raw, at, d, m, k)
    for j in range(4):  # 64 weights each
        halves = row_32(raw, at + 16 + 32 * j)
        row_store(q, k + 64 * j, both(halves & 15, halves >> 4))


@kernel
def integers_q5_k(raw, at, q, d, m, k):
    scales_k(raw, at, d, m, k)
    for j in range(4):  # 64 weights each
        halves, high = row_32(raw, at + 48 + 32 * j), row_32(raw, at + 16) >> 2 * j
        row_store(q, k + 64 * j, both(halves & 15 | (high & 1) << 4, halves >> 4 | (high >> 1 & 1) << 4))


@kernel
def integers_q6_k(raw, at, q, d, m, k):
    scale = row_halves(raw, at + 208)
    for g in range(16):
        s = scale * number(signed_byte(row_words(raw, at + 192 + g // 4 * 4), g % 4))
        row_store(d, k // GROUP + g, s)
        row_store(m, k // GROUP + g, s * -32)
    for n in range(2):  # 128 weights each
        high = row_32(raw, at + 128 + 32 * n)
        for j in range(2):
            halves, first = row_32(raw, at + 64 * n + 32 * j), k + 128 * n + 32 * j
            row_store(q, first, halves & 15 | (high >> 2 * j & 3) << 4)
            row_store(q, first + 64, halves >> 4 | (high >> 2 * j + 4 & 3) << 4)


@kernel
def row_32(raw, at):
    """Thirty-two bytes of each row from `at` on."""
    return both(row_bytes(raw, at), row_bytes(raw, at + 16))


number = sums_as_floats


@kernel
def scale_32(d, m, k, scale, least):
    """One d and m for the 32 weights from k on."""
    row_store(d, k // GROUP, both(scale, scale))
    row_store(m, k // GROUP, both(least, least))


INTEGER = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)  # ids of the types that have this form


@kernel
def has_integers(kind):
    return kind in INTEGER


@kernel
def to_integers(kind, raw, at, q, d, m, k):
    """The block at `at` of raw as weights k on of a row: q uint8, and d and m float32 for each 16 (w = d q + m).

    raw (bytes,) is as the file has it, and q, d, m have one axis; or raw (bytes, 16) is packed, and so are they.
    """
    if kind == Q4_0:
        integers_q4_0(raw, at, q, d, m, k)
    elif kind == Q4_1:
        integers_q4_1(raw, at, q, d, m, k)
    elif kind == Q5_0:
        integers_q5_0(raw, at, q, d, m, k)
    elif kind == Q5_1:
        integers_q5_1(raw, at, q, d, m, k)
    elif kind == Q8_0:
        integers_q8_0(raw, at, q, d, m, k)
    elif kind == Q4_K:
        integers_q4_k(raw, at, q, d, m, k)
    elif kind == Q5_K:
        integers_q5_k(raw, at, q, d, m, k)
    elif kind == Q6_K:
        integers_q6_k(raw, at, q, d, m, k)


@njit
def pack(kind, raw, N, blocks, size):  # (bytes,) -> (bytes / 16, 16)
    """Blocks of N rows in the file's order as strips of sixteen rows, the last filled up with zeros.

    Each 32-bit word of a block (each float16, where its field is one) stands beside the same word of the other rows.
    """
    strips = (N + ROWS - 1) // ROWS
    packed = np.zeros((strips * blocks * size, ROWS), np.uint8)
    source, target = raw.view(np.uint16), packed.reshape(-1).view(np.uint16)
    place, step = places(kind, size)
    for n in range(N):
        for b in range(blocks):
            block = (n * blocks + b) * len(place)
            strip = (n // ROWS * blocks + b) * len(place) * ROWS
            for i in range(len(place)):
                target[strip + place[i] + n % ROWS * step[i]] = source[block + i]
    return packed


@njit
def unpacked(kind, packed, N, blocks, size):  # (bytes / 16, 16) -> (bytes,)
    """What `pack` was given."""
    raw = np.empty(N * blocks * size, np.uint8)
    source, target = packed.reshape(-1).view(np.uint16), raw.view(np.uint16)
    place, step = places(kind, size)
    for n in range(N):
        for b in range(blocks):
            block = (n * blocks + b) * len(place)
            strip = (n // ROWS * blocks + b) * len(place) * ROWS
            for i in range(len(place)):
                target[block + i] = source[strip + place[i] + n % ROWS * step[i]]
    return raw


@njit
def places(kind, size):
    """Where each 16 bits of a block go in a packed one, and how much further they go for the next row, in 16 bits."""
    halves = size // 2
    alone = 1 if kind in (Q4_0, Q5_0, Q8_0) else 0 if kind == Q6_K else 2  # float16s ahead
    place, step = np.empty(halves, np.int64), np.empty(halves, np.int64)
    for i in range(halves):
        if i < alone or (kind == Q6_K and i == halves - 1):
            place[i], step[i] = ROWS * i, 1
        else:
            second = (i - alone) % 2
            place[i], step[i] = ROWS * (i - second) + second, 2
    return place, step


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
