"""A tile of outputs in registers.

Idea    A sum that stays in a register costs no load and no store; a tile of them shares what it loads.
Was     Every multiply-add loaded a register of w and one of out, and stored one: three memory operations for one of
        arithmetic.
Change  ROWS x COLUMNS sums stay in registers while k runs from end to end. For each k, COLUMNS floats of w and ROWS
        of x are loaded, and every pair is multiplied.
Expect  ROWS + 2 loads for 2 ROWS multiply-adds (two registers a row), and enough independent sums to hide the
        latency: arithmetic binds wherever the loads hit the nearest cache. They do not where a step down w is a large
        power of two: its lines then fall into few sets, its pages into few entries of the TLB. Such sizes gain least.
"""

import numpy as np
from llvmlite import binding

from common.intrinsics import LANES, load_lanes, multiply_add, store_lanes
from common.jit import njit
from common.registers import registers

PREVIOUS = "contiguous"
CHANGES = ("matmul",)

WIDE = binding.get_host_cpu_features().get("avx512f", False)
ROWS = 12 if WIDE else 6  # with COLUMNS: 24 of 32 registers of 16 floats, or 12 of 16 registers of 8
COLUMNS = 2 * LANES if WIDE else LANES
SUMS = ROWS * COLUMNS // LANES


@njit
def multiply_tile(x, w, out, m, n):  # (M, K), (K, N), out (M, N): ROWS x COLUMNS of it, from m, n on
    sums = registers(SUMS)
    for k in range(x.shape[1]):
        for r in range(ROWS):  # constant counts: unrolled, so that each sum is one register
            for c in range(0, COLUMNS, LANES):
                i = (r * COLUMNS + c) // LANES
                sums[i] = multiply_add(x[m + r, k], load_lanes(w, (k, n + c)), sums[i])
    for r in range(ROWS):
        for c in range(0, COLUMNS, LANES):
            store_lanes(out, (m + r, n + c), sums[(r * COLUMNS + c) // LANES])


@njit
def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    M, K = x.shape
    N = w.shape[1]
    out = np.zeros((M, N), np.float32)
    whole_m, whole_n = M - M % ROWS, N - N % COLUMNS
    for n in range(0, whole_n, COLUMNS):
        for m in range(0, whole_m, ROWS):
            multiply_tile(x, w, out, m, n)
    for m in range(M):
        for k in range(K):
            for n in range(whole_n if m < whole_m else 0, N):  # what fills no tile
                out[m, n] += x[m, k] * w[k, n]
    return out
