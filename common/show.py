"""How results look in a terminal: 80 columns, readable without colour."""

import difflib
import math
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from common import diff
from common.stage import code_path

WIDTH = 80
HEIGHT = 25  # of no consequence, but given both, the console asks the environment for neither
LEAST_WIDTH = 20  # a table narrower than this holds no number
TINT = {"-": "on #3a1f1f", "+": "on #1f3a25"}  # behind a line that goes, that comes
# Control characters but newline and tab, and the marks that turn the direction of text; emoji joiners stay.
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
STYLES = {"faster": "green", "slower": "red", "no measurable change": "yellow", "too few runs": "yellow"}


class Page(Console):
    """A console that leaves a broken pipe to the command line, which knows what to do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """stdout: 80 columns where it is a pipe, the terminal's own width otherwise; markup in text means nothing."""
    asked = os.environ.get("COLUMNS")
    width = None if asked is None and sys.stdout.isatty() else columns(asked)
    height = None if width is None else HEIGHT
    return Page(width=width, height=height, markup=False, highlight=False, emoji=False)


def columns(asked: str | None) -> int:
    """The width that COLUMNS asks for, WIDTH where it is no number above 0."""
    try:
        width = int(asked or WIDTH)
    except ValueError:
        return WIDTH
    return max(LEAST_WIDTH, width) if width > 0 else WIDTH


def heading(text: str) -> Text:
    return Text(text, style="bold")


def dim(text: str) -> Text:
    return Text(text, style="dim")


def paragraph(label: str, text: str) -> Table:
    """A labelled part of a docstring, its text hanging beside the label."""
    laid = Table.grid(padding=(0, 1))
    laid.add_column(width=6, style="dim")
    laid.add_column()
    laid.add_row(label, Text(text))
    return laid


def safe(text: str) -> str:
    """Model text that can't act on a terminal: each unsafe character becomes its escape."""
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def quote(text: str) -> Text:
    """What the model wrote."""
    return Text.assemble(("text: ", "dim"), " ".join(safe(text).split("\n")))


def spread(summary: dict) -> str:
    """± one sample standard deviation, in percent of the median."""
    return f"±{100 * summary['stdev'] / summary['median']:.1f} %" if summary["stdev"] is not None else "–"


def verdict(pair: dict) -> Text:
    """'tiling is faster than naive on TTFT: 1.75×, expected 1.83× (6 pairs; 3 % would have been seen)'."""
    metric = {"ttft_ms": "TTFT", "ms_per_token": "ms/token"}[pair["metric"]]
    word = pair["verdict"]
    claim = (
        f"{pair['b']} is {word} than {pair['a']}"
        if word in ("faster", "slower")
        else f"{pair['a']}, {pair['b']}: {word}"
    )
    seen = "" if pair["smallest"] is None else f"; {100 * pair['smallest']:.0f} % or more would have been seen"
    return Text.assemble(
        (claim, STYLES[word]),
        f" on {metric}: {times(pair['ratio'])}, expected {times(pair['expected_ratio'])} ({pair['pairs']} pairs{seen})",
    )


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits: 1,712 · 98.3 · 0.482, below 0.1 fewer: 0.021 · 0.0002; '–' for None."""
    if value is None or value != value:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    if 0 < abs(value) < 0.0005:
        digits = -math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}{unit}"


def times(value: float | None) -> str:
    return "–" if value is None or value != value else f"{number(value)}×"


def kept(rows: list) -> list[int]:
    """The columns of a table that hold something."""
    return [i for i in range(len(rows[0])) if any(row[i] not in ("", "–") for row in rows)]


def table(*columns: str) -> Table:
    """A table without boxes: the first column of words, the others of numbers."""
    made = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return made


def code_diff(change: diff.Change) -> list:
    """One changed definition: its name, then its lines with - and + at the edge."""
    word = "new" if not change.old else "gone" if not change.new else "changed"
    return [Text.assemble((f"{change.name}", "bold"), (f"  {word}", "dim")), *map(line_diff, change.unified())]


def line_diff(line: str) -> Text:
    """A line that begins with ' ', '-' or '+'."""
    mark, code = line[0], line[1:]
    row = Text.assemble((mark + " ", {"-": "red", "+": "green"}.get(mark, "")), highlight(code))
    row.stylize(TINT.get(mark, ""))
    return row


def highlight(code: str) -> Text:
    """Python in colour, its spaces kept."""
    text = Syntax("", "python", theme="ansi_dark").highlight(code)
    text.rstrip()
    text.no_wrap, text.overflow = False, "fold"
    return text


def stage_diff(a: str, b: str, side_by_side: bool) -> list:
    """Every definition that differs, one under the other or in two columns."""
    old, new = code_path(a), code_path(b)
    shown = []
    for change in diff.changes(old, new):
        shown += [*(two_columns(old, new, change) if side_by_side else code_diff(change)), ""]
    return shown or [f"{a} and {b} are the same code"]


def two_columns(old: Path, new: Path, change: diff.Change) -> list:
    """One changed definition in two columns, aligned line by line."""
    a, b = (d.text.splitlines() if d else [] for d in (change.old, change.new))
    columns = Table(box=None, padding=(0, 1), pad_edge=False, expand=True)
    for path in (old, new):
        columns.add_column(f"{path.stem}: {change.name}", ratio=1, overflow="fold")
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for k in range(max(i2 - i1, j2 - j1)):
            left = highlight(a[i1 + k]) if i1 + k < i2 else Text()
            right = highlight(b[j1 + k]) if j1 + k < j2 else Text()
            if tag != "equal":
                left.stylize(TINT["-"])
                right.stylize(TINT["+"])
            columns.add_row(left, right)
    return [columns]


def page(path: Path, text: str) -> list:
    """A chapter laid out, or a stage's whole file in colour."""
    return [Markdown(text) if path.suffix == ".md" else highlight(text)]


def prose(path: Path) -> str:
    """A chapter without the comments that its source carries, but for those it quotes."""
    quoted_or_comment = r"(`[^`\n]+`|^ {4}[^\n]*)|^<!--.*?-->\n|<!--.*?-->"
    return re.sub(quoted_or_comment, lambda match: match[1] or "", path.read_text("utf-8"), flags=re.S | re.M)


def run_result(record: dict) -> list:
    """What a run cost, under its text."""
    rows = table("", "ms", "expected", "bound", "× bound")
    expect = record["expect"]
    ttft = record["ttft_ms"]["median"]
    rows.add_row(
        f"time to first token ({len(record['prompt_ids'])} tokens)",
        number(ttft),
        number(expect["ttft_ms"]),
        number(expect["bound_ttft_ms"]),
        times(ttft / expect["bound_ttft_ms"]),
    )
    if record["ms_per_token"]:
        token = record["ms_per_token"]["median"]
        rows.add_row(
            f"a token after it (mean of {record['tokens_timed'] - 1})",
            number(token),
            number(expect["ms_per_token"]),
            number(expect["bound_ms_per_token"]),
            times(token / expect["bound_ms_per_token"]),
        )
    if "peer" in record:
        from common import peers

        agreed = {"stage": record["stage"], **record["agreement"]}
        return [rows, costs([record]), agreement(agreed), peers.told(record["peer"]), dim(footer(record))]
    return [rows, costs([record]), dim(footer(record))]


def agreement(found: dict) -> str:
    """'naive: every id the reference's own; logits NMSE 3e-13 of 1e-08 allowed, KL 2e-13'"""
    ids = "every id the reference's own" if found["first_difference"] is None else "ids differ at a tie only"
    if not found["tokens_equal"]:
        ids = f"new id {found['first_difference']} is not the reference's, nor a tie"
    over = "" if found["passed"] else " (outside its tolerance: read its times with that in mind)"
    told = f"logits NMSE {found['nmse']:.0e} of {found['tolerance']:.0e} allowed, KL {found['kl']:.0e}"
    return f"{found['stage']}: {ids}; {told}{over}"


def costs(records: list[dict]) -> Table:
    """What lies outside the clock: loading, compiling, memory, page faults."""
    rows = table("outside the clock", "load s", "compile s", "peak MiB", "minor faults", "major")
    for r in records:
        rows.add_row(
            r["stage"],
            number(r["load_ms"] / 1e3),
            number(r["jit_ms"] / 1e3),
            f"{r['peak_rss_mb']:,.0f}",
            f"{r['page_faults']['minor']:,}",
            f"{r['page_faults']['major']:,}",
        )
    return rows


# What a model's file calls itself, and what people call it
NAMES = {"Smollm2 135M 8k Lc100K Mix1 Ep2": "SmolLM2 135M", "tinyllama shape, random weights": "TinyLlama shape"}


def named(name: str) -> str:
    for told, short in NAMES.items():
        name = name.replace(told, short)
    return name


def footer(record: dict, most: str = "") -> str:
    """The machine line: where, on what, and which version; most: "up to " where not every stage shares its work."""
    model, machine, commit = record["model"], record["machine"], record["commit"]
    layers = (
        "" if model["layers"] == model["file_layers"] else f", first {model['layers']} of {model['file_layers']} layers"
    )
    version = f", commit {commit['sha'][:9]}{' + changes' if commit['dirty'] else ''}" if commit else ""
    threads = f"{most * (record['threads'] > 1)}{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    name = f"{named(model['name'])} {model['quant']}{layers}"
    return f"{machine['name']}, {threads} · {name} · {record['shape']}{version}"
