"""`lesson check`: is a practice file right, is it the reader's own work, and is it fast enough?

The file runs in a process of its own, on prompts drawn when it starts, and what is timed is what is checked. The parent
reads its own clock too. This is no examination hall: whoever wants to deceive a process from inside it can. It is meant
to catch what one might take for an answer without having learnt anything.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common import diff, harness, practice, show, sources
from common.harness import Request, RunError, Sample
from common.job import Job, UsageError, prepare
from common.stage import CPU, LADDER, code_path, rungs
from common.stats import Verdict, verdict

SPARE = {"math", "typing", "itertools", "collections", "dataclasses", "numpy", "numba"}  # what any stage may import
BLAS = {"dot", "vdot", "inner", "matmul", "tensordot", "einsum", "einsum_path", "linalg", "matvec", "vecmat", "vecdot",
        "convolve", "correlate", "matrix", "asmatrix", "bmat"}  # fmt: skip
REACHING = {"eval", "exec", "compile", "open", "__import__", "globals", "vars", "getattr", "setattr", "delattr"}

MODELS = ("odd", "tiny")  # quick ones first: sizes that no tile divides, then blocks as files have them
PROMPT, NEW = 13, 4  # ids and new tokens of a quick run
MEMORY_PROMPT = 32  # ids, so that computing them takes far longer than looking them up
MEMORY_TRIES = 5
REMEMBERED = 4  # times sooner that a prompt may be answered when it is asked again
ROUNDS = 3  # timed runs of each stage, each on a prompt of its own
SURE_ROUNDS = 7  # the same where a step gains little: as many as a comparison takes
EQUAL = 1.1  # gains this near to each other are the same
CLOSE = 1.25  # times what the course's own takes: good enough where the root of its gain is less than that
LOOSE = 2.0  # the same for what the step is not about
WORTH = 1.5  # below this gain another model shows the step better
ELSEWHERE = {"model": "tinyllama-shape", "layers": 1, "shape": "pp8"}  # long rows, and blocks of 256
CLOCK_RATIO, CLOCK_MS = 1.2, 5.0  # what the parent's clock may show beyond the worker's, in the calmest of the runs
POLL_S = 0.3  # between looks at a watched file
CLOCK_QUICK_MS = 500.0  # the same for a single run: another program may have kept the parent waiting


class CheckError(Exception):
    """A file that does not pass; str(e) says why in one sentence. `verdict` is empty | unfair | wrong | slow."""

    exit_code = 5

    def __init__(self, verdict: str, message: str):
        super().__init__(message)
        self.verdict = verdict


class MissingError(Exception):
    """The device that a stage needs is not here; str(e) says what could be done without it."""

    exit_code = 4


# ---- the file, read and not run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A practice file."""

    path: Path
    stage: str  # what it practises
    text: str
    yours: dict[str, diff.Definition]  # what differs from the stage before it

    @property
    def name(self) -> str:
        """The file as a command takes it."""
        return str(self.path)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def kernel(self) -> bool:
        return self.stage in rungs() and self.stage not in LADDER

    @property
    def previous(self) -> str:
        return practice.previous(self.stage)

    @property
    def yours_to_write(self) -> list[str]:
        course = code_path(self.stage)
        return practice.yours(diff.constant(course, "CHANGES"), diff.definitions(course.read_text("utf-8")))

    @property
    def asked(self) -> str:
        """The definitions that the step changes."""
        return ", ".join(diff.constant(code_path(self.stage), "CHANGES"))


def read(path: Path) -> Work:
    """The file and what of it is the reader's. Raises StageError and UsageError as practice.practised does."""
    stage = practice.practised(path)
    text = path.read_text("utf-8")
    old = diff.definitions(code_path(practice.previous(stage)).read_text("utf-8"))
    course = diff.definitions(code_path(stage).read_text("utf-8"))
    found = diff.definitions(text)

    def given(name: str, d: diff.Definition) -> bool:
        handed_out = name in course and d.text.startswith(("from ", "import ", "class "))
        return d.text == getattr(old.get(name), "text", None) or (handed_out and d.text == course[name].text)

    return Work(path, stage, text, {name: d for name, d in found.items() if not given(name, d)})


def look(work: Work) -> None:
    """Raises CheckError where the text itself shows that something else would do the work."""
    blas = f"calls NumPy's BLAS, where {work.asked} has to be a kernel of your own"
    for node in ast.walk(ast.parse(work.text)):
        told = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            told = imported(node, work.stage)
            if getattr(node, "module", "") == "numpy" and any(alias.name in BLAS for alias in node.names):
                told = f"that import {blas}"
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            told = f"@ {blas}"
        elif isinstance(node, ast.Attribute) and node.attr in BLAS:
            told = f".{node.attr} {blas}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            told = f".{node.attr} reaches into Python's own machinery, which no stage needs"
        elif isinstance(node, ast.Name) and node.id in REACHING:
            told = f"{node.id} can run or change code that is not in this file, which no stage needs"
        if told:
            raise CheckError("unfair", f"{work.name}, line {node.lineno}: {told}")


def imported(node: ast.Import | ast.ImportFrom, stage: str) -> str | None:
    """What is wrong with an import in a practice file of `stage`, None where nothing is."""
    allowed, from_stage = may_import(stage)
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
    for module in modules:
        if module.split(".")[0] == "stages":
            return f"it imports {module}, the course's own code, where yours has to do the work"
        names = {alias.name for alias in node.names} if module == "common.stage" else set()
        if module not in allowed or names - from_stage:
            usual = ", ".join(sorted(SPARE))
            return f"it imports {module}, which {stage} has no need of: import what the course's stages do, or {usual}"
    return None


@functools.cache
def may_import(stage: str) -> tuple[set[str], set[str]]:
    """Modules that a stage and those below it import, with SPARE; and the names they take from common.stage."""
    modules, names = set(SPARE), set()
    while stage:
        path = code_path(stage)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
                names |= {alias.name for alias in node.names} if node.module == "common.stage" else set()
        stage = practice.previous(stage) if diff.constant(path, "PREVIOUS") else ""
    return modules, names


# ---- the worker's side: run it, and see what it touched -----------------------------------------------------------


class Surroundings:
    """What a stage may use and not change: the course's own code, and the clock, NumPy and the rest that measure it."""

    WATCHED = ("time", "json", "random", "os", "sys", "builtins", "numpy", "numpy.random", "threading")

    def __init__(self):
        for name in (
            "cpu_ops",
            "jit",
            "quants",
            "model",
            "gguf",
            "gate",
            "reference",
            "stage",
            "intrinsics",
            "harness",
        ):
            importlib.import_module(f"common.{name}")
        watched = [name for name in sys.modules if name in self.WATCHED or name.partition(".")[0] == "common"]
        self.modules = {name: sys.modules[name] for name in watched}
        self.inside = {name: dict(vars(module)) for name, module in self.modules.items()}
        self.code = {id(f): f.__code__ for held in self.inside.values() for f in held.values() if inspect.isfunction(f)}
        self.stages = {name for name in sys.modules if name.partition(".")[0] == "stages"}

    def disturbed(self) -> list[str]:
        """What is no longer what it was, and the course's stages that came in."""
        found = [name for name, module in self.modules.items() if sys.modules.get(name) is not module]
        for name, held in self.inside.items():
            now = vars(self.modules[name])
            for key, value in held.items():
                other = callable(value) and now.get(key) is not value
                if other or inspect.isfunction(value) and value.__code__ is not self.code[id(value)]:
                    found.append(f"{name}.{key}")
        stages = {name for name in sys.modules if name.partition(".")[0] == "stages"} - self.stages
        return sorted(set(found)) + sorted(stages)


def examine(request: Request, models: list[str], tell: Callable) -> dict:
    """Run a reader's stage in this process: on each of the models, or as the request says where there are none.

    -> samples, what was disturbed, where the code came from that ran, and how many times sooner a prompt is answered
    the second time (None where no model is quick enough to try).
    """
    around = Surroundings()
    stage = harness.load_stage(request.stage)
    samples = []
    for i, model in enumerate(models or [request.model]):
        one = replace(request, model=model, rows_file=f"{request.rows_file}.{i}.npy")
        samples.append(asdict(harness.measure(one, tell, lambda: tell(None, 0.0), stage)))
    again = sooner(stage, models[-1], request.threads) if models else None
    return {"samples": samples, "disturbed": around.disturbed(), "ran": origin(stage), "again": again}


def sooner(stage, path: str, threads: int) -> float:
    """How many times sooner the first token comes where the same prompt was asked before."""
    from common.model import open_model

    gguf = open_model(path)
    model = stage.load(gguf, 2 * MEMORY_PROMPT, threads)

    def first_ms(ids: list[int]) -> float:
        started = time.perf_counter()
        next(stage.generate(model, ids, 1))
        return (time.perf_counter() - started) * 1e3

    prompts = [drawn(MEMORY_PROMPT, gguf.config.V) for _ in range(MEMORY_TRIES)]
    fresh = min(map(first_ms, prompts))
    return fresh / max(min(first_ms(prompts[-1]) for _ in prompts), 1e-6)


def origin(module) -> dict[str, list]:
    """{name: [file, line]} of each function of a module, wherever it was written."""
    found = {}
    for name, value in vars(module).items():
        code = getattr(getattr(value, "py_func", value), "__code__", None)
        if code:
            found[name] = [code.co_filename, code.co_firstlineno]
    return found


def examine_kernel(stage: str, file: str, shape: list, odd: list, seeds: list[int], tell: Callable) -> dict:
    """Run a rung, or a reader's file in its place: odd shapes first, then one timed call for each seed, all checked."""
    import numpy as np

    from common import kernel_commands, kernel_ladder

    rungs = kernel_ladder.ladder(stage.partition("/")[0])
    here, dtype = kernel_ladder.device(rungs), kernel_commands.types(rungs, [kernel_commands.rung(stage)])[0]
    around = Surroundings()
    call = kernel_commands.entry(rungs, file)
    faults, times, again = [], [], None

    def told(shapes: list) -> str:
        return " and ".join(map(str, shapes))

    def checked(out, operands, sizes) -> None:
        exact, size = rungs.oracle(*operands)
        out, wanted = kernel_ladder.several(out), kernel_ladder.several(exact)
        shapes = [getattr(a, "shape", type(a).__name__) for a in out]
        if shapes != [a.shape for a in wanted]:
            faults.append(f"at {sizes}: the output is {told(shapes)} and not {told([a.shape for a in wanted])}")
            return
        found = kernel_ladder.judge(rungs, out, exact, size, dtype)
        if not found["right"]:
            error = abs(kernel_ladder.wide(out[0]) - wanted[0]) / (kernel_ladder.several(size)[0] + 1e-300)
            error = np.asarray(error.get() if hasattr(error, "get") else error)
            *rows, column = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
            row = ", ".join(map(str, rows))
            faults.append(f"at {sizes} ({dtype}): row {row}, column {column} is off by {found['max_abs']:.1e}, "
                          f"{found['allowance']:.1e} times what rounding explains")  # fmt: skip

    with here.alone():
        for seed, sizes in enumerate(odd):
            operands = rungs.inputs(tuple(sizes), dtype, seed=seeds[0] + seed)
            kernel_ladder.poison(rungs, sizes)
            checked(call(*operands), operands, "x".join(map(str, sizes)))
            if faults:
                break
        for seed in [] if faults else seeds:
            operands = rungs.inputs(tuple(shape), dtype, seed)
            kept = []
            if seed == seeds[0]:
                call(*operands)  # warm, on numbers that no timed call gets
                continue
            kernel_ladder.poison(rungs, shape)
            tell(None, 0.0)
            times.append(here.once(lambda operands=operands, kept=kept: kept.append(call(*operands))))
            tell(seed, times[-1])
            checked(kept[0], operands, "x".join(map(str, shape)))
        if times:
            again = min(times) / max(here.once(lambda: call(*operands)), 1e-6)
    ran = origin(sys.modules[f"reader_{Path(file).stem}"]) if file.endswith(".py") else {}
    return {"times": times, "faults": faults, "disturbed": around.disturbed(), "ran": ran, "again": again}


def compiles(file: str) -> dict:
    """The architectures that a file's CUDA source compiles for, or the compiler's first complaint."""
    from common import cuda
    from common.stage import import_file

    module = import_file(Path(file))
    archs = []
    for arch in module.ARCHS if hasattr(module, "SOURCE") else ():
        try:
            cuda.compile(module.SOURCE, module.OPTIONS, arch)
            archs.append(arch)
        except (ImportError, cuda.MissingCompiler):
            continue
        except cuda.CUDAError as error:
            fault = next((line for line in str(error).splitlines() if "error" in line), str(error))
            return {"archs": archs, "fault": fault}
    return {"archs": archs, "fault": None}


# ---- the parent's side ---------------------------------------------------------------------------------------------


class Stopwatch:
    """The parent's own clock on a worker's tokens: on_token of harness.talk."""

    def __init__(self):
        self.began, self.ms, self.told_ms = 0.0, 0.0, 0.0
        self.tokens = 0

    def __call__(self, token: int | None, ms: float) -> None:
        now = time.perf_counter()
        if token is None:
            self.began = now
        else:
            self.ms, self.told_ms, self.began = self.ms + (now - self.began) * 1e3, self.told_ms + ms, now
            self.tokens += 1


def drawn(count: int, V: int) -> list[int]:
    """Token ids that nobody could know before."""
    draw = random.SystemRandom()
    return [draw.randrange(V) for _ in range(count)]


def clocks(work: Work, watches: list[Stopwatch], spare_ms: float) -> None:
    """Raises CheckError where each run took longer by the parent's clock than the worker says."""
    if all(watch.ms > CLOCK_RATIO * watch.told_ms + spare_ms for watch in watches):
        told, passed = show.number(watches[0].told_ms), show.number(watches[0].ms)
        raise CheckError(
            "unfair",
            f"{work.name} took {told} ms by the clock of its process and {passed} by the one outside: its clock was "
            "changed, or it works while that stands still",
        )


def examined(work: Work, request: Request, watch: Stopwatch, models: dict[str, str], several: bool) -> list[Sample]:
    """A reader's stage in a worker, and its samples; models: {name: path}, one of them unless there are several.

    Raises CheckError where it isn't the reader's code that ran, or where a logit is not finite.
    """
    before = watch.tokens
    try:
        found = harness.talk("examine", request, watch, models=list(models.values()) if several else [])
    except RunError as error:
        if error.exit_code != CheckError.exit_code:
            raise
        at = min((watch.tokens - before) // request.n, len(models) - 1)  # each finished one gave n tokens
        on, path = list(models.items())[at]
        where = harness.diagnose(replace(request, model=path))
        raise CheckError("wrong", f"{work.name} is wrong on {on}: a logit is not finite; {where}") from error
    fair(work, found)
    return [Sample(**sample) for sample in found["samples"]]


def fair(work: Work, found: dict) -> None:
    """Raises CheckError for what a worker's report gives away."""
    if found["disturbed"]:
        course = found["disturbed"][0].startswith("stages")
        what = "the course's own came in: " if course else "was replaced by another: "
        raise CheckError("unfair", f"while {work.name} ran, {what}{', '.join(found['disturbed'][:3])}")
    own = str(work.path.resolve())
    for name, d in diff.definitions(work.text).items():
        ran = found["ran"].get(name)
        if d.text.startswith(("from ", "import ")) or not ran:
            continue
        if ran[0] != own or not d.line <= ran[1] <= d.line + d.text.count("\n"):
            other = f"{Path(ran[0]).name}, line {ran[1]}"
            raise CheckError("unfair", f"the {name} that ran is not the one in {work.name} but that of {other}")
    if found["again"] and found["again"] > REMEMBERED:
        raise CheckError(
            "unfair",
            f"{work.name} remembers outputs instead of computing them: the same input again was answered "
            f"{found['again']:.0f} times sooner",
        )


def right(work: Work, request: Request, sample: Sample, rows_file: str, on: str) -> str:
    """Hold a run's logits on a model called `on` against the oracle's. -> how close they are.

    Raises CheckError that says where they part.
    """
    import numpy as np

    from common import gate, reference
    from common.model import open_model

    gguf, rows, ids = open_model(request.model, request.layers), np.load(rows_file), sample.output_ids
    want = reference.compute(gguf, request.ids + ids[:-1], rows=len(ids)).logits
    if rows.shape != want.shape:
        raise CheckError("wrong", f"{work.name} gives logits of {rows.shape[1:]} and not {want.shape[1:]}")
    allowed = gate.tolerance(work.stage, len(rows))
    found = gate.agreement(rows, ids, want, allowed)
    if not found.passed:
        where = harness.diagnose(replace(request, ids=request.ids + ids[:-1]))
        size = f"logits NMSE {found.nmse:.1e}, allowed {allowed:.0e}"
        raise CheckError("wrong", f"{work.name} is wrong on {on}: {size}; {where}")
    return f"logits NMSE {found.nmse:.0e} of {allowed:.0e} allowed"


def quick(work: Work, flags: dict) -> list[str]:
    """Right on small models, and its own? -> what was found. Raises CheckError, RunError, MissingError."""
    from common.gguf import read as read_gguf

    models = {name: str(sources.resolve(name)) for name in MODELS}
    vocabulary = min(len(read_gguf(path).metadata["tokenizer.ggml.tokens"]) for path in models.values())
    with tempfile.TemporaryDirectory() as folder:
        rows = str(Path(folder) / "rows")
        request = Request(work.name, models[MODELS[0]], drawn(PROMPT, vocabulary), NEW, rows_file=rows)
        request = replace(request, warm_ids=drawn(PROMPT, vocabulary))
        watch = Stopwatch()
        samples = examined(work, request, watch, models, several=True)
        clocks(work, [watch], CLOCK_QUICK_MS)
        said = []
        for i, ((name, model), sample) in enumerate(zip(models.items(), samples, strict=True)):
            close = right(work, replace(request, model=model, rows_file=None), sample, f"{rows}.{i}.npy", name)
            said.append(f"right on {name}: {PROMPT} random ids and {NEW} new tokens, {close}")
    return said


# ---- is it fast enough? ---------------------------------------------------------------------------------------------


class Race(NamedTuple):
    """What the stage before, the file and the course's own took."""

    taken: dict[str, dict[str, list[float]]]  # {measure: {name: samples}}, measures as in MEASURES
    on: str  # the model or the shape
    near: Callable[[str, float], str]  # (measure, value) -> which limit that is near
    watches: list[Stopwatch] = []  # the parent's clock on each round
    least: Callable[[], float] = float  # the ms that the stage's own idea comes down to at best, 0 where none is known

    def longer(self, more: "Race") -> "Race":
        """With the rounds of another race on the same."""
        both = {
            measure: {name: samples + more.taken[measure][name] for name, samples in of.items()}
            for measure, of in self.taken.items()
        }
        return self._replace(taken=both, watches=self.watches + more.watches)

    def of(self, measure: str, name: str) -> float:
        return median(self.taken[measure][name])

    def gain(self, measure: str, work: Work) -> float:
        """How many times less the course's own takes than the stage before it."""
        return self.of(measure, work.previous) / self.of(measure, work.stage)

    def main(self, work: Work) -> str:
        """What the step is about: where the course's own gains most, the first such measure where gains are equal."""
        gains = {measure: self.gain(measure, work) for measure in self.taken}
        return next(measure for measure, gain in gains.items() if gain * EQUAL >= max(gains.values()))

    def told_apart(self, work: Work) -> Verdict:
        """The course's own against the stage before it, as `lesson compare` judges them."""
        of = self.taken[self.main(work)]
        return verdict(of[work.previous], of[work.stage])


MEASURES = {"ttft_ms": "TTFT ms", "ms_per_token": "ms/token", "peak_rss_mb": "peak MiB", "ms": "ms"}


def race(work: Work, flags: dict, say: Callable) -> Race:
    """Runs of each stage in turns, each round on a prompt of its own; every run of the file is checked.

    Where the first round shows that the step is worth little on the usual model, another takes its place.
    """
    job = prepare(**flags, stages=[work.stage])
    found = rounds(work, job, range(1), say)
    gain = found.gain(found.main(work), work)
    if gain < WORTH and work.stage in CPU and all(value is None for value in flags.values()):
        if not sources.locate(ELSEWHERE["model"]).is_file():
            say(f"{ELSEWHERE['model']} is synthesized first, once: 667 MB, which takes about a minute")
        job = prepare(**ELSEWHERE, stages=[work.stage])
        on = show.named(job.model_name)
        say(f"{work.stage} gains {show.times(gain)} at most, too little to judge by, so on to {on}")
        found = rounds(work, job, range(1), say)
    return until_sure(work, found, lambda which: rounds(work, job, which, say))


def until_sure(work: Work, found: Race, more: Callable[[range], Race]) -> Race:
    """A race of one round made as long as its step needs; more(which) are those rounds. Raises CheckError as clocks."""
    found = found.longer(more(range(1, ROUNDS)))
    if found.gain(found.main(work), work) < CLOSE**2:  # whose root is less than CLOSE
        found = found.longer(more(range(ROUNDS, SURE_ROUNDS)))
    clocks(work, found.watches, CLOCK_MS)
    return found


def turns(work: Work, i: int) -> list[str]:
    """The stages in the order of round i, each second time the other way round."""
    names = [work.previous, work.name, work.stage]
    return names if i % 2 == 0 else names[::-1]


def rounds(work: Work, job: Job, which: range, say: Callable) -> Race:
    """These rounds on one model."""
    names, model = turns(work, 0), show.named(job.model_name)
    taken = {measure: {name: [] for name in names} for measure in ("ttft_ms", "ms_per_token", "peak_rss_mb")}
    watches = [Stopwatch() for _ in which]
    with tempfile.TemporaryDirectory() as folder:
        rows = str(Path(folder) / "rows")
        for i, watch in zip(which, watches, strict=True):
            ids = drawn(len(job.ids), job.gguf.config.V)
            for name in turns(work, i):
                request = job.request(name, ids=ids, n=NEW, stop_ids=[], warm_ids=drawn(len(ids), job.gguf.config.V))
                if name == work.name:
                    on = {model: request.model}
                    sample = examined(work, replace(request, rows_file=rows), watch, on, several=False)[0]
                    within_roof(work, job, sample)
                    close = right(work, request, sample, f"{rows}.0.npy", model)
                else:
                    sample = harness.run(request)
                for measure, value in zip(
                    taken, (sample.ttft_ms, sample.ms_per_token(), sample.peak_rss_mb), strict=True
                ):
                    taken[measure][name].append(value)
            say(f"round {i + 1} on {model}: right on {len(ids)} new random ids and {NEW} new tokens, {close}")
    on = f"{model}, pp{len(job.ids)}+tg{NEW}"
    return Race(taken, on, lambda measure, value: near(work, job, measure, value), watches, lambda: chain(work, job))


def chain(work: Work, job: Job) -> float:
    """ms that the chains of float additions of a prefill take where one follows the other, which tiling leaves so."""
    from common import roofline

    if work.stage != "tiling":
        return 0.0
    return roofline.multiply_adds(job.gguf.config, len(job.ids)) * machine_of(work, job).fp_add_ns / 1e6


def near(work: Work, job: Job, measure: str, value: float) -> str:
    """Which limit a value is near: the nearest of the course's expectations, and what decides there."""
    from common import roofline

    timed = replace(job, n=NEW)
    if measure == "peak_rss_mb":
        return f"the file itself is {show.number(len(job.gguf.gguf.file) / 2**20)} MiB"
    if work.stage not in roofline.COSTS:
        bound = roofline.expectation(work.stage, timed, machine_of(work, job))[f"bound_{measure}"]
        return f"reading the weights once and the arithmetic would take {show.number(bound)} ms"
    every = [roofline.expectation(stage, timed, machine_of(work, job, roofline.COSTS)) for stage in roofline.COSTS]
    found = min(every, key=lambda e: abs(math.log(e[measure] / value)))
    return f"it is near what {found['stage']} is expected to take, {show.number(found[measure])} ms: {found['reason']}"


def machine_of(work: Work, job: Job, stages=()):
    """The CPU, or the GPU where the stage runs on one, measured."""
    from common import gpu, gpu_machine, machine, roofline

    if gpu.on_gpu(work.stage):
        return gpu_machine.of(work.stage, job.gguf.config)
    return machine.measure(walks=roofline.walks(stages, job.gguf.config))


def within_roof(work: Work, job: Job, sample: Sample) -> None:
    from common import records, roofline

    try:
        records.within_roof(job, work.stage, [sample], machine_of(work, job))
    except roofline.AccountingError as error:
        raise CheckError("unfair", f"{work.name} takes less time than reading the weights does: {error}") from error


def race_kernels(work: Work, flags: dict, say: Callable) -> Race:
    """As race, for the rungs of a kernel ladder."""
    ladder, shape = kernel_job(work, flags)

    def rounds(which: range) -> Race:
        taken: dict[str, list[float]] = {name: [] for name in turns(work, 0)}
        watches = [Stopwatch() for _ in which]
        for i, watch in zip(which, watches, strict=True):
            seeds = [random.SystemRandom().randrange(1 << 31) for _ in range(3)]
            for name in turns(work, i):
                if name == work.name:
                    taken[name] += kernel_examined(work, shape, [], seeds, watch)["times"]
                else:
                    taken[name] += kernel_run(work, name, shape, [], seeds)["times"]
            say(f"round {i + 1}: right on new random operands")
        return Race({"ms": taken}, f"M x N x K = {' x '.join(map(str, shape))}", rate, watches)

    def rate(measure: str, ms: float) -> str:
        return f"that is {show.number(ladder.flops(*shape) / ms / 1e6)} GFLOP/s"

    return until_sure(work, rounds(range(1)), rounds)


def quick_kernel(work: Work, flags: dict) -> list[str]:
    """As quick, for a rung: right at odd shapes?"""
    from common import kernel_ladder

    ladder, shape = kernel_job(work, flags)
    if missing := kernel_ladder.device(ladder).missing():
        raise MissingError(without_device(work, missing))
    kernel_examined(work, shape, ladder.ODD_SHAPES, [random.SystemRandom().randrange(1 << 31)], Stopwatch())
    return [f"right at {len(ladder.ODD_SHAPES)} odd shapes, against float64"]


def kernel_job(work: Work, flags: dict) -> tuple:
    """The kernel ladder's package and the (M, N, K) to time at. Raises UsageError."""
    from common import kernel_commands, kernel_ladder

    flags = dict(flags)
    kernel_commands.checked([work.stage], shape := flags.pop("shape", None), **flags)
    ladder = kernel_ladder.ladder(work.stage.partition("/")[0])
    return ladder, kernel_commands.shape_of(ladder, shape)


def kernel_run(work: Work, name: str, shape, odd, seeds, watch: Callable = lambda token, ms: None) -> dict:
    """One rung in a worker of its own; the first seed warms it up."""
    request = Request(name, "", [], 0)
    return harness.talk("examine_kernel", request, watch, ladder_stage=work.stage, shape=shape, odd=odd, seeds=seeds)


def kernel_examined(work: Work, shape, odd, seeds, watch: Stopwatch) -> dict:
    """The reader's rung in a worker. Raises CheckError where it is wrong or not the reader's."""
    found = kernel_run(work, work.name, shape, odd, seeds, watch)
    fair(work, found)
    if found["faults"]:
        raise CheckError("wrong", f"{work.name} is wrong {found['faults'][0]}")
    return found


# ---- all of it --------------------------------------------------------------------------------------------------


def check(
    path: Path,
    flags: dict,
    timed: bool = True,
    say: Callable[[str], None] = lambda text: None,
    timing: Callable[[Work, dict, Callable], Race] | None = None,
) -> dict:
    """Judge a practice file. -> the JSON document of one that passes.

    say is given each finding as it comes; timing takes the times, by default for real. Raises CheckError for one that
    does not pass, StageError, UsageError or RunError where it can't run, MissingError where its device is not here.
    """
    work = read(path)
    say(f"{work.name} (sha256 {work.sha256[:12]}) practises {work.stage}; what runs is yours where it differs from "
        f"{work.previous}: {', '.join(work.yours) or 'nowhere'}")  # fmt: skip
    if left := practice.empty(work.text):
        where = f"{work.name}, line {work.yours[left[0]].line}"
        raise CheckError("empty", f"{where}: {left[0]} is still empty; `lesson hint {work.name}` gives a hint")
    if not work.yours:
        raise CheckError("empty", f"{work.name} is {work.previous}'s own code to the letter: change {work.asked}")
    look(work)
    document = {
        "schema": 1, "file": work.name, "stage": work.stage, "previous": work.previous, "sha256": work.sha256,
        "yours": [{"name": name, "line": d.line} for name, d in work.yours.items()], "verdict": "pass",
    }  # fmt: skip
    say(f"compiling it, then held against the reference on {' and '.join(MODELS)}: some ten seconds …"
        if not work.kernel else "compiling it, then held against float64 …")  # fmt: skip
    is_right, takes = (quick_kernel, race_kernels) if work.kernel else (quick, race)
    try:
        for found in is_right(work, flags):
            say(found)
    except RunError as error:
        if error.exit_code != MissingError.exit_code:
            raise
        raise MissingError(without_device(work, str(error))) from error
    if not timed:
        return document | {"took": None}
    say(f"now timed in turns with {work.previous} and {work.stage}: {ROUNDS} rounds, {SURE_ROUNDS} for a small gain")
    return document | judged(work, (timing or takes)(work, flags, say))


def without_device(work: Work, why: str) -> str:
    """What can be said of a file that can't run here: whether it compiles. Raises CheckError where it does not."""
    found = harness.talk("compile", Request(work.name, "", [], 0))
    if found["fault"]:
        raise CheckError("wrong", f"{work.name} does not compile: {found['fault']}")
    done = f"compiles for {', '.join(found['archs'])}, but " if found["archs"] else ""
    return f"{work.name} {done}can't be run here: {why}"


def judged(work: Work, found: Race) -> dict:
    """The part of the document that is about time; notes the stage as done. Raises CheckError for too slow a file."""
    main, n, told = found.main(work), show.number, found.told_apart(work)
    each = {
        measure: {key: found.of(measure, name) for key, name in zip(KEYS, samples, strict=True)}
        for measure, samples in found.taken.items()
    }
    limits = {measure: limit(of["previous"], of["course"], measure == main, told) for measure, of in each.items()}
    for measure in sorted(each, key=lambda measure: measure != main):
        of, (most, rule) = each[measure], limits[measure]
        if of["yours"] > most:
            seen = f"{n(of['yours'])} {MEASURES[measure]} ({found.on})"
            others = f"{work.previous} takes {n(of['previous'])}, {work.stage} {n(of['course'])}"
            enough = f"{n(most)} will do ({rule.format(stage=work.stage)})"
            said = f"{work.name} is right, but not good enough yet: {seen}, where {others}, and {enough}"
            left = [name for name in work.yours_to_write if name not in work.yours]
            still = f"; {' and '.join(left)} {'is' if len(left) == 1 else 'are'} still {work.previous}'s own"
            raise CheckError("slow", f"{said}; {found.near(measure, of['yours'])}{still if left else ''}")
    ratio, course = (each[main]["previous"] / each[main][key] for key in ("yours", "course"))
    practice.note(work.stage, practised={"sha256": work.sha256, "ratio": ratio, "course": course, "measure": main})
    return {
        "on": found.on,
        "measure": main,
        "took": each,
        "limits": {measure: most for measure, (most, _) in limits.items()},
        "rule": limits[main][1].format(stage=work.stage),
        "ratio": ratio,
        "course_ratio": course,
        "told_apart": told._asdict(),
        "beyond": beyond(work, found, each[main]),
    }


BEYOND = 2.0  # times the course's own gain: more than its idea explains


def beyond(work: Work, found: Race, of: dict[str, float]) -> str | None:
    """A word on a file that gains more than its stage's idea can, None for any other."""
    if BEYOND * of["yours"] > of["course"] or of["yours"] >= (least := found.least()):
        return None
    return (
        f"That is faster than {work.stage} can be: one addition after the other takes {show.number(least)} ms. The "
        "compiler put neighbouring n into lanes, which is simd's idea: the loops of this file have n innermost."
    )


KEYS = ("previous", "yours", "course")


def limit(previous: float, course: float, main: bool, told: Verdict) -> tuple[float, str]:
    """The most that is good enough, and the rule for it.

    On the measure that the step is about the square root of the course's gain; or near what the course takes, where
    its gain is not sure to be one. The root of a sure gain is what tells a step from the stage before it. On the other
    measures not far from the course's.
    """
    half = math.sqrt(previous * course)
    if not main:
        return LOOSE * course, f"{LOOSE} times what {{stage}} takes"
    if told.verdict == "faster" or half > CLOSE * course:
        gain, whole = show.times(previous / half), show.times(previous / course)
        return half, f"{gain}, the square root of {{stage}}'s {whole}"
    return CLOSE * course, f"{CLOSE} times what {{stage}} takes"


def render(document: dict) -> list:
    """The times and the verdict."""
    if "broken" in document:
        return [show.heading(f"mended: {document['file']}"), f"it was this: {document['said']}"]
    if document["took"] is None:
        return [f"{document['file']} is right; `lesson check {document['file']}` times it too"]
    took, stage, measure = document["took"], document["stage"], MEASURES[document["measure"]]
    main, limits, before = document["measure"], document["limits"], KEYS[0]
    rows = show.table("", *(MEASURES[measure] for measure in took), f"× on {measure}")
    for key, name in zip(KEYS, (document["previous"], document["file"], stage), strict=True):
        gain = "" if key == before else show.times(took[main][before] / took[main][key])
        rows.add_row(name, *(show.number(of[key]) for of in took.values()), gain)
    rows.add_row("good enough", *map(show.number, limits.values()), show.times(took[main][before] / limits[main]))
    told = document["told_apart"]["verdict"]
    ends = [show.heading(f"pass: {document['file']} is {praise(document)}")]
    if told in ("slower", "no measurable change") and document["course_ratio"] < CLOSE**2:
        why = f"on {measure}, {stage} against {document['previous']}: {told} here, so no time can show what you won"
        ends = [show.heading(f"pass: {document['file']} is right"), why]
    if document["beyond"]:
        ends.append(document["beyond"])
    rule = f"good enough on {measure} is {document['rule']}"
    others = f"; on the others, {LOOSE} times what {stage} takes" if len(took) > 1 else ""
    return [
        "",
        rows,
        show.dim(f"{document['on']}; {rule}{others}"),
        "",
        *ends,
        f"next: lesson diff {document['file']} {stage} · lesson list",
    ]


def praise(document: dict) -> str:
    """'right and fast enough'; or where memory decides, by how much less it takes and what that costs in time."""
    if document["measure"] != "peak_rss_mb":
        return "right and fast enough"
    said = f"right, and small enough: {show.times(document['ratio'])} less memory"
    for measure in ("ttft_ms", "ms_per_token"):
        before, mine, course = (document["took"][measure][key] for key in KEYS)
        if mine > EQUAL * before:
            too = ", as the course's own is" if course > EQUAL * before else ""
            said += f"; slower on {MEASURES[measure]} ({show.number(mine)} against {show.number(before)}){too}"
    return said


def mended(path: Path) -> dict:
    """Whether a file of `lesson break` is right again. -> the JSON document. Raises CheckError where it is not."""
    from common import bugs

    found = bugs.confirm(path)
    if not found.mended:
        raise CheckError("wrong", f"{path} is not mended yet: {found.said}")
    return {"schema": 1, "file": str(path), "broken": found.name, "verdict": "pass", "said": found.said}


def watch(path: Path, once: Callable[[], None]) -> None:
    """Run `once` now and after each save, until interrupted."""
    seen = last = None
    while True:
        now = stamp(path)
        if now and now == last and now != seen:  # an editor may empty the file first, or write it in pieces
            seen = now
            once()
            print("waiting for the next save (Ctrl-C ends) …", file=sys.stderr)
        last = now
        time.sleep(POLL_S)


def stamp(path: Path) -> tuple | None:
    """What a save changes of a file, in place or by another file that takes its name; None while there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def command(file: str | None, flags: dict, quick: bool, watching: bool, as_json: bool, show_it: Callable) -> None:
    """`lesson check`. Raises what check raises; with --watch it says so and waits for the next save."""
    from common import bugs

    path = practice.chosen(file)
    if watching and as_json:
        raise UsageError("--watch and --json: one document is one check, so give one of them")

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    def once() -> None:
        show_it(mended(path) if bugs.about(path) else check(path, flags, not quick, say))

    def forgiving() -> None:
        try:
            once()
        except Exception as error:
            if not hasattr(error, "exit_code"):
                raise
            print(error, flush=True)

    watch(path, forgiving) if watching else once()
