"""A picture for each rung of both attention ladders, drawn from its own constants: the scores that a block looks at.

`python -m common.attention_picture` writes an SVG beside each chapter, and one of the losses that
`python -m common.transformer` recorded. Queries run down, keys across; below the line is what a causal mask leaves.
Light is a block's walk, middle what of it is in shared memory at one time, dark the share of one warp, or of one group
of four; grey is kept in the GPU's memory.
"""

import importlib
import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from common import plots

SCORES = 768  # queries, and keys, that the picture shows
SIDE = 288  # pixels of their square
STRIP = 22  # pixels of the operands beside it
GAP = 10
GREY, LIGHT, MIDDLE, DARK = "#e4e4e4", "#cfe3f5", "#7fb2e0", "#174a7c"
OTHER = "#f6e3c5", "#e0b066", "#8a5a12"  # of a second kernel


class Walk(NamedTuple):
    """What one block does, as (row, column, rows, columns) of the scores; `keeps` says which of its operands stay."""

    whole: tuple
    tile: tuple
    share: tuple
    keeps: str = "queries"


def forward(rung, stage: str) -> list[Walk]:
    """The walk of one block of queries in the middle of its head."""
    middle, scores = SCORES // 2, SCORES
    if stage == "naive":
        return [Walk((middle, 0, 1, scores), (middle, 0, 1, rung.THREADS), (middle, 0, 1, 32))]
    if stage == "online":
        return [Walk((middle, 0, rung.TILE_Q, scores), (0, 0, 0, 0), (middle, 192, 1, 1))]
    rows = 64 * rung.GROUPS[64] if stage == "hopper" else rung.TILE_Q
    own, ahead = (64, rung.STAGES) if stage == "hopper" else (rows // rung.WARPS, 2)
    row, wide = middle // rows * rows, rung.TILE_K
    end = scores if stage == "flash" else -(-(row + rows) // wide) * wide
    return [Walk((row, 0, rows, end), (row, 0, rows, ahead * wide), (row, 0, own, wide))]


def backward(rung, stage: str) -> list[Walk]:
    """The walk of one block of keys, and that of one block of queries where those have a kernel of their own."""
    scores, first, middle = SCORES, 256, SCORES // 2
    if stage == "stored":
        return forward(rung, "naive")
    hopper, ahead = stage == "hopper", 1 if stage in ("recomputed", "split") else getattr(rung, "STAGES", 2)
    kept = 64 * rung.GROUPS if hopper else getattr(rung, "TILE_K", 0) or rung.TILE
    down = getattr(rung, "TILE_Q", 0) or rung.TILE
    across = rung.TILE_K[64] if hopper else kept
    own, cut = 64 if hopper else 16, stage in ("skip", "hopper")
    begin = first // down * down if cut else 0
    end = -(-(middle + kept) // across) * across if cut else scores
    column = (begin, first, scores - begin, kept), (begin, first, ahead * down, kept), (begin, first, down, own)
    row = (middle, 0, kept, end), (middle, 0, kept, min(end, ahead * across)), (middle, 0, own, across)
    return [Walk(*column, "keys")] + ([] if stage == "recomputed" else [Walk(*row)])


def draw(ladder: str, rung) -> str:
    """The SVG of one rung."""
    stage, shapes = rung.__name__.rpartition(".")[2], []
    walks = (forward if ladder == "attention" else backward)(rung, stage)
    left = top = STRIP + GAP
    scale = SIDE / SCORES

    def box(x, y, width, height, fill, stroke="none"):
        if width > 0 and height > 0:
            shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{max(height, 1.5):.1f}"'
                f' fill="{fill}" stroke="{stroke}"/>'
            )

    stored = stage in ("naive", "stored")
    box(left, top, SIDE, SIDE, GREY if stored else "#fafafa", "#bbbbbb")
    for x, y, width, height in ((0, top, STRIP, SIDE), (left, 0, SIDE, STRIP)):
        box(x, y, width, height, "#fafafa", "#bbbbbb")
    for walk, colours in zip(walks, ((LIGHT, MIDDLE, DARK), OTHER), strict=False):
        for (row, column, rows, columns), colour in zip(walk[:3], colours, strict=True):
            box(left + column * scale, top + row * scale, columns * scale, rows * scale, colour)
        for i, (row, column, rows, columns) in enumerate((walk.whole, walk.tile)):
            kept = (walk.keeps == "queries") == (i == 0)  # what stays is drawn whole, what is walked over as the tile
            if kept:
                box(0, top + row * scale, STRIP, rows * scale, colours[1])
            else:
                box(left + column * scale, 0, columns * scale, STRIP, colours[1])
    shapes.append(f'<path d="M{left} {top} l{SIDE} {SIDE}" stroke="#555555" stroke-dasharray="4 3"/>')
    operands = ("q", "k and v") if ladder == "attention" else ("q and dout", "k and v")
    turn = f'transform="rotate(-90 {STRIP - 7} {top + SIDE - 6})"'
    words = [(STRIP - 7, top + SIDE - 6, operands[0], turn), (left + SIDE - 44, STRIP - 7, operands[1], ""),
             (left + SIDE - 44, top + 14, "masked", "")]  # fmt: skip
    told = caption(walks, stored)
    words += [(0, top + SIDE + 16 + 14 * i, line, "") for i, line in enumerate(told)]
    label = "".join(f'<text x="{x}" y="{y}"{" " + more if more else ""}>{said}</text>' for x, y, said, more in words)
    size = left + SIDE + 1, top + SIDE + 10 + 14 * len(told)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
    return f'{head} font-family="sans-serif" font-size="11">{"".join(shapes)}{label}</svg>\n'


def caption(walks: list[Walk], stored: bool) -> list[str]:
    """What is drawn, in numbers: a line for each kernel."""
    if stored:
        return ["a query a block; every score in memory"]
    told = []
    for walk in walks:
        rows, columns = walk.whole[2:] if walk.keeps == "queries" else (walk.share[2], walk.whole[3])
        kept, met = (rows, walk.share[3]) if walk.keeps == "queries" else (columns, rows)
        other = "queries" if walk.keeps == "keys" else "keys"
        told.append(f"{kept} {walk.keeps} a block, {met} {other if met > 1 else 'key'} at a time")
    return told


def losses(record: dict) -> plots.Plot:
    """How far each attention's losses part from "sdpa"'s at each step, on average over the starts."""
    runs = {name: run for name, run in record["runs"].items() if run["parted_from_sdpa"]["largest"]}
    pairs = [*zip(*record["runs"]["sdpa"]["losses"], strict=True)]  # of each step, the losses of all starts
    values = [
        {"attention": name, "step": step, "apart": fmean(abs(x - y) for x, y in zip(at, pair, strict=True))}
        for name, run in runs.items()
        for step, (at, pair) in enumerate(zip(zip(*run["losses"], strict=True), pairs, strict=True), start=1)
    ]
    across = {"field": "step", "type": "quantitative", "axis": {"title": "training step", "grid": False}}
    up = plots.axis("apart", "|loss - SDPA's|", plots.at([v["apart"] for v in values]), form="~e")
    colours = ["$peer" if name.startswith("sdpa") else colour for name, colour in zip(runs, plots.SERIES, strict=False)]
    drawn = {"x": across, "y": up, "color": plots.told_apart("attention", list(runs), colours, "stroke")}
    title = f"How far a training parts from SDPA's, the mean of {record['task']['starts']} starts"
    layers = [plots.mark("line", drawn, strokeWidth=1.5)]
    rows = [(v["attention"], v["step"], v["apart"]) for v in values]
    return plots.Plot(
        "losses", title, "", plots.layered(values, layers, 300, len(runs)), ("attention", "step", "apart"), rows
    )


def main() -> None:
    """Write the SVG of every rung that has tiles of its own, and of the losses."""
    for ladder in ("attention", "attention_backward"):
        package = importlib.import_module(f"stages.{ladder}")
        for stage in package.STAGES:
            if stage != "triton":
                rung = importlib.import_module(f"stages.{ladder}.{stage}")
                (Path(package.__file__).parent / f"{stage}.svg").write_text(draw(ladder, rung), "utf-8")
    folder = Path(package.__file__).parent
    record = folder.parent.parent / "reports" / "nvidia-h200" / "attention" / "transformer.json"
    _, svg = plots.pictures(losses(json.loads(record.read_text("utf-8"))))
    (folder / "losses.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    main()
