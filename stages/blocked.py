"""Blocked: a block taken apart serves every token, a register of weights a tile of them; attention in tiles too.

Idea    What has been loaded into registers should be used as often as there are tokens to use it.
Was     packed takes each block apart anew for each token, and loads a register of weights for each multiplication.
        attention works on one number at a time, each addition waiting for the one before.
Change  For more than one token, matmul takes a panel of 256 weights of sixteen rows apart, then multiplies it by eight
        tokens at a time: their sums fill eight registers, and each register of weights is loaded once for all eight.
        attention does the same with keys, sixteen positions side by side, and with values.
Expect  A prompt gains until multiplying binds. A lone token computes as before, but for attention, which gains the more
        the longer the text.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, mul, rms_norm, rope, scale, silu, softmax
from common.int8 import GROUP, INTEGER, STEP, float_matmul, kernel, pack, to_int8, to_integers
from common.intrinsics import (
    LANES,
    QUAD,
    ROWS,
    dot4_tokens,
    dot8_tokens,
    load_lanes,
    load_quads,
    load_tokens,
    multiply_add,
    no_sums,
    of_tokens,
    prefetch,
    store_lanes,
    store_tokens,
    sums_as_floats,
    zero_lanes,
)
from common.jit import njit
from common.quants import Q8_0, dequantize, unpack
from common.stage import Model, arena

PREVIOUS = "packed"
CHANGES = ("matmul", "attention")
FUSED = {"dot": "attention"}
OPERANDS = "int8"

PAGE = 4096  # bytes; where pages are larger, some are touched more than once
PANEL = 256  # weights of sixteen rows at a time: with their scales 6 KB, an eighth of a common L1
TILE = 8  # tokens: sixteen registers for their sums, of integers and of floats
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
    if not isinstance(w, Packed):
        return float_matmul(x, w)
    return tiles(x, w) if len(x) > 1 else strips(x, w)


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
def tiles(x, w):  # (T, K), (N, K) -> (T, N)
    N, K, kind, length, size, raw = w
    T, blocks = x.shape[0], K // length
    x8, scales, sums = to_int8(x, TILE)
    q = np.empty((PANEL, ROWS), np.uint8)
    d, m = np.empty((PANEL // GROUP, ROWS), np.float32), np.empty((PANEL // GROUP, ROWS), np.float32)
    out, totals = np.empty((T, N), np.float32), np.empty((len(x8), ROWS), np.float32)
    for n in range(0, N, ROWS):
        totals[:] = 0
        for k in range(0, K, PANEL):
            count = min(PANEL, K - k)
            for b in range(k // length, (k + count) // length):
                at = (n // ROWS * blocks + b) * size
                for line in range(0, size, LINE):
                    prefetch(raw, (at + AHEAD + line, 0))
                to_integers(kind, raw, at, q, d, m, b * length - k)
            for t in range(0, T, TILE):
                add_panel(totals, q, d, m, kind, x8, scales, sums, t, k, count)
        for t in range(T):
            for row in range(min(ROWS, N - n)):
                out[t, n + row] = totals[t, row]
    return out


@kernel
def add_panel(totals, q, d, m, kind, x8, scales, sums, t, k, count):
    """Products of `count` weights from k on to the totals of a tile of tokens from t on."""
    lanes = load_tokens(zero_lanes(TILE), totals, (t, 0))
    for g in range(count // GROUP):
        dots, first = no_sums(lanes), k + g * GROUP
        for i in range(0, GROUP, QUAD):  # a constant count, so the compiler unrolls it
            quads, at = load_quads(q, g * GROUP + i), (t, first + i)
            if kind == Q8_0:
                dots = dot8_tokens(dots, quads, x8, at)
            else:
                dots = dot4_tokens(dots, quads, x8, at)
        products = of_tokens(lanes, scales, (t, first // STEP)) * sums_as_floats(dots)
        lanes = multiply_add(load_lanes(d, (g, 0)), products, lanes)
        lanes = multiply_add(load_lanes(m, (g, 0)), of_tokens(lanes, sums, (t, first // GROUP)), lanes)
    store_tokens(totals, (t, 0), lanes)


@njit
def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H * hd)
    T, H, hd = q.shape
    S, G = start + T, k.shape[1]
    rows = (T + TILE - 1) // TILE * TILE if T > 1 else 1
    keys = np.zeros(((S + LANES - 1) // LANES, hd, LANES), np.float32)  # sixteen positions side by side
    queries, out = np.zeros((rows, hd), np.float32), np.empty((rows, H * hd), np.float32)
    weights = np.zeros((min(rows, TILE), len(keys) * LANES), np.float32)
    for h in range(H):
        g = h // (H // G)
        if h % (H // G) == 0:
            for s in range(S):
                for i in range(hd):
                    keys[s // LANES, i, s % LANES] = k[s, g, i]
        queries[:T] = q[:, h]
        for t in range(0, T, TILE):
            if T == 1:
                attend(zero_lanes(1), queries, keys, v[:, g], weights, out[:, h * hd : (h + 1) * hd], t, start, T)
            else:
                attend(zero_lanes(TILE), queries, keys, v[:, g], weights, out[:, h * hd : (h + 1) * hd], t, start, T)
    return out[:T]


@njit
def attend(none, queries, keys, v, weights, out, t, start, T):
    """One head of as many tokens from t on as `none`, zeros, has room for."""
    hd, last = queries.shape[1], min(t + TILE, T)
    S = start + last
    for s in range(0, S, LANES):
        lanes = none
        for i in range(hd):
            lanes = multiply_add(of_tokens(lanes, queries, (t, i)), load_lanes(keys, (s // LANES, i, 0)), lanes)
        store_tokens(weights, (0, s), lanes)
    for row in range(last - t):
        seen = start + t + row + 1  # a token sees itself and all before it
        weights[row, :seen] = softmax(scale(weights[row, :seen], 1 / math.sqrt(hd)))
        weights[row, seen:] = 0
    for i in range(0, hd - LANES + 1, LANES):
        lanes = none
        for s in range(S):
            lanes = multiply_add(of_tokens(lanes, weights, (0, s)), load_lanes(v, (s, i)), lanes)
        store_tokens(out, (t, i), lanes)
    for row in range(last - t):
        for i in range(hd - hd % LANES, hd):
            out[t + row, i] = 0
            for s in range(S):
                out[t + row, i] += weights[row, s] * v[s, i]


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
