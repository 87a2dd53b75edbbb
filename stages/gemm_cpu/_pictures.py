"""The chapters' pictures, drawn by the loops of the rungs: `python -m stages.gemm_cpu._pictures` writes them."""

from pathlib import Path

from common.pictures import LINE, K, N, drawing, picture, rect


def naive() -> str:
    walk = [(k, 0) for k in range(K)]
    return picture(walk, f"one output of naive: {K} cells of w used, {K} lines fetched, {K * LINE} cells moved")


def tiled(tile: int = 8) -> str:
    walk = [(k, n) for n in range(tile) for k in range(tile)]
    caption = f"one tile of tiled: {tile * tile} cells used by every row of x, {tile} lines fetched, none in vain"
    return picture(walk, caption, (0, 0, tile, tile))


def contiguous() -> str:
    walk = [(k, n) for k in range(3) for n in range(N)]
    return picture(walk, "three steps of contiguous: whole rows of w, each added to one row of out")


def blocked(rows: int = 4) -> str:
    """A strip of w one tile wide, from top to bottom: used whole, but each step lands a row further on."""
    walk = [(k, n) for k in range(K) for n in range(LINE)]
    return picture(walk, f"one tile of blocked: a strip of w, read once for {rows} rows of x", (0, 0, K, LINE))


def packed() -> str:
    """The strip of w copied: the panel is one run of memory."""
    kind = ["used" if n // LINE == 1 else "cell" for n in range(N)]
    shapes = [rect(n, k, 1, 1, kind[n]) for k in range(8) for n in range(N)]
    shapes += [rect(n, 12 + k, 1, 1, "used") for k in range(2) for n in range(N)]
    shapes.append(f'<path class="path" d="M {1.5 * LINE * 14:g} {8 * 14} L {1.5 * LINE * 14:g} {12 * 14}"/>')
    shapes.append(f'<text x="{2 * LINE * 14}" y="{11 * 14}">copied once, then read front to back</text>')
    legend = "above: w (K, N), rows apart · below: the panel, one run of memory"
    return drawing(shapes, "one panel of packed: 8 steps of k, side by side", legend)


def drawn() -> dict[Path, str]:
    """Every picture, by the file beside its rung that holds it."""
    folder = Path(__file__).parent
    return {folder / f"{draw.__name__}.svg": draw() for draw in (naive, tiled, contiguous, blocked, packed)}


if __name__ == "__main__":
    for path, text in drawn().items():
        path.write_text(text, "utf-8")
