"""The same layer on int8 tensor cores: one instruction multiplies 16 rows, 8 tokens and 32 channels.

Idea    A tensor core multiplies tiles, so a weight that was loaded once meets all tokens of a tile; it does not care in
        which order channels are summed, so a thread loads bytes that lie together.
Was     outliers computes each output by itself: with many tokens dp4a binds, with one a launch to round x comes first.
Change  Few tokens: sixteen rows a block, whose warps share out the channels and ask for all their weights before
        anything else; up to ROUNDED tokens are rounded by each block meanwhile, which saves a launch. More tokens:
        tiles of weights and tokens in shared memory, copied ahead of use; there outliers are multiplied by the FP16
        tensor cores, into the same sums once these are floats. A GPU only.
Expect  With one token the time nears that of reading the bytes; with hundreds it is several times less than dp4a's, and
        beside FP16's cuBLAS what the tiles make of twice the rate.
"""

from typing import Any, NamedTuple

import numpy as np

from common.cuda import Program, processors
from stages.int8 import kept

PREVIOUS = "outliers"
CHANGES = (
    "WIDTH",
    "OPTIONS",
    "Layer",
    "quantize",
    "SOURCE",
    "SOURCE.round_rows",
    "SOURCE.round_tokens",
    "SOURCE.multiply",
    "SOURCE.few",
    "SOURCE.one_launch",
    "SOURCE.few_tokens",
    "SOURCE.pair",
    "SOURCE.many_tokens",
    "multiply",
    "on_gpu",
    "SOURCE.loudest",
    "SOURCE.rounded",
    "SOURCE.larger",
    "ROWS",
    "BATCH",
    "strips",
    "round_tokens",
    "panels",
    "multiply_one",
    "multiply_tiles",
)
ARCHS = ("sm_80", "sm_90")

WIDTH = 64  # bytes that a row on the GPU is a multiple of: a thread's four, of four threads, for two multiplications
SIGMAS = 3.0  # standard deviations above the mean, from which a channel is an outlier
THREADS = 256  # of a block on the GPU
ROUNDED = 4  # tokens up to which every block rounds x by itself
FEW = 16  # tokens up to which the warps of a block share out channels instead of tiles
AHEAD = 4  # steps of 64 channels a warp that are asked for at once: 2048 channels a block
RESIDENT = 3  # blocks of few tokens a processor: what registers a thread may then take
TILE = 128  # rows and tokens of a block with many
STAGES = 4  # tiles in the ring: three on their way while one is multiplied
SHARED = STAGES * 2 * TILE * 64  # bytes of the ring, in which the outputs fit at the end
OPTIONS = (
    f"-DTHREADS={THREADS}",
    f"-DFEW={FEW}",
    f"-DAHEAD={AHEAD}",
    f"-DRESIDENT={RESIDENT}",
    f"-DTILE={TILE}",
    f"-DSTAGES={STAGES}",
)


class Layer(NamedTuple):
    """A rounded layer."""

    N: int
    q: Any  # integers (N, width) int8
    steps: Any  # (N,) float32
    b: Any  # (N,) float16
    loud: Any  # (O,) int32: which channels are outliers
    columns: Any  # (N, O) float16: their weights


def quantize(w, b, seen):  # (N, K), (N,), (K,) -> Layer
    """Round each row to its own step, without its outliers; seen is the largest |x| of each channel in calibration."""
    w, loud = w.astype("float32"), outliers(seen)
    columns = w[:, loud].astype("float16", order="C")
    w[:, loud] = 0
    most = abs(w).max(1)
    steps = np.where(most > 0, most, 1).astype("float32") / 127
    return Layer(len(w), padded(np.rint(w / steps[:, None]).astype("int8"), 1, WIDTH), steps, b, loud, columns)


def outliers(seen):  # (K,) -> (O,)
    """The channels that are much louder than those of their layer are on the whole."""
    return np.flatnonzero(seen > seen.mean() + SIGMAS * seen.std()).astype("int32")


def padded(a, rows, columns):
    """a with zeros up to multiples of so many rows and columns."""
    return np.pad(a, ((0, -a.shape[0] % rows), (0, -a.shape[1] % columns)))


SOURCE = r"""
#include <cuda_fp16.h>
typedef signed char int8;
typedef long long int64;

// Bits of |v| of two halves as floats: larger where |v| is, and largest for NaN.
__device__ unsigned loudest(unsigned two, unsigned most) {
    const float2 v = __half22float2(*(const half2*)&two);
    return max(most, max(__float_as_uint(v.x) & 0x7FFFFFFF, __float_as_uint(v.y) & 0x7FFFFFFF));
}

__device__ unsigned rounded(unsigned two, float inverse) {  // two halves as two bytes
    const float2 v = __half22float2(*(const half2*)&two);
    return (__float2int_rn(v.x * inverse) & 255) | (__float2int_rn(v.y * inverse) & 255) << 8;
}

// All threads of a block round T tokens: outliers set aside, then each token's step, and its integers, zeros after the
// last. rows has room for x in shared memory, K is a multiple of 8; p, steps and aside may lie anywhere.
__device__ void round_rows(const half* x, const int* loud, half* rows, unsigned* most, int8* p, float* steps,
                           half* aside, int T, int K, int O, int width) {
    uint4* eights = (uint4*)rows;
    for (int i = threadIdx.x; i < T * (K / 8); i += THREADS) eights[i] = ((const uint4*)x)[i];
    if (threadIdx.x < T) most[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < T * O; i += THREADS) {
        half* at = rows + i / O * K + loud[i % O];
        aside[i] = *at;
        *at = 0;
    }
    __syncthreads();
    for (int t = 0; t < T; ++t) {
        unsigned bits = 0;
        for (int k = threadIdx.x; k < K / 8; k += THREADS) {
            const uint4 v = eights[t * (K / 8) + k];
            bits = loudest(v.x, loudest(v.y, loudest(v.z, loudest(v.w, bits))));
        }
        bits = __reduce_max_sync(~0u, bits);
        if (threadIdx.x % 32 == 0) atomicMax(most + t, bits);
    }
    __syncthreads();
    for (int t = 0; t < T; ++t) {
        const float top = __uint_as_float(most[t]), inverse = top > 0 ? 127 / top : 0;
        for (int k = threadIdx.x; k < width / 8; k += THREADS) {
            const uint4 v = k < K / 8 ? eights[t * (K / 8) + k] : uint4{};
            *(uint2*)(p + t * width + k * 8) = {rounded(v.x, inverse) | rounded(v.y, inverse) << 16,
                                                rounded(v.z, inverse) | rounded(v.w, inverse) << 16};
        }
        if (threadIdx.x == 0) steps[t] = top / 127;
    }
    __syncthreads();
}

// A token a block.
extern "C" __global__ void __launch_bounds__(THREADS)
round_tokens(const half* x, const int* loud, int8* p, float* steps, half* aside, int K, int O, int width) {
    extern __shared__ __align__(16) char shared[];
    __shared__ unsigned most;
    const int64 t = blockIdx.x;
    round_rows(x + t * K, loud, (half*)shared, &most, p + t * width, steps + t, aside + t * O, 1, K, O, width);
}

// 16 rows by 32 channels times 32 channels by 8 tokens. Which channels a thread's words stand for is the same on both
// sides, so any will do: its low, then its high ones.
__device__ void multiply(int* sum, unsigned low, unsigned low_below, unsigned high, unsigned high_below, uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(low), "r"(low_below), "r"(high), "r"(high_below), "r"(b.x), "r"(b.y));
}

__device__ void multiply(float* sum, const unsigned* a, uint2 b) {  // 16 rows, 16 channels, 8 tokens, in halves
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

struct Weights {  // what a thread holds of two rows, 8 apart: sixteen bytes of each of AHEAD steps
    uint4 row[AHEAD], below[AHEAD];

    __device__ void load(const int8* q, int row0, int first, int N, int width) {
        const int lane = threadIdx.x % 32;
        const int8* from = q + (int64)min(row0 + lane / 4, N - 1) * width + lane % 4 * 16;
        const int8* under = q + (int64)min(row0 + lane / 4 + 8, N - 1) * width + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int at = (first + i * (THREADS / 32)) * 64;
            row[i] = at < width ? *(const uint4*)(from + at) : uint4{};
            below[i] = at < width ? *(const uint4*)(under + at) : uint4{};
        }
    }
};

// T <= 8 TILES tokens: a block takes 16 rows after 16 rows, its warps share out the channels and add up at the end.
// Each warp's first weights are on their way before tokens are rounded, and the next rows' before these are added up.
template <int TILES, bool ROUND>
__device__ void few(const half* x, int8* p, float* x_steps, half* aside, const int8* q, const float* steps,
                    const half* b, const int* loud, const half* columns, half* out, int T, int N, int K, int width,
                    int O) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int part[THREADS / 32][16][8 * TILES + 1];
    __shared__ float extra[THREADS / 16][16], here_steps[8];
    __shared__ unsigned most[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, corner = lane % 4, tiles = (N + 15) / 16;
    const int parts = THREADS / 16 / T, group = threadIdx.x / 16;  // a group of 16 threads takes every parts-th outlier
    Weights w;
    w.load(q, blockIdx.x * 16, warp, N, width);
    if (ROUND) {
        p = (int8*)shared;
        x_steps = here_steps;
        aside = (half*)(shared + T * width);
        half* rows = (half*)(shared + T * width + (T * O * 2 + 15) / 16 * 16);
        round_rows(x, loud, rows, most, p, x_steps, aside, T, K, O, width);
    }
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int sum[TILES][4] = {};
        for (int first = warp; first < width / 64; first += AHEAD * (THREADS / 32)) {
            if (first != warp) w.load(q, tile * 16, first, N, width);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = (first + i * (THREADS / 32)) * 64;
                if (at >= width) break;
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const int token = t * 8 + lane / 4;
                    const uint4 v = token < T ? *(const uint4*)(p + token * width + at + corner * 16) : uint4{};
                    multiply(sum[t], w.row[i].x, w.below[i].x, w.row[i].y, w.below[i].y, {v.x, v.y});
                    multiply(sum[t], w.row[i].z, w.below[i].z, w.row[i].w, w.below[i].w, {v.z, v.w});
                }
            }
        }
        if (tile + gridDim.x < tiles) w.load(q, (tile + gridDim.x) * 16, warp, N, width);
        const int64 row = tile * 16 + threadIdx.x % 16;
        float value = 0;
        if (row < N && group / parts < T)
            for (int j = group % parts; j < O; j += parts)
                value += __half2float(aside[group / parts * O + j]) * __half2float(columns[row * O + j]);
        extra[group][threadIdx.x % 16] = value;
        for (int t = 0; t < TILES; ++t)
            for (int i = 0; i < 4; ++i) part[warp][lane / 4 + i / 2 * 8][t * 8 + corner * 2 + i % 2] = sum[t][i];
        __syncthreads();
        if (group < T && row < N) {  // the group is now a token
            int total = 0;
            for (int i = 0; i < THREADS / 32; ++i) total += part[i][threadIdx.x % 16][group];
            value = total * x_steps[group] * steps[row] + __half2float(b[row]);
            for (int i = 0; i < parts; ++i) value += extra[group * parts + i][threadIdx.x % 16];
            out[group * (int64)N + row] = __float2half(value);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
one_launch(const half* x, const int8* q, const float* steps, const half* b, const int* loud, const half* columns,
           half* out, int T, int N, int K, int width, int O) {
    few<1, true>(x, nullptr, nullptr, nullptr, q, steps, b, loud, columns, out, T, N, K, width, O);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
few_tokens(int8* p, float* x_steps, half* aside, const int8* q, const float* steps, const half* b, const half* columns,
           half* out, int T, int N, int width, int O) {
    few<FEW / 8, false>(nullptr, p, x_steps, aside, q, steps, b, nullptr, columns, out, T, N, 0, width, O);
}

__device__ unsigned pair(const half* row, int j, int O) {  // row[j] and the next, zeros beyond O
    const half2 two = __halves2half2(j < O ? row[j] : half(0), j + 1 < O ? row[j + 1] : half(0));
    return *(const unsigned*)&two;
}

// TILE rows and TILE tokens a block; a warp takes 32 rows and 64 tokens of them.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
many_tokens(const int8* p, const float* x_steps, const half* aside, const int8* q, const float* steps, const half* b,
            const half* columns, half* out, int T, int N, int width, int O) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, corner = lane % 4, tiles = (T + TILE - 1) / TILE;
    const int row0 = blockIdx.x / tiles * TILE, token0 = blockIdx.x % tiles * TILE;  // neighbours share their weights
    const int my_row = warp / 2 * 32, my_token = warp % 2 * 64;
    const int8* from[TILE * 8 / THREADS];  // 16 of 64 channels of a row or a token; those beyond the end are the last
    for (int i = 0; i < TILE * 8 / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, r = at / 4 % TILE;
        from[i] = at % 4 * 16 + (at < TILE * 4 ? q + (int64)min(row0 + r, N - 1) * width
                                               : p + (int64)min(token0 + r, T - 1) * width);
    }
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared) + threadIdx.x * 16;
    auto fetch = [&](int step) {
        if (step * 64 < width)
            for (int i = 0; i < TILE * 8 / THREADS; ++i)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             to + step % STAGES * TILE * 128 + i * THREADS * 16), "l"(from[i] + step * 64) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    int sum[2][8][4] = {};
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int step = 0; step < width / 64; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();  // this tile is there, and everyone has left the one that the next copies overwrite
        fetch(step + STAGES - 1);
        const uint4* rows = (const uint4*)(shared + step % STAGES * TILE * 128) + (my_row + lane / 4) * 4 + corner;
        const uint4* tokens = rows + (TILE - my_row + my_token) * 4;
        const uint4 a[4] = {rows[0], rows[8 * 4], rows[16 * 4], rows[24 * 4]};
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const uint4 v = tokens[t * 8 * 4];
            for (int m = 0; m < 2; ++m) {
                const uint4 &row = a[m * 2], &below = a[m * 2 + 1];
                multiply(sum[m][t], row.x, below.x, row.y, below.y, {v.x, v.y});
                multiply(sum[m][t], row.z, below.z, row.w, below.w, {v.z, v.w});
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // the ring is free: outputs pass through it, so that a warp stores a token's neighbours
    half* tile = (half*)shared;
    const int line = TILE + 8;
    float *token_steps = (float*)(tile + TILE * line), *row_steps = token_steps + TILE, *row_b = row_steps + TILE;
    if (threadIdx.x < TILE) {
        const int row = min(row0 + (int)threadIdx.x, N - 1);
        token_steps[threadIdx.x] = x_steps[min(token0 + (int)threadIdx.x, T - 1)];
        row_steps[threadIdx.x] = steps[row];
        row_b[threadIdx.x] = __half2float(b[row]);
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        float value[8][4];
        const int row = my_row + m * 16 + lane / 4;
        for (int t = 0; t < 8; ++t)
            for (int i = 0; i < 4; ++i) {
                const int at = row + i / 2 * 8;
                const float step = token_steps[my_token + t * 8 + corner * 2 + i % 2] * row_steps[at];
                value[t][i] = sum[m][t][i] * step + row_b[at];
            }
        for (int j = corner * 2; j - corner * 2 < O; j += 16) {
            unsigned a[4];
            for (int i = 0; i < 4; ++i)
                a[i] = pair(columns + (int64)min(row0 + row + i % 2 * 8, N - 1) * O, j + i / 2 * 8, O);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const half* token = aside + (int64)min(token0 + my_token + t * 8 + lane / 4, T - 1) * O;
                multiply(value[t], a, {pair(token, j, O), pair(token, j + 8, O)});
            }
        }
        for (int t = 0; t < 8; ++t)
            for (int i = 0; i < 4; ++i)
                tile[(my_token + t * 8 + corner * 2 + i % 2) * line + row + i / 2 * 8] = __float2half(value[t][i]);
    }
    __syncthreads();
    if (N % 8 == 0) {
        for (int i = threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
            const int token = token0 + i / (TILE / 8), row = row0 + i % (TILE / 8) * 8;
            if (token < T && row < N)
                *(uint4*)(out + (int64)token * N + row) = *(const uint4*)(tile + i / (TILE / 8) * line + row - row0);
        }
    } else {
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            const int token = token0 + i / TILE, row = row0 + i % TILE;
            if (token < T && row < N) out[(int64)token * N + row] = tile[i / TILE * line + i % TILE];
        }
    }
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def multiply(x, layer):  # (T, K) -> (T, N)
    """x times a rounded layer's weights, plus its b, in float16. Raises NotImplementedError for an array of the CPU."""
    if isinstance(x, np.ndarray):
        raise NotImplementedError("the CPU has no tensor cores that numba reaches")
    return on_gpu(x, layer)


def on_gpu(x, layer):
    import cupy

    T, (N, q, steps, b, loud, columns) = len(x), layer
    x = cupy.ascontiguousarray(padded(x, 1, 8) if x.shape[1] % 8 else x)  # rows that start on a vector's boundary
    K, width, O = x.shape[1], q.shape[1], len(loud)
    out, sizes = cupy.empty((T, N), "float16"), tuple(map(np.int32, (T, N, width, O)))
    blocks = min(-(-N // 16), RESIDENT * processors())
    if T <= ROUNDED:
        operands, shared = (x, q, steps, b, loud, columns, out), T * (width + 2 * K) + -(-2 * T * O // 16) * 16
        PROGRAM.launch("one_launch", blocks, THREADS, (*operands, *sizes[:2], np.int32(K), *sizes[2:]), shared)
        return out
    p, x_steps, aside = cupy.empty((T, width), "int8"), cupy.empty(T, "float32"), cupy.empty((T, O), "float16")
    PROGRAM.launch("round_tokens", T, THREADS, (x, loud, p, x_steps, aside, np.int32(K), sizes[3], sizes[2]), 2 * K)
    operands = p, x_steps, aside, q, steps, b, columns, out
    if T <= FEW:
        PROGRAM.launch("few_tokens", blocks, THREADS, (*operands, *sizes))
    else:
        PROGRAM.launch("many_tokens", -(-N // TILE) * -(-T // TILE), THREADS, (*operands, *sizes), SHARED)
    return out


def linear(x, w, b, seen):
    """The layer as the ladder times it: weights are rounded once."""
    return multiply(x, kept(quantize, w, b, seen))
