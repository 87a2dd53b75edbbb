"""Packed: rows interleaved at load, so that one vector serves sixteen of them.

Idea    Lay the weights out as the multiplication wants them, once, and not at each use.
Was     integer walks one row at a time. A register holds many weights of it, so its sums must be added across at the
        row's end, and scales be spread over lanes; that is instructions, and a step still waits for them.
Change  load writes each row's blocks anew, not a byte longer, in the order in which they will be used, and lays sixteen
        rows side by side as a strip, each word of a row beside the same word of the others. A register then holds four
        weights of each row, every lane is a row's own sum, and a scale is one load for sixteen rows. Four activations,
        32 bits, are spread over the register. There is a copy of the kernel for each type, in which integers go from
        the bytes to the products in registers.
Expect  A new token takes the time of reading the blocks from memory, or little more. load takes longer, by a copy of
        the file, and as much memory again. Each token of a prompt takes the blocks apart anew: it gains less.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.int8 import (
    GROUP,
    INTEGER,
    ask,
    by_type,
    float_matmul,
    kernel,
    pack,
    packed_bytes,
    raised,
    span,
    store_rows,
    strip_dots,
    strip_scales,
    to_int8,
)
from common.intrinsics import ROWS, multiply_add, of_tile, sums_as_floats, zero_lanes
from common.jit import njit
from common.quants import dequantize, unpack
from common.stage import Model, arena, pieces, room

PREVIOUS = "integer"
CHANGES = ("load", "matmul")
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


class Packed(NamedTuple):
    """A matrix in strips of sixteen rows, word by word side by side (common/int8.py). Fields as in Blocks."""

    N: int
    K: int
    kind: int
    length: int
    size: int
    raw: Any  # (bytes / 16, 16) uint8


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
    take = pieces(gguf)
    packed = weights.map(lambda w: pack_rows(w, take) if isinstance(w, Blocks) else w)
    return Model(config, packed._replace(token_embd=weights.token_embd), cache)  # rows of which are read one by one


def pack_rows(w, take=room):
    """A matrix of a type with integers, packed into memory from `take`; any other as it is."""
    if w.kind not in INTEGER:
        return w
    packed = take(packed_bytes(w.N, w.K, w.length, w.size)).reshape(-1, ROWS)
    pack(w.kind, w.raw, w.N, w.K // w.length, w.size, packed)
    return Packed(*w[:-1], packed)


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
    return in_strips(x, w) if isinstance(w, Packed) else float_matmul(x, w)


@njit
def in_strips(x, w):  # (T, K), (N, K) -> (T, N)
    out = np.empty((len(x), w.N), np.float32)
    strips(to_int8(x), w, out, 0, (w.N + ROWS - 1) // ROWS)
    return out


@njit
def strips(x, w, out, first, last):  # Rounded (T, K), (N, K) -> out (T, N), strips `first` to `last`
    by_type(strips_of, w.kind, x, w, out, first, last)


@kernel
def strips_of(kind, x, w, out, first, last):
    N, K, _, length, size, raw = w
    blocks, groups, step = K // length, length // GROUP, span(kind) // GROUP
    asked = first * blocks * size
    for strip in range(first, last):
        for t in range(len(out)):
            lanes = zero_lanes(1)
            for b in range(blocks):
                at = (strip * blocks + b) * size
                for g in range(0, groups, step):
                    here = b * groups + g
                    asked = ask(raw, asked, at + g * (size // groups))
                    dots = strip_dots(kind, raw, at, g, x, t, here, lanes)
                    d, m = strip_scales(kind, raw, at, g)
                    d = d * of_tile(lanes, x.scales, (t, here // 2))
                    lanes = multiply_add(d, sums_as_floats(dots), lanes)
                    if raised(kind) == 0:
                        lanes = multiply_add(m, of_tile(lanes, x.offsets, (t, here // 2)), lanes)
            store_rows(out, t, strip * ROWS, lanes)


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
