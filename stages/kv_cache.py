"""KV cache: a token is projected once.

Idea    A token's key and value never change once computed: later tokens only look back at them. So keep them.
Was     simd computes the whole text again for each new token: a step costs as much as a prefill of all before it.
Change  load allocates one arena for the whole context; forward writes the keys and values of its own tokens into their
        rows and attends over all rows so far. generate feeds the prompt once, then one token a step. The arena is
        (layer, key or value, position, kv head, hd): a token's row is one contiguous copy, what is seen so far is a
        prefix, and a page no position has reached takes no memory.
Expect  Prefill is unchanged. A new token costs one row instead of the whole text, but still reads every weight, so it
        falls to the time of reading them all from memory once: the longer the text, the larger the gain.
"""

import math

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.intrinsics import LANES, load_lanes, multiply_add, prefetch, store_lanes
from common.jit import njit
from common.quants import dequantize_transposed
from common.stage import Model, arena

PREVIOUS = "simd"
CHANGES = ("load", "forward", "generate")

TILE = 8  # rows, one register wide: 8 lines, which an 8-way L1 holds even where all fall into one set
AHEAD = 16384  # floats, 64 KB: as much as memory can have on its way at once, several times over


def load(gguf, context, threads):
    """Unpack every tensor to float32, a matrix as (K, N); make room for context tokens. Nothing here needs threads."""
    config = gguf.config
    cache = arena(config.L, 2, context, config.G, config.hd)
    return Model(config, gguf.weights.map(dequantize_transposed), cache)


@njit
def matmul(x, w):  # (T, K), (K, N) -> (T, N)
    T, K = x.shape
    N = w.shape[1]
    out = np.zeros((T, N), np.float32)
    whole_k, whole_n = K - K % TILE, N - N % LANES
    for k0 in range(0, whole_k, TILE):
        for n in range(0, whole_n, LANES):
            for k in range(k0, k0 + TILE):
                prefetch(w, (k, n + AHEAD))
            for t in range(T):
                total = load_lanes(out, (t, n))
                for k in range(k0, k0 + TILE):  # a constant count, so the compiler unrolls it
                    total = multiply_add(x[t, k], load_lanes(w, (k, n)), total)
                store_lanes(out, (t, n), total)
    for t in range(T):
        for n in range(N):
            for k in range(whole_k if n < whole_n else 0, K):  # what fills no tile or no register
                out[t, n] += x[t, k] * w[k, n]
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
    x = np.ascontiguousarray(weights.token_embd[:, ids].T)
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
