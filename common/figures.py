"""Numbers in README and chapters that carry their own proof, as in `2<!--= ms("naive") / ms("tiled") -->` ms.

The comment is invisible where the page is rendered. `lesson report` computes each such number anew from the records in
reports/, and `lesson verify` tells where one no longer holds.
"""

import functools
import importlib
import json
import re
from pathlib import Path

from common import diff
from common.gguf import TYPES
from common.sources import PULLED
from common.stage import FOLDER, LADDER, PEERS

ROOT = FOLDER.parent
REPORTS = ROOT / "reports"
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
FIGURE = re.compile(rf"({NUMBER})(<!--= (.*?) -->)")
COMPARED = re.compile(r"<!-- (?:compared|costs) (\S+) -->")


class FigureError(Exception):
    """A formula that can't be computed, with its reason: a record, row or name that is not there."""

    exit_code = 1


def folder(path: Path, text: str) -> Path:
    """Where a chapter's `load` looks first: its ladder's records, of the machine that it names if there are several."""
    name = {FOLDER: "llm", ROOT: ""}.get(path.parent, path.parent.name)
    found = sorted(REPORTS.glob(f"*/{name}")) if name else []
    named = [place for place in found if f"{place.relative_to(ROOT)}/" in text]
    return (named or found or [REPORTS])[0]


def record(name: str, first: Path = REPORTS) -> dict:
    """A record by its path under `first` or reports/; `*` stands for any letters, .json may be left out. KeyError."""
    for place in (first, REPORTS):
        if found := sorted([*place.glob(name), *place.glob(f"{name}.json")]):
            return _read(found[0])
    raise KeyError(f"no record {name}")


@functools.cache
def _read(path: Path) -> dict:
    return in_order(json.loads(path.read_text("utf-8")))


WORDS = {"faster": "slower", "slower": "faster"}


def in_order(found):
    """A comparison's stages as the ladder has them, peers last; a step that was measured backwards is turned round."""
    if not (isinstance(found, dict) and "pairs" in found and "stages" in found) or "rows" in found:
        return found  # the whole ladder's record is in order
    known = [*LADDER, *PEERS]

    def place(stage: str) -> int:
        return known.index(stage) if stage in known else len(known)

    stages = sorted(found["stages"], key=lambda run: place(run["stage"]))
    return {**found, "stages": stages, "pairs": [
        turned(pair) if place(pair["b"]) < place(pair["a"]) < len(known) else pair for pair in found["pairs"]
    ]}  # fmt: skip


def turned(pair: dict) -> dict:
    """The verdict on b against a as that on a against b."""

    def inverse(value: float | None) -> float | None:
        return value and 1 / value

    ends = {key: inverse(pair[of]) for key, of in (("ratio", "ratio"), ("low", "high"), ("high", "low"),
            ("expected_ratio", "expected_ratio"))}  # fmt: skip
    return {**pair, **ends, "a": pair["b"], "b": pair["a"], "verdict": WORDS.get(pair["verdict"], pair["verdict"])}


def multiply_adds(machine: Path) -> float:
    """GFLOP/s of a machine's fastest float multiply-adds, in any of its records: an older one may know slower ones.

    machine: its folder of records. Raises KeyError where none measured them.
    """
    rates = []
    for path in machine.glob("*/*.json"):
        found = _read(path)
        if isinstance(found, dict):
            rates += [1e3 * found.get("peak_tflops", {}).get(kind, 0) for kind in ("float32", "float16")]
            rates.append((found.get("roofs") or {}).get("multiply_add_gflops", 0))
    if not any(rates):
        raise KeyError(f"no record in {machine} measured multiply-adds")
    return max(rates)


def scope(text: str, reports: Path) -> dict:
    """What a formula may name.

    load(file) reads a record of `reports` or of another folder; of a kernel ladder's record, row, ms, tflops and
    ratio (to cuBLAS) take a rung and a shape, or what the ladder makes one of: N, or N, D, causal for attention. Where
    no type is named FP16 comes first. counter takes a rung and a name. run(stage) and pair(stage, metric) read the
    comparisons that the text itself shows, article(which, name) what the two articles printed, types["Q4_K"] a block's
    layout, multiply_adds(machine) the highest GFLOP/s of its records, pulled["smollm2"] a model that can be fetched,
    constant(module, name) a constant of the code.
    """
    load = functools.partial(record, first=reports)

    def row(stage, *shape, dtype=None):
        ladder = load("ladder")
        square = getattr(importlib.import_module(f"stages.{ladder['ladder']}"), "square", None)
        if len(shape) == 1 or (square and len(shape) <= 3):
            shape = square(*shape) if square else shape * 3
        rows = [r for r in ladder["rows"] if r["stage"] == stage and r["shape"] == [*shape]]
        rows = [r for r in rows if dtype in (None, r["dtype"])]
        return max(rows, key=lambda r: r["dtype"] == "float16")

    def shown():
        return [record(name) for name in dict.fromkeys(COMPARED.findall(text))]

    def run(stage, at=0):
        return [r for d in shown() for r in d["stages"] if r["stage"] == stage][at]

    def pair(stage, metric, at=0):
        return [p for d in shown() for p in d["pairs"] if (p["b"], p["metric"]) == (stage, metric)][at]

    return {
        "load": load,
        "row": row,
        "ms": lambda stage, *shape, **of: row(stage, *(shape or (4096,)), **of)["ms"]["median"],
        "tflops": lambda stage, *shape, **of: row(stage, *(shape or (4096,)), **of)["tflops"],
        "ratio": lambda stage, *shape, to="cublas", **of: row(stage, *shape, **of)["ratio_to_baseline"][to],
        "counter": lambda stage, name, at=0: [r for r in load("counters")["rows"] if r["stage"] == stage][at][name],
        "run": run,
        "pair": pair,
        "article": lambda which, name: record("quoted/articles")[which][name],
        "multiply_adds": lambda slug: multiply_adds(REPORTS / slug),
        "types": TYPES,
        "pulled": PULLED,
        "constant": lambda module, name: diff.constant(ROOT / f"{module}.py", name),
        **{f.__name__: f for f in (next, sum, min, max, len)},
    }


def computed(shown: str, formula: str, names: dict) -> str:
    """What a formula gives, with the decimals and the commas of the number shown. Raises FigureError."""
    try:
        value = eval(formula, {"__builtins__": {}}, names)  # the course's own text, as trusted as its code
        text = f"{value:,.{len(shown.partition('.')[2])}f}"
    except Exception as error:  # a formula may fail in any way that an expression can
        raise FigureError(f"{shown}<!--= {formula} -->: {type(error).__name__}: {error}") from error
    text = text.lstrip("-") if not float(text.replace(",", "")) else text  # no minus before zero
    return text if "," in shown else text.replace(",", "")


def figures(text: str, reports: Path) -> str:
    """A text with each number that carries a formula computed anew. Raises FigureError."""
    names = scope(text, reports)
    return FIGURE.sub(lambda match: computed(match[1], match[3], names) + match[2], text)
