"""Matrix multiplication that moves four numbers at a time.

Idea    One wide access costs what one narrow access costs: move 16 bytes with each.
Was     Every global and shared access carried 4 bytes, and the block stood still while a tile arrived.
Change  All accesses are float4. The tile of x is stored transposed, so that a thread's four rows lie side by side; a
        thread's outputs are 4 x 4 squares, HALF apart. While one buffer is multiplied the next tile is on its way
        into registers: two buffers, one barrier a tile.
Expect  A quarter of the load instructions, so a scheduler spends its slots on multiply-adds; the wait for global
        memory hides behind them. Rows must start on 16 bytes: other shapes are padded first, a copy.
"""

from common.cuda import Program, operands, trim

PREVIOUS = "register_2d"
CHANGES = ("TILE_K", "SOURCE", "SOURCE.vector", "SOURCE.matmul", "matmul")
ARCHS = ("sm_75", "sm_80", "sm_90")

TILE = 128  # outputs on a block's side: 32 FLOP for each byte it loads
TILE_K = 8  # k's a tile: two buffers of both tiles take 16 KB, and the next tile 8 registers a thread
THREAD = 8  # outputs on a thread's side: 64 sums leave half of 128 registers for the rest
OPTIONS = (f"-DTILE={TILE}", f"-DTILE_K={TILE_K}", f"-DTHREAD={THREAD}")

SOURCE = r"""
typedef long long int64;
constexpr int SIDE = TILE / THREAD, THREADS = SIDE * SIDE;
constexpr int HALF = TILE / 2, VECTORS = TILE * TILE_K / 4 / THREADS;  // float4 a thread copies of each tile
constexpr int X_STEP = THREADS / (TILE_K / 4), W_STEP = THREADS / (TILE / 4);  // rows from one to the next

__device__ float4 vector(const float* from, bool inside) { return inside ? *(const float4*)from : float4{}; }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    const int tiles = (N + TILE - 1) / TILE, stride = (K + 3) / 4 * 4;
    const int row0 = blockIdx.x / tiles * TILE, column0 = blockIdx.x % tiles * TILE;
    const int down = threadIdx.x / SIDE * 4, across = threadIdx.x % SIDE * 4;
    __shared__ __align__(16) float x_tile[2][TILE_K][TILE + 4], w_tile[2][TILE_K][TILE];
    float4 x_next[VECTORS], w_next[VECTORS];
    float sum[THREAD][THREAD] = {};

    const int x_row = threadIdx.x / (TILE_K / 4), x_k = threadIdx.x % (TILE_K / 4) * 4;
    const int w_k = threadIdx.x / (TILE / 4), w_column = threadIdx.x % (TILE / 4) * 4;
    const float* x_from[VECTORS];  // rows and columns past the end read the last one instead, and are not stored
    for (int v = 0; v < VECTORS; ++v) x_from[v] = x + (int64)min(row0 + x_row + X_STEP * v, M - 1) * stride + x_k;
    const float* w_from = w + (int64)w_k * N + min(column0 + w_column, N - 4);

    auto fetch = [&](int k0) {
        for (int v = 0; v < VECTORS; ++v) {
            x_next[v] = vector(x_from[v] + k0, k0 + x_k < K);
            w_next[v] = vector(w_from + (int64)(k0 + W_STEP * v) * N, k0 + w_k + W_STEP * v < K);
        }
    };
    auto keep = [&](int buffer) {
        for (int v = 0; v < VECTORS; ++v) {
            const int row = x_row + X_STEP * v;
            x_tile[buffer][x_k][row] = x_next[v].x, x_tile[buffer][x_k + 1][row] = x_next[v].y;
            x_tile[buffer][x_k + 2][row] = x_next[v].z, x_tile[buffer][x_k + 3][row] = x_next[v].w;
            *(float4*)&w_tile[buffer][w_k + W_STEP * v][w_column] = w_next[v];
        }
        __syncthreads();
    };

    fetch(0);
    keep(0);
    for (int k0 = 0, buffer = 0; k0 < K; k0 += TILE_K, buffer ^= 1) {
        if (k0 + TILE_K < K) fetch(k0 + TILE_K);
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            float a[THREAD], b[THREAD];
            for (int i = 0; i < THREAD; i += 4) {
                *(float4*)&a[i] = *(float4*)&x_tile[buffer][k][down + HALF * (i / 4)];
                *(float4*)&b[i] = *(float4*)&w_tile[buffer][k][across + HALF * (i / 4)];
            }
            for (int i = 0; i < THREAD; ++i)
                for (int j = 0; j < THREAD; ++j) sum[i][j] += a[i] * b[j];
        }
        if (k0 + TILE_K < K) keep(buffer ^ 1);
    }
    for (int i = 0; i < THREAD; ++i)
        for (int j = 0; j < THREAD; j += 4) {
            const int row = row0 + down + HALF * (i / 4) + i % 4, column = column0 + across + HALF * (j / 4);
            if (row < M && column < N) *(float4*)&out[(int64)row * N + column] = *(float4*)&sum[i][j];
        }
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    columns = w.shape[1]
    x, w, out, m, n, k = operands(x, w, "float32", multiple=4)
    threads = (TILE // THREAD) ** 2
    PROGRAM.launch("matmul", -(-m // TILE) * -(-n // TILE), threads, (x, w, out, m, n, k))
    return trim(out, columns)
