"""What a stage is, and how one is found: by name, or by the path of the reader's own file."""

import importlib
import importlib.util
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

FOLDER = Path(__file__).parent.parent / "stages"
GENERAL = FOLDER.parent / "chapters"  # what belongs to no stage
OPS = ("matmul", "add", "mul", "rms_norm", "silu", "rope", "scale", "dot", "softmax", "argmax")

# The ladder in order. Each entry is also a module of stages/ with its chapter beside it.
CPU = (
    "naive",
    "tiling",
    "simd",
    "kv_cache",
    "quantized",
    "integer",
    "packed",
    "blocked",
    "compiled",
    "threads",
    "half_cache",
)
GPU = ("offload", "cuda", "resident", "prefill", "graph", "fused")
LADDER = CPU + GPU


# Engines that run in a stage's place: the module that binds each, and what must be installed for it.
PEERS = {"llama.cpp": ("common.peers", "llama_cpp")}


class Model(NamedTuple):
    """What a stage's load returns and its other functions compute with."""

    config: Any  # common.model.Config
    weights: Any  # common.model.Weights, of whatever the stage turned each tensor into
    cache: Any = None  # what is kept between tokens, from the stage that keeps something on


def arena(*shape: int) -> np.ndarray:
    """A float32 array whose pages are taken only when first written, a small page at a time.

    numpy would ask for huge pages: then a layer's first row costs the zeroing of 2 MB.
    Raises MemoryError, as numpy does.
    """
    size = 4 * math.prod(shape)  # bytes
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError):
        raise MemoryError(f"{size / 1e9:,.1f} GB asked for at once") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


def room(nbytes: int) -> np.ndarray:
    """Zeros (nbytes,) uint8 from the start of a cache line on.

    From 4 MB on numpy asks for huge pages: a stream of reads, which the CPU fetches ahead, stumbles at each page's end.
    """
    memory = np.zeros(nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + nbytes]


def pieces(gguf):
    """take(nbytes) -> zeros, piece after piece of one room as large as a model's matrices with rows up to sixteens."""
    tensors = [t for t in gguf.gguf.tensors.values() if len(t.shape) > 1]
    free = room(sum(t.nbytes + 16 * t.nbytes // t.shape[0] + 64 for t in tensors))

    def take(nbytes):
        nonlocal free
        taken, free = free[:nbytes], free[(nbytes + 63) // 64 * 64 :]
        return taken

    return take


class Stage(Protocol):
    """A module that runs the whole job. T new tokens, S seen, D model width, V vocabulary."""

    PREVIOUS: str | None
    CHANGES: tuple[str, ...]
    # And where they apply: FUSED = {op: the definition that has absorbed it}, PHASES (see common/profile.py), ARCHS (of
    # CUDA source), OPERANDS = "float16" or "int8", what a matmul rounds its inputs to (see common/gate.py).

    def load(self, gguf, context: int, threads: int) -> Any:
        """Turn an open model file into what this stage computes with, for up to `context` tokens."""

    def forward(self, model, ids: list[int], start: int) -> np.ndarray:
        """Hidden states (T, D) of ids, which stand at positions start, start + 1, …"""

    def logits(self, model, hidden: np.ndarray) -> np.ndarray:
        """(T, D) -> (T, V)"""

    def generate(
        self, model, ids: list[int], n: int, choose: Callable[[np.ndarray], int] = ...
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield n times (the new id, the logits row it was chosen from)."""


class StageError(Exception):
    """A stage that can't be had: unknown, broken, or without its backend. exit_code says which."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


def source_path(name: str) -> Path:
    """The file of a stage. Raises StageError for an unknown name, with the nearest known one."""
    path = Path(name)
    if name in PEERS:
        raise StageError(f"{name} is a peer, not a stage: `lesson compare`, run, quality and sweep measure it")
    if name.endswith(".py"):
        if not path.is_file():
            raise StageError(f"no file {name}: give a stage's name (see `lesson list`) or the path of a .py file")
        return path.resolve()
    if name in rungs():
        raise StageError(
            f"{name} is a rung of a kernel ladder and runs no model: `lesson compare` measures it beside another rung"
        )
    if name in ladders():
        raise StageError(
            f"{name} is a kernel ladder: `lesson read {name}` shows its page, `lesson list {name}` its rungs"
        )
    if name not in LADDER:
        near = get_close_matches(name, [*LADDER, *PEERS, *ladders(), *rungs()], n=1)
        hint = f"did you mean {near[0]}?" if near else f"known stages: {', '.join(LADDER)}"
        raise StageError(f"unknown stage {name!r}: {hint}")
    return FOLDER / f"{name}.py"


def rungs() -> list[str]:
    """Every rung of every kernel ladder, 'gemm/tiled': a folder of stages/ is a ladder, its modules are the rungs."""
    return [f"{ladder}/{path.stem}" for ladder in ladders() for path in sorted((FOLDER / ladder).glob("[!_]*.py"))]


def ladders() -> list[str]:
    """Every kernel ladder's name."""
    return sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def code_path(name: str) -> Path:
    """The file of a stage, a rung or a peer, for reading. Raises StageError as source_path does."""
    if name in PEERS:
        return FOLDER.parent.joinpath(*PEERS[name][0].split(".")).with_suffix(".py")
    return FOLDER / f"{name}.py" if name in rungs() else source_path(name)


def readable(name: str) -> Path:
    """A general chapter, a kernel ladder's page, or the code of a stage, a rung or a peer.

    Raises StageError with the nearest of all names.
    """
    chapters = {path.stem: path for path in GENERAL.glob("*.md")}
    if name in chapters:
        return chapters[name]
    if name in ladders():
        return FOLDER / name / "README.md"
    try:
        return code_path(name)
    except StageError as error:
        near = get_close_matches(name, [*chapters, *LADDER, *PEERS, *ladders(), *rungs()], n=1)
        if near and near[0] in chapters:
            raise StageError(f"unknown chapter {name!r}: did you mean {near[0]}?") from error
        raise


def require(name: str) -> None:
    """Raises StageError unless `name` is a stage, or a peer that is installed."""
    if name not in PEERS:
        source_path(name)
    elif importlib.util.find_spec(PEERS[name][1]) is None:
        raise StageError(
            f"{name} is not installed: `pip install llama-cpp-python` builds it for this CPU, which takes some minutes",
            exit_code=4,
        )


def shares_work(name: str) -> bool:
    """Whether a stage uses more than one thread where it is given them. Raises StageError for an unknown name."""
    return name not in PEERS and "from common.team import" in code_path(name).read_text("utf-8")


def short(name: str) -> str:
    """A stage's name, without the folder of a reader's own file."""
    return Path(name).stem if name.endswith(".py") else name


def load_stage(name: str) -> Stage:
    """Import a stage. Raises StageError if it is unknown, its file has an error, or its protocol is incomplete."""
    if name in PEERS:
        require(name)
        return importlib.import_module(PEERS[name][0])
    path = source_path(name)
    try:
        if path.parent == FOLDER:
            module = importlib.import_module(f"stages.{path.stem}")
        else:
            module = import_file(path)
    except Exception as error:  # the reader's own file may raise anything
        raise StageError(f"{path.name}: {where(error, path)}{said(error)}", exit_code=1) from error
    needed = ("load", "forward", "logits", "generate", *(op for op in OPS if op not in fused(module)))
    missing = [n for n in needed if not hasattr(module, n)]
    if missing:
        raise StageError(f"{path.name} lacks {', '.join(missing)}: start from a copy of stages/naive.py", exit_code=1)
    return module


def fused(stage: Stage) -> dict[str, str]:
    """The ops that no longer stand alone in a stage, and what has absorbed each."""
    return getattr(stage, "FUSED", {})


def import_file(path: Path):
    spec = importlib.util.spec_from_file_location(f"reader_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def said(error: Exception) -> str:
    """'NameError: …'; of a syntax error without its place, which `where` tells."""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def where(error: Exception, path: Path) -> str:
    """'line 12: ' where the error arose in the file itself, else ''."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    lines = []
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {lines[-1]}: " if lines else ""
