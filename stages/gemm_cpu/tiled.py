"""The same loops, one cache-sized tile of w at a time.

Idea    Use a piece of w for every row of x before letting it go.
Was     A column of w is K cache lines, each fetched for one float; before the next column wants its neighbour, a tall
        matrix has pushed the line out, and its page out of the TLB.
Change  w is walked in tiles of TILE x TILE. A tile stays in the nearest cache while all rows of x pass over it;
        partial sums wait in out.
Expect  The waiting for lines and pages goes, the chain of additions stays: no faster than one addition after another
        allows. A tile of a few rows pays for starting and ending its short sums.
"""

import numpy as np

from common.jit import njit

PREVIOUS = "naive"
CHANGES = ("matmul",)

TILE = 64  # 64 rows of 64 floats = 16 KB, half of a common L1


@njit
def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    M, K = x.shape
    N = w.shape[1]
    out = np.zeros((M, N), np.float32)
    for k0 in range(0, K, TILE):
        for n0 in range(0, N, TILE):
            for m in range(M):
                for n in range(n0, min(n0 + TILE, N)):
                    total = out[m, n]
                    for k in range(k0, min(k0 + TILE, K)):
                        total += x[m, k] * w[k, n]
                    out[m, n] = total
    return out
