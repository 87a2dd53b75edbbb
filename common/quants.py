"""Blocks: how GGUF stores weights in 2 to 8 bits each, and how to turn them into float32 (common/packing.py: and back).

A row of a tensor is cut into blocks of 32 weights, or super-blocks of 256. A block holds one small integer q per weight
and one scale d for all of them: w = d q, or w = d q + m where it also holds an offset. A super-block gives each group
of 16 or 32 weights a scale of its own, itself a small integer times d.

`unpack_q4_k(raw, at, out)` and its like read one block: bytes from `at` of raw (uint8[::1]) to weights in out
(float32[::1]). Their docstrings give the fields in the file's order: "d 2 f16" is a float16 in two bytes, "q 16" is
sixteen bytes. Layouts, formulas and the order of every float operation are those of ggml-quants.c, so each bit agrees.

A variable such as q below is sixteen bytes in a vector register, and `q & 15` or `d * floats(q) + m` works on all of
them at once (common/intrinsics.py). A plain loop over 16 weights stays scalar: LLVM unrolls it before it looks for
vectors.
"""

from functools import partial

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from common.gguf import TYPES
from common.intrinsics import BYTES, FLOATS, LANES, load_lanes, store_lanes
from common.jit import njit

# Without numba's reference counts: raw and out outlive the call, and four atomic operations cost more than a block.
kernel = partial(njit, _nrt=False)


# Float types: any number of weights.


@kernel
def unpack_f32(raw, at, out):
    """4 bytes a weight: w."""
    weights = raw[at : at + 4 * len(out)].view(np.float32)
    for i in range(len(out)):
        out[i] = weights[i]


@kernel
def unpack_f16(raw, at, out):
    """2 bytes a weight: sign 1, exponent 5, fraction 10 bits."""
    for i in range(len(out)):
        out[i] = f16(raw, at + 2 * i)


@kernel
def unpack_bf16(raw, at, out):
    """2 bytes a weight: the upper half of a float32."""
    bits = out.view(np.uint32)
    upper = raw[at : at + 2 * len(out)].view(np.uint16)
    for i in range(len(out)):
        bits[i] = np.uint32(upper[i]) << np.uint32(16)


# Blocks of 32 weights. Byte i of q holds weight i in its low half and weight i + 16 in its high half.


@kernel
def unpack_q4_0(raw, at, out):
    """18 bytes: d 2 f16 | q 16.    w = d (q - 8)"""
    d = f16(raw, at)
    q = load(raw, at + 2)
    store(out, 0, d * (floats(q & 15) - 8))
    store(out, 16, d * (floats(q >> 4) - 8))


@kernel
def unpack_q4_1(raw, at, out):
    """20 bytes: d 2 f16 | m 2 f16 | q 16.    w = d q + m"""
    d, m = f16(raw, at), f16(raw, at + 2)
    q = load(raw, at + 4)
    store(out, 0, d * floats(q & 15) + m)
    store(out, 16, d * floats(q >> 4) + m)


@kernel
def unpack_q5_0(raw, at, out):
    """22 bytes: d 2 f16 | h 4 | q 16.    w = d (q + 16 h - 16), bit i of h for weight i"""
    d = f16(raw, at)
    h0, h1 = bits(raw, at + 2), bits(raw, at + 4)
    q = load(raw, at + 6)
    store(out, 0, d * (floats(q & 15 | h0 << 4) - 16))
    store(out, 16, d * (floats(q >> 4 | h1 << 4) - 16))


@kernel
def unpack_q5_1(raw, at, out):
    """24 bytes: d 2 f16 | m 2 f16 | h 4 | q 16.    w = d (q + 16 h) + m, bit i of h for weight i"""
    d, m = f16(raw, at), f16(raw, at + 2)
    h0, h1 = bits(raw, at + 4), bits(raw, at + 6)
    q = load(raw, at + 8)
    store(out, 0, d * floats(q & 15 | h0 << 4) + m)
    store(out, 16, d * floats(q >> 4 | h1 << 4) + m)


@kernel
def unpack_q8_0(raw, at, out):
    """34 bytes: d 2 f16 | q 32 int8.    w = d q"""
    d = f16(raw, at)
    for i in (0, 16):
        store(out, i, d * signed_floats(load(raw, at + 2 + i)))


# Sixteen uneven steps, close together near zero, where most weights lie.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@kernel
def unpack_iq4_nl(raw, at, out):
    """18 bytes: d 2 f16 | q 16.    w = d LEVELS[q]"""
    d = f16(raw, at)
    for i in range(16):
        q = raw[at + 2 + i]
        out[i] = d * LEVELS[q & 15]
        out[i + 16] = d * LEVELS[q >> 4]


# Super-blocks of 256 weights.


@kernel
def unpack_q2_k(raw, at, out):
    """84 bytes: s 16 | q 64 | d 2 f16 | dmin 2 f16.    w = d (s & 15) q - dmin (s >> 4), one byte of s for 16 weights

    32 bytes of q hold 128 weights, 2 bits each: the lowest bits the first 32 weights, the next bits the next 32, and so
    on.
    """
    s = load(raw, at)
    scales = f16(raw, at + 80) * floats(s & 15)
    mins = f16(raw, at + 82) * floats(s >> 4)
    for n in range(2):  # 128 weights each
        for i in range(2):
            q = load(raw, at + 16 + 32 * n + 16 * i)
            for j in range(4):
                g = 8 * n + 2 * j + i
                store(out, 16 * g, lane(scales, g) * floats(q >> 2 * j & 3) - lane(mins, g))


@kernel
def unpack_q3_k(raw, at, out):
    """110 bytes: h 32 | q 64 | s 12 | d 2 f16.    w = d (s - 32) (q + 4 h - 4), one 6-bit s for 16 weights

    q as in Q2_K; bit j of the 32 bytes of h belongs to the j-th 32 weights. s: low 4 bits in 8 bytes, high 2 bits in 4.
    """
    d = f16(raw, at + 108)
    for n in range(2):  # 128 weights each
        for i in range(2):
            q = load(raw, at + 32 + 32 * n + 16 * i)
            h = load(raw, at + 16 * i) >> 4 * n
            for j in range(4):
                g = 8 * n + 2 * j + i
                s = raw[at + 96 + 2 * j + i] >> 4 * n & 15 | (raw[at + 104 + g % 4] >> 2 * (g // 4) & 3) << 4
                scale = d * np.float32(s - 32)
                store(out, 16 * g, scale * (floats(q >> 2 * j & 3 | (h >> j & 1) << 2) - 4))


@kernel
def scale_and_min(raw, at, j):
    """(scale, min) of the j-th 32 weights of a Q4_K or Q5_K block: 6 bits each, in the 12 bytes at `at`.

    j < 4: the low 6 bits of bytes j and j + 4. Otherwise byte j + 4 holds the low 4 bits of both, and the top 2 bits of
    bytes j - 4 and j the high 2.
    """
    if j < 4:
        return raw[at + j] & 63, raw[at + j + 4] & 63
    low = raw[at + j + 4]
    return low & 15 | raw[at + j - 4] >> 6 << 4, low >> 4 | raw[at + j] >> 6 << 4


@kernel
def unpack_q4_k(raw, at, out):
    """144 bytes: d 2 f16 | dmin 2 f16 | s 12 | q 128.    w = d scale q - dmin min, one scale and min for 32 weights

    32 bytes of q hold 64 weights: the low halves the first 32, the high halves the next.
    """
    d, dmin = f16(raw, at), f16(raw, at + 2)
    for j in range(4):  # 64 weights each
        s, m = scale_and_min(raw, at + 4, 2 * j)
        t, n = scale_and_min(raw, at + 4, 2 * j + 1)
        low, high = d * np.float32(s), d * np.float32(t)
        low_least, high_least = dmin * np.float32(m), dmin * np.float32(n)
        for i in (0, 16):
            q = load(raw, at + 16 + 32 * j + i)
            store(out, 64 * j + i, low * floats(q & 15) - low_least)
            store(out, 64 * j + 32 + i, high * floats(q >> 4) - high_least)


@kernel
def unpack_q5_k(raw, at, out):
    """176 bytes: d 2 f16 | dmin 2 f16 | s 12 | h 32 | q 128.    w = d scale (q + 16 h) - dmin min

    s and q as in Q4_K; bit j of the 32 bytes of h belongs to the j-th 32 weights.
    """
    d, dmin = f16(raw, at), f16(raw, at + 2)
    for j in range(4):  # 64 weights each
        s, m = scale_and_min(raw, at + 4, 2 * j)
        t, n = scale_and_min(raw, at + 4, 2 * j + 1)
        low, high = d * np.float32(s), d * np.float32(t)
        low_least, high_least = dmin * np.float32(m), dmin * np.float32(n)
        for i in (0, 16):
            q, h = load(raw, at + 48 + 32 * j + i), load(raw, at + 16 + i) >> 2 * j
            store(out, 64 * j + i, low * floats(q & 15 | (h & 1) << 4) - low_least)
            store(out, 64 * j + 32 + i, high * floats(q >> 4 | (h >> 1 & 1) << 4) - high_least)


@kernel
def unpack_q6_k(raw, at, out):
    """210 bytes: q 128 | h 64 | s 16 int8 | d 2 f16.    w = d s (q + 16 h - 32), one s for 16 weights

    64 bytes of q hold 128 weights: the low halves the first 64, the high halves the next. Their upper bits are in 32
    bytes of h: the lowest two bits for the first 32 weights, the next two for the next 32, and so on.
    """
    scales = f16(raw, at + 208) * signed_floats(load(raw, at + 192))
    for n in range(2):  # 128 weights each
        for i in range(2):
            h = load(raw, at + 128 + 32 * n + 16 * i)
            for j in range(4):
                g = 8 * n + 2 * j + i
                q = load(raw, at + 64 * n + 32 * (j % 2) + 16 * i) >> 4 * (j // 2)
                store(out, 16 * g, lane(scales, g) * (floats(q & 15 | (h >> 2 * j & 3) << 4) - 32))


@kernel
def unpack_iq4_xs(raw, at, out):
    """136 bytes: d 2 f16 | sh 2 | sl 4 | q 128.    w = d (s - 32) LEVELS[q], one 6-bit s for 32 weights

    s: low 4 bits in sl, high 2 bits in sh. q: sixteen bytes for 32 weights, as in IQ4_NL.
    """
    d = f16(raw, at)
    sh = raw[at + 2] | raw[at + 3] << 8
    for j in range(8):  # 32 weights each
        s = raw[at + 4 + j // 2] >> 4 * (j % 2) & 15 | (sh >> 2 * j & 3) << 4
        scale = d * np.float32(s - 32)
        for i in range(16):
            q = raw[at + 8 + 16 * j + i]
            out[32 * j + i] = scale * LEVELS[q & 15]
            out[32 * j + 16 + i] = scale * LEVELS[q >> 4]


# A type's id, as the file and the kernels know it.
F32, F16, BF16 = (TYPES[name].id for name in ("F32", "F16", "BF16"))
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = (TYPES[name].id for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = (TYPES[name].id for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
IQ4_NL, IQ4_XS = (TYPES[name].id for name in ("IQ4_NL", "IQ4_XS"))


@kernel(forceinline=True)  # passing two arrays by call costs more than a block of 32
def unpack(kind, raw, at, out):
    """One block of type `kind` (ggml's type id), from byte `at` of raw (uint8[::1]), as float32 weights into out.

    len(out) is the type's block size; for F32, F16 and BF16 any length. ValueError for a type that has no kernel here.
    Bounds are not checked: the loader has done that.
    """
    if kind == F32:
        unpack_f32(raw, at, out)
    elif kind == F16:
        unpack_f16(raw, at, out)
    elif kind == BF16:
        unpack_bf16(raw, at, out)
    elif kind == Q4_0:
        unpack_q4_0(raw, at, out)
    elif kind == Q4_1:
        unpack_q4_1(raw, at, out)
    elif kind == Q5_0:
        unpack_q5_0(raw, at, out)
    elif kind == Q5_1:
        unpack_q5_1(raw, at, out)
    elif kind == Q8_0:
        unpack_q8_0(raw, at, out)
    elif kind == Q2_K:
        unpack_q2_k(raw, at, out)
    elif kind == Q3_K:
        unpack_q3_k(raw, at, out)
    elif kind == Q4_K:
        unpack_q4_k(raw, at, out)
    elif kind == Q5_K:
        unpack_q5_k(raw, at, out)
    elif kind == Q6_K:
        unpack_q6_k(raw, at, out)
    elif kind == IQ4_NL:
        unpack_iq4_nl(raw, at, out)
    elif kind == IQ4_XS:
        unpack_iq4_xs(raw, at, out)
    else:
        raise ValueError("this tensor type cannot be unpacked")


@njit
def unpack_blocks(kind, raw, size, out, length):
    """All blocks of raw, `size` bytes each, into out, `length` weights each."""
    for b in range(len(out) // length):
        unpack(kind, raw, b * size, out[b * length : (b + 1) * length])


def dequantize(tensor):
    """A common.gguf.Tensor's weights: a new float32 array of its shape. ValueError for a type without a kernel here."""
    out = np.empty(tensor.shape, np.float32)
    kind = tensor.type
    # A float type has no blocks: all its weights are one.
    length = out.size if kind.block == 1 else kind.block
    if out.size:
        unpack_blocks(kind.id, tensor.raw, length // kind.block * kind.bytes, out.reshape(-1), length)
    return out


LINE = 16  # floats in a cache line
STRIP = 64  # rows: their float32 fill a few cache lines across, so that turning them writes whole lines


def dequantize_transposed(tensor):
    """A matrix's weights (N, K) as a new float32 array (K, N); a vector's as they are. ValueError as dequantize."""
    if len(tensor.shape) == 1:
        return dequantize(tensor)
    N, K = tensor.shape
    out = aligned_empty(K, N)
    for n in range(0, N, STRIP):
        out[:, n : n + STRIP] = dequantize(tensor[n : n + STRIP]).T
    return out


def aligned_empty(K, N):
    """A new float32 array (K, N) that begins a cache line; numpy's own begin anywhere in one."""
    spare = np.empty(K * N + LINE, np.float32)
    start = -spare.ctypes.data // 4 % LINE
    return spare[start : start + K * N].reshape(K, N)


# Values in lanes, and halves.


@kernel
def load(raw, at):
    """Sixteen bytes from byte `at` of raw."""
    raw[at + 15]  # unused, so the compiler drops it, unless NUMBA_BOUNDSCHECK=1 makes it a check
    return load_lanes(raw, at)


@kernel
def store(out, at, values):
    """Sixteen floats to out[at : at + 16]."""
    out[at + 15]
    store_lanes(out, at, values)


@kernel
def word(raw, at):
    """Two bytes of raw as one number."""
    return raw[at] | raw[at + 1] << 8


@kernel
def f16(raw, at):
    """The float16 in two bytes of raw, as float32."""
    return from_f16(word(raw, at))


@kernel
def bits(raw, at):
    """The sixteen bits in two bytes of raw, lowest first, as sixteen bytes 0 or 1."""
    return spread_bits(word(raw, at))


@intrinsic
def spread_bits(typing, word):
    def code(context, builder, signature, args):
        flags = builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.VectorType(ir.IntType(1), LANES))
        return builder.zext(flags, context.get_value_type(BYTES))

    return BYTES(types.int64), code


@intrinsic
def floats(typing, q):
    """Bytes 0 to 255 as floats."""

    def code(context, builder, signature, args):
        return builder.uitofp(args[0], context.get_value_type(FLOATS))

    return FLOATS(q), code


@intrinsic
def signed_floats(typing, q):
    """Bytes read as int8, -128 to 127, as floats."""

    def code(context, builder, signature, args):
        return builder.sitofp(args[0], context.get_value_type(FLOATS))

    return FLOATS(q), code


@intrinsic
def lane(typing, values, i):
    """The number in lane i."""

    def code(context, builder, signature, args):
        return builder.extract_element(*args)

    return values.element(values, types.int64), code


@intrinsic
def from_f16(typing, bits):
    """The float16 of these 16 bits, as float32."""

    def code(context, builder, signature, args):
        return builder.fpext(builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType()), ir.FloatType())

    return types.float32(types.int64), code
