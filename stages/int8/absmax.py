"""A linear layer in int8: a step for each row of weights, a step for each token.

Idea    A number is an integer of -127 to 127 times a step, the largest of its row / 127. Steps can be taken out of
        the sum, so the sum is of products of integers, exact in 32 bits.
Was     float reads two or four bytes a weight, and multiplies in floating point.
Change  w is rounded once, a step for each row; x at each call, a step for each token. Four products at a time are
        multiplied and summed by one instruction (CPU: VNNI, else AVX2, else one by one; GPU: dp4a). The sum times both
        steps, plus b, is the output.
Expect  A lone token reads a quarter of FP32's bytes or half of FP16's, and takes that much less time. The error is that
        of rounding to half a step: one loud channel makes a token's step large, and with it the error of all others.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from common.cuda import Program
from common.intrinsics import (
    LANES,
    QUAD,
    TOKENS,
    dots_of_panel,
    highest,
    larger,
    load_lanes,
    nearest,
    no_sums,
    of_tile,
    store_quads,
    store_tokens,
    sum_of,
    sums_as_floats,
    zero_lanes,
)
from common.jit import njit
from stages.int8 import kept

PREVIOUS = "float"
CHANGES = ("quantize", "multiply", "linear", "SOURCE.larger", "SOURCE.round_tokens", "SOURCE.multiply")
ARCHS = ("sm_75", "sm_80", "sm_90")

kernel = partial(njit, _nrt=False, forceinline=True)

AT_ONCE = 16  # weights of each of sixteen rows that the CPU multiplies at a time
WIDTH = 64  # bytes that a row on the GPU is a multiple of
THREADS = 256  # of a block on the GPU
ROWS = 4  # rows of w a warp
BATCH = 8  # tokens a warp: 32 sums a thread
OPTIONS = (f"-DTHREADS={THREADS}", f"-DROWS={ROWS}", f"-DBATCH={BATCH}")


class Layer(NamedTuple):
    """A rounded layer."""

    N: int
    q: Any  # integers: on the GPU (N, width) int8, on the CPU (N / 16, K, 16) as uint8, raised by 128
    steps: Any  # (N,) float32, on the CPU up to a multiple of 16
    b: Any  # likewise


def quantize(w, b, seen):  # (N, K), (N,), (K,) -> Layer
    """Round each row to its own step; seen, the largest |x| of each channel in calibration, is not needed."""
    w = w.astype("float32")
    most = abs(w).max(1)
    steps = np.where(most > 0, most, 1).astype("float32") / 127
    q = np.rint(w / steps[:, None]).astype("int8")
    if not isinstance(w, np.ndarray):
        return Layer(len(q), padded(q, 1, WIDTH), steps, b)
    rest = -len(w) % LANES
    return Layer(len(q), strips(q), np.pad(steps, (0, rest)), np.pad(b.astype("float32"), (0, rest)))


def padded(a, rows, columns):
    """a with zeros up to multiples of so many rows and columns."""
    return np.pad(a, ((0, -a.shape[0] % rows), (0, -a.shape[1] % columns)))


def strips(q):  # (N, K) -> (N / 16, K, 16): four weights of each of sixteen rows in turn, raised by 128
    raised = padded(q, LANES, AT_ONCE).view(np.uint8) ^ 128
    N, K = raised.shape
    return np.ascontiguousarray(raised.reshape(N // LANES, LANES, K // QUAD, QUAD).swapaxes(1, 2)).reshape(-1, K, LANES)


@njit
def round_tokens(x, width, tokens):  # (T, K) -> (tiles, width / 4, tokens, 4), steps and sums (tiles, tokens)
    T, K = x.shape
    tiles = (T + tokens - 1) // tokens
    p = np.zeros((tiles, width // QUAD, tokens, QUAD), np.int8)
    steps, sums = np.zeros((tiles, tokens), np.float32), np.zeros((tiles, tokens), np.int32)
    row = np.zeros(width, np.float32)
    for t in range(T):
        row[:K] = x[t]
        most = zero_lanes(1)
        for k in range(0, width, LANES):
            most = larger(most, larger(load_lanes(row, k), load_lanes(row, k) * -1))
        top = highest(most)
        inverse = np.float32(127) / top if top > 0 else np.float32(0)
        total = no_sums(most)
        for k in range(0, width, LANES):
            integers = nearest(load_lanes(row, k) * inverse)
            store_quads(p, (t // tokens, k // QUAD, t % tokens, 0), integers)
            total = total + integers
        steps[t // tokens, t % tokens] = top / np.float32(127)
        sums[t // tokens, t % tokens] = sum_of(total)
    return p, steps, sums


@kernel
def panels(p, x_steps, x_sums, q, steps, b, out, lanes):  # out (T, N), `lanes` for sixteen rows and a tile's tokens
    tokens = p.shape[2]
    for strip in range(len(q)):
        n = strip * LANES
        for tile in range(len(p)):
            sums = of_tile(lanes, x_sums, (tile, 0)) * np.int32(-128)  # what raising the weights adds
            for k in range(0, q.shape[1], AT_ONCE):
                sums = dots_of_panel(sums, q[strip], k, AT_ONCE, p, (tile, k // QUAD), 255)
            values = sums_as_floats(sums) * of_tile(lanes, x_steps, (tile, 0)) * load_lanes(steps, n)
            store_tokens(out, (tile * tokens, n), values + load_lanes(b, n))


@njit
def multiply_one(x, q, steps, b):  # (1, K) -> (1, N)
    p, x_steps, x_sums = round_tokens(x, q.shape[1], 1)
    out = np.empty((1, len(q) * LANES), np.float32)
    panels(p, x_steps, x_sums, q, steps, b, out, zero_lanes(1))
    return out


@njit
def multiply_tiles(x, q, steps, b):  # (T, K) -> (T, N), both up to whole tiles
    p, x_steps, x_sums = round_tokens(x, q.shape[1], TOKENS)
    out = np.empty((len(p) * TOKENS, len(q) * LANES), np.float32)
    panels(p, x_steps, x_sums, q, steps, b, out, zero_lanes(TOKENS))
    return out


SOURCE = r"""
#include <cuda_fp16.h>
typedef signed char int8;
typedef long long int64;

__device__ float larger(float a, float b) { return a > b || a != a ? a : b; }  // NaN if one is NaN

// A token a block: the largest of it, and its integers, zeros after the last.
extern "C" __global__ void __launch_bounds__(THREADS)
round_tokens(const half* x, int8* p, float* steps, int K, int width) {  // (T, K) -> (T, width), (T,)
    const half* row = x + (int64)blockIdx.x * K;
    __shared__ float part[THREADS / 32];
    float most = 0;
    for (int k = threadIdx.x; k < K; k += THREADS) most = larger(most, fabsf(__half2float(row[k])));
    for (int step = 16; step; step /= 2) most = larger(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; ++i) most = larger(most, part[i]);
    const float inverse = most > 0 ? 127 / most : 0;
    for (int k = threadIdx.x; k < width; k += THREADS)
        p[(int64)blockIdx.x * width + k] = k < K ? __float2int_rn(__half2float(row[k]) * inverse) : 0;
    if (threadIdx.x == 0) steps[blockIdx.x] = most / 127;
}

// A warp takes ROWS rows of q and BATCH tokens; a lane sixteen bytes of each row at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
multiply(const int8* p, const float* x_steps, const int8* q, const float* steps, const half* b, half* out,
         int T, int N, int width) {  // (T, width), (N, width) -> (T, N)
    const int64 i = (int64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, tiles = (N + ROWS - 1) / ROWS;
    const int row0 = i % tiles * ROWS;  // rows past the end read the last, and are not stored
    const int64 token0 = i / tiles * BATCH;
    if (token0 >= T) return;
    int sum[ROWS][BATCH] = {};
    for (int k = lane * 16; k < width; k += 512) {
        int4 weights[ROWS];
        for (int r = 0; r < ROWS; ++r) weights[r] = *(const int4*)(q + (int64)min(row0 + r, N - 1) * width + k);
#pragma unroll
        for (int t = 0; t < BATCH; ++t) {
            if (token0 + t >= T) break;
            const int4 v = *(const int4*)(p + (token0 + t) * width + k);
            for (int r = 0; r < ROWS; ++r) {
                sum[r][t] = __dp4a(weights[r].x, v.x, sum[r][t]);
                sum[r][t] = __dp4a(weights[r].y, v.y, sum[r][t]);
                sum[r][t] = __dp4a(weights[r].z, v.z, sum[r][t]);
                sum[r][t] = __dp4a(weights[r].w, v.w, sum[r][t]);
            }
        }
    }
    int mine = 0;  // a lane keeps the output that is its own
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < BATCH; ++t) {
            for (int step = 16; step; step /= 2) sum[r][t] += __shfl_xor_sync(~0u, sum[r][t], step);
            if (lane == r * BATCH + t) mine = sum[r][t];
        }
    const int row = row0 + lane / BATCH;
    const int64 token = token0 + lane % BATCH;
    if (row >= N || token >= T) return;
    out[token * N + row] = __float2half(mine * x_steps[token] * steps[row] + __half2float(b[row]));
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def multiply(x, layer):  # (T, K) -> (T, N)
    """x times a rounded layer's weights, plus its b: on the CPU float32, on the GPU float16."""
    if not isinstance(x, np.ndarray):
        return on_gpu(x, layer)
    out = multiply_one(x, *layer[1:]) if len(x) == 1 else multiply_tiles(x, *layer[1:])
    return np.ascontiguousarray(out[: len(x), : layer.N])


def on_gpu(x, layer):
    import cupy

    (T, K), (N, q, steps, b) = x.shape, layer
    width = q.shape[1]
    p, x_steps, out = cupy.empty((T, width), "int8"), cupy.empty(T, "float32"), cupy.empty((T, N), "float16")
    sizes = tuple(map(np.int32, (T, N, width)))
    PROGRAM.launch("round_tokens", T, THREADS, (cupy.ascontiguousarray(x), p, x_steps, np.int32(K), sizes[2]))
    warps = -(-T // BATCH) * -(-N // ROWS)
    PROGRAM.launch("multiply", -(-warps // (THREADS // 32)), THREADS, (p, x_steps, q, steps, b, out, *sizes))
    return out


def linear(x, w, b, seen):
    """The layer as the ladder times it: weights are rounded once."""
    return multiply(x, kept(quantize, w, b, seen))
