"""A picture for a rung of a kernel ladder, drawn from its own constants: what a block, a warp and a thread own.

`python -m common.kernel_picture gemm` writes an SVG beside each chapter. x stands left of the outputs and w above, as
in the product; light is a block's, middle a warp's, dark a thread's.
"""

import importlib
import sys
from pathlib import Path

SIDE = 288  # pixels of the outputs' square
DEPTH = 72  # pixels of the k's shown
GAP = 14  # pixels between the matrices
LIGHT, MIDDLE, DARK = "#cfe3f5", "#7fb2e0", "#174a7c"


def squares(rung) -> tuple[tuple, list, list, int]:
    """(rows, columns) of a block's outputs; a warp's and a thread's as rectangles (row, column, rows, columns); k's."""
    name, tile = rung.__name__.rpartition(".")[2], getattr(rung, "TILE", 0)
    if name in ("naive", "coalesced", "tiled"):
        warp = (0, 0, 32, 1) if name == "naive" else (0, 0, 1, 32)
        return (tile, tile), [warp], [(0, 0, 1, 1)], tile if name == "tiled" else 1
    if name == "coarsened":
        rows = range(0, tile * rung.COARSE, tile)
        return (tile * rung.COARSE, tile), [(r, 0, 1, 32) for r in rows], [(r, 0, 1, 1) for r in rows], tile
    if name == "register_2d":
        step = tile // rung.THREAD
        across = [(i * step, j * step) for i in range(rung.THREAD) for j in range(rung.THREAD)]
        warp = [(i * step, 0, 2, tile) for i in range(rung.THREAD)]
        return (tile, tile), warp, [(r, c, 1, 1) for r, c in across], rung.TILE_K
    if name == "vectorized":
        half = tile // 2
        warp = [(r, 0, 8, tile) for r in (0, half)]
        return (tile, tile), warp, [(r, c, 4, 4) for r in (0, half) for c in (0, half)], rung.TILE_K
    block = rung.TILE_M, rung.TILE_N
    if name == "hopper":  # a group of four warps multiplies 64 rows; a warp keeps 16, a thread two of them, in pairs
        thread = [(r, c, 1, 2) for r in (0, 8) for c in range(0, rung.TILE_N, 8)]
        return block, [(0, 0, 16, rung.TILE_N)], thread, rung.TILE_K
    if name == "tensor_core":
        rows, columns = range(0, rung.WARP_M, 8), range(0, rung.WARP_N, 8)
        thread = [(r, c, 1, 2) for r in rows for c in columns]
    else:
        thread = [(r, c, 4, 4) for r in range(0, rung.WARP_M, 32) for c in range(0, rung.WARP_N, 16)]
    return block, [(0, 0, rung.WARP_M, rung.WARP_N)], thread, rung.TILE_K


def draw(rung) -> str:
    """The SVG of one rung."""
    (rows, columns), warp, thread, depth = squares(rung)
    scale = SIDE / max(rows, columns, 64)
    left = top = DEPTH + GAP
    shapes = []

    def box(x, y, width, height, fill, stroke="none"):
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 1):.1f}"'
            f' fill="{fill}" stroke="{stroke}"/>'
        )

    k = min(DEPTH, depth * scale)
    for x, y, width, height in ((left, top, SIDE, SIDE), (0, top, DEPTH, SIDE), (left, 0, SIDE, DEPTH)):
        box(x, y, width, height, "#fafafa", "#bbbbbb")
    parts = ([(0, 0, rows, columns)], LIGHT), (warp, MIDDLE), (thread, DARK)
    for owned, colour in parts:
        for row, column, height, width in owned:
            box(left + column * scale, top + row * scale, width * scale, height * scale, colour)
            box(0, top + row * scale, k, height * scale, colour)
            box(left + column * scale, 0, width * scale, k, colour)
    text = [(4, top - 4, "x"), (left + 4, DEPTH + 11, "w above, outputs below"),
            (left, top + SIDE + 16, f"{rows} x {columns} outputs a block, {depth} k's at a time")]  # fmt: skip
    label = "".join(f'<text x="{x}" y="{y}">{words}</text>' for x, y, words in text)
    size = left + SIDE + 1, top + SIDE + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
    return f'{head} font-family="sans-serif" font-size="11">{"".join(shapes)}{label}</svg>\n'


def main(ladder: str) -> None:
    """Write the SVG of every rung that has tiles of its own."""
    package = importlib.import_module(f"stages.{ladder}")
    for stage in package.STAGES:
        if stage != "triton":
            rung = importlib.import_module(f"stages.{ladder}.{stage}")
            (Path(package.__file__).parent / f"{stage}.svg").write_text(draw(rung), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
