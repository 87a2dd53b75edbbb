"""The chapters' pictures, drawn by the rungs' own arithmetic: `python -m stages.int8._pictures` writes them."""

from pathlib import Path

import numpy as np

from common.pictures import CELL, drawing, rect

HIGH = 8  # cells that the loudest number is high
QUIET = (3.0, -1.4, 2.2, 0.6, -2.7, 1.8, -0.9)  # a token's channels but for the loud one
LOUD = 40.0
STEPS = 7  # drawn on each side of zero; a byte has 127


def float() -> str:
    """A row of weights in FP16 and in bytes, as memory has them."""
    shapes = [rect(2 * x, y, 2, 1, "used" if y == 0 else "cell") for y in range(3) for x in range(16)]
    shapes += [rect(x, 8 + y, 1, 1, "used" if y == 0 and x < 16 else "cell") for y in range(3) for x in range(32)]
    shapes.append(
        f'<text y="{4.3 * CELL:g}">rows of w in FP16: two bytes a weight, each used once for a lone token</text>'
    )
    shapes.append(
        f'<text y="{12.3 * CELL:g}">what the next rung makes of them: the same sixteen weights in half the bytes</text>'
    )
    return drawing(shapes, "one row of w meets one token", "a cell is a byte · dark: sixteen weights of the row")


def bars(at: float, values, step: float, loudest: float, kinds) -> list[str]:
    """Numbers as bars, and the grid of `step` that they are rounded to."""
    middle, one = HIGH / 2 + 3, HIGH / 2 / loudest
    lines = [
        f'<path class="line" d="M {at * CELL:g} {(middle - i * step * one) * CELL:g} h {len(values) * 1.5 * CELL:g}"/>'
        for i in range(-STEPS, STEPS + 1)
        if abs(i * step) <= loudest
    ]
    for i, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        nearest = np.rint(value / step) * step * one
        top, height = middle - max(nearest, 0), abs(nearest)
        lines.append(rect(at + 1.5 * i + 0.2, top, 1, height or 0.08, kind))
    return lines


def absmax() -> str:
    """The same channels beside a loud one and without it: the grid is the loudest's."""
    both, kinds = [*QUIET, LOUD], ["used"] * len(QUIET) + ["line"]
    shapes = bars(0, both, LOUD / STEPS, LOUD, kinds)
    shapes += bars(17, QUIET, max(map(abs, QUIET)) / STEPS, max(map(abs, QUIET)), ["used"] * len(QUIET))
    shapes.append(f'<text y="{1.5 * CELL:g}">one loud channel: the rest fall to zero</text>')
    shapes.append(f'<text x="{17 * CELL}" y="{1.5 * CELL:g}">without it: a grid of their own</text>')
    legend = f"lines: the grid, {STEPS} steps to each side where a byte has 127 · light: the loud channel"
    return drawing(shapes, "a token's channels after rounding to the step of its loudest", legend)


def outliers(loud: tuple[int, ...] = (5, 12)) -> str:
    """x and w, and the channels that are set aside before either is rounded."""
    shapes = []
    for y, rows in ((0, 1), (4, 4)):
        for row in range(rows):
            shapes += [rect(x, y + row, 1, 1, "cell" if x in loud else "used") for x in range(20)]
            shapes += [rect(22 + 2 * i, y + row, 2, 1, "line") for i in range(len(loud))]
    texts = [(0, 2.4, "x: integers, zeros where a channel is loud"), (22, 2.4, "set aside: FP16"),
             (0, 9.4, "w: integers, zeros in the same channels"), (22, 9.4, "their columns: FP16"),
             (0, 12.4, "sums of integers, times both steps"), (22, 12.4, "+ products of halves")]  # fmt: skip
    shapes += [f'<text x="{x * CELL}" y="{y * CELL:g}">{words}</text>' for x, y, words in texts]
    return drawing(shapes, "two products, one sum", "a cell is a byte · dark: int8 · light: FP16 · pale: zeros")


def tensor_core(warps: int = 8) -> str:
    """Sixteen rows of w shared out among a block's warps by channels, and what one thread asks for first."""
    shapes = [rect(4 * warp, row / 2, 4, 0.5, "line" if warp else "used") for row in range(16) for warp in range(warps)]
    shapes += [rect(4 * warp, 0, 4, 8, "tile") for warp in range(warps)]
    shapes += [rect(x, 11 + row, 1, 1, "used" if x < 1 else "line") for row in (0, 2) for x in range(4)]
    texts = [(0, 9.4, "16 rows: each of 8 warps takes every eighth 64 channels, and all sums meet at the end"),
             (5, 11.8, "one warp's row: a thread loads 16 bytes of it at once,"),
             (5, 13.8, "and 16 of the row 8 below: two multiplications' worth")]  # fmt: skip
    shapes += [f'<text x="{x * CELL}" y="{y * CELL:g}">{words}</text>' for x, y, words in texts]
    return drawing(shapes, "few tokens: a block's part of w", "dark: one warp's (above), one thread's (below)")


def drawn() -> dict[Path, str]:
    """Every picture, by the file beside its rung that holds it."""
    folder = Path(__file__).parent
    return {folder / f"{draw.__name__}.svg": draw() for draw in (float, absmax, outliers, tensor_core)}


if __name__ == "__main__":
    for path, text in drawn().items():
        path.write_text(text, "utf-8")
