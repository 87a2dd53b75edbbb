"""A Q4_K matmul on tensor cores, weights unpacked in the registers that multiply them.

Idea    A tensor core does not care in which order k's are summed: so let each thread load the bytes that lie together,
        and give the activations the same order.
Was     Each weight cost a multiply-add a token on the FP32 units, and the activations were read by every warp.
Change  A warp takes 16 rows. A thread's 8 bytes of q become halves by bit tricks (1024 + q is a half whose low bits
        are q), two at a time, and are the left operand of mma.sync as they are; x is rounded to FP16 once and stored
        in the order that fits. Few tokens: the warps of a block share a row's blocks out among them. Many: they share
        tokens, copied to shared memory ahead of use.
Expect  With few tokens every byte of w is requested at once and the read bound is near. With many, a weight is
        unpacked for a whole tile of tokens and the tensor cores set the time. FP16 operands round to 11 bits.
"""

import numpy

from common.cuda import Program
from common.cuda_blocks import Q4_K

PREVIOUS = "tokens"
CHANGES = (
    "OPTIONS",
    "SOURCE",
    "SOURCE.prepare",
    "SOURCE.pair",
    "SOURCE.multiply",
    "SOURCE.eight",
    "SOURCE.few",
    "SOURCE.few_floats",
    "SOURCE.few_halves",
    "SOURCE.many",
    "matmul",
    "SOURCE.matmul",
)
ARCHS = ("sm_80", "sm_90")

FEW = 16  # tokens up to which the warps of a block split k instead of tokens
FLOATS = 4  # tokens, at most 8, up to which rounding x in passing costs less than a launch to do it once
WARPS = 22  # at most, of a block with few tokens: at K = 2048 and 5632 each then asks for its bytes at once
TILE_T = 64  # tokens of a block with many
RESIDENT = 1  # blocks a processor with many tokens: what registers a thread may then take
STAGES = 3  # tiles of x in the ring: two on their way while one is multiplied
SHARED = STAGES * TILE_T * (64 + 32) * 2  # bytes of the ring; the sums at the end fit in it too
OPTIONS = (f"-DWARPS={WARPS}", f"-DTILE_T={TILE_T}", f"-DSTAGES={STAGES}", f"-DFEW={FEW}", f"-DRESIDENT={RESIDENT}")

SOURCE = (
    Q4_K
    + r"""
// x as halves, each four k's in the order 0 2 1 3: the order in which pair() finds the nibbles of a word.
extern "C" __global__ void prepare(const float4* x, uint2* out, int64 fours) {
    const int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= fours) return;
    const half2 even = __floats2half2_rn(x[i].x, x[i].z), odd = __floats2half2_rn(x[i].y, x[i].w);
    out[i] = {*(const unsigned*)&even, *(const unsigned*)&odd};
}

// Two weights from the nibbles at bits 0 and 16: 0x6400 | q is the half 1024 + q.
__device__ unsigned pair(unsigned nibbles, half2 scale, half2 min) {
    const unsigned bits = nibbles & 0x000F000F | 0x64006400;
    const half2 q = __hsub2(*(const half2*)&bits, __half2half2(__ushort_as_half(0x6400)));
    const half2 w = __hfma2(q, scale, min);
    return *(const unsigned*)&w;
}

__device__ void multiply(float* sum, const unsigned* a, uint2 b) {  // (16, 16), (16, 8) -> += (16, 8)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

struct Rows {  // what a thread holds of one block of two rows, 8 apart
    uint4 head[2];
    uint2 q[2][4], scales[2], mins[2];

    __device__ void load(const uint8* row, const uint8* below, int corner) {
        for (int r = 0; r < 2; ++r) {
            const uint8* block = r ? below : row;
            head[r] = *(const uint4*)block;
            for (int i = 0; i < 4; ++i) q[r][i] = *(const uint2*)(block + 16 + i * 32 + corner * 8);
        }
    }
    __device__ void decode() {
        for (int r = 0; r < 2; ++r) scales_mins({head[r].y, head[r].z, head[r].w}, scales[r], mins[r]);
    }
    // The left operands of group j's two multiplications: a[0] for the thread's first four weights, a[1] the next.
    __device__ void unpack(int j, unsigned (*a)[4]) const {
        for (int r = 0; r < 2; ++r) {
            const unsigned scale = (j < 4 ? scales[r].x : scales[r].y) >> j % 4 * 8 & 255;
            const unsigned low = (j < 4 ? mins[r].x : mins[r].y) >> j % 4 * 8 & 255;
            const unsigned both = 0x64006400 | scale | low << 16;
            const half2 d = *(const half2*)&head[r].x;
            const half2 f = __hmul2(__hsub2(*(const half2*)&both, __half2half2(__ushort_as_half(0x6400))), d);
            const half2 s = __low2half2(f), m = __hneg2(__high2half2(f));
            for (int i = 0; i < 2; ++i) {
                const unsigned word = (i ? q[r][j / 2].y : q[r][j / 2].x) >> j % 2 * 4;
                a[i][r] = pair(word, s, m), a[i][r + 2] = pair(word >> 8, s, m);
            }
        }
    }
};

__device__ uint4 eight(const half* x) { return *(const uint4*)x; }  // as prepare() stored them

__device__ uint4 eight(const float* x) {  // as prepare() would store them
    half2 two[4];
    for (int i = 0; i < 4; ++i) two[i] = __floats2half2_rn(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
    return *(const uint4*)two;
}

// (T, K), (N, K) blocks -> (T, N) for T <= 8 TILES: 16 rows a block, whose warps share out k and add up at the end.
template <int TILES, typename X> __device__ void few(const X* x, const uint8* w, float* out, int T, int N, int K) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, corner = lane % 4;
    const int blocks = K / BLOCK;
    const int row0 = blockIdx.x * 16;  // rows past the end read the last, and are not stored
    const uint8* row = w + (int64)min(row0 + lane / 4, N - 1) * blocks * BLOCK_BYTES;
    const uint8* below = w + (int64)min(row0 + lane / 4 + 8, N - 1) * blocks * BLOCK_BYTES;
    float sum[TILES][4] = {};
    Rows rows;
    for (int b = warp; b < blocks; b += warps) {
        rows.load(row + b * BLOCK_BYTES, below + b * BLOCK_BYTES, corner);
        rows.decode();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned a[2][4];
            rows.unpack(j, a);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int token = tile * 8 + lane / 4;
                const uint4 v = token < T ? eight(x + (int64)token * K + b * BLOCK + j * 32 + corner * 8) : uint4{};
                multiply(sum[tile], a[0], {v.x, v.y});
                multiply(sum[tile], a[1], {v.z, v.w});
            }
        }
    }
    __shared__ float part[WARPS][16][8 * TILES + 1];
    for (int tile = 0; tile < TILES; ++tile)
        for (int i = 0; i < 4; ++i) part[warp][lane / 4 + i / 2 * 8][tile * 8 + corner * 2 + i % 2] = sum[tile][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * T; i += blockDim.x) {
        float total = 0;
        for (int p = 0; p < warps; ++p) total += part[p][i % 16][i / 16];
        if (row0 + i % 16 < N) out[(int64)(i / 16) * N + row0 + i % 16] = total;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
few_floats(const float* x, const uint8* w, float* out, int T, int N, int K) { few<1>(x, w, out, T, N, K); }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
few_halves(const half* x, const uint8* w, float* out, int T, int N, int K) { few<FEW / 8>(x, w, out, T, N, K); }

struct Tile { half x[TILE_T][64 + 32]; };  // 64 k's; + 32: two rows of 8 threads then miss each other's banks

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
many(const half* x, const uint8* w, float* out, int T, int N, int K) {  // (T, K), (N, K) blocks -> (T, N)
    extern __shared__ __align__(16) char shared[];
    Tile* ring = (Tile*)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, corner = lane % 4, blocks = K / BLOCK;
    const int tiles = (N + 127) / 128, token0 = blockIdx.x / tiles * TILE_T;
    const int row0 = blockIdx.x % tiles * 128 + warp * 16;  // rows past the end read the last, and are not stored
    const uint8* row = w + (int64)min(row0 + lane / 4, N - 1) * blocks * BLOCK_BYTES;
    const uint8* below = w + (int64)min(row0 + lane / 4 + 8, N - 1) * blocks * BLOCK_BYTES;
    auto fetch = [&](int step) {
        if (step < blocks * 4)
            for (int i = threadIdx.x; i < TILE_T * 8; i += 256) {
                const half* from = x + (int64)min(token0 + i / 8, T - 1) * K + step * 64 + i % 8 * 8;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(
                             &ring[step % STAGES].x[i / 8][i % 8 * 8])), "l"(from) : "memory");
            }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sum[TILE_T / 8][4] = {};
    Rows rows, next;
    next.load(row, below, corner);
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int b = 0; b < blocks; ++b) {
        rows = next;
        if (b + 1 < blocks) next.load(row + (b + 1) * BLOCK_BYTES, below + (b + 1) * BLOCK_BYTES, corner);
        rows.decode();
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const int step = b * 4 + quarter;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();  // this tile is there, and everyone has left the one that the next copies overwrite
            fetch(step + STAGES - 1);
            const Tile& tile = ring[step % STAGES];
            for (int high = 0; high < 2; ++high) {
                unsigned a[2][4];
                rows.unpack(quarter * 2 + high, a);
#pragma unroll
                for (int t = 0; t < TILE_T / 8; ++t) {
                    const uint4 v = *(const uint4*)&tile.x[t * 8 + lane / 4][high * 32 + corner * 8];
                    multiply(sum[t], a[0], {v.x, v.y});
                    multiply(sum[t], a[1], {v.z, v.w});
                }
            }
        }
    }
    for (int t = 0; t < TILE_T / 8; ++t)
        for (int i = 0; i < 4; ++i) {
            const int token = token0 + t * 8 + corner * 2 + i % 2, at = row0 + lane / 4 + i / 2 * 8;
            if (token < T && at < N) out[(int64)token * N + at] = sum[t][i];
        }
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (T, K), (N, K / 256 * 144) -> (T, N)
    import cupy

    (t, k), n = x.shape, w.shape[0]
    out, sizes = cupy.empty((t, n), "float32"), tuple(map(numpy.int32, (t, n, k)))
    warps = -(-(k // 256) // -(-(k // 256) // WARPS))  # as many as share the blocks out evenly
    if t <= FLOATS:
        PROGRAM.launch("few_floats", -(-n // 16), warps * 32, (x, w, out, *sizes))
        return out
    halves = cupy.empty((t, k), "float16")
    PROGRAM.launch("prepare", -(-t * k // 1024), 256, (x, halves, numpy.int64(t * k // 4)))
    if t <= FEW:
        PROGRAM.launch("few_halves", -(-n // 16), warps * 32, (halves, w, out, *sizes))
    else:
        PROGRAM.launch("many", -(-n // 128) * -(-t // TILE_T), 256, (halves, w, out, *sizes), SHARED)
    return out
