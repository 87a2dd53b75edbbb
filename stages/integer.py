"""Integer: activations become blocks of 8-bit integers too.

Idea    One instruction multiplies four times as many 8-bit integers as floats, and sums the products as well.
Was     quantized turns each integer of the file into a float, though only its block's scale ever was one. A step waits
        for these conversions, not for memory.
Change  matmul rounds each 32 activations to integers with a scale of their own. A row of w is taken apart into its
        integers and its scales, and multiplied as they are: d q + m of common/int8.py. A type that has no such form
        (floats, steps from a table) goes the old way.
Expect  A prompt gains, though not by fewer instructions: products take a quarter, and scales take that back. But its
        sums stay in registers along a row, and fewer additions wait for each other. A lone token gains little, since
        taking the row apart is most of its work, and loses where that got dearer (Q4_K). Rounding activations costs
        about half a percent of a row's product, and the logits a few times that, the same in nature as the file's own.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.int8 import GROUP, REGISTER, STEP, by_type, float_matmul, has_integers, row_apart, to_int8
from common.intrinsics import (
    LANES,
    QUAD,
    dots,
    load_bytes,
    load_lanes,
    load_spread,
    multiply_add,
    no_sums,
    sums_as_floats,
    total,
    zero_lanes,
)
from common.jit import njit
from common.quants import Q8_0, dequantize, unpack
from common.stage import Model, arena

PREVIOUS = "quantized"
CHANGES = ("matmul",)
OPERANDS = "int8"

PAGE = 4096  # bytes; where pages are larger, some are touched more than once


class Blocks(NamedTuple):
    """A matrix as the file holds it: N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block; a row of a float type is one block
    size: int  # bytes a block
    raw: Any  # (bytes,) uint8, in the map


def load(gguf, context, threads):
    """Touch every page of the map, and make room for context tokens. Nothing here needs threads."""

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return dequantize(tensor)
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        tensor.raw[::PAGE].max()  # reads a byte of each page, so that the clock sees no page fault
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, tensor.raw)

    config = gguf.config
    cache = arena(config.L, 2, context, config.G, config.hd)
    return Model(config, gguf.weights.map(blocks), cache)


@njit
def embed(ids, w):  # (T,), (V, D) -> (T, D)
    V, D, kind, length, size, raw = w
    T, blocks = len(ids), D // length
    out = np.empty((T, D), np.float32)
    for t in range(T):
        for b in range(blocks):
            unpack(kind, raw, (ids[t] * blocks + b) * size, out[t, b * length : (b + 1) * length])
    return out


@njit
def matmul(x, w):  # (T, K), (N, K) -> (T, N)
    N, K, kind, length, size, raw = w
    if not has_integers(kind):
        return float_matmul(x, w)
    T, x8 = x.shape[0], to_int8(x)  # tiles of one token: its quads, sums and scales lie side by side
    width, groups = QUAD * x8.p.shape[1], x8.sums.shape[1]
    q, d, m = np.empty(width, np.uint8), np.zeros(groups, np.float32), np.zeros(groups, np.float32)
    out = np.empty((T, N), np.float32)
    for n in range(N):
        by_type(row_apart, kind, raw, n * K // length * size, K, length, size, q, d, m)
        for t in range(T):
            lanes = zero_lanes(1)
            for g in range(0, groups, LANES):  # x8.offsets would not do: they are for 32 weights, an m may be for 16
                sums = load_spread(x8.scales, (t, g // 2, 0), 8) * sums_as_floats(load_lanes(x8.sums, (t, g, 0)))
                lanes = multiply_add(load_lanes(m, g), sums, lanes)
            for k in range(0, width, REGISTER):
                a, b = load_bytes(q, k, REGISTER), load_bytes(x8.p, (t, k // QUAD, 0, 0), REGISTER)
                # The largest q, a constant: of Q8_0 or any other. AVX2 must know what fits in 16 bits.
                products = dots(no_sums(lanes), a, b, 255) if kind == Q8_0 else dots(no_sums(lanes), a, b, 63)
                scale = load_spread(d, k // GROUP, 4) * load_spread(x8.scales, (t, k // STEP, 0), 2)
                lanes = multiply_add(scale, sums_as_floats(products), lanes)
            out[t, n] = total(lanes)
    return out


@njit
def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H * hd)
    T, H, hd = q.shape
    G = k.shape[1]
    out = np.zeros((T, H, hd), np.float32)
    for t in range(T):
        S = start + t + 1  # a token sees itself and all before it
        for h in range(H):
            g = h // (H // G)
            scores = np.empty(S, np.float32)
            for s in range(S):
                scores[s] = dot(q[t, h], k[s, g])
            weights = softmax(scale(scores, 1 / math.sqrt(hd)))
            for s in range(S):
                for d in range(hd):
                    out[t, h, d] += weights[s] * v[s, g, d]
    return out.reshape(T, H * hd)


def forward(model, ids, start):  # (T,) -> (T, D)
    config, weights = model.config, model.weights
    T, H, G, hd = len(ids), config.H, config.G, config.hd
    end = start + T
    if end > model.cache.shape[2]:
        raise ValueError(f"{end} tokens do not fit a context of {model.cache.shape[2]}")
    x = embed(np.array(ids), weights.token_embd)
    for layer, (keys, values) in zip(weights.layers, model.cache, strict=True):
        h = rms_norm(x, layer.attn_norm, config.eps)
        q = rope(matmul(h, layer.w_q).reshape(T, H, hd), config.rope_freqs, start)
        keys[start:end] = rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, start)
        values[start:end] = matmul(h, layer.w_v).reshape(T, G, hd)
        x = add(x, matmul(attention(q, keys[:end], values[:end], start), layer.w_o))
        h = rms_norm(x, layer.ffn_norm, config.eps)
        gate, up = silu(matmul(h, layer.w_gate)), matmul(h, layer.w_up)
        x = add(x, matmul(mul(gate, up), layer.w_down))
    return rms_norm(x, weights.output_norm, config.eps)


def logits(model, hidden):  # (T, D) -> (T, V)
    return matmul(hidden, model.weights.output)


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id."""
    start, new = 0, list(ids)
    for _ in range(n):
        hidden = forward(model, new, start)
        row = logits(model, hidden[-1:])[0]
        start, new = start + len(new), [choose(row)]
        yield new[0], row
