"""The chapters' pictures: what a stage does to memory, drawn as SVG by the same loops that the stage runs."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from common.stage import FOLDER

CELL = 14  # pixels a float
LINE = 8  # floats drawn to a cache line; a real one holds 16
K, N = 16, 32  # the matrix drawn
STYLE = """
text { font: 9px system-ui, sans-serif; fill: #333 }
.cell { fill: #f2f2f2; stroke: #ddd }
.line { fill: #cfe3ff; stroke: #9dbfe8 }
.used { fill: #2f6fce; stroke: #2f6fce }
.tile { fill: none; stroke: #c4511a; stroke-width: 2 }
.path { fill: none; stroke: #c4511a; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .cell { fill: #222; stroke: #333 } .line { fill: #1d3557; stroke: #2f5588 }
}
"""


def naive() -> str:
    """One output: a whole column, one cell used of every line it touches."""
    walk = [(k, 0) for k in range(K)]
    caption = f"one output of naive: {K} cells used, {K} lines fetched, {K * LINE} cells moved"
    return picture(walk, caption)


def tiling(tile: int = 8) -> str:
    """One tile: its lines are fetched once and every cell of them is used before the next tile."""
    walk = [(k, n) for n in range(tile) for k in range(tile)]
    caption = f"one tile of tiling: {tile * tile} cells used by every token, {tile} lines fetched, none in vain"
    return picture(walk, caption, (0, 0, tile, tile))


def simd() -> str:
    """One tile: a register wide, eight rows high; every token passes over it."""
    walk = [(k, n) for k in range(8) for n in range(LINE)]
    caption = "one tile of simd: 8 lines, each one register, used whole by every token"
    return picture(walk, caption, (0, 0, 8, LINE))


def kv_cache() -> str:
    """The arena of one layer: rows filled so far, and the one that a new token fills."""
    seen, row = 9, 10
    shapes = [
        rect(x + 17 * half, y, 1, 1, "used" if y == seen else "line" if y < seen else "cell")
        for half in range(2)
        for y in range(K)
        for x in range(15)
    ]
    shapes += [
        f'<text x="{17 * half * CELL}" y="{(K + 1) * CELL}">{what}: (context, G, hd), a row a position</text>'
        for half, what in enumerate(("keys", "values"))
    ]
    caption = f"one layer's part of the arena: {seen} positions seen, position {row} being written, the rest untouched"
    return drawing(shapes, caption, "dark: written now · light: read by attention · pale: no page yet")


def quantized() -> str:
    """One row of blocks, and the scratch that one of them is unpacked into."""
    shapes, blocks, wide = [], 4, 8
    for n in range(5):
        for b in range(blocks):
            kind = "used" if (n, b) == (1, 1) else "line" if (n, b) < (1, 1) else "cell"
            shapes.append(rect(b * wide, 2 * n, wide, 1, kind))
    shapes += [rect(x, 13, 1, 1, "used") for x in range(N)]
    shapes.append(f'<path class="path" d="M {1.5 * wide * CELL:g} {3 * CELL} L {N * CELL / 2:g} {13 * CELL}"/>')
    shapes.append(f'<text y="{12.6 * CELL:g}">scratch: one block as float32</text>')
    caption = "five rows of w (N, K), four blocks each: one block at a time becomes floats, for all tokens"
    return drawing(shapes, caption, "dark: in use · light: used and forgotten · pale: not read yet")


PICTURES = {"naive": naive, "tiling": tiling, "simd": simd, "kv_cache": kv_cache, "quantized": quantized}


def picture(walk: list[tuple[int, int]], caption: str, tile: tuple[int, int, int, int] | None = None) -> str:
    """The matrix w (K, N), the cells that `walk` visits in order, the lines they drag in, and a tile's outline."""
    touched = {(k, n // LINE) for k, n in walk}
    used = set(walk)
    shapes = [
        rect(n, k, 1, 1, "used" if (k, n) in used else "line" if (k, n // LINE) in touched else "cell")
        for k in range(K)
        for n in range(N)
    ]
    if tile:
        k, n, height, width = tile
        shapes.append(rect(n, k, width, height, "tile"))
    shapes.append(f'<polyline class="path" points="{" ".join(points(walk))}"/>')
    return drawing(shapes, caption, "w (K, N), a row is contiguous · dark: used · light: fetched with it")


def drawing(shapes: list[str], caption: str, legend: str) -> str:
    """Shapes on a sheet of N x K cells, with a caption and a legend below."""
    width, bottom = N * CELL, (K + 1) * CELL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {bottom + 44}" role="img">\n'
        f"<title>{caption}</title>\n<style>{STYLE}</style>\n"
        + "\n".join(shapes)
        + f'\n<text y="{bottom + 18}">{caption}</text>\n<text y="{bottom + 36}">{legend}</text>\n</svg>\n'
    )


def points(walk: Iterable[tuple[int, int]]) -> Iterator[str]:
    return (f"{n * CELL + CELL / 2:g},{k * CELL + CELL / 2:g}" for k, n in walk)


def rect(x: int, y: int, width: int, height: int, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x * CELL}" y="{y * CELL}" width="{width * CELL}" height="{height * CELL}"/>'
    )  # fmt: skip


def drawn() -> dict[Path, str]:
    """Every picture, by the file beside its stage that holds it."""
    return {FOLDER / f"{stage}.svg": draw() for stage, draw in PICTURES.items()}
