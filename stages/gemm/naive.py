"""Matrix multiplication, one thread for one output, as it is written first.

Idea    A thread per output walks along a row of x and down a column of w.
Was     Nothing: this is where the ladder starts.
Change  Nothing yet. Neighbouring threads take neighbouring rows, which looks harmless.
Expect  A warp's 32 loads of x fall in 32 different rows, so each costs a memory sector of its own: 32 bytes moved for
        4 used. The time is set by that traffic, far from the arithmetic's bound.
"""

from common.cuda import Program, operands

PREVIOUS = None
CHANGES = ()
ARCHS = ("sm_75", "sm_80", "sm_90")

TILE = 32  # outputs on a block's side: 32 x 32 threads, the most a block may have
OPTIONS = (f"-DTILE={TILE}",)

SOURCE = r"""
typedef long long int64;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul(const float* x, const float* w, float* out, int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    const int tiles = (N + TILE - 1) / TILE;
    const int row = blockIdx.x / tiles * TILE + threadIdx.x;
    const int column = blockIdx.x % tiles * TILE + threadIdx.y;
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
