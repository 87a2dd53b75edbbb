"""Hardware counters through Linux's perf_event_open, memory as the kernel counts it, and the core's clock.

Most virtual machines show no hardware counters: the kernel answers ENOENT, and whoever asked must do without.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

# name -> PERF_COUNT_HW_*, from linux/perf_event.h
EVENTS = {"cycles": 0, "instructions": 1, "cache misses": 3, "branch misses": 5}
HARDWARE = 0  # PERF_TYPE_HARDWARE
GROUP_WITH_TIMES = 1 << 3 | 1 << 0 | 1 << 1  # PERF_FORMAT_GROUP, TOTAL_TIME_ENABLED, TOTAL_TIME_RUNNING
USER_ONLY = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv: what perf_event_paranoid = 2 still allows
ATTRIBUTE_BYTES = 64  # PERF_ATTR_SIZE_VER0
SYSCALL = {"x86_64": 298, "aarch64": 241}


def perf_event_open(config: int, group: int) -> int:
    """A file descriptor that counts one hardware event of this thread; group is the leader's, -1 for none.

    Raises OSError with the kernel's errno. Source: perf_event_open(2).
    """
    number = SYSCALL.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    packed = struct.pack("=IIQQQQQ", HARDWARE, ATTRIBUTE_BYTES, config, 0, 0, GROUP_WITH_TIMES, USER_ONLY)
    attribute = ctypes.create_string_buffer(packed, ATTRIBUTE_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, attribute, 0, -1, group, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class Counters:
    """The EVENTS of this thread, counted together since it was made. Raises OSError where there are none."""

    def __init__(self, open_event: Callable[[int, int], int] = perf_event_open, read=os.read, close=os.close):
        self.names, self.fds = tuple(EVENTS), []
        self.read_bytes, self.close_fd = read, close
        try:
            for config in EVENTS.values():
                self.fds.append(open_event(config, self.fds[0] if self.fds else -1))
        except OSError:
            self.close()
            raise

    def read(self) -> tuple[int, ...]:
        """The counts so far, in the order of names; scaled up where the kernel let others use the counters between."""
        size = 8 * (3 + len(self.fds))
        _, enabled, running, *counts = struct.unpack(f"={3 + len(self.fds)}Q", self.read_bytes(self.fds[0], size))
        return tuple(count * enabled // running for count in counts) if running else (0,) * len(counts)

    def close(self) -> None:
        for fd in self.fds:
            self.close_fd(fd)
        self.fds = []


def reason(error: OSError) -> str:
    """Why there are no counters, and what to do about it."""
    if error.errno == errno.ENOENT:
        return "this machine shows no hardware counters, as most virtual machines"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "hardware counters are forbidden here: set kernel.perf_event_paranoid to 2 or less"
    return f"hardware counters can't be opened ({error.strerror})"


def memory(status: str | None = None) -> dict:
    """MiB in memory: peak_mb at most so far, anon_mb and file_mb now (None where the system does not say).

    status: the text of /proc/self/status, read where it is not given.
    """
    if status is None:
        path = Path("/proc/self/status")
        status = path.read_text("utf-8") if path.exists() else ""
    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)

    def mb(key: str) -> float | None:
        return int(found[key].split()[0]) / 1024 if key in found else None

    peak = mb("VmHWM")  # getrusage's ru_maxrss would begin with what the parent held when it started this process
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return {"peak_mb": peak, "anon_mb": mb("RssAnon"), "file_mb": mb("RssFile")}


def clock_ghz(steps: int = 1_000_000) -> float:
    """The core's clock now: a chain of integer operations of one cycle each, best of five."""
    from common.jit import njit

    @njit
    def chain(x, a, b, count):
        for _ in range(count):
            x = (x ^ a) + b  # two operations that need each other; the loop's own run beside them
        return x

    chain(1, 3, 5, 10)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter_ns()
        chain(1, 3, 5, steps)
        best = min(best, time.perf_counter_ns() - started)
    return 2 * steps / best
