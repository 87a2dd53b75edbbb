"""Weights as tensor cores take them: tiles of 16 rows x 64 k's, packed at load from any block type.

An instruction of a tensor core wants its operand spread over the 32 lanes of a warp: lane 4 g + c holds some k's of
rows g and g + 8. Which k's does not matter, as long as the activations agree. So here lane 4 g + c holds eight k's that
lie together, 8 c to 8 c + 7 of every 32, and a tile stores each lane's share as whole words of 16 bytes, lane after
lane: a warp loads a tile with a few full-width loads, and eight activations are 16 bytes too.

A weight is scale * q + offset, with q from -8 or -128 on, so that the offset, rounded to FP16, is small. Formats, by
bytes a tile:
    NIBBLES     512 of q, 4 bits each | 128 of (scale, offset), two FP16 for each row and 32 k's     Q4_0 Q4_1 Q4_K
    BYTES      1024 of q, 8 bits each | 128                                                          Q5_0 Q8_0 Q5_K
    SIXTEENTHS 1024 of q, 8 bits each | 256, for each row and 16 k's                                 Q6_K
    HALVES     2048 of FP16 weights                                                                  F16 F32
"""

from typing import Any, NamedTuple

import numpy as np

from common.cuda import Program
from common.cuda_unpack import UNPACK
from common.gguf import TYPES

ROWS, DEPTH = 16, 64  # of a tile
NIBBLES, BYTES, SIXTEENTHS, HALVES = range(4)
TILE_BYTES = (640, 1152, 1280, 2048)
FORMATS = {"Q4_0": NIBBLES, "Q4_1": NIBBLES, "Q4_K": NIBBLES, "Q5_0": BYTES, "Q8_0": BYTES, "Q5_K": BYTES,
           "Q6_K": SIXTEENTHS, "F16": HALVES, "F32": HALVES}  # fmt: skip
FORMAT_OF = {TYPES[name].id: number for name, number in FORMATS.items()}
MOST = 3  # matrices in a stack

INSTRUCTIONS = r"""
__device__ uint32 address(const void* p) { return (uint32)__cvta_generic_to_shared(p); }

// (16, 16) of lanes' a, (16, 8) of lanes' b -> added to (16, 8) of lanes' sums
__device__ void multiply(float* sum, const uint32* a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of halves from shared memory, each transposed; lane l names row l % 8 of matrix l / 8.
__device__ void turned(uint32* f, const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address(row)) : "memory");
}

// 16 bytes on their way to shared memory, zeros where not inside; a commit makes a group of those before it.
__device__ void copy(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
"""

TILES = (
    UNPACK
    + INSTRUCTIONS
    + f"constexpr int NIBBLES = {NIBBLES}, BYTES = {BYTES}, SIXTEENTHS = {SIXTEENTHS}, HALVES = {HALVES};\n"
    + f"constexpr int TILE_BYTES[] = {{{', '.join(map(str, TILE_BYTES))}}};\n"
    + r"""
struct Stack {  // up to three matrices, one below the other; rows of the packed kind, a multiple of 16 or not
    const uint8* tiles[3];
    int rows[3], format[3], depth, K;  // depth: tiles along k
};

__device__ uint32 word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What a lane holds of one tile.
template <int FORMAT> struct Share {
    static constexpr int WORDS = FORMAT == NIBBLES ? 1 : FORMAT == HALVES ? 4 : 2;
    uint4 q[WORDS], s;

    __device__ void load(const uint8* tile, int lane) {
        for (int i = 0; i < WORDS; ++i) q[i] = ((const uint4*)tile)[i * 32 + lane];
        if (FORMAT != HALVES) s = ((const uint4*)tile)[WORDS * 32 + lane / (FORMAT == SIXTEENTHS ? 2 : 4)];
    }

    // The left operands of two instructions: the lane's eight weights of rows g and g + 8 in the j-th 32 k's.
    __device__ void unpack(int j, uint32 (*a)[4]) const {
        const uint32 thousand = 0x64006400;  // 1024 twice, as halves, whose low bits can take q
        const uint32 middle = thousand + (FORMAT == NIBBLES ? 0x00080008 : 0x00800080);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = i % 2, pair = i / 2 % 2, step = i / 4;  // two weights of these eight
            uint32 bits;
            if (FORMAT == HALVES) {
                a[step][i % 4] = j ? word(q[(2 + step) % WORDS], i % 4) : word(q[step % WORDS], i % 4);
                continue;
            } else if (FORMAT == NIBBLES) {
                bits = (j ? word(q[0], 2 + row) : word(q[0], row)) >> (8 * step + 4 * pair) & 0x000F000F | thousand;
            } else {
                bits = __byte_perm(j ? word(q[1 % WORDS], 2 * row + step) : word(q[0], 2 * row + step), thousand,
                                   pair ? 0x5352 : 0x5150);
            }
            const uint32 both = j ? word(s, 2 + row) : word(s, row);
            const half2 means = *(const half2*)&both, plain = __hsub2(*(const half2*)&bits, *(const half2*)&middle);
            const half2 weights = __hfma2(plain, __low2half2(means), __high2half2(means));
            a[step][i % 4] = *(const uint32*)&weights;
        }
    }
};
"""
)

EIGHT = r"""
__device__ Eight eight(int kind, const uint8* row, uint32 k) {
    switch (kind) {
        case Q4_0: return unpack_q4_0(row, k);
        case Q4_1: return unpack_q4_1(row, k);
        case Q5_0: return unpack_q5_0(row, k);
        case Q8_0: return unpack_q8_0(row, k);
        case Q4_K: return unpack_q4_k(row, k);
        case Q5_K: return unpack_q5_k(row, k);
        default: return unpack_q6_k(row, k);
    }
}
"""

PACK = Program(
    TILES
    + EIGHT
    + r"""
// (N, K) blocks -> tiles; a warp for the eight rows of a tile from `first` on, so that two matrices can share tiles
extern "C" __global__ void
pack(const uint8* w, int kind, int64 row_bytes, uint8* out, int N, int K, int depth, int format, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = first + warp, c = lane % 4;
    const int n = blockIdx.x / depth * blockDim.x / 4 + warp * 8 + lane / 4;
    const uint8* row = w + n * row_bytes;
    uint8* tile = out + (int64)blockIdx.x * TILE_BYTES[format];
    const int middle = kind == Q8_0 ? 128 : kind == Q6_K ? 32 : kind == Q5_0 || kind == Q5_K ? 16 : 8;
    const uint32 lift = (128 - middle) * 0x01010101;  // into the middle of a byte
    const int words = format == NIBBLES ? 1 : 2, sharing = format == SIXTEENTHS ? 2 : 4;
    for (int j = 0; j < 2; ++j) {
        const int k = blockIdx.x % depth * 64 + j * 32 + c * 8;
        const bool inside = n < N && k < K;
        if (format == HALVES) {
            __align__(16) float weights[8] = {};
            if (inside) unpack_eight(kind, row, k, K, weights);
            for (int i = 0; i < 4; ++i)
                ((half2*)tile)[((2 * j + i / 2) * 32 + lane) * 4 + r + i % 2 * 2] =
                    __floats2half2_rn(weights[2 * i], weights[2 * i + 1]);
            continue;
        }
        Eight found = inside ? eight(kind, row, k) : Eight{};
        found.offset += found.scale * middle;  // q from 0 on becomes q from -middle on
        uint32 nibbles = 0;
        for (int i = 0; i < 8; ++i)
            nibbles |= ((i < 4 ? found.q.x : found.q.y) >> i % 4 * 8 & 15) << (i / 2 * 4 + i % 2 * 16);
        if (format == NIBBLES) ((uint32*)tile)[lane * 4 + r + 2 * j] = nibbles;
        else ((uint2*)tile)[(j * 32 + lane) * 2 + r] = {found.q.x + lift, found.q.y + lift};
        ((half2*)tile)[words * 128 + lane / sharing * 4 + r + 2 * j] = __floats2half2_rn(found.scale, found.offset);
    }
}
""",
    (),
    ("sm_75",),
)


class Tiles(NamedTuple):
    """Up to three matrices of one K on the GPU, packed; together (N, K)."""

    N: int
    K: int
    depth: int  # tiles along k; activations are padded with zeros to 64 * depth
    tile_bytes: int  # of the largest format among them
    counts: tuple[int, ...]  # tiles along each matrix's rows
    formats: tuple[int, ...]
    stack: np.ndarray  # the Stack that a kernel takes by value
    packed: tuple[Any, ...]  # (bytes,) uint8 each


def deep(K: int) -> int:
    """How many tiles a row of K is."""
    return -(-K // DEPTH)


def pack(*matrices) -> Tiles:
    """Matrices of one K, each given as raw blocks on the GPU (N, K, kind, length, size, raw), one below the other."""
    formats = [FORMAT_OF[m.kind] for m in matrices]
    counts = tuple(-(-m.N // ROWS) for m in matrices)
    packed = tuple(_room(count, m.K, f) for m, count, f in zip(matrices, counts, formats, strict=True))
    for m, count, f, out in zip(matrices, counts, formats, packed, strict=True):
        _pack(m, count, f, out, 64, 0)
    return _tiles([m.N for m in matrices], matrices[0].K, counts, formats, packed)


def pack_pairs(a, b) -> Tiles:
    """Two matrices (N, K) whose rows n meet in one lane: each tile holds eight rows of a above the same eight of b."""
    form = max(FORMAT_OF[a.kind], FORMAT_OF[b.kind])  # each format holds what those before it hold
    count = -(-a.N // 8)
    packed = _room(count, a.K, form)
    for first, matrix in enumerate((a, b)):
        _pack(matrix, count, form, packed, 32, first)
    return _tiles([count * ROWS], a.K, (count,), [form], (packed,))


def _room(count: int, K: int, form: int):
    import cupy

    return cupy.empty(count * deep(K) * TILE_BYTES[form], np.uint8)


def _pack(m, count: int, form: int, out, threads: int, first: int) -> None:
    row_bytes = np.int64(m.K // m.length * m.size)
    sizes = map(np.int32, (m.N, m.K, deep(m.K), form, first))
    PACK.launch("pack", count * deep(m.K), threads, (m.raw, np.int32(m.kind), row_bytes, out, *sizes))


def _tiles(rows: list, K: int, counts: tuple, formats: list, packed: tuple) -> Tiles:
    stack = np.zeros(7, np.int64)
    stack[: len(packed)] = [array.data.ptr for array in packed]
    numbers = stack[MOST:].view(np.int32)
    numbers[: len(rows)], numbers[MOST : MOST + len(rows)] = rows, formats
    numbers[2 * MOST :] = deep(K), K
    largest = max(TILE_BYTES[form] for form in formats)
    return Tiles(sum(rows), K, deep(K), largest, counts, tuple(formats), stack.view("V56"), packed)


def tile_bytes(gguf) -> int:
    """Bytes on the GPU: every matrix packed, and the embedding's rows as the file holds them."""
    total = gguf.weights.token_embd.nbytes
    weights = gguf.weights
    for tensor in (weights.output, *(t for layer in weights.layers for t in layer if len(t.shape) == 2)):
        N, K = tensor.shape
        total += -(-N // ROWS) * deep(K) * TILE_BYTES[FORMATS[tensor.type.name]]
    return total
