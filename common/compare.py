"""`lesson compare`: what changed between stages, what that was expected to be worth, and what it was worth."""

import json
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common import diff, gate, gpu, gpu_machine, peers, records, roofline, show
from common.harness import Sample
from common.job import Job, UsageError
from common.machine import Machine, raised
from common.run import answered, check
from common.stage import OPS, PEERS, StageError, code_path, require
from common.stats import FEWEST, verdict

ROUNDS = 7  # runs of each stage, the first uncounted; a 99 % interval from fewer pairs is too wide to be of use
MOST_ROUNDS = 12
BUDGET_S = 60.0  # seconds of timed work a stage
START_S = 4.0  # about what a process spends before its clock starts: imports, load, warm-up


def checked(names: list[str]) -> list[str]:
    """The names as given, two or more, each a stage that exists. Raises UsageError or StageError."""
    if len(names) < 2:
        raise UsageError("name two stages or more, such as naive tiling")
    for name in names:
        (require if name in PEERS else code_path)(name)
    return names


def compare(names: list[str], job: Job, budget_s: float, save: str | None = None) -> dict:
    """Run stages alternately, check every run, judge each stage against the one before it. -> the JSON document.

    A stage whose GPU is not here has no times but a reason, `missing`; `recorded` holds what other machines recorded.
    Raises WrongError where a stage fails its gate, RunError where one gives no numbers, what a Job may, and StageError
    where no stage can run and none was recorded.
    """
    from common import llama_bench

    folder = records.writable(records.folder(save))
    here, missing = machines(names, job)
    every = [name for name in names if name in here]  # that can run
    recorded = recall(missing)
    if not every and not recorded:
        raise StageError(next(iter(missing.values())), gpu.NEEDS_GPU)
    found = measured(every, job, budget_s, here) if every else {"stages": [], "pairs": [], "agree": [], "why": ""}
    if missing:
        runs = iter(found["stages"])
        found["stages"] = [next(runs) if n in here else records.absent_record(job, n, missing[n]) for n in names]
    document = {
        "schema": records.SCHEMA,
        **found,
        "changed": {b: changed(a, b) for a, b in pairwise(names)},
        "budget_s": budget_s,
        "recorded": recorded,
        "llama_bench": llama_bench.recorded(job, here[every[-1]].slug, save) if every else [],
    }
    if not missing:
        records.save(document, folder / here[names[-1]].slug / "compare" / records.file_name(found["stages"]))
    return document


def machines(names: list[str], job: Job) -> tuple[dict[str, Machine], dict[str, str]]:
    """What each stage runs on, and why the others can't run here."""
    here, missing = {}, {}
    for name in dict.fromkeys(names):
        try:
            here[name] = gpu_machine.of(name, job.gguf.config)
        except StageError as error:
            if error.exit_code != gpu.NEEDS_GPU:
                raise
            missing[name] = str(error)
    return here, missing


def measured(names: list[str], job: Job, budget_s: float, here: dict[str, Machine]) -> dict:
    """Runs of stages, their agreement with the oracle, and a verdict on each that follows the one before it."""
    expected = [roofline.expectation(name, job, here[name]) for name in names]
    print(estimate(names, job, budget_s, expected), file=sys.stderr)
    samples, agreed = take(names, job, budget_s)
    timed = replace(job, n=min(len(s.output_ids) for taken in samples for s in taken))
    for name, taken in zip(names, samples, strict=True):  # a roof that was too low is seen now, before it is shown
        records.within_roof(timed, name, taken, here[name])
    here = {name: raised(one) for name, one in here.items()}
    expected = [roofline.expectation(name, timed, here[name]) for name in names]
    each = zip(names, samples, agreed, expected, map(here.get, names), strict=True)
    runs = [records.run_record(job, *one) for one in each]
    steps = range(len(names) - 1)
    cpu = [name for name in names if not gpu.on_gpu(name)]
    return {
        "stages": runs,
        "pairs": [pair for i in steps for pair in judge(runs[i], runs[i + 1], samples[i], samples[i + 1])],
        "agree": [{"stage": name, **a._asdict()} for name, a in zip(names, agreed, strict=True)],
        "why": roofline.sentence(names, job, here[(cpu or names)[-1]]),
    }


def recall(names: Iterable[str]) -> list[dict]:
    """What other machines recorded of these stages, one entry a record: {stage, machine, model, file, commit, rows}."""
    found = []
    for name in names:
        for path in sorted(records.folder().glob(f"*/llm/{Path(name).name}.json")):
            record = json.loads(path.read_text("utf-8"))
            found.append(
                {
                    "stage": name,
                    "machine": record["machine"]["name"],
                    "model": f"{record['model']['name']} {record['model']['quant']}",
                    "file": str(path.relative_to(records.folder())),
                    "commit": record["commit"],
                    "rows": record["rows"],
                }
            )
    return found


def take(names: list[str], job: Job, budget_s: float) -> tuple[list[list[Sample]], list[gate.Agreement]]:
    """Samples of each stage, in rounds that go forward and back again (ABBA), so that a drift of the machine cancels.

    The first round generates as many tokens as a third of the budget allows; the others as many as leave room for
    ROUNDS of them.
    """
    samples: list[list[Sample]] = [[] for _ in names]
    agreed: list[gate.Agreement] = [None] * len(names)
    n, rounds, done = job.n, ROUNDS, 0
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        task = bar.add_task("", total=None)
        while done < rounds:
            order = range(len(names)) if done % 2 == 0 else reversed(range(len(names)))
            for slot in order:
                bar.update(task, description=f"round {done + 1}, {names[slot]}")
                rows = str(Path(folder) / "rows.npy")
                sample = answered(job, job.request(names[slot], n=n, budget_s=budget_s / 3, rows_file=rows))
                found = check(names[slot], job, sample, rows)
                agreed[slot] = agreed[slot] or found
                samples[slot].append(sample)
                bar.advance(task)
            done += 1
            if done == 1:
                n, rounds = plan([s[0] for s in samples], budget_s)
                bar.update(task, total=rounds * len(names))
    return samples, agreed


def plan(first: list[Sample], budget_s: float) -> tuple[int, int]:
    """From one sample of each stage: (tokens, rounds in all) so that the slowest stage stays within its budget."""

    def cost(sample: Sample, n: int) -> float:
        return (sample.ttft_ms + sum(sample.gaps_ms[: n - 1])) / 1e3

    shortest = min(len(s.output_ids) for s in first)
    left = budget_s - max(cost(s, shortest) for s in first)
    for n in range(shortest, 0, -1):
        rounds = 1 + int(left / max(cost(s, n) for s in first))
        if rounds >= ROUNDS:
            break
    return n, max(1, min(rounds, MOST_ROUNDS))


def judge(a: dict, b: dict, samples_a: list[Sample], samples_b: list[Sample]) -> list[dict]:
    """Verdicts on TTFT and, where both have it, ms/token over the tokens that every run has.

    The first round finds the machine as it was left; where there are enough others, it is not among the pairs.
    """
    if len(samples_a) > FEWEST:
        samples_a, samples_b = samples_a[1:], samples_b[1:]
    n = min(len(s.output_ids) for s in samples_a + samples_b)
    found = []
    for metric in ("ttft_ms", "ms_per_token"):
        if metric == "ms_per_token" and n < 2:
            continue
        of = (lambda s: s.ttft_ms) if metric == "ttft_ms" else (lambda s: s.ms_per_token(n))
        judged = verdict([of(s) for s in samples_a], [of(s) for s in samples_b])
        want_a, want_b = a["expect"][metric], b["expect"][metric]
        ratio = want_a / want_b if want_a and want_b else None
        found.append(
            {"a": a["stage"], "b": b["stage"], "metric": metric, **judged._asdict(), "expected_ratio": ratio}
        )  # fmt: skip
    return found


def changed(a: str, b: str) -> list[str]:
    """The definitions that differ; a peer shares none with a stage."""
    return [] if {a, b} & set(PEERS) else [c.name for c in diff.changes(code_path(a), code_path(b))]


def estimate(names: list[str], job: Job, budget_s: float, expected: list[dict]) -> str:
    """How long this will take, said before it starts; a stage without an expectation counts as its whole budget, a peer
    as the quickest stage.
    """
    total, told = 0.0, []
    known = [e["ttft_ms"] for e in expected if e["ttft_ms"]]
    for name, expect in zip(names, expected, strict=True):
        run = min(known, default=math.inf) / 1e3 if name in PEERS else math.inf
        if expect["ttft_ms"]:
            run = (expect["ttft_ms"] + (job.n - 1) * (expect["ms_per_token"] or 0)) / 1e3
            told.append(f"{name} {expect['ttft_ms'] / 1e3:.1f} s")
        total += min(ROUNDS * run, budget_s) + ROUNDS * START_S
    return (
        f"about {total:.0f} s: at most {budget_s:.0f} s of timed work a stage (--budget), {ROUNDS} rounds where that "
        f"allows; expected to first token: {', '.join(told) or 'unknown'}"
    )


def progress() -> Progress:
    """A bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ---- what the reader sees --------------------------------------------------------------------------------------


def introduction(names: list[str], ops: tuple[str, ...] = OPS) -> list:
    """The idea and the code of each step; shown before anything runs."""
    shown = []
    for a, b in zip(names, names[1:], strict=False):
        if a == b:
            shown.append(show.heading(f"{a} against itself: nothing changed, so nothing should be measured"))
            continue
        if {a, b} & set(PEERS):
            shown.append(show.heading(f"{a} beside {b}: another engine, with the same file, ids, threads and clock"))
            continue
        told = diff.docstring(code_path(b))
        shown.append(show.heading(told[""]))
        shown += [show.paragraph(part, told[part]) for part in ("Idea", "Was", "Change", "Expect") if part in told]
        found = diff.changes(code_path(a), code_path(b))
        for change in found:
            shown += ["", *show.code_diff(change)]
        moved = [c.name for c in found]
        before, inside = (diff.constant(code_path(stage), "FUSED") or {} for stage in (a, b))
        same = [op for op in ops if op not in moved and op not in inside]
        kept = f" The same code in both: {' '.join(same)}." if same else ""
        within = "".join(f" {op} is now inside {where}." for op, where in inside.items() if before.get(op) != where)
        shown += ["", f"Changed: {', '.join(moved) or 'nothing'}.{kept}{within}"]
    return shown


def result(document: dict) -> list:
    """The numbers, under the code."""
    from common import llama_bench

    runs, pairs = document["stages"], document["pairs"]
    here = [r for r in runs if "missing" not in r]
    shown = [""]
    for metric, title, bound in (
        ("ttft_ms", "TTFT", "bound_ttft_ms"),
        ("ms_per_token", "ms/token", "bound_ms_per_token"),
    ):
        if not here or any(r[metric] is None for r in here):
            continue
        rows = show.table(title, "saw ms", "spread", "×", "99 % of it", "expect ms", "×", "× bound")
        by_b = {p["b"]: p for p in pairs if p["metric"] == metric}
        for i, r in enumerate(runs):
            if "missing" in r:
                rows.add_row(r["stage"], "n/a")
                continue
            pair = by_b.get(r["stage"]) if i else None
            rows.add_row(
                r["stage"],
                show.number(r[metric]["median"]),
                show.spread(r[metric]),
                show.times(pair and pair["ratio"]),
                f"{show.number(pair['low'])}–{show.number(pair['high'])}" if pair and pair["low"] else "",
                show.number(r["expect"][metric]),
                show.times(pair and pair["expected_ratio"]),
                show.times(r[metric]["median"] / r["expect"][bound]),
            )
        shown += [rows, ""]
    shown += [show.verdict(p) for p in pairs]
    shown += llama_bench.beside(document["llama_bench"])
    if here:
        shown += [document["why"], "", show.costs(here), ""]
    shown += [show.agreement(agreed) for agreed in document["agree"]]
    shown += [peers.told(r["peer"]) for r in here if "peer" in r]
    if here and here[0]["text"]:
        shown += [show.quote(here[0]["text"])]
    shown += [show.dim(show.footer(r)) for r in here[:1]]
    for why in dict.fromkeys(r["missing"] for r in runs if "missing" in r):
        shown += ["", f"n/a: {', '.join(r['stage'] for r in runs if r.get('missing') == why)}: {why}"]
    for record in document["recorded"]:
        shown += ["", *recollection(record)]
    return shown


def recollection(record: dict) -> list:
    """What another machine recorded of a stage, marked as such."""
    rows = show.table("shape", "TTFT ms", "ms/token", "tokens/s", "runs")
    for row in record["rows"]:
        ttft, token = (row[metric] and row[metric]["median"] for metric in ("ttft_ms", "ms_per_token"))
        rate = 1e3 / token if token else row["prompt"] * 1e3 / ttft
        rows.add_row(row["shape"], *map(show.number, (ttft, token, rate)), str(len(row["ttft_ms"]["samples"])))
    model = show.named(record["model"])
    head = f"{record['stage']}, recorded on {record['machine']}: {model} (reports/{record['file']})"
    return [show.heading(head), rows]
