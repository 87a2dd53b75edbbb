"""Prefill: an unpacked block serves a tile of tokens, on tensor cores.

Idea    Unpacking a weight costs as much for one token as for a hundred. So let a hundred use it while it is there.
Was     resident unpacks every row again for each token, and multiplies on the FP32 units.
Change  Weights are packed at load as tensor cores take them. A thread block multiplies 128 rows by a tile of tokens,
        weights and activations on their way through a ring in shared memory; where there are too few tiles to fill the
        GPU, several blocks share a tile's k's out, and whoever reads the product adds their parts up. Attention works
        on tiles too: 64 tokens look at 64 keys at a time. Activations and cache are FP16, sums are FP32.
Expect  A prompt takes what the tensor cores take, no longer what unpacking takes: each weight is unpacked once for a
        tile of tokens. A short prompt is bound by reading the weights and by launches, of which fewer are left. A
        single token gains little: 63 of 64 columns multiply nothing.
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

PREVIOUS = "resident"
CHANGES = (
    "processors", "TILES", "Tiles", "deep", "pack", "pack_pairs", "tile_bytes", "GGUFError", "Weights", "THREADS",
    "WIDE", "FEW", "MANY", "STAGES", "PARTS", "HEADS", "TILE", "OPTIONS", "SOURCE", "SOURCE.total", "SOURCE.place",
    "SOURCE.multiply_slot", "SOURCE.product", "SOURCE.tiled", "SOURCE.matmul_few", "SOURCE.matmul_many",
    "SOURCE.whole", "SOURCE.rms_norm", "SOURCE.silu", "SOURCE.rope", "SOURCE.take", "SOURCE.weigh", "SOURCE.pair",
    "SOURCE.attend", "SOURCE.attention_64", "SOURCE.attention_128", "Layer", "load", "halves", "matmul", "add_norm",
    "swiglu", "turn", "attention", "forward", "logits", "UNPACK", "MOST_HEAD", "weight_bytes", "WARPS", "SLOTS",
    "SOURCE.matmul", "SOURCE.add", "SOURCE.mul", "SOURCE.append", "SOURCE.attention", "elementwise", "add", "mul",
    "silu", "rms_norm", "rope", "append",
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
PARTS = 8  # blocks at most that share out the k's of one tile
HEADS = (64, 128)  # head sizes that attention is compiled for
TILE = 8 * THREADS  # values of an embedding row that a block unpacks at a time
OPTIONS = (f"-DTHREADS={THREADS}", f"-DWIDE={WIDE}", f"-DTILE={TILE}", f"-DSTAGES={STAGES}")

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


class Blocks(NamedTuple):
    """A matrix as the file holds it: N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block; a row of a float type is one block
    size: int  # bytes a block
    raw: Any  # (bytes,) uint8, in the map or on the GPU


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
    return Model(config, weights, cache)


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


def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd), (1,) -> (T, H * hd), all halves
    T, H, hd = q.shape
    out = halves(T, H * hd)
    sizes = map(np.int32, (T, H, k.shape[1], hd, out.shape[1]))
    kernel = "attention_64" if hd <= HEADS[0] else "attention_128"
    PROGRAM.launch(kernel, -(-T // 64) * H, 128, (q, k, v, start, out, *sizes))
    return out


def forward(model, ids, start):  # (T,) -> (T, D)
    import cupy

    config, weights = model.config, model.weights
    T, eps, freqs = len(ids), config.eps, config.rope_freqs
    if start + T > model.cache.shape[2]:
        raise ValueError(f"{start + T} tokens do not fit a context of {model.cache.shape[2]}")
    at = cupy.array([start], np.int64)
    x, parts = embed(cupy.array(ids, np.int64), weights.token_embd), ()
    for layer, (keys, values) in zip(weights.layers, model.cache, strict=True):
        h = add_norm(x, layer.attn_norm, eps, parts)
        q = turn(matmul(h, layer.qkv), freqs, at, keys, values, config.H)
        parts = matmul(attention(q, keys, values, at), layer.o)
        h = add_norm(x, layer.ffn_norm, eps, parts)
        parts = matmul(swiglu(matmul(h, layer.gate_up), config.F), layer.down)
    return add_norm(x, weights.output_norm, eps, parts)


def logits(model, hidden):  # (T, D) halves -> (T, V), here
    return matmul(hidden, model.weights.output).sum(axis=0).get()


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id."""
    start, new = 0, list(ids)
    for _ in range(n):
        hidden = forward(model, new, start)
        row = logits(model, hidden[-1:])[0]
        start, new = start + len(new), [choose(row)]
        yield new[0], row
