"""A Q4_K matmul as it is ported first: one thread for one output, one weight at a time.

Idea    The CPU's loop over a row of blocks, run by a thread for each (token, row).
Was     Nothing: this is where the ladder starts.
Change  Nothing yet. Each weight costs its own loads of scale, byte and activation.
Expect  Neighbouring threads read neighbouring rows, a thousand bytes apart: a sector moved for every byte used, and
        scales decoded once a weight. Each token reads and decodes all weights again, so T tokens cost T times one.
"""

import numpy

from common.cuda import Program
from common.cuda_blocks import Q4_K

PREVIOUS = None
CHANGES = ()
ARCHS = ("sm_75", "sm_80", "sm_90")

THREADS = 256  # outputs a block
OPTIONS = (f"-DTHREADS={THREADS}",)

SOURCE = (
    Q4_K
    + r"""
extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float* x, const uint8* w, float* out, int T, int N, int K) {  // (T, K), (N, K) blocks -> (T, N)
    const int64 i = (int64)blockIdx.x * THREADS + threadIdx.x;
    const int row = i % N, blocks = K / BLOCK;
    const int64 token = i / N;
    if (token >= T) return;
    const uint8* block = w + (int64)row * blocks * BLOCK_BYTES;
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += x[token * K + k] * weight(block + k / BLOCK * BLOCK_BYTES, k % BLOCK);
    out[token * N + row] = sum;
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (T, K), (N, K / 256 * 144) -> (T, N)
    import cupy

    (t, k), n = x.shape, w.shape[0]
    out = cupy.empty((t, n), "float32")
    PROGRAM.launch("matmul", -(-t * n // THREADS), THREADS, (x, w, out, *map(numpy.int32, (t, n, k))))
    return out
