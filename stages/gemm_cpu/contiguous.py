"""The loops in another order: whole rows, innermost along memory.

Idea    Turn the loops so that the innermost one walks the way memory lies.
Was     The innermost loop ran down a column: one float of each line, and one sum that every addition waits for.
Change  For each number of x, its whole row of w is multiplied by it and added to the whole row of out. Neighbouring
        columns are independent, so the compiler takes a vector register of them at a time. No tiles: rows are long,
        and the hardware fetches ahead along them.
Expect  The gain is the lanes times the additions that now overlap, so it is the largest of the ladder. What binds then
        is traffic: a multiply-add loads w and out and stores out, and w comes from a far cache once for every row of x.
"""

import numpy as np

from common.jit import njit

PREVIOUS = "tiled"
CHANGES = ("matmul",)


@njit
def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    M, K = x.shape
    N = w.shape[1]
    out = np.zeros((M, N), np.float32)
    for m in range(M):
        for k in range(K):
            for n in range(N):
                out[m, n] += x[m, k] * w[k, n]
    return out
