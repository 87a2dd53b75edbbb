"""The clock, the roofs and the identity of the CPU, for the kernel ladders that run on one core of it."""

import os
import statistics
import time
from pathlib import Path

UNIT = "GFLOP/s", 1e-3  # what a table shows, and what one is in TFLOP/s


def missing() -> None:
    """A CPU is always there."""


def alone():
    """A context in which BLAS keeps to one thread."""
    import threadpoolctl

    return threadpoolctl.threadpool_limits(limits=1, user_api="blas")


def poison(shape) -> None:
    """Leave NaN where the next array of this size may lie: an element nobody writes is then seen."""
    import numpy

    numpy.full(shape, numpy.nan, "float32")


def once(call) -> float:
    """Milliseconds of one call; caches are as the call before left them."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def peaks(dtypes) -> dict[str, float]:
    """TFLOP/s of packed FP32 multiply-adds that touch no memory, on one core as it runs now."""
    import numpy

    from common import machine

    rates = []
    for wide, lanes in enumerate(machine.FMA_LANES):
        rounds, run = 500_000, (numpy.float32(0.5), bool(wide))
        best = min(once(lambda rounds=rounds, run=run: machine.fma(rounds, *run)) for _ in range(8))
        rates.append(2 * lanes * machine.FMA_CHAINS * rounds / best / 1e9)
    return {"float32": max(rates)}


def launch_ms() -> float:
    """What a call from Python into a jitted function that does nothing takes."""
    import numba
    import numpy

    x, nothing = numpy.zeros((1, 1), "float32"), numba.njit(lambda x, w: 0)
    return statistics.median(once(lambda: nothing(x, x)) for _ in range(50))


def memory(call) -> dict[str, float | None]:
    """peak_mb: the most memory that the process held during a call, in MB; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # begin the high-water mark anew
        call()
        status = Path("/proc/self/status").read_text()
        return {"peak_mb": int(status.split("VmHWM:")[1].split()[0]) / 1e3}
    except (OSError, IndexError):
        return {"peak_mb": None}


def name() -> str:
    """The CPU's marketing name."""
    from common import machine

    return machine.cpu_name()


def machine() -> dict:
    """The CPU, versions, what NumPy multiplies with, commit and whether the tree had changes."""
    import threadpoolctl

    from common import machine, records

    here, commit = machine.identify(), records.commit() or {}
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools  # SciPy brings another
    return {
        "cpu": here.name,
        "cores": here.cores,
        "os": here.os,
        "caches": {f"L{cache.level}": cache.bytes for cache in here.caches},
        **here.versions,
        "blas": [f"{p['internal_api']} {p['version']} ({p.get('architecture')})" for p in pools],
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE"),
        "commit": commit.get("sha"),
        "dirty": commit.get("dirty"),
    }
