"""The chapters' pictures: what a stage does to memory, drawn as SVG by the same loops that the stage runs."""

import math
import re
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


def integer() -> str:
    """One row of blocks taken apart into integers and scales, and the tokens it meets."""
    shapes = [rect(8 * b, 0, 8, 1, "used") for b in range(4)]
    shapes += [rect(x, 4, 1, 1, "used") for x in range(N)] + [rect(8 * b, 5, 1, 1, "line") for b in range(4)]
    shapes += [rect(x, 9 + t, 1, 1, "line" if t else "used") for t in range(3) for x in range(N)]
    shapes.append(f'<text y="{2.8 * CELL:g}">one row of w, four blocks; its integers q; its scales d</text>')
    shapes.append(f'<text y="{8 * CELL:g}">three tokens, as integers p</text>')
    return drawing(shapes, "a row is taken apart once, for every token", "dark: in use · light: to follow")


def packed() -> str:
    """Blocks of sixteen rows in the file's order, and the first ones in a strip: five lines, a column for each row."""
    shapes = [rect(8 * b, n, 8, 1, "used" if b == 0 else "cell") for n in range(4) for b in range(4)]
    shapes.append(f'<text x="{2.5 * CELL:g}" y="{6.3 * CELL:g}">row 0, row 1, … row 15, side by side</text>')
    words = [f"weights {i} to {i + 3} and {i + 8} to {i + 11}" for i in (0, 4, 16, 20)]
    for line, what in enumerate(["d, then m: a float16 of each row", *words]):
        y, wide = 7 + 1.5 * line, 1 if line else 0.5
        shapes += [rect(2.5 + wide * x, y, wide, 1, "line" if line > 1 else "used") for x in range(int(16 / wide))]
        shapes.append(f'<text y="{(y + 0.8) * CELL:g}">{64 * line}</text>')
        shapes.append(f'<text x="{19.5 * CELL:g}" y="{(y + 0.8) * CELL:g}">{what}</text>')
    caption = "rows of w, four blocks of Q4_1 each (four of sixteen rows are shown), and their first blocks in a strip"
    return drawing(shapes, caption, "left: bytes from the block's start · dark: in use · light: being fetched")


def blocked() -> str:
    """A panel of weights, tiles of tokens, and the sums where they meet."""
    shapes = [rect(x, n, 1, 1, "used" if 8 <= x < 16 else "cell") for n in range(4) for x in range(N)]
    shapes += [rect(x, 7 + t, 1, 1, kind(x, t)) for t in range(8) for x in range(N)]
    shapes += [rect(8, 0, 8, 4, "tile"), rect(8, 7, 8, 4, "tile")]
    shapes.append(f'<text y="{6 * CELL:g}">tokens, a tile of them at a time</text>')
    caption = "a strip of w above, one panel of it taken apart: all tiles of tokens meet it before the next"
    return drawing(shapes, caption, "dark: in use · light: next · pale: later, with the next panel")


def compiled() -> str:
    """A layer's ops with the Python between them, and the same in one call."""
    wide = ["q", "k", "v", "o", "gate", "up", "down"]
    ops = ["norm", *wide[:3], "rope", "rope", "look", "o", "add", "norm", "gate", "up", "silu", "mul", "down", "add"]
    shapes, at = [], 0.0
    for op in ops:
        shapes.append(rect(at, 0, 1.6 if op in wide else 0.6, 2, "used" if op in wide else "line"))
        at += 1.6 if op in wide else 0.6
        shapes.append(rect(at, 0, 0.8, 2, "cell"))
        at += 0.8
    shapes.append(f'<text y="{3.2 * CELL:g}">blocked: ops, and between them Python</text>')
    at = 0.0
    for op in ops:
        shapes.append(rect(at, 6, 1.4 if op in wide else 0.3, 2, "used" if op in wide else "line"))
        at += 1.4 if op in wide else 0.3
    shapes.append(f'<text y="{9.2 * CELL:g}">compiled: the same ops, and the next layer follows at once</text>')
    return drawing(shapes, "a layer, from left to right in time", "dark: matmul · light: other ops · pale: calls")


def threads() -> str:
    """A token's layer on two cores: what the first does alone, and the jobs whose chunks both take."""
    jobs = ((1.0, 6, "q k v"), (0.8, 3, "heads"), (0.4, 4, "o"), (0.8, 8, "gate, up"), (0.4, 5, "down"))
    shapes, at = [], 0.0
    for alone, chunks, name in jobs:
        shapes.append(rect(at, 0, alone, 2, "line"))
        at += alone
        shapes.append(f'<text x="{at * CELL:g}" y="{7 * CELL:g}">{name}</text>')
        for chunk in range(chunks):
            core, place = chunk % 2, chunk // 2
            shapes.append(rect(at + 1.8 * place + 0.2 * core, 3 * core, 1.7, 2, "used"))
        at += 1.8 * ((chunks + 1) // 2) + 0.3
    shapes.append(f'<text y="{9 * CELL:g}">above the first core, below the second</text>')
    return drawing(shapes, "a layer of one token on two cores", "dark: chunks of a job · light: what one does alone")


def half_cache() -> str:
    """Keys with sixteen positions side by side, and the four queries that meet them."""
    shapes = [rect(x, i, 1, 1, "used" if x < 16 else "cell") for i in range(8) for x in range(N)]
    shapes += [rect(0, i, 16, 1, "tile") for i in (3,)]
    shapes += [rect(3 * h, 11, 2, 4, "line" if h < 3 else "cell") for h in range(4)]
    shapes.append(f'<text y="{10 * CELL:g}">above, keys: a row is one number of the head at sixteen positions</text>')
    shapes.append(f'<text x="{12 * CELL:g}" y="{13 * CELL:g}">queries of three heads, and zeros</text>')
    caption = "a lone token: a register of keys meets four queries"
    return drawing(shapes, caption, "dark: sixteen positions in use · outlined: one register · pale: to follow")


def kind(x: int, t: int) -> str:
    return "cell" if not 8 <= x < 16 else "used" if t < 4 else "line"


PICTURES = {
    "naive": naive,
    "tiling": tiling,
    "simd": simd,
    "kv_cache": kv_cache,
    "quantized": quantized,
    "integer": integer,
    "packed": packed,
    "blocked": blocked,
    "compiled": compiled,
    "threads": threads,
    "half_cache": half_cache,
}


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
    """Shapes on a sheet N cells wide, with a caption and a legend below the lowest."""
    ends = re.findall(r' y="([\d.]+)"(?:.* height="([\d.]+)")?', "\n".join(shapes))
    width, bottom = N * CELL, CELL + math.ceil(max(float(y) + float(height or 0) for y, height in ends))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {bottom + 44}" role="img">\n'
        f"<title>{caption}</title>\n<style>{STYLE}</style>\n"
        + "\n".join(shapes)
        + f'\n<text y="{bottom + 18}">{caption}</text>\n<text y="{bottom + 36}">{legend}</text>\n</svg>\n'
    )


def points(walk: Iterable[tuple[int, int]]) -> Iterator[str]:
    return (f"{n * CELL + CELL / 2:g},{k * CELL + CELL / 2:g}" for k, n in walk)


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x * CELL:g}" y="{y * CELL:g}" width="{width * CELL:g}" height="{height * CELL:g}"/>'
    )  # fmt: skip


def drawn() -> dict[Path, str]:
    """Every picture, by the file beside its stage that holds it."""
    return {FOLDER / f"{stage}.svg": draw() for stage, draw in PICTURES.items()}
