"""`lesson roofline`: this machine's roofs, the bound they set for a model, and a stage's time against its tokens."""

import math
import sys
from collections.abc import Callable, Iterator

from common import harness, machine, records, roofline, show
from common.compare import progress
from common.job import Job, UsageError, parse_shape
from common.machine import LINE, Machine
from common.roofline import kilobytes
from common.stage import source_path


def document(job: Job, stage: str | None, tokens: str | None, again: bool, save: str | None) -> dict:
    """Roofs and bounds, and with a stage its measured, expected and bounded ms at each number of tokens.

    again: measure the machine anew. Raises UsageError or StageError before anything is timed, RunError if a run fails.
    """
    if tokens and not stage:
        raise UsageError("--tokens needs a stage to measure, such as `lesson roofline tiling --tokens 1..64`")
    if stage:
        source_path(stage)
    counts = parse_tokens(tokens or "1..64") if stage else []
    config, T = job.gguf.config, len(job.ids)
    here = machine.measure(again, walks=roofline.walks([stage] if stage else [], config))
    weight_bytes = roofline.file_bytes(job.gguf.weights)
    kind = roofline.operands(stage) if stage else "float32"
    found = {
        "schema": records.SCHEMA,
        "machine": here.to_json(),
        "model": job.model_name,
        "shape": job.shape,
        "threads": job.threads,
        "stage": stage,
        "bounds": bound_rows(config, weight_bytes, T, here, job.threads),
        "ridge_flop_per_byte": roofline.ridge(here, sum(weight_bytes.values()), job.threads, kind),
        "knee_tokens": roofline.knee(config, weight_bytes, here, job.threads, kind),
        "tokens": measured(job, stage, counts, here, weight_bytes) if stage else [],
        "commit": records.commit(),
    }
    if stage:
        name = machine.slug(f"{stage} {job.model_name}") + ".json"
        records.save(found, records.folder(save) / here.slug / "roofline" / name)
    return found


def bound_rows(config, weight_bytes: dict[str, int], T: int, here: Machine, threads: int) -> list[dict]:
    """Each op's least work and time, and all together, for a prompt of T tokens and for the token after it."""

    def least(work: roofline.Work) -> dict:
        return {"flops": work.flops, "bytes": work.bytes, "ms": roofline.bound_ms(work, here, threads)}

    prefill, decode = (roofline.work(config, new, seen, weight_bytes) for new, seen in ((T, T), (1, T + 1)))
    parts = [*((op, prefill[op], decode[op]) for op in prefill), ("all", *map(roofline.total, (prefill, decode)))]
    return [{"op": op, "prefill": least(a), "decode": least(b)} for op, a, b in parts]


def parse_tokens(text: str) -> list[int]:
    """'1..64' -> 1, 2, 4, … 64; '1,9,17' -> those."""
    try:
        if ".." in text:
            low, high = map(int, text.split(".."))
            counts = [low * 2**i for i in range(32) if low * 2**i <= high]
        else:
            counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UsageError(f"--tokens {text!r}: give it as 1..64 (doubling) or 1,9,17")
    return counts


def measured(job: Job, stage: str, counts: list[int], here: Machine, weight_bytes: dict[str, int]) -> list[dict]:
    """One prefill of the stage for each number of tokens, in a fresh process each."""
    types = roofline.file_types(job.gguf.weights)
    rows = roofline.against_tokens(stage, job.gguf.config, weight_bytes, counts, here, job.threads, types=types)
    found = []
    with progress() as bar:
        task = bar.add_task(stage, total=len(counts))
        for T, expected, least in rows:
            bar.update(task, description=f"{stage}, {T} tokens")
            ids, _ = parse_shape(f"pp{T}", job.gguf.config.V, 1)
            sample = harness.run(job.request(stage, ids=ids, n=1))
            found.append({"tokens": T, "ms": sample.ttft_ms, "expect_ms": expected, "bound_ms": least})
            bar.advance(task)
    return found


# ---- drawn in a terminal ---------------------------------------------------------------------------------------


def render(found: dict) -> Iterator[str]:
    ascii_only = plain(sys.stdout)
    if found["stage"]:
        yield tokens_plot(found, ascii_only)
    else:
        yield curves(Machine.from_json(found["machine"]), ascii=ascii_only)
        yield ""
        yield show.named(found["model"])
        threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
        yield f"The least that {found['shape']} can take, {threads}:"
        yield bounds(found)


def bounds(found: dict) -> str:
    """The least time of each op, and of all, for the prompt and for the token after it."""
    figure = show.number
    rows = [f"{'op':<10}{'GFLOP':>9}{'MB':>9}{'FLOP/byte':>11}{'prefill ms':>12}{'decode MB':>11}{'decode ms':>11}"]
    for row in found["bounds"]:
        a, b = row["prefill"], row["decode"]
        rows.append(
            f"{row['op']:<10}{figure(a['flops'] / 1e9):>9}{figure(a['bytes'] / 1e6):>9}"
            f"{figure(a['flops'] / a['bytes']):>11}{figure(a['ms']):>12}{figure(b['bytes'] / 1e6):>11}"
            f"{figure(b['ms']):>11}"
        )
    ridge = figure(found["ridge_flop_per_byte"])
    rows.append(f"The ridge is at {ridge} FLOP/byte: below it memory decides, above it arithmetic.")
    return "\n".join(rows)


def tokens_plot(found: dict, ascii: bool = False, width: int = 80) -> str:
    """ms of one pass by its tokens: flat where memory decides, rising where arithmetic does."""
    points = found["tokens"]
    dot, ring, plus = ("*", "o", "+") if ascii else ("●", "○", "+")
    series = [[(p["tokens"], p[key]) for p in points if p[key]] for key in ("ms", "bound_ms", "expect_ms")]
    knee = found["knee_tokens"]
    ridge = f"The ridge, {show.number(found['ridge_flop_per_byte'])} FLOP/byte, "
    rows = [f"{'tokens':>8}{'ms':>10}{'expected':>10}{'bound':>10}{'ms a token':>12}"]
    rows += [
        f"{p['tokens']:>8}{show.number(p['ms']):>10}{show.number(p['expect_ms']):>10}{show.number(p['bound_ms']):>10}"
        f"{show.number(p['ms'] / p['tokens']):>12}"
        for p in points
    ]
    rows = [row.replace("–", "-") for row in rows] if ascii else rows
    return "\n".join(
        [
            f"{found['stage']}, {show.named(found['model'])}",
            f"ms of one pass by its tokens   {dot} measured   {plus} expected   {ring} bound",
            *plot([s for s in series if s], lambda v: f"{v:,.0f}", show.number, width, ascii),
            ridge
            + (f"is the bound's knee at {knee} tokens." if knee else "is not reached: memory decides throughout."),
            "",
            *rows,
        ]
    )


HEIGHT = 9
LABEL = 8  # columns left of a plot's axis


def plain(stream) -> bool:
    """Whether a stream can show ASCII alone."""
    try:
        "●○│└─×".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def plot(series: list, x_label: Callable, y_label: Callable, width: int = 80, ascii: bool = False) -> list[str]:
    """Lines of text: up to three series of (x, y) on logarithmic axes, the first drawn over the others."""
    marks, bar, corner, dash = ("*o+", "|", "+", "-") if ascii else ("●○+", "│", "└", "─")
    span = width - LABEL - 3
    xs, ys = ([p[i] for points in series for p in points] for i in (0, 1))
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    grid = [[" "] * span for _ in range(HEIGHT)]

    def place(v, low, high, cells):
        return round(math.log(v / low) / math.log(high / low) * (cells - 1)) if high > low else 0

    for mark, points in reversed(list(zip(marks, series, strict=False))):
        for x, y in points:
            grid[HEIGHT - 1 - place(y, y0, y1, HEIGHT)][place(x, x0, x1, span)] = mark
    rows = []
    for i, cells in enumerate(grid):
        value = y_label(y1 * (y0 / y1) ** (i / (HEIGHT - 1))) if i % 4 == 0 else ""
        rows.append(f"{value:>{LABEL}} {bar}{''.join(cells)}".rstrip())
    rows.append(" " * (LABEL + 1) + corner + dash * span)
    ticks = [" "] * (span + 1)
    for i in range(5):
        x = x0 * (x1 / x0) ** (i / 4)
        text = x_label(x)
        at = min(place(x, x0, x1, span), span - len(text))
        ticks[at : at + len(text)] = text
    rows.append(" " * (LABEL + 2) + "".join(ticks).rstrip())
    return rows


def curves(machine: Machine, width: int = 80, ascii: bool = False) -> str:
    """What was measured, drawn: bandwidth, latency, column walks, and the rates of arithmetic."""
    dot, ring = ("*", "o") if ascii else ("●", "○")
    caches = ", ".join(f"L{c.level} {kilobytes(c.bytes)}" for c in machine.caches)
    touched = [(pages * LINE, ns) for pages, ns in machine.page_ns]
    walk = {s: [(lines, ns) for lines, stride, ns in machine.stride_ns if stride == s] for s in (4096, 4160, 64)}

    def ns(v):
        return f"{show.number(v)} ns"

    many = f"   {ring} all {machine.threads} cores" if machine.threads > 1 else ""
    reads = [machine.read_gbs] + ([machine.read_all_gbs] if machine.threads > 1 else [])
    return "\n".join(
        [
            f"{machine.name}, {machine.threads} of {machine.cores} cores, {caches}"[:width],
            "",
            f"Reading, GB/s by working set   {dot} one core{many}",
            *plot(reads, kilobytes, show.number, width, ascii),
            "",
            f"Latency of a load that waits for the last   {dot} lines side by side   {ring} one a page",
            *plot([machine.latency_ns, touched], kilobytes, ns, width, ascii),
            f"  Translation shows beyond {machine.tlb_pages:,} pages of {kilobytes(machine.page_bytes)}.",
            "",
            "Walking down columns, ns a multiply-add by lines in a column, apart by",
            f"  {dot} 4096 bytes (few cache sets)   {ring} 4160 bytes   + 64 bytes",
            *plot(list(walk.values()), lambda v: f"{v:,.0f}", ns, width, ascii),
            "",
            f"Float addition, each waiting for the last   {machine.fp_add_ns:.2f} ns",
            f"Multiply-adds, one at a time                {show.number(machine.scalar_gflops)} GFLOP/s",
            f"Multiply-adds, packed; all cores            {show.number(machine.fma_gflops)}; "
            f"{show.number(machine.fma_all_gflops)} GFLOP/s",
            "8-bit multiply-adds                         "
            + (f"{show.number(machine.int8_gops)} Gop/s" if machine.int8_gops else "no instruction for them"),
            f"A call from Python into compiled code       {machine.call_us:.2f} us",
        ]
    )
