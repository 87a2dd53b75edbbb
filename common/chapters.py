"""`lesson report`: the parts of README and chapters that come from code and records, written anew where they stand.

A part is what lies between <!-- name arguments --> and <!-- end -->. So a quoted definition cannot drift from its
module, and a table cannot say what no record says. Numbers in the text between them are common/figures.py's.
"""

import re
import subprocess
from collections.abc import Collection
from pathlib import Path

from common import catalog, diff, figures, pictures, show
from common.figures import REPORTS, ROOT
from common.stage import FOLDER, GENERAL, LADDER, PEERS, source_path

PART = re.compile(r"(<!-- (\w+)((?: [^\s>]+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class ChapterError(Exception):
    """A part that can't be written: an unknown name, or a definition or record that is not there."""

    exit_code = 1


def files() -> list[Path]:
    """README, the general chapters, and those beside the stages. Raises ChapterError outside a clone."""
    if not REPORTS.is_dir():
        raise ChapterError("there is no reports/ here: run this in a clone, since records are not installed")
    return [ROOT / "README.md", *sorted(GENERAL.glob("*.md")), *sorted(FOLDER.rglob("*.md"))]


def refresh() -> list[Path]:
    """Rewrite the parts of every file. -> the files that changed. Raises ChapterError."""
    changed = []
    for path in files():
        old = path.read_text("utf-8")
        new = filled(old, path)
        if new != old:
            path.write_text(new, "utf-8")
            changed.append(path)
    for path, text in outdated():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        changed.append(path)
    return changed


def outdated() -> list[tuple[Path, str]]:
    """The pages and pictures that are written as a whole and stand otherwise, with what they should be."""
    pages = {**diffs(), **pictures.drawn()}
    return [(path, text) for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]


def stale() -> list[Path]:
    """The outdated ones that also stand otherwise without the records that git does not hold.

    A reader's own comparison makes no page wrong: it comes into them with `lesson report`.
    """
    found, own = outdated(), untracked()
    before = diffs(without=own) if found and own else {}
    return [path for path, _ in found if path not in before or path.read_text("utf-8") != before[path]]


def untracked() -> set[Path]:
    """The records that git does not hold; none where there is no git."""
    command = ["git", "ls-files", "--others", "--exclude-standard", "-z", "--", str(REPORTS)]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {ROOT / name for name in found.split("\0") if name}


def filled(text: str, path: Path) -> str:
    """A file's text with every part written anew, and then every number that carries a formula. Raises ChapterError."""

    whole = PART.sub(lambda match: written(match, path), text)
    try:
        return figures.figures(whole, figures.folder(path, whole))
    except figures.FigureError as error:
        raise ChapterError(f"{path.name}: {error}") from error


def written(match: re.Match, path: Path) -> str:
    """One part as it should stand in that file. Raises ChapterError."""
    head, name, arguments, _, tail = match.groups()
    if name not in WRITERS:
        raise ChapterError(f"{path.name}: no part is called {name!r}; there are {', '.join(WRITERS)}")
    try:
        return f"{head}{WRITERS[name](path, *arguments.split())}\n{tail}"
    except (KeyError, OSError, TypeError) as error:
        raise ChapterError(f"{path.name}: <!-- {name}{arguments} -->: {error!r}") from error


def code(path: Path, name: str, module: str | None = None) -> str:
    """A definition of the module beside the chapter, or of another by its path from the root."""
    source = ROOT / module if module else path.with_suffix(".py")
    found = diff.definitions(source.read_text("utf-8"))
    return f"```python\n{found[name].text}\n```"


def step(path: Path, *names: str) -> str:
    """What the named definitions changed against the stage before."""
    previous = diff.constant(path.with_suffix(".py"), "PREVIOUS")
    found = {c.name: c for c in diff.changes(path.with_name(f"{previous}.py"), path.with_suffix(".py"))}
    lines = [line for name in names for line in found[name].unified()]
    return "```diff\n" + "\n".join(lines) + "\n```"


def compared(path: Path, record: str, *stages: str) -> str:
    """A comparison's table, of some of its stages or all; record is a file under reports/, * stands for any letters."""
    document = figures.record(record)
    timed = document["stages"][0]["tokens_timed"] - 1
    token = f"ms/token (mean of {timed})"
    rows = []
    shown = some(document, stages)
    pairs = {(p["b"], p["metric"]): p for p in document["pairs"] if p["a"] in [r["stage"] for r in shown]}
    for r in shown:
        cells = [r["stage"]]
        for metric in ("ttft_ms", "ms_per_token"):
            pair, saw = pairs.get((r["stage"], metric), {}), r[metric] and r[metric]["median"]
            cells += [
                show.number(saw),
                show.times(pair.get("ratio")),
                show.times(pair.get("expected_ratio")),
                show.times(saw and saw / r["expect"][f"bound_{metric}"]),
                pair.get("verdict", ""),
            ]
        rows.append(cells)
    head = ["", *(h for title in ("TTFT ms", token) for h in (title, "×", "expected ×", "× bound", "verdict"))]
    ends, kept = ["---", *(["---:"] * 4 + ["---"]) * 2], show.kept(rows)
    lines = ["| " + " | ".join(row[i] for i in kept) + " |" for row in (head, ends, *rows)]
    told = f"Median of {runs(document)} runs; × is the mean of paired ratios."
    why = "" if stages else f" {document['why']}"  # which is of all of them
    return "\n".join([*lines, "", f"{show.footer(document['stages'][0])}. {told}{why}"])


def some(document: dict, stages: tuple[str, ...]) -> list[dict]:
    return [r for r in document["stages"] if not stages or r["stage"] in stages]


def costs(path: Path, record: str, *stages: str) -> str:
    """What a comparison's stages, some of them or all, cost outside the clock."""
    document = figures.record(record)
    rows = ["| | load s | peak MiB | minor faults | major faults | lines |", "|---|" + "---:|" * 5]
    for r in some(document, stages):
        faults = r["page_faults"]
        lines = len(source_path(r["stage"]).read_text("utf-8").splitlines())
        cells = [r["stage"], show.number(r["load_ms"] / 1e3), f"{r['peak_rss_mb']:,.0f}"]
        rows.append("| " + " | ".join([*cells, f"{faults['minor']:,}", f"{faults['major']:,}", str(lines)]) + " |")
    return "\n".join(rows)


def runs(document: dict) -> int:
    return len(document["stages"][0]["ttft_ms"]["samples"])


def ladder(path: Path, *records: str) -> str:
    """Every stage with its idea, and what it took: in a comparison, or (a folder) as each stage's own record has it.

    A peer that was recorded beside them is the last row.
    """
    columns = [folder_columns(record) if (REPORTS / record).is_dir() else columns_of(record) for record in records]
    head = ["stage", "the one idea", *(title for titles, _, _ in columns for title in titles)]
    rows = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    stages = [(s["name"], f"[{s['name']}](stages/{s['name']}.md)", s["idea"]) for s in catalog.document()["stages"]]
    peers = [(p, p, "another engine, on the same file") for p in PEERS if any(p in cells for _, cells, _ in columns)]
    for name, link, idea in stages + peers:
        cells = [cell for titles, cells, _ in columns for cell in cells.get(name, ["–"] * len(titles))]
        rows.append("| " + " | ".join([link, idea, *cells]) + " |")
    return "\n".join([*rows, "", "  \n".join(f"{line}." for _, _, line in columns)])


def columns_of(record: str) -> tuple[list[str], dict[str, list[str]], str]:
    """A comparison (file, or file#metric) as columns of the ladder: titles, each stage's cells, the machine's line."""
    record, _, only = record.partition("#")  # of one metric
    document = figures.record(record)
    first = document["stages"][0]
    title = f"{show.named(first['model']['name'])}, {first['shape']}"
    titles = {"ttft_ms": "TTFT ms", "ms_per_token": "ms/token"}
    kept = [
        m for m in titles if only in ("", m) and any(r[m] for r in document["stages"])
    ]  # a slow stage may leave time for one token
    cells = {r["stage"]: [show.number(r[m]["median"]) if r[m] else "–" for m in kept] for r in document["stages"]}
    return [f"{title}: {titles[m]}" for m in kept], cells, show.footer(first, "up to ")


def folder_columns(folder: str) -> tuple[list[str], dict[str, list[str]], str]:
    """As columns_of, from a record a stage, † where that has a note; a stage that ran on the host's CPU has no cell."""
    shapes, cells, line, notes = ("pp512", "tg128"), {}, "", []
    for path in sorted((REPORTS / folder).glob("*.json")):
        record = figures.record(f"{folder}/{path.stem}")
        if path.stem in (*LADDER, *PEERS) and folder.startswith(f"{record['machine']['slug']}/"):
            mark = "†" if record.get("note") else ""
            cells[path.stem] = [cell(record["rows"], shape) + mark for shape in shapes]
            notes += [f". † {path.stem}: {record['note']}"] if mark else []
            model = f"{show.named(record['model']['name'])} {record['model']['quant']}"
            means = "pp512 is TTFT, tg128 ms a token, each from the stage's own record"
            line = f"{record['machine']['name']} · {model} · {means}"
    return [f"{model}: {shape} ms" for shape in shapes], cells, line + "".join(notes)


SHAPES = ("pp64", "pp512", "tg128", "tg128@d1024")


def recorded(path: Path, folder: str, *stages: str) -> str:
    """What stages took at llama-bench's shapes on another machine; a cell of another shape names it."""
    rows = ["| | " + " | ".join(f"{shape} ms" for shape in SHAPES) + " | load s | GPU MB at most |"]
    rows.append("|---|" + "---:|" * (len(SHAPES) + 2))
    for stage in stages:
        record = figures.record(f"{folder}/{stage}")
        memory = record.get("profile", {}).get("gpu_mb", {}).get("peak")
        load = record.get("load_ms") and record["load_ms"] / 1e3
        name = stage + (f" ({record['note']})" if record.get("note") else "")
        cells = [name, *(cell(record["rows"], shape) for shape in SHAPES), show.number(load), show.number(memory)]
        rows.append("| " + " | ".join(cells) + " |")
    machine, model = record["machine"]["name"], record["model"]
    name = f"{show.named(model['name'])} {model['quant']}"
    return "\n".join([*rows, "", f"{machine} · {name}; pp is TTFT, tg ms a token."])


def cell(rows: list[dict], shape: str) -> str:
    """The median at a shape, or else at the one nearest to it that was timed: as much prompt or depth, fewer tokens."""
    kind, depth = shape[:2], shape.partition("@")[2]
    near = [r for r in rows if r["shape"] == shape] or [
        r for r in rows if kind == "tg" and "tg" in r["shape"] and r["shape"].partition("@")[2] == depth
    ]
    if not near:
        return "–"
    ms = (near[-1]["ms_per_token"] or near[-1]["ttft_ms"])["median"]
    return show.number(ms) + ("" if near[-1]["shape"] == shape else f" ({near[-1]['shape']})")


def said(path: Path, name: str) -> str:
    """What a run wrote after its prompt, and what a token took."""
    record = figures.record(name)
    took = f"{len(record['output_ids'])} tokens, {show.number(record['ms_per_token']['median'])} ms each"
    return f"> …{record['text']} …\n\n{show.footer(record)}. {took}."


WRITERS = {f.__name__: f for f in (code, step, compared, costs, ladder, recorded, said)}


def diffs(without: Collection[Path] = ()) -> dict[Path, str]:
    """reports/diffs/A-B.md for each step of the ladder: what comparisons measured, above what changed."""
    pages = {}
    for stage in LADDER:
        previous = diff.constant(source_path(stage), "PREVIOUS")
        if not previous:
            continue
        told = diff.docstring(source_path(stage))
        page = [f"# {previous} → {stage}", "", told[""], "", told["Change"], ""]
        for record in sorted({*REPORTS.glob("*/compare/*.json")} - {*without}):
            name = record.relative_to(REPORTS).as_posix()
            if {previous, stage} <= {r["stage"] for r in figures.record(name)["stages"]}:
                page += [compared(FOLDER, name), ""]
        for change in diff.changes(source_path(previous), source_path(stage)):
            page += [f"## {change.name}", "", "```diff", *change.unified(), "```", ""]
        pages[REPORTS / "diffs" / f"{previous}-{stage}.md"] = "\n".join(page)
    return pages
