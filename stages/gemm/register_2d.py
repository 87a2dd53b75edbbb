"""Matrix multiplication with a square of outputs a thread.

Idea    A column of outputs reuses w; a square of outputs reuses x as well.
Was     COARSE outputs a thread cost 1 + COARSE shared loads for COARSE multiply-adds.
Change  A thread keeps THREAD x THREAD outputs: for each k it reads THREAD values of x and THREAD of w, and multiplies
        every pair. The block's tile grows to 128 x 128, and 256 threads fill it.
Expect  2 * THREAD shared loads for THREAD^2 multiply-adds: a quarter of a load each. Global traffic falls too, with
        the tile's side. Occupancy drops to a few warps a scheduler, and that is no loss: 64 independent sums hide
        the latency instead.
"""

from common.cuda import Program, operands

PREVIOUS = "coarsened"
CHANGES = ("TILE", "OPTIONS", "SOURCE", "SOURCE.matmul", "matmul")
ARCHS = ("sm_75", "sm_80", "sm_90")

TILE = 128  # outputs on a block's side: 32 FLOP for each byte it loads
TILE_K = 16  # k's a tile: two tiles take 16 KB of shared memory
THREAD = 8  # outputs on a thread's side: 64 sums leave half of 128 registers for the rest
OPTIONS = (f"-DTILE={TILE}", f"-DTILE_K={TILE_K}", f"-DTHREAD={THREAD}")

SOURCE = r"""
typedef long long int64;
constexpr int SIDE = TILE / THREAD, THREADS = SIDE * SIDE;

extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    const int tiles = (N + TILE - 1) / TILE;
    const int row0 = blockIdx.x / tiles * TILE, column0 = blockIdx.x % tiles * TILE;
    const int down = threadIdx.x / SIDE, across = threadIdx.x % SIDE;  // a thread's outputs lie SIDE apart
    __shared__ float x_tile[TILE][TILE_K + 1], w_tile[TILE_K][TILE];
    float sum[THREAD][THREAD] = {};
    for (int k0 = 0; k0 < K; k0 += TILE_K) {
        for (int i = threadIdx.x; i < TILE * TILE_K; i += THREADS) {
            const int row = row0 + i / TILE_K, k_x = k0 + i % TILE_K, k_w = k0 + i / TILE, column = column0 + i % TILE;
            x_tile[i / TILE_K][i % TILE_K] = row < M && k_x < K ? x[(int64)row * K + k_x] : 0;
            w_tile[i / TILE][i % TILE] = k_w < K && column < N ? w[(int64)k_w * N + column] : 0;
        }
        __syncthreads();
        for (int k = 0; k < TILE_K; ++k) {
            float a[THREAD], b[THREAD];
            for (int i = 0; i < THREAD; ++i) a[i] = x_tile[down + SIDE * i][k];
            for (int j = 0; j < THREAD; ++j) b[j] = w_tile[k][across + SIDE * j];
            for (int i = 0; i < THREAD; ++i)
                for (int j = 0; j < THREAD; ++j) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < THREAD; ++i)
        for (int j = 0; j < THREAD; ++j) {
            const int row = row0 + down + SIDE * i, column = column0 + across + SIDE * j;
            if (row < M && column < N) out[(int64)row * N + column] = sum[i][j];
        }
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    x, w, out, m, n, k = operands(x, w, "float32")
    threads = (TILE // THREAD) ** 2
    PROGRAM.launch("matmul", -(-m // TILE) * -(-n // TILE), threads, (x, w, out, m, n, k))
    return out
