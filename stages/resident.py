"""Resident: no row comes from the host, and no memory is asked for twice.

Idea    Whatever a step needs from the host's hands or from the driver, have it ready beforehand.
Was     cuda unpacks embedding rows on the host and copies each; and it allocates and frees the output of every op, each
        free waiting until the GPU is idle.
Change  The embedding is on the GPU too, in its blocks, and a kernel unpacks the rows of the ids. Outputs come from
        CuPy's pool, which hands out again what was given back, so the host runs ahead of the GPU.
Expect  Read the profile by kernels, not by API calls: a free that takes long is mostly the wait for kernels, which
        remains. So prefill, where kernels dominate, gains next to nothing. Decoding gains what the calls themselves
        cost, and the overlap of queueing and computing; then it takes the longer of the two.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import argmax
from common.cuda import Program
from common.cuda_unpack import UNPACK
from common.gpu import MOST_HEAD, cache_bytes, ready, weight_bytes
from common.quants import dequantize
from common.stage import Model

PREVIOUS = "cuda"
CHANGES = ("load", "embed", "forward", "SOURCE.embed")
FUSED = {"dot": "attention", "scale": "attention", "softmax": "attention"}
ARCHS = ("sm_50", "sm_75", "sm_80", "sm_90")

THREADS = 128  # four warps: a row's tiles are few, and more threads would idle at its end
TILE = 8 * THREADS  # weights in shared memory: eight a thread, as many as one unpacks at a time
WARPS = THREADS // 32
SLOTS = MOST_HEAD // 32  # of a head's values in each lane's registers
OPTIONS = (f"-DTHREADS={THREADS}", f"-DTILE={TILE}", f"-DWARPS={WARPS}", f"-DSLOTS={SLOTS}", f"-DMOST_HEAD={MOST_HEAD}")

SOURCE = (
    UNPACK
    + r"""
extern "C" __global__ void embed(const int64* ids, const uint8* w, float* out, int D, int kind, int64 row_bytes) {
    // (T,), (V, D) -> (T, D), a thread block for each token
    const uint8* row = w + ids[blockIdx.x] * row_bytes;
    for (int d = 8 * threadIdx.x; d < D; d += TILE) unpack_eight(kind, row, d, D, out + (int64)blockIdx.x * D + d);
}

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

extern "C" __global__ void add(const float* a, const float* b, float* out, int64 size) {
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i < size) out[i] = a[i] + b[i];
}

extern "C" __global__ void mul(const float* a, const float* b, float* out, int64 size) {
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i < size) out[i] = a[i] * b[i];
}

extern "C" __global__ void silu(const float* x, float* out, int64 size) {
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i < size) out[i] = x[i] / (1 + expf(-x[i]));
}

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float* x, const float* weight, float* out, int D, float eps) {
    // (T, D), (D,) -> (T, D), a thread block for each row
    const int64 row = (int64)blockIdx.x * D;
    float sum = 0;
    for (int d = threadIdx.x; d < D; d += THREADS) sum += x[row + d] * x[row + d];
    const float inverse = rsqrtf(total(sum) / D + eps);
    for (int d = threadIdx.x; d < D; d += THREADS) out[row + d] = x[row + d] * inverse * weight[d];
}

extern "C" __global__ void
rope(const float* x, const double* freqs, const int64* start, float* out, int heads, int hd, int turned, int64 pairs) {
    // (T, heads, hd), (turned,) -> (T, heads, hd), a thread for each pair
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= pairs) return;
    const int pair = i % (hd / 2);
    const int64 t = i / (hd / 2) / heads;
    float sin = 0, cos = 1;
    if (pair < turned) {
        const double half_turns = (start[0] + t) * freqs[pair] * 0.31830988618379067;  // radians over pi
        sincospif((float)(half_turns - 2 * rint(half_turns / 2)), &sin, &cos);  // whole turns off before rounding
    }
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos - b * sin;
    out[2 * i + 1] = a * sin + b * cos;
}

extern "C" __global__ void append(float* cache, const float* x, const int64* start, int width, int64 size) {
    // (context, width) and (T, width): x becomes the rows from start on
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i < size) cache[start[0] * width + i] = x[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention(const float* q, const float* k, const float* v, const int64* start, float* out, int H, int G, int hd) {
    // (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H, hd), a thread block for each head of each token
    __shared__ float sums[WARPS][MOST_HEAD], mosts[WARPS], totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = blockIdx.x % H / (H / G);
    const int64 at = (int64)blockIdx.x * hd, S = start[0] + blockIdx.x / H + 1;  // itself and all before it
    float query[SLOTS], sum[SLOTS] = {}, most = -1e38f, total = 0;
    for (int i = 0, d = lane; i < SLOTS; ++i, d += 32) query[i] = d < hd ? q[at + d] * rsqrtf(hd) : 0;
    for (int64 s = warp; s < S; s += WARPS) {  // each warp sees every WARPS-th position
        const float *key = k + (s * G + g) * hd, *value = v + (s * G + g) * hd;
        float score = 0;
        for (int i = 0, d = lane; i < SLOTS; ++i, d += 32) if (d < hd) score += query[i] * key[d];
        for (int step = 16; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        const float higher = fmaxf(most, score), weight = expf(score - higher), keep = expf(most - higher);
        for (int i = 0, d = lane; i < SLOTS; ++i, d += 32) if (d < hd) sum[i] = sum[i] * keep + weight * value[d];
        total = total * keep + weight, most = higher;  // what was summed under a lower maximum shrinks
    }
    for (int i = 0, d = lane; i < SLOTS; ++i, d += 32) if (d < hd) sums[warp][d] = sum[i];
    mosts[warp] = most, totals[warp] = total;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, mosts[w]);
    total = 0;
    for (int w = 0; w < WARPS; ++w) total += totals[w] * expf(mosts[w] - most);
    for (int d = threadIdx.x; d < hd; d += THREADS) {
        float mixed = 0;
        for (int w = 0; w < WARPS; ++w) mixed += sums[w][d] * expf(mosts[w] - most);
        out[at + d] = mixed / total;
    }
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
    """Copy every matrix and vector to the GPU; make room there for context tokens. Nothing here needs threads.

    Raises StageError where there is no GPU to work on or too little room on it, GGUFError for a type without a kernel.
    """
    cupy = ready(gguf, weight_bytes(gguf) + cache_bytes(gguf, context))

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return cupy.asarray(dequantize(tensor))
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, cupy.asarray(tensor.raw))

    config = replace(gguf.config, rope_freqs=cupy.asarray(gguf.config.rope_freqs))
    cache = cupy.empty((config.L, 2, context, config.G, config.hd), np.float32)
    return Model(config, gguf.weights.map(blocks), cache)


def embed(ids, w):  # (T,), (V, D) -> (T, D)
    import cupy

    V, D, kind, length, size, raw = w
    out = cupy.empty((len(ids), D), np.float32)
    sizes = (*map(np.int32, (D, kind)), np.int64(D // length * size))
    PROGRAM.launch("embed", len(ids), THREADS, (ids, raw, out, *sizes))
    return out


def matmul(x, w):  # (T, K), (N, K) -> (T, N)
    import cupy

    N, K, kind, length, size, raw = w
    T = len(x)
    out = cupy.empty((T, N), np.float32)
    sizes = (*map(np.int32, (T, N, K, kind)), np.int64(K // length * size))
    PROGRAM.launch("matmul", T * N, THREADS, (x, raw, out, *sizes))
    return out


def elementwise(kernel, *arrays):
    """Run a kernel over arrays of one shape, a thread for each element, into a new one."""
    import cupy

    out = cupy.empty(arrays[0].shape, np.float32)
    PROGRAM.launch(kernel, -(-out.size // THREADS), THREADS, (*arrays, out, np.int64(out.size)))
    return out


def add(a, b):  # (T, D), (T, D) -> (T, D)
    return elementwise("add", a, b)


def mul(a, b):  # (T, F), (T, F) -> (T, F)
    return elementwise("mul", a, b)


def silu(x):  # (T, F) -> (T, F)
    return elementwise("silu", x)


def rms_norm(x, weight, eps):  # (T, D), (D,), () -> (T, D)
    import cupy

    T, D = x.shape
    out = cupy.empty((T, D), np.float32)
    PROGRAM.launch("rms_norm", T, THREADS, (x, weight, out, np.int32(D), np.float32(eps)))
    return out


def rope(x, freqs, start):  # (T, heads, hd), (hd/2,), (1,) -> (T, heads, hd)
    import cupy

    T, heads, hd = x.shape
    out, pairs = cupy.empty((T, heads, hd), np.float32), x.size // 2
    sizes = (*map(np.int32, (heads, hd, len(freqs))), np.int64(pairs))
    PROGRAM.launch("rope", -(-pairs // THREADS), THREADS, (x, freqs, start, out, *sizes))
    return out


def append(cache, x, start):  # (context, G, hd), (T, G, hd), (1,): rows of the cache from start on become x
    width, size = np.int32(x.shape[1] * x.shape[2]), np.int64(x.size)
    PROGRAM.launch("append", -(-x.size // THREADS), THREADS, (cache, x, start, width, size))


def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd), (1,) -> (T, H * hd)
    import cupy

    T, H, hd = q.shape
    out = cupy.empty((T, H * hd), np.float32)
    PROGRAM.launch("attention", T * H, THREADS, (q, k, v, start, out, *map(np.int32, (H, k.shape[1], hd))))
    return out


def forward(model, ids, start):  # (T,) -> (T, D)
    import cupy

    config, weights = model.config, model.weights
    T, H, G, hd = len(ids), config.H, config.G, config.hd
    if start + T > model.cache.shape[2]:
        raise ValueError(f"{start + T} tokens do not fit a context of {model.cache.shape[2]}")
    at = cupy.array([start], np.int64)
    x = embed(cupy.array(ids, np.int64), weights.token_embd)
    for layer, (keys, values) in zip(weights.layers, model.cache, strict=True):
        h = rms_norm(x, layer.attn_norm, config.eps)
        q = rope(matmul(h, layer.w_q).reshape(T, H, hd), config.rope_freqs, at)
        append(keys, rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, at), at)
        append(values, matmul(h, layer.w_v).reshape(T, G, hd), at)
        x = add(x, matmul(attention(q, keys, values, at), layer.w_o))
        h = rms_norm(x, layer.ffn_norm, config.eps)
        gate, up = silu(matmul(h, layer.w_gate)), matmul(h, layer.w_up)
        x = add(x, matmul(mul(gate, up), layer.w_down))
    return rms_norm(x, weights.output_norm, config.eps)


def logits(model, hidden):  # (T, D) -> (T, V), here
    return matmul(hidden, model.weights.output).get()


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id."""
    start, new = 0, list(ids)
    for _ in range(n):
        hidden = forward(model, new, start)
        row = logits(model, hidden[-1:])[0]
        start, new = start + len(new), [choose(row)]
        yield new[0], row
