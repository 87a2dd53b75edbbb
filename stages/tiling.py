"""Tiling: the same loops, one cache-sized block at a time.

Idea    Use a piece of the weight matrix for every token before letting it go.
Was     naive walks a whole column for one output: K cache lines, each fetched for one float. By the time the next
        column wants its neighbour, a tall matrix has pushed the line out, and its pages out of the TLB too.
Change  matmul walks w in tiles of TILE x TILE. A tile's lines and pages stay at hand while all its columns, and all
        tokens, use them; partial sums wait in out.
Expect  Prefill gains where naive waited for loads, down to the chain of float additions at best, which is unchanged.
        So tall, wide matrices (many pages to a column) gain much; small ones, whose columns fit a cache, less.
"""

import math

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.jit import njit
from common.quants import dequantize_transposed
from common.stage import Model

PREVIOUS = "naive"
CHANGES = ("matmul",)

TILE = 64  # 64 rows of 64 floats = 16 KB, half of a common L1


def load(gguf, context, threads):
    """Unpack every tensor to float32, a matrix as (K, N). Nothing here needs context (tokens) or threads."""
    return Model(gguf.config, gguf.weights.map(dequantize_transposed))


@njit
def matmul(x, w):  # (T, K), (K, N) -> (T, N)
    T, K = x.shape
    N = w.shape[1]
    out = np.zeros((T, N), np.float32)
    for k0 in range(0, K, TILE):
        for n0 in range(0, N, TILE):
            for t in range(T):
                for n in range(n0, min(n0 + TILE, N)):
                    total = out[t, n]
                    for k in range(k0, min(k0 + TILE, K)):
                        total += x[t, k] * w[k, n]
                    out[t, n] = total
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
