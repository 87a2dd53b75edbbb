"""`lesson record`: reports/<machine>/llm/<stage>.json, all that is kept of a stage on one machine.

On each model the shapes that time allows, each in fresh processes and checked, then a profile and what the compiler
made of the hot ops. The first model stands at the top level, as in the records of GPU stages; the others under `also`.
"""

import hashlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import gpu_machine, harness, peers, profile, records, roofline, show
from common.compare import START_S, progress
from common.job import Job, prepare, random_ids, shape_counts
from common.run import check
from common.stage import PEERS, code_path, require, short

MODELS = ("tinyllama-shape", "smollm2")
SHAPES = ("pp512", "pp64", "tg32", "tg32@d1024")
SMALLER = ("pp16+tg4", "pp4+tg2", "pp2+tg1")  # the first that fits stands in where none of SHAPES does
ROUNDS = 3
BUDGET_S = 60.0  # seconds of timed work a shape
PROFILED = ("pp64+tg4", *SMALLER)
COMPILED = ("matmul", "attention")  # whose machine code is summed up


def record(names: list[str], models: list[str], threads: int | None, budget_s: float, save: str | None = None) -> dict:
    """Measure and keep each stage; one that fails ends it, with those before it kept. -> {schema, records, files}."""
    for name in names:
        require(name)
    folder = records.writable(records.folder(save))
    jobs = [prepare(model, shape="pp1", threads=threads, stages=names) for model in models]
    found, files = [], []
    for name in names:
        here = gpu_machine.of(name, jobs[0].gguf.config)
        blocks = [block(name, job, here, budget_s) for job in jobs]
        made = {
            "schema": records.SCHEMA,
            "stage": name,
            **blocks[0],
            "also": blocks[1:],
            "machine": records.machine_summary(here),
            "threads": threads,
            "sources": sources(name),
            "commit": records.commit(),
            **({"peer": peers.about()} if name in PEERS else {}),
        }
        files.append(str(records.save(made, folder / here.slug / "llm" / f"{short(name)}.json")))
        found.append(made)
    return {"schema": records.SCHEMA, "records": found, "files": files}


def sources(name: str) -> dict[str, str]:
    """SHA-256 of the stage's file, so that a record of another version is known for one."""
    path = code_path(name)
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()}


def at(job: Job, shape: str) -> Job:
    """The job at a shape; tg32 times 32 tokens after the first, which belongs to the prompt's time."""
    count, new = shape_counts(shape, None)
    return replace(job, ids=random_ids(count, job.gguf.config.V), n=new + 1 if "tg" in shape else 1)


def expected_s(name: str, job: Job, here) -> float:
    expect = roofline.expectation(name, job, here)
    return ((expect["ttft_ms"] or 0) + (job.room - 1) * (expect["ms_per_token"] or 0)) / 1e3


def fitting(name: str, job: Job, here, budget_s: float) -> list[str]:
    """The shapes that are expected to leave room for ROUNDS runs, or the one that stands in for them."""

    def fits(shape: str) -> bool:
        taken = at(job, shape)
        return len(taken.ids) + taken.n <= job.context and ROUNDS * expected_s(name, taken, here) <= budget_s

    return list(filter(fits, SHAPES)) or [next(filter(fits, SMALLER), SMALLER[-1])]


def block(name: str, job: Job, here, budget_s: float) -> dict:
    """All of one model: {model, rows, ms, load_ms, jit_ms, peak_rss_mb, page_faults, agreement, profile, code}."""
    shapes = fitting(name, job, here, budget_s)
    left = sum(ROUNDS * (START_S + min(budget_s, expected_s(name, at(job, s), here))) for s in shapes)
    print(f"{name}, {show.named(job.model_name)}: {', '.join(shapes)}, about {left:.0f} s", file=sys.stderr)
    rows, last = [], None
    with progress() as bar:
        task = bar.add_task(name, total=len(shapes) * ROUNDS)
        for shape in shapes:
            bar.update(task, description=f"{name}, {shape}")
            last = run_at(name, at(job, shape), here, lambda: bar.advance(task))
            rows.append(row(shape, last))
    kept = ("model", "load_ms", "jit_ms", "peak_rss_mb", "page_faults", "page_faults_by_phase", "expect", "agreement")
    made = {key: last[key] for key in kept}
    made["model"] |= {"bytes": job.gguf.path.stat().st_size}
    ms = {r["shape"]: (r["ms_per_token"] or r["ttft_ms"])["median"] for r in rows}
    inside = {"profile": None, "code": {}} if name in PEERS else look_inside(name, job, here, budget_s)
    return {**made, "rows": rows, "ms": ms, **inside}


def run_at(name: str, job: Job, here, done) -> dict:
    """The run record of ROUNDS fresh processes, each checked."""
    samples, agreed = [], None
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = str(Path(scratch) / "rows.npy")
        for _ in range(ROUNDS):
            samples.append(harness.run(job.request(name, rows_file=rows_file)))
            agreed = check(name, job, samples[-1], rows_file)
            done()
    return records.run_record(job, name, samples, agreed, roofline.expectation(name, job, here), here)


def row(shape: str, run: dict) -> dict:
    """One shape, with the keys that records of GPU stages have."""
    keys = ("ttft_ms", "ms_per_token", "inter_token_ms", "peak_rss_mb", "page_faults", "expect", "agreement")
    return {
        "shape": shape,
        "prompt": len(run["prompt_ids"]),
        "new": len(run["output_ids"]),
        **{k: run[k] for k in keys},
    }


def look_inside(name: str, job: Job, here, budget_s: float) -> dict:
    """{profile, code}: time by op, and the hottest loop of each of COMPILED; why not, where that can't be had."""
    shape = next((s for s in PROFILED if 6 * expected_s(name, at(job, s), here) <= budget_s), PROFILED[-1])
    taken = at(job, shape)
    found = harness.talk("profile", taken.request(name))["profile"]
    whole = profile.document(name, taken, found, here)
    kept = ("shape", "prefill", "decode", "memory", "page_faults_load", "counters", "no_counters", "estimate")
    code = {}
    for op in COMPILED:
        try:
            told = harness.talk("explain", taken.request(name), op=op, stress=None)["explain"]
            code[op] = {key: told[key] for key in ("cpu", "compiled_for", "hottest") if key in told}
        except harness.RunError as error:
            code[op] = {"why_not": str(error)}
    return {"profile": {key: whole[key] for key in kept if key in whole}, "code": code}


def render(document: dict) -> list:
    """Each record's times, and where it is kept."""
    shown = []
    for found, file in zip(document["records"], document["files"], strict=True):
        for one in (found, *found["also"]):
            laid = show.table("shape", "TTFT ms", "ms/token", "spread", "× bound", "peak MiB", "NMSE")
            for r in one["rows"]:
                metric = "ms_per_token" if r["ms_per_token"] else "ttft_ms"
                laid.add_row(
                    r["shape"],
                    show.number(r["ttft_ms"]["median"]),
                    show.number(r["ms_per_token"] and r["ms_per_token"]["median"]),
                    show.spread(r[metric]),
                    show.number(r[metric]["median"] / r["expect"][f"bound_{metric}"]),
                    f"{r['peak_rss_mb']:,.0f}",
                    f"{r['agreement']['nmse']:.0e}",
                )
            model = f"{show.named(one['model']['name'])} {one['model']['quant']}"
            shown += [show.heading(f"{found['stage']}, {model}"), laid, ""]
        shown.append(show.dim(f"kept in {file}"))
    return shown
