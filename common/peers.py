"""llama.cpp as one more column: it loads the same file and answers the same calls as a stage, under the same clock.

This module satisfies the protocol of common/stage.py over llama-cpp-python's low-level bindings, so whatever times,
checks or scores a stage does the same to the peer. What the clock covers is its llama_decode, and our argmax over the
one row of logits that comes back, as in a stage; the bindings add about 20 microseconds a call. It runs as it comes:
memory-mapped, weights repacked at load where its build does so, flash attention where it chooses to, an FP16 cache.
"""

import ctypes
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.stage import StageError

OPERANDS = "int8"  # its matmuls round activations to Q8_0, Q8_1 or Q8_K blocks, so it is held to that tolerance
BATCH = 2048  # tokens of one llama_decode, its own default and that of llama-bench

# The flags of its system info that decide its speed, and the CPU feature each stands for (LLVM's names).
FLAGS = {"AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f", "AVX512_VNNI": "avx512vnni",
         "NEON": "neon", "DOTPROD": "dotprod", "MATMUL_INT8": "i8mm"}  # fmt: skip


class Peer(NamedTuple):
    """What load returns: handles of the library, which live as long as the process."""

    config: Any
    context: Any  # llama_context *
    cache: Any  # its memory: what it keeps between tokens
    batch: int  # the most tokens it takes at once


def library():
    """The bindings, their log silenced. Raises StageError where the library can't be loaded."""
    try:
        from llama_cpp import llama_cpp
    except Exception as error:  # a build for another CPU or system fails in its own ways
        said = " ".join(str(error).split())[:200]
        raise StageError(f"llama.cpp can't be loaded ({said}): install llama-cpp-python again", exit_code=4) from error
    if not hasattr(library, "quiet"):
        library.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(library.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
    return llama_cpp


def load(gguf, context: int, threads: int) -> Peer:
    """Open the same file for `context` tokens. A model cut to fewer layers is written out first: llama.cpp can't cut.

    Raises StageError where llama.cpp refuses the file.
    """
    llama = library()
    options = llama.llama_model_default_params()
    options.n_gpu_layers = 0
    with tempfile.TemporaryDirectory() as folder:  # a mapped file outlives its name
        path = gguf.path
        if gguf.config.file_layers > gguf.config.L:
            path = cut(gguf, Path(folder) / "cut.gguf")
        model = llama.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        raise StageError(f"llama.cpp does not load {gguf.path}: `lesson inspect` shows what is in it", exit_code=3)
    options = llama.llama_context_default_params()
    options.n_ctx = context
    options.n_batch = min(BATCH, context)
    options.n_threads = options.n_threads_batch = threads
    opened = llama.llama_init_from_model(model, options)
    if not opened:
        raise StageError(f"llama.cpp makes no context of {context} positions: try a shorter --context", exit_code=1)
    return Peer(gguf.config, opened, llama.llama_get_memory(opened), options.n_batch)


def cut(gguf, path: Path) -> Path:
    """Write the layers that run, and all else of the file, to `path`."""
    from common.gguf_writer import write

    file = gguf.gguf
    gone = tuple(f"blk.{i}." for i in range(gguf.config.L, gguf.config.file_layers))
    kept = [(name, t.type, t.shape, [t.raw]) for name, t in file.tensors.items() if not name.startswith(gone)]
    write(path, {**file.metadata, "llama.block_count": gguf.config.L}, kept, file.value_types)
    return path


def decode(model: Peer, ids: list[int], all_rows: bool) -> np.ndarray:  # -> (T or 1, V), a view until the next call
    """Run ids after what the cache holds. Raises StageError."""
    llama, T = library(), len(ids)
    tokens, wanted = (ctypes.c_int32 * T)(*ids), (ctypes.c_int8 * T)(*[1] * T)  # the batch only points to them
    batch = llama.llama_batch_get_one(tokens, T)
    if all_rows:
        batch.logits = wanted
    status = llama.llama_decode(model.context, batch)
    if status:
        raise StageError(f"llama.cpp gives up on {T} tokens (llama_decode returns {status})", exit_code=1)
    return np.ctypeslib.as_array(llama.llama_get_logits(model.context), (T if all_rows else 1, model.config.V))


def forward(model: Peer, ids: list[int], start: int) -> np.ndarray:  # -> (T, V): its graph ends in logits
    library().llama_memory_seq_rm(model.cache, -1, start, -1)
    pieces = [ids[i : i + model.batch] for i in range(0, len(ids), model.batch)]
    return np.concatenate([decode(model, piece, all_rows=True).copy() for piece in pieces])


def logits(model: Peer, hidden: np.ndarray) -> np.ndarray:
    return hidden


def argmax(row) -> int:
    return int(np.argmax(row))


def generate(
    model: Peer, ids: list[int], n: int, choose: Callable[[np.ndarray], int] = argmax
) -> Iterator[tuple[int, np.ndarray]]:
    library().llama_memory_seq_rm(model.cache, -1, 0, -1)
    for i in range(0, len(ids), model.batch):
        row = decode(model, ids[i : i + model.batch], all_rows=False)[0]
    for left in reversed(range(n)):
        token = choose(row)
        yield token, row
        if left:
            row = decode(model, [token], all_rows=False)[0]


# ---- what it is ------------------------------------------------------------------------------------------------


def about() -> dict:
    """{package, version, system_info, flags, lacks} of this build; lacks: what this CPU has and the build does not."""
    from importlib.metadata import PackageNotFoundError, version

    from llvmlite.binding import get_host_cpu_features

    llama = library()
    info = llama.llama_print_system_info().decode()
    built = [part.partition(" = ")[0].strip() for part in re.split("[|:]", info) if part.strip().endswith(" = 1")]
    here = get_host_cpu_features()
    try:
        package = version("llama-cpp-python")
    except PackageNotFoundError:
        package = None
    return {
        "package": package,
        "version": llama.llama_version().decode() if hasattr(llama, "llama_version") else None,
        "system_info": info.strip(),
        "flags": built,
        "lacks": [flag for flag, feature in FLAGS.items() if here.get(feature) and flag not in built],
    }


def told(found: dict) -> str:
    """'llama-cpp-python 0.3.36, built with AVX2 FMA …', and what to do where it was built for a lesser CPU."""
    named = f"llama-cpp-python {found['package'] or '(unknown version)'}, built with {' '.join(found['flags'])}."
    if found["lacks"]:
        named += (
            f" Built without {', '.join(found['lacks'])}, which this CPU has: "
            "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --force-reinstall --no-cache-dir llama-cpp-python"
        )
    return named
