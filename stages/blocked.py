"""Blocked: a block taken apart serves every token, a register of weights a tile of them; attention in tiles too.

Idea    What has been loaded into registers should be used as often as there are tokens to use it.
Was     packed takes each block apart anew for each token, and uses each register of weights for one multiplication
        only. attention works on one number at a time, each addition waiting for the one before.
Change  For more than one token, matmul takes a panel apart, 1024 weights of each of sixteen rows, then multiplies it by
        a tile of tokens at a time: their sums fill eight registers, and a register of weights is loaded once for all.
        attention does the same with keys, sixteen positions side by side, and with values.
Expect  A prompt gains until multiplying binds; one of two tokens, and mostly of three, loses, since a tile is
        always computed whole. A lone token computes as before, but for attention, which gains the more the longer the
        text.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, mul, rms_norm, rope, scale, silu, softmax
from common.int8 import (
    GROUP,
    INTEGER,
    ask,
    by_type,
    float_matmul,
    kernel,
    pack,
    packed_bytes,
    panel_dots,
    raised,
    span,
    store_rows,
    strip_dots,
    strip_integers,
    strip_scales,
    to_int8,
)
from common.intrinsics import (
    LANES,
    ROWS,
    TOKENS,
    load_lanes,
    load_tokens,
    multiply_add,
    of_tile,
    of_tokens,
    row_store,
    store_lanes,
    store_tokens,
    sums_as_floats,
    total,
    zero_lanes,
)
from common.jit import njit
from common.quants import dequantize, unpack
from common.stage import Model, arena, pieces, room

PREVIOUS = "packed"
CHANGES = ("matmul", "attention")
FUSED = {"dot": "attention"}
OPERANDS = "int8"

PAGE = 4096  # bytes; where pages are larger, some are touched more than once
PANEL = 1024  # weights of each of sixteen rows at a time: with their scales 24 KB at most, which a common L1 holds
TILE = TOKENS  # their sums of integers take eight registers


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
    if not isinstance(w, Packed):
        return float_matmul(x, w)
    return in_tiles(x, w) if len(x) > 1 else in_strips(x, w)


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
def in_tiles(x, w):  # (T, K), (N, K) -> (T, N)
    out = np.empty((len(x), w.N), np.float32)
    tiles(to_int8(x, TILE), w, out, 0, (w.N + ROWS - 1) // ROWS)
    return out


@njit
def tiles(x, w, out, first, last):  # Rounded (T, K) in tiles of TILE, (N, K) -> out (T, N), strips `first` to `last`
    q = np.empty((PANEL, ROWS), np.uint8)
    d, m = np.empty((PANEL // GROUP, ROWS), np.float32), np.empty((PANEL // GROUP, ROWS), np.float32)
    totals = np.empty((len(x.p) * TILE, ROWS), np.float32)
    by_type(tiles_of, w.kind, x, w, out, first, last, q, d, m, totals)


@kernel
def tiles_of(kind, x, w, out, first, last, q, d, m, totals):
    K, step, asked = w.K, span(kind) // GROUP, first * (w.K // w.length) * w.size
    for strip in range(first, last):
        for t in range(len(totals)):
            store_lanes(totals, (t, 0), zero_lanes(1))
        for k in range(0, K, PANEL):
            groups = min(PANEL, K - k) // GROUP
            for g in range(0, groups, step):
                at, first_of = (strip * K + k + g * GROUP) // w.length * w.size, (k + g * GROUP) % w.length // GROUP
                for i in range(step):
                    row_store(q, (g + i) * GROUP, strip_integers(kind, w.raw, at, first_of + i))
                scale, least = strip_scales(kind, w.raw, at, first_of)
                row_store(d, g, scale)
                row_store(m, g, least)
            end, more = (strip * K + k + groups * GROUP) // w.length * w.size, groups * GROUP // w.length * w.size
            for tile in range(len(x.p)):
                asked = ask(w.raw, asked, end + more * (tile + 1) // len(x.p))  # the next panel, a share at a time
                add_panel(kind, totals, q, d, m, x, tile, k // GROUP, groups)
        for t in range(len(out)):
            store_rows(out, t, strip * ROWS, load_lanes(totals, (t, 0)))


@kernel
def add_panel(kind, totals, q, d, m, x, tile, first, groups):
    """Products of `groups` times sixteen weights from group `first` on to the totals of a tile of tokens."""
    lanes, step = load_tokens(zero_lanes(TILE), totals, (tile * TILE, 0)), span(kind) // GROUP
    for g in range(0, groups, step):
        here = first + g
        dots = panel_dots(kind, q, g, x, tile, here, lanes)
        products = of_tile(lanes, x.scales, (tile, here // 2)) * sums_as_floats(dots)
        lanes = multiply_add(load_lanes(d, (g, 0)), products, lanes)
        if raised(kind) == 0:
            lanes = multiply_add(load_lanes(m, (g, 0)), of_tile(lanes, x.offsets, (tile, here // 2)), lanes)
    store_tokens(totals, (tile * TILE, 0), lanes)


@njit
def attend_alone(q, k, v):  # (1, H, hd), (S, G, hd), (S, G, hd) -> (1, H * hd)
    """A lone token's heads, lanes along each: one by one, though a group shares its keys (half_cache mends that)."""
    _, H, hd = q.shape
    S, G = k.shape[:2]
    out, scores, full = np.zeros((1, H * hd), np.float32), np.empty(S, np.float32), hd - hd % LANES
    for h in range(H):
        g = h // (H // G)
        for s in range(S):
            lanes = zero_lanes(1)
            for i in range(0, full, LANES):
                lanes = multiply_add(load_lanes(q, (0, h, i)), load_lanes(k, (s, g, i)), lanes)
            scores[s] = total(lanes)
            for i in range(full, hd):
                scores[s] += q[0, h, i] * k[s, g, i]
        weights = softmax(scale(scores, 1 / math.sqrt(hd)))
        for i in range(0, full, LANES):
            lanes = zero_lanes(1)
            for s in range(S):
                lanes = multiply_add(load_lanes(v, (s, g, i)), weights[s], lanes)
            store_lanes(out, (0, h * hd + i), lanes)
        for i in range(full, hd):
            for s in range(S):
                out[0, h * hd + i] += weights[s] * v[s, g, i]
    return out


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


@njit
def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H * hd)
    T, H, hd = q.shape
    S, G = start + T, k.shape[1]
    if T == 1:
        return attend_alone(q, k[:S], v[:S])
    rows = (T + TILE - 1) // TILE * TILE
    keys = np.zeros(((S + LANES - 1) // LANES, hd, LANES), np.float32)  # sixteen positions side by side
    queries, out = np.zeros((rows, hd), np.float32), np.empty((rows, H * hd), np.float32)
    weights = np.zeros((TILE, len(keys) * LANES), np.float32)
    for h in range(H):
        g = h // (H // G)
        if h % (H // G) == 0:
            for s in range(S):
                for i in range(hd):
                    keys[s // LANES, i, s % LANES] = k[s, g, i]
        queries[:T] = q[:, h]
        for t in range(0, T, TILE):
            attend(zero_lanes(TILE), queries, keys, v[:, g], weights, out[:, h * hd : (h + 1) * hd], t, start, T)
    return out[:T]


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
