"""What this machine offers the course, and what to do about what it lacks; nothing is fetched, measured or changed."""

import importlib
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import sources
from common.machine import GB, KB, MB, Machine, identify

SCHEMA = 1
ROOM = 2 * GB  # bytes of memory and of disk below which something here will not fit; FP32 SmolLM2 alone takes 0.6 GB

# What the course names -> LLVM's names, any of which will do
FEATURES = {
    "x86_64": {
        "AVX2": ["avx2"],
        "FMA": ["fma"],
        "F16C": ["f16c"],
        "AVX-512": ["avx512f"],
        "VNNI": ["avx512vnni", "avxvnni"],
        "AMX": ["amx-int8"],
    },
    "aarch64": {"NEON": ["neon"], "DOTPROD": ["dotprod"], "I8MM": ["i8mm"], "SVE": ["sve"]},
}
NEEDED = {"AVX2", "FMA", "F16C", "NEON"}  # the SIMD stages are slow without them
LAYERS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}  # numba's threading layer -> its module


def report(model_spec: str | None = None) -> dict:
    """{schema, ok, machine, features, model, checks [{name, status, value, next}]}; status is `ok` or `warn`.

    `next` is the one thing to do, or None. The model is verified to its SHA-256 where that is known. Raises nothing
    for a missing or broken model: that is a check.
    """
    machine = identify()
    features = cpu_features()
    model = model_check(sources.chosen(model_spec))
    checks = [
        *system_checks(machine, features),
        *memory_checks(machine),
        *numba_checks(),
        check("model", f"{model['name']}: {model['state']}", model["next"]),
        gpu_check(),
    ]
    return {
        "schema": SCHEMA,
        "ok": all(c["status"] == "ok" for c in checks),
        "machine": {
            "name": machine.name,
            "os": machine.os,
            "cores": machine.cores,
            "affinity": list(machine.affinity),
            "quota": machine.quota,
            "threads": machine.threads,
            "memory": machine.memory,
            "caches": [{"level": c.level, "bytes": c.bytes} for c in machine.caches],
            "versions": machine.versions,
        },
        "features": features,
        "model": model,
        "checks": checks,
    }


def render(found: dict) -> str:
    """The report as text: one line a check, and under a warning what to do next."""
    width = max(len(c["name"]) for c in found["checks"])
    lines = []
    for c in found["checks"]:
        lines.append(f"{c['status']:<4}  {c['name']:<{width}}  {c['value']}")
        if c["next"]:
            lines.append(f"{'':<{width + 8}}→ {c['next']}")
    return "\n".join(lines)


def check(name: str, value: str, next: str | None = None) -> dict:
    """A line of the report; having something to do next is what makes it a warning."""
    return {"name": name, "status": "warn" if next else "ok", "value": value, "next": next}


def cpu_features() -> dict[str, bool]:
    """The vector instructions the course speaks of, as LLVM sees them on this CPU."""
    import llvmlite.binding as llvm

    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    host = llvm.get_host_cpu_features()
    return {name: any(host.get(n, False) for n in names) for name, names in FEATURES.get(machine, {}).items()}


def system_checks(machine: Machine, features: dict[str, bool]) -> Iterator[dict]:
    yield check("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield check("system", machine.os)
    yield check("CPU", machine.name)
    absent = [name for name, here in features.items() if name in NEEDED and not here]
    yield check(
        "vectors",
        ", ".join(f"{name} {'yes' if here else 'no'}" for name, here in features.items()) or "unknown to this report",
        f"without {' and '.join(absent)} the SIMD stages fall behind; see whether a virtual machine hides it"
        if absent
        else None,
    )
    yield check("caches", ", ".join(f"L{c.level} {size(c.bytes)}" for c in machine.caches))
    granted = "no quota" if machine.quota is None else f"a quota of {machine.quota:g}"
    yield check(
        "cores",
        f"{machine.cores}, of which {len(machine.affinity)} by affinity, {granted}: {machine.threads} threads",
        f"a quota of {machine.quota:g} cores makes timings jumpy; lift it to measure"
        if machine.quota is not None and machine.quota < len(machine.affinity)
        else None,
    )


def memory_checks(machine: Machine) -> Iterator[dict]:
    import psutil

    free = psutil.virtual_memory().available
    yield check(
        "memory",
        f"{size(machine.memory)}, {size(free)} free",
        "under 2 GiB is too little for the float stages on larger models: close something" if free < ROOM else None,
    )
    root = sources.cache_root()
    disk = shutil.disk_usage(next(folder for folder in (root, *root.absolute().parents) if folder.exists())).free
    yield check(
        "disk",
        f"{size(disk)} free for {root}",
        "under 2 GiB is too little for the larger models: free some, or set LESSON_CACHE" if disk < ROOM else None,
    )
    yield check(
        "cache folder",
        f"{root} {'can' if writable(root) else 'cannot'} be written",
        None if writable(root) else "set LESSON_CACHE to a folder that can be written",
    )


def writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def numba_checks() -> Iterator[dict]:
    from common.jit import CACHE, numba

    threads = numba.config.NUMBA_NUM_THREADS
    yield check("numba", f"{numba.__version__}, {threads} threads, threading layer {threading_layer()}")
    kept = f"compiled code is kept in {CACHE}" if CACHE else "compiled code is not kept"
    yield check("kernels", kept, None if CACHE else "set LESSON_CACHE to a folder that can be written")


def threading_layer() -> str:
    """The first of numba's layers that loads, in its order: the one a parallel kernel would get."""
    import numba

    for layer in numba.config.THREADING_LAYER_PRIORITY:
        try:
            importlib.import_module(f"numba.np.ufunc.{LAYERS[layer]}")
            return layer
        except (ImportError, KeyError):
            continue
    return "none"


def model_check(spec: str) -> dict:
    """{name, path, present, size, sha256_ok, state, next} of the model a run would use; sha256_ok is None where no
    digest is known."""
    found = {"name": spec, "path": None, "present": False, "size": None, "sha256_ok": None}
    try:
        path = sources.locate(spec)
    except sources.SourceError as error:
        return found | {"state": str(error), "next": f"--model {sources.DEFAULT} is the usual one"}
    pinned = sources.PULLED.get(spec)
    found |= {"path": str(path), "present": path.is_file()}
    if not found["present"]:
        if pinned:
            return found | {"state": "not fetched yet", "next": f"lesson pull {spec} (or the first run does it)"}
        return found | {"state": "will be synthesized by the first run", "next": None}
    found["size"] = path.stat().st_size
    if pinned:
        found["sha256_ok"] = pinned.whole() and sources.sha256_of(path) == pinned.sha256
        if not found["sha256_ok"]:
            return found | {"state": f"{path} is damaged", "next": f"lesson pull {spec}"}
    return found | opened(path, found["sha256_ok"])


def opened(path: Path, verified: bool | None) -> dict:
    from common.gguf import GGUFError
    from common.model import open_model

    try:
        config = open_model(path).config
    except GGUFError as error:
        return {"state": str(error), "next": "give another GGUF file of a llama model with --model PATH"}
    proof = ", SHA-256 as published" if verified else ""
    return {"state": f"{config.L} layers, {size(path.stat().st_size)}{proof}", "next": None}


def gpu_check() -> dict:
    """CuPy and the driver, in one sentence."""
    driver = bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia/version").exists()
    if importlib.util.find_spec("cupy") is None:
        if driver:
            return check(
                "GPU", "a driver, but no CuPy", "pip install 'lesson[cuda12x]' or 'lesson[cuda13x]' for the GPU stages"
            )
        return check("GPU", "no NVIDIA driver and no CuPy: the CPU stages run, the GPU stages can be read")
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    except Exception as error:  # CuPy's own kinds, and whatever its shared libraries raise while loading
        why = " ".join(str(error).split())[:120]
        return check("GPU", f"CuPy is here but finds no device ({why})", "install NVIDIA's driver for the GPU stages")
    return check("GPU", f"CuPy {cupy.__version__}: {', '.join(names)}")


def size(nbytes: int) -> str:
    """Bytes in the unit that leaves a short number: 512 KB, 32 MiB, 7.7 GiB, powers of 1024."""
    unit, name = next((u, n) for u, n in ((GB, "GiB"), (MB, "MiB"), (KB, "KB"), (1, "B")) if nbytes >= u or u == 1)
    return f"{nbytes / unit:.3g} {name}"
