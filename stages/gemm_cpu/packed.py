"""Operands copied into panels that lie as the kernel reads them.

Idea    Copy a piece once, in the order of its use, and read the copy many times.
Was     A step of k landed ROWS lines of x and one stretch of w away from the last, each on a page of its own: lines
        fell into few sets of the caches, pages into few entries of the TLB.
Change  TILE_K x TILE_N of w are copied into panels COLUMNS wide, and ROWS rows of x into one panel, so that the kernel
        reads both from front to back. A panel of x stays in the first cache and all panels of w in the second; a
        tile at an edge is multiplied whole into a scratch tile, of which the part inside is added.
Expect  Sizes that are powers of two gain most, small ones little. Copying costs one pass over w for each read of it,
        and one over x for every TILE_N columns: a share that shrinks with the rows of x.
"""

import numpy as np
from llvmlite import binding

from common.intrinsics import LANES, load_lanes, multiply_add, store_lanes
from common.jit import njit
from common.registers import registers

PREVIOUS = "blocked"
CHANGES = ("multiply_tile", "matmul")

WIDE = binding.get_host_cpu_features().get("avx512f", False)
ROWS = 12 if WIDE else 6  # with COLUMNS: 24 of 32 registers of 16 floats, or 12 of 16 registers of 8
COLUMNS = 2 * LANES if WIDE else LANES
SUMS = ROWS * COLUMNS // LANES
TILE_K = 256  # a panel of x is 256 x 12 floats = 12 KB, a third of a common L1
TILE_N = 1024  # all panels of w are 256 x 1024 floats = 1 MB, half of a common L2


@njit
def aligned(panels, depth):  # -> (panels, depth, COLUMNS), from a cache line on: a register across two costs two loads
    count = panels * depth * COLUMNS
    room = np.zeros(count + LANES, np.float32)
    start = -(room.ctypes.data // 4) % LANES
    return room[start : start + count].reshape(panels, depth, COLUMNS)


@njit
def pack_x(x, m, k0, panel):  # (M, K) -> (K', ROWS)
    for r in range(ROWS):
        row = min(m + r, x.shape[0] - 1)  # rows below the last are computed and never stored
        for k in range(len(panel)):
            panel[k, r] = x[row, k0 + k]


@njit
def pack_w(w, k0, n0, columns, panels):  # (K, N) -> (panels, K', COLUMNS)
    whole = columns - columns % COLUMNS
    for k in range(min(panels.shape[1], w.shape[0] - k0)):
        for n in range(0, whole, COLUMNS):
            for c in range(0, COLUMNS, LANES):
                store_lanes(panels, (n // COLUMNS, k, c), load_lanes(w, (k0 + k, n0 + n + c)))
        for n in range(whole, columns):
            panels[n // COLUMNS, k, n - whole] = w[k0 + k, n0 + n]


@njit
def multiply_tile(x, w, out, m, n):  # (K', ROWS), (K', COLUMNS), out (M, N): ROWS x COLUMNS of it, from m, n on
    sums = registers(SUMS)
    for k in range(x.shape[0]):
        for r in range(ROWS):  # constant counts: unrolled, so that each sum is one register
            for c in range(0, COLUMNS, LANES):
                i = (r * COLUMNS + c) // LANES
                sums[i] = multiply_add(x[k, r], load_lanes(w, (k, c)), sums[i])
    for r in range(ROWS):
        for c in range(0, COLUMNS, LANES):
            total = load_lanes(out, (m + r, n + c)) + sums[(r * COLUMNS + c) // LANES]
            store_lanes(out, (m + r, n + c), total)


@njit
def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    M, K = x.shape
    N = w.shape[1]
    out = np.zeros((M, N), np.float32)
    edge = np.zeros((ROWS, COLUMNS), np.float32)
    x_panels = np.empty((min(TILE_K, K), ROWS), np.float32)
    w_panels = aligned(-(-min(TILE_N, N) // COLUMNS), min(TILE_K, K))
    for k0 in range(0, K, TILE_K):
        x_panel = x_panels[: K - k0]
        for n0 in range(0, N, TILE_N):
            columns = min(TILE_N, N - n0)
            pack_w(w, k0, n0, columns, w_panels)
            for m in range(0, M, ROWS):
                pack_x(x, m, k0, x_panel)
                for n in range(0, columns, COLUMNS):
                    if m + ROWS <= M and n + COLUMNS <= columns:
                        multiply_tile(x_panel, w_panels[n // COLUMNS], out, m, n0 + n)
                    else:
                        edge[:] = 0
                        multiply_tile(x_panel, w_panels[n // COLUMNS], edge, 0, 0)
                        for r in range(min(ROWS, M - m)):
                            for c in range(min(COLUMNS, columns - n)):
                                out[m + r, n0 + n + c] += edge[r, c]
    return out
