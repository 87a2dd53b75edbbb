"""Matrix multiplication on the tensor cores: FP16 in, FP32 sums, FP16 out.

Idea    One instruction of a warp multiplies a 16 x 16 by a 16 x 8 matrix: 2048 multiply-adds instead of 32.
Was     A scheduler issued one multiply-add for each of 32 lanes a cycle, and could not issue more.
Change  The same tiles, ring and copies, holding halves. A warp loads fragments with ldmatrix, which hands each lane
        the elements that mma.sync expects of it, and multiplies fragments.
Expect  An arithmetic rate far above FP32's, and half the bytes. The wall is now how fast shared memory can feed the
        fragments. FP16 rounds each input and output to 11 bits.
"""

from common.cuda import Program, operands, trim

PREVIOUS = "warptiled"
CHANGES = (
    "TILE_M",
    "TILE_K",
    "WARP_M",
    "STAGES",
    "SHARED",
    "SOURCE",
    "SOURCE.copy",
    "SOURCE.fragment",
    "SOURCE.fragment_turned",
    "SOURCE.multiply",
    "SOURCE.matmul",
    "matmul",
)
ARCHS = ("sm_80", "sm_90")

TILE_M = 128  # outputs a block: 85 FLOP for each byte it loads
TILE_N = 256
TILE_K = 64  # k's a tile: four steps of 16
WARP_M = 64  # outputs a warp: 128 sums a thread
WARP_N = 64
STAGES = 3  # tiles in the ring: two on their way while one is multiplied; 52 KB each
GROUP = 8  # rows of tiles that consecutive blocks walk down together
THREADS = TILE_M // WARP_M * (TILE_N // WARP_N) * 32
RESIDENT = 1  # blocks a processor: what registers a thread may then take
SHARED = STAGES * (TILE_M * (TILE_K + 8) + TILE_K * (TILE_N + 8)) * 2  # bytes of the ring
OPTIONS = (f"-DTILE_M={TILE_M}", f"-DTILE_N={TILE_N}", f"-DTILE_K={TILE_K}", f"-DWARP_M={WARP_M}",
           f"-DWARP_N={WARP_N}", f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}", f"-DTHREADS={THREADS}",
           f"-DRESIDENT={RESIDENT}")  # fmt: skip

SOURCE = r"""
#include <cuda_fp16.h>
typedef long long int64;
constexpr int ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;  // fragments of the sum a warp
constexpr int X_STEP = THREADS / (TILE_K / 8), X_COPIES = TILE_M / X_STEP;  // rows a pass of copies covers
constexpr int W_STEP = THREADS / (TILE_N / 8), W_COPIES = TILE_K / W_STEP;
struct Stage { half x[TILE_M][TILE_K + 8], w[TILE_K][TILE_N + 8]; };  // + 8: rows fall in different banks

__device__ void copy(half* to, const half* from, bool inside) {  // 16 bytes; outside none are read, and zeros written
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ void fragment(unsigned* f, const half* from) {  // four 8 x 8 matrices; lane l names row l % 8 of l / 8
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"((unsigned)__cvta_generic_to_shared(from)) : "memory");
}

__device__ void fragment_turned(unsigned* f, const half* from) {  // each matrix transposed
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"((unsigned)__cvta_generic_to_shared(from)) : "memory");
}

__device__ void multiply(float* sum, const unsigned* a, const unsigned* b) {  // (16, 16), (16, 8) -> += (16, 8)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
matmul(const half* x, const half* w, half* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    extern __shared__ __align__(16) char shared[];
    Stage* ring = (Stage*)shared;
    const int tiles_m = (M + TILE_M - 1) / TILE_M, tiles_n = (N + TILE_N - 1) / TILE_N, stride = (K + 7) / 8 * 8;
    const int group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const int height = min(GROUP, tiles_m - group * GROUP);
    const int row0 = (group * GROUP + within % height) * TILE_M, column0 = within / height * TILE_N;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int down = warp / (TILE_N / WARP_N) * WARP_M, across = warp % (TILE_N / WARP_N) * WARP_N;

    const int x_row = threadIdx.x / (TILE_K / 8), x_k = threadIdx.x % (TILE_K / 8) * 8;
    const int w_k = threadIdx.x / (TILE_N / 8), w_column = threadIdx.x % (TILE_N / 8) * 8;
    const half* x_from = x + (int64)(row0 + x_row) * stride + x_k;
    const half* w_from = w + (int64)w_k * N + column0 + w_column;
    auto fetch = [&](int k0) {  // one group of copies a tile, all zeros past the end
        Stage& stage = ring[k0 / TILE_K % STAGES];
        for (int i = 0; i < X_COPIES; ++i) {
            const bool inside = row0 + x_row + X_STEP * i < M && k0 + x_k < K;
            copy(&stage.x[x_row + X_STEP * i][x_k], x_from + (int64)X_STEP * i * stride + k0, inside);
        }
        for (int i = 0; i < W_COPIES; ++i) {
            const bool inside = k0 + w_k + W_STEP * i < K && column0 + w_column < N;
            copy(&stage.w[w_k + W_STEP * i][w_column], w_from + (int64)(k0 + W_STEP * i) * N, inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto arrived = [] {  // the oldest tile on its way is there, and every warp has left the one before it
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
    };

    float sum[ROWS][COLUMNS][4] = {};
    unsigned a[2][ROWS][4], b[2][COLUMNS][2];
    auto load = [&](int buffer, const Stage& stage, int k) {
        for (int i = 0; i < ROWS; ++i) fragment(a[buffer][i], &stage.x[down + 16 * i + lane % 16][k + lane / 16 * 8]);
        for (int j = 0; j < COLUMNS; j += 2)
            fragment_turned(b[buffer][j], &stage.w[k + lane % 16][across + 8 * j + lane / 16 * 8]);
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i * TILE_K);
    arrived();
    load(0, ring[0], 0);
    for (int k0 = 0; k0 < K; k0 += TILE_K) {
        const Stage& stage = ring[k0 / TILE_K % STAGES];
        const Stage& next = ring[(k0 / TILE_K + 1) % STAGES];
        fetch(k0 + (STAGES - 1) * TILE_K);
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) {
            const bool last = k == TILE_K - 16;
            if (last) arrived();
            load((k / 16 + 1) % 2, last ? next : stage, last ? 0 : k + 16);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < COLUMNS; ++j) multiply(sum[i][j], a[k / 16 % 2][i], b[k / 16 % 2][j]);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j)
            for (int v = 0; v < 4; v += 2) {
                const int row = row0 + down + 16 * i + lane / 4 + 4 * v;
                const int column = column0 + across + 8 * j + lane % 4 * 2;
                if (row < M && column < N)
                    *(half2*)&out[(int64)row * N + column] = __floats2half2_rn(sum[i][j][v], sum[i][j][v + 1]);
            }
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    columns = w.shape[1]
    x, w, out, m, n, k = operands(x, w, "float16", multiple=8)
    PROGRAM.launch("matmul", -(-m // TILE_M) * -(-n // TILE_N), THREADS, (x, w, out, m, n, k), SHARED)
    return trim(out, columns)
