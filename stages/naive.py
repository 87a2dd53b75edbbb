"""Naive: the formulas, one multiply-add at a time.

Idea    Write every op as its formula says and let it run. All other stages are measured against this one.
Was     Nothing: the ladder begins here.
Change  Every weight is unpacked to float32 at load, as (K, N), so that y = x @ w reads like the formula. The inner loop
        of matmul then steps down a column of w: one cache line fetched for every four bytes used. Nothing is kept
        between tokens: each new one computes the whole text again.
Expect  Prefill waits for whichever is slower on this machine and shape: the chain of float additions, each of which
        needs the one before, or the loads down a column. A new token costs as much as the whole text so far.
"""

import math

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.jit import njit
from common.quants import dequantize_transposed
from common.stage import Model

PREVIOUS = None
CHANGES = ()


def load(gguf, context, threads):
    """Unpack every tensor to float32, a matrix as (K, N). Nothing here needs context (tokens) or threads."""
    return Model(gguf.config, gguf.weights.map(dequantize_transposed))


@njit
def matmul(x, w):  # (T, K), (K, N) -> (T, N)
    T, K = x.shape
    N = w.shape[1]
    out = np.empty((T, N), np.float32)
    for t in range(T):
        for n in range(N):
            total = np.float32(0)
            for k in range(K):
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
