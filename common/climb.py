"""`lesson compare --all`: the whole ladder as one table, each stage against the one it is built on.

The stages run alternately, as in any comparison. A stage too slow for the shape runs a smaller one, which its row
names, and so does its neighbour once more, so that no ratio is between two shapes and none is extrapolated.
"""

import math
import sys
from dataclasses import replace

from rich.bar import Bar
from rich.table import Table

from common import compare, diff, machine, peers, records, roofline, show
from common.job import Job
from common.roofs import plain
from common.stage import LADDER, PEERS, StageError, code_path, require

SHORTER = ((1 << 30, 2), (16, 2), (4, 2), (2, 1))  # (most ids of the prompt, most new tokens), tried in turn
METRICS = ("ttft_ms", "ms_per_token")


def climb(job: Job, budget_s: float, save: str | None = None, ladder=LADDER) -> dict:
    """Run the ladder, and llama.cpp where it is installed. -> the JSON document.

    Stages whose GPU is not here get what was recorded elsewhere, or nothing. Raises WrongError, RunError, RecordError.
    """
    folder = records.writable(records.folder(save))
    names = [*ladder, *filter(installed, PEERS)]
    here, missing = compare.machines(names, job)
    names = [name for name in names if name in here]
    previous = {name: diff.constant(code_path(name), "PREVIOUS") for name in (*ladder, *PEERS)}
    groups = planned(names, previous, job, budget_s, here)
    print(estimate(groups, budget_s, here), file=sys.stderr)
    taken = [(group, measured(group, here, budget_s)) for group in groups]
    rows = [row(name, previous, taken) for name in names] + recorded(missing, previous)
    order = [*ladder, *PEERS]
    document = {
        "schema": records.SCHEMA,
        "rows": sorted(rows, key=lambda r: order.index(r["stage"])),
        "stages": [run for _, (runs, _, _) in taken for run in runs.values()],
        "pairs": [pair for _, found in taken for pair in pairs(previous, *found)],
        "model": job.model_name,
        "shape": job.shape,
        "threads": job.threads,
        "machine": records.machine_summary(here[names[0]] if names else machine.identify()),
        "budget_s": budget_s,
        "commit": records.commit(),
    }
    title = machine.slug(f"{job.model_name} {job.shape} {job.threads} threads")
    records.save(document, folder / document["machine"]["slug"] / "climb" / f"{title}.json")
    return document


def installed(peer: str) -> bool:
    try:
        require(peer)
    except StageError:
        return False
    return True


# ---- which stage runs what -------------------------------------------------------------------------------------


def planned(names: list[str], previous: dict, job: Job, budget_s: float, here: dict) -> list[tuple[Job, list[str]]]:
    """[(job, stages)]: quick stages at the shape asked for, then slow ones and their neighbours at a smaller."""
    slow = [name for name in names if run_s(name, job, here) * compare.ROUNDS > budget_s]
    quick = [name for name in names if name not in slow]
    groups = [(job, quick)] if quick else []
    if slow:
        beside = [n for n in quick if previous[n] in slow or any(previous[s] == n for s in slow)]
        smaller = shortened(slow, job, budget_s, here)
        groups.append((smaller, [n for n in names if n in (*slow, *beside)]))
    return groups


def shortened(slow: list[str], job: Job, budget_s: float, here: dict) -> Job:
    """The job with as much of its prompt and of its new tokens as leaves the slowest stage within its budget."""
    for most_ids, most_new in SHORTER:
        found = replace(job, ids=job.ids[:most_ids], n=min(job.n, most_new))
        if all(run_s(name, found, here) * compare.ROUNDS <= budget_s for name in slow):
            break
    return found


def run_s(name: str, job: Job, here: dict) -> float:
    """Seconds of one run as expected; nothing for a peer, whose time is not predicted and always shorter."""
    expect = roofline.expectation(name, job, here[name])
    return ((expect["ttft_ms"] or 0) + (job.room - 1) * (expect["ms_per_token"] or 0)) / 1e3


def estimate(groups: list[tuple[Job, list[str]]], budget_s: float, here: dict) -> str:
    """How long this will take, said before it starts."""
    told, total = [], 0.0
    for job, names in groups:
        timed = sum(min(budget_s, compare.ROUNDS * run_s(name, job, here)) for name in names)
        total += timed + compare.ROUNDS * compare.START_S * len(names)
        told.append(f"{', '.join(names)} at {job.shape}")
    return (
        f"about {total / 60:.0f} minutes, at most {budget_s:.0f} s of timed work a stage (--budget): {'; '.join(told)}"
    )


def measured(group: tuple[Job, list[str]], here: dict, budget_s: float) -> tuple[dict, dict, dict]:
    """({stage: run record}, {stage: samples}, {stage: agreement}) of one interleaved run."""
    job, names = group
    samples, agreed = compare.take(names, job, budget_s)
    timed = replace(job, n=min(len(s.output_ids) for taken in samples for s in taken))
    for name, taken in zip(names, samples, strict=True):  # a roof that was too low is seen now, before it is shown
        records.within_roof(timed, name, taken, here[name])
    here = {name: machine.raised(one) for name, one in here.items()}
    runs = [
        records.run_record(timed, name, taken, found, roofline.expectation(name, timed, here[name]), here[name])
        for name, taken, found in zip(names, samples, agreed, strict=True)
    ]
    return tuple(dict(zip(names, each, strict=True)) for each in (runs, samples, agreed))


def pairs(previous: dict, runs: dict, samples: dict, agreed: dict) -> list[dict]:
    """Verdicts on every stage whose PREVIOUS ran beside it."""
    steps = [(previous[name], name) for name in runs if previous[name] in runs]
    return [
        {**pair, "shape": runs[b]["shape"]}
        for a, b in steps
        for pair in compare.judge(runs[a], runs[b], samples[a], samples[b])
    ]


# ---- rows ------------------------------------------------------------------------------------------------------


def row(name: str, previous: dict, taken: list) -> dict:
    """A stage's line of the table: its times at the largest shape it ran, its step at the largest shape it shares."""
    runs = [found[0][name] for _, found in taken if name in found[0]]
    steps = [p for _, found in taken for p in pairs(previous, *found) if p["b"] == name]
    run = runs[0]
    return {
        "stage": name,
        "previous": previous[name],
        "shape": run["shape"],
        **{m: run[m] and run[m]["median"] for m in METRICS},
        "over_previous": {m: next((p for p in steps if p["metric"] == m), None) for m in METRICS},
        "over_bound": {m: run[m] and run[m]["median"] / run["expect"][f"bound_{m}"] for m in METRICS},
        "kl": run["agreement"]["kl"],
        "nmse": run["agreement"]["nmse"],
        "tolerance": run["agreement"]["tolerance"],
        "passed": run["agreement"]["passed"],
        "missing": None,
        "recorded": None,
        "peer": run.get("peer"),
    }


def recorded(missing: dict[str, str], previous: dict) -> list[dict]:
    """Lines of the stages that can't run here: what another machine recorded, against its own record of PREVIOUS."""
    nothing = {"over_bound": dict.fromkeys(METRICS), "kl": None, "nmse": None, "tolerance": None, "passed": None}
    found = []
    for name, why in missing.items():
        record = next(iter(compare.recall([name])), None)
        line = {"shape": None, **dict.fromkeys(METRICS), "over_previous": dict.fromkeys(METRICS), "recorded": None}
        if record:
            best = max(record["rows"], key=lambda r: (bool(r["ttft_ms"] and r["ms_per_token"]), r["prompt"] <= 64))
            before = recalled_row(previous[name], record, best["shape"])
            line = {
                "shape": best["shape"],
                **{m: best[m] and best[m]["median"] for m in METRICS},
                "over_previous": {m: recalled_step(best[m], before and before[m], best["shape"]) for m in METRICS},
                "recorded": {
                    **{key: record[key] for key in ("machine", "model", "file")},
                    "prompt": best["prompt"],
                },
            }
        found.append({"stage": name, "previous": previous[name], **nothing, **line, "missing": why, "peer": None})
    return found


def recalled_row(name: str, beside: dict, shape: str) -> dict | None:
    """The row of another stage's record on the same machine, model and shape."""
    same = [r for r in compare.recall([name]) if all(r[key] == beside[key] for key in ("machine", "model"))]
    return next((row for record in same for row in record["rows"] if row["shape"] == shape), None)


def recalled_step(now: dict | None, before: dict | None, shape: str) -> dict | None:
    """A ratio of two records; no verdict, since the runs were not interleaved."""
    return {"ratio": before["median"] / now["median"], "verdict": None, "shape": shape} if now and before else None


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(document: dict) -> list:
    """The tree as a table, then how far each stage is from the bound."""
    rows, ascii_only = document["rows"], plain(sys.stdout)
    laid = show.table("stage", "TTFT ms", "× prev", "× bound", "ms/token", "× prev", "× bound", "KL")
    laid.padding = (0, 1, 0, 0)  # a stage stands beside its shape, which leaves one column between numbers
    names = tree({r["stage"]: r["previous"] for r in rows}, ascii_only)
    by_stage = {r["stage"]: r for r in rows}
    for prefix, name in names:
        laid.add_row(
            *line(prefix, by_stage[name], document["shape"]), style="dim" if by_stage[name]["missing"] else None
        )
    return [
        show.heading(f"{show.named(document['model'])}, {document['shape']}"),
        laid,
        "",
        *chart(rows, names),
        "",
        *notes(document),
    ]


def line(prefix: str, found: dict, shape: str) -> list[str]:
    label = prefix + found["stage"]
    if found["missing"] and not found["recorded"]:
        return [label, *["n/a"] * 7]
    if found["shape"] != shape:
        label += f" {whole_shape(found)}"
    cells = [label + ("*" if found["recorded"] else "")]
    for metric in METRICS:
        step = found["over_previous"][metric]
        mark = "" if not step or step["shape"] == found["shape"] else "†"
        cells += [
            show.number(found[metric]),
            show.number(step["ratio"]) + mark if step else "–",
            show.number(found["over_bound"][metric]),
        ]
    return [*cells, f"{found['kl']:.0e}" if found["kl"] is not None else "–"]


def whole_shape(found: dict) -> str:
    """A row's shape with the prompt that its TTFT is of: a record's tg32 began with one too."""
    shape = found["shape"]
    prompted = found["recorded"] and shape.startswith("tg")
    return f"pp{found['recorded']['prompt']}+{shape}" if prompted else shape


def tree(previous: dict[str, str | None], ascii_only: bool = False) -> list[tuple[str, str]]:
    """(prefix, stage) in order: a chain stays flush, a fork indents each of its branches."""
    fork, last, bar = ("|- ", "`- ", "|  ") if ascii_only else ("├─ ", "└─ ", "│  ")
    children: dict[str | None, list[str]] = {}
    for name, parent in previous.items():
        children.setdefault(parent if parent in previous else None, []).append(name)
    found = []

    def chain(name: str, first: str, rest: str) -> None:
        found.append((first, name))
        below = children.get(name, [])
        if len(below) == 1:
            chain(below[0], rest, rest)
        for i, child in enumerate(below if len(below) > 1 else []):
            end = i == len(below) - 1
            chain(child, rest + (last if end else fork), rest + ("   " if end else bar))

    for root in children.get(None, []):
        chain(root, "", "")
    return found


def chart(rows: list[dict], names: list[tuple[str, str]]) -> list:
    """How many times the bound each stage takes, on a logarithmic axis that begins at the bound itself."""
    by_stage = {r["stage"]: r for r in rows}
    metric = "ms_per_token" if any(r["over_bound"]["ms_per_token"] for r in rows) else "ttft_ms"
    over = {name: by_stage[name]["over_bound"][metric] for _, name in names if by_stage[name]["over_bound"][metric]}
    if not over:
        return []
    decades = max(1, math.ceil(math.log10(max(over.values()))))
    laid = Table.grid(padding=(0, 1))
    laid.add_column(no_wrap=True)
    laid.add_column(width=BAR, no_wrap=True)
    laid.add_column(justify="right", no_wrap=True)
    for name, times in over.items():
        share = max(0.0, math.log10(times)) / decades
        bar = "#" * round(BAR * share) if plain(sys.stdout) else Bar(1.0, 0.0, share, width=BAR)
        laid.add_row(name, bar, show.times(times))
    laid.add_row("", axis(decades), "", style="dim")
    what = "a token" if metric == "ms_per_token" else "the prompt"
    return [
        f"How many times the bound {what} takes, on a log axis that begins at the bound:",
        laid,
    ]


BAR = 50  # columns


def axis(decades: int) -> str:
    """'1×      10×     100×': a label at each decade."""
    labels = [" "] * BAR
    for i in range(decades + 1):
        label = f"{10**i:,}×"
        at = min(round(BAR * i / decades), BAR - len(label))
        labels[at : at + len(label)] = label
    return "".join(labels)


def notes(document: dict) -> list:
    rows = document["rows"]
    steps = [step for r in rows for step in r["over_previous"].values() if step]
    said = []
    if any(step["shape"] != r["shape"] for r in rows for step in r["over_previous"].values() if step):
        said.append("† against the stage before at its own, smaller shape, where both ran alternately")
    said += elsewhere([r for r in rows if r["recorded"]])
    for why in dict.fromkeys(r["missing"] for r in rows if r["missing"] and not r["recorded"]):
        names = [r["stage"] for r in rows if r["missing"] == why and not r["recorded"]]
        said.append(f"{', '.join(names)}: n/a, {why}")
    for r in rows:
        if r["passed"] is False:
            said.append(f"{r['stage']} is outside its tolerance: NMSE {r['nmse']:.0e}, {r['tolerance']:.0e} allowed")
        if r["peer"]:
            said.append(peers.told(r["peer"]))
    for metric, title in zip(METRICS, ("TTFT", "ms/token"), strict=True):
        flat = [s["b"] for s in steps if (s["verdict"], s.get("metric")) == ("no measurable change", metric)]
        said += [f"no measurable change of {title}: {', '.join(flat)}"] if flat else []
    shown = document["stages"]
    return [*said, show.dim(show.footer({**shown[0], "shape": document["shape"]}, "up to "))] if shown else said


def elsewhere(rows: list[dict]) -> list[str]:
    """What the star says: one line for each machine and model, with the stages where there are several such lines."""
    places: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        places.setdefault((r["recorded"]["machine"], r["recorded"]["model"]), []).append(r["stage"])
    said = []
    for (place, model), names in places.items():
        which = f"{', '.join(names)}: " if len(places) > 1 else ""
        said.append(f"* {which}recorded on {place}, {show.named(model)}, not run now")
    return said
