"""From float32 weights to GGUF's blocks: the way back of common/quants.py, which shows the layouts.

In each `pack_q4_0(x, q, out)`, x holds a block's weights, q is room for their integers, out the block's bytes. Q4_0 to
Q8_0 choose d as ggml does, bit for bit; the search for the scales of Q4_K, Q5_K and Q6_K is our own.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from common.gguf import TYPES
from common.jit import njit
from common.quants import BF16, F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, from_f16


@njit
def pack_f16(x, q, out):
    """To the nearest float16, ties to even; beyond 65,504 to infinity."""
    for i in range(len(x)):
        put_f16(out, 2 * i, x[i])


@njit
def pack_bf16(x, q, out):
    """To the nearest upper half of a float32, ties to even; a NaN stays one."""
    words = x.view(np.uint32)
    for i in range(len(x)):
        word = np.int64(words[i])
        upper = word >> 16 | 64 if word & 0x7FFFFFFF > 0x7F800000 else word + 0x7FFF + (word >> 16 & 1) >> 16
        out[2 * i], out[2 * i + 1] = upper & 255, upper >> 8


@njit
def pack_q4_0(x, q, out):
    put_f16(out, 0, fit_symmetric(x, q, 8))
    put_q4(out[2:18], q)


@njit
def pack_q4_1(x, q, out):
    d, m = fit_range(x, q, 15)
    put_f16(out, 0, d)
    put_f16(out, 2, m)
    put_q4(out[4:20], q)


@njit
def pack_q5_0(x, q, out):
    put_f16(out, 0, fit_symmetric(x, q, 16))
    put_bits(out[2:6], q, 4)
    put_q4(out[6:22], q)


@njit
def pack_q5_1(x, q, out):
    d, m = fit_range(x, q, 31)
    put_f16(out, 0, d)
    put_f16(out, 2, m)
    put_bits(out[4:8], q, 4)
    put_q4(out[8:24], q)


@njit
def pack_q8_0(x, q, out):
    d = np.abs(x).max() / np.float32(127)
    inverse = reciprocal(d)
    put_f16(out, 0, d)
    for i in range(32):
        size = abs(x[i] * inverse)
        whole = np.int32(size)
        whole += size - np.float32(whole) >= np.float32(0.5)  # half away from zero, where size + 0.5 could round up
        out[2 + i] = whole if x[i] >= 0 else -whole


@njit
def fit_symmetric(x, q, zero):
    """q and d for w = d (q - zero): the weight furthest from zero gets q = 0."""
    d = x[np.argmax(np.abs(x))] / np.float32(-zero)
    inverse = reciprocal(d)
    for i in range(len(x)):
        q[i] = min(2 * zero - 1, np.int32(x[i] * inverse + np.float32(zero + 0.5)))
    return d


@njit
def fit_range(x, q, top):
    """q, d and m for w = d q + m: the least weight gets q = 0, the greatest q = top."""
    m = x.min()
    d = (x.max() - m) / np.float32(top)
    inverse = reciprocal(d)
    for i in range(len(x)):
        q[i] = min(top, np.int32((x[i] - m) * inverse + np.float32(0.5)))
    return d, m


@njit
def pack_q4_k(x, q, out):
    fit_groups(x, q, out, 15)
    for j in range(4):
        put_q4(out[16 + 32 * j : 48 + 32 * j], q[64 * j : 64 * j + 64])


@njit
def pack_q5_k(x, q, out):
    fit_groups(x, q, out, 31)
    for i in range(32):
        put_bits(out[16 + i : 17 + i], q[i::32], 4)
    for j in range(4):
        put_q4(out[48 + 32 * j : 80 + 32 * j], q[64 * j : 64 * j + 64])


@njit
def fit_groups(x, q, out, top):
    """q for w = d scale q - dmin min of a Q4_K or Q5_K block; d, dmin, scales and mins go to its first 16 bytes."""
    scales, mins = np.empty(8, np.float32), np.empty(8, np.float32)
    for j in range(8):
        scales[j], mins[j] = fit_affine(x[32 * j : 32 * j + 32], top)
    d = put_f16(out, 0, scales.max() / 63)
    dmin = put_f16(out, 2, mins.max() / 63)
    for j in range(8):
        group = x[32 * j : 32 * j + 32]
        least = nearest(mins[j] * reciprocal(dmin), 0, 63)
        offset = dmin * np.float32(least)
        scale, error = 0, np.inf
        middle = nearest(scales[j] * reciprocal(d), 0, 63)
        # Beside a great scale a small one is rounded coarsely, so its neighbours are tried too.
        for near in range(max(middle - 1, 0), min(middle + 1, 63) + 1):
            trial = affine_error(group, d * np.float32(near), offset, top)
            if trial < error:
                scale, error = near, trial
        put_scale_and_min(out, 4, j, scale, least)
        inverse = reciprocal(d * np.float32(scale))
        for i in range(32 * j, 32 * j + 32):
            q[i] = nearest((x[i] + offset) * inverse, 0, top)


@njit
def affine_error(x, scale, least, top):
    """The squared error of w = scale q - least with the best q."""
    inverse, error = reciprocal(scale), 0.0
    for i in range(len(x)):
        error += (x[i] - (scale * np.float32(nearest((x[i] + least) * inverse, 0, top)) - least)) ** 2
    return error


@njit
def fit_affine(x, top):
    """scale and min >= 0 with the least squared error of w = scale q - min.

    Each trial takes a range, rounds x to q in it, and solves for the two that suit those q best (linear regression). A
    range from zero suits a group with an outlier, whose other weights share one q.
    """
    n, sum_x = len(x), np.float64(x.sum())
    floor, ceiling = min(x.min(), np.float32(0)), x.max()
    scale, least, gain = 0.0, np.float64(-floor), -np.inf
    for trial in range(2 * TRIALS):
        low = floor if trial < TRIALS else np.float32(0)
        stretch = reciprocal(ceiling - low) * np.float32(top + STEP * (trial % TRIALS - TRIALS // 2))
        sum_q, sum_qq, sum_xq = 0, 0, 0.0
        for i in range(n):
            level = nearest((x[i] - low) * stretch, 0, top)
            sum_q, sum_qq, sum_xq = sum_q + level, sum_qq + level * level, sum_xq + x[i] * level
        if sum_qq == 0:
            continue
        slope, offset = sum_xq / sum_qq, 0.0
        spread = n * sum_qq - sum_q * sum_q
        if spread > 0:
            steep = (n * sum_xq - sum_x * sum_q) / spread
            if steep * sum_q > sum_x:
                slope, offset = steep, (steep * sum_q - sum_x) / n
        if slope > 0 and slope * sum_xq - offset * sum_x > gain:
            scale, least, gain = slope, offset, slope * sum_xq - offset * sum_x
    return scale, least


@njit
def pack_q6_k(x, q, out):
    scales = np.empty(16, np.float32)
    for j in range(16):
        scales[j] = fit_linear(x[16 * j : 16 * j + 16])
    d = put_f16(out, 208, np.abs(scales).max() / 127)
    for j in range(16):
        scale = nearest(scales[j] * reciprocal(d), -127, 127)
        out[192 + j] = scale
        inverse = reciprocal(d * np.float32(scale))
        for i in range(16 * j, 16 * j + 16):
            q[i] = nearest(x[i] * inverse, -32, 31) + 32
    for n in range(2):
        put_q4(out[64 * n : 64 * n + 64], q[128 * n : 128 * n + 128])
        for i in range(32):
            h = q[128 * n + i : 128 * n + 128 : 32]
            out[128 + 32 * n + i] = h[0] >> 4 | h[1] >> 4 << 2 | h[2] >> 4 << 4 | h[3] >> 4 << 6


@njit
def fit_linear(x):
    """The scale with the least squared error of w = scale (q - 32), found as in fit_affine."""
    furthest = x[np.argmax(np.abs(x))]
    scale, gain = 0.0, 0.0
    for trial in range(TRIALS):
        stretch = -reciprocal(furthest) * np.float32(32 + STEP * (trial - TRIALS // 2))
        sum_qq, sum_xq = 0, 0.0
        for i in range(len(x)):
            level = nearest(x[i] * stretch, -32, 31)
            sum_qq, sum_xq = sum_qq + level * level, sum_xq + x[i] * level
        if sum_xq * sum_xq > gain * sum_qq:
            scale, gain = sum_xq / sum_qq, sum_xq * sum_xq / sum_qq
    return scale


TRIALS, STEP = 5, 0.5  # ways to round a group, and how far apart, in units of q


@njit
def nearest(x, low, high):
    """The integer nearest x, at least low and at most high."""
    return np.int32(min(max(np.floor(x + np.float32(0.5)), np.float32(low)), np.float32(high)))


@njit
def reciprocal(d):
    """1 / d, or 0 where that is not finite: a d so small is 0 as a float16, and any q will do."""
    return np.float32(1) / d if abs(d) > np.float32(1e-38) else np.float32(0)


@njit
def put_f16(out, at, x):
    """x as a float16 into two bytes of out; returns what a reader will see."""
    half = to_f16(x)
    out[at], out[at + 1] = half & 255, half >> 8
    return from_f16(half)


@njit
def put_q4(out, q):
    """The low 4 bits of each q: its first half to the low halves of out's bytes, the rest to the high halves."""
    for i in range(len(out)):
        out[i] = q[i] & 15 | (q[i + len(out)] & 15) << 4


@njit
def put_bits(out, q, shift):
    """Bit `shift` of each q, eight to a byte, the first lowest."""
    for i in range(len(out)):
        out[i] = 0
        for j in range(8):
            out[i] |= (q[8 * i + j] >> shift & 1) << j


@njit
def put_scale_and_min(out, at, j, scale, least):
    """The j-th pair of 6-bit integers, where scale_and_min finds it; in order of j, since later ones share bytes."""
    if j < 4:
        out[at + j], out[at + j + 4] = scale, least
    else:
        out[at + j + 4] = scale & 15 | (least & 15) << 4
        out[at + j - 4] |= scale >> 4 << 6
        out[at + j] |= least >> 4 << 6


@njit
def pack_blocks(kind, x, out, length, size):
    """All of x, `length` weights a block, into out, `size` bytes a block."""
    q = np.empty(length, np.int32)
    for b in range(len(x) // length):
        weights, block = x[b * length : (b + 1) * length], out[b * size : (b + 1) * size]
        if kind == F16:
            pack_f16(weights, q, block)
        elif kind == BF16:
            pack_bf16(weights, q, block)
        elif kind == Q4_0:
            pack_q4_0(weights, q, block)
        elif kind == Q4_1:
            pack_q4_1(weights, q, block)
        elif kind == Q5_0:
            pack_q5_0(weights, q, block)
        elif kind == Q5_1:
            pack_q5_1(weights, q, block)
        elif kind == Q8_0:
            pack_q8_0(weights, q, block)
        elif kind == Q4_K:
            pack_q4_k(weights, q, block)
        elif kind == Q5_K:
            pack_q5_k(weights, q, block)
        elif kind == Q6_K:
            pack_q6_k(weights, q, block)


PACKED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def quantize(name, x):
    """Finite float32 weights (rows, K) as blocks of type `name`: (rows, row bytes) uint8.

    ValueError for a type not in PACKED (or F32), or a K that is no multiple of the type's block.
    """
    x = np.ascontiguousarray(x, np.float32)
    rows, K = x.shape
    if name == "F32":
        return x.view(np.uint8)
    if name not in PACKED:
        raise ValueError(f"{name} cannot be written; {', '.join(PACKED)} can")
    kind = TYPES[name]
    if K % kind.block:
        raise ValueError(f"rows of {K} weights do not fill {name} blocks of {kind.block}")
    out = np.empty((rows, K // kind.block * kind.bytes), np.uint8)
    length = max(x.size, 1) if kind.block == 1 else kind.block
    pack_blocks(kind.id, x.reshape(-1), out.reshape(-1), length, length // kind.block * kind.bytes)
    return out


@intrinsic
def to_f16(typing, x):
    """The 16 bits of the float16 nearest a float32, ties to even."""

    def code(context, builder, signature, args):
        bits = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.zext(bits, ir.IntType(64))

    return types.int64(types.float32), code
