"""`lesson sweep`: a stage at several values of one setting, each of them checked.

The setting is a module constant, rebound in a copy of the file, or what the stage runs at: threads, or depth, how many
tokens lie before those that are timed.
"""

import ast
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import diff, gpu_machine, harness, machine, peers, records, roofline, show
from common.compare import progress
from common.gpu import NEEDS_GPU
from common.job import Job, UsageError, check_fits, random_ids
from common.roofs import plain, plot
from common.run import WrongError, check
from common.stage import code_path, require, short, source_path
from common.stats import summary

ROUNDS = 3
CURVES = {"threads": "pp64+tg16", "depth": "tg16"}  # and the shape each is taken at, unless told


def parse(stage: str, setting: str) -> tuple[str, list[str]]:
    """'TILE=16,32' -> ('TILE', ['16', '32']). Raises UsageError where the stage has no such constant."""
    name, _, values = setting.partition("=")
    constants = numbers(diff.text_of(code_path(stage)))
    if name not in constants:
        have = f"it has {', '.join(constants)}" if constants else "it has none"
        raise UsageError(f"{stage} has no constant {name!r} to sweep: {have}")
    listed = [v.strip() for v in values.split(",") if v.strip()]
    if not listed or not all(re.fullmatch(r"-?\d+", v) for v in listed):
        raise UsageError(f"{setting!r}: give whole numbers, such as {name}=16,32,64")
    return name, listed


def numbers(text: str) -> list[str]:
    """The constants of a module that a line of its own binds to a number: 64, 2 * LANES, 12 if WIDE else 6."""
    parts = (ast.Name, ast.IfExp, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)

    def number(value: ast.expr) -> bool:
        kinds = [type(node.value) for node in ast.walk(value) if isinstance(node, ast.Constant)]
        return (
            value.lineno == value.end_lineno
            and bool(kinds)
            and {*kinds} <= {int, float}
            and all(isinstance(node, (*parts, ast.Constant)) for node in ast.walk(value))
        )

    bound = [node for node in ast.parse(text).body if isinstance(node, ast.Assign) and number(node.value)]
    names = [target.id for node in bound for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if name.isupper()]


def sweep(stage: str, setting: str, job: Job, save: str | None = None) -> dict:
    """TTFT of the stage at each value, ROUNDS runs each, taken in turns. -> the JSON document."""
    name, values = parse(stage, setting)
    source, kept = source_path(stage).read_text("utf-8"), records.writable(records.folder(save))
    rows = {value: {"value": int(value), "nmse": None, "wrong": None, "times": []} for value in values}
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        task = bar.add_task(stage, total=ROUNDS * len(values))
        for _ in range(ROUNDS):
            for value, row in rows.items():
                bar.update(task, description=f"{name} = {value}")
                if not row["wrong"]:
                    copy = Path(folder) / f"{source_path(stage).stem}_{name}_{value.replace('-', 'minus')}.py"
                    bound = re.sub(rf"^{name} = [^#\n]*", f"{name} = {value}  ", source, flags=re.MULTILINE)
                    copy.write_text(bound, "utf-8")
                    logits = str(Path(folder) / "rows.npy")
                    try:
                        sample = harness.run(job.request(str(copy), n=1, rows_file=logits))
                        row["nmse"] = check(str(copy), job, sample, logits).nmse
                        row["times"].append(sample.ttft_ms)
                    except (WrongError, harness.RunError) as error:
                        if error.exit_code == NEEDS_GPU:  # no value would run
                            raise
                        row["wrong"] = str(error)
                bar.advance(task)
    here = machine.identify()
    for row in rows.values():
        taken = row.pop("times")
        row["ttft_ms"] = summary(taken) if taken else None
    document = {
        "schema": records.SCHEMA,
        "stage": stage,
        "constant": name,
        "shape": f"pp{len(job.ids)}",
        "model": job.model_name,
        "machine": records.machine_summary(here),
        "commit": records.commit(),
        "rows": list(rows.values()),
    }
    path = kept / here.slug / "sweep" / f"{machine.slug(f'{stage} {name} {job.model_name}')}.json"
    records.save(document, path)
    return document


# ---- threads and depth -----------------------------------------------------------------------------------------


def curve_of(setting: str) -> str | None:
    """Which of CURVES a setting names, None for a constant."""
    name = setting.partition("=")[0]
    return name if name in CURVES else None


def points(setting: str, job: Job) -> dict[int, Job]:
    """'depth=0,512' -> {value: job}: so many ids (one at least), then the job's new tokens; 'threads=1,2' alike.

    Raises UsageError for values that are no counts, ContextError where a depth does not fit.
    """
    name, _, values = setting.partition("=")
    listed = [v.strip() for v in values.split(",") if v.strip()]
    if not listed or not all(re.fullmatch(r"\d{1,9}", v) for v in listed):
        raise UsageError(f"{setting!r}: give whole numbers, such as {name}=1,2,4")
    counts = sorted({int(v) for v in listed})
    if name == "threads":
        granted = machine.identify().threads
        if not 1 <= counts[0] <= counts[-1] <= granted:
            raise UsageError(f"{setting!r}: this machine grants 1 to {granted} threads")
        return {count: replace(job, threads=count) for count in counts}
    check_fits(counts[-1] + job.n, job.context, job.gguf)
    V = job.gguf.config.V  # the first new token is chosen before the clock of ms/token starts
    return {count: replace(job, ids=random_ids(max(1, count), V), n=job.n + 1) for count in counts}


def curve(stage: str, setting: str, job: Job, save: str | None = None) -> dict:
    """TTFT and ms/token of a stage or a peer at each value, ROUNDS runs each, taken in turns. -> the JSON document.

    Raises WrongError where the stage is wrong at a value, and what `points` and the stage raise.
    """
    require(stage)
    found, name = points(setting, job), setting.partition("=")[0]
    jobs = list(found.values())
    folder = records.writable(records.folder(save))
    here = gpu_machine.of(stage, job.gguf.config)
    samples, agreed = [[] for _ in jobs], [None] * len(jobs)
    with tempfile.TemporaryDirectory() as scratch, progress() as bar:
        task = bar.add_task(stage, total=ROUNDS * len(jobs))
        rows_file = str(Path(scratch) / "rows.npy")
        for done in range(ROUNDS):
            for i, at in list(enumerate(jobs))[:: 1 if done % 2 == 0 else -1]:
                bar.update(task, description=f"{stage}, {name} {list(found)[i]}")
                sample = harness.run(at.request(stage, rows_file=rows_file))
                agreed[i] = check(stage, at, sample, rows_file)
                samples[i].append(sample)
                bar.advance(task)
    runs = [
        records.run_record(at, stage, taken, one, roofline.expectation(stage, at, here), here)
        for at, taken, one in zip(jobs, samples, agreed, strict=True)
    ]
    kept = ("shape", "threads", "ttft_ms", "ms_per_token", "expect", "agreement", "peak_rss_mb", "page_faults")
    document = {key: runs[0][key] for key in ("schema", "stage", "model", "machine", "commit")}
    if "peer" in runs[0]:
        document["peer"] = runs[0]["peer"]
    document |= {"setting": name, "threads": job.threads, "shape": job.shape if name == "threads" else f"tg{job.n}"}
    document["rows"] = [{"value": v, **{key: run[key] for key in kept}} for v, run in zip(found, runs, strict=True)]
    at = "" if name == "threads" else f" {job.threads} threads"
    title = machine.slug(f"{short(stage)} {name}{at} {job.model_name} {document['shape']}")
    records.save(document, folder / here.slug / "sweep" / f"{title}.json")
    return document


def render_curve(document: dict) -> list:
    """The values as a table, and ms/token (or TTFT) drawn against them and the bound."""
    rows, name = document["rows"], document["setting"]
    laid = show.table(name, "TTFT ms", "spread", "ms/token", "spread", "tokens/s", "× bound", "logits NMSE")
    metric = "ms_per_token" if all(r["ms_per_token"] for r in rows) else "ttft_ms"
    for r in rows:
        ttft, token = r["ttft_ms"], r["ms_per_token"]
        timed = r[metric]["median"]
        laid.add_row(
            str(r["value"]),
            show.number(ttft["median"]),
            show.spread(ttft),
            show.number(token and token["median"]),
            show.spread(token) if token else "–",
            show.number(token and 1e3 / token["median"]),
            show.number(timed / r["expect"][f"bound_{metric}"]),
            f"{r['agreement']['nmse']:.0e}",
        )
    ascii_only = plain(sys.stdout)
    marks = ("*", "o") if ascii_only else ("●", "○")
    series = [
        [(max(1, r["value"]), r[metric]["median"]) for r in rows],
        [(max(1, r["value"]), r["expect"][f"bound_{metric}"]) for r in rows],
    ]
    what = "ms/token" if metric == "ms_per_token" else "TTFT ms"
    drawn = [f"{what} by {name}   {marks[0]} measured   {marks[1]} bound"]
    drawn += plot(series, lambda v: f"{v:,.0f}", show.number, ascii=ascii_only)
    built = [peers.told(document["peer"])] if "peer" in document else []
    return [laid, "", "\n".join(drawn), *built, show.dim(show.footer(document))]


# ---- a constant ------------------------------------------------------------------------------------------------


def render(document: dict) -> list:
    timed = [r["ttft_ms"]["median"] for r in document["rows"] if r["ttft_ms"]]
    best = min(timed, default=None)
    rows = show.table(document["constant"], "TTFT ms", "spread", "of the best", "logits NMSE")
    wrong = []
    for r in document["rows"]:
        if r["wrong"]:
            rows.add_row(str(r["value"]), "–", "–", "–", "wrong")
            wrong.append(f"{document['constant']} = {r['value']}: {r['wrong']}")
            continue
        time = r["ttft_ms"]
        rows.add_row(
            str(r["value"]),
            show.number(time["median"]),
            show.spread(time),
            show.times(time["median"] / best),
            f"{r['nmse']:.0e}",
        )
    where = f"{document['stage']}, {document['shape']}, {show.named(document['model'])}, {document['machine']['name']}"
    return [rows, *wrong, show.dim(where)]
