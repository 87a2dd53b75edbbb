"""Graph: a step captured once and launched as a whole.

Idea    What the host does for a token is always the same: so let the GPU's own front end do it.
Was     A token took two hundred launches, each longer for the host than its kernel for the GPU; and its matmuls used
        one of the 64 columns they computed.
Change  A step is captured once into a CUDA graph: position and token are read from the GPU's memory, and the next token
        is chosen there, so that the next step can be queued before the host has seen this one's logits. Kernels for
        one token: norm, SwiGLU and residual live inside, attention is split by position, and a kernel's blocks may come
        before the one before has ended: they ask for their weights, and then wait for its results. A prompt's
        launches are captured too, by length.
Expect  A token no longer costs the host's launches, but the time to read the weights and, five times a layer, what
        cannot overlap: the last block of a kernel ends, and all of the next take its results from the L2 cache. A short
        prompt, which was bound by launches too, gains as much; a long one nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import argmax
from common.cuda import Program, processors
from common.cuda_tiles import TILES, Tiles, deep, pack, pack_pairs, tile_bytes
from common.gguf import GGUFError
from common.gpu import cache_bytes, ready
from common.model import Weights
from common.quants import dequantize
from common.stage import Model

PREVIOUS = "prefill"
CHANGES = (
    "KEPT", "PLAN", "WARPS", "ROOM", "SPLITS", "CHUNK", "OPTIONS", "SOURCE", "SOURCE.wait_for_last",
    "SOURCE.let_next_come", "SOURCE.floats", "SOURCE.bare", "SOURCE.multiply_tile", "SOURCE.multiply_tiles",
    "SOURCE.dots", "SOURCE.four", "SOURCE.rank", "SOURCE.best", "SOURCE.begin", "SOURCE.project_in", "SOURCE.splits",
    "SOURCE.turned_value", "SOURCE.look", "SOURCE.look_64", "SOURCE.look_128", "SOURCE.project_out", "SOURCE.gate_up",
    "SOURCE.down", "SOURCE.vocabulary", "State", "load", "captured", "prompt", "one", "step", "follow", "queue",
    "forward", "logits", "generate",
)  # fmt: skip
FUSED = {
    "add": "add_norm",
    "rms_norm": "add_norm",
    "mul": "swiglu",
    "silu": "swiglu",
    "rope": "turn",
    "dot": "attention",
    "scale": "attention",
    "softmax": "attention",
}
ARCHS = ("sm_80", "sm_90")
OPERANDS = "float16"

THREADS = 256  # eight warps: in matmul four times 32 rows, twice half the tokens
WIDE = 1024  # threads of rms_norm, so that a row is all on its way at once
FEW = 64  # tokens of a tile where there are no more, and
MANY = 128  # where there are: a weight read serves up to so many
STAGES = 3  # slots in matmul's ring: two on their way while one is multiplied
KEPT = 16  # graphs at most: the prompt length captured first goes
PARTS = 8  # blocks at most that share out the k's of one tile
HEADS = (64, 128)  # head sizes that attention is compiled for
# Tiles of 16 rows that a block of each kernel for one token multiplies, and its warps, which share out their k's
PLAN = {"project_in": (1, 16), "project_out": (1, 16), "gate_up": (2, 8), "down": (1, 22), "vocabulary": (1, 8)}
WARPS = 22  # at most
ROOM = 192 * 1024  # bytes at most of weights on their way to such a block
SPLITS = 8  # blocks at most that share out a head's positions
CHUNK = 128  # positions that make one more of them worthwhile
TILE = 8 * THREADS  # values of an embedding row that a block unpacks at a time
OPTIONS = (f"-DTHREADS={THREADS}", f"-DWIDE={WIDE}", f"-DTILE={TILE}", f"-DSTAGES={STAGES}",
           f"-DWARPS={WARPS}", f"-DSPLITS={SPLITS}", f"-DCHUNK={CHUNK}")  # fmt: skip

SOURCE = (
    TILES
    + r"""
typedef unsigned long long uint64;
extern "C" __global__ void embed(const int64* ids, const uint8* w, float* out, int D, int kind, int64 row_bytes) {
    // (T,), (V, D) -> (T, D), a thread block for each token
    const uint8* row = w + ids[blockIdx.x] * row_bytes;
    for (int d = 8 * threadIdx.x; d < D; d += TILE) unpack_eight(kind, row, d, D, out + (int64)blockIdx.x * D + d);
}

// The sum of a value over the threads of a block, for each of them.
__device__ float total(float value) {
    __shared__ float sums[WIDE / 32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < WIDE / 32; ++warp) value += sums[warp];
    return value;
}

// In 16-byte pieces of a row of 128 bytes: eight rows' pieces of one column, and two rows' four of either half, lie in
// different banks.
__device__ int place(int row, int piece) { return (piece ^ ((row & 1) << 2 | row >> 1 & 3)) * 8; }

template <int TOKENS> struct Slot { half x[TOKENS][64]; uint8 w[8][2048]; };

// One 64 k's: 32 rows of a warp by half the slot's tokens, onto sum.
template <int FORMAT, int TOKENS>
__device__ void multiply_slot(const Slot<TOKENS>& slot, float (*sum)[TOKENS / 16][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1  // both at once would need more registers than half a processor's
    for (int j = 0; j < 2; ++j) {
        uint32 a[2][2][4];
        for (int i = 0; i < 2; ++i) {
            Share<FORMAT> share;
            share.load(slot.w[warp % 4 * 2 + i], lane);
            share.unpack(j, a[i]);
        }
#pragma unroll
        for (int t = 0; t < TOKENS / 16; ++t) {
            const int row = warp / 4 * (TOKENS / 2) + t * 8 + lane / 4;
            const uint4 v = *(const uint4*)&slot.x[row][place(row, j * 4 + lane % 4)];
            for (int i = 0; i < 2; ++i) multiply(sum[i][t], a[i][0], v.x, v.y), multiply(sum[i][t], a[i][1], v.z, v.w);
        }
    }
}

// 128 rows from tile `tile` of a matrix by TOKENS tokens from token0, k's of tiles k0 to k1; out is moved to its
// column.
template <int FORMAT, int TOKENS>
__device__ void product(const half* x, const uint8* w, float* out, int tile, int rows, int depth, int k0, int k1,
                        int token0, int T, int width) {
    extern __shared__ __align__(16) char shared[];
    Slot<TOKENS>* ring = (Slot<TOKENS>*)shared;
    constexpr int PIECES = FORMAT == NIBBLES ? 40 : FORMAT == BYTES ? 72 : FORMAT == SIXTEENTHS ? 80 : 128;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32 last = (rows - 1) / 16;
    auto fetch = [&](int k) {
        Slot<TOKENS>& slot = ring[(k - k0) % STAGES];
        if (k < k1) {
            for (uint32 i = threadIdx.x; i < TOKENS * 8; i += THREADS)  // indices in pieces of 16 bytes
                copy(&slot.x[i / 8][place(i / 8, i % 8)], (const uint4*)x + ((min(token0 + i / 8, T - 1u) * depth +
                    k) * 8 +
                     i % 8), token0 + i / 8 < T);
            for (uint32 i = threadIdx.x; i < 8 * PIECES; i += THREADS)  // tiles past the end read the last
                copy(&slot.w[i / PIECES][i % PIECES * 16], (const uint4*)w + ((min(tile + i / PIECES, last) * depth +
                    k) *
                     PIECES + i % PIECES), true);
        }
        commit();
    };
    float sum[2][TOKENS / 16][4] = {};
    for (int k = k0; k < k0 + STAGES - 1; ++k) fetch(k);
    for (int k = k0; k < k1; ++k) {
        arrived<STAGES - 2>();
        __syncthreads();  // this slot is there, and everyone has left the one that the next copies overwrite
        fetch(k + STAGES - 1);
        multiply_slot<FORMAT, TOKENS>(ring[(k - k0) % STAGES], sum);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int t = 0; t < TOKENS / 16; ++t)
            for (int v = 0; v < 4; ++v) {
                const int row = (tile + warp % 4 * 2 + i) * 16 + lane / 4 + v / 2 * 8;
                const int token = token0 + warp / 4 * (TOKENS / 2) + t * 8 + lane % 4 * 2 + v % 2;
                if (row < rows && token < T) out[(int64)token * width + row] = sum[i][t][v];
            }
}

// (T, K) halves, a stack of (N, K) -> (parts, T, N): blocks side by side take the same rows and other tokens
template <int TOKENS> __device__ void tiled(const half* x, const Stack& w, float* out, int T, int parts) {
    const int tokens = (T + TOKENS - 1) / TOKENS, part = blockIdx.x / tokens % parts;
    const int each = (w.depth + parts - 1) / parts, k0 = part * each, k1 = min(k0 + each, w.depth);
    int block = blockIdx.x / tokens / parts, m = 0, column = 0;
    const int width = w.rows[0] + w.rows[1] + w.rows[2];
    while (block >= (w.rows[m] + 127) / 128) block -= (w.rows[m] + 127) / 128, column += w.rows[m++];
    const uint8* tiles = w.tiles[m];
    out += (int64)part * T * width + column;
    const int rows = w.rows[m], token0 = blockIdx.x % tokens * TOKENS, tile = block * 8;
    switch (w.format[m]) {
        case NIBBLES: return product<NIBBLES, TOKENS>(x, tiles, out, tile, rows, w.depth, k0, k1, token0, T, width);
        case BYTES: return product<BYTES, TOKENS>(x, tiles, out, tile, rows, w.depth, k0, k1, token0, T, width);
        case SIXTEENTHS: return product<SIXTEENTHS, TOKENS>(x, tiles, out, tile, rows, w.depth, k0, k1, token0, T,
            width);
        default: return product<HALVES, TOKENS>(x, tiles, out, tile, rows, w.depth, k0, k1, token0, T, width);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_few(const half* x, const __grid_constant__ Stack w, float* out, int T, int parts) { tiled<64>(x, w, out, T,
    parts); }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_many(const half* x, const __grid_constant__ Stack w, float* out, int T, int parts) { tiled<128>(x, w, out, T,
    parts); }

// The sum of the parts that matmul left of one output.
__device__ float whole(const float* parts, int count, int64 size, int64 i) {
    float sum = 0;
#pragma unroll 4
    for (int p = 0; p < count; ++p) sum += parts[p * size + i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(WIDE)
rms_norm(float* x, const float* weight, const float* parts, half* out, int D, int stride, int count, float eps) {
    // x (T, D) += parts (count, T, D), and -> (T, D) halves, a thread block for each row
    const int64 row = (int64)blockIdx.x * D, size = (int64)gridDim.x * D;
    float sum = 0;
    for (int d = threadIdx.x; d < D; d += WIDE) {
        const float value = x[row + d] + whole(parts, count, size, row + d);
        if (count) x[row + d] = value;
        sum += value * value;
    }
    const float inverse = rsqrtf(total(sum) / D + eps);
    for (int d = threadIdx.x; d < D; d += WIDE)
        out[(int64)blockIdx.x * stride + d] = __float2half(x[row + d] * inverse * weight[d]);
}

extern "C" __global__ void silu(const float* parts, half* out, int F, int stride, int count, int64 size) {
    // (count, T, pairs of eight) -> (T, F): silu(gate) * up, a thread for each
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x, t = i / F, f = i % F, width = (F + 7) / 8 * 16;
    if (i >= size) return;
    const int64 all = size / F * width, at = t * width + f / 8 * 16 + f % 8;
    const float gate = whole(parts, count, all, at), up = whole(parts, count, all, at + 8);
    out[t * stride + f] = __float2half(gate / (1 + expf(-gate)) * up);
}

extern "C" __global__ void
rope(const float* parts, const double* freqs, const int64* start, half* q, half* keys, half* values, int H, int G,
     int hd, int turned, int count, int64 pairs) {
    // (count, T, (H + 2 G) hd) -> q (T, H, hd), and rows of the cache (context, G, hd), a thread for each pair
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= pairs) return;
    const int pair = i % (hd / 2), heads = H + 2 * G, head = i / (hd / 2) % heads;
    const int64 t = i / (hd / 2) / heads;
    float sin = 0, cos = 1;
    if (pair < turned && head < H + G) {
        const double half_turns = (start[0] + t) * freqs[pair] * 0.31830988618379067;  // radians over pi
        sincospif((float)(half_turns - 2 * rint(half_turns / 2)), &sin, &cos);  // whole turns off before rounding
    }
    const float a = whole(parts, count, 2 * pairs, 2 * i), b = whole(parts, count, 2 * pairs, 2 * i + 1);
    half* row = head < H ? q + (t * H + head) * hd : (head < H + G ? keys : values) +
                ((start[0] + t) * G + (head - H) % G) * hd;
    ((half2*)row)[pair] = __floats2half2_rn(a * cos - b * sin, a * sin + b * cos);
}

// 64 rows of the cache from row s0 on, of one head, into shared memory; zeros where there is no row or no value.
template <int HD> __device__ void take(half (*to)[HD], const half* from, int64 s0, int64 S, int G, int hd) {
    for (int i = threadIdx.x; i < 64 * HD / 8; i += 128) {
        const int row = i / (HD / 8), piece = i % (HD / 8);
        const bool inside = s0 + row < S && piece * 8 < hd;
        *(uint4*)&to[row][place(row, piece)] = inside ? *(const uint4*)(from + (s0 + row) * G * hd + piece * 8) :
            uint4{};
    }
}

// Scores of 16 tokens and 64 keys become weights: exp(score - most), most raised; what was summed before shrinks.
template <int HD> __device__ void weigh(float (*score)[4], float (*sum)[4], float* most, float* total, int64 ahead,
                                        float scale) {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < 2; ++r) {  // rows g and g + 8
        float higher = most[r];
        for (int n = 0; n < 8; ++n)
            for (int v = 2 * r; v < 2 * r + 2; ++v) {
                const bool seen = n * 8 + lane % 4 * 2 + v % 2 <= ahead + 8 * r;
                score[n][v] = seen ? score[n][v] * scale : -1e38f;
                higher = fmaxf(higher, score[n][v]);
            }
        for (int step = 1; step < 4; step *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, step));
        const float keep = exp2f(most[r] - higher);
        most[r] = higher, total[r] *= keep;
        for (int n = 0; n < 8; ++n)
            for (int v = 2 * r; v < 2 * r + 2; ++v) total[r] += score[n][v] = exp2f(score[n][v] - higher);
        for (int d = 0; d < HD / 8; ++d) sum[d][2 * r] *= keep, sum[d][2 * r + 1] *= keep;
    }
}

__device__ uint32 pair(float a, float b) {
    const half2 both = __floats2half2_rn(a, b);
    return *(const uint32*)&both;
}

template <int HD>
__device__ void attend(const half* q, const half* k, const half* v, const int64* start, half* out, int T, int H, int G,
                       int hd, int stride) {
    __shared__ __align__(16) half keys[64][HD], values[64][HD];
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, head = blockIdx.x % H, of = head / (H / G) * hd;
    const int t0 = blockIdx.x / H * 64, t = t0 + threadIdx.x / 32 * 16 + g;  // this lane's tokens: t and t + 8
    const int64 S = start[0] + min(t0 + 64, T);
    uint32 query[HD / 32][2][4];
    for (int j = 0; j < HD / 32; ++j)
        for (int r = 0; r < 2; ++r) {
            const bool inside = t + 8 * r < T && j * 32 + c * 8 < hd;
            const uint4 eight = inside ? *(const uint4*)(q + ((t + 8 * r) * (int64)H + head) * hd + j * 32 + c * 8) :
                uint4{};
            query[j][0][r] = eight.x, query[j][0][r + 2] = eight.y, query[j][1][r] = eight.z, query[j][1][r + 2] =
                eight.w;
        }
    float sum[HD / 8][4] = {}, most[2] = {-1e38f, -1e38f}, total[2] = {};
    for (int64 s0 = 0; s0 < S; s0 += 64) {
        __syncthreads();  // before these tiles overwrite the last
        take<HD>(keys, k + of, s0, S, G, hd), take<HD>(values, v + of, s0, S, G, hd);
        __syncthreads();
        float score[8][4] = {};
        for (int j = 0; j < HD / 32; ++j)
            for (int n = 0; n < 8; ++n) {
                const uint4 key = *(const uint4*)&keys[n * 8 + g][place(n * 8 + g, j * 4 + c)];
                multiply(score[n], query[j][0], key.x, key.y), multiply(score[n], query[j][1], key.z, key.w);
            }
        weigh<HD>(score, sum, most, total, start[0] + t - s0, rsqrtf(hd) * 1.4426950408889634f);
        for (int n = 0; n < 8; n += 2) {  // weights leave as sums and come back as operands: the same lanes hold them
            const uint32 a[4] = {pair(score[n][0], score[n][1]), pair(score[n][2], score[n][3]),
                                 pair(score[n + 1][0], score[n + 1][1]), pair(score[n + 1][2], score[n + 1][3])};
            for (int d = 0; d < HD / 8; d += 2) {
                uint32 b[4];
                turned(b, &values[n * 8 + lane % 16][place(n * 8 + lane % 16, d + lane / 16)]);
                multiply(sum[d], a, b[0], b[1]), multiply(sum[d + 1], a, b[2], b[3]);
            }
        }
    }
    for (int r = 0; r < 2; ++r) {
        for (int step = 1; step < 4; step *= 2) total[r] += __shfl_xor_sync(~0u, total[r], step);
        for (int d = 0; d < HD / 8; ++d)
            if (t + 8 * r < T && d * 8 < hd)
                *(uint32*)(out + (t + 8 * r) * (int64)stride + head * hd + d * 8 + c * 2) =
                    pair(sum[d][2 * r] / total[r], sum[d][2 * r + 1] / total[r]);
    }
}

extern "C" __global__ void __launch_bounds__(128)
attention_64(const half* q, const half* k, const half* v, const int64* start, half* out, int T, int H, int G, int hd,
             int stride) { attend<64>(q, k, v, start, out, T, H, G, hd, stride); }

extern "C" __global__ void __launch_bounds__(128)
attention_128(const half* q, const half* k, const half* v, const int64* start, half* out, int T, int H, int G, int hd,
              int stride) { attend<128>(q, k, v, start, out, T, H, G, hd, stride); }
// ---- one token ------------------------------------------------------------------------------------------------------

// A kernel's blocks may come while the one before still runs: they ask for what does not depend on it, wait until it
// has ended, and let the next one's come. GPUs before sm_90 start a kernel when the one before has ended.
__device__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ void let_next_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

constexpr float LEAST = 1 / 16777216.0f;  // above zero that a half can be

__device__ float4 floats(uint2 halves) {
    const float2 a = __half22float2(*(const half2*)&halves.x), b = __half22float2(*(const half2*)&halves.y);
    return {a.x, a.y, b.x, b.y};
}

// One token's activations in shared memory: depth * 64 halves, zeros past the end, and sums of each 16, times 2^-24.
struct Token {
    half* x;
    float4* sums;
    int depth;
    __device__ Token(char* shared, int depth) : x((half*)shared), sums((float4*)(x + depth * 64)), depth(depth) {}
    // Values 4 i to 4 i + 3; whole warps call it, also where i is past the end.
    __device__ void put(int i, float4 value) const {
        const uint2 rounded = {pair(value.x, value.y), pair(value.z, value.w)};
        value = floats(rounded);
        float sum = value.x + value.y + (value.z + value.w);
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (i >= depth * 16) return;
        ((uint2*)x)[i] = rounded;
        if (i % 4 == 0) ((float*)sums)[i / 4] = sum * LEAST;
    }
};

// What a lane's q are as two operands: as they are, the bits of halves below the least normal one, worth q * 2^-24.
template <int FORMAT> __device__ void bare(const Share<FORMAT>& share, int j, uint32 (*a)[4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // two weights of row i % 2
        const int row = i % 2, step = i / 4;
        const uint32 four = word(share.q[FORMAT == NIBBLES ? 0 : j], FORMAT == NIBBLES ? 2 * j + row : 2 * row + step);
        if (FORMAT == HALVES) a[step][i % 4] = word(share.q[(2 * j + step) % share.WORDS], i % 4);
        else if (FORMAT == NIBBLES) a[step][i % 4] = four >> (8 * step + i / 2 % 2 * 4) & 0x000F000F;
        else a[step][i % 4] = __byte_perm(four, 0, i / 2 % 2 ? 0x4342 : 0x4140);
    }
}

// A tile of 16 rows by one token's 64 values, onto the lane's sums of rows g and g + 8, all times 2^-24; `of` are the
// sums of each 16 values. An instruction multiplies by eight columns, and all hold this token, but where 16 k's have a
// scale of their own: there even columns hold the first 16 of each 32, odd ones the others, and a lane takes its own.
template <int FORMAT>
__device__ __forceinline__ void multiply_tile(float* sum, const uint8* tile, const half* x, float4 of,
                                              const half* zeros) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    const bool later = FORMAT == SIXTEENTHS && c / 2;
    Share<FORMAT> share;
    share.load(tile, lane);
    if (FORMAT == SIXTEENTHS && (lane / 4 & 1) != c / 2) x = zeros;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32 a[2][4];
        bare(share, j, a);
        const uint4 v = *(const uint4*)(x + j * 32 + c * 8);
        float dot[4] = {};
        multiply(dot, a[0], v.x, v.y), multiply(dot, a[1], v.z, v.w);
        const float first = j ? of.z : of.x, second = j ? of.w : of.y;
        const float all = FORMAT == SIXTEENTHS ? (later ? second : first) : first + second;
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // weights are scale * (q - middle) + offset
            const float found = later ? dot[2 * r + 1] : dot[2 * r];
            const uint32 bits = word(share.s, 2 * j + r);
            const float2 means = __half22float2(*(const half2*)&bits);
            const float centred = fmaf(FORMAT == NIBBLES ? -8.0f : -128.0f, all, found);
            sum[r] = FORMAT == HALVES ? fmaf(LEAST, found, sum[r]) : fmaf(means.x, centred, fmaf(means.y, all, sum[r]));
        }
    }
}

// The same for every `each`-th of `count` tiles from `from` on, whose first is the token's k0-th. All warps go round as
// often, or the compiler guards every instruction against lanes that part: what is too much is multiplied by zeros.
template <int FORMAT>
__device__ void multiply_tiles(float* sum, const uint8* tiles, int from, int count, int each, const Token& token,
                               int k0, const half* zeros) {
#pragma unroll 1
    for (int k = 0; k < count; k += each) {
        const int own = min(k + from, count - 1);
        const bool more = own == k + from;
        multiply_tile<FORMAT>(sum, tiles + own * TILE_BYTES[FORMAT], more ? token.x + (k0 + own) * 64 : zeros,
                              *(more ? token.sums + k0 + own : (const float4*)zeros), zeros);
    }
}

// The block's `per` tiles of 16 rows of a stack by one token, for threads 0 to 16 per - 1; row: where the thread's sum
// stands among the outputs, -1 for none. Warps share out the tiles and their k's. fill(token) makes the activations,
// once the weights are on their way into `room` bytes and the kernel before has ended.
template <class Fill> __device__ float dots(const Stack& w, int per, int room, int& row, Fill fill) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float parts[WARPS][16];
    __shared__ __align__(16) half zeros[64];
    int tile = blockIdx.x * per, m = 0, column = 0;
    while (tile >= (w.rows[m] + 15) / 16) tile -= (w.rows[m] + 15) / 16, column += w.rows[m++];
    row = threadIdx.x < 16 * per && tile * 16 + threadIdx.x < w.rows[m] ? column + tile * 16 + threadIdx.x : -1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = blockDim.x / 32 / per, from = warp % each;
    const int format = w.format[m], size = TILE_BYTES[format], most = room / size / per;
    const uint8* tiles = w.tiles[m] + (int64)tile * w.depth * size;
    const Token token(shared, w.depth);
    uint8* there = (uint8*)(token.sums + w.depth);
    if (threadIdx.x < 32) ((uint32*)zeros)[threadIdx.x] = 0;
    float sum[2] = {};
    for (int k0 = 0; k0 < w.depth; k0 += most) {  // once, where they all fit; else there is one tile
        const int count = min(most, w.depth - k0);
        if (k0) __syncthreads();  // before the next tiles overwrite these
        for (int i = threadIdx.x * 16; i < per * count * size; i += blockDim.x * 16)
            copy(there + i, tiles + (int64)k0 * size + i, true);
        commit();
        if (k0 == 0) wait_for_last(), let_next_come(), fill(token);
        arrived<0>();
        __syncthreads();
        const uint8* own = there + warp / each * count * size;
        if (format == NIBBLES) multiply_tiles<NIBBLES>(sum, own, from, count, each, token, k0, zeros);
        else if (format == BYTES) multiply_tiles<BYTES>(sum, own, from, count, each, token, k0, zeros);
        else if (format == SIXTEENTHS) multiply_tiles<SIXTEENTHS>(sum, own, from, count, each, token, k0, zeros);
        else multiply_tiles<HALVES>(sum, own, from, count, each, token, k0, zeros);
    }
    for (int r = 0; r < 2; ++r) {
        if (format == SIXTEENTHS) sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (lane % 4 == 0) parts[warp][lane / 4 + 8 * r] = sum[r];
    }
    __syncthreads();
    float whole = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
        if (threadIdx.x < 16 * per && i < each) whole += parts[threadIdx.x / 16 * each + i][threadIdx.x % 16];
    return whole / LEAST;
}

// Four floats from i on that another block may have just written, zeros beyond D, which need be no multiple of four.
__device__ float4 four(const float* x, int i, int D) {
    if (D % 4 == 0) return 4 * i < D ? __ldcg((const float4*)x + i) : float4{};
    float4 out = {};
    for (int j = 0; j < 4; ++j) if (4 * i + j < D) (&out.x)[j] = __ldcg(x + 4 * i + j);
    return out;
}

// RMS norm. Its weights are there before x is: those of two rounds, with x's values, travel together.
struct Norm {
    const float* weight;
    float4 own[2];
    __device__ Norm(const float* weight, int D) : weight(weight) {
#pragma unroll
        for (int r = 0; r < 2; ++r) own[r] = four(weight, threadIdx.x + r * blockDim.x, D);
    }
    __device__ void operator()(const float* x, const Token& token, int D, float eps) const {
        __shared__ float sums[WARPS];
        float sum = 0;
        float4 value[2];
        auto square = [&](float4 v) { sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; };
#pragma unroll
        for (int r = 0; r < 2; ++r) square(value[r] = four(x, threadIdx.x + r * blockDim.x, D));
        for (int i = threadIdx.x + 2 * blockDim.x; 4 * i < D; i += blockDim.x) square(four(x, i, D));
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) if (warp < blockDim.x / 32) sum += sums[warp];
        const float by = rsqrtf(sum / D + eps);
        auto put = [&](int i, float4 v, float4 g) {
            token.put(i, {v.x * by * g.x, v.y * by * g.y, v.z * by * g.z, v.w * by * g.w});
        };
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (r * blockDim.x < token.depth * 16) put(threadIdx.x + r * blockDim.x, value[r], own[r]);
        for (int i = threadIdx.x + 2 * blockDim.x; i - threadIdx.x < token.depth * 16; i += blockDim.x)
            put(i, four(x, i, D), four(weight, i, D));
    }
};

// A logit and its row as a number to take the maximum of: the higher logit first, then the lower row.
__device__ uint64 rank(float logit, uint32 row) {
    const uint32 bits = __float_as_uint(logit);
    return (uint64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | ~row;
}

// Logits go to one of two rows, by position; after each row's V stands the best rank.
__device__ uint64* best(float* rows, int64 at, int V) { return (uint64*)(rows + ((at & 1) + 1) * ((V +
    3) / 2 * 2)) - 1; }

extern "C" __global__ void begin(int64* at, float* rows, const uint8* w, const double* freqs, float* x, float2* turn,
    int D, int V, int kind,
      int64 row_bytes, int hd, int turned) {
    // at + 1 is the position, and the token the best of the step before -> its embedding (D,), and for each pair of a
    // head the cosine and sine to turn it by; one block
    __shared__ int64 token, here;
    if (threadIdx.x == 0) {
        token = (uint32)~*best(rows, *at, V), here = ++*at;
        *best(rows, here, V) = 0;
    }
    __syncthreads();
    for (int d = 8 * threadIdx.x; d < D; d += TILE) unpack_eight(kind, w + token * row_bytes, d, D, x + d);
    if (threadIdx.x >= hd / 2) return;
    // radians over pi
    const double half_turns = threadIdx.x < turned ? here * freqs[threadIdx.x] * 0.31830988618379067 : 0;
    float2 to;
    sincospif((float)(half_turns - 2 * rint(half_turns / 2)), &to.y, &to.x);  // whole turns off before rounding
    turn[threadIdx.x] = to;
}

// -> q, k, v
extern "C" __global__ void __launch_bounds__(1024)
project_in(const float* x, const float* weight, const __grid_constant__ Stack w, int per, int room, float* out,
           float eps) {
    int row;
    const Norm norm(weight, w.K);
    const float sum = dots(w, per, room, row, [&](const Token& token) { norm(x, token, w.K, eps); });
    if (row >= 0) out[row] = sum;
}

// How many blocks share out the positions 0 to at of a head.
__device__ int splits(int at) { return min(SPLITS, at / CHUNK + 1); }

// Value d of a head whose pairs are turned, rounded to a half as in the cache.
__device__ half turned_value(const float* x, float2 to, int d) {
    const float2 pair = __ldcg((const float2*)x + d / 2);
    return __float2half(d % 2 ? pair.x * to.y + pair.y * to.x : pair.x * to.x - pair.y * to.y);
}

// A share of what a head sees: values weighted by 2^(score - most), and the sum of the weights.
struct Seen {
    float sum[8], most, total;
    __device__ void add(const Seen& other) {
        const float higher = fmaxf(most, other.most), a = exp2f(most - higher), b = exp2f(other.most - higher);
        for (int i = 0; i < 8; ++i) sum[i] = sum[i] * a + other.sum[i] * b;
        total = total * a + other.total * b, most = higher;
    }
};

// A share of the positions for one head: (hd,) and the logarithm of its weight. Eight values a lane, HD / 8 lanes a
// key; each such group's first ROUNDS keys are on their way before the query is there.
template <int HD> __device__ void look(const float* qkv, const float2* turn, const int64* start, half* keys,
                                       half* values, half* out, float* weights, int H, int G, int hd) {
    constexpr int LANES = HD / 8, GROUPS = THREADS / LANES, ROUNDS = 4;
    __shared__ __align__(16) half query[HD], key[HD], value[HD];
    __shared__ Seen seen[THREADS / 32][LANES];
    let_next_come();  // here at once: it asks for weights only, and waits for this kernel, which waits for the last
    const int at = __ldcg(start), n = splits(at), split = blockIdx.x / H, head = blockIdx.x % H, g = head / (H / G);
    if (split >= n) return;
    const int each = (at + n) / n, low = split * each, high = min(low + each, at + 1), width = G * hd;
    const int group = threadIdx.x / LANES, d0 = threadIdx.x % LANES * 8, lane = threadIdx.x % 32;
    auto eight = [&](const half* from, int s) {  // of key or value s, zeros where that is not in the cache
        return s < min(high, at) && d0 < hd ? *(const uint4*)(from + (int64)s * width + g * hd + d0) : uint4{};
    };
    uint4 k8[ROUNDS], v8[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        k8[r] = eight(keys, low + group + r * GROUPS), v8[r] = eight(values, low + group + r * GROUPS);
    wait_for_last();
    for (int d = threadIdx.x; d < HD; d += THREADS) {
        const float *q = qkv + head * hd, *k = qkv + (H + g) * hd, *v = qkv + (H + G + g) * hd;
        const float2 to = d < hd ? __ldcg(turn + d / 2) : float2{};
        query[d] = d < hd ? turned_value(q, to, d) : half(0);
        key[d] = d < hd ? turned_value(k, to, d) : half(0);
        value[d] = d < hd ? __float2half(__ldcg(v + d)) : half(0);
        if (d < hd && split == n - 1 && head % (H / G) == 0)  // one block of those that share it
            keys[(int64)at * width + g * hd + d] = key[d], values[(int64)at * width + g * hd + d] = value[d];
    }
    __syncthreads();
    const float scale = rsqrtf(hd) * 1.4426950408889634f;
    float q[8];
    for (int i = 0; i < 8; ++i) q[i] = __half2float(query[d0 + i]) * scale;
    Seen own = {{}, -1e38f, 0};
    auto see = [&](int s, uint4 k, uint4 v) {
        if (s == at) k = *(const uint4*)(key + d0), v = *(const uint4*)(value + d0);  // not in the cache for all to see
        float score = 0;
        for (int i = 0; i < 8; ++i) score += q[i] * __half2float(((const half*)&k)[i]);
        for (int step = LANES / 2; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        if (s >= high) return;
        const float higher = fmaxf(own.most, score), weight = exp2f(score - higher), keep = exp2f(own.most - higher);
        for (int i = 0; i < 8; ++i) own.sum[i] = own.sum[i] * keep + weight * __half2float(((const half*)&v)[i]);
        own.total = own.total * keep + weight, own.most = higher;
    };
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (low + r * GROUPS < high) see(low + group + r * GROUPS, k8[r], v8[r]);
#pragma unroll 4
    for (int s = low + group + ROUNDS * GROUPS; s - group < high; s += GROUPS) see(s, eight(keys, s), eight(values, s));
    for (int step = LANES; step < 32; step *= 2) {
        Seen other;
        for (int i = 0; i < 8; ++i) other.sum[i] = __shfl_xor_sync(~0u, own.sum[i], step);
        other.most = __shfl_xor_sync(~0u, own.most, step), other.total = __shfl_xor_sync(~0u, own.total, step);
        own.add(other);
    }
    if (lane < LANES) seen[threadIdx.x / 32][lane] = own;
    __syncthreads();
    if (threadIdx.x >= LANES || d0 >= hd) return;
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) own.add(seen[warp][lane]);
    for (int i = 0; i < 8; i += 2)
        *(uint32*)(out + (split * H + head) * hd + d0 + i) = pair(own.sum[i] / own.total, own.sum[i + 1] / own.total);
    if (threadIdx.x == 0) weights[split * H + head] = own.most + log2f(own.total);
}

extern "C" __global__ void __launch_bounds__(THREADS)
look_64(const float* qkv, const float2* turn, const int64* at, half* keys, half* values, half* out, float* weights,
        int H, int G, int hd) { look<64>(qkv, turn, at, keys, values, out, weights, H, G, hd); }

extern "C" __global__ void __launch_bounds__(THREADS)
look_128(const float* qkv, const float2* turn, const int64* at, half* keys, half* values, half* out, float* weights,
         int H, int G, int hd) { look<128>(qkv, turn, at, keys, values, out, weights, H, G, hd); }

extern "C" __global__ void __launch_bounds__(1024)
project_out(const half* seen, const float* weights, const int64* at, const __grid_constant__ Stack w, int per, int room,
            float* x, int H) {
    int row;
    float before = 0;
    const float sum = dots(w, per, room, row, [&](const Token& token) {  // what the splits saw, each by its weight
        if (row >= 0) before = __ldcg(x + row);
        const int n = splits(__ldcg(at)), hd = w.K / H;
        for (int i = threadIdx.x; i - threadIdx.x < token.depth * 16; i += blockDim.x) {
            float4 mixed = {};
            float most = -1e38f, total = 0, share[SPLITS];
            uint2 halves[SPLITS];
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) {
                const bool there = s < n && 4 * i < w.K;
                share[s] = there ? __ldcg(weights + s * H + 4 * i / hd) : -1e38f;
                halves[s] = there ? __ldcg((const uint2*)(seen + s * w.K) + i) : uint2{};
                most = fmaxf(most, share[s]);
            }
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) {
                const float weight = exp2f(share[s] - most);
                const float4 value = floats(halves[s]);
                mixed.x += weight * value.x, mixed.y += weight * value.y;
                mixed.z += weight * value.z, mixed.w += weight * value.w;
                total += weight;
            }
            token.put(i, {mixed.x / total, mixed.y / total, mixed.z / total, mixed.w / total});
        }
    });
    if (row >= 0) x[row] = before + sum;
}

extern "C" __global__ void __launch_bounds__(1024)
gate_up(const float* x, const float* weight, const __grid_constant__ Stack w, int per, int room, half* out, int F,
        float eps) {
    int row;
    const Norm norm(weight, w.K);
    const float gate = dots(w, per, room, row, [&](const Token& token) { norm(x, token, w.K, eps); });
    if (threadIdx.x >= 32) return;
    const float up = __shfl_down_sync(~0u, gate, 8);  // a tile is eight rows of gate above the same eight of up
    const int f = (blockIdx.x * per + threadIdx.x / 16) * 8 + threadIdx.x % 16;
    if (threadIdx.x < 16 * per && threadIdx.x % 16 < 8 && f < F) out[f] = __float2half(gate / (1 + expf(-gate)) * up);
}

extern "C" __global__ void __launch_bounds__(1024)
down(const half* act, const __grid_constant__ Stack w, int per, int room, float* x) {
    int row;
    float before = 0;
    const float sum = dots(w, per, room, row, [&](const Token& token) {
        if (row >= 0) before = __ldcg(x + row);
#pragma unroll 4
        for (int i = threadIdx.x; i - threadIdx.x < token.depth * 16; i += blockDim.x)
            token.put(i, i < token.depth * 16 ? floats(__ldcg((const uint2*)act + i)) : float4{});
    });
    if (row >= 0) x[row] = before + sum;
}

extern "C" __global__ void __launch_bounds__(1024)
vocabulary(const float* x, const float* weight, const int64* at, const __grid_constant__ Stack w, int per, int room,
           float* rows, float eps) {
    int row;
    const Norm norm(weight, w.K);
    const float logit = dots(w, per, room, row, [&](const Token& token) { norm(x, token, w.K, eps); });
    const int V = w.rows[0];
    if (row >= 0) rows[(__ldcg(at) & 1) * ((V + 3) / 2 * 2) + row] = logit;
    if (threadIdx.x >= 32) return;
    uint64 rank_here = row >= 0 ? rank(logit, row) : 0;
    for (int step = 16; step; step /= 2) rank_here = max(rank_here, __shfl_xor_sync(~0u, rank_here, step));
    if (threadIdx.x == 0) atomicMax(best(rows, __ldcg(at), V), rank_here);
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


class State(NamedTuple):
    """What is kept between tokens: cache, and what graphs were captured with."""

    cache: Any  # (L, 2, context, G, hd) halves
    at: Any  # (1,) int64: the last position computed
    rows: Any  # (2, V + 2 or 3) float32: logits of the last step of even and of odd position, and the best one's rank
    graphs: dict  # by prompt length, 0 for a step: (graph, its ids, position, result), at most KEPT
    pool: Any  # their memory
    stream: Any  # where they run
    aside: Any  # where rows are copied to the host


class Layer(NamedTuple):
    """One layer's weights: matrices of one input are stacked, and rows of gate and up lie side by side."""

    attn_norm: Any
    qkv: Tiles
    o: Tiles
    ffn_norm: Any
    gate_up: Tiles
    down: Tiles


def load(gguf, context, threads):
    """Pack every matrix into tiles on the GPU; make room there for context tokens. Nothing here needs threads.

    Raises StageError where there is no GPU to work on or too little room on it, GGUFError for a type without a kernel
    or a head size that no attention kernel takes.
    """
    config = gguf.config
    if config.hd % 8 or config.hd > max(HEADS):
        taken = f"this stage takes multiples of 8 up to {max(HEADS)}"
        raise GGUFError(gguf.path, None, f"has heads of {config.hd}, and {taken}")
    cupy = ready(gguf, tile_bytes(gguf) + cache_bytes(gguf, context) // 2)

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return cupy.asarray(dequantize(tensor))
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, cupy.asarray(tensor.raw))

    def packed(layer):
        norm, q, k, v, o, ffn_norm, gate, up, down = map(blocks, layer)
        return Layer(norm, pack(q, k, v), pack(o), ffn_norm, pack_pairs(gate, up), pack(down))

    weights = gguf.weights
    layers, norm = tuple(map(packed, weights.layers)), blocks(weights.output_norm)
    weights = Weights(blocks(weights.token_embd), layers, norm, pack(blocks(weights.output)))
    config = replace(config, rope_freqs=cupy.asarray(config.rope_freqs))
    cache = cupy.empty((config.L, 2, context, config.G, config.hd), np.float16)
    rows = cupy.zeros((2, (config.V + 3) // 2 * 2), np.float32)
    streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    state = State(cache, cupy.zeros(1, np.int64), rows, {}, cupy.cuda.MemoryPool(), *streams)
    cupy.cuda.Device().synchronize()
    return Model(config, weights, state)


def embed(ids, w):  # (T,), (V, D) -> (T, D)
    import cupy

    V, D, kind, length, size, raw = w
    out = cupy.empty((len(ids), D), np.float32)
    sizes = (*map(np.int32, (D, kind)), np.int64(D // length * size))
    PROGRAM.launch("embed", len(ids), THREADS, (ids, raw, out, *sizes))
    return out


def halves(T, K):
    """Room for activations (T, K) as matmul takes them: FP16, a row filled up with zeros to whole tiles."""
    import cupy

    return (cupy.zeros if K % 64 else cupy.empty)((T, 64 * deep(K)), np.float16)


def matmul(x, w):  # (T, K) halves, tiles of (N, K) -> (parts, T, N), whose sum is the product
    import cupy

    T = len(x)
    kernel, tokens = ("matmul_few", FEW) if T <= FEW else ("matmul_many", MANY)
    blocks = sum(-(-count // 8) for count in w.counts) * -(-T // tokens)
    parts = max(1, min(PARTS, w.depth // 4, 2 * processors() // blocks))
    parts = -(-w.depth // -(-w.depth // parts))  # as many as are left with something to do
    out = cupy.empty((parts, T, w.N), np.float32)
    shared = STAGES * (tokens * 128 + 8 * 2048)
    PROGRAM.launch(kernel, blocks * parts, THREADS, (x, w.stack, out, np.int32(T), np.int32(parts)), shared)
    return out


def add_norm(x, weight, eps, parts=()):  # (T, D), (D,), () -> (T, D) halves; x += the parts (n, T, D) of a product
    T, D = x.shape
    out = halves(T, D)
    sizes = (*map(np.int32, (D, out.shape[1], len(parts))), np.float32(eps))
    PROGRAM.launch("rms_norm", T, WIDE, (x, weight, parts if len(parts) else x, out, *sizes))
    return out


def swiglu(parts, F):  # (n, T, pairs of gate and up) -> silu(gate) * up, (T, F) halves
    T = parts.shape[1]
    out = halves(T, F)
    sizes = (*map(np.int32, (F, out.shape[1], len(parts))), np.int64(T * F))
    PROGRAM.launch("silu", -(-T * F // THREADS), THREADS, (parts, out, *sizes))
    return out


def turn(parts, freqs, start, keys, values, H):  # (n, T, (H + 2 G) hd) -> q (T, H, hd) turned; k and v into the cache
    import cupy

    T, (_, G, hd) = parts.shape[1], keys.shape
    q, pairs = cupy.empty((T, H, hd), np.float16), T * (H + 2 * G) * hd // 2
    sizes = (*map(np.int32, (H, G, hd, len(freqs), len(parts))), np.int64(pairs))
    PROGRAM.launch("rope", -(-pairs // THREADS), THREADS, (parts, freqs, start, q, keys, values, *sizes))
    return q


def captured(model, T, run, ids, start):
    """The graph of run(ids, at), with its ids (T,), position (1,) and result; captured at the first call for a T.

    Capturing runs it once, and leaves the pool with all the memory that it asks for.
    """
    import cupy

    state = model.cache
    if T not in state.graphs:
        if len(state.graphs) == KEPT:
            del state.graphs[next(filter(None, state.graphs))]
        with state.stream, cupy.cuda.using_allocator(state.pool.malloc):
            ids, at = cupy.array(ids, np.int64), cupy.array([start], np.int64)
            run(ids, at)
            state.stream.synchronize()
            state.stream.begin_capture()
            try:
                result = run(ids, at)
            finally:
                graph = state.stream.end_capture()
        state.graphs[T] = graph, ids, at, result
    return state.graphs[T]


def prompt(model, ids, at):  # (T,), (1,) -> (T, D)
    config, weights = model.config, model.weights
    eps, freqs = config.eps, config.rope_freqs
    x, parts = embed(ids, weights.token_embd), ()
    for layer, (keys, values) in zip(weights.layers, model.cache.cache, strict=True):
        h = add_norm(x, layer.attn_norm, eps, parts)
        q = turn(matmul(h, layer.qkv), freqs, at, keys, values, config.H)
        parts = matmul(attention(q, keys, values, at), layer.o)
        h = add_norm(x, layer.ffn_norm, eps, parts)
        parts = matmul(swiglu(matmul(h, layer.gate_up), config.F), layer.down)
    return add_norm(x, weights.output_norm, eps, parts)


def one(kernel, w, before, after):
    """A kernel that multiplies one token by w, as PLAN has it or smaller; what it takes before w and after."""
    tiles, warps = PLAN[kernel]
    if any(count % tiles for count in w.counts) or tiles * w.depth * w.tile_bytes > ROOM:
        tiles = 1
    warps = min(warps, tiles * w.depth) // tiles * tiles
    room = min(ROOM, tiles * w.depth * w.tile_bytes)
    args = (*before, w.stack, np.int32(tiles), np.int32(room), *after)
    PROGRAM.launch(kernel, sum(w.counts) // tiles, 32 * warps, args, 144 * w.depth + room, early=True)


def step(model):
    """The token after model.cache.at: its logits into a row of model.cache.rows, its rank after them."""
    import cupy

    config, weights, state = model.config, model.weights, model.cache
    H, G, hd, eps, at, rows = config.H, config.G, config.hd, np.float32(config.eps), state.at, state.rows
    x, qkv, act = cupy.empty(config.D, np.float32), cupy.empty((H + 2 * G) * hd, np.float32), halves(1, config.F)
    turn = cupy.empty((hd // 2, 2), np.float32)
    seen, shares = cupy.empty((SPLITS, H * hd), np.float16), cupy.empty((SPLITS, H), np.float32)
    V, D, kind, length, size, raw = weights.token_embd
    sizes = (*map(np.int32, (D, V, kind)), np.int64(D // length * size), np.int32(hd), np.int32(len(config.rope_freqs)))
    PROGRAM.launch("begin", 1, THREADS, (at, rows, raw, config.rope_freqs, x, turn, *sizes))
    for layer, (keys, values) in zip(weights.layers, state.cache, strict=True):
        one("project_in", layer.qkv, (x, layer.attn_norm), (qkv, eps))
        args = (qkv, turn, at, keys, values, seen, shares, *map(np.int32, (H, G, hd)))
        PROGRAM.launch("look_64" if hd <= HEADS[0] else "look_128", SPLITS * H, THREADS, args, early=True)
        one("project_out", layer.o, (seen, shares, at), (x, np.int32(H)))
        one("gate_up", layer.gate_up, (x, layer.ffn_norm), (act, np.int32(config.F), eps))
        one("down", layer.down, (act,), (x,))
    one("vocabulary", weights.output, (x, weights.output_norm, at), (rows, eps))


def follow(model, token, at):
    """Let the next step be that of `token` after position at, whatever ran before."""
    state = model.cache
    with state.stream:
        state.at.set(np.array([at], np.int64))
        state.rows[at & 1, -2:].set(np.array([~token & 0xFFFFFFFF | 1 << 63], np.uint64).view(np.float32))


def queue(model, at, row):
    """Queue the step of position at and the copy of its logits to `row` (V + 2 or 3,); -> an event after both."""
    state = model.cache
    with state.stream:
        state.graphs[0][0].launch()
        computed = state.stream.record()
    state.aside.wait_event(computed)
    state.rows[at & 1].get(stream=state.aside, out=row, blocking=False)
    return state.aside.record()


def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd), (1,) -> (T, H * hd), all halves
    T, H, hd = q.shape
    out = halves(T, H * hd)
    sizes = map(np.int32, (T, H, k.shape[1], hd, out.shape[1]))
    kernel = "attention_64" if hd <= HEADS[0] else "attention_128"
    PROGRAM.launch(kernel, -(-T // 64) * H, 128, (q, k, v, start, out, *sizes))
    return out


def forward(model, ids, start):  # (T,) -> (T, D)
    T, state = len(ids), model.cache
    if start + T > state.cache.shape[2]:
        raise ValueError(f"{start + T} tokens do not fit a context of {state.cache.shape[2]}")
    graph, there, at, hidden = captured(model, T, lambda ids, at: prompt(model, ids, at), ids, start)
    with state.stream:
        there.set(np.array(ids, np.int64))
        at.set(np.array([start], np.int64))
        graph.launch()
        return hidden.copy()  # the next launch writes over its own


def logits(model, hidden):  # (T, D) halves -> (T, V), here
    with model.cache.stream:
        return matmul(hidden, model.weights.output).sum(axis=0).get()


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id.

    The step after is queued with the GPU's own choice, the best logit, before choose has been asked; where choose
    takes another id, that step runs again.
    """
    import cupyx

    row = logits(model, forward(model, ids, 0)[-1:])[0]
    token = choose(row)
    yield token, row
    V, first, last = model.config.V, len(ids), len(ids) + n - 1
    landing = cupyx.empty_pinned(model.cache.rows.shape, np.float32)
    if n > 1:
        follow(model, token, first - 1)
        captured(model, 0, lambda *_: step(model), [], 0)
        follow(model, token, first - 1)
        done = queue(model, first, landing[first & 1])
    for at in range(first, last):
        after = queue(model, at + 1, landing[at + 1 & 1]) if at + 1 < last else None
        done.synchronize()
        row, (guess,) = landing[at & 1, :V].copy(), ~landing[at & 1, -2:].view(np.uint64) & 0xFFFFFFFF
        token = choose(row)
        if after and token != guess:
            follow(model, token, at)
            after = queue(model, at + 1, landing[at + 1 & 1])
        done = after
        yield token, row
