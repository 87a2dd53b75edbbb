"""`lesson profile`: where a stage's time goes, op by op, and how far that is from what the machine could do.

A stage's forward calls its ops by name, so each name is bound to a wrapper that reads a clock before and after. A stage
whose ops no longer pass through Python declares `PHASES = ("matmul", …)` and `stamps(model)`, an int64 array
(len(PHASES), 2) of nanoseconds and calls so far, which it fills itself.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from common import harness, machine, records, roofline, show
from common.gate import operands
from common.gpu import on_gpu
from common.job import Job, UsageError
from common.records import heading
from common.roofline import Work
from common.roofs import plain
from common.stage import source_path

ROUNDS = 6  # of which the first warms up
SECONDS = 6.0  # no further round begins after this
ENOUGH = 0.95  # of a pass must lie inside ops, else the table says that it does not
PROTOCOL = ("load", "forward", "logits", "generate")


class Call(NamedTuple):
    """One call of an op, or several that a stage counted itself, and what they do at least (None: unknown)."""

    op: str
    weight: str | None
    before: tuple[int, ...]  # readings: ns, then counters
    after: tuple[int, ...]
    work: Work | None
    count: int = 1


# ---- the worker's side -----------------------------------------------------------------------------------------


class Ledger:
    """Binds each op that a stage's Python calls to a wrapper that logs the call. Compile everything before."""

    def __init__(self, stage, read: Callable[[], tuple[int, ...]], held: dict[int, tuple[str, int]]):
        self.space, self.read, self.held, self.log = vars(stage), read, held, []
        self.kept = {name: self.space[name] for name in called(stage)}
        self.space.update({name: self.timed(name, op) for name, op in self.kept.items()})

    def undo(self) -> None:
        self.space.update(self.kept)

    def timed(self, name: str, op: Callable) -> Callable:
        read, log = self.read, self.log

        def call(*inputs):
            before = read()
            out = op(*inputs)
            after = read()
            # Work is reckoned later, off the clock; an array is not kept, since that would change how memory is reused.
            log.append((name, before, after, [getattr(a, "shape", a) for a in inputs], id(inputs[-1]), shape_of(out)))
            return out

        return call

    def taken(self, T: int, S: int) -> list[Call]:
        """The calls since this was last asked, in the order they ended."""
        calls = []
        for op, before, after, shapes, last, out in self.log:
            weight, size = self.held.get(last, (None, None)) if op == "matmul" else (None, None)
            if op == "matmul":
                work = roofline.matmul(out[0], shapes[0][-1], out[1], size)
            else:
                work = WORK[op](*shapes) if op in WORK else None
            calls.append(Call(op, weight, before, after, work))
        self.log.clear()
        return calls

    def cost(self, calls: int = 2000) -> tuple[float, float]:
        """ns that a wrapper adds (between its own two readings, around them), measured on an op that does nothing."""

        def nothing(a, b):
            return a

        wrapped = self.timed("nothing", nothing)
        times = [time.perf_counter_ns()]
        for op in (nothing, wrapped):
            for _ in range(calls):
                op(self, self)
            times.append(time.perf_counter_ns())
        empty, whole = times[1] - times[0], times[2] - times[1]
        between = sum(after[0] - before[0] for _, before, after, *_ in self.log)
        self.log.clear()
        return max(0, between - empty) / calls, max(0, whole - max(between, empty)) / calls


class Stamps:
    """The same of a stage that stamps a clock itself: its PHASES are the ops."""

    def __init__(self, stage, model, read: Callable[[], tuple[int, ...]], held: dict[int, tuple[str, int]]):
        self.names, self.array, self.config, self.read = stage.PHASES, stage.stamps(model), model.config, read
        self.weight_bytes = by_name(held)

    def undo(self) -> None:
        pass

    def cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def taken(self, T: int, S: int) -> list[Call]:
        work, at, calls = roofline.work(self.config, T, S, self.weight_bytes), 0, []
        for op, (ns, count) in zip(self.names, self.array.tolist(), strict=True):
            calls.append(Call(op, None, (at,), (at + ns,), work.get(op), count))
            at += ns
        self.array[:] = 0
        return calls


def shape_of(array) -> tuple | None:
    return getattr(array, "shape", None)


def called(stage) -> list[str]:
    """The functions that forward, logits and generate call by a name of the stage's module."""

    def names(code) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                yield from names(constant)

    space = vars(stage)
    found = dict.fromkeys(n for f in PROTOCOL[1:] if hasattr(space[f], "__code__") for n in names(space[f].__code__))
    found["argmax"] = None  # generate's default choice is bound when it is defined, so it is given anew
    return [
        n for n in found if callable(space.get(n)) and n not in PROTOCOL and not isinstance(space[n], type | ModuleType)
    ]


def profile_run(request: harness.Request) -> dict:
    """Profile one stage in this process: rows of each pass, faults, memory. Raises what the stage raises."""
    import numpy as np

    from common import events
    from common.model import open_model
    from common.stage import load_stage

    stage = load_stage(request.stage)
    jit_ms, _ = harness.compile_all(stage, request)
    before, started = harness.faults(), time.perf_counter()
    gguf = open_model(request.model, request.layers)
    context = request.context or gguf.config.context
    model = stage.load(gguf, context, request.threads)
    load_ms, load_faults = (time.perf_counter() - started) * 1e3, harness.since(before)

    counters, no_counters = open_counters(events)
    read = (lambda: (time.perf_counter_ns(), *counters.read())) if counters else (lambda: (time.perf_counter_ns(),))
    held = weights_held(model)
    ledger = Stamps(stage, model, read, held) if hasattr(stage, "PHASES") else Ledger(stage, read, held)
    n = min(request.n, context - len(request.ids) + 1)
    rounds, began = [], time.perf_counter()
    try:
        cost = ledger.cost()
        while not rounds or (len(rounds) < ROUNDS and time.perf_counter() - began < SECONDS):
            rounds.append(one_round(stage, model, request.ids, n, ledger))
    finally:
        ledger.undo()
    tokens = [s.token for s in rounds[-1]]
    if request.rows_file:
        np.save(request.rows_file, np.stack([s.row for s in rounds[-1]]))
    warm = rounds[1:] or rounds
    passes = {"prefill": summed([r[:1] for r in warm], len(request.ids), *cost), "decode": None}
    if n > 1:
        passes["decode"] = summed([r[1:] for r in warm], 1, *cost)
    return {
        "output_ids": tokens,
        **passes,
        "load_ms": load_ms,
        "jit_ms": jit_ms,
        "page_faults_load": load_faults,
        "memory": events.memory(),
        "counters": list(counters.names) if counters else None,
        "no_counters": no_counters,
        "clock_ghz": events.clock_ghz(),
        "wrapper_us": sum(cost) / 1e3,
        "weight_bytes": by_name(held),
    }


def open_counters(events):
    """(counters, None), or (None, why there are none)."""
    try:
        return events.Counters(), None
    except OSError as error:
        return None, events.reason(error)


class Step(NamedTuple):
    """One token: the readings before and after, the calls between, and the faults."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    calls: list[Call]
    faults: dict
    token: int
    row: object


def one_round(stage, model, ids: list[int], n: int, ledger) -> list[Step]:
    """One generation, token by token."""
    import numpy as np

    steps, T, S = [], len(ids), len(ids)
    # The default choice was bound when generate was defined, so the wrapped one is given.
    produced = stage.generate(model, ids, n, vars(stage)["argmax"])
    ledger.taken(T, S)
    while len(steps) < n:
        counted = harness.faults()
        before = ledger.read()
        token, row = next(produced)
        after = ledger.read()
        steps.append(Step(before, after, ledger.taken(T, S), harness.since(counted), int(token), np.array(row)))
        T, S = 1, S + 1
    return steps


def weights_held(model) -> dict[int, tuple[str, int]]:
    """id of each weight matrix -> (its name, its bytes as the stage holds it)."""
    weights, held = model.weights, {}
    for layer in weights.layers:
        held |= {id(w): (name, nbytes(w)) for name, w in layer._asdict().items() if name.startswith("w_")}
    held[id(weights.output)] = ("output", nbytes(weights.output))
    return held


def by_name(held: dict[int, tuple[str, int]]) -> dict[str, int]:
    """Bytes of each kind of matrix over all layers."""
    total: Counter = Counter()
    for name, size in held.values():
        total[name] += size
    return dict(total)


def nbytes(weight) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    if hasattr(weight, "nbytes"):
        return int(weight.nbytes)
    return sum(nbytes(part) for part in weight) if isinstance(weight, tuple) else 0


# One formula an op, from the shapes of its arguments: those of common/roofline.py.
WORK: dict[str, Callable[..., Work]] = {
    "add": lambda a, b: roofline.add(*a),
    "mul": lambda a, b: roofline.mul(*a),
    "silu": lambda x: roofline.silu(*x),
    "rms_norm": lambda x, weight, eps: roofline.rms_norm(*x),
    "rope": lambda x, freqs, start: roofline.rope(*x),
    "attention": lambda q, k, v, start: roofline.attention(q[0], start + q[0], q[1], k[1], q[2]),
    "argmax": lambda x: roofline.argmax(*x),
}


def exclusive(calls: list[Call]) -> Iterator[tuple[Call, list[int]]]:
    """Each call with its readings less those of the calls within it, which ended before it."""
    done: list[Call] = []
    for call in calls:
        own = [b - a for a, b in zip(call.before, call.after, strict=True)]
        while done and done[-1].before[0] >= call.before[0]:
            inner = done.pop()
            own = [o - (b - a) for o, a, b in zip(own, inner.before, inner.after, strict=True)]
        done.append(call)
        yield call, own


def summed(rounds: list[list[Step]], T: int, between: float, around: float) -> dict:
    """The round of median time as one table: rows by op and weight, in ms, a mean over its steps.

    The wrappers' own time, ns a call between and around their readings, is taken out of each row and of the pass.
    """
    spent = [sum(s.after[0] - s.before[0] for s in steps) for steps in rounds]
    middle = sorted(range(len(rounds)), key=spent.__getitem__)[(len(rounds) - 1) // 2]
    steps = rounds[middle]
    rows: dict[tuple, dict] = {}
    calls, each = 0, 1e6 * len(steps)  # ns in all -> ms a step
    for call, own in (pair for s in steps for pair in exclusive(s.calls)):
        row = rows.setdefault((call.op, call.weight), {"calls": 0, "own": [0] * len(own), "work": Work(0, 0)})
        row["calls"] += call.count
        row["own"] = [a + b for a, b in zip(row["own"], own, strict=True)]
        row["work"] = row["work"] + call.work if row["work"] and call.work else None
        calls += call.count
    wrapped = calls * (between + around)
    return {
        "new_tokens": T,
        "steps": len(steps),
        "ms": (spent[middle] - wrapped) / each,
        "samples_ms": [(ns - wrapped) / each for ns in spent],
        "wrapper_ms": wrapped / each,
        "page_faults": {kind: sum(s.faults[kind] for s in steps) for kind in ("minor", "major")},
        "rows": [
            {
                "op": op,
                "weight": weight,
                "calls": row["calls"] / len(steps),
                "ms": max(0.0, row["own"][0] - row["calls"] * between) / each,
                "flops": row["work"] and row["work"].flops / len(steps),
                "bytes": row["work"] and row["work"].bytes / len(steps),
                "counts": [c / len(steps) for c in row["own"][1:]],
            }
            for (op, weight), row in rows.items()
        ],
    }


# ---- the parent's side -----------------------------------------------------------------------------------------


def profile(name: str, job: Job, save: str | None = None, ncu: bool = False) -> dict:
    """Profile, check and record one stage; ncu: with Nsight Compute's counters, of a GPU stage.

    Raises WrongError, RunError, StageError, UsageError or AccountingError.
    """
    from common import gpu_profile
    from common.run import check

    source_path(name)
    if on_gpu(name):
        return gpu_profile.profile(name, job, ncu, save)
    if ncu:
        raise UsageError(f"--ncu counts what kernels do, and {name} has none: name a GPU stage, such as resident")
    folder = records.writable(records.folder(save))
    here = machine.measure()
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = str(Path(scratch) / "rows.npy")
        found = harness.talk("profile", job.request(name, rows_file=rows_file))["profile"]
        agreed = check(name, job, SimpleNamespace(output_ids=found["output_ids"]), rows_file)
    record = document(name, job, found, here) | {"agreement": agreed._asdict()}
    records.save(record, folder / here.slug / "profile" / records.file_name([record]))
    return record


def document(name: str, job: Job, found: dict, here: machine.Machine) -> dict:
    """The JSON document: what the worker found, held against the machine. Raises AccountingError."""
    estimate = None if found["counters"] else ipc(name, job, found)
    kind = operands(name)
    return {
        **heading(name, job, here),
        **found,
        "prefill": judged(found["prefill"], job, found, here, estimate, kind),
        "decode": found["decode"] and judged(found["decode"], job, found, here, estimate, kind),
        "estimate": estimate,
    }


def judged(
    one: dict, job: Job, found: dict, here: machine.Machine, estimate: dict | None, kind: str = "float32"
) -> dict:
    """A pass with rates, shares of the roof, what lies outside ops, and the way down to the bound."""
    rows = [rated(row, one["ms"], found, here, job.threads, estimate, kind) for row in one["rows"]]
    inside = sum(row["ms"] for row in rows)
    made = {**one, "rows": rows, "outside_ms": one["ms"] - inside, "coverage": inside / one["ms"]}
    return {**made, "waterfall": waterfall(made, job, found["weight_bytes"], here, kind)}


def rated(
    row: dict, pass_ms: float, found: dict, here, threads: int, estimate: dict | None, kind: str = "float32"
) -> dict:
    """A row with its rates. The working set of a kind of weight is all of it, of any other op what one call touches.

    kind: what matmul multiplies, which has a peak of its own.
    """
    made = {**row, "share": row["ms"] / pass_ms, "gbs": None, "gflops": None, "bound_ms": None, "ipc": None}
    if row["flops"] and row["ms"]:
        once = max(1, round(row["calls"])) if row["weight"] is None else 1
        work = Work(row["flops"] / once, row["bytes"] / once)
        peak = kind if row["op"] == "matmul" else "float32"
        roofline.plausible(work, row["ms"] / once, here, threads, peak)
        made["bound_ms"] = roofline.bound_ms(work, here, threads, peak) * once
        made["gbs"], made["gflops"] = row["bytes"] / row["ms"] / 1e6, row["flops"] / row["ms"] / 1e6
    counts = dict(zip(found["counters"] or (), row["counts"], strict=False))
    if counts.get("cycles"):
        made["ipc"] = counts["instructions"] / counts["cycles"]
    elif estimate and row["op"] == "matmul" and row["flops"] and row["ms"]:
        instructions = row["flops"] / 2 * estimate["instructions_per_multiply_add"]
        made["ipc"] = instructions / (row["ms"] * 1e6 * found["clock_ghz"])
    return made


def ipc(name: str, job: Job, found: dict) -> dict | None:
    """What an IPC estimate rests on: instructions a multiply-add in matmul's innermost loop; None where unreadable."""
    try:
        loop = harness.talk("explain", job.request(name), op="matmul", stress=None)["explain"]["hottest"]
    except harness.RunError:
        return None
    if not loop or not loop["multiply_adds"]:
        return None
    return {
        "instructions_per_multiply_add": loop["instructions"] / loop["multiply_adds"],
        "clock_ghz": found["clock_ghz"],
    }


# ---- the way down to the bound ---------------------------------------------------------------------------------


def waterfall(
    one: dict, job: Job, weight_bytes: dict[str, int], here: machine.Machine, kind: str = "float32"
) -> list[dict]:
    """[{step, ms}] that sum to the pass: the file's bytes at peak, then each thing that keeps the pass from it.

    The first three are bounds of the matmuls alone: weights as the file holds them, as the stage holds them, and for
    as many tokens as the stage computes. The last is what no other step explains.
    """
    config, T = job.gguf.config, one["new_tokens"]
    matmul = [row for row in one["rows"] if row["op"] == "matmul"]

    def bound(tokens: float, held: dict[str, int]) -> float:
        return roofline.bound_ms(roofline.work(config, tokens, tokens, held)["matmul"], here, job.threads, kind)

    least = [bound(T, roofline.file_bytes(job.gguf.weights)), bound(T, weight_bytes)]
    work = Work(*(sum(row[of] or 0 for row in matmul) for of in ("flops", "bytes")))
    least.append(roofline.bound_ms(work, here, job.threads, kind) if work.flops else least[1])
    calls_ms = here.call_us / 1e3
    others = [row for row in one["rows"] if row["op"] != "matmul"]
    calls = sum(min(row["ms"], row["calls"] * calls_ms) for row in one["rows"])
    other = sum(max(0.0, row["ms"] - row["calls"] * calls_ms) for row in others)
    steps = {
        "the file's weights at peak": least[0],
        "held in more bytes": least[1] - least[0],
        "the text computed again": least[2] - least[1],
        "calls, and Python between them": calls + one["outside_ms"],
        "other ops": other,
    }
    steps["matmul's own inefficiency"] = one["ms"] - sum(steps.values())
    return [{"step": step, "ms": ms} for step, ms in steps.items()]


# ---- what the reader sees --------------------------------------------------------------------------------------

BAR = 22  # columns of the longest bar


def render(document: dict) -> list:
    """Both passes with their way down to the bound, then memory, faults and the machine."""
    if "gpu_mb" in document:
        from common import gpu_profile

        return gpu_profile.render(document)
    shown = []
    for kind in ("prefill", "decode"):
        one = document[kind]
        if one:
            shown += [show.heading(title(kind, one)), table(one), *notes(document, one), "", *fall(one), ""]
    memory, load = document["memory"], document["page_faults_load"]
    rows = show.table("page faults", "minor", "major")
    for label, faults in [("load", load)] + [
        (kind, document[kind]["page_faults"]) for kind in ("prefill", "decode") if document[kind]
    ]:
        rows.add_row(label, f"{faults['minor']:,}", f"{faults['major']:,}")
    of = f", {memory['anon_mb']:,.0f} anonymous and {memory['file_mb']:,.0f} of files now" if memory["anon_mb"] else ""
    shown += [rows, f"memory: {memory['peak_mb']:,.0f} MiB at peak{of}"]
    if document["no_counters"]:
        shown.append(f"IPC: {document['no_counters']}{estimated(document)}.")
    return [*shown, show.dim(show.footer(document))]


def title(kind: str, one: dict) -> str:
    if kind == "prefill":
        return f"prefill, {one['new_tokens']} tokens: {show.number(one['ms'])} ms (median of {len(one['samples_ms'])})"
    return f"a token after it: {show.number(one['ms'])} ms (mean of {one['steps']})"


def estimated(document: dict) -> str:
    found = document["estimate"]
    if not found:
        return ""
    return (
        f"; ~ marks an estimate: {found['instructions_per_multiply_add']:.3g} instructions a multiply-add in matmul's "
        f"innermost loop, none counted outside it, at the measured {found['clock_ghz']:.2f} GHz"
    )


def table(one: dict):
    """Ops by time; matmul also by matrix."""
    whole: dict[str, dict] = {}
    for row in one["rows"]:
        known = whole.setdefault(row["op"], {**row, "parts": []})
        if row["weight"]:
            known["parts"].append(row)
    for op in whole.values():
        if op["parts"]:
            op.update(merged(op["parts"]))
    rows = show.table("op", "calls", "ms", "share", "GB/s", "GFLOP/s", "x bound", "IPC")
    for op in sorted(whole.values(), key=lambda op: -op["ms"]):
        rows.add_row(op["op"], *cells(op))
        for part in sorted(op["parts"], key=lambda part: -part["ms"]):
            rows.add_row(f"  {part['weight']}", *cells(part), style="dim")
    outside = one["outside_ms"]
    rows.add_row("(between ops)", "", show.number(outside), f"{outside / one['ms']:.1%}", "", "", "", "")
    return rows


def merged(parts: list[dict]) -> dict:
    """One row of several; ratios weighted by time."""
    made = {key: sum(p[key] or 0 for p in parts) for key in ("calls", "ms", "share", "flops", "bytes", "bound_ms")}
    made["gbs"], made["gflops"] = (made[key] / made["ms"] / 1e6 for key in ("bytes", "flops"))
    known = [p for p in parts if p["ipc"]]
    made["ipc"] = sum(p["ipc"] * p["ms"] for p in known) / made["ms"] if known else None
    return made


def cells(row: dict) -> list[str]:
    over = row["ms"] / row["bound_ms"] if row["bound_ms"] else None
    ipc = ("" if any(row["counts"]) else "~") + show.number(row["ipc"]) if row["ipc"] else ""
    return [
        f"{row['calls']:,.0f}",
        show.number(row["ms"]),
        f"{row['share']:.1%}",
        show.number(row["gbs"]) if row["gbs"] else "",
        show.number(row["gflops"]) if row["gflops"] else "",
        show.number(over) if over else "",
        ipc,
    ]


def notes(document: dict, one: dict) -> list[str]:
    """What the table does not say by itself."""
    told = []
    if one["wrapper_ms"]:
        told.append(f"Timing the ops cost {show.number(one['wrapper_ms'])} ms more, which is taken out.")
    if one["coverage"] < ENOUGH:
        told.append(f"Only {one['coverage']:.0%} of the time lies inside ops: the rest is Python and calls.")
    return told


def fall(one: dict) -> list[str]:
    """The steps from the bound to the time measured, as bars that begin where the last one ended."""
    fill = "#" if plain(sys.stdout) else "█"
    lines, at = [], 0.0
    for step in one["waterfall"]:
        ms, end = step["ms"], at + step["ms"]
        if abs(ms) >= one["ms"] / 1000:
            first, last = (round(BAR * max(0.0, x) / one["ms"]) for x in sorted((at, end)))
            bar = " " * min(first, BAR - 1) + fill * max(1, last - first)
            lines.append(f"{step['step']:<31} {show.number(ms):>8} ms {ms / one['ms']:>6.1%}  {bar}".rstrip())
        at = end
    lines.append(f"{'measured':<31} {show.number(one['ms']):>8} ms {1:>6.1%}  {fill * BAR}")
    return lines
