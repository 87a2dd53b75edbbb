"""Matrix multiplication through tiles in shared memory.

Idea    A block computes a TILE x TILE square, and its threads share what they load.
Was     Each multiply-add fetched both its numbers through the L1 cache, addresses and all.
Change  The block copies a square of x and one of w into shared memory, waits, and multiplies from there.
Expect  A number comes from global memory once a block, so global loads fall by a factor TILE. Shared memory answers
        about as fast as an L1 hit, though, so the gain is far below TILE; below a TILE of 8 the copies and barriers
        outweigh it.
"""

from common.cuda import Program, operands

PREVIOUS = "coalesced"
CHANGES = ("SOURCE.matmul",)
ARCHS = ("sm_75", "sm_80", "sm_90")

TILE = 32  # outputs on a block's side: 32 x 32 threads, the most a block may have
OPTIONS = (f"-DTILE={TILE}",)

SOURCE = r"""
typedef long long int64;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    const int tiles = (N + TILE - 1) / TILE;
    const int row = blockIdx.x / tiles * TILE + threadIdx.y;
    const int column = blockIdx.x % tiles * TILE + threadIdx.x;
    __shared__ float x_tile[TILE][TILE], w_tile[TILE][TILE];
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int k_x = k0 + threadIdx.x, k_w = k0 + threadIdx.y;
        x_tile[threadIdx.y][threadIdx.x] = row < M && k_x < K ? x[(int64)row * K + k_x] : 0;
        w_tile[threadIdx.y][threadIdx.x] = k_w < K && column < N ? w[(int64)k_w * N + column] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += x_tile[threadIdx.y][k] * w_tile[k][threadIdx.x];
        __syncthreads();
    }
    if (row < M && column < N) out[(int64)row * N + column] = sum;
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    x, w, out, m, n, k = operands(x, w, "float32")
    PROGRAM.launch("matmul", -(-m // TILE) * -(-n // TILE), (TILE, TILE), (x, w, out, m, n, k))
    return out
