"""The report's plots, as Vega-Lite: one specification gives the PNG, the SVG and the interactive plot of the page.

Colours are names ($ink, $stage, …) until a plot is drawn: PALETTE's in pictures, the style sheet's on the page.
"""

import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

from common import report, show
from common.report import METRICS, Climb, Place, Run
from common.roofline import CACHELESS, operands
from common.stage import GPU, LADDER, PEERS

PALETTE = {"ink": "#23282d", "soft": "#6a6f75", "line": "#d9d6cf", "stage": "#1f5fa8", "peer": "#7a7f85",
           "bound": "#b3321f", "c0": "#1f5fa8", "c1": "#c9791a", "c2": "#2f8f6b", "c3": "#a24a8f", "c4": "#7a5ad6",
           "c5": "#2c9bc9", "c6": "#8a8a2b"}  # fmt: skip
SERIES = [f"$c{i}" for i in range(7)]  # none red as a bound is, none grey as what is not ours
DASHES = ([1, 0], [7, 3], [2, 3])
SHAPES = ("circle", "square", "triangle-up")
WIDTH = 720  # pixels of a picture; on the page a plot takes what room there is
ROOFLINE = 380  # pixels of its height
TOKEN, PROMPT = "a token", "the prompt"
SAID = {"token": TOKEN, "prompt": PROMPT}
# What is drawn apart, in its colour; a kernel or phase that does several ops counts as the heaviest of them
OPS = {"matmul": "$c0", "launches, waits": "$c1", "rms_norm": "$c2", "attention": "$c3", "silu": "$c4", "rope": "$c5",
       "other": "$peer"}  # fmt: skip
HEAVIEST = {"project_in": "matmul", "project_out": "matmul", "gate_up": "matmul", "down": "matmul",
            "vocabulary": "matmul", "look": "attention"}  # fmt: skip


class Plot(NamedTuple):
    """A plot, and as a table what it shows."""

    name: str  # of its files
    title: str
    caption: str
    spec: dict
    columns: tuple[str, ...]
    rows: list[tuple]


class Absent(NamedTuple):
    """A plot that no record supports: the sentence that says how to make one."""

    name: str
    sentence: str


def plots(place: Place) -> list[Plot | Absent]:
    """Every plot of a machine, in the order to read them in."""
    climbs = report.climbs(place)
    found = [climb(c, climbs) for c in climbs]
    if not found:
        found = [Absent("climb", "The climb: `lesson compare --all` measures the ladder on this machine.")]
    found += [roofline(place), *ops(place), gaps(place), lengths(place)]
    on_gpu = any(run.stage in GPU for run in place.runs)  # whose stages use one thread of the host
    found += [curve(place, setting) for setting in CURVES if setting != "threads" or not on_gpu] + [prediction(place)]
    found += [kernels(place, name) for name in place.kernels]
    return [one if isinstance(one, Absent) else full(one) for one in found]


def full(plot: Plot) -> Plot:
    """Without the columns that hold nothing."""
    kept = show.kept(plot.rows)
    columns, *rows = (tuple(row[i] for i in kept) for row in (plot.columns, *plot.rows))
    return plot._replace(columns=columns, rows=rows)


# ---- the pieces that plots are made of -------------------------------------------------------------------------


STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


def axis(field: str, title: str, domain: list[float], form: str = ",~r") -> dict:
    """A log axis with as few lines as tell its scale: decades, and between them what they need."""
    low, high = domain
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in STEPS:
        ticks = [step * 10.0**d for d in decades for step in steps if low <= step * 10.0**d <= high]
        if len(ticks) >= 4:
            break
    shown = {"title": title, "format": form, "values": ticks}
    return {"field": field, "type": "quantitative", "scale": {"type": "log", "domain": domain, "nice": False},
            "axis": shown}  # fmt: skip


def names(values: list[str], field: str = "stage") -> dict:
    """The stages down the left side, in this order."""
    shown = {
        "title": None,
        "grid": False,
        "ticks": False,
        "domain": False,
        "labelPadding": 8,
        "labelFontSize": 13,
        "labelColor": "$ink",
    }
    return {"field": field, "type": "nominal", "sort": list(dict.fromkeys(values)), "axis": shown}


def told_apart(field: str, values: list[str], looks: list, symbol: str = "circle") -> dict:
    """Each value's colour, dashes or dot ('' for symbol), with a legend above the plot."""
    legend = {"title": None, "orient": "top", "columns": 4} | ({"symbolType": symbol} if symbol else {})
    legend |= {"symbolSize": 256} if symbol == "stroke" else {}  # px², long enough to show dashes
    return {"field": field, "type": "nominal", "scale": {"domain": values, "range": looks}, "legend": legend}


def told(**fields: str) -> list[dict]:
    """A tooltip: title=field."""
    return [{"field": field, "title": title.replace("_", " ")} for title, field in fields.items()]


def layered(values: list[dict], layers: list[dict], height: int, legend: int = 0) -> dict:
    """Of a fixed height, so that a page can leave room before it draws: px of the plot itself, and entries above it."""
    around = 45 + (7 + 16 * math.ceil(legend / 4) if legend else 0)  # px of the axis below and the legend above
    return {
        "width": "container",
        "height": height + around,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": {"left": 2, "right": 16, "top": 5, "bottom": 5},  # px; right: half of the last label
        "data": {"values": values},
        "layer": layers,
    }


def mark(kind: str, encoding: dict, **more) -> dict:
    data = {"data": {"values": more.pop("values")}} if "values" in more else {}
    keep = {"transform": [{"filter": more.pop("where")}]} if "where" in more else {}
    return {**data, **keep, "mark": {"type": kind, **more}, "encoding": encoding}


def above(text: dict, far: str) -> list[dict]:
    """Labels above dots, to the left of those that are `far`, on a ground that keeps lines out of them."""
    sides = ({"align": "right", "dx": 6, "where": far}, {"align": "left", "dx": -4, "where": f"!({far})"})
    grounds = {"stroke": "$card", "strokeWidth": 4, "strokeJoin": "round"}, {"color": "$ink"}
    return [mark("text", text, dy=-13, **side, **ground) for ground in grounds for side in sides]


def at(values: Iterable[float], room: float = 1.0) -> list[float]:
    """The ends of a log axis: a little beyond the values."""
    values = [v for v in values if v]
    low, high = min(values), max(values)
    pad = max(1.3, (high / low) ** 0.06)
    return [low / pad, high * pad * room]


def apart(heights: list[float], room: float) -> list[float]:
    """Where labels go that belong at these heights, ascending: there, or as near as leaves each its room."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and fmean(groups[-1]) - fmean(groups[-2]) < room * len(groups[-1] + groups[-2]) / 2:
            last = groups.pop()
            groups[-1] += last
    return [fmean(g) + room * (i - (len(g) - 1) / 2) for g in groups for i in range(len(g))]


# ---- the plots -------------------------------------------------------------------------------------------------


def climb(found: Climb, every: list[Climb]) -> Plot:
    """Each stage's distance from the bound, on a log axis that begins at the bound."""
    values = []
    for run in found.runs:
        ms, over = run.ms[found.metric], run.over(found.metric)
        values.append({"stage": run.stage, "over": over, "ms": show.number(ms), "bound": run.bound[found.metric],
                       "times": show.times(over), "label": f"{show.number(ms)} ms · {show.times(over)}",
                       "kind": "peer" if run.stage in PEERS else "stage", "shape": run.at,
                       "alike": run.at == found.shape})  # fmt: skip
    top = max(v["over"] for v in values)
    y = names([v["stage"] for v in values])
    low = min(1.0, 0.9 * min(v["over"] for v in values))
    across = axis("over", "times the bound", domain=[low, max(12.0, top * 1.15)])
    across["axis"]["values"] += [tick for tick in (0.1, 0.2, 0.5, 0.7, 0.9) if low <= tick][: low < 1]
    line = {"y": y, "x": across, "x2": {"datum": 1}}
    text = {"y": y, "x": {"field": "over", "type": "quantitative"}, "text": {"field": "label"}}
    kinds = {"condition": {"test": "datum.kind == 'peer'", "value": "$peer"}, "value": "$stage"}
    hint = told(stage="stage", ms="ms", times_the_bound="times", shape="shape")
    dot = {"y": y, "x": across, "color": kinds, "tooltip": hint}
    far = f"datum.over > {math.sqrt(max(12.0, top))}"
    layers = [
        mark("rule", line, color="$line", strokeWidth=2),
        mark("rule", {"x": {"datum": 1}}, color="$bound", strokeWidth=2, values=[{}]),
        mark("point", dot, filled=True, size=110, opacity=1, where="datum.alike"),
        mark("point", dot, fill="$card", size=90, strokeWidth=2, opacity=1, where="!datum.alike"),
        *above(text, far),
    ]
    name = f"climb-{found.metric}" + ("" if found.model == every[0].model else f"-{every.index(found)}")
    what = "a token takes after the prompt" if found.metric == "token" else "a prompt takes to its first token"
    caption = f"How many times the bound {what}: {found.model}, {found.shape}"
    others = [f"{run.stage} at {run.at}" for run in found.runs if run.at != found.shape]
    caption += f" (ring{'s' * (len(others) > 1)}: {', '.join(others)})" * bool(others)
    caption += "."
    if found.model == every[0].model:
        caption += (
            " The bound reads each weight once as the file holds it, and keys and values as the stage keeps them, or "
            "does the arithmetic at the machine's best rate for what the stage multiplies, whichever takes longer."
        )
    columns = ("stage", "shape", f"{METRICS[found.metric]}", "bound ms", "× bound")
    rows = [(r.stage, r.at, show.number(r.ms[found.metric]), show.number(r.bound[found.metric]),
             show.number(r.over(found.metric))) for r in found.runs]  # fmt: skip
    title = f"The climb, {SAID[found.metric]}" + ("" if found.model == every[0].model else f": {found.model}")
    return Plot(name, title, caption, layered(values, layers, 40 * len(values)), columns, rows)


def roofline(place: Place) -> Plot | Absent:
    """GFLOP/s against FLOPs a byte: the measured roofs, and every stage's prompt and token below them."""
    climbs = report.climbs(place)
    alike = [c for c in climbs if c.model == climbs[0].model]
    runs = [(c.metric, run) for c in alike for run in c.runs if run.work[c.metric]]
    if not (place.roofs and runs):
        return Absent("roofline", "The roofline: `lesson roofline kv_cache --tokens 1..64` measures the roofs, and "
                      "`lesson compare --all` the stages under them.")  # fmt: skip
    many = any(run.threads > 1 for _, run in runs)
    read, rate = place.roofs["read_all" if many else "read"], place.roofs["flops"]["all" if many else "one"]
    top = rate
    if place.roofs["int8"] and any(operands(run.stage) == "int8" for _, run in runs):
        top *= place.roofs["int8"] / place.roofs["flops"]["one"]
    values = []
    for metric, run in runs:
        work, ms = run.work[metric], run.ms[metric]
        values.append({"stage": run.stage, "pass": SAID[metric], "intensity": work.intensity, "shape": run.at,
                       "gflops": work.flops / ms / 1e6, "rate": f"{show.number(work.flops / ms / 1e6)} GFLOP/s",
                       "ms": show.number(ms)})  # fmt: skip
    nearest, memory = max(gbs for _, gbs in read), read[-1][1]
    across = at([v["intensity"] for v in values] + [rate / memory])
    up = at([v["gflops"] for v in values] + [top])
    room = math.log(up[1] / up[0]) * 14 / ROOFLINE  # of a line of text
    for what in (TOKEN, PROMPT):
        mine = sorted((v for v in values if v["pass"] == what), key=lambda v: v["gflops"])
        for v, height in zip(mine, apart([math.log(v["gflops"]) for v in mine], room), strict=True):
            v["height"] = math.exp(height)
    named = {"caches": f"caches {rate_of(nearest, 'B/s')}", "memory": f"memory {rate_of(memory, 'B/s')}",
             "arithmetic": f"multiply-adds {rate_of(rate, 'FLOP/s')}"}  # fmt: skip
    if top > rate:
        named["integers"] = f"8-bit multiply-adds {rate_of(top, 'op/s')}"
    roofs = [{"roof": named[kind], "x": x, "y": height} for kind, height in (("arithmetic", rate), ("integers", top))
             if kind in named for x in (height / nearest, across[1])]  # fmt: skip
    for title, gbs in (("caches", nearest), ("memory", memory)):
        start = max(across[0], up[0] / gbs)
        roofs += [{"roof": named[title], "x": x, "y": x * gbs} for x in (start, top / gbs)]
    below = axis("intensity", "FLOP/byte", domain=across)
    height = axis("gflops", "GFLOP/s", domain=up, form="~s")
    kinds = told_apart("pass", [TOKEN, PROMPT], ["$c1", "$c0"])
    dashes = told_apart("roof", list(named.values()), [[2, 3], [7, 3], [1, 0], [7, 2, 1, 2]], "stroke")
    dashes["legend"] |= {"columns": 2, "symbolStrokeColor": "$bound"}
    hint = told(stage="stage", of="pass", shape="shape", GFLOP_per_s="rate", ms="ms")
    line = {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "y", "type": "quantitative"}}
    text = {"x": below, "y": {"field": "height", "type": "quantitative"}, "text": {"field": "stage"}}
    right = f"datum.intensity > {math.sqrt(across[0] * across[1])}"
    layers = [
        mark("line", {**line, "strokeDash": dashes}, color="$bound", strokeWidth=2, values=roofs),
        mark("point", {"x": below, "y": height, "color": kinds, "tooltip": hint}, filled=True, size=90, opacity=1),
        mark("text", text, align="right", dx=-9, color="$ink", where=right),
        mark("text", text, align="left", dx=9, color="$ink", where=f"!({right})"),
    ]  # fmt: skip
    rows = [(v["stage"], v["pass"], v["shape"], show.number(v["intensity"]), show.number(v["gflops"]), v["ms"])
            for v in values]  # fmt: skip
    caption = (f"{runs[0][1].model}: what each stage makes of the roofs measured on this machine. To the left of the "
               "corner memory decides, to the right arithmetic.")  # fmt: skip
    columns = ("stage", "of", "shape", "FLOP/byte", "GFLOP/s", "ms")
    spec = layered(values, layers, ROOFLINE, legend=10)
    return Plot("roofline", "The roofline", caption, spec, columns, rows)


def rate_of(giga: float, unit: str) -> str:
    return f"{show.number(giga / 1e3)} T{unit}" if giga >= 1e3 else f"{show.number(giga)} G{unit}"


def ops(place: Place) -> list[Plot | Absent]:
    """Where a token's time goes, and a prompt's, stacked by op."""
    stages = Counter((o["model"], o["new"] > 1) for o in place.ops)
    found = []
    for metric in ("token", "prompt"):
        model = max((m for m, prompt in stages if prompt == (metric == "prompt")), default=None,
                    key=lambda m: stages[m, metric == "prompt"])  # fmt: skip
        passes = [o for o in place.ops if o["model"] == model and (o["new"] > 1) == (metric == "prompt")]
        if passes:
            lengths = Counter(o["new"] for o in passes)
            new = max(lengths, key=lambda n: (lengths[n], n))
            found.append(stacked([o for o in passes if o["new"] == new], metric))
    absent = "Time per op: `lesson profile quantized`, or `lesson record quantized`, measures it."
    return found or [Absent("ops", absent)]


def stacked(passes: list[dict], metric: str) -> Plot:
    times: dict[str, Counter] = {}
    for one in passes:
        if one["stage"] not in times:
            times[one["stage"]] = sums = Counter()
            for op, ms in one["ms"].items():
                name = HEAVIEST.get(op, op)
                sums[name if name in OPS else "other"] += ms
    stages = [s for s in LADDER if s in times] + [s for s in times if s not in LADDER]
    kept = [op for op in OPS if any(t[op] for t in times.values())]
    values = []
    for stage in stages:
        whole = times[stage].total()
        for op in kept:
            ms = times[stage][op]
            percent = f"{show.number(100 * ms / whole)} %"
            if ms:
                values.append({"stage": stage, "op": op, "order": kept.index(op), "share": ms / whole,
                               "ms": f"{show.number(ms)} ms", "percent": percent})  # fmt: skip
    totals = [{"stage": s, "label": f"{show.number(times[s].total())} ms"} for s in stages]
    y = names(stages)
    bars = {
        "y": y,
        "x": {"field": "share", "type": "quantitative", "stack": "zero", "scale": {"domain": [0, 1]},
              "axis": {"title": "share of the time", "format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1],
                       "grid": False}},
        "color": told_apart("op", kept, [OPS[op] for op in kept]),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": told(stage="stage", op="op", ms="ms", share="percent"),
    }  # fmt: skip
    text = {"y": y, "x": {"datum": 1, "type": "quantitative"}, "text": {"field": "label"}}
    layers = [mark("bar", bars, height={"band": 0.62}),
              mark("text", text, align="left", dx=8, color="$ink", values=totals)]  # fmt: skip
    what = "a token" if metric == "token" else f"a prompt of {passes[0]['new']} tokens"
    caption = f"{passes[0]['model']}: where the time of {what} goes; all of it stands at the right."
    if any(op in HEAVIEST for one in passes for op in one["ms"]):
        caption += " A kernel that does several ops counts as the heaviest of them."
    if "launches, waits" in kept:
        caption += " “launches, waits” is what passes while no kernel runs."
    alone = [o["stage"] for o in passes if o["alone"]]
    if alone:
        caption += f" Of {', '.join(alone)} the records hold kernels, or phases of one, timed by themselves: they "
        caption += "do not add up to the time of a run."
    rows = [(v["stage"], v["op"], v["ms"], v["percent"]) for v in values]
    spec = layered(values, layers, 36 * len(stages), legend=len(kept))
    return Plot(f"ops-{metric}", f"Time per op, {what}", caption, spec, ("stage", "op", "ms", "share"), rows)


def gaps(place: Place) -> Plot | Absent:
    """From the median to the slowest of the waits between tokens."""
    best: dict[str, Run] = {}
    for found in [c for c in report.climbs(place) if c.metric == "token"][:1]:
        best = {run.stage: run for run in found.runs if run.spread}
    if not best:
        return Absent("inter-token", "Inter-token latency: `lesson compare kv_cache quantized` keeps every gap.")
    values = [{"stage": s, "shape": run.at, **run.spread, **{f"{p}_ms": f"{show.number(run.spread[p])} ms" for p in
               ("p50", "p90", "p99")}} for s, run in best.items()]  # fmt: skip
    single = [{"stage": s, "gap": gap} for s, run in best.items() for gap in run.gaps]
    y = names(list(best))
    across = axis("p50", "ms between tokens", domain=at([v[p] for v in values for p in ("p50", "p99")]
                  + [g["gap"] for g in single]))  # fmt: skip
    hint = told(stage="stage", shape="shape", half_within="p50_ms", nine_in_ten="p90_ms", all_but_one_in_100="p99_ms")
    each = {"y": y, "x": {"field": "gap", "type": "quantitative"}}
    layers = [
        mark("tick", each, color="$soft", opacity=0.35, values=single),
        mark("rule", {"y": y, "x": across, "x2": {"field": "p99"}, "tooltip": hint}, color="$stage", strokeWidth=3),
        mark("point", {"y": y, "x": across, "tooltip": hint}, color="$stage", filled=True, size=100, opacity=1),
        mark("point", {"y": y, "x": {"field": "p99", "type": "quantitative"}}, color="$stage", size=70, opacity=1,
             fill="$card"),
    ]  # fmt: skip
    rows = [(v["stage"], v["shape"], *(show.number(v[p]) for p in ("p50", "p90", "p99"))) for v in values]
    caption = f"{next(iter(best.values())).model}: the dot is the median wait for the next token, the ring what 99 in "
    caption += "100 stay below." + (" Each tick is one wait." if single else "")
    if CACHELESS & set(best):
        caption += " A stage without a cache waits longer with every token."
    columns = ("stage", "shape", "p50 ms", "p90 ms", "p99 ms")
    return Plot("inter-token", "Inter-token latency", caption, layered(values, layers, 34 * len(values)), columns, rows)


def other(stage: str) -> bool:
    """Whether a line is a peer's."""
    return stage.partition(",")[0] in PEERS


def lines(name: str, title: str, caption: str, note: str, values: list, across: dict, up: str, what: str) -> Plot:
    """A line a stage through its points, on log axes, and the least bound at each place, of which the note tells."""
    known = report.order([SimpleNamespace(stage=v["stage"].partition(",")[0]) for v in values])
    values = sorted(values, key=lambda v: known.index(v["stage"].partition(",")[0]))
    stages = list(dict.fromkeys(v["stage"] for v in values))
    height = axis("ms", up, domain=at([v[key] for v in values for key in ("ms", "bound")]))
    ours, theirs = ([s for s in stages if other(s) == them] for them in (False, True))
    count = len(SERIES)
    looks = {s: (SERIES[i % count], DASHES[i // count % 3], SHAPES[i // count % 3]) for i, s in enumerate(ours)}
    looks |= {s: ("$peer", DASHES[i % 3], "diamond") for i, s in enumerate(theirs)}
    colours, shapes = ([looks[s][i] for s in stages] for i in (0, 2))
    drawn = {"x": across, "y": height, "color": told_apart("stage", stages, colours, "")}
    dotted = {**drawn, "tooltip": told(stage="stage", at="at", ms="told"),
              "shape": told_apart("stage", stages, shapes, "")}  # fmt: skip
    layers = [mark("line", drawn, strokeWidth=2, strokeDash=dash, where=f"indexof({alike}, datum.stage) >= 0")
              for dash in DASHES if (alike := [s for s in stages if looks[s][1] == dash])]  # fmt: skip
    layers.append(mark("point", dotted, filled=True, size=70, opacity=1))
    least: dict[float, float] = {}
    for v in values:
        if v["bound"]:
            least[v[across["field"]]] = min(v["bound"], least.get(v[across["field"]], math.inf))
    if least:
        bounds = [{across["field"]: place, "ms": ms} for place, ms in sorted(least.items())]
        line = {"x": across, "y": height}
        layers.insert(0, mark("line", line, color="$bound", strokeDash=[6, 4], strokeWidth=2, values=bounds))
        caption += " " + note
    rows = [(v["stage"], v["at"], show.number(v["ms"]), show.number(v["bound"])) for v in values]
    return Plot(name, title, caption, layered(values, layers, 340, len(stages)), ("stage", what, up, "bound ms"), rows)


def lengths(place: Place) -> Plot | Absent:
    """ms of a prompt by its tokens."""
    found: dict[tuple[tuple[str, int], str], dict[int, tuple]] = {}
    for one in place.lengths:
        for p in one["tokens"]:
            key = (report.known(place, one["model"]), one["threads"]), one["stage"]
            found.setdefault(key, {})[p["tokens"]] = p["ms"], p["bound_ms"]
    for run in place.runs:
        if run.ms["prompt"]:
            there = found.setdefault(((run.model, run.threads), run.stage), {})
            there.setdefault(run.prompt, (run.ms["prompt"], run.bound["prompt"]))
    models = Counter(where for (where, _), points in found.items() if len(points) > 1)
    if not models:
        return Absent(
            "tokens", "ms against tokens: `lesson roofline kv_cache --tokens 1..64` measures a stage at each."
        )
    model = models.most_common(1)[0][0]
    values = [
        {"stage": s, "tokens": T, "at": str(T), "ms": ms, "bound": bound, "told": f"{show.number(ms)} ms"}
        for (m, s), points in found.items()
        if m == model and len(points) > 1
        for T, (ms, bound) in sorted(points.items())
    ]
    caption = f"{report.threaded(*model)}: what a prompt takes by its length."
    note = "The red line is the least bound of a stage there."
    across = axis("tokens", "tokens in the prompt", domain=at([v["tokens"] for v in values]))
    return lines("tokens", "Time against prompt length", caption, note, values, across, "TTFT ms", "tokens")


CURVES = {  # by setting: title, the axis, what the caption says of the bound, and which command measures one
    "depth": ("A token's time by what lies before it", "tokens before those that are timed",
              "The red line is the least bound of a stage there.", "lesson sweep kv_cache depth=0,512,1024"),
    "threads": ("A token's time by threads", "threads", "The red line is the least bound of a stage there.",
                "lesson sweep threads threads=1,2"),
}  # fmt: skip


def curve(place: Place, setting: str) -> Plot | Absent:
    """A token's time by how many lie before it, or by the threads that work on it."""
    title, below, note, command = CURVES[setting]
    found: dict[str, dict[tuple[str, int], dict]] = {}
    for model, stage, value, ms, bound, shape in points(place, setting):
        found.setdefault(model, {}).setdefault((stage, value), {"ms": ms, "bound": bound, "shape": shape})
    for model, known in found.items():
        several = Counter(stage for stage, _ in known)
        found[model] = {key: v for key, v in known.items() if several[key[0]] > 1}
    found = {model: known for model, known in found.items() if not all(other(stage) for stage, _ in known)}
    model = max(found, key=lambda m: len(found[m]), default=None)
    if not model:
        return Absent(setting, f"ms/token against {setting}: `{command}` measures it.")
    values = [
        {"stage": stage, setting: max(1, value), "at": str(value), "told": f"{show.number(v['ms'])} ms", **v}
        for (stage, value), v in sorted(found[model].items())
    ]
    across = axis(setting, below, domain=at([v[setting] for v in values]))
    if setting == "threads":
        across["axis"]["values"] = sorted({v[setting] for v in values})
    shapes = {stage: v["shape"] for (stage, _), v in found[model].items()}
    told = ", ".join(f"{shape} of {stage}" for stage, shape in shapes.items())
    told = next(iter(shapes.values())) if len(set(shapes.values())) == 1 else told
    caption = f"{model}: ms a token, {told}."
    if setting == "depth" and any(value == 0 for _, value in found[model]):
        caption += " Depth 0 stands at 1 on the log axis."
    return lines(setting, title, caption, note, values, across, "ms/token", setting)


def points(place: Place, setting: str) -> list[tuple]:
    """(model, stage, value, ms, bound, shape) of `lesson sweep`, then of runs that differ in nothing else."""
    found = [
        (
            one["model"],
            one["stage"],
            row["value"],
            row["ms_per_token"]["median"],
            row["expect"]["bound_ms_per_token"],
            one["shape"],
        )
        for one in place.sweeps
        for row in one["rows"]
        if one["setting"] == setting and row["ms_per_token"]
    ]
    deep = {(r.stage, r.model, r.shape.partition("@d")[0]) for r in place.runs if "@d" in r.shape}
    for run in place.runs:
        count, _, depth = run.shape.partition("@d")
        same = run.threads == 1 and (run.stage, run.model, count) in deep if setting == "depth" else not depth
        if same and run.ms["token"] and run.shape.startswith("tg"):
            value = int(depth or 0) if setting == "depth" else run.threads
            found.append((run.model, run.stage, value, run.ms["token"], run.bound["token"], count))
    return found


def prediction(place: Place) -> Plot | Absent:
    """What was expected before a stage ran, against what it took."""
    values = []
    for run in place.runs:
        for metric in METRICS:
            want, saw = run.expected[metric], run.ms[metric]
            if want and saw:
                values.append({"stage": run.stage, "of": SAID[metric], "expected": want, "ms": saw, "model": run.model,
                               "shape": run.at, "told": f"{show.number(saw)} ms", "said": f"{show.number(want)} ms",
                               "ratio": show.times(saw / want)})  # fmt: skip
    values = list({(v["stage"], v["of"], v["model"], v["shape"]): v for v in values}.values())
    if not values:
        return Absent("prediction", "Prediction against result: `lesson compare naive tiling` keeps both.")
    both = at([v[key] for v in values for key in ("expected", "ms")])
    across, height = (
        axis(key, title, domain=both) for key, title in (("expected", "expected ms"), ("ms", "measured ms"))
    )
    ends = [{"expected": v, "ms": v} for v in both]
    kinds = told_apart("of", [TOKEN, PROMPT], ["$c1", "$c0"])
    hint = told(stage="stage", of="of", model="model", shape="shape", expected="said", measured="told", ratio="ratio")
    layers = [
        mark("line", {"x": across, "y": height}, color="$bound", strokeDash=[6, 4], values=ends),
        mark("point", {"x": across, "y": height, "color": kinds, "tooltip": hint}, filled=True, size=80, opacity=0.9),
    ]
    rows = [(v["stage"], v["of"], v["model"], v["shape"], v["said"], v["told"], v["ratio"]) for v in values]
    caption = (
        "Each dot is a stage at one shape. On the dashed line it took what was expected of it before it ran, from "
    )
    caption += "shape and machine" + ", on a GPU from the profile of the stage before" * any(
        v["stage"] in GPU for v in values
    )
    caption += "; above, it took longer."
    columns = ("stage", "of", "model", "shape", "expected", "measured", "measured / expected")
    spec = layered(values, layers, 380, legend=2)
    return Plot("prediction", "Prediction against result", caption, spec, columns, rows)


def type_name(dtype: str) -> str:
    """'float16' -> 'FP16', 'bfloat16' -> 'BF16'."""
    return dtype.replace("bfloat", "BF").replace("float", "FP")


def kernels(place: Place, name: str) -> Plot:
    """A kernel ladder's rungs and baselines by rate, under the machine's peak."""
    rows = report.kernel_rows(place, name)
    unit, factor = report.kernel_unit(rows)
    types = list(dict.fromkeys(r["dtype"] for r in rows))
    rungs = report.kernel_rungs(name)
    bounds = getattr(importlib.import_module(f"stages.{name}"), "BOUNDS", {})  # which multiply nothing
    rows = [r for r in rows if r["tflops"] and r["stage"] not in bounds]
    values = []
    for r in rows:
        title = r["stage"] + (f" {type_name(r['dtype'])}" if len(types) > 1 else "")
        values.append({"stage": title, "rate": r["tflops"] * factor, "ms": show.number(r["ms"]["median"]),
                       "label": f"{show.number(r['tflops'] * factor)} {unit}", "kind": "stage" if r["stage"] in rungs
                       else "peer"})  # fmt: skip
    peaks = [{"peak": peak * factor, "label": f"peak, {type_name(kind)}"}
             for kind, peak in place.kernels[name]["peak_tflops"].items() if kind in types]  # fmt: skip
    domain = at([v["rate"] for v in values] + [p["peak"] for p in peaks])
    far = f"datum.rate > {math.sqrt(domain[0] * domain[1])}"
    y, across = names([v["stage"] for v in values]), axis("rate", unit, domain=domain)
    kinds = {"condition": {"test": "datum.kind == 'peer'", "value": "$peer"}, "value": "$stage"}
    text = {"y": y, "x": {"field": "rate", "type": "quantitative"}, "text": {"field": "label"}}
    layers = [
        mark("rule", {"y": y, "x": across, "x2": {"datum": domain[0]}}, color="$line", strokeWidth=2),
        mark("rule", {"x": {"field": "peak", "type": "quantitative"}}, color="$bound", strokeWidth=2, values=peaks),
        mark("point", {"y": y, "x": across, "color": kinds, "tooltip": told(rung="stage", rate="label", ms="ms")},
             filled=True, size=100, opacity=1),
        *above(text, far),
    ]  # fmt: skip
    shape = report.shape_text(name, rows[0]["shape"])
    caption = f"{shape}."
    if peaks:
        caption += " The red lines are the measured peaks." if len(peaks) > 1 else " The red line is the measured peak."
    if any(v["kind"] == "peer" for v in values):
        caption += " Grey dots are other libraries."
    table = [(v["stage"], v["label"], v["ms"]) for v in values]
    title = f"Kernels: {name}"
    spec = layered(values, layers, 38 * len(values))
    return Plot(f"kernels-{name}", title, caption, spec, ("rung", "rate", "ms"), table)


# ---- drawing ---------------------------------------------------------------------------------------------------


def config() -> dict:
    """How every plot looks."""
    quiet = {"gridColor": "$line", "domainColor": "$line", "tickColor": "$line", "labelColor": "$soft",
             "titleColor": "$soft", "titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12,
             "gridOpacity": 0.6, "labelOverlap": "greedy", "labelSeparation": 6, "labelFlush": False}  # fmt: skip
    return {
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
        "background": "transparent",
        "view": {"stroke": None},
        "axis": quiet,
        "legend": {
            "labelColor": "$ink",
            "labelFontSize": 12,
            "titleColor": "$soft",
            "offset": 12,
            "layout": {"top": {"direction": "vertical", "anchor": "start", "margin": 4}},
        },
        "text": {"fontSize": 12},
        "tick": {"thickness": 1, "bandSize": 12},
    }


def coloured(spec: dict, name: Callable[[str], str]) -> dict:
    """The specification with each $name in its place as name(…) says."""
    text = json.dumps({**spec, "config": config()})
    for key in sorted([*PALETTE, "card"], key=len, reverse=True):
        text = text.replace(f'"${key}"', json.dumps(name(key)))
    return json.loads(text)


def for_page(plot: Plot) -> dict:
    return coloured(plot.spec, lambda key: f"var(--{key})")


def pictures(plot: Plot) -> tuple[bytes, str]:
    """(PNG, SVG) on white. Raises ImportError without the plot extra."""
    import vl_convert

    spec = coloured(plot.spec, {**PALETTE, "card": "#ffffff"}.get)
    spec |= {"width": WIDTH, "autosize": {"type": "pad"}, "padding": 16, "background": "#ffffff"}
    spec["title"] = {"text": plot.title, "anchor": "start", "fontSize": 16, "offset": 14, "color": PALETTE["ink"]}
    return vl_convert.vegalite_to_png(spec, scale=2), vl_convert.vegalite_to_svg(spec)
