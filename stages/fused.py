"""Fused: a token as one kernel, whose weights keep streaming into shared memory while its blocks wait for each other.

Idea    Do not let the memory rest while blocks wait for each other.
Was     A graph's kernel asks for its weights when it starts, and it starts when those before it leave room: the memory
        is idle while the last block of one ends, and while activations travel to the next.
Change  One block a processor stays for the whole token. Each of its warps has a stream of weights of its own, in the
        order in which it multiplies them, and a ring in shared memory: what it has read it replaces at once by what
        comes next, whatever phase that is. A block keeps what only it has made: what a head sees is multiplied by
        its columns of the output projection, and SwiGLU's values by their columns of down. Three times a layer blocks
        exchange something, q, k and v or a sum, as words that say themselves whether they are complete: there is no
        barrier. Only where a long context is shared out among a head's blocks is there a fourth time.
Expect  A token takes the time to read all weights or, where that is longer, three exchanges a layer, each of which is
        two trips to the L2 cache and what a block does between the last word it needs and the first that it sends.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common import cuda_streams
from common.cpu_ops import argmax
from common.cuda import Program, processors
from common.cuda_streams import STREAMS, WARPS, Cut
from common.cuda_tiles import TILES, Tiles, deep, pack, pack_pairs, tile_bytes
from common.gguf import GGUFError
from common.gpu import cache_bytes, ready
from common.model import Weights
from common.quants import dequantize
from common.stage import Model, StageError

PREVIOUS = "graph"
CHANGES = (
    "WARPS", "CHUNK", "OPTIONS", "STEP_OPTIONS", "SOURCE", "STEP.late", "STEP.fill", "STEP.arrive", "STEP.leave",
    "STEP.value_of", "STEP.fixed", "STEP.unfixed", "STEP.arrived", "STEP.own", "STEP.to_bytes", "STEP.take",
    "STEP.tile_by_rows", "STEP.product_by_rows", "STEP.add_columns", "STEP.product_by_columns", "STEP.rank",
    "STEP.best", "STEP.begin", "STEP.project_in", "STEP.take_turned", "STEP.over_warps", "STEP.over_blocks",
    "STEP.look", "STEP.project_out", "STEP.gate_up", "STEP.down", "STEP.vocabulary", "STEP.step", "State", "load",
    "captured", "follow", "queue", "generate", "SOURCE.wait_for_last", "SOURCE.let_next_come", "SOURCE.floats",
    "SOURCE.bare", "SOURCE.multiply_tile", "SOURCE.multiply_tiles", "SOURCE.dots", "SOURCE.four", "SOURCE.rank",
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
PHASES = ("begin", "project_in", "look", "gate_up", "down", "vocabulary")
ARCHS = ("sm_90",)
OPERANDS = "float16"

THREADS = 256  # eight warps: in matmul four times 32 rows, twice half the tokens
WIDE = 1024  # threads of rms_norm, so that a row is all on its way at once
FEW = 64  # tokens of a tile where there are no more, and
MANY = 128  # where there are: a weight read serves up to so many
STAGES = 3  # slots in matmul's ring: two on their way while one is multiplied
KEPT = 16  # graphs at most: the prompt length captured first goes
PARTS = 8  # blocks at most that share out the k's of one tile
HEADS = (64, 128)  # head sizes that attention is compiled for
BLOCKS = 128  # at most of a token's kernel, one a processor: a number that divides what models have of most things
CHUNK = 256  # positions from which on a head's blocks share them out
PATIENCE = 2 * 10**9  # cycles, about a second: a kernel that takes longer is stuck, and ends with an error
TILE = 8 * THREADS  # values of an embedding row that a block unpacks at a time
OPTIONS = (f"-DTHREADS={THREADS}", f"-DWIDE={WIDE}", f"-DTILE={TILE}", f"-DSTAGES={STAGES}")
STEP_OPTIONS = Cut(2048, 5632, 32, 4, 64, 32000, 22, BLOCKS).options  # of TinyLlama's shape: a model has its own

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

STEP = (
    STREAMS
    + f"constexpr int CHUNK = {CHUNK};\nconstexpr int64 PATIENCE = {PATIENCE};\n"
    + r"""
// The model's dimensions and how they are dealt, as Cut in common/cuda_streams.py tells: D = 2048, F = 5632, ...
constexpr int CUT;
constexpr int TALL = (D + 15) / 16 * 16, WIDE = 128 * CHUNKS * ACTIVE, ROW = (V + 3) / 2 * 2;  // floats, padded

struct Layer {
    const float *attn_norm, *ffn_norm;
    half *keys, *values;
    int q, k, v, o, gate_up, down;  // formats
};

struct Model {
    Layer layers[L];
    const uint8 *embedding, *streams;
    const double* freqs;
    const float* output_norm;
    float* rows;
    uint64 *qkv, *joined;  // words: the number of their layer above 32 bits of a float
    uint64* sums;  // (2, 2, TALL): of even and odd launches, what o and what down have added to the residual stream
    uint32* arrivals;  // (2, 2): of even and odd launches, how often a block has added to those
    int64 *stamps, row_bytes, stride;
    int kind, output, turned;
    float eps;
};

__device__ bool late(int64 since) { return clock64() - since > PATIENCE; }

// ---- the ring: a warp's stream of weights, SLOTS pieces of it in shared memory or on their way ----------------------

// A warp's own, which no other waits for: it reads a piece, and at once asks for the one that takes its place, whatever
// phase that belongs to. So while blocks wait for each other the next weights keep coming, up to SLOTS pieces.
struct Ring {
    uint8* slots;
    uint64* full;  // a barrier for each slot: has what was asked for come?
    const uint8* stream;  // what to ask for next
    int64 since;
    int slot, phase;  // of what is read next; a barrier's phase turns over each time round
};

// Ask for the first pieces.
__device__ void fill(Ring& r) {
    const int lane = threadIdx.x % 32;
    const uint32 size = lane < SLOTS ? ((const uint32*)r.stream)[lane] : 0;
    r.stream += HEADER;
    if (lane < SLOTS) prepare(&r.full[lane]);
    prepared();
    __syncwarp();
    for (int i = 0; i < SLOTS; ++i) {
        const uint32 bytes = __shfl_sync(~0u, size, i);
        if (lane == 0 && bytes) fetch(r.slots + i * PIECE, r.stream, bytes, &r.full[i]);
        r.stream += bytes;
    }
}

// The next piece, once it has come.
__device__ const uint8* arrive(Ring& r) {
    while (!passed(&r.full[r.slot], r.phase) && !late(r.since)) {}
    return r.slots + r.slot * PIECE;
}

// All lanes hold what they need of it: ask for the piece that takes its place, whose length stands after it.
__device__ void leave(Ring& r, int size) {
    uint8* slot = r.slots + r.slot * PIECE;
    const uint32 bytes = *(const uint32*)(slot + size);
    __syncwarp();
    if (threadIdx.x % 32 == 0 && bytes) fetch(slot, r.stream, bytes, &r.full[r.slot]);
    r.stream += bytes;
    if (++r.slot == SLOTS) r.slot = 0, r.phase ^= 1;
}

// ---- a block, and what it exchanges with others ---------------------------------------------------------------------

enum { BEGIN, PROJECT_IN, LOOK, GATE_UP, DOWN, VOCABULARY };
enum { AFTER_O, AFTER_DOWN };  // the two sums that all blocks add to and wait for

struct Block {
    const Model& m;
    const int warp;
    const int64 at, since;  // position, and the clock at the start
    int64 stamp;
    uint32 tag;  // the number of the layer, over all launches
    uint64* sums;  // of this launch, as arrivals
    uint32* arrivals;
    float *parts, *embedded;  // in shared memory: sums of each warp, the token's embedding
    Ring ring;

    __device__ bool late() const { return ::late(since); }
    __device__ uint64 word(float value) const { return (uint64)tag << 32 | __float_as_uint(value); }
    __device__ bool old(uint64 word) const { return (uint32)(word >> 32) != tag && !late(); }
    __device__ void mark(int phase) {  // the first thread of all stamps the clock
        if (blockIdx.x || threadIdx.x) return;
        const int64 now = nanoseconds();
        m.stamps[2 * phase] += now - stamp, ++m.stamps[2 * phase + 1], stamp = now;
    }
};

__device__ float value_of(uint64 word) { return __uint_as_float((uint32)word); }

// Sums that many blocks add to have words of 64 bits: 56 of a number in units of 2^-28, whose sum is the same in any
// order, and eight that count who has added. So a word says itself whether it is complete.
__device__ uint64 fixed(float value) { return ((uint64)__float2ll_rn(value * 268435456) << 8) + 1; }
__device__ float unfixed(uint64 word) {
    const float fraction = __uint_as_float(0x3F800000 | (uint32)word >> 9) - 1;
    return ((float)(int)(word >> 32) + fraction) * 0.0625f;
}
static_assert(BLOCKS < 256 && BLOCKS <= (F + 15) / 16, "eight bits count who has added, and every block adds");

// This block has added all that it has to. No fence: the count only says when looking is worthwhile.
__device__ void arrived(Block& b, int which) {
    __syncthreads();
    if (threadIdx.x == 0) count(b.arrivals + which);
}

// A lane's own values of the residual stream, four that lie together at a time: each(chunk, which of eight, k).
template <class Each> __device__ __forceinline__ void own(const Block& b, Each each) {
    const int warp = b.warp, lane = threadIdx.x % 32, k0 = warp * CHUNKS * 128 + lane / 8 * 32 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int k = k0 + i * 128 + j * 16;
            if ((ACTIVE == WARPS || warp < ACTIVE) && k < D) each(i, 4 * j, k);
        }
}

// A warp's k's of a normed residual stream, as its lanes multiply them: bytes times `by`, and sums for 16 k's each.
struct Rows { uint32 b[CHUNKS][8]; Sums of[CHUNKS][2]; float by; };

__device__ __forceinline__ void to_bytes(Rows& x, const float (*value)[8], float most) {
    x.by = most / MOST;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32 four = bytes_of(value[i] + 4 * j, most > 0 ? MOST / most : 0);
#pragma unroll
            for (int u = 0; u < 4; ++u) x.b[i][2 * u + j] = threadIdx.x % 32 / 8 == u ? four : 0;
            const uint32 column[4] = {x.b[i][j], x.b[i][2 + j], x.b[i][4 + j], x.b[i][6 + j]};
            x.of[i][j] = sums_of<4>(column);
        }
}

// The residual stream is embedding + o's sum + down's sum, both over all layers so far. Waits for the one that has just
// been added to; `rest` is what the other two come to. adders: how often each word has been added to.
__device__ void take(Block& b, Rows& x, float (*rest)[8], float* squares, int which, uint32 arrivals, uint32 adders,
                     const float* norm) {
    const int warp = b.warp, lane = threadIdx.x % 32;
    const uint64* words = b.sums + which * TALL;
    float weight[CHUNKS][8] = {}, most = 0, square = 0;
    own(b, [&](int i, int v, int k) { *(float4*)(weight[i] + v) = *(const float4*)(norm + k); });
    uint64 word[CHUNKS][8] = {};
    if (arrivals) {  // not before the first layer
        if (threadIdx.x == 0) while ((int)(counted(b.arrivals + which) - arrivals) < 0 && !b.late()) {}
        __syncthreads();  // one thread of a block looks: more would stand in the way of those that add
        bool complete;
        do {
            own(b, [&](int i, int v, int k) { get(words + k, word[i] + v), get(words + k + 2, word[i] + v + 2); });
            complete = true;
            own(b, [&](int i, int v, int k) {
                for (int n = v; n < v + 4; ++n) complete &= ((word[i][n] ^ adders) & 255) == 0;
            });
        } while (!complete && !b.late());
    }
    float value[CHUNKS][8] = {};
    own(b, [&](int i, int v, int k) {
        const float4 from = *(const float4*)(b.embedded + k);
        const float start[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float added = unfixed(word[i][v + n]), now = rest[i][v + n] + added;
            if (arrivals) rest[i][v + n] = start[n] + added;
            square += now * now;
            value[i][v + n] = now * weight[i][v + n];
            most = fmaxf(most, fabsf(value[i][v + n]));
        }
    });
    for (int step : {1, 2, 8, 16}) square += __shfl_xor_sync(~0u, square, step);  // lane ^ 4 has the same values
    if (lane == 0) squares[warp] = square;
    to_bytes(x, value, highest(most));
}

// ---- products -------------------------------------------------------------------------------------------------------

// By rows: a tile of 16 rows by this warp's k's.
__device__ __forceinline__ float tile_by_rows(Block& b, const Rows& x, int format) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (format == NIBBLES) {  // one share of eight units, two of which have one scale
            Share<NIBBLES, 8> share;
            share.load(arrive(b.ring));
            leave(b.ring, SHARE);
            share.multiply(sum, x.b[i], {x.of[i][0].high + x.of[i][1].high, x.of[i][0].low + x.of[i][1].low});
            continue;
        }
        for (int plane = 0; plane < format; ++plane)  // two shares of four units, and of HALVES again the low bytes
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32 four[4] = {x.b[i][j], x.b[i][2 + j], x.b[i][4 + j], x.b[i][6 + j]};
                Share<BYTES, 4> share;
                share.load(arrive(b.ring));
                leave(b.ring, SHARE);
                if (format == BYTES) share.multiply(sum, four, x.of[i][j]);
                else ((Share<HALVES, 4>&)share).multiply(sum, four, x.of[i][j]);
            }
    }
    return over_lanes(sum, format) * x.by;
}

// This block's `mine` tiles by x, summed over warps: done(i, row, value), for four lanes each; a warp has rows r to
// r + 3 and r + 8 to r + 11. What RMS norm divides by comes last, from the squares of all warps.
template <class Format, class Done>
__device__ void product_by_rows(Block& b, const Rows& x, const float* squares, int mine, Format format, Done done) {
    const int warp = b.warp, lane = threadIdx.x % 32;
    for (int start = 0; start < mine; start += GROUP) {
        const int count = min(GROUP, mine - start);
        if (ACTIVE == WARPS || warp < ACTIVE) for (int i = 0; i < count; ++i) {
            const float value = tile_by_rows(b, x, format(start + i));
            if (lane % 4 < 2) b.parts[(i * WARPS + warp) * 16 + lane % 2 * 8 + lane / 4] = value;
        }
        __syncthreads();
        if (warp / 2 < count) {  // half a tile a warp, and four lanes a row
            const int i = warp / 2, row = lane / 4 % 4 + warp % 2 * 4 + lane / 16 * 8;
            float sum = 0, square = 0;
#pragma unroll
            for (int n = 0; n < (ACTIVE + 3) / 4; ++n) {
                const int w = lane % 4 + 4 * n;
                if (ACTIVE % 4 && w >= ACTIVE) continue;
                sum += b.parts[(i * WARPS + w) * 16 + row], square += squares[w];
            }
            for (int step = 1; step < 4; step *= 2)
                sum += __shfl_xor_sync(~0u, sum, step), square += __shfl_xor_sync(~0u, square, step);
            done(start + i, row, sum * rsqrtf(square / D + b.m.eps));
        }
        if (start + GROUP < mine) __syncthreads();  // before the next tiles' sums overwrite these
    }
}

// By columns: `tiles` tiles of 16 rows by the k's x that this block has made, EVERY for each warp, added to everyone's
// sums.
template <int FORMAT, int UNITS, int PASSES, int EVERY>
__device__ __forceinline__ void add_columns(Block& b, const uint32 (*x)[UNITS], const Sums* of, float by, uint64* to,
                                            int tile0, int tiles) {
    constexpr int SIZE = Share<FORMAT, UNITS>::SIZE, FIT = SHARE / SIZE, AT_ONCE = EVERY < FIT ? EVERY : FIT;
    constexpr int TURNS = (EVERY + AT_ONCE - 1) / AT_ONCE;
    const int warp = b.warp, lane = threadIdx.x % 32;
    for (int i = 0; i < TURNS; ++i) {
        const int turn = (i + blockIdx.x) % TURNS;  // not all blocks to the same words
        float sum[AT_ONCE][2] = {};
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
            for (int plane = 0; plane < (FORMAT == HALVES ? 2 : 1); ++plane) {
                Share<FORMAT, UNITS> share[AT_ONCE];
                const uint8* piece = arrive(b.ring);
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) share[t].load(piece + t * SIZE);
                leave(b.ring, AT_ONCE * SIZE);
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) share[t].multiply(sum[t], x[pass], of[pass]);
            }
#pragma unroll
        for (int t = 0; t < AT_ONCE; t += 2) {  // two tiles: all lanes have something to add
            float value[2] = {};
            for (int s = 0; s < 2 && t + s < AT_ONCE; ++s) value[s] = over_lanes(sum[t + s], FORMAT) * by;
            const int second = lane / 2 % 2, tile = (turn * AT_ONCE + t + second) * WARPS + warp;
            const int row = (tile0 + tile) * 16 + lane % 2 * 8 + lane / 4;
            if (t + second < AT_ONCE && tile < tiles) add(to + row, fixed(second ? value[1] : value[0]));
        }
    }
}

// The same from x (PASSES * UNITS, 16), in shared memory.
template <int UNITS, int PASSES, int EVERY>
__device__ __forceinline__ void product_by_columns(Block& b, int format, const float* x, uint64* to, int tile0,
                                                   int tiles) {
    const int lane = threadIdx.x % 32, u = lane / 8;
    float mine[PASSES][4], most = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        *(float4*)mine[pass] = *(const float4*)(x + (pass * UNITS + min(u, UNITS - 1)) * 16 + lane % 4 * 4);
        for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(mine[pass][i]));
    }
    most = highest(most);
    uint32 bytes[PASSES][UNITS];
    Sums of[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const uint32 four = bytes_of(mine[pass], most > 0 ? MOST / most : 0);
#pragma unroll
        for (int i = 0; i < UNITS; ++i) bytes[pass][i] = u == i ? four : 0;
        of[pass] = sums_of<UNITS>(bytes[pass]);
    }
    const float by = most / MOST;
    switch (format) {
        case NIBBLES: return add_columns<NIBBLES, UNITS, PASSES, EVERY>(b, bytes, of, by, to, tile0, tiles);
        case BYTES: return add_columns<BYTES, UNITS, PASSES, EVERY>(b, bytes, of, by, to, tile0, tiles);
        default: return add_columns<HALVES, UNITS, PASSES, EVERY>(b, bytes, of, by, to, tile0, tiles);
    }
}

// ---- the phases -----------------------------------------------------------------------------------------------------

// A logit and its row as a number to take the maximum of: the higher logit first, then the lower row.
__device__ uint64 rank(float logit, uint32 row) {
    const uint32 bits = __float_as_uint(logit);
    return (uint64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | ~row;
}

// Logits go to one of two rows, by position; after each row's V stands the best rank.
__device__ uint64* best(float* rows, int64 at) { return (uint64*)(rows + ((at & 1) + 1) * ROW) - 1; }

// The embedding of the token that the step before chose, and the turns of this position; zeros for the launch after.
__device__ void begin(Block& b, float2* turns, int parity) {
    const uint32 token = ~(uint32)*best(b.m.rows, b.at - 1);
    const uint8* row = b.m.embedding + min(token, V - 1u) * b.m.row_bytes;
    for (int d = 8 * threadIdx.x; d < WIDE; d += 8 * WARPS * 32) {
        *(float4*)(b.embedded + d) = *(float4*)(b.embedded + d + 4) = {};
        if (d < D) unpack_eight(b.m.kind, row, d, D, b.embedded + d);
    }
    if (threadIdx.x < HD / 2) {
        const double half_turns = threadIdx.x < b.m.turned ? b.at * b.m.freqs[threadIdx.x] * 0.31830988618379067 : 0;
        float2 to;
        sincospif((float)(half_turns - 2 * rint(half_turns / 2)), &to.y, &to.x);  // whole turns off before rounding
        turns[threadIdx.x] = to;
    }
    for (int i = blockIdx.x * WARPS * 32 + threadIdx.x; i < 2 * TALL; i += BLOCKS * WARPS * 32)
        b.m.sums[(parity ^ 1) * 2 * TALL + i] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        b.m.arrivals[(parity ^ 1) * 2] = b.m.arrivals[(parity ^ 1) * 2 + 1] = 0;
        *best(b.m.rows, b.at) = 0;
        __threadfence();
    }
    __syncthreads();
}

// Tiles of q, k and v, dealt from the last block on, since the first ones may have a unit of gate_up more.
__device__ void project_in(Block& b, const Rows& x, const float* squares, const Layer& layer) {
    constexpr int QUERIES = (H * HD + 15) / 16, KEYS = (G * HD + 15) / 16, ALL = QUERIES + 2 * KEYS;
    const int first = BLOCKS - 1 - blockIdx.x;
    product_by_rows(b, x, squares, (ALL - first + BLOCKS - 1) / BLOCKS, [&](int i) {
        const int tile = first + i * BLOCKS;
        return tile < QUERIES ? layer.q : tile < QUERIES + KEYS ? layer.k : layer.v;
    }, [&](int i, int row, float value) {
        int tile = first + i * BLOCKS, rows = H * HD, column = 0;
        if (tile >= QUERIES) tile -= QUERIES, column = rows, rows = G * HD;
        if (tile >= KEYS && column) tile -= KEYS, column += rows;
        if (threadIdx.x % 4 == 0 && tile * 16 + row < rows) put(b.m.qkv + column + tile * 16 + row, b.word(value));
    });
}

// Of a position's HD values a lane has eight, so a group of LANES lanes sees one position; all GROUPS of a block see as
// many at once, and EARLY times as many are on their way together.
constexpr int HEAD = HD <= 64 ? 64 : 128, LANES = HEAD / 8, GROUPS = WARPS * 32 / LANES, EARLY = HD <= 64 ? 5 : 2;
constexpr float LOWEST = -1e38f, UNSEEN = -3e38f;  // 2^(UNSEEN - LOWEST) is 0

// What a lane knows of the keys it has seen: eight values of their weighted sum, the sum of weights, the highest score.
struct Sight {
    float sum[8], most, total;

    // EARLY keys and values: those of positions first, first + GROUPS ... below high; the warp's begin at start
    __device__ void see(const float* q, const uint4* k8, const uint4* v8, int64 first, int64 start, int64 high) {
        float score[EARLY];
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            score[i] = UNSEEN;
            if (start + i * GROUPS >= high) continue;
            score[i] = 0;
            for (int n = 0; n < 8; ++n) score[i] += q[n] * __half2float(((const half*)&k8[i])[n]);
            for (int step = LANES / 2; step; step /= 2) score[i] += __shfl_xor_sync(~0u, score[i], step);
            if (first + i * GROUPS >= high) score[i] = UNSEEN;
        }
        float higher = most;
#pragma unroll
        for (int i = 0; i < EARLY; ++i) higher = fmaxf(higher, score[i]);
        keep(higher);
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            if (start + i * GROUPS >= high) continue;
            const float weight = exp2f(score[i] - higher);
            total += weight;
            for (int n = 0; n < 8; ++n) sum[n] += weight * __half2float(((const half*)&v8[i])[n]);
        }
    }
    __device__ void keep(float higher) {
        const float by = exp2f(most - higher);
        for (int n = 0; n < 8; ++n) sum[n] *= by;
        total *= by, most = higher;
    }
    __device__ void join() {  // over the lanes of a warp that have seen other keys
        float higher = most;
        for (int step = LANES; step < 32; step *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, step));
        keep(higher);
        for (int step = LANES; step < 32; step *= 2) {
            total += __shfl_xor_sync(~0u, total, step);
            for (int n = 0; n < 8; ++n) sum[n] += __shfl_xor_sync(~0u, sum[n], step);
        }
    }
};

// This position's query, key and value of a head, as soon as they have been sent: turned, to shared memory.
__device__ void take_turned(Block& b, float* q, half* key, half* value, int head, const float2* turns) {
    if (threadIdx.x >= 3 * HD / 2) return;
    const int which = threadIdx.x / (HD / 2), pair = threadIdx.x % (HD / 2), g = head / (H / G);
    const int from = which == 0 ? head : which == 1 ? H + g : H + G + g;
    uint64 two[2];
    do get(b.m.qkv + from * HD + pair * 2, two); while (b.old(two[0]) || b.old(two[1]));
    const float2 turn = which < 2 ? turns[pair] : float2{1, 0};
    const float x = value_of(two[0]), y = value_of(two[1]);
    const float2 turned = {x * turn.x - y * turn.y, x * turn.y + y * turn.x};
    const float scale = rsqrtf(HD) * 1.4426950408889634f;  // and exp is exp2 of it
    if (which == 0) ((float2*)q)[pair] = {turned.x * scale, turned.y * scale};
    else ((half2*)(which == 1 ? key : value))[pair] = __floats2half2_rn(turned.x, turned.y);
}

// Value d of a head's weighted sum (x) and the sum of weights (y), over all warps: for four lanes each.
__device__ float2 over_warps(const float (*sums)[HEAD], const float* mosts, const float* totals, float& most, int d) {
    const int q = threadIdx.x % 4;
    float2 found = {0, 0};
    for (int w = q; w < WARPS; w += 4) most = fmaxf(most, mosts[w]);
    for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    for (int w = q; w < WARPS; w += 4) {
        const float weight = exp2f(mosts[w] - most);
        found.x += weight * sums[w][d], found.y += weight * totals[w];
    }
    for (int step = 1; step < 4; step *= 2)
        found.x += __shfl_xor_sync(~0u, found.x, step), found.y += __shfl_xor_sync(~0u, found.y, step);
    return found;
}

// The same over all blocks of a head: each sends what it has, and looks until all the others' has come.
__device__ float2 over_blocks(Block& b, int head, int split, int splits, int d, float most, float2 own) {
    const int q = threadIdx.x % 4;
    uint64* words = b.m.joined + (int64)head * PARTS * (HD + 2);
    if (q == 0) put(words + split * (HD + 2) + 2 + d, b.word(own.x));
    if (threadIdx.x == 0) put(words + split * (HD + 2), b.word(most)), put(words + split * (HD + 2) + 1, b.word(own.y));
    float2 found = {0, 0};
    most = LOWEST;
    for (int s = q; s < splits; s += 4) {
        const uint64* from = words + s * (HD + 2);
        uint64 word[3];
        do get(from, word), word[2] = get(from + 2 + d);
        while (b.old(word[0]) || b.old(word[1]) || b.old(word[2]));
        const float its = value_of(word[0]), higher = fmaxf(most, its);
        const float by = exp2f(most - higher), weight = exp2f(its - higher);
        found.x = found.x * by + weight * value_of(word[2]);
        found.y = found.y * by + weight * value_of(word[1]), most = higher;
    }
    for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(~0u, most, step), higher = fmaxf(most, other);
        const float x = __shfl_xor_sync(~0u, found.x, step), y = __shfl_xor_sync(~0u, found.y, step);
        const float by = exp2f(most - higher), weight = exp2f(other - higher);
        found = {found.x * by + x * weight, found.y * by + y * weight}, most = higher;
    }
    return found;
}

// What a head sees of this position and all before; its PARTS blocks share out positions once there are many, and else
// each sees everything, since each needs the answer.
__device__ void look(Block& b, const Layer& layer, const float2* turns, float* seen) {
    __shared__ __align__(16) half key[HEAD], value[HEAD];  // this position's
    __shared__ __align__(16) float query[HEAD];
    __shared__ float mosts[WARPS], totals[WARPS];
    float (*sums)[HEAD] = (float (*)[HEAD])b.parts;
    const int lane = threadIdx.x % 32, warp = b.warp, head = blockIdx.x / PARTS, g = head / (H / G);
    const int splits = b.at < CHUNK ? 1 : PARTS, split = blockIdx.x % splits, each = (int)(b.at + splits) / splits;
    const int group = threadIdx.x / LANES, d0 = threadIdx.x % LANES * 8, d = min(d0, HD - 8);
    const int64 low = (int64)split * each, high = min(low + each, b.at + 1);
    uint4 k8[EARLY], v8[EARLY];
    auto ask = [&](int64 start) {
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            if (start + i * GROUPS >= high) continue;
            const int64 from = min(start + group + i * GROUPS, b.at) * (G * HD) + g * HD + d;
            k8[i] = *(const uint4*)(layer.keys + from), v8[i] = *(const uint4*)(layer.values + from);
        }
    };
    ask(low);  // of the cache, while this position's are still being made
    take_turned(b, query, key, value, head, turns);
    __syncthreads();
    if (blockIdx.x % (PARTS * (H / G)) == 0 && threadIdx.x < HD) {  // one block of those that share a key
        layer.keys[b.at * (G * HD) + g * HD + threadIdx.x] = key[threadIdx.x];
        layer.values[b.at * (G * HD) + g * HD + threadIdx.x] = value[threadIdx.x];
    }
    float q[8];
    for (int i = 0; i < 8; ++i) q[i] = d0 < HD ? query[d0 + i] : 0;
    Sight sight = {{}, LOWEST, 0};
    for (int64 start = low; start < high; start += EARLY * GROUPS) {
        if (start > low) ask(start);
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {  // no row of the cache that nobody has written: 0 times a NaN is no 0
            if (start + group + i * GROUPS < b.at) continue;
            k8[i] = *(const uint4*)(key + d), v8[i] = *(const uint4*)(value + d);
        }
        sight.see(q, k8, v8, start + group, start, high);
    }
    sight.join();
    if (lane < LANES) for (int i = 0; i < 8; ++i) sums[warp][d0 + i] = sight.sum[i];
    if (lane == 0) mosts[warp] = sight.most, totals[warp] = sight.total;
    __syncthreads();
    if (warp >= HD / 8) return;
    const int at = threadIdx.x / 4;
    float most = LOWEST;
    float2 found = over_warps(sums, mosts, totals, most, at);
    if (splits > 1) found = over_blocks(b, head, split, splits, at, most, found);
    if (lane % 4 == 0) seen[at / UNIT * 16 + at % UNIT] = found.x / found.y;
}

// A head's values are k's of o: no one else needs them. Its blocks share out o's rows.
__device__ void project_out(Block& b, const Layer& layer, const float* seen) {
    const int tile0 = blockIdx.x % PARTS * EACH;
    __syncthreads();
    product_by_columns<SEEN_UNITS, SEEN_PASSES, (EACH + WARPS - 1) / WARPS>(
        b, layer.o, seen, b.sums + AFTER_O * TALL, tile0, min(EACH, TALL / 16 - tile0));
}

// Units of two tiles, each of eight rows of gate above the same eight of up, make 16 activations.
__device__ void gate_up(Block& b, const Rows& x, const float* squares, const Layer& layer, float* act) {
    const int units = ((F + 15) / 16 - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    product_by_rows(b, x, squares, 2 * units, [&](int) { return layer.gate_up; }, [&](int i, int row, float gate) {
        const float up = __shfl_down_sync(~0u, gate, 16);
        if (threadIdx.x % 4 == 0 && row < 8) act[i * 8 + row] = gate / (1 + expf(-gate)) * up;
    });
}

// Those are k's of down, all of whose rows this block has.
__device__ void down(Block& b, const Layer& layer, const float* act) {
    __syncthreads();
    product_by_columns<ACT_UNITS, ACT_PASSES, (TALL / 16 + WARPS - 1) / WARPS>(
        b, layer.down, act, b.sums + AFTER_DOWN * TALL, 0, TALL / 16);
}

__device__ void vocabulary(Block& b, const Rows& x, const float* squares) {
    float* row_of = b.m.rows + (b.at & 1) * ROW;
    uint64 top = 0;
    product_by_rows(b, x, squares, ((V + 15) / 16 - (int)blockIdx.x + BLOCKS - 1) / BLOCKS,
                    [&](int) { return b.m.output; }, [&](int i, int row, float logit) {
        row += (blockIdx.x + i * BLOCKS) * 16;
        if (row >= V) return;
        if (threadIdx.x % 4 == 0) row_of[row] = logit;
        top = max(top, rank(logit, row));
    });
    for (int step = 16; step; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
    if (b.late()) top = ~0ull;  // above every rank: the host sees that something was never sent
    if (threadIdx.x % 32 == 0 && top) atomicMax(best(b.m.rows, b.at), top);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
step(const __grid_constant__ Model m, int64 at, uint32 tag, int parity) {
    extern __shared__ __align__(128) uint8 shared[];
    __shared__ __align__(8) uint64 full[WARPS * SLOTS];
    __shared__ float2 turns[64];
    __shared__ __align__(16) float seen[SEEN_PASSES * SEEN_UNITS * 16], act[ACT_PASSES * ACT_UNITS * 16];
    __shared__ float squares[WARPS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same for all lanes, as the compiler now knows
    const int64 now = clock64();
    float* parts = (float*)(shared + WARPS * SLOTS * PIECE);
    Ring ring = {shared + warp * SLOTS * PIECE, full + warp * SLOTS,
                 m.streams + (blockIdx.x * WARPS + warp) * m.stride, now, 0, 0};
    Block b = {m, warp, at, now, nanoseconds(), tag, m.sums + parity * 2 * TALL, m.arrivals + parity * 2,
               parts, parts + GROUP * WARPS * 16, ring};
    fill(b.ring);
    for (int i = threadIdx.x; i < SEEN_PASSES * SEEN_UNITS * 16; i += WARPS * 32) seen[i] = 0;
    for (int i = threadIdx.x; i < ACT_PASSES * ACT_UNITS * 16; i += WARPS * 32) act[i] = 0;
    begin(b, turns, parity);
    float rest[CHUNKS][8] = {};
    own(b, [&](int i, int v, int k) { *(float4*)(rest[i] + v) = *(const float4*)(b.embedded + k); });
    Rows x;
    b.mark(BEGIN);
    for (int l = 0; l < L; ++l, ++b.tag) {
        const Layer& layer = m.layers[l];
        take(b, x, rest, squares, AFTER_DOWN, BLOCKS * l, BLOCKS * l, layer.attn_norm);
        project_in(b, x, squares, layer);
        b.mark(PROJECT_IN);
        if (blockIdx.x < PARTS * H) {
            look(b, layer, turns, seen);
            project_out(b, layer, seen);
        }
        arrived(b, AFTER_O);
        b.mark(LOOK);
        take(b, x, rest, squares, AFTER_O, BLOCKS * (l + 1), H * (l + 1), layer.ffn_norm);
        gate_up(b, x, squares, layer, act);
        b.mark(GATE_UP);
        down(b, layer, act);
        arrived(b, AFTER_DOWN);
        b.mark(DOWN);
    }
    take(b, x, rest, squares, AFTER_DOWN, BLOCKS * L, BLOCKS * L, m.output_norm);
    vocabulary(b, x, squares);
    b.mark(VOCABULARY);
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
    rows: Any  # (2, V + 2 or 3) float32: logits of the last step of even and of odd position, and the best one's rank
    graphs: dict  # by prompt length: (graph, its ids, position, result), at most KEPT
    step: Any  # the kernel of a token: called with (launches so far, position)
    arrays: list  # what it points to
    launches: list  # how many there were, in its only element
    stamps: Any  # (len(PHASES), 2) int64: nanoseconds and calls so far
    pool: Any  # the graphs' memory
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
    """Pack every matrix on the GPU, into tiles for prompts and into streams for tokens; make room there for context
    tokens. Nothing here needs threads.

    Raises StageError where there is no GPU to work on or too little room on it, GGUFError for a type without a kernel,
    a head size that no attention kernel takes or more heads than the kernel of a token has blocks.
    """
    config = gguf.config
    if config.hd % 8 or config.hd > max(HEADS):
        taken = f"this stage takes multiples of 8 up to {max(HEADS)}"
        raise GGUFError(gguf.path, None, f"has heads of {config.hd}, and {taken}")
    cupy = ready(gguf, tile_bytes(gguf))
    blocks = min(BLOCKS, processors(), cuda_streams.tall(config.F))
    if blocks < config.H:
        raise GGUFError(gguf.path, None, f"has {config.H} heads, and this stage has a block for each of up to {blocks}")
    cut = Cut(config.D, config.F, config.H, config.G, config.hd, config.V, config.L, blocks)
    plan = cuda_streams.plan(cut, *cuda_streams.formats(gguf.weights))
    ready(gguf, tile_bytes(gguf) + plan.nbytes + cache_bytes(gguf, context) // 2)
    streams = cuda_streams.room(plan)

    def raw(tensor):
        if len(tensor.shape) == 1:
            return cupy.asarray(dequantize(tensor))
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, cupy.asarray(tensor.raw))

    def packed(l, layer):
        norm, q, k, v, o, ffn_norm, gate, up, down = map(raw, layer)
        for i, w in enumerate((q, k, v, o, (gate, up), down)):
            cuda_streams.pack(plan, streams, 6 * l + i, w)
        return Layer(norm, pack(q, k, v), pack(o), ffn_norm, pack_pairs(gate, up), pack(down))

    weights, output = gguf.weights, raw(gguf.weights.output)
    cuda_streams.pack(plan, streams, 6 * config.L, output)
    layers = tuple(packed(l, layer) for l, layer in enumerate(weights.layers))
    weights = Weights(raw(weights.token_embd), layers, raw(weights.output_norm), pack(output))
    config = replace(config, rope_freqs=cupy.asarray(config.rope_freqs))
    cache = cupy.zeros((config.L, 2, context, config.G, config.hd), np.float16)  # look reads a row before it is made
    rows = cupy.zeros((2, (config.V + 3) // 2 * 2), np.float32)
    step, arrays, stamps = stepping(config, weights, cache, rows, plan, streams)
    pool, stream, aside = cupy.cuda.MemoryPool(), *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    return Model(config, weights, State(cache, rows, {}, step, arrays, [0], stamps, pool, stream, aside))


def stepping(config, weights, cache, rows, plan, streams):
    """The kernel of a token as a function of (launches so far, position), the arrays it points to, and its stamps."""
    import cupy

    cut = plan.cut
    layers = np.zeros((config.L, 56), np.uint8)  # struct Layer
    for to, layer, forms, (keys, values) in zip(layers, weights.layers, plan.layers, cache, strict=True):
        to[:32].view(np.int64)[:] = [a.data.ptr for a in (layer.attn_norm, layer.ffn_norm, keys, values)]
        to[32:].view(np.int32)[:] = forms
    words = (cut.H + 2 * cut.G) * cut.hd, cut.H * cut.parts * (cut.hd + 2), 4 * (-(-cut.D // 16) * 16)
    exchanged = [cupy.zeros(-(-size // 2) * 2, np.uint64) for size in words]  # qkv, joined, sums
    arrivals, stamps = cupy.zeros(4, np.uint32), cupy.zeros((len(PHASES), 2), np.int64)
    _, _, kind, length, size, embedding = weights.token_embd
    arrays = [embedding, streams, config.rope_freqs, weights.output_norm, rows, *exchanged, arrivals, stamps]
    numbers = np.array([kind, plan.output, len(config.rope_freqs)], np.int32), np.array([config.eps], np.float32)
    pointers = np.array([*(a.data.ptr for a in arrays), cut.D // length * size, plan.stride], np.int64)
    model = np.concatenate([layers.ravel(), *(part.view(np.uint8) for part in (pointers, *numbers))])  # struct Model
    program = Program(STEP, cut.options, ARCHS, cooperative=True)

    def step(launches, at):
        tag = np.uint32((launches * cut.L + 1) % 2**32)
        args = model.view(f"V{len(model)}"), np.int64(at), tag, np.int32(launches & 1)
        program.launch("step", cut.blocks, 32 * WARPS, args, cut.shared)

    return step, arrays, stamps


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
        state.step(state.launches[0], at)
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
