"""Packed: rows interleaved at load, so that one vector serves sixteen of them.

Idea    Lay the weights out as the multiplication wants them, once, and not at each use.
Was     integer walks one row at a time. A register holds many weights of it, so its sums must be added across at the
        row's end, and scales be spread over lanes; that is instructions, and a step still waits for them.
Change  load copies every matrix into strips of sixteen rows, each word of a block beside the same word of the other
        rows. A register then holds four weights of each row, every lane is a row's own sum, and a scale is one load for
        sixteen rows. An activation, four integers, is spread over the register. What comes next is prefetched.
Expect  A new token takes the time of reading the blocks from memory, or little more. load takes longer, by a copy of
        the file, and as much memory again. Each token of a prompt takes the blocks apart anew: it gains less.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.int8 import GROUP, INTEGER, STEP, float_matmul, pack, to_int8, to_integers
from common.intrinsics import (
    QUAD,
    ROWS,
    dot4_tokens,
    dot8_tokens,
    load_lanes,
    load_quads,
    multiply_add,
    no_sums,
    prefetch,
    store_lanes,
    sums_as_floats,
    zero_lanes,
)
from common.jit import njit
from common.quants import Q8_0, dequantize, unpack
from common.stage import Model, arena

PREVIOUS = "integer"
CHANGES = ("load", "matmul")
OPERANDS = "int8"

PAGE = 4096  # bytes; where pages are larger, some are touched more than once
LINE = 4  # bytes of each of sixteen rows in a cache line of 64
AHEAD = 256  # bytes of each row, 4 KB in all: what memory delivers in its latency, and some more


class Blocks(NamedTuple):
    """A matrix as the file holds it: N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block; a row of a float type is one block
    size: int  # bytes a block
    raw: Any  # (bytes,) uint8, in the map


class Packed(NamedTuple):
    """A matrix in strips of sixteen rows, word by word side by side (common/int8.py). Fields as in Blocks."""

    N: int
    K: int
    kind: int
    length: int
    size: int
    raw: Any  # (bytes / 16, 16) uint8


def pack_rows(w):
    """A matrix of a type with integers, packed; any other as it is."""
    if w.kind not in INTEGER:
        return w
    return Packed(*w[:-1], pack(w.kind, w.raw, w.N, w.K // w.length, w.size))


def load(gguf, context, threads):
    """Touch every page of the map, pack, and make room for context tokens. Nothing here needs threads."""

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return dequantize(tensor)
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        tensor.raw[::PAGE].max()  # reads a byte of each page, so that the clock sees no page fault
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, tensor.raw)

    config = gguf.config
    cache = arena(config.L, 2, context, config.G, config.hd)
    weights = gguf.weights.map(blocks)
    packed = weights.map(lambda w: pack_rows(w) if isinstance(w, Blocks) else w)
    return Model(config, packed._replace(token_embd=weights.token_embd), cache)  # rows of which are read one by one


@njit
def embed(ids, w):  # (T,), (V, D) -> (T, D)
    V, D, kind, length, size, raw = w
    T, blocks = len(ids), D // length
    out = np.empty((T, D), np.float32)
    for t in range(T):
        for b in range(blocks):
            unpack(kind, raw, (ids[t] * blocks + b) * size, out[t, b * length : (b + 1) * length])
    return out


def matmul(x, w):  # (T, K), (N, K) -> (T, N)
    return strips(x, w) if isinstance(w, Packed) else float_matmul(x, w)


@njit
def strips(x, w):  # (T, K), (N, K) -> (T, N)
    N, K, kind, length, size, raw = w
    T, blocks = x.shape[0], K // length
    x8, scales, sums = to_int8(x)
    q = np.empty((length, ROWS), np.uint8)
    d, m = np.empty((length // GROUP, ROWS), np.float32), np.empty((length // GROUP, ROWS), np.float32)
    out, last = np.empty((T, N), np.float32), np.empty(ROWS, np.float32)
    for n in range(0, N, ROWS):
        for t in range(T):
            lanes = zero_lanes(1)
            for b in range(blocks):
                at = (n // ROWS * blocks + b) * size
                for line in range(0, size, LINE):
                    prefetch(raw, (at + AHEAD + line, 0))
                to_integers(kind, raw, at, q, d, m, 0)
                for g in range(length // GROUP):
                    k, dots = b * length + g * GROUP, no_sums(lanes)
                    for i in range(0, GROUP, QUAD):  # a constant count, so the compiler unrolls it
                        quads, at4 = load_quads(q, g * GROUP + i), (t, k + i)
                        if kind == Q8_0:
                            dots = dot8_tokens(dots, quads, x8, at4)
                        else:
                            dots = dot4_tokens(dots, quads, x8, at4)
                    lanes = multiply_add(load_lanes(d, (g, 0)) * scales[t, k // STEP], sums_as_floats(dots), lanes)
                    lanes = multiply_add(load_lanes(m, (g, 0)), sums[t, k // GROUP], lanes)
            if n + ROWS <= N:
                store_lanes(out, (t, n), lanes)
            else:
                store_lanes(last, 0, lanes)
                out[t, n:] = last[: N - n]
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
