"""Matrix multiplication on the CPU, as it is written first.

Idea    One output at a time: along a row of x, down a column of w.
Was     Nothing: this is where the ladder starts.
Change  Nothing yet.
Expect  Each step down a column of w lands on another cache line, and where rows are long on another page, for one
        float. And each addition waits for the one before. The slower of the two sets the time; the arithmetic units
        set nothing.
"""

import numpy as np

from common.jit import njit

PREVIOUS = None
CHANGES = ()


@njit
def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    M, K = x.shape
    N = w.shape[1]
    out = np.zeros((M, N), np.float32)
    for m in range(M):
        for n in range(N):
            total = np.float32(0)
            for k in range(K):
                total += x[m, k] * w[k, n]
            out[m, n] = total
    return out
