"""The chapters' pictures: what a stage does to memory, drawn as SVG by the same loops that the stage runs."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from common.stage import FOLDER

CELL = 14  # pixels a float
LINE = 8  # floats drawn to a cache line; a real one holds 16
K, N = 16, 32  # the matrix drawn
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
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


PICTURES = {"naive": naive, "tiling": tiling}


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
    width, bottom = N * CELL, K * CELL
    legend = "w (K, N), a row is contiguous · dark: used · light: fetched with it"
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
