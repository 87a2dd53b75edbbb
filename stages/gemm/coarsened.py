"""Matrix multiplication with several outputs a thread.

Idea    A number read from shared memory should feed more than one multiply-add.
Was     Two shared loads for each multiply-add: the load pipe was the limit, not the arithmetic.
Change  A thread keeps COARSE outputs of one column in registers, TILE rows apart; a value of w serves all of them.
Expect  Shared loads a multiply-add fall from 2 towards 1. Registers a thread rise with COARSE, and so at some point
        fewer threads are resident.
"""

from common.cuda import Program, operands

PREVIOUS = "tiled"
CHANGES = ("OPTIONS", "SOURCE.matmul", "matmul")
ARCHS = ("sm_75", "sm_80", "sm_90")

TILE = 32  # outputs on a block's side: 32 x 32 threads, the most a block may have
COARSE = 4  # outputs a thread: beyond 8 the registers of 1024 threads run out
OPTIONS = (f"-DTILE={TILE}", f"-DCOARSE={COARSE}")

SOURCE = r"""
typedef long long int64;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    const int tiles = (N + TILE - 1) / TILE;
    const int row = blockIdx.x / tiles * TILE * COARSE + threadIdx.y;
    const int column = blockIdx.x % tiles * TILE + threadIdx.x;
    __shared__ float x_tile[TILE * COARSE][TILE], w_tile[TILE][TILE];
    float sum[COARSE] = {};
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int k_x = k0 + threadIdx.x, k_w = k0 + threadIdx.y;
        for (int i = 0; i < COARSE; ++i)
            x_tile[threadIdx.y + TILE * i][threadIdx.x] =
                row + TILE * i < M && k_x < K ? x[(int64)(row + TILE * i) * K + k_x] : 0;
        w_tile[threadIdx.y][threadIdx.x] = k_w < K && column < N ? w[(int64)k_w * N + column] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            const float value = w_tile[k][threadIdx.x];
            for (int i = 0; i < COARSE; ++i) sum[i] += x_tile[threadIdx.y + TILE * i][k] * value;
        }
        __syncthreads();
    }
    for (int i = 0; i < COARSE; ++i)
        if (row + TILE * i < M && column < N) out[(int64)(row + TILE * i) * N + column] = sum[i];
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    x, w, out, m, n, k = operands(x, w, "float32")
    PROGRAM.launch("matmul", -(-m // (TILE * COARSE)) * -(-n // TILE), (TILE, TILE), (x, w, out, m, n, k))
    return out
