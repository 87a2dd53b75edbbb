"""`lesson report`: what reports/ says of each machine, gathered, and told as report.md.

A record that another version wrote differently, or that is no record, ends it with one sentence. Nothing is measured
here, and nothing extrapolated: what has no record is left out, with the command that would make one.
"""

import importlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from common import catalog, diff, records, roofline, show, synth
from common.figures import REPORTS, in_order, multiply_adds
from common.gguf import TYPES
from common.machine import curve
from common.stage import LADDER, PEERS, source_path

METRICS = {"prompt": "TTFT ms", "token": "ms/token"}
KEYS = {"prompt": "ttft_ms", "token": "ms_per_token"}  # as records name them
NO_MACHINE = ("diffs", "quoted")  # folders of reports/ that hold no measurements


class ReportError(Exception):
    """A record that can't be read, or no record at all; str(e) is one sentence."""

    exit_code = 1


@dataclass
class Run:
    """One stage's or peer's times at one shape; ms, None for what was not timed or is not known."""

    stage: str
    model: str
    shape: str
    threads: int
    prompt: int  # ids in it
    file: str  # the record, below reports/
    ms: dict[str, float | None]  # by METRICS
    bound: dict[str, float | None]
    expected: dict[str, float | None]
    work: dict[str, roofline.Work | None]  # the least FLOPs and bytes
    gaps: list[float] = field(default_factory=list)  # every inter-token time
    spread: dict[str, float] | None = None  # p50, p90, p99 of them
    reason: str = ""  # what decides its time, as expected from shape and machine

    def over(self, metric: str) -> float | None:
        """How many times the bound."""
        ms, bound = self.ms[metric], self.bound[metric]
        return ms / bound if ms and bound else None

    @property
    def at(self) -> str:
        return self.shape + (f", {self.threads} threads" if self.threads > 1 else "")


@dataclass
class Place:
    """All that reports/ holds of one machine."""

    slug: str
    name: str = ""
    about: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    pairs: list[dict] = field(default_factory=list)  # verdicts on steps, with model, shape, at, file and reason
    ops: list[dict] = field(default_factory=list)  # as `profiled` tells
    notes: list[str] = field(default_factory=list)  # what a stage's record says of its own times
    lengths: list[dict] = field(default_factory=list)  # `lesson roofline STAGE`: {stage, model, tokens: [...]}
    sweeps: list[dict] = field(default_factory=list)  # {stage, model, setting, rows}
    kernels: dict[str, dict] = field(default_factory=dict)  # a kernel ladder's record by its name
    sizes: dict[str, tuple | None] = field(default_factory=dict)  # of each model, as `sized` tells
    roofs: dict | None = None  # {read, read_all: [(bytes, GB/s)], flops: {one, all: GFLOP/s}, int8: Gop/s or None}


class NeedsPlot(Exception):
    """The plotting libraries are not installed."""

    exit_code = 4


def write(out: Path, reports: Path = REPORTS) -> list[Path]:
    """Write report.md and plots of each machine of reports/ below `out`, then the page. -> the pages.

    Raises ReportError, and NeedsPlot once what needs no plot is written.
    """
    from common import plots, webpage

    places, pages = gather(reports), []
    drawn = {place.slug: plots.plots(place) for place in places}
    try:
        for place in places:
            (out / place.slug).mkdir(parents=True, exist_ok=True)
            pages.append(records.write(markdown(place, drawn[place.slug]), out / place.slug / "report.md"))
        for slug, plot in ((slug, p) for slug, found in drawn.items() for p in found if isinstance(p, plots.Plot)):
            png, svg = plots.pictures(plot)
            (out / slug / f"{plot.name}.png").write_bytes(png)
            (out / slug / f"{plot.name}.svg").write_text(svg, "utf-8")
        return [*pages, records.write(webpage.page(places, drawn), out / "index.html")]
    except ImportError as error:
        raise NeedsPlot(
            "report.md is written; plots and page need more: `pip install 'lesson[plot]'`, in a clone "
            "`pip install -e '.[plot]'`"
        ) from error
    except OSError as error:
        raise ReportError(f"{out} can't be written ({error.strerror}): choose another folder with --out") from error


# ---- reading ---------------------------------------------------------------------------------------------------


def gather(reports: Path) -> list[Place]:
    """Every machine of reports/ that has a measurement, those with most stages first. Raises ReportError."""
    folders = [p for p in sorted(reports.iterdir()) if p.is_dir() and p.name not in NO_MACHINE]
    places = [place for place in map(read, folders) if place.runs or place.kernels]
    if not places:
        raise ReportError(f"{reports} holds no measurements: `lesson compare naive tiling` makes the first")
    return sorted(places, key=lambda p: (-len({r.stage for r in p.runs}), p.slug))


def read(folder: Path) -> Place:
    """One machine's records. Raises ReportError where one is not as this version writes it."""
    place, todo = Place(folder.name), []
    for path in sorted(folder.glob("*/*.json")):
        try:
            todo.append((path, json.loads(path.read_text("utf-8"))))
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} is no record ({error}): move it away, or measure again") from error
    # Roofs first, since bounds that a record does not state follow from them
    for path, document in sorted(todo, key=lambda item: "roofs" not in item[1] and item[0].parent.name != "roofline"):
        try:
            take(place, path, document)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ReportError(
                f"{path} is not as this version of the course writes it ({error!r}): measure again, or move it away"
            ) from error
    return place


def take(place: Place, path: Path, document: dict) -> None:
    """Add what one record says."""
    kind, file = path.parent.name, f"{place.slug}/{path.parent.name}/{path.name}"
    here = document.get("machine", {}).get("slug") == place.slug  # not of a stage that ran on the host's CPU
    if kind in ("compare", "climb") and "stages" in document:
        compared(place, in_order(document), file)
    elif kind == "llm" and here and "stage" in document and "shape" in document["rows"][0]:
        identify(place, document["machine"], document.get("commit"))
        place.roofs = gpu_roofs(document["roofs"], path.parent.parent) if document.get("roofs") else place.roofs
        if document.get("note") and document["stage"] not in PEERS:
            place.notes.append(f"{document['stage']}: {document['note']}.")
        for block in (document, *document.get("also", ())):
            block = {**block, "stage": document["stage"], "threads": document.get("threads", 1)}
            for row in block["rows"]:
                run = timed(place, {**block, **row}, file)
                given = block.get("expected", {}).get(row["shape"])
                run.expected["prompt" if run.ms["prompt"] else "token"] = given or run.expected["prompt"]
                place.runs.append(run)
            place.ops += profiled(block)
    elif kind == "profile" and here:
        place.ops += profiled({**document, "profile": document})
    elif kind == "roofline":
        identify(place, document["machine"], document["commit"])
        place.roofs = cpu_roofs(document["machine"])
        place.lengths.append({k: document[k] for k in ("stage", "model", "tokens", "threads")} | {"file": file})
    elif kind == "sweep" and "setting" in document:
        place.sweeps.append({**document, "model": label(document["model"]), "file": file})
    elif kind == "peers":
        place.runs += [peer(place, document, row, file) for row in document["rows"]]
    elif path.name == "ladder.json":
        machine = document["machine"]
        identify(place, {**machine, "name": machine.get("gpu") or machine["cpu"]}, {"sha": machine["commit"]})
        place.kernels[kind] = {**document, "file": file}


def compared(place: Place, document: dict, file: str) -> None:
    """A comparison, or the whole ladder: its runs and the verdicts on its steps."""
    runs = [r for r in document["stages"] if "missing" not in r]
    made = [timed(place, r, file) for r in runs]
    place.runs += made
    for pair in document["pairs"]:
        run = next(r for r in made if r.stage == pair["b"] and pair.get("shape") in (None, r.shape))
        place.pairs.append(
            {**pair, "model": run.model, "shape": run.shape, "at": run.at, "file": file, "reason": run.reason}
        )
    for r in runs:
        identify(place, r["machine"], r["commit"])


def identify(place: Place, machine: dict, commit: dict | None) -> None:
    """Name the machine, and what its records say of it, each thing once."""
    place.name = place.name or machine["name"]
    told = []
    if machine.get("memory"):
        cores, memory = f"{machine['cores']} cores", f"{machine['memory'] / 2**30:,.0f} GiB"
        beside = "cpu" in machine.get("versions", {})  # a GPU's own memory, its host's cores
        told = [f"{memory}, {cores} beside it" if beside else f"{cores}, {memory}"]
    told += [machine[key] for key in ("os", "nvidia_smi") if machine.get(key)]
    place.about += [t for t in told if t not in place.about]
    place.versions |= machine.get("versions", {})
    if commit and commit["sha"][:9] not in place.commits:
        place.commits.append(commit["sha"][:9])


def timed(place: Place, row: dict, file: str) -> Run:
    """A run record, or a row of a stage's record with what that record begins with."""
    prompt = row["prompt"] if "prompt" in row else len(row["prompt_ids"])
    name, expect, shape, threads = label(row["model"]), row.get("expect") or {}, row["shape"], row["threads"]
    if row["model"].get("quant_mix"):
        place.sizes[name] = sized(row["model"])
    size, stage = place.sizes.get(name), row["stage"]
    least = {m: bound(place, parts, threads, stage) for m, parts in passes(size, stage, prompt).items()}
    ms = {m: row[key] and row[key]["median"] for m, key in KEYS.items()}
    if shape.startswith("tg"):
        ms["prompt"] = None  # its prompt is there for the depth alone
    return Run(
        stage=stage,
        model=name,
        shape=shape,
        threads=threads,
        prompt=prompt,
        file=file,
        ms=ms,
        bound={m: expect.get(f"bound_{key}") or least[m] for m, key in KEYS.items()},
        expected={m: expect.get(key) for m, key in KEYS.items()},
        work=works(size, stage, prompt),
        gaps=[gap for sample in row.get("gaps_ms") or () for gap in sample],
        spread=row.get("inter_token_ms"),
        reason=expect.get("reason", ""),
    )


def peer(place: Place, document: dict, row: dict, file: str) -> Run:
    """A row of llama-bench, as a run of llama.cpp."""
    name, threads = show.named(document["model"]["name"]), document["threads"]
    metric = "token" if row["new"] else "prompt"
    prompt = max(1, row["depth"] if row["new"] else row["prompt"])
    size, stage = place.sizes.get(name), "llama.cpp"
    least = {m: bound(place, parts, threads, stage) for m, parts in passes(size, stage, prompt).items()}
    return Run(
        stage=stage,
        model=name,
        shape=row["shape"],
        threads=threads,
        prompt=prompt,
        file=file,
        ms={m: row["ms"]["median"] if m == metric else None for m in METRICS},
        bound=least,
        expected=dict.fromkeys(METRICS),
        work=works(size, stage, prompt),
    )


def label(model: dict) -> str:
    """'SmolLM2 135M Q4_1', with the layers where not all of them ran."""
    cut = model.get("layers") != model.get("file_layers")
    return f"{show.named(model['name'])} {model['quant']}" + (f", {model['layers']} layers" if cut else "")


def known(place: Place, name: str) -> str:
    """The label of a model that a record gives by name alone: that of a run on it, where there is one."""
    return next((run.model for run in place.runs if run.model.startswith(f"{show.named(name)} ")), show.named(name))


def threaded(stage: str, threads: int) -> str:
    return stage + (f", {threads} threads" if threads > 1 else "")


# ---- work and bounds -------------------------------------------------------------------------------------------


def sized(model: dict) -> tuple[SimpleNamespace, int] | None:
    """A known shape's (config, bytes of the matrices that a token needs), told by the count of its weights."""
    weights = sum(model["quant_mix"].values())
    for shape in synth.SHAPES.values():
        counts = {name: math.prod(size) for name, size in synth._tensors(shape)}
        layer = sum(count for name, count in counts.items() if name.startswith("blk.0."))
        layers, rest = divmod(weights - sum(counts.values()) + shape.L * layer, layer)
        if rest == 0 and 1 <= layers <= shape.L:
            config = SimpleNamespace(**{**shape._asdict(), "L": layers, "hd": synth.HEAD})
            held = {kind: count for kind, count in model["quant_mix"].items() if kind != "F32"}
            if not shape.tied:  # a row of the embedding is read, not all of it
                held[model["quant"]] -= shape.V * shape.D
            return config, sum(count // TYPES[kind].block * TYPES[kind].bytes for kind, count in held.items())
    return None


def passes(size: tuple | None, stage: str, prompt: int, floats: bool = False) -> dict[str, dict | None]:
    """Each op's least work in a prompt and in a token after it; floats: with weights as float32, not as in the file."""
    if size is None:
        return dict.fromkeys(METRICS)
    config, nbytes = size
    held = roofline.float_bytes(config)
    if not floats:
        held = {**dict.fromkeys(held, 0), "output": nbytes}
    kept = roofline.cache_bytes(stage)
    return {m: roofline.work(config, *at, held, kept=kept) for m, at in
            (("prompt", (prompt, prompt)), ("token", (1, prompt + 1)))}  # fmt: skip


def works(size: tuple | None, stage: str, prompt: int) -> dict[str, roofline.Work | None]:
    """The least a prompt and a token after it take, with weights as the stage holds them."""
    found = passes(size, stage, prompt, stage in roofline.FLOAT)
    return {metric: parts and roofline.total(parts) for metric, parts in found.items()}


def bound(place: Place, parts: dict | None, threads: int, stage: str) -> float | None:
    """The least ms of a stage's forward pass on the measured roofs."""
    if not (parts and place.roofs):
        return None
    many = threads > 1
    one, rate = place.roofs["flops"]["one"], place.roofs["flops"]["all" if many else "one"]
    machine = SimpleNamespace(
        read=lambda nbytes, _: curve(place.roofs["read_all" if many else "read"], nbytes),
        fma_gflops=one,
        fma_all_gflops=rate,
        int8_gops=place.roofs["int8"],
    )
    return roofline.pass_bound_ms(parts, machine, threads, roofline.operands(stage))


def gpu_roofs(found: dict, folder: Path) -> dict:
    rate = multiply_adds(folder)
    return {"read": found["read_gbs"], "read_all": found["read_gbs"], "flops": {"one": rate, "all": rate}, "int8": None}


def cpu_roofs(machine: dict) -> dict:
    rates = {"one": machine["fma_gflops"], "all": machine["fma_all_gflops"]}
    read_all = machine["read_all_gbs"] or machine["read_gbs"]
    return {"read": machine["read_gbs"], "read_all": read_all, "flops": rates, "int8": machine["int8_gops"]}


# ---- where time goes -------------------------------------------------------------------------------------------


def profiled(record: dict) -> list[dict]:
    """A stage's time by op: {stage, model, new, ms: {op: ms}, alone}, from whichever way its record tells it.

    new: tokens in the pass. alone: kernels were timed by themselves, so that nothing stands for what is between them.
    """
    found, alone = {}, False
    inside = record.get("profile") or {}
    if "prefill" in inside:
        for one in filter(None, (inside["prefill"], inside.get("decode"))):
            rows = [(row["op"], row["ms"]) for row in one["rows"]] + [("other", max(0.0, one["outside_ms"]))]
            found[one["new_tokens"] if one is inside["prefill"] else 1] = rows
    elif "host_ms" in record:
        for at, ops in record["host_ms"].items():
            rows = [(op, ms) for op, ms in ops.items() if op != "step_ms"]
            found[int(at[2:])] = [*rows, ("other", max(0.0, ops["step_ms"] - sum(ms for _, ms in rows)))]
    elif "op_ms" in inside.get("T=1", {}):
        for at, one in inside.items():
            if at.startswith("T="):
                rows = [(op, row["ms"]) for op, row in one["op_ms"].items()]
                found[int(at[2:])] = [*rows, ("launches, waits", max(0.0, one["ms"] - sum(ms for _, ms in rows)))]
    elif "kernels_us" in record and "T=1" in record["kernels_us"]:
        alone = True
        for at, ops in record["kernels_us"].items():
            found[int(at[2:])] = [(op.partition(" ")[0], row["ms"]) for op, row in ops.items()]
    else:
        steps, alone = record.get("kernels_us") or record.get("phases_us") or {}, True
        for ops in list(steps.values())[:1]:  # after few tokens; the other after many
            found[1] = [(op, row["us"] * row["calls"] / 1e3) for op, row in ops.items()]
    made = []
    for new, rows in found.items():
        sums = Counter()
        for op, ms in rows:
            sums[op] += ms
        made.append({"stage": record["stage"], "model": label(record["model"]), "new": new, "ms": sums, "alone": alone})
    return made


# ---- the climb -------------------------------------------------------------------------------------------------


@dataclass
class Climb:
    """A model's stages on one machine by one metric, each at one shape, in the order of the ladder."""

    model: str
    metric: str
    runs: list[Run]
    shape: str  # that most of them ran at

    @property
    def stages(self) -> list[Run]:
        return [run for run in self.runs if run.stage not in PEERS]

    @property
    def first(self) -> Run:
        return self.stages[0]

    @property
    def best(self) -> Run:
        """The quickest of those at the climb's shape."""
        alike = [run for run in self.stages if run.at == self.shape]
        return min(alike or self.stages, key=lambda run: run.ms[self.metric])


def climbs(place: Place) -> list[Climb]:
    """Each model and metric that two stages or more were timed on; most stages first, tokens before prompts."""
    found = []
    for model in dict.fromkeys(run.model for run in place.runs):
        for metric in METRICS:
            runs = [run for run in place.runs if run.model == model and run.over(metric)]
            shapes = Counter(at for _, at in {(run.stage, run.at) for run in runs if run.stage not in PEERS})
            chosen = [at_shape(name, runs, shapes) for name in order(runs)]
            if sum(run.stage not in PEERS for run in chosen) > 1:
                found.append(Climb(model, metric, chosen, Counter(run.at for run in chosen).most_common(1)[0][0]))
    return sorted(found, key=lambda c: (-len(c.stages), c.metric == "prompt"))


def order(runs: list[Run]) -> list[str]:
    """The stages among runs as the ladder has them, then peers, then a reader's own."""
    return sorted({r.stage for r in runs}, key=lambda s: (order_of(s), s))


def order_of(stage: str) -> int:
    known = [*LADDER, *PEERS]
    return known.index(stage) if stage in known else len(known)


def at_shape(stage: str, runs: list[Run], shapes: Counter) -> Run:
    """Of a stage's runs the one at the shape that most stages share, or with a prompt and threads near to it; from the
    whole ladder's record where it has one, else from the comparison of most stages.
    """
    mine = [run for run in runs if run.stage == stage]
    beside = Counter(run.file for run in runs)
    most = max(shapes.values())
    main = max((r for r in runs if shapes[r.at] == most), key=lambda r: r.prompt)

    def key(run: Run) -> tuple:
        far = abs(run.prompt - main.prompt)
        return shapes[run.at], run.threads == main.threads, -far, "/climb/" in run.file, beside[run.file]

    return max(mine, key=key)


def step(place: Place, run: Run, metric: str) -> dict | None:
    """A stage against its PREVIOUS: {ratio, expected_ratio, verdict, mark}.

    Of paired runs at this run's shape (no mark), else of two records at it (‡), else of paired runs at another (†).
    """
    previous = diff.constant(source_path(run.stage), "PREVIOUS") if run.stage in LADDER else None
    wanted = (previous, run.stage, KEYS[metric], run.model)
    pairs = [p for p in place.pairs if (p["a"], p["b"], p["metric"], p["model"]) == wanted]
    alike = [pair for pair in pairs if pair["at"] == run.at]
    if alike:
        return {**max(alike, key=lambda pair: pair["file"] == run.file), "mark": ""}
    for other in place.runs:
        if (other.stage, other.model, other.at) == (previous, run.model, run.at) and other.ms[metric]:
            ratio = other.ms[metric] / run.ms[metric]
            return {"ratio": ratio, "expected_ratio": None, "verdict": None, "mark": "‡"}
    return {**pairs[0], "mark": "†"} if pairs else None


# ---- report.md -------------------------------------------------------------------------------------------------


def markdown(place: Place, drawn: list) -> str:
    """report.md of one machine: its climbs with peers beside them, what lost, the kernel ladders, and the plots."""
    plots = [plot for plot in drawn if hasattr(plot, "spec")]
    left_out = [plot.sentence for plot in drawn if not hasattr(plot, "spec")] + place.notes
    lines = [f"# lesson on {place.name}", "", f"{about(place)}.", ""]
    for model in dict.fromkeys(climb.model for climb in climbs(place)):
        lines += [f"## {model}", "", *climb_table(place, model), ""]
    lines += ["## What lost", "", *(lost(place) or ["Nothing that was measured here."]), ""]
    for name in place.kernels:
        lines += [f"## {name}", "", *kernel_table(place, name), ""]
    if plots:
        lines += ["## Plots", ""]
        lines += [line for plot in plots for line in (f"![{plot.title}]({plot.name}.png)", "", plot.caption, "")]
    if left_out:
        lines += ["## Left out", "", *(f"* {sentence}" for sentence in left_out), ""]
    return "\n".join(lines)


def about(place: Place) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    commits = f"commit{'s' * (len(place.commits) > 1)} {', '.join(place.commits)}"
    return "; ".join(filter(None, [*place.about, versions, commits]))


def climb_table(place: Place, model: str) -> list[str]:
    """A model's stages: ms, × the stage before, what that was expected to be, and × the bound, for prompt and token."""
    found = {c.metric: c for c in climbs(place) if c.model == model}
    rows = {(m, run.stage): run for m, c in found.items() for run in c.runs}
    head = ["", "shape", *(h for title in METRICS.values() for h in (title, "× before", "expected ×", "× bound"))]
    notes = {"": "× before: of runs that took turns", "†": "† of such runs at another shape", "‡": "‡ of two records"}
    lines, marks = [], set()
    for stage in order([run for _, run in rows.items()]):
        here = {m: rows.get((m, stage)) for m in METRICS}
        cells = [f"*{stage}*" if stage in PEERS else stage, shapes_of(here.values())]
        for metric in ("prompt", "token"):
            run = here[metric]
            made = run and step(place, run, metric)
            cells += [
                show.number(run and run.ms[metric]),
                show.times(made["ratio"]) + made["mark"] if made else "–",
                show.times(made and made["expected_ratio"]),
                show.times(run and run.over(metric)),
            ]
            marks |= {made["mark"]} if made else set()
        lines.append(cells)
    told = "; ".join(note for mark, note in notes.items() if mark in {"", *marks})
    return [*table(head, lines, 2), *(["", f"{told}."] if marks else [])]


def table(head: list[str], rows: list[list[str]], words: int) -> list[str]:
    """A table in Markdown, without the columns that hold nothing: so many of words, then of numbers."""
    ends = ["---"] * words + ["---:"] * (len(head) - words)
    kept = show.kept(rows)
    return ["| " + " | ".join(row[i] for i in kept) + " |" for row in (head, ends, *rows)]


def shapes_of(runs) -> str:
    return "; ".join(dict.fromkeys(run.at for run in runs if run))


def lost(place: Place) -> list[str]:
    """A sentence for each step and shape that took longer, or as long where it should have gained, and for each peer
    ahead of every stage.
    """
    judged: dict[tuple, dict[str, dict]] = {}  # the whole ladder's record before other comparisons
    for pair in place.pairs:
        judged.setdefault((pair["b"], pair["a"], pair["model"], pair["at"]), {}).setdefault(pair["metric"], pair)
    gained = {(p["b"], p["a"], p["model"], p["metric"]) for p in place.pairs if p["verdict"] == "faster"}
    found = []
    for (b, a, model, at), by_metric in judged.items():
        climbs_on = b not in PEERS and order_of(a) < order_of(b)  # a step, if over several stages
        losses = [
            loss(pair)
            for metric, pair in by_metric.items()
            if climbs_on and is_loss(pair, seen_to_gain=(b, a, model, metric) in gained)
        ]
        if losses:
            found.append(f"* {b} against {a}, {model} {at}: {'. '.join(losses)}.")
    for climb in climbs(place):
        for run in climb.runs:
            ahead = climb.best.over(climb.metric) / run.over(climb.metric)
            if run.stage in PEERS and ahead > 1:
                what = f"{METRICS[climb.metric]}, {climb.model}"
                found.append(f"* {climb.best.stage}, the quickest stage, takes {show.times(ahead)} as many times "
                             f"the bound as {run.stage}: {what}, {climb.best.at} and {run.at}.")  # fmt: skip
    return list(dict.fromkeys(found))


def is_loss(pair: dict, seen_to_gain: bool = False) -> bool:
    """Slower, or never seen to gain where it should have gained more than the 3 % that a comparison can see."""
    hoped = (pair["expected_ratio"] or 1) > 1.03 and not seen_to_gain
    return pair["verdict"] == "slower" or (pair["verdict"] == "no measurable change" and hoped)


def loss(pair: dict) -> str:
    """'TTFT 1.79× the time before (1.71× to 1.87×); expected: arithmetic decides': interval, and what was to decide."""
    prompt = pair["metric"] == KEYS["prompt"]
    said = f"{'TTFT' if prompt else 'ms/token'} {show.times(1 / pair['ratio'])} the time before"
    said += f" ({show.times(1 / pair['high'])} to {show.times(1 / pair['low'])})"
    slower = pair["verdict"] == "slower"
    said += "; expected" if slower else f", where {show.times(1 / pair['expected_ratio'])} was expected"
    reasons = pair["reason"].split(roofline.AND_TOKEN)
    return f"{said}: {reasons[0 if prompt else -1]}" if pair["reason"] else said.removesuffix("; expected")


def kernel_rows(place: Place, name: str) -> list[dict]:
    """A kernel ladder's timed rows at the shape that most rungs ran, the largest of those; rungs first, in order."""
    timed = [r for r in place.kernels[name]["rows"] if r.get("ms")]
    shapes = Counter(tuple(r["shape"]) for r in timed)
    shape = max(shapes, key=lambda s: (shapes[s], math.prod(filter(None, s))))
    rungs = kernel_rungs(name)
    rows = [r for r in timed if tuple(r["shape"]) == shape]
    return sorted(rows, key=lambda r: rungs.index(r["stage"]) if r["stage"] in rungs else len(rungs))


def shape_text(name: str, shape: list[int]) -> str:
    """'512 × 512 × 512', or with the names that a ladder gives its axes, 'B 4, H 32, …, causal'."""
    axes = getattr(importlib.import_module(f"stages.{name}"), "AXES", None)
    if axes is None or len(axes) != len(shape):
        return " × ".join(map(str, shape))
    named = ((axis, size) for axis, size in zip(axes, shape, strict=True) if size or axis.isupper())
    return ", ".join(f"{axis} {size}" if axis.isupper() else axis for axis, size in named)  # causal or padded: yes, no


def kernel_rungs(name: str) -> list[str]:
    return [rung.partition("/")[2] for rung in catalog.kernels(name)["rungs"]]


def kernel_unit(rows: list[dict]) -> tuple[str, float]:
    """The unit in which rates read best, and how many of it are a TFLOP/s."""
    return ("TFLOP/s", 1.0) if max(r["tflops"] for r in rows) > 1 else ("GFLOP/s", 1e3)


def kernel_table(place: Place, name: str) -> list[str]:
    """A kernel ladder at one shape: ms, rate, percent of peak, and times each baseline's speed."""
    rows = kernel_rows(place, name)
    unit, factor = kernel_unit(rows)
    baselines = list(dict.fromkeys(b for r in rows for b in r["ratio_to_baseline"]))
    head, lines = ["", "type", "ms", unit, "% of peak", *(f"× {b}" for b in baselines)], []
    for r in rows:
        cells = [r["stage"], r["dtype"], show.number(r["ms"]["median"]), show.number(r["tflops"] * factor)]
        cells += [show.number(r["percent_peak"]), *(show.number(r["ratio_to_baseline"].get(b)) for b in baselines)]
        lines.append(cells)
    return [f"{shape_text(name, rows[0]['shape'])}.", "", *table(head, lines, 2)]
