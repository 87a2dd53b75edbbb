"""`lesson explain` of a GPU stage's op: what NVRTC made of its kernel. No GPU is needed, and no driver.

SASS, the instructions that run, is read where nvdisasm is installed (the CUDA toolkit has it, and the triton package);
PTX, the compiler's step before, anywhere. Both name the source line that each instruction came from.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from rich.text import Text

from common import cuda, diff, gpu, gpu_machine, machine, records, show
from common.explain import Loop, innermost
from common.job import Job
from common.stage import StageError, fused, load_stage, short

# What an instruction is for, by its first letters: (SASS, PTX), the first that fits.
CLASSES = {
    "tensor cores": (r"[HIQD]G?MMA", r"mma|wgmma"),
    "spilled to memory": (r"LDL|STL", r"(ld|st)\.local"),
    "global loads": (r"LDG|LD\b|LD\.", r"ld\.(global|u|v|s|f|b)"),
    "global stores": (r"STG|ST\b|ST\.|RED|ATOM", r"(st|red|atom)\.(global|u|v|s|f|b)"),
    "shared memory": (r"LDS|STS|LDGSTS|ATOMS", r"(ld|st|ldmatrix|stmatrix|cp\.async).*shared|ldmatrix"),
    "float arithmetic": (r"[FHD](FMA|MUL|ADD|MNMX|SEL)", r"(fma|mul|add|sub|max|min|div|neg)\.(\w+\.)*f"),
    "conversions": (r"[IFU]2[IFU]|HADD2\.F32", r"cvt\.(\w+\.)*(f\d|u\d+\.f|s\d+\.f)"),
    "special functions": (r"MUFU", r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos)\."),
    "shuffles": (r"SHFL|REDUX", r"shfl|redux"),
    "barriers": (r"BAR|SYNCS|DEPBAR|MEMBAR|FENCE", r"bar|membar|fence|mbarrier"),
    "branches": (r"BRA|BRX|JMP|BSSY|BSYNC|EXIT|RET|CALL|WARPSYNC|BREAK", r"bra|brx|ret|call|exit"),
}  # fmt: skip
REST = "integers and moves"
REGISTERS = 65536  # of a processor, on every GPU from sm_50 on
STEP = 8  # registers a thread are given out so many at a time
SHOWN = 40  # instructions of the hottest loop, unless all are asked for


def explain(name: str, op: str, job: Job, save: str | None = None) -> dict:
    """Compile an op's kernel and read what came out; recorded. Raises StageError and CUDAError."""
    stage = load_stage(name)
    folder = records.writable(records.folder(save))
    here = gpu_machine.identify() if gpu.missing() is None else machine.identify()
    record = records.heading(name, job, here) | {"stress": None} | compiled(stage, name, op, arch(stage))
    words = f"{Path(name).stem} {op} {record['arch']}"
    records.save(record, folder / here.slug / "explain" / f"{machine.slug(words)}.json")
    return record


def arch(stage) -> str:
    """What to compile for: the GPU that is here, else the newest that the stage names."""
    if gpu.missing() is not None:
        return stage.ARCHS[-1]
    (option,) = cuda.arch_option(stage.ARCHS, cuda.capability(0)) or (f"-arch=sm_{cuda.capability(0)}",)
    return option.removeprefix("-arch=")


def kernel_of(stage, name: str, op: str) -> str:
    """The kernel that does an op. Raises StageError with the names there are."""
    functions = re.findall(r"__global__\s+void\s+(\w+)\(", re.sub(r"__launch_bounds__\([^()]*\)", "", stage.SOURCE))
    wanted = fused(stage).get(op, op)
    if wanted not in functions:
        raise StageError(f"{short(name)} has no kernel {op!r}: name one of {', '.join(functions)}")
    return wanted


def compiled(stage, name: str, op: str, target: str) -> dict:
    """Resources, instructions by class and by source function, and the hottest loop of an op's kernel."""
    kernel = kernel_of(stage, name, op)
    made = cuda.compile(stage.SOURCE, (*getattr(stage, "OPTIONS", ()), "-lineinfo"), target)
    tool = disassembler()
    text = disassembled(tool, made.cubin, kernel) if tool else entry(made.ptx, kernel)
    listed, labels = instructions(text, sass=bool(tool))
    functions = diff.cuda_functions(stage.SOURCE)
    loops = innermost(listed, labels, SASS_JUMP if tool else PTX_JUMP)
    best = max(loops, key=lambda loop: heat(loop, bool(tool)), default=None)
    threads = re.search(r"\.maxntid (\d+)", entry(made.ptx, kernel))
    return {
        "op": op,
        "kernel": kernel,
        "arch": target,
        "language": "SASS" if tool else "PTX",
        **made.kernels[kernel]._asdict(),
        "threads": threads and int(threads[1]),
        "instructions": len(listed),
        "classes": classes([t for t, _ in listed], bool(tool)),
        "functions": by_function([line for _, line in listed], functions),
        "widths": widths([t for t, _ in listed]),
        "source": functions[kernel][0].splitlines(),
        "first_line": functions[kernel][1] + 1,
        "lines": dict(Counter(line for _, line in listed)),
        "loop": best and {"instructions": [list(pair) for pair in best.instructions],
                          "classes": classes([t for t, _ in best.instructions], bool(tool))},
        "text": {line: text for line, text in enumerate(stage.SOURCE.splitlines(), 1) if best and line in
                 {at for _, at in best.instructions}},
    }  # fmt: skip


def disassembler() -> str | None:
    """nvdisasm on the PATH, in the CUDA toolkit's usual place, or in the triton package."""
    places = [Path("/usr/local/cuda/bin/nvdisasm")]
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations if spec else []:
        places.append(Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm")
    return shutil.which("nvdisasm") or next((str(place) for place in places if place.exists()), None)


def disassembled(tool: str, cubin: bytes, kernel: str) -> str:
    """One kernel's SASS with line numbers. Raises StageError where nvdisasm is too old for the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", "-g", file.name], capture_output=True, text=True)
    found = re.search(rf"^\.text\.{kernel}:\n(.*?)(?=^//-----|\Z)", done.stdout, re.S | re.M)
    if not found:
        said = (done.stderr.strip().splitlines() or ["no kernel"])[-1]
        raise StageError(f"{tool} can't read the kernel ({said}): install one as new as the compiler", gpu.NEEDS_GPU)
    return found[1]


def entry(ptx: str, kernel: str) -> str:
    """One kernel's PTX."""
    return re.search(rf"\.entry {kernel}\(.*?^}}", ptx, re.S | re.M)[0]


SASS_JUMP = r"^(?:@!?U?P\d+ )?BRA.*`\((\.L\w+)\)"
PTX_JUMP = r"^(?:@!?%p\d+ )?bra(?:\.uni)?\s+(\$\w+)"


def instructions(text: str, sass: bool) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """([(instruction, source line or 0)], label -> index of what follows)."""
    listed, labels, line = [], {}, 0
    for raw in text.splitlines():
        if found := re.search(r'//## File ".*stage\.cu", line (\d+)' if sass else r"^\s*\.loc\s+\d+ (\d+)", raw):
            line = int(found[1])
            continue
        if found := re.match(r"(\.L\w+|\$\w+):", raw):
            labels[found[1]] = len(listed)
            continue
        if sass:
            found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", raw)
        else:
            found = re.match(r"\s+([@\w%!][^{]*?);", raw) if not re.match(r"\s*(\.|//|\))", raw) else None
        if found and not re.match(r"NOP", found[1]):
            listed.append((re.sub(r"\s+", " ", found[1]), line))
    return listed, labels


def mnemonic(text: str) -> str:
    return re.sub(r"^@!?%?U?[pP]\w+ ", "", text).partition(" ")[0]


def classes(texts: list[str], sass: bool) -> dict[str, int]:
    """How many instructions are for what."""
    found: Counter = Counter()
    for text in texts:
        word = mnemonic(text)
        found[next((name for name, (a, b) in CLASSES.items() if re.match(a if sass else b, word)), REST)] += 1
    return dict(found.most_common())


def widths(texts: list[str]) -> dict[str, int]:
    """Loads and stores of global memory by width, as the instruction names it."""
    words = Counter(mnemonic(text) for text in texts)
    return {word: n for word, n in words.most_common() if re.match(r"LDG|STG|(ld|st)\.global", word)}


def by_function(lines: list[int], functions: dict) -> dict[str, int]:
    """Instructions by the source function whose lines they come from; '' is code from elsewhere."""
    spans = [(at + 1, at + len(text.splitlines()), name) for name, (text, at) in functions.items() if name]
    found = Counter(next((name for a, b, name in spans if a <= line <= b), "") for line in lines)
    return dict(found.most_common())


def heat(loop: Loop, sass: bool) -> tuple[int, int]:
    """What makes a loop the hottest: multiplying, else arithmetic of any kind."""
    found = classes([text for text, _ in loop.instructions], sass)
    return found.get("tensor cores", 0), found.get("float arithmetic", 0)


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(record: dict, asm: bool = False) -> list:
    """Resources, the source with how many instructions each line became, classes, and the hottest loop."""
    kept = "no spills" if not record["spills"] else f"{record['spills']} bytes of spills"
    shown = [
        show.heading(f"{record['kernel']} of {record['stage']}, compiled for {record['arch']}"),
        f"{record['registers']} registers a thread, {record['shared']:,} bytes of shared memory a block, "
        f"{kept}, {record['stack'] or 'no'} stack{room(record)}",
        "",
    ]
    lines = {int(line): count for line, count in record["lines"].items()}
    for line, text in enumerate(record["source"], record["first_line"]):
        shown.append(Text(f"{lines.get(line) or '':>4}  {text}"[: show.WIDTH], no_wrap=True))
    shown.append(show.dim(f"On the left: {record['language']} instructions from that line; functions it calls below."))
    rows = show.table(f"{record['instructions']} {record['language']} instructions", "kernel", "hottest loop")
    inside = record["loop"]["classes"] if record["loop"] else {}
    for name, count in record["classes"].items():
        rows.add_row(name, str(count), str(inside.get(name, "")))
    functions = show.table("from function", "instructions")
    for name, count in list(record["functions"].items())[:MOST_FUNCTIONS]:
        functions.add_row(name or "(headers)", str(count))
    shown += ["", rows, "", functions, ""]
    if record["widths"]:
        shown.append("global memory: " + ", ".join(f"{count} {word}" for word, count in record["widths"].items()))
    if record["loop"]:
        shown += ["", *listing(record, asm)]
    return [*shown, show.dim(f"{record['machine']['name']}, commit {(record['commit'] or {}).get('sha', '')[:9]}")]


MOST_FUNCTIONS = 8


def room(record: dict) -> str:
    """How many blocks' registers a processor has room for."""
    if not record["threads"]:
        return ""
    given = -(-record["registers"] // STEP) * STEP * record["threads"]
    return f"; a processor's {REGISTERS:,} registers are enough for {REGISTERS // given} blocks of {record['threads']}"


def listing(record: dict, whole: bool) -> list:
    """The hottest loop, each run of instructions under the source line it came from."""
    source = {int(line): text.strip() for line, text in record["text"].items()}
    pairs, last = record["loop"]["instructions"], None
    shown = [show.heading(f"the hottest loop: {len(pairs)} instructions")]
    for text, line in pairs if whole else pairs[:SHOWN]:
        if line != last and line in source:
            shown.append(Text(f"{line:>4}  {source[line]}"[: show.WIDTH], style="cyan", no_wrap=True))
        last = line
        shown.append(Text(f"        {text}"[: show.WIDTH], no_wrap=True))
    if len(pairs) > SHOWN and not whole:
        shown.append(show.dim(f"… and {len(pairs) - SHOWN} more: --asm shows all"))
    return shown
