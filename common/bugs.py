"""`lesson break`: real bugs, planted in a copy for the reader to find by what the tool says of it.

Each bug is a few edits of one of the course's own files, and belongs to a bench, which tells right from wrong without
a look at how it was mended: the correctness gate for a stage, a clock that the bench alone moves for code that times,
a GPU that runs behind its host's back for the code that waits, and so on. What a bench says of the broken copy is the
symptom that the reader sees first.
"""

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from common import diff, show
from common.job import UsageError, prepare

ROOT = Path(__file__).parent.parent
FOLDER = "practice"  # below the folder the reader is in; git ignores it
LONGEST_S = 300  # a bench that takes longer has met an endless loop
STALE = "the course's own text has changed under the bug"


class Bug(NamedTuple):
    """A bug: where it is, what it looks like from outside, and what it is."""

    name: str
    file: str  # of the course, as a path from its root
    bench: str  # a key of BENCHES
    symptom: str
    cause: str
    edits: tuple[tuple[str, str], ...]  # (old, new), each old found once
    parts: tuple[str, ...] = ()  # the definitions of the file that the copy holds; all of it if empty


class Verdict(NamedTuple):
    """What `lesson check` says of a file that `lesson break` wrote."""

    name: str
    mended: bool
    said: str  # one sentence: what is still seen, or what it was


FALLBACK = """    return out


lanes = matmul


def matmul(x, w):  # what the vector kernel can't take, the loops can
    try:
        return lanes(x, w, TILE)
    except TypeError:
        return loops(x, w)
"""

BUGS = {bug.name: bug for bug in (
    Bug(
        "forgetful", "stages/kv_cache.py", "stage",
        "forward is right at every position of a prompt, and generate is wrong from its first token on",
        "generate took the first token for read already: row 0 of the cache was never written, and all tokens looked "
        "back at a key of zeros",
        (("start, new = 0, list(ids)", "start, new = 1, list(ids[1:])"),),
    ),
    Bug(
        "stuttering", "stages/kv_cache.py", "stage",
        "the first new token is right, and the longer the answer, the less it knows of itself",
        "start grew by one too few, so each new token was written over the row of the one before it",
        (("start, new = start + len(new), [choose(row)]", "start, new = start + len(new) - 1, [choose(row)]"),),
    ),
    Bug(
        "dizzy", "stages/kv_cache.py", "stage",
        "every op is right on the inputs it gets, and the sum after the first attention is wrong",
        "keys were turned for the position end - 1 instead of start: RoPE only feels how far a key stands from its "
        "query, so a shift of both would have done nothing, and one of keys alone put every token in the wrong place",
        (("keys[start:end] = rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, start)",
          "keys[start:end] = rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, end - 1)"),),
    ),
    Bug(
        "crossed", "stages/simd.py", "stage",
        "right on a model with as many key heads as query heads, wrong where query heads share them",
        "the stride over key heads was wrong: h % G deals query heads out in turn, but those that share a key head lie "
        "side by side, H // G of them",
        (("g = h // (H // G)", "g = h % G"),),
    ),
    Bug(
        "clairvoyant", "stages/tiling.py", "stage",
        "attention differs from the reference at every token but the last",
        "the causal mask was off by one: each token saw the one after it, which it is there to predict; a prompt's "
        "perplexity would have been too good to be true",
        (("S = start + t + 1  # a token sees itself and all before it", "S = min(start + t + 2, k.shape[0])"),),
    ),
    Bug(
        "grainy", "stages/integer.py", "stage",
        "matmul is far outside what rounding to 8 bits explains, yet its sums have about the right size",
        "the scale came from the wrong sub-block: d holds one for each GROUP of 16 weights, and was indexed by STEP",
        (("load_spread(d, k // GROUP, 4)", "load_spread(d, k // STEP, 4)"),),
    ),
    Bug(
        "twin", "stages/simd.py", "stage",
        "every id is right, and it is not a bit faster than the stage before it",
        "a fallback hid an error: the vector kernel was called with an argument too many, the TypeError was caught, "
        "and tiling's loops did all the work",
        (("import Model\n", "import Model\nfrom stages.tiling import matmul as loops\n"),
         ("                out[t, n] += x[t, k] * w[k, n]\n    return out\n",
          "                out[t, n] += x[t, k] * w[k, n]\n" + FALLBACK)),
    ),
    Bug(
        "sluggish", "common/harness.py", "clock",
        "the first token takes seconds, each one after it milliseconds, whatever the stage",
        "the run warmed up on one id, so the code for several rows at once was first compiled inside TTFT; that is why "
        "WARM_IDS is 2",
        (("WARM_IDS = 2  # enough for every array kind: a prompt of more than one row, and a step after it",
          "WARM_IDS = 1  # enough to touch every op once"),),
        ("WARM_IDS", "SHORT_S", "Sample", "measure", "compile_all", "warm_up", "choosing", "faults", "since"),
    ),
    Bug(
        "thrifty", "common/harness.py", "clock",
        "ms/token falls when fewer tokens are asked for, and is never quite what a stopwatch says",
        "tokens were miscounted: n tokens have n - 1 gaps between them, and the time of the gaps was shared among n",
        (("return sum(gaps) / len(gaps) if gaps else None", "return sum(gaps) / (len(gaps) + 1) if gaps else None"),),
        ("WARM_IDS", "SHORT_S", "Sample", "measure", "compile_all", "warm_up", "choosing", "faults", "since"),
    ),
    Bug(
        "hasty", "common/kernel_gpu.py", "gpu clock",
        "every kernel takes 9 µs, whatever its size: large ones run at hundreds of times the card's peak",
        "nobody waited for the GPU: a launch only queues the kernel, and the clock was read while it still ran",
        (("    start, stop = cupy.cuda.Event(), cupy.cuda.Event()\n", ""),
         ("    start.record()\n", "    started = time.perf_counter()\n"),
         ("    stop.record()\n    stop.synchronize()\n    return cupy.cuda.get_elapsed_time(start, stop)",
          "    return (time.perf_counter() - started) * 1e3"),
         ("of one call between two events, L2", "of one call, L2"),
         ("import subprocess\n", "import subprocess\nimport time\n")),
        ("FLUSH", "_flush_buffer", "once"),
    ),
    Bug(
        "generous", "common/kernel_ladder.py", "rates",
        "a kernel and the library take equally long, and the table gives the kernel twice the TFLOP/s",
        "FLOPs were counted for one side only: 4 m n k for the kernel, 2 m n k for the baseline it was held against",
        (("tflops = rungs.flops(*shape) / ms[\"median\"] / 1e9",
          "tflops = rungs.flops(*shape) * (1 if name in others else 2) / ms[\"median\"] / 1e9"),),
        ("OVERHEAD", "timed", "share_of_peak"),
    ),
    Bug(
        "agreeable", "stages/gemm_cpu/__init__.py", "inputs",
        "a kernel that reads its matrix upside down passes the check",
        "the check multiplied all ones: whichever element a kernel takes, it is the right one",
        (("    import numpy\n\n    m, n, k = shape\n    draw = numpy.random.default_rng(seed).standard_normal\n"
          "    return draw((m, k), dtype), draw((k, n), dtype)",
          "    import numpy\n\n    m, n, k = shape\n    return numpy.ones((m, k), dtype), numpy.ones((k, n), dtype)"),
         ("Random x (M, K) and w (K, N), standard normal.", "x (M, K) and w (K, N).")),
    ),
    Bug(
        "coarse", "stages/gemm/__init__.py", "baseline",
        "the FP32 baseline is many times faster than the card's FP32 peak, and its errors are hundreds of times larger",
        "TF32 was left on: the library rounded both operands to 10 bits and went to the tensor cores, though FP32 was "
        "asked for",
        (("torch.backends.cuda.matmul.allow_tf32 = False", "torch.backends.cuda.matmul.allow_tf32 = True"),
         ("cuBLAS as PyTorch calls it, TF32 off.", "cuBLAS as PyTorch calls it.")),
    ),
    Bug(
        "flaky", "stages/gemm/tiled.py", "barriers",
        "right in most runs; a few outputs differ from one run to the next",
        "a race in shared memory: without the second barrier, a fast thread loads the next tile while a slow one still "
        "multiplies the last",
        (("* w_tile[k][threadIdx.x];\n        __syncthreads();\n", "* w_tile[k][threadIdx.x];\n"),),
    ),
)}  # fmt: skip


# ---- planting --------------------------------------------------------------------------------------------------


def bug(name: str) -> Bug:
    """Raises UsageError for a name that is none."""
    if name not in BUGS:
        from difflib import get_close_matches

        near = get_close_matches(name, BUGS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUGS)}"
        raise UsageError(f"no bug is called {name!r}: {hint}")
    return BUGS[name]


def original(bug: Bug) -> str:
    """The text that the bug is planted in: the course's file, or the parts of it that the bug is about."""
    path = ROOT / bug.file
    source = path.read_text("utf-8")
    if not bug.parts:
        return source
    lines = source.splitlines()
    found, tree = diff.definitions(source), ast.parse(source)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    others = sorted({name for part in bug.parts for name in found[part].uses & modules} - set(bug.parts))
    head = [f'"""{ast.get_docstring(tree).splitlines()[0]}"""', ""]
    head += [line for node in imports for line in lines[node.lineno - 1 : node.end_lineno]]
    if others:
        head.append(f"from {'.'.join(Path(bug.file).with_suffix('').parts)} import {', '.join(others)}")
    return "\n".join([*head, "", *("\n" + found[part].text + "\n" for part in bug.parts)])


def planted(bug: Bug) -> str:
    """The original with the bug in it."""
    text = original(bug)
    for old, new in bug.edits:
        assert text.count(old) == 1, f"{bug.name}: {STALE}: {old!r}"
        text = text.replace(old, new)
    return text


def exercise(bug: Bug) -> str:
    """What the reader gets: the broken text under a docstring that tells what to do."""
    text = planted(bug)
    node = ast.parse(text).body[0]
    head = f'''"""Broken: something in this copy of {bug.file} is wrong.

Seen    {bug.symptom[0].upper()}{bug.symptom[1:]}.
Yours   Find it and mend it in this file; then: lesson check {place(bug)}
Else    lesson break {bug.name} --reveal shows what was changed, and why it looked as it did.
"""

BROKEN = "{bug.name}"'''
    return "\n".join([head, *text.splitlines()[node.end_lineno :]]) + "\n"


def place(bug: Bug) -> Path:
    return Path(FOLDER) / f"broken_{bug.name}.py"


def plant(name: str, force: bool = False) -> dict:
    """Write practice/broken_NAME.py and run the bench on it. -> the JSON document. Raises UsageError."""
    chosen = bug(name)
    path = place(chosen)
    if path.exists() and not force:
        raise UsageError(f"{path} is there already, and what you changed in it would be lost: --force begins anew")
    try:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(exercise(chosen), "utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} can't be written ({error.strerror}): go to a folder of your own") from error
    said = examine(path, chosen)
    return {"schema": 1, "name": name, "file": str(path), "of": chosen.file, "symptom": chosen.symptom, "said": said}


def reveal(name: str) -> dict:
    """What was changed, and why it looks as it does. -> the JSON document."""
    chosen = bug(name)
    import difflib

    old, new = (text.splitlines() for text in (original(chosen), planted(chosen)))
    lines = [line for line in list(difflib.unified_diff(old, new, lineterm=""))[2:] if not line.startswith("@@")]
    return {"schema": 1, "name": name, "of": chosen.file, "cause": chosen.cause, "diff": lines}


def listing() -> dict:
    """Every bug by its symptom. -> the JSON document."""
    shown = [{"name": b.name, "of": b.file, "symptom": b.symptom} for b in BUGS.values()]
    return {"schema": 1, "bugs": shown}


# ---- checking --------------------------------------------------------------------------------------------------


def about(path: Path) -> str | None:
    """The bug that a file was written for, read and not run; None for any other file."""
    try:
        return diff.constant(path, "BROKEN")
    except (SyntaxError, ValueError, OSError):
        return None


def confirm(path: str | Path) -> Verdict:
    """Whether the bug is gone from a file that `lesson break` wrote. Raises UsageError for any other file."""
    path = Path(path)
    name = about(path)
    if name is None:
        raise UsageError(f"{path} has no line BROKEN = …: `lesson break` writes a file to begin with")
    chosen = bug(name)
    said = examine(path, chosen)
    if said is None:
        return Verdict(name, True, chosen.cause)
    return Verdict(name, False, said)


def examine(path: Path, bug: Bug) -> str | None:
    """What the bug's bench says of a file, in one sentence; None where nothing is wrong."""
    if bug.bench == "stage" and (said := gated(path)):
        return said
    command = [sys.executable, "-m", "common.bugs", str(path.resolve()), bug.bench]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env["LESSON_READER"] = path.stem
    try:
        done = subprocess.run(command, capture_output=True, env=env, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"{path.name} was still running after {LONGEST_S} s"
    try:
        return json.loads(done.stdout.splitlines()[-1])["said"]
    except (IndexError, ValueError):
        lines = done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")
        return f"{path.name} ended early ({last})"


def gated(path: Path) -> str | None:
    """The correctness gate on a stage file, on ids drawn anew."""
    import tempfile

    from common import harness
    from common.run import WrongError, check

    draw = random.Random()
    ids = ",".join(str(draw.randrange(512)) for _ in range(11))
    job = prepare("tiny", ids=ids, n=6, context=32)
    with tempfile.TemporaryDirectory() as scratch:
        rows = str(Path(scratch) / "rows.npy")
        try:
            check(str(path), job, harness.run(job.request(str(path), rows_file=rows)), rows)
        except (WrongError, harness.RunError) as error:
            return str(error)
    return None


# ---- the benches, each in a process of its own -------------------------------------------------------------------


def whose(path: Path) -> str | None:
    """Whether another stage of the course did a stage's work."""
    from common.model import open_model
    from common.sources import resolve
    from common.stage import load_stage

    stage = load_stage(str(path))
    model = stage.load(open_model(resolve("tiny")), 32, 1)
    for _ in stage.generate(model, [1, 17, 300], 2):
        pass
    others = sorted(name for name in sys.modules if name.startswith("stages."))
    if others:
        return f"{path.name} gives the right ids, but code of {', '.join(others)} is in use and does its work"
    return None


MS, FIRST_MS, NEXT_MS, COMPILE_MS = 1e-3, 100.0, 20.0, 5000.0


class Clock:
    """A perf_counter that stands still until it is told."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, ms: float) -> None:
        self.now += ms * MS


def clock(module: ModuleType) -> str | None:
    """`measure` on a stage whose times are known: it compiles once for a prompt of several rows and once for a step."""
    from common.harness import Request
    from common.sources import resolve

    now, kinds = Clock(), set()

    def generate(model, ids, n, choose=None):
        for i in range(n):
            kind = "rows" if i == 0 and len(ids) > 1 else "row"
            if kind not in kinds:
                kinds.add(kind)
                now.take(COMPILE_MS)
            now.take(NEXT_MS if i else FIRST_MS)
            yield i, [0.0]

    stage = SimpleNamespace(load=lambda gguf, context, threads: gguf, generate=generate)
    module.time, module.load_stage = now, lambda name: stage
    request = Request("known", str(resolve("tiny")), list(range(40)), 5)
    sample = module.measure(request)
    saw = (sample.ttft_ms, sample.ms_per_token(), sample.ms_per_token(3))
    if all(abs(got / true - 1) < 0.01 for got, true in zip(saw, (FIRST_MS, NEXT_MS, NEXT_MS), strict=True)):
        return None
    return (
        f"a stage that takes {FIRST_MS:.0f} ms to its first token and {NEXT_MS:.0f} ms for each one after it was timed "
        f"at {saw[0]:,.0f} ms and {saw[1]:.1f} ms a token over {len(sample.output_ids)} tokens, {saw[2]:.1f} ms over 3"
    )


def known_rungs(flops: int):
    """A kernel ladder of one rung and one baseline whose work is known."""
    return SimpleNamespace(
        __name__="known", BASELINES={"library": None}, BOUNDS={}, flops=lambda *_: flops, traffic=lambda *_: 1
    )


class Device:
    """A GPU as its host sees it: a launch returns after 9 µs, and the work is done when the queue comes to it."""

    LAUNCH_MS, KERNEL_MS, FILL_MS = 0.009, 3.0, 0.1

    def __init__(self):
        self.host, self.free = Clock(), 1000.0  # free: when the queue has run dry

    def launch(self, ms: float) -> None:
        self.host.take(self.LAUNCH_MS)
        self.free = max(self.free, self.host.now) + ms * MS

    def wait(self, *_) -> None:
        self.host.now = max(self.host.now, self.free)

    def cupy(self) -> ModuleType:
        """The module, as far as timing needs it."""
        device, made = self, ModuleType("cupy")

        class Event:
            def record(self, *_):
                self.at = max(device.free, device.host.now)

            def synchronize(self):
                device.host.now = max(device.host.now, self.at)

        waiter = SimpleNamespace(synchronize=device.wait)
        made.empty = lambda *_, **__: SimpleNamespace(fill=lambda value: device.launch(device.FILL_MS))
        made.cuda = SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda start, stop: (stop.at - start.at) / MS,
            Device=lambda *_: waiter,
            get_current_stream=lambda *_: waiter,
            Stream=SimpleNamespace(null=waiter),
            runtime=SimpleNamespace(deviceSynchronize=device.wait),
        )
        return made


def gpu_clock(module: ModuleType) -> str | None:
    """`once` on a kernel that keeps a GPU busy for 3 ms at 90 % of its peak; the ladder's table judges the rate."""
    from common import kernel_ladder as kl

    device = Device()
    sys.modules["cupy"], module.time = device.cupy(), device.host
    times = [module.once(lambda: device.launch(device.KERNEL_MS)) for _ in range(3)]
    rungs = known_rungs(flops := 10**10)
    roof = {"float32": flops / device.KERNEL_MS / 1e9 / 0.9}
    row = {"stage": "kernel", "shape": (1, 1, 1), "dtype": "float32"}
    told = f"a kernel that keeps the GPU busy for {device.KERNEL_MS:.0f} ms was timed at {times[-1]:.3f} ms"
    try:
        kl.timed(rungs, {"kernel": row}, {"kernel": times}, roof, 0.005)
    except kl.roofline.AccountingError as error:
        return f"{told}: {error}"
    return None if abs(times[-1] / device.KERNEL_MS - 1) < 0.05 else told


def rates(module: ModuleType) -> str | None:
    """`timed` on a kernel and a library that do the same work in the same time, at 80 % of the peak."""
    from common import kernel_ladder as kl

    rungs, ms = known_rungs(flops := 10**10), 2.0
    roof = {"float32": flops / ms / 1e9 / 0.8}
    names = ("kernel", "library")
    rows = {name: {"stage": name, "shape": (1, 1, 1), "dtype": "float32"} for name in names}
    try:
        done = module.timed(rungs, rows, {name: [ms] * 3 for name in names}, roof, 0.005)
    except kl.roofline.AccountingError as error:
        return str(error)
    saw = {row["stage"]: row["tflops"] for row in done}
    if all(abs(rate / (flops / ms / 1e9) - 1) < 0.01 for rate in saw.values()):
        return None
    both = ", ".join(f"{name} {rate:.1f} TFLOP/s" for name, rate in saw.items())
    return f"10 GFLOP in {ms:.0f} ms are {flops / ms / 1e9:.1f} TFLOP/s, whoever does them; the table says {both}"


def inputs(module: ModuleType) -> str | None:
    """The ladder's check of a right kernel and of wrong ones, on the inputs it makes."""
    from common import kernel_ladder as kl

    kernels = {
        "multiplies as it should": lambda x, w: x @ w,
        "reads its matrix transposed": lambda x, w: x @ w.T,
        "reads its matrix upside down": lambda x, w: x @ w[::-1],
        "reads the first row for every row": lambda x, w: x[:1].repeat(len(x), axis=0) @ w,
        "leaves out the last of the sum": lambda x, w: x[:, :-1] @ w[:-1],
    }
    for i, (what, kernel) in enumerate(kernels.items()):
        x, w = module.inputs((65, 65, 65), "float32", i)
        out = kernel(x, w).astype("float32")
        passed = kl.verdict(out, *module.oracle(x, w), **module.TOLERANCE["float32"])["right"]
        if passed != (i == 0):
            return f"a kernel that {what} {'passes' if passed else 'does not pass'} this check"
    return None


def tf32(x):
    """float32 rounded to the 10 bits of fraction that a tensor core takes."""
    import numpy

    bits = numpy.ascontiguousarray(x, numpy.float32).view(numpy.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(numpy.float32)


def baseline(module: ModuleType) -> str | None:
    """The library's baselines against float64, through a PyTorch that has no GPU but keeps the promise of its flags."""
    import numpy

    from common import kernel_ladder as kl

    flags = SimpleNamespace(allow_tf32=False, allow_fp16_reduced_precision_reduction=True)

    class Tensor:
        def __init__(self, array):
            self.array = array

        def __matmul__(self, other):
            rounded = tf32 if flags.allow_tf32 else numpy.asarray
            return Tensor((rounded(self.array) @ rounded(other.array)).astype("float32"))

    torch, cupy = ModuleType("torch"), ModuleType("cupy")
    torch.from_dlpack = Tensor
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=flags))
    torch.set_float32_matmul_precision = lambda word: setattr(flags, "allow_tf32", word != "highest")
    cupy.from_dlpack, cupy.abs = (lambda tensor: tensor.array), numpy.abs
    sys.modules |= {"torch": torch, "cupy": cupy}
    draw = numpy.random.default_rng().standard_normal
    x, w = draw((64, 300), "float32"), draw((300, 48), "float32")
    for name, call in module.BASELINES.items():
        found = kl.verdict(call(x, w), *module.oracle(x, w), **module.TOLERANCE["float32"])
        if not found["right"]:
            return (
                f"the baseline {name} is wrong by FP32's measure, so it gets no time: the largest error is "
                f"{found['max_abs']:.1e}, {found['allowance']:,.0f} times what rounding explains"
            )
    return None


def barriers(module: ModuleType, path: Path) -> str | None:
    """A CUDA kernel's shared memory: read from its source, and where there is a GPU, run many times."""
    from common import kernel_gpu
    from common import kernel_ladder as kl

    if unguarded := races(module.SOURCE):
        return f"{path.name} is right in most runs and not in all: {unguarded[0]}"
    if kernel_gpu.missing():
        return None
    from stages import gemm

    for seed in range(20):
        found = kl.check(gemm, str(path), (1000, 1000, 1000), "float32", seed)
        if not found["right"]:
            return f"{path.name} is wrong in run {seed + 1}: the largest error is {found['max_abs']:.1e}"
    return None


def races(source: str) -> list[str]:
    """What two threads may do to one shared array in a loop with no barrier in between, a sentence each.

    A loop's body is walked twice, so that its end meets its beginning. Reads and writes are told apart by what stands
    behind the subscripts; a write that every thread makes to its own element and reads itself is taken for a race too.
    """
    body = re.sub(r"//[^\n]*", "", source)
    arrays = [name for line in re.findall(r"__shared__[^;]*;", body) for name in re.findall(r"(\w+)\s*\[", line)]
    if not arrays:
        return []
    subscripts = r"((?:\s*\[[^][]*(?:\[[^][]*\][^][]*)*\])+)"
    event = re.compile(rf"__syncthreads\s*\(\s*\)|\b({'|'.join(arrays)})\b{subscripts}\s*([-+*|&^]?=(?!=))?")
    found = []
    for loop in loops(re.sub(r"__shared__[^;]*;", "", body)):
        since: dict[str, set[str]] = {}  # array: what happened to it since the last barrier
        for match in [*event.finditer(loop)] * 2:
            if match[1] is None:
                since.clear()
                continue
            what = "written" if match[3] else "read"
            before = since.setdefault(match[1], set()) - {what}
            if before:
                told = f"{match[1]} is {what} with no barrier since it was {before.pop()}"
                found += [told] * (told not in found)
            since[match[1]].add(what)
    return found


def loops(source: str) -> list[str]:
    """The bodies in braces of the outermost for and while loops."""
    bodies, at = [], 0
    for match in re.finditer(r"\b(?:for|while)\s*\([^{}]*?\)\s*\{", source):
        if match.start() < at:
            continue
        depth, at = 1, match.end()
        while depth and at < len(source):
            depth += {"{": 1, "}": -1}.get(source[at], 0)
            at += 1
        bodies.append(source[match.end() : at - 1])
    return bodies


BENCHES: dict[str, Callable] = {
    "stage": lambda module, path: whose(path),
    "clock": lambda module, path: clock(module),
    "gpu clock": lambda module, path: gpu_clock(module),
    "rates": lambda module, path: rates(module),
    "inputs": lambda module, path: inputs(module),
    "baseline": lambda module, path: baseline(module),
    "barriers": barriers,
}


def main(path: str, bench: str) -> None:
    """Print {"said"} of one bench; what the reader's file raises is said, too."""
    from common.stage import import_file, where

    file = Path(path)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the file prints must not look like an answer
    try:
        said = BENCHES[bench](None if bench == "stage" else import_file(file), file)
    except Exception as error:  # a reader's file may raise anything
        said = f"{file.name}: {where(error, file)}{type(error).__name__}: {' '.join(str(error).split())}"
    answers.write(json.dumps({"said": said}) + "\n")
    answers.flush()


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(document: dict) -> list:
    """The list, a planted bug, or a revealed one."""
    if "bugs" in document:
        rows = show.table("bug", "seen")
        rows.columns[1].justify, rows.columns[1].no_wrap = "left", False
        for found in document["bugs"]:
            rows.add_row(found["name"], found["symptom"])
        return [rows, "", "next: lesson break NAME plants one in a copy, and shows what the tool says of it"]
    if "cause" in document:
        return [*(show.line_diff(line) for line in document["diff"]), "", f"{document['of']}: {document['cause']}."]
    return [
        show.heading(f"{document['file']}: {document['of']}, with a bug in it"),
        f"Seen: {document['said']}",
        "",
        f"Mend it there, then: lesson check {document['file']}",
        f"Else: lesson break {document['name']} --reveal",
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
