"""Matrix multiplication with a warp laid along a row.

Idea    Let neighbouring threads touch neighbouring addresses.
Was     A warp took 32 rows, so its loads of x and its stores fell in 32 different sectors.
Change  threadIdx.x now counts columns and threadIdx.y rows: two names swapped.
Expect  A warp's loads of x fall from 32 sectors a request to one, those of w rise from one to four. Every multiply-add
        still waits for two loads, so the rate of the caches is the next wall.
"""

from common.cuda import Program, operands

PREVIOUS = "naive"
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
    if (row >= M || column >= N) return;
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += x[(int64)row * K + k] * w[(int64)k * N + column];
    out[(int64)row * N + column] = sum;
}
"""
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    x, w, out, m, n, k = operands(x, w, "float32")
    PROGRAM.launch("matmul", -(-m // TILE) * -(-n // TILE), (TILE, TILE), (x, w, out, m, n, k))
    return out
