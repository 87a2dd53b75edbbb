"""SIMD: the same loops, sixteen columns at a time.

Idea    One instruction multiplies and adds as many pairs as a vector register holds.
Was     tiling adds one product at a time to a sum, and each addition waits for the one before: all but one lane of the
        vector units idle, and that one most of the time.
Change  matmul spreads one activation over a register and multiply-adds sixteen columns of w, which lie side by side in
        memory. A tile of w is one register wide; all tokens use it while it is in L1. No sum waits for another token's,
        so the CPU overlaps them. Each tile asks for the rows of w that come some time after it.
Expect  Prefill gains by the lanes and by the overlap, until loading a register of w for each multiply-add binds: many
        times over, and more where more tokens share a tile. A lone token uses each weight once: memory binds.
"""

import math

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.intrinsics import LANES, load_lanes, multiply_add, prefetch, store_lanes
from common.jit import njit
from common.quants import dequantize_transposed
from common.stage import Model

PREVIOUS = "tiling"
CHANGES = ("TILE", "matmul")

TILE = 8  # rows, one register wide: 8 lines, which an 8-way L1 holds even where all fall into one set
AHEAD = 16384  # floats, 64 KB: as much as memory can have on its way at once, several times over


def load(gguf, context, threads):
    """Unpack every tensor to float32, a matrix as (K, N). Nothing here needs context (tokens) or threads."""
    return Model(gguf.config, gguf.weights.map(dequantize_transposed))


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
    x = np.ascontiguousarray(weights.token_embd[:, ids].T)
    for layer in weights.layers:
        h = rms_norm(x, layer.attn_norm, config.eps)
        q = rope(matmul(h, layer.w_q).reshape(T, H, hd), config.rope_freqs, start)
        k = rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, start)
        v = matmul(h, layer.w_v).reshape(T, G, hd)
        x = add(x, matmul(attention(q, k, v, start), layer.w_o))
        h = rms_norm(x, layer.ffn_norm, config.eps)
        gate, up = silu(matmul(h, layer.w_gate)), matmul(h, layer.w_up)
        x = add(x, matmul(mul(gate, up), layer.w_down))
    return rms_norm(x, weights.output_norm, config.eps)


def logits(model, hidden):  # (T, D) -> (T, V)
    return matmul(hidden, model.weights.output)


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id."""
    ids = list(ids)
    for _ in range(n):
        hidden = forward(model, ids, 0)
        row = logits(model, hidden[-1:])[0]
        ids.append(choose(row))
        yield ids[-1], row
