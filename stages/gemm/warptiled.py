"""Matrix multiplication whose warps own tiles, fed by copies that no register waits for.

Idea    Give each warp a compact tile of its own, and let every load run ahead of its use.
Was     A warp's outputs were a strip, 8 rows by 128 columns: it read 136 values of shared memory a k. Copies went
        through registers, and after each barrier every warp stood waiting for its first values at once.
Change  A warp owns WARP_M x WARP_N outputs. Tiles go straight to shared memory (cp.async) into a ring of STAGES, x one
        number at a time so that it stays transposed. A thread reads the values for the next k before it multiplies
        this one's, across the barrier too. Blocks running together share rows and columns in the L2 cache.
Expect  Fewer shared loads a multiply-add, no staging registers, no wait for memory: 128 sums a thread leave two warps a
        scheduler, and they suffice. What is left is the rate at which multiply-adds issue. A tile this large leaves
        processors idle where the matrix is small.
"""

from common.cuda import Program, operands, trim

PREVIOUS = "vectorized"
CHANGES = ("TILE_K", "OPTIONS", "SOURCE", "SOURCE.copy", "SOURCE.matmul", "matmul", "SOURCE.vector")
ARCHS = ("sm_80", "sm_90")

TILE_M = 128  # outputs a block: 43 FLOP for each byte it loads
TILE_N = 256
TILE_K = 16  # k's a tile
WARP_M = 64  # outputs a warp: 8 x 16 a thread, 24 values read for 128 multiply-adds
WARP_N = 64
STAGES = 4  # tiles in the ring: three on their way while one is multiplied
GROUP = 8  # rows of tiles that consecutive blocks walk down together
THREADS = TILE_M // WARP_M * (TILE_N // WARP_N) * 32
RESIDENT = 1  # blocks a processor: what registers a thread may then take
SHARED = STAGES * TILE_K * (TILE_M + 4 + TILE_N) * 4  # bytes of the ring
OPTIONS = (f"-DTILE_M={TILE_M}", f"-DTILE_N={TILE_N}", f"-DTILE_K={TILE_K}", f"-DWARP_M={WARP_M}",
           f"-DWARP_N={WARP_N}", f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}", f"-DTHREADS={THREADS}",
           f"-DRESIDENT={RESIDENT}")  # fmt: skip

SOURCE = r"""
typedef long long int64;
constexpr int ROWS = WARP_M / 8, COLUMNS = WARP_N / 4;  // outputs a thread
constexpr int X_STEP = THREADS / TILE_K, X_COPIES = TILE_M / X_STEP;  // rows a pass of copies covers
constexpr int W_STEP = THREADS / (TILE_N / 4), W_COPIES = TILE_K / W_STEP;
struct Stage { float x[TILE_K][TILE_M + 4], w[TILE_K][TILE_N]; };  // + 4: eight k's of a row fall in eight banks

template <int BYTES> __device__ void copy(float* to, const float* from, bool inside) {  // outside zeros, nothing read
    const unsigned there = (unsigned)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(there), "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(there), "l"(from), "r"(inside ? 4 : 0)
                     : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    extern __shared__ __align__(16) char shared[];
    Stage* ring = (Stage*)shared;
    const int tiles_m = (M + TILE_M - 1) / TILE_M, tiles_n = (N + TILE_N - 1) / TILE_N, stride = (K + 3) / 4 * 4;
    const int group = blockIdx.x / (GROUP * tiles_n), within = blockIdx.x % (GROUP * tiles_n);
    const int height = min(GROUP, tiles_m - group * GROUP);
    const int row0 = (group * GROUP + within % height) * TILE_M, column0 = within / height * TILE_N;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int down = warp / (TILE_N / WARP_N) * WARP_M + lane / 4 * 4;
    const int across = warp % (TILE_N / WARP_N) * WARP_N + lane % 4 * 4;

    const int x_row = threadIdx.x / TILE_K, x_k = threadIdx.x % TILE_K;
    const int w_k = threadIdx.x / (TILE_N / 4), w_column = threadIdx.x % (TILE_N / 4) * 4;
    const float* x_from = x + (int64)(row0 + x_row) * stride + x_k;
    const float* w_from = w + (int64)w_k * N + column0 + w_column;
    auto fetch = [&](int k0) {  // one group of copies a tile, all zeros past the end
        Stage& stage = ring[k0 / TILE_K % STAGES];
        for (int i = 0; i < X_COPIES; ++i) {
            const bool inside = row0 + x_row + X_STEP * i < M && k0 + x_k < K;
            copy<4>(&stage.x[x_k][x_row + X_STEP * i], x_from + (int64)X_STEP * i * stride + k0, inside);
        }
        for (int i = 0; i < W_COPIES; ++i) {
            const bool inside = k0 + w_k + W_STEP * i < K && column0 + w_column < N;
            copy<16>(&stage.w[w_k + W_STEP * i][w_column], w_from + (int64)(k0 + W_STEP * i) * N, inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto arrived = [] {  // the oldest tile on its way is there, and every warp has left the one before it
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
    };

    float sum[ROWS][COLUMNS] = {}, a[2][ROWS], b[2][COLUMNS];
    auto load = [&](int buffer, const Stage& stage, int k) {
        for (int i = 0; i < ROWS; i += 4) *(float4*)&a[buffer][i] = *(float4*)&stage.x[k][down + 8 * i];
        for (int j = 0; j < COLUMNS; j += 4) *(float4*)&b[buffer][j] = *(float4*)&stage.w[k][across + 4 * j];
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i * TILE_K);
    arrived();
    load(0, ring[0], 0);
    for (int k0 = 0; k0 < K; k0 += TILE_K) {
        const Stage& stage = ring[k0 / TILE_K % STAGES];
        const Stage& next = ring[(k0 / TILE_K + 1) % STAGES];
        fetch(k0 + (STAGES - 1) * TILE_K);
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            const bool last = k == TILE_K - 1;
            if (last) arrived();
            load((k + 1) % 2, last ? next : stage, last ? 0 : k + 1);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < COLUMNS; ++j) sum[i][j] += a[k % 2][i] * b[k % 2][j];
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; j += 4) {
            const int row = row0 + down + i / 4 * 32 + i % 4, column = column0 + across + 4 * j;
            if (row < M && column < N) *(float4*)&out[(int64)row * N + column] = *(float4*)&sum[i][j];
        }
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    columns = w.shape[1]
    x, w, out, m, n, k = operands(x, w, "float32", multiple=4)
    PROGRAM.launch("matmul", -(-m // TILE_M) * -(-n // TILE_N), THREADS, (x, w, out, m, n, k), SHARED)
    return trim(out, columns)
