"""Fused: a token as one kernel, its weights streaming through shared memory across every phase.

Idea    Do not let the memory rest while blocks wait for each other.
Was     A graph's kernel asks for its weights when it starts, and it starts when the one before has ended: the memory
        is idle while a kernel ends, while the next begins, and while activations travel.
Change  One block a processor stays for the whole token. One warp does nothing but copy that block's weights into a
        ring in shared memory, in the order in which they will be needed, whatever phase that is. The others go
        through the phases: take the activations, multiply, add up over warps, send. What is sent carries the number
        of its phase, so that nobody waits for a barrier: a reader looks again until every number is the one it needs.
Expect  A token takes the longer of two times: that of reading all weights, and that of five exchanges a layer, each
        of which is two trips to the L2 cache and back.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import argmax
from common.cuda import Program, processors
from common.cuda_tiles import TILE_BYTES, TILES, Tiles, deep, pack, pack_pairs, tile_bytes
from common.gguf import GGUFError
from common.gpu import cache_bytes, ready
from common.model import Weights
from common.quants import dequantize
from common.stage import Model, StageError

PREVIOUS = "graph"
CHANGES = (
    "TILE_BYTES", "StageError", "WARPS", "GROUP", "SPLITS", "CHUNK", "SLOT", "PIECE", "SHARED", "PATIENCE", "OPTIONS",
    "STEP_OPTIONS", "SOURCE", "STEP", "STEP.prepare", "STEP.arrive", "STEP.fetch", "STEP.passed", "STEP.together",
    "STEP.put", "STEP.get", "STEP.count", "STEP.counted", "STEP.nanoseconds", "STEP.late", "STEP.wait",
    "STEP.multiply_tile", "STEP.stream", "STEP.tiles", "STEP.dealt", "STEP.product", "STEP.sent", "STEP.turn_to",
    "STEP.take_stream", "STEP.rms_norm", "STEP.ask", "STEP.rank", "STEP.best", "STEP.begin", "STEP.project_in",
    "STEP.look", "STEP.take_halves", "STEP.join", "STEP.project_out", "STEP.gate_up", "STEP.down", "STEP.vocabulary",
    "STEP.step", "STEP_PROGRAM", "State", "load", "pieces", "stepping", "stamps", "captured", "follow", "queue",
    "generate", "AHEAD", "ROOM", "SOURCE.multiply_tile", "SOURCE.dots", "SOURCE.normalized", "SOURCE.rank",
    "SOURCE.best", "SOURCE.begin", "SOURCE.project_in", "SOURCE.splits", "SOURCE.turned_value", "SOURCE.look",
    "SOURCE.look_64", "SOURCE.look_128", "SOURCE.project_out", "SOURCE.gate_up", "SOURCE.down", "SOURCE.vocabulary",
    "one", "step",
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
PHASES = ("begin", "project_in", "look", "project_out", "gate_up", "down", "vocabulary")
ARCHS = ("sm_90",)
OPERANDS = "float16"

THREADS = 256  # eight warps: in matmul four times 32 rows, twice half the tokens
WIDE = 1024  # threads of rms_norm, so that a row is all on its way at once
FEW = 64  # tokens of a tile where there are no more, and
MANY = 128  # where there are: a weight read serves up to so many
STAGES = 3  # slots in matmul's ring: two on their way while one is multiplied
KEPT = 16  # graphs at most: of a step, and of the prompt lengths met last
PARTS = 8  # blocks at most that share out the k's of one tile
HEADS = (64, 128)  # head sizes that attention is compiled for
WARPS = 16  # that compute in the kernel of a token; one more copies
GROUP = 8  # tiles of 16 rows that a block multiplies before its warps add up
SPLITS = 4  # blocks at most that share out a head's positions
CHUNK = 256  # positions that make one more of them worthwhile
SLOT = 20480  # bytes of the ring's slots
PIECE = (32, 16, 16, 8)  # tiles of each format in a slot
SHARED = 220 * 1024  # bytes of shared memory for ring and activations; 227 KB is what there is, some of it fixed
PATIENCE = 2 * 10**9  # cycles, about a second: a kernel that takes longer is stuck, and ends with an error
TILE = 8 * THREADS  # values of an embedding row that a block unpacks at a time
OPTIONS = (f"-DTHREADS={THREADS}", f"-DWIDE={WIDE}", f"-DTILE={TILE}", f"-DSTAGES={STAGES}")
STEP_OPTIONS = (f"-DWARPS={WARPS}", f"-DGROUP={GROUP}", f"-DSPLITS={SPLITS}", f"-DCHUNK={CHUNK}", f"-DSLOT={SLOT}",
                f"-DPATIENCE={PATIENCE}ll")  # fmt: skip

SOURCE = (
    TILES
    + r"""
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
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)

STEP = (
    TILES
    + r"""
typedef unsigned long long uint64;

struct Layer {
    Stack qkv, o, gate_up, down;
    const float *attn_norm, *ffn_norm;
    half *keys, *values;
};

struct Model {  // and what its steps share; an exchange is of words: the number of its phase above 32 bits of data
    const Layer* layers;
    const uint8* embedding;
    const double* freqs;
    const float* output_norm;
    float* rows;
    uint64 *qkv, *seen, *shares, *after_o, *act, *after_down;
    uint32* arrivals;  // two counts of what was sent, of this step and of the next
    int64* stamps;
    const ulonglong2* pieces;  // for each block what to copy: where from, how many bytes
    const int* counts;
    int64 row_bytes;
    Stack output;
    int L, D, F, H, G, hd, turned, kind, most, slots;
    float eps;
};

// ---- the machine's instructions -------------------------------------------------------------------------------------

__device__ void prepare(uint64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ void arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ void fetch(void* to, uint64 from, uint32 bytes, uint64* barrier) {  // the weights are not needed again soon
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) :
        "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
}
__device__ bool passed(uint64* barrier, int phase) {
    uint32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
    return done;
}
__device__ void together() {  // the warps that compute, each of them whole
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
__device__ void put(uint64* to, uint32 tag, uint32 bits) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64)tag << 32 | bits) : "memory");
}
__device__ void get(const uint64* from, uint64* two) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(two[0]), "=l"(two[1]) : "l"(from) : "memory");
}
__device__ uint64 get(const uint64* from) {
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ void count(uint32* at) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
__device__ uint32 counted(const uint32* at) {
    uint32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ int64 nanoseconds() {
    int64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ bool late(int64 since) { return clock64() - since > PATIENCE; }
__device__ void wait(uint64* barrier, int phase, int64 since) { while (!passed(barrier, phase) && !late(since)) {} }

// ---- a block's share of a step --------------------------------------------------------------------------------------

struct Block {
    const Model& m;
    int64 at, since, stamp;
    uint32* arrivals;
    uint32 tag, due;  // the number of the phase that sent last, and how many arrivals there are once all have sent
    int base, slot, phase;  // the block that the next product's first tile goes to; where the ring is read next
    int splits, each;  // how many blocks share out a head's positions, and how many positions each has
    uint8* ring;
    float *x, *norm[2], *parts;  // residual stream, norms on their way, sums of warps
    half *h, *zeros;  // what is multiplied
    uint64 *full, *empty;
    uint64 best;

    __device__ bool late() const { return ::late(since); }
    __device__ bool old(uint64 word) const { return (uint32)(word >> 32) != tag && !late(); }

    // All that the phase before sent is probably there: one thread looks, so that the others need not look in vain.
    __device__ void wait() const {
        if (threadIdx.x == 0) while ((int)(counted(arrivals) - due) < 0 && !late()) {}
        together();
    }
    __device__ void mark(int phase) {
        if (blockIdx.x || threadIdx.x) return;
        const int64 now = nanoseconds();
        m.stamps[2 * phase] += now - stamp, ++m.stamps[2 * phase + 1], stamp = now;
    }
};

// A tile of 16 rows by one token's 64 values, onto sum. An instruction multiplies by eight columns, so every one holds
// this token: what lanes other than 0, 4, 8 ... add up is not looked at.
template <int FORMAT> __device__ __forceinline__ void multiply_tile(float* sum, const uint8* tile, const half* x) {
    const int lane = threadIdx.x % 32;
    Share<FORMAT> share;
    share.load(tile, lane);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32 a[2][4];
        share.unpack(j, a);
        const uint4 v = *(const uint4*)(x + j * 32 + lane % 4 * 8);
        multiply(sum, a[0], v.x, v.y), multiply(sum, a[1], v.z, v.w);
    }
}

struct Sums { float upper, lower; int slot, phase; };  // rows g and g + 8, and where the ring is read next

// A row tile of the ring's next pieces by h, each warp every sixteenth tile along k. One copy of the code serves all
// phases, so that it stays in the instruction cache; and all warps go round as often, or the compiler would guard every
// instruction against lanes that part.
template <int FORMAT>
__device__ __noinline__ Sums stream(const uint8* ring, const half* h, const half* zeros, uint64* full, uint64* empty,
                                    int slots, int slot, int phase, int depth, int64 since) {
    constexpr int SIZE = FORMAT == NIBBLES ? 640 : FORMAT == BYTES ? 1152 : FORMAT == SIXTEENTHS ? 1280 : 2048;
    constexpr int PIECE = FORMAT == NIBBLES ? 32 : FORMAT == HALVES ? 8 : 16;
    const int warp = threadIdx.x / 32;
    float sum[4] = {}, more[4] = {};
    for (int k0 = 0; k0 < depth; k0 += PIECE) {
        const int end = min(k0 + PIECE, depth) - 1, own = k0 + (warp - k0 & WARPS - 1);
        const uint8* piece = ring + slot * SLOT;
        wait(&full[slot], phase, since);
#pragma unroll
        for (int i = 0; i < PIECE; i += WARPS)
            multiply_tile<FORMAT>(i / WARPS % 2 ? more : sum, piece + (min(own + i, end) - k0) * SIZE,
                                  own + i <= end ? h + (own + i) * 64 : zeros);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&empty[slot]);
        if (++slot == slots) slot = 0, phase ^= 1;
    }
    return {sum[0] + more[0], sum[2] + more[2], slot, phase};
}

__device__ int tiles(const Stack& w) { return (w.rows[0] + 15) / 16 + (w.rows[1] + 15) / 16 + (w.rows[2] + 15) / 16; }

// The first tile of the next product that this block has, where there are so many. A block that has none must not look
// for its input either, since the others do not wait for it before they send the next.
__device__ int dealt(const Block& b) {
    const int first = blockIdx.x - b.base;
    return first < 0 ? first + gridDim.x : first;
}

// This block's tiles of a product: tiles are dealt to the blocks in turn, on from where the phase before ended.
// done(row, value, lane) for each sum, by lanes 0 to 15 of a warp; row is -1 past a matrix's end.
template <class Done> __device__ void product(Block& b, const Stack& w, Done done) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count_all = tiles(w), blocks = gridDim.x;
    const int first = dealt(b);
    for (b.base += count_all; b.base >= blocks;) b.base -= blocks;
    for (int start = first; start < count_all; start += GROUP * blocks) {
        for (int i = 0; i < GROUP && start + i * blocks < count_all; ++i) {
            int tile = start + i * blocks, of = 0;
            while (tile >= (w.rows[of] + 15) / 16) tile -= (w.rows[of++] + 15) / 16;
            Sums sum;
            switch (w.format[of]) {
                case NIBBLES: sum = stream<NIBBLES>(b.ring, b.h, b.zeros, b.full, b.empty, b.m.slots, b.slot, b.phase,
                    w.depth, b.since); break;
                case BYTES: sum = stream<BYTES>(b.ring, b.h, b.zeros, b.full, b.empty, b.m.slots, b.slot, b.phase,
                    w.depth, b.since); break;
                case SIXTEENTHS: sum = stream<SIXTEENTHS>(b.ring, b.h, b.zeros, b.full, b.empty, b.m.slots, b.slot,
                    b.phase, w.depth, b.since); break;
                default: sum = stream<HALVES>(b.ring, b.h, b.zeros, b.full, b.empty, b.m.slots, b.slot, b.phase,
                    w.depth, b.since);
            }
            b.slot = sum.slot, b.phase = sum.phase;
            float* part = b.parts + (i * WARPS + warp) * 16 + lane / 4;
            if (lane % 4 == 0) part[0] = sum.upper, part[8] = sum.lower;
        }
        together();
        int tile = start + warp * blocks, of = 0, column = 0;
        if (warp < GROUP && tile < count_all && lane < 16) {
            while (tile >= (w.rows[of] + 15) / 16) tile -= (w.rows[of] + 15) / 16, column += w.rows[of++];
            float sum = 0;
            for (int i = 0; i < WARPS; ++i) sum += b.parts[(warp * WARPS + i) * 16 + lane];
            done(tile * 16 + lane < w.rows[of] ? column + tile * 16 + lane : -1, sum, lane);
        }
        if (start + GROUP * blocks < count_all) together();  // before the next tiles' sums overwrite these
    }
}

// After a warp's lanes have sent: one more arrival.
__device__ void sent(Block& b, int lane) {
    __syncwarp(0xFFFF);
    if (lane == 0) count(b.arrivals);
}

// The next exchange: who sends from here on marks its words so.
__device__ void turn_to(Block& b, int arrivals) { ++b.tag, b.due += arrivals; }

// The residual stream that a phase sent, each warp the values it will multiply.
__device__ void take_stream(Block& b, const uint64* words) {
    constexpr int ROUND = 32 / WARPS;  // words on their way at once: 2048
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = b.m.D, depth = (D + 63) / 64;
    for (int k0 = warp; k0 < depth; k0 += ROUND * WARPS) {
        uint64 two[ROUND][2];
#pragma unroll
        for (int i = 0; i < ROUND; ++i) {
            const int d = (k0 + i * WARPS) * 64 + lane * 2;
            if (d < D) get(words + d, two[i]);
        }
#pragma unroll
        for (int i = 0; i < ROUND; ++i) {
            const int d = (k0 + i * WARPS) * 64 + lane * 2;
            if (d >= D) continue;
            while (b.old(two[i][0]) || b.old(two[i][1])) get(words + d, two[i]);
            *(float2*)(b.x + d) = {__uint_as_float((uint32)two[i][0]), __uint_as_float((uint32)two[i][1])};
        }
    }
    __syncwarp();
}

// x normalized into h, each warp the values it will multiply.
__device__ void rms_norm(Block& b, const float* weight) {
    __shared__ float sums[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = b.m.D, depth = (D + 63) / 64;
    float sum = 0;
    for (int k = warp; k < depth; k += WARPS) {
        const int d = k * 64 + lane * 2;
        if (d < D) sum += b.x[d] * b.x[d] + b.x[d + 1] * b.x[d + 1];
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) sums[warp] = sum;
    arrived<0>();  // the norm's weights
    together();
    sum = 0;
    for (int i = 0; i < WARPS; ++i) sum += sums[i];
    const float by = rsqrtf(sum / D + b.m.eps);
    for (int k = warp; k < depth; k += WARPS) {
        const int d = k * 64 + lane * 2;
        const bool inside = d < D;
        ((half2*)b.h)[d / 2] = inside ? __floats2half2_rn(b.x[d] * by * weight[d], b.x[d + 1] * by * weight[d + 1]) :
            half2{};
    }
    __syncwarp();
}

// A norm's weights on their way to shared memory, once nobody needs the last.
__device__ void ask(Block& b, float* to, const float* weight) {
    together();
    for (int i = threadIdx.x; i < b.m.D / 4; i += WARPS * 32) copy(to + 4 * i, weight + 4 * i, true);
    commit();
}

// ---- the phases -----------------------------------------------------------------------------------------------------

// A logit and its row as a number to take the maximum of: the higher logit first, then the lower row.
__device__ uint64 rank(float logit, uint32 row) {
    const uint32 bits = __float_as_uint(logit);
    return (uint64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | ~row;
}

// Logits go to one of two rows, by position; after each row's V stands the best rank.
__device__ uint64* best(float* rows, int64 at, int V) { return (uint64*)(rows + ((at & 1) + 1) * ((V +
    3) / 2 * 2)) - 1; }

// The embedding of the token that the step before chose, and the turns of this position.
__device__ void begin(Block& b, float2* turns) {
    const uint32 token = ~(uint32)*best(b.m.rows, b.at - 1, b.m.output.rows[0]);
    const uint8* row = b.m.embedding + min(token, b.m.output.rows[0] - 1u) * b.m.row_bytes;
    for (int d = 8 * threadIdx.x; d < b.m.D; d += 8 * WARPS * 32) unpack_eight(b.m.kind, row, d, b.m.D, b.x + d);
    if (threadIdx.x < b.m.hd / 2) {
        const double half_turns = threadIdx.x < b.m.turned ? b.at * b.m.freqs[threadIdx.x] * 0.31830988618379067 : 0;
        float2 to;
        sincospif((float)(half_turns - 2 * rint(half_turns / 2)), &to.y, &to.x);  // whole turns off before rounding
        turns[threadIdx.x] = to;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *best(b.m.rows, b.at, b.m.output.rows[0]) = 0;
        __threadfence();
    }
    together();
}

__device__ void project_in(Block& b, const Layer& layer, bool first) {
    if (!first) b.wait(), take_stream(b, b.m.after_down);
    rms_norm(b, b.norm[0]);
    turn_to(b, tiles(layer.qkv));
    product(b, layer.qkv, [&](int row, float value, int lane) {
        if (row >= 0) put(b.m.qkv + row, b.tag, __float_as_uint(value));
        sent(b, lane);
    });
}

// What a lane knows of the keys it has seen: eight values of their weighted sum, the sum of weights, and the highest
// score.
struct Sight {
    float sum[8], most, total;

    template <int LANES> __device__ void see(const float* q, uint4 k8, uint4 v8, bool seen) {
        float score = 0;
        for (int i = 0; i < 8; ++i) score += q[i] * __half2float(((const half*)&k8)[i]);
        for (int step = LANES / 2; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        const float higher = seen ? fmaxf(most, score) : most, weight = seen ? exp2f(score - higher) : 0;
        const float keep = exp2f(most - higher);
        for (int i = 0; i < 8; ++i) sum[i] = sum[i] * keep + weight * __half2float(((const half*)&v8)[i]);
        total = total * keep + weight, most = higher;
    }
};

// A share of the positions for each head: what it sees there, and the logarithm of its weight.
template <int HD> __device__ void look(Block& b, const Layer& layer, const float2* turns) {
    constexpr int LANES = HD / 8, AT_ONCE = WARPS * 32 / LANES, EARLY = HD > 64 ? 4 : CHUNK / AT_ONCE;
    __shared__ __align__(16) half own[3][HD];  // this position's query, key and value
    __shared__ float mosts[WARPS], totals[WARPS];
    const Model& m = b.m;
    float (*sums)[HD] = (float (*)[HD])b.parts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, hd = m.hd, n = b.splits;
    const int group = threadIdx.x / LANES, d0 = threadIdx.x % LANES * 8, d = min(d0, hd - 8);
    const int64 width = m.G * hd, each = b.each;
    const uint32 came = b.tag;
    for (int unit = blockIdx.x; unit < n * m.H; unit += gridDim.x) {
        const int split = unit / m.H, head = unit % m.H, g = head / (m.H / m.G);
        const int64 low = split * each, high = min(low + each, b.at + 1);
        uint4 k8[EARLY], v8[EARLY];  // of the cache, before the phase before is over
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int64 from = min(low + group + i * AT_ONCE, b.at) * width + g * hd + d;
            k8[i] = *(const uint4*)(layer.keys + from), v8[i] = *(const uint4*)(layer.values + from);
        }
        if (threadIdx.x < 3 * hd / 2) {
            const int which = threadIdx.x / (hd / 2), pair = threadIdx.x % (hd / 2);
            const int from = which == 0 ? head : which == 1 ? m.H + g : m.H + m.G + g;
            uint64 two[2];
            do get(m.qkv + from * hd + pair * 2, two); while (b.old(two[0]) || b.old(two[1]));
            const float2 turn = which < 2 ? turns[pair] : float2{1, 0};
            const float a = __uint_as_float((uint32)two[0]), c = __uint_as_float((uint32)two[1]);
            const half2 turned = __floats2half2_rn(a * turn.x - c * turn.y, a * turn.y + c * turn.x);
            ((half2*)own[which])[pair] = turned;
            if (which && split == n - 1 && head % (m.H / m.G) == 0)  // one block of those that share a key
                ((half2*)((which == 1 ? layer.keys : layer.values) + b.at * width + g * hd))[pair] = turned;
        }
        together();
        const float scale = rsqrtf(hd) * 1.4426950408889634f;
        float q[8];
        for (int i = 0; i < 8; ++i) q[i] = d0 < hd ? __half2float(own[0][d0 + i]) * scale : 0;
        Sight sight = {{}, -1e38f, 0};
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int64 s = low + group + i * AT_ONCE;
            if (low + i * AT_ONCE >= high) break;
            // and no row unwritten
            if (s >= b.at) k8[i] = *(const uint4*)(own[1] + d), v8[i] = *(const uint4*)(own[2] + d);
            sight.see<LANES>(q, k8[i], v8[i], s < high);
        }
        for (int64 s = low + group + EARLY * AT_ONCE; s - group < high; s += AT_ONCE) {
            const int64 from = min(s, b.at) * width + g * hd + d;
            const bool cached = s < b.at;
            const uint4 key = *(const uint4*)(cached ? layer.keys + from : own[1] + d);
            sight.see<LANES>(q, key, *(const uint4*)(cached ? layer.values + from : own[2] + d), s < high);
        }
        for (int step = LANES; step < 32; step *= 2) {
            const float higher = fmaxf(sight.most, __shfl_xor_sync(~0u, sight.most, step)), keep =
                exp2f(sight.most - higher);
            for (int i = 0; i < 8; ++i) sight.sum[i] *= keep, sight.sum[i] += __shfl_xor_sync(~0u, sight.sum[i], step);
            sight.total *= keep, sight.total += __shfl_xor_sync(~0u, sight.total, step), sight.most = higher;
        }
        if (lane < LANES) for (int i = 0; i < 8; ++i) sums[warp][d0 + i] = sight.sum[i];
        if (lane == 0) mosts[warp] = sight.most, totals[warp] = sight.total;
        together();
        if (warp == 0) {
            float most = mosts[lane % WARPS], total = 0, part = most;
            for (int step = WARPS / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            part = exp2f(part - most), total = part * totals[lane % WARPS];
            for (int step = WARPS / 2; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
            if (lane < WARPS) mosts[lane] = part / total;
            __syncwarp();
            for (int pair = lane; pair < hd / 2; pair += 32) {
                float2 mixed = {};
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    const float2 two = *(const float2*)&sums[i][2 * pair];
                    mixed.x += two.x * mosts[i], mixed.y += two.y * mosts[i];
                }
                const half2 both = __floats2half2_rn(mixed.x, mixed.y);
                put(m.seen + (split * m.H + head) * (hd / 2) + pair, came + 1, *(const uint32*)&both);
            }
            if (lane == 0) put(m.shares + split * m.H + head, came + 1, __float_as_uint(most + log2f(total)));
            __syncwarp();
            if (lane == 0) count(b.arrivals);
        }
        together();  // before another unit takes this one's room
    }
    turn_to(b, n * m.H);
}

// Words of two halves each into h, each warp the values it will multiply.
__device__ void take_halves(Block& b, const uint64* words, int K) {
    constexpr int ROUND = 96 / WARPS;  // words on their way at once: 6144 halves
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, depth = (K + 63) / 64;
    for (int k0 = warp; k0 < depth; k0 += ROUND * WARPS) {
        uint64 word[ROUND];
#pragma unroll
        for (int i = 0; i < ROUND; ++i) {
            const int pair = (k0 + i * WARPS) * 32 + lane;
            if (pair * 2 < K) word[i] = get(words + pair);
        }
#pragma unroll
        for (int i = 0; i < ROUND; ++i) {
            const int pair = (k0 + i * WARPS) * 32 + lane;
            if (k0 + i * WARPS >= depth) continue;
            if (pair * 2 < K) while (b.old(word[i])) word[i] = get(words + pair);
            ((uint32*)b.h)[pair] = pair * 2 < K ? (uint32)word[i] : 0;
        }
    }
    __syncwarp();
}

// What the splits saw, each by its weight, into h.
__device__ void join(Block& b, int n) {
    const Model& m = b.m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, K = m.H * m.hd;
    for (int k = warp; k < (K + 63) / 64; k += WARPS) {
        const int pair = k * 32 + lane, head = pair / (m.hd / 2);
        uint64 word[SPLITS], share[SPLITS];
        float2 sum = {};
        float most = -1e38f, total = 0;
        if (pair * 2 < K) {
#pragma unroll
            for (int s = 0; s < SPLITS; ++s)
                if (s < n) word[s] = get(m.seen + s * (K / 2) + pair), share[s] = get(m.shares + s * m.H + head);
#pragma unroll
            for (int s = 0; s < SPLITS; ++s)
                if (s < n) {
                    while (b.old(word[s])) word[s] = get(m.seen + s * (K / 2) + pair);
                    while (b.old(share[s])) share[s] = get(m.shares + s * m.H + head);
                    most = fmaxf(most, __uint_as_float((uint32)share[s]));
                }
#pragma unroll
            for (int s = 0; s < SPLITS; ++s)
                if (s < n) {
                    const uint32 bits = (uint32)word[s];
                    const float weight = exp2f(__uint_as_float((uint32)share[s]) - most);
                    const float2 two = __half22float2(*(const half2*)&bits);
                    sum.x += weight * two.x, sum.y += weight * two.y, total += weight;
                }
        }
        ((half2*)b.h)[pair] = pair * 2 < K ? __floats2half2_rn(sum.x / total, sum.y / total) : half2{};
    }
    __syncwarp();
}

__device__ void project_out(Block& b, const Layer& layer) {
    const int n = b.splits;
    if (dealt(b) < tiles(layer.o)) {
        b.wait();
        if (n == 1) take_halves(b, b.m.seen, b.m.H * b.m.hd);
        else join(b, n);
    }
    turn_to(b, tiles(layer.o));
    product(b, layer.o, [&](int row, float value, int lane) {
        if (row >= 0) put(b.m.after_o + row, b.tag, __float_as_uint(b.x[row] + value));
        sent(b, lane);
    });
}

__device__ void gate_up(Block& b, const Layer& layer) {
    b.wait();
    take_stream(b, b.m.after_o);
    rms_norm(b, b.norm[1]);
    turn_to(b, tiles(layer.gate_up));
    product(b, layer.gate_up, [&](int row, float gate, int lane) {  // eight rows of gate above the same eight of up
        const float up = __shfl_down_sync(0xFFFF, gate, 8), value = gate / (1 + expf(-gate)) * up;
        const half2 both = __floats2half2_rn(value, __shfl_down_sync(0xFFFF, value, 1));
        const int f = row / 16 * 8 + lane;
        if (lane < 8 && lane % 2 == 0 && f < b.m.F) put(b.m.act + f / 2, b.tag, *(const uint32*)&both);
        sent(b, lane);
    });
}

__device__ void down(Block& b, const Layer& layer) {
    if (dealt(b) < tiles(layer.down)) b.wait(), take_halves(b, b.m.act, b.m.F);
    turn_to(b, tiles(layer.down));
    product(b, layer.down, [&](int row, float value, int lane) {
        if (row >= 0) put(b.m.after_down + row, b.tag, __float_as_uint(b.x[row] + value));
        sent(b, lane);
    });
}

__device__ void vocabulary(Block& b) {
    const int V = b.m.output.rows[0];
    float* row_of = b.m.rows + (b.at & 1) * ((V + 3) / 2 * 2);
    b.wait();
    take_stream(b, b.m.after_down);
    rms_norm(b, b.norm[0]);
    product(b, b.m.output, [&](int row, float logit, int lane) {
        if (row >= 0) row_of[row] = logit, b.best = max(b.best, rank(logit, row));
    });
    for (int step = 16; step; step /= 2) b.best = max(b.best, __shfl_xor_sync(~0u, b.best, step));
    if (b.late()) b.best = ~0ull;
    if (threadIdx.x % 32 == 0 && b.best) atomicMax(best(b.m.rows, b.at, V), b.best);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
step(const Model* model, int64 at, uint32 tag, int parity) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) uint64 full[16], empty[16];
    __shared__ __align__(16) Model m;
    __shared__ __align__(16) Layer layers[3];  // this one, the next, and the last, which a warp may still read
    __shared__ float2 turns[64];
    __shared__ __align__(16) half zeros[64];
    if (threadIdx.x < 64) zeros[threadIdx.x] = half(0);
    for (int i = threadIdx.x; i < sizeof(Model) / 4; i += blockDim.x) ((uint32*)&m)[i] = ((const uint32*)model)[i];
    __syncthreads();
    for (int i = threadIdx.x; i < sizeof(Layer) / 4; i += blockDim.x) ((uint32*)layers)[i] =
        ((const uint32*)m.layers)[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < m.slots; ++i) prepare(&full[i], 1), prepare(&empty[i], WARPS);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine must see the barriers too
        if (blockIdx.x == 0) m.arrivals[parity ^ 1] = 0;
    }
    __syncthreads();
    const int wide = (m.D + 63) / 64 * 64, n = min((int)SPLITS, (int)at / CHUNK + 1);
    uint8* ring = (uint8*)shared;
    float* room = (float*)(ring + m.slots * SLOT);
    Block b = {m, at, clock64(), nanoseconds(), m.arrivals + parity, tag, 0, 0, 0, 0, n, (int)(at + n) / n, ring, room,
               {room + wide, room + 2 * wide}, room + 3 * wide, (half*)(room + 3 * wide + GROUP * WARPS * 16), zeros,
                   full, empty, 0};
    if (threadIdx.x >= WARPS * 32) {  // the warp that copies
        const int lane = threadIdx.x % 32, pieces = m.counts[blockIdx.x];
        ulonglong2 piece;
        for (int i = 0; i < pieces; ++i) {
            if (i % 32 == 0 && i + lane < pieces) piece = m.pieces[blockIdx.x * (int64)m.most + i + lane];
            const uint64 from = __shfl_sync(~0u, piece.x, i % 32), bytes = __shfl_sync(~0u, piece.y, i % 32);
            const int slot = i % m.slots;
            if (i >= m.slots) wait(&empty[slot], (i / m.slots - 1) & 1, b.since);
            if (lane == 0) fetch(ring + slot * SLOT, from, (uint32)bytes, &full[slot]);
        }
        return;
    }
    ask(b, b.norm[0], layers[0].attn_norm), ask(b, b.norm[1], layers[0].ffn_norm);
    begin(b, turns);
    b.mark(0);
    for (int l = 0; l < m.L; ++l) {
        const Layer& layer = layers[l % 3];
        const bool last = l + 1 == m.L;
        if (!last) for (int i = threadIdx.x; i < sizeof(Layer) / 4; i += WARPS * 32)
            ((uint32*)&layers[(l + 1) % 3])[i] = ((const uint32*)(m.layers + l + 1))[i];
        project_in(b, layer, l == 0);
        b.mark(1);
        if (m.hd <= 64) look<64>(b, layer, turns);
        else look<128>(b, layer, turns);
        b.mark(2);
        project_out(b, layer);
        b.mark(3);
        ask(b, b.norm[0], last ? m.output_norm : layers[(l + 1) % 3].attn_norm);
        gate_up(b, layer);
        b.mark(4);
        if (!last) ask(b, b.norm[1], layers[(l + 1) % 3].ffn_norm);
        down(b, layer);
        b.mark(5);
    }
    vocabulary(b);
    b.mark(6);
}
"""
)
STEP_PROGRAM = Program(STEP, STEP_OPTIONS, ARCHS, cooperative=True)


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
    rows: Any  # (2, V + 2 or 3) float32: logits of the last step of even and of odd position, and the best one's rank
    graphs: dict  # by prompt length: (graph, its ids, position, result), at most KEPT
    step: Any  # the Model struct of the kernel that computes a token
    kept: list  # what it points to
    launches: list  # how many there were, in its only element
    stamps: Any  # (len(PHASES), 2) int64: nanoseconds and calls so far
    blocks: int  # of that kernel, and
    shared: int  # the bytes of shared memory that each asks for
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
    state = State(cache, rows, {}, *stepping(config, weights, cache, rows), cupy.cuda.MemoryPool(), *streams)
    cupy.cuda.Device().synchronize()
    return Model(config, weights, state)


def pieces(stacks, blocks):
    """What each block copies in a step, in order: for each block a list of (stack, matrix, first byte, bytes).

    Tiles of 16 rows are dealt to the blocks in turn, from one stack on to the next; a row of tiles is copied in pieces
    that fit a slot of the ring.
    """
    found, base = [[] for _ in range(blocks)], 0
    for number, w in enumerate(stacks):
        whole = [(m, tile) for m, count in enumerate(w.counts) for tile in range(count)]
        for i, (m, tile) in enumerate(whole):
            form = w.formats[m]
            size, many = TILE_BYTES[form], PIECE[form]
            for k in range(0, w.depth, many):
                piece = number, m, (tile * w.depth + k) * size, min(many, w.depth - k) * size
                found[(base + i) % blocks].append(piece)
        base = (base + len(whole)) % blocks
    return found


def stepping(config, weights, cache, rows):
    """The Model struct of the step's kernel, what it points to, and what else State keeps of it."""
    import cupy

    D, F, H, G, hd = config.D, config.F, config.H, config.G, config.hd
    stacks = [w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    blocks = min(processors(), *(sum(layer.gate_up.counts) for layer in weights.layers))  # each has its part in gate_up
    lists = pieces([*stacks, weights.output], blocks)
    most = max(map(len, lists))
    table = np.zeros((blocks, most, 2), np.uint64)
    for row, of in zip(table, lists, strict=True):
        for entry, (number, m, first, size) in zip(row, of, strict=False):
            entry[:] = [*stacks, weights.output][number].packed[m].data.ptr + first, size
    layers = np.zeros((config.L, 256), np.uint8)
    for row, layer, (keys, values) in zip(layers, weights.layers, cache, strict=True):
        row[:224] = np.concatenate([w.stack.view(np.uint8) for w in (layer.qkv, layer.o, layer.gate_up, layer.down)])
        row[224:].view(np.int64)[:] = [a.data.ptr for a in (layer.attn_norm, layer.ffn_norm, keys, values)]
    stamps = cupy.zeros((len(PHASES), 2), np.int64)
    words = ((H + 2 * G) * hd, SPLITS * H * hd // 2, SPLITS * H, D, F // 2, D)
    exchanges = [cupy.zeros(-(-size // 2) * 2, np.uint64) for size in words]
    V, _, kind, length, size, raw = weights.token_embd
    arrays = [cupy.asarray(layers), raw, config.rope_freqs, weights.output_norm, rows, *exchanges]
    arrays += [cupy.zeros(2, np.uint32), stamps, cupy.asarray(table), cupy.asarray([len(of) for of in lists], np.int32)]
    widest, wide = 64 * max(w.depth for w in (*stacks, weights.output)), 64 * deep(D)
    room = 12 * wide + 64 * GROUP * WARPS + 2 * widest
    slots = min(16, (SHARED - room) // SLOT)
    if slots < 2:
        raise StageError(f"a model as wide as {D} and {F} leaves no room in shared memory for weights: run graph", 1)
    model = np.concatenate([
        np.array([*(a.data.ptr for a in arrays), D // length * size], np.int64).view(np.uint8),
        weights.output.stack.view(np.uint8),
        np.array([config.L, D, F, H, G, hd, len(config.rope_freqs), kind, most, slots], np.int32).view(np.uint8),
        np.array([config.eps, 0], np.float32).view(np.uint8),
    ])  # fmt: skip
    return cupy.asarray(model), [arrays, stacks], [0], stamps, blocks, slots * SLOT + room


def stamps(model):
    """(len(PHASES), 2) int64 on the GPU: nanoseconds that each phase of a step took so far, and how often it ran."""
    return model.cache.stamps


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
            del state.graphs[next(iter(state.graphs))]
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


def follow(model, token, at):
    """Let the next step be that of `token` after position at, whatever ran before."""
    state = model.cache
    with state.stream:
        state.rows[at & 1, -2:].set(np.array([~token & 0xFFFFFFFF | 1 << 63], np.uint64).view(np.float32))


def queue(model, at, row):
    """Queue the step of position at and the copy of its logits to `row` (V + 2 or 3,); -> an event after both."""
    state = model.cache
    with state.stream:
        tag = state.launches[0] * (5 * model.config.L + 1) % 2**32
        args = state.step, np.int64(at), np.uint32(tag), np.int32(state.launches[0] & 1)
        STEP_PROGRAM.launch("step", state.blocks, 32 * WARPS + 32, args, state.shared)
        state.launches[0] += 1
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
        done = queue(model, first, landing[first & 1])
    for at in range(first, last):
        after = queue(model, at + 1, landing[at + 1 & 1]) if at + 1 < last else None
        done.synchronize()
        if landing[at & 1, -2:].view(np.uint64)[0] == 2**64 - 1:
            raise StageError(f"the kernel of position {at} was stuck for {PATIENCE:.0e} cycles and gave up", 1)
        row, (guess,) = landing[at & 1, :V].copy(), ~landing[at & 1, -2:].view(np.uint64) & 0xFFFFFFFF
        token = choose(row)
        if after and token != guess:
            follow(model, token, at)
            after = queue(model, at + 1, landing[at + 1 & 1])
        done = after
        yield token, row
