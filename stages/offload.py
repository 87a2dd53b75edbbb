"""Offload: the weights on the GPU, and each matmul a journey there and back.

Idea    A GPU has more bandwidth and more arithmetic than the CPU, and matmul is nearly all of the time: so put matmul
        there, and change nothing else.
Was     quantized unpacks each block on the CPU, once for all tokens of a call.
Change  load copies every matrix to the GPU as its blocks. matmul copies x there, runs one kernel, and copies y back. A
        thread block makes one output: it unpacks a tile of a row into shared memory and multiplies it at once.
Expect  The kernel itself gains the ratio of the two machines. But each call now pays two copies over the bus, a launch
        and a wait, whatever its size: a new token costs the number of matmuls times that. Long prompts are left to
        the CPU's attention.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, dot, mul, rms_norm, rope, scale, silu, softmax
from common.cuda import Program
from common.cuda_unpack import UNPACK
from common.gpu import ready, weight_bytes
from common.jit import njit
from common.quants import dequantize, unpack
from common.stage import Model

PREVIOUS = "quantized"
CHANGES = ("Blocks", "load", "matmul", "SOURCE.total", "SOURCE.matmul")
ARCHS = ("sm_50", "sm_75", "sm_80", "sm_90")

PAGE = 4096  # bytes; where pages are larger, some are touched more than once
THREADS = 128  # four warps: a row's tiles are few, and more threads would idle at its end
TILE = 8 * THREADS  # weights in shared memory: eight a thread, as many as one unpacks at a time
OPTIONS = (f"-DTHREADS={THREADS}", f"-DTILE={TILE}")

SOURCE = (
    UNPACK
    + r"""
// The sum of a value over the threads of a block, for each of them.
__device__ float total(float value) {
    __shared__ float sums[THREADS / 32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) value += sums[warp];
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float* x, const uint8* w, float* out, int T, int N, int K, int kind, int64 row_bytes) {
    // (T, K), (N, K) -> (T, N), a thread block for each output
    __shared__ __align__(16) float weights[TILE];
    const int64 t = blockIdx.x % T, n = blockIdx.x / T;  // tokens side by side, so that their row comes from L2
    const uint8* row = w + n * row_bytes;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int k = k0 + 8 * threadIdx.x;
        if (k < K) unpack_eight(kind, row, k, K, weights + 8 * threadIdx.x);
        __syncthreads();
        const int count = min(TILE, K - k0);
        for (int i = threadIdx.x; i < count; i += THREADS) sum += x[t * K + k0 + i] * weights[i];
        __syncthreads();  // before the next tile overwrites this one
    }
    sum = total(sum);
    if (threadIdx.x == 0) out[t * N + n] = sum;
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


class Blocks(NamedTuple):
    """A matrix as the file holds it: N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block; a row of a float type is one block
    size: int  # bytes a block
    raw: Any  # (bytes,) uint8, in the map or on the GPU


def load(gguf, context, threads):
    """Copy every matrix to the GPU; make room here for context tokens. Nothing here needs threads.

    Raises StageError where there is no GPU to work on or too little room on it, GGUFError for a type without a kernel.
    """
    cupy = ready(gguf, weight_bytes(gguf))

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return dequantize(tensor)
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        tensor.raw[::PAGE].max()  # reads a byte of each page, so that the clock sees no page fault
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, tensor.raw)

    def upload(w):
        return w._replace(raw=cupy.asarray(w.raw)) if isinstance(w, Blocks) else w

    config = gguf.config
    cache = np.empty((config.L, 2, context, config.G, config.hd), np.float32)
    weights = gguf.weights.map(blocks)  # of which the embedding stays: its rows are unpacked here
    layers = tuple(layer._make(map(upload, layer)) for layer in weights.layers)
    return Model(config, weights._replace(layers=layers, output=upload(weights.output)), cache)


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
    import cupy

    N, K, kind, length, size, raw = w
    T = len(x)
    out = cupy.empty((T, N), np.float32)
    sizes = (*map(np.int32, (T, N, K, kind)), np.int64(K // length * size))
    PROGRAM.launch("matmul", T * N, THREADS, (cupy.asarray(x), raw, out, *sizes))
    return out.get()


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
