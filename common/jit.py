"""numba set up once: the options every kernel shares, and where compiled code is kept.

numba looks only at a kernel's own file to decide whether its compiled code is still good, so a changed helper elsewhere
would leave a stale caller behind. Here the folder itself is named after every source file of the course, the numba
version and the CPU: a change anywhere begins an empty folder.
"""

import gc
import hashlib
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numba

SOURCES = Path(__file__).parent.parent
KEEP_DAYS = 7  # an unused cache folder is deleted after this


def cache_dir() -> Path | None:
    """The folder for compiled kernels of exactly this source, or None where none can be written.

    What is compiled for types of a reader's file (LESSON_READER) can be loaded beside that file alone: it lies apart,
    in a folder that begins with what the course's own holds by then for types that are no stage's.
    """
    import platformdirs

    digest = hashlib.sha256(f"{version('numba')} {platform.machine()} {cpu_name()}".encode())
    for folder in ("common", "stages"):
        for path in sorted((SOURCES / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    root = Path(os.environ.get("LESSON_CACHE") or platformdirs.user_cache_dir("lesson")) / "numba"
    folder = course = root / digest.hexdigest()[:16]
    if reader := os.environ.get("LESSON_READER"):
        digest.update(reader.encode())
        folder = root / digest.hexdigest()[:16]
    try:
        if course.exists() and not folder.exists():
            with suppress(OSError):  # another process began it too, or there are no links; what lacks is compiled
                # Links serve: numba replaces files, and never changes one.
                shutil.copytree(course, folder, ignore=of_stages, copy_function=os.link)
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        if not os.access(folder, os.W_OK):
            return None
        for old in root.iterdir():
            if old.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return folder


def of_stages(folder: str, names: list[str]) -> list[str]:
    """What in a cache folder is of stages: their own kernels, and indices that name their types, whose reading would
    import them.
    """
    indices = (name for name in names if name.endswith(".nbi") and b"stages." in (Path(folder) / name).read_bytes())
    return [name for name in names if name.startswith("stages_")] + list(indices)


def cpu_name() -> str:
    """The CPU as LLVM names it; compiled code is good for this one alone."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name()


CACHE = cache_dir()
if CACHE:
    numba.config.CACHE_DIR = str(CACHE)
else:
    print("lesson: no folder for compiled kernels can be written, so each run compiles anew", file=sys.stderr)

# numba aligns arrays to 32 bytes; a vector load of 64 that starts there needs two cache lines, at times two pages, and
# whether it does would change from run to run.
numba.core.base.BaseContext.get_preferred_array_alignment = lambda context, ty: 64

# Compiling makes small objects by the million, and Python would look through those that live after every 700th.
gc.set_threshold(100_000)

njit = partial(numba.njit, cache=CACHE is not None, error_model="numpy")
