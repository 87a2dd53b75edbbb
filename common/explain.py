"""`lesson explain`: what the compiler made of an op, and which resource it waits for.

The op is compiled anew, since a function from numba's cache has neither assembly nor remarks, with line numbers but
otherwise as the stage runs it: the instructions are the same. `--stress` runs a variant of the op's own source in which
one resource is used twice and the other as before.
"""

import ast
import inspect
import os
import platform
import re
import tempfile
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from common import harness, machine, records, show
from common.gpu import on_gpu
from common.job import Job, UsageError
from common.records import heading
from common.stage import StageError, load_stage, source_path

STRESSES = ("compute", "bytes")

# ---- reading assembly ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Isa:
    """How one architecture's assembly is read. Each pattern is searched in 'mnemonic operands'."""

    label: str
    jump: str  # group 1 is the label
    fused: str  # a multiply-add
    multiply: str
    add: str
    packed: str  # of the above, those on several floats
    memory: str  # an operand in memory
    store: str
    stack: str  # an operand on the stack


X86 = Isa(
    label=r"^(\.L\w+):",
    jump=r"^j\w+\s+(\.L\w+)",
    fused=r"^vfn?m(?:add|sub)\d*[sp][sd]\s",
    multiply=r"^v?mul[sp][sd]\s",
    add=r"^v?(?:add|sub)[sp][sd]\s",
    packed=r"^\w+p[sd]\s",
    memory=r"\(%",
    store=r"^v?mov\w*\s.*\)$",
    stack=r"\(%rsp",
)
ARM = Isa(
    label=r"^(\.L\w+):",
    jump=r"^(?:b\.?\w*|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.L\w+)",
    fused=r"^fn?ml[as]\s|^fn?madd\s",
    multiply=r"^fn?mul\s",
    add=r"^f(?:add|sub)\s",
    packed=r"v\d+\.\d[sd]",
    memory=r"\[",
    store=r"^st",
    stack=r"\[sp",
)


def isa() -> Isa | None:
    """This CPU's assembly, None where it can't be read here."""
    return {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine())


@dataclass
class Loop:
    """An innermost loop: its instructions, each with the source line it came from (0: another file or none)."""

    instructions: list[tuple[str, int]]

    def facts(self, reads: Isa) -> dict:
        """Counts of one trip: instructions, multiply_adds (of single floats), bits of the widest arithmetic, …"""
        texts = [text for text, _ in self.instructions]
        fused, multiplied, added = (
            [t for t in texts if re.search(p, t)] for p in (reads.fused, reads.multiply, reads.add)
        )
        arithmetic = fused + multiplied + added
        packed = [t for t in arithmetic if re.search(reads.packed, t)]
        lanes = {id(ts): sum(floats(t, reads) for t in ts) for ts in (fused, multiplied, added)}
        touching = [t for t in texts if re.search(reads.memory, t) and not re.match(r"lea|nop|prefetch|prfm", t)]
        stores = [t for t in touching if re.search(reads.store, t)]
        return {
            "lines": sorted({line for _, line in self.instructions if line}),
            "instructions": len(texts),
            "multiply_adds": lanes[id(fused)] + min(lanes[id(multiplied)], lanes[id(added)]),
            "packed_multiply_adds": len([t for t in fused if t in packed])
            + min(len([t for t in ts if t in packed]) for ts in (multiplied, added)),
            "vector_bits": max((32 * floats(t, reads) for t in packed), default=32 if arithmetic else 0),
            "loads": len(touching) - len(stores),
            "stores": len(stores),
            "stack": len([t for t in touching if re.search(reads.stack, t)]),
        }


def floats(text: str, reads: Isa) -> int:
    """How many float32 one arithmetic instruction works on."""
    if not re.search(reads.packed, text):
        return 1
    shape = re.search(r"v\d+\.(\d)s", text)
    return int(shape[1]) if shape else 16 if "%zmm" in text else 8 if "%ymm" in text else 4


def instructions_of(assembly: str, file: str, reads: Isa) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """([(instruction, source line or 0)], label -> index of what follows) of an assembly text with .loc lines."""
    listed, labels, own, line = [], {}, set(), 0
    for raw in assembly.splitlines():
        text = re.sub(r"\s+", " ", raw.split("#" if reads is X86 else "//")[0]).strip()
        if match := re.match(r'\.file (\d+) (?:".*" )?"(.*)"', text):
            if Path(match[2]).name == file:
                own.add(match[1])
        elif match := re.match(r"\.loc (\d+) (\d+)", text):
            line = int(match[2]) if match[1] in own else 0
        elif match := re.match(reads.label, text):
            labels[match[1]] = len(listed)
        elif text and not text.startswith(".") and not text.endswith(":"):
            listed.append((text, line))
    return listed, labels


def loops_of(assembly: str, file: str, reads: Isa) -> list[Loop]:
    """The innermost loops of an assembly text, in order."""
    return innermost(*instructions_of(assembly, file, reads), reads.jump)


def innermost(listed: list[tuple[str, int]], labels: dict[str, int], jump: str) -> list[Loop]:
    """The innermost loops: from a jump back to its target, holding no other such stretch. Each header once."""
    ends: dict[str, int] = {}  # a header may have several jumps back to it; the last one ends the loop
    for at, (text, _) in enumerate(listed):
        match = re.match(jump, text)
        if match and labels.get(match[1], len(listed)) <= at:
            ends[match[1]] = at
    spans = {(labels[header], end) for header, end in ends.items()}
    inner = [(s, e) for s, e in spans if not any(s <= a and b <= e for a, b in spans if (a, b) != (s, e))]
    return [Loop(listed[start : end + 1]) for start, end in sorted(inner)]


def hottest(loops: list[Loop], depths: dict[int, int], reads: Isa) -> Loop | None:
    """The loop whose arithmetic comes from the most deeply nested source line; of several the one that does most."""

    def rank(loop: Loop):
        arithmetic = [
            line
            for text, line in loop.instructions
            if any(re.search(p, text) for p in (reads.fused, reads.multiply, reads.add))
        ]
        facts = loop.facts(reads)
        return max((depths.get(line, 0) for line in arithmetic), default=-1), facts["multiply_adds"], len(arithmetic)

    return max(loops, key=rank, default=None)


def nesting(source: str, first: int) -> dict[int, int]:
    """Source line -> how many loops it is in; first is the line at which `source` begins."""
    depths: dict[int, int] = {}

    def walk(node, depth):
        for child in ast.iter_child_nodes(node):
            inner = depth + isinstance(child, ast.For | ast.While)
            if hasattr(child, "lineno"):
                line = child.lineno + first - 1
                depths[line] = max(depths.get(line, 0), inner)
            walk(child, inner)

    walk(ast.parse(textwrap.dedent(source)), 0)
    return depths


# ---- compiling -------------------------------------------------------------------------------------------------

PASSES = {"": "loop-vectorize|slp-vectorizer", "-missed": "loop-vectorize|regalloc", "-analysis": "loop-vectorize"}
COUNTED = re.compile(r"(\d+) ((?:folded )?(?:spills|reloads))")


def fresh(function, **options):
    """The function jitted as the course does, but compiled anew; options are numba's."""
    import numba

    return numba.njit(error_model="numpy", **options)(function)


WITH_LINES = {"debug": True, "boundscheck": False, "_dbg_extend_lifetimes": False}  # the code stays as it was


@contextmanager
def remarks(into: list[str]):
    """Collect what LLVM writes to the C-level stderr meanwhile."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            into += file.read().decode(errors="replace").splitlines()


def ask_for_remarks() -> None:
    """Must come before this process compiles anything."""
    import llvmlite.binding as llvm

    for suffix, passes in PASSES.items():
        llvm.set_option("", f"-pass-remarks{suffix}={passes}")


def by_line(said: list[str], file: str) -> dict[int, list[str]]:
    """Source line -> the remarks on it, each once; of the register allocator only spills and reloads."""
    found: dict[int, list[str]] = {}
    for text in said:
        match = re.match(r"remark: (\S+):(\d+):\d+: (.*)", text)
        if not match or Path(match[1]).name != file:
            continue
        remark = match[3]
        if "generated in" in remark:  # the register allocator
            counts = ", ".join(f"{n} {what}" for n, what in COUNTED.findall(remark))
            if not counts:
                continue
            remark = f"{counts} in this {remark.rsplit(' ', 1)[1]}"
        at = found.setdefault(int(match[2]), [])
        if remark not in at:
            at.append(remark)
    return found


def arguments_of(stage, op: str, request: harness.Request) -> list[list[tuple]]:
    """What a stage's Python gives `op` in a prefill and in the step after it: [[arguments, …], [arguments, …]]."""
    from common.model import open_model

    gguf = open_model(request.model, request.layers)
    model = stage.load(gguf, min(gguf.config.context, len(request.ids) + 2), request.threads)
    space, calls, passes = vars(stage), [], []
    kept = space[op]

    def catch(*inputs):
        calls.append(inputs)
        return kept(*inputs)

    space[op] = catch
    try:
        for _ in stage.generate(model, request.ids, 2, space["argmax"]):
            passes.append(list(calls))
            calls.clear()
    finally:
        space[op] = kept
    return passes


def kernel(stage, name: str, op: str):
    """The op's Python function. Raises StageError where the stage lacks it or numba does not compile it."""
    found = vars(stage).get(op)
    stem = source_path(name).stem
    if not callable(found):
        jitted = [n for n, value in vars(stage).items() if hasattr(value, "py_func")]
        raise StageError(f"{stem} has no op {op!r}: name one of {', '.join(jitted)}")
    if not hasattr(found, "py_func"):
        raise StageError(f"{op} of {stem} is not compiled by numba, so there is nothing of its compiler to show")
    return found.py_func


def signatures(stage, op: str, request: harness.Request) -> list[tuple]:
    """The argument types that an op is compiled for, as its stage calls it: from Python, or inside other ops."""
    import numba

    from common.profile import called

    small = replace(request, layers=1, ids=request.ids[:2])
    if op in called(stage):
        calls = (inputs for one in arguments_of(stage, op, small) for inputs in one)
        return list(dict.fromkeys(tuple(map(numba.typeof, inputs)) for inputs in calls))
    for caller in called(stage):  # compiled anew, it has numba type what it calls
        if hasattr(vars(stage)[caller], "py_func") and op in vars(stage)[caller].py_func.__code__.co_names:
            again = fresh(vars(stage)[caller].py_func)
            for types in signatures(stage, caller, request):
                again.compile(types)
    found = [tuple(types) for types in vars(stage)[op].signatures]
    if not found:
        raise StageError(f"nothing in this stage calls {op}, so the types to compile it for are not known")
    return found


def explain_run(request: harness.Request, op: str, stress: list[str] | None) -> dict:
    """Compile one op anew in this process and read what came out. Raises StageError for what can't be explained."""
    ask_for_remarks()
    stage = load_stage(request.stage)
    function = kernel(stage, request.stage, op)
    if stress:
        return stressed(stage, function, op, request, stress)
    reads = isa()
    if reads is None:
        raise StageError(f"explain reads the assembly of x86-64 and ARM64, not of {platform.machine()}", exit_code=4)
    compiled, said = fresh(function, **WITH_LINES), []
    wanted = signatures(stage, op, request)
    with remarks(said):
        compiled.compile(wanted[-1])
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function)).name
    loops = loops_of(compiled.inspect_asm(compiled.signatures[0]), file, reads)
    best = hottest(loops, nesting("".join(lines), first), reads)
    return {
        "op": op,
        "file": file,
        "first_line": first,
        "source": [line.rstrip("\n") for line in lines],
        "cpu": cpu(),
        "compiled_for": len(wanted),
        "loops": [loop.facts(reads) for loop in loops],
        "hottest": best and best.facts(reads),
        "assembly": best and [list(pair) for pair in best.instructions],
        "remarks": {line: texts for line, texts in by_line(said, file).items() if 0 <= line - first < len(lines)},
    }


def cpu() -> str:
    """The CPU as LLVM names it."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name()


def stressed(stage, function, op: str, request: harness.Request, kinds: list[str]) -> dict:
    """Measure the op under each stress on a real prefill's and a real step's calls."""
    from common.profile import called
    from common.stress import stress_run, variant

    if op != "matmul" or op not in called(stage):
        raise StageError(f"--stress needs an op that multiplies by weights and is called from Python: not {op}")
    variant(function, None)  # before the long part
    prefill, decode = arguments_of(stage, op, request)
    return {"op": op, **stress_run(function, {"prefill": prefill, "decode": decode}, tuple(kinds))}


# ---- the parent's side -----------------------------------------------------------------------------------------


def explain(name: str, op: str, job: Job, stress: str | None = None, save: str | None = None) -> dict:
    """What became of one op, or how it bears a stress ('compute', 'bytes' or 'both'); recorded.

    Raises UsageError, StageError and RunError.
    """
    source_path(name)
    from common import gpu_explain

    kinds = list(STRESSES) if stress == "both" else [stress] if stress else None
    if stress and stress not in (*STRESSES, "both"):
        raise UsageError(f"--stress {stress}: choose compute, bytes or both")
    if on_gpu(name):
        if stress:
            raise UsageError("--stress measures CPU stages: `lesson profile --ncu` tells what binds a kernel")
        return gpu_explain.explain(name, op, job, save)
    folder = records.writable(records.folder(save))
    here = machine.identify()
    found = harness.talk("explain", job.request(name), op=op, stress=kinds)["explain"]
    record = heading(name, job, here) | {"stress": stress} | found
    words = f"{Path(name).stem} {op} {stress or ''} {job.model_name}" + (f" {job.shape}" if stress else "")
    records.save(record, folder / here.slug / "explain" / f"{machine.slug(words)}.json")
    return record


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(record: dict, asm: bool = False) -> list:
    """A record of `explain` for a terminal; asm shows the hottest loop's instructions."""
    if "kernel" in record:
        from common import gpu_explain

        return gpu_explain.render(record, asm)
    if record["stress"]:
        return render_stress(record)
    shown = [show.heading(f"{record['op']} of {record['stage']}, compiled for {record['cpu']}"), ""]
    remarks = {int(line): texts for line, texts in record["remarks"].items()}
    hot = set(record["hottest"]["lines"]) if record["hottest"] else set()
    for line, text in enumerate(record["source"], record["first_line"]):
        shown.append(Text(f"{line:>4} {'>' if line in hot else ' '} {text}"[: show.WIDTH], no_wrap=True))
        for said in remarks.get(line, ()):
            shown += [Text(part, style="cyan") for part in textwrap.wrap(said, show.WIDTH, **BELOW)]
    shown += ["", *loop_table(record)]
    if asm and record["assembly"]:
        shown += ["", *listing(record)]
    return [*shown, show.dim(show.footer(record))]


BELOW = {"initial_indent": " " * 7, "subsequent_indent": " " * 9}


def loop_table(record: dict) -> list:
    """The innermost loops, the hottest first and marked."""
    if not record["loops"]:
        return ["No loop: the code runs straight through, or in a function that it calls."]
    best = record["hottest"]
    rows = show.table("innermost loop", "instr.", "vector", "packed m-a", "m-adds", "loads", "stores", "spills")
    others = [one for one in record["loops"] if one != best and one["vector_bits"]]
    for loop in [best, *others][:MOST_LOOPS]:
        lines = loop["lines"]
        where = f"line {lines[0]}" + (f"-{lines[-1]}" if len(lines) > 1 else "") if lines else "(other code)"
        counts = (loop[k] for k in ("packed_multiply_adds", "multiply_adds", "loads", "stores", "stack"))
        bits = f"{loop['vector_bits']} bit" if loop["vector_bits"] else "–"
        rows.add_row(("> " if loop is best else "  ") + where, str(loop["instructions"]), bits, *map(str, counts))
    told = "> is the hottest: the most deeply nested. Counts are of one trip, unrolled as the compiler left it; spills "
    told += "are loads and stores on the stack; m-adds count single floats."
    left = len(record["loops"]) - min(MOST_LOOPS, 1 + len(others))
    return [rows, show.dim(told + (f" Not shown: {left} others, without float arithmetic or smaller." if left else ""))]


MOST_LOOPS = 6


def listing(record: dict) -> list:
    """The hottest loop, each run of instructions under the source line it came from."""
    source = {i: text.strip() for i, text in enumerate(record["source"], record["first_line"])}
    shown, last = [], None
    for text, line in record["assembly"]:
        if line != last and line in source:
            shown.append(Text(f"{line:>4}   {source[line]}"[: show.WIDTH], style="cyan", no_wrap=True))
        last = line if line in source else last
        name, _, operands = text.partition(" ")
        shown.append(Text(f"         {name:<14}{operands}", no_wrap=True))
    return shown


def render_stress(record: dict) -> list:
    """What each stress cost, and so which resource binds."""
    shown = []
    for kind, lines in record["changed"].items():
        shown += [show.heading(f"{record['op']} of {record['stage']}, {MEANING[kind]}")]
        shown += [Text(line[: show.WIDTH], style="green" if line[0] == "+" else "red", no_wrap=True) for line in lines]
        shown.append("")
    rows = show.table("pass (tokens)", "weights MB", "plain ms", "stress", "ms", "cost", "99 % of it")
    for one in record["passes"]:
        first = [f"{one['pass']} ({one['tokens']})", show.number(one["weight_mb"]), show.number(one["plain_ms"])]
        for kind, found in one["stressed"].items():
            within = f"{found['low']:+.0%} to {found['high']:+.0%}" if found["low"] is not None else "–"
            rows.add_row(*first, kind, show.number(found["ms"]), f"{found['cost']:+.0%}", within)
            first = [""] * 3
    told = [
        f"The first {one['calls']} of {one['of']} calls of the {one['pass']}."
        for one in record["passes"]
        if one["calls"] < one["of"]
    ]
    if any("loads" in one["stressed"] for one in record["passes"]):
        told.append("loads is bytes aimed at the weights themselves: the same instructions, nothing more to fetch.")
    if any(f["high"] is not None and f["high"] < -FREE for one in record["passes"] for f in one["stressed"].values()):
        told.append(
            "A cost below zero: the compiler laid that variant's loop out otherwise, and so it runs faster although it "
            "does more; what it has to say of the plain kernel is a lower bound."
        )
    return [*shown, rows, "", *map(show.dim, told), *map(binds, record["passes"]), show.dim(show.footer(record))]


MEANING = {"compute": "every multiply-add done twice", "bytes": "every weight loaded from a second array too"}
LIMITS = {
    "compute": "twice the arithmetic",
    "loads": "twice the load instructions",
    "fetch": "fetching twice the bytes",
}
BINDS = 0.5  # a doubling that costs this much or more: the resource is busy most of the time
FREE = 0.1


def binds(one: dict) -> str:
    """One sentence: which limit a pass runs into, as far as the stresses tell."""
    found = one["stressed"]
    if any(f["low"] is not None and f["low"] < FREE and f["high"] > BINDS for f in found.values()):
        return f"{one['pass']}: too noisy to tell; quiet the machine and run it again."
    costs = {kind: f["cost"] if f["costs"] else 0.0 for kind, f in found.items()}
    if "bytes" in costs:
        costs["fetch"] = max(0.0, costs.pop("bytes") - costs["loads"])
    limit = max(costs, key=costs.get)
    rest = ", ".join(f"{LIMITS[kind]} {cost:.0%}" for kind, cost in costs.items() if kind != limit)
    told = f"{one['pass']}: {LIMITS[limit]} costs {costs[limit]:.0%}" + (f" ({rest})" if rest else "")
    if costs[limit] >= BINDS:
        return f"{told}, so that is what binds."
    if costs[limit] >= FREE:
        waits = len(costs) == len(LIMITS) and sum(costs.values()) < BINDS
        return f"{told}: it binds in part" + ("; mostly each instruction waits for earlier ones." if waits else ".")
    waits = "each instruction waits for earlier ones" if len(costs) == len(LIMITS) else "that is not what binds"
    return f"{told}, next to nothing: {waits}."
