"""Quantized: weights stay in the file's blocks, and are unpacked where they are used.

Idea    Where each weight is used once, memory is the limit: read the few bits the file holds, not four bytes.
Was     kv_cache unpacks every weight to float32 at load. That takes several times the file's size of memory, all of it
        read again for each new token.
Change  A weight is the file's own bytes in the memory map, rows (N, K). matmul unpacks one block into a scratch that
        never leaves L1, and uses it at once for all tokens. Lanes now run along a row and are added up at its end.
Expect  Load only touches the file, and memory falls to about its size. A new token reads fewer bytes, by 32 bits over
        the file's bits a weight, but spends instructions on unpacking: it gains until those bind, most where blocks are
        long. The more tokens share a read, the less its bytes matter, and each multiply-add now loads both its
        operands: a few tokens about break even, many lose.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.intrinsics import LANES, load_lanes, multiply_add, store_lanes, total
from common.jit import njit
from common.quants import dequantize, unpack
from common.stage import Model, arena

PREVIOUS = "kv_cache"
CHANGES = ("load", "matmul", "forward")

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
    N, K, kind, length, size, raw = w  # raw by a name of its own: as w.raw it would be reference-counted at each block
    T, blocks, whole = x.shape[0], K // length, length - length % LANES
    out, sums = np.empty((T, N), np.float32), np.empty((T, LANES), np.float32)
    block = np.empty(length, np.float32)
    for n in range(N):
        sums[:] = 0
        for b in range(blocks):
            unpack(kind, raw, (n * blocks + b) * size, block)
            for t in range(T):
                lanes = load_lanes(sums, (t, 0))
                for i in range(0, whole, LANES):
                    lanes = multiply_add(load_lanes(x, (t, b * length + i)), load_lanes(block, i), lanes)
                store_lanes(sums, (t, 0), lanes)
                for i in range(whole, length):  # the row of a float type may not fill its last register
                    sums[t, 0] += x[t, i] * block[i]
        for t in range(T):
            out[t, n] = total(load_lanes(sums, (t, 0)))
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
