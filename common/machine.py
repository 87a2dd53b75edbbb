"""The machine this runs on: what it is, and what its memory and arithmetic can do.

Everything measured here is a property of the hardware under code of this file alone: no stage is imported, so what
`common/roofline.py` predicts from these numbers can be wrong, and is worth holding against a stage.
"""

import hashlib
import json
import math
import mmap
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
import platformdirs
import psutil
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from common import intrinsics, jit, quants
from common.gguf import TYPES
from common.intrinsics import LANES, load_lanes, multiply_add, prefetch, store_lanes, total
from common.jit import njit

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
LINE_FLOATS = 16
LINE = 64  # bytes that memory moves at once on every CPU numba serves, bar Apple's 128
SIZES = tuple(16 * KB << i for i in range(17))  # 16 KB … 1 GB
PAGES = tuple(16 << i for i in range(11))  # 16 … 16384 pages of 4 KB
WALK_LINES = (64, 256, 512, 1024, 2048, 4096, 16384)
# A power of two and its neighbour: the first piles every line onto a few cache sets, the second spreads them.
WALK_STRIDES = (64, 1024, 1088, 4096, 4160, 16384, 16448, 65536, 65600)
ROUNDS = 5  # one disturbed round must not decide
RUN_COLUMNS = 1024  # 4 KB of a row, so that opening a new page weighs what it does in a full pass
TILE_COLUMNS = 64  # what is walked again at once where lines < K
REGISTER_ROWS = 8  # of a tile one register wide, in tile_ns
TOKENS = 8  # rows of x and out in tile_ns and dot_ns: enough that one's latency hides behind the others
REACHES = tuple(24 * KB << i for i in range(0, 9, 2))  # of out, or of x
REGIONS = 32  # of the buffer: each is read long after it was last, and fast enough to be read undisturbed
FETCHED = tuple((192 << i) + LINE_FLOATS for i in range(0, 7, 2))  # floats in a row of fetch_ns
AHEAD = 16384  # floats that tile_columns asks for early
DOT_LENGTHS = (32, 256)  # the block lengths of GGUF
UNPACKED = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)


@dataclass(frozen=True)
class Cache:
    """One data cache as the core sees it: `bytes` in `sets` sets of `ways` lines."""

    level: int
    bytes: int
    ways: int
    sets: int


# Where the system tells nothing (macOS, some containers): a middling core of the last ten years.
COMMON_CACHES = (Cache(1, 32 * KB, 8, 64), Cache(2, MB, 16, 1024), Cache(3, 32 * MB, 16, 32768))


@dataclass(frozen=True)
class Walk:
    """A walk down columns of a (K, N) float32 array, `lines` rows at a time: ns per access, first time and again."""

    lines: int
    K: int
    N: int
    cold_ns: float  # the array was last used a gigabyte of other reads ago
    warm_ns: float  # the same rows were walked just before, as far as the caches kept them


@dataclass(frozen=True)
class Machine:
    """Identity, and measurements of one thread unless the name says `all`.

    Curves are tuples of (x, y): bytes to GB/s or ns, pages to ns; `stride_ns` is (lines, stride bytes, ns per access).
    """

    name: str
    slug: str
    cores: int
    affinity: tuple[int, ...]
    quota: float | None  # cores that the control group grants, None for all
    caches: tuple[Cache, ...]
    memory: int
    page_bytes: int
    os: str
    versions: dict[str, str]
    read_gbs: tuple[tuple[int, float], ...] = ()
    read_all_gbs: tuple[tuple[int, float], ...] = ()
    latency_ns: tuple[tuple[int, float], ...] = ()
    page_ns: tuple[tuple[int, float], ...] = ()
    stride_ns: tuple[tuple[int, int, float], ...] = ()
    fp_add_ns: float = 0.0  # one float32 add that needs the one before
    scalar_gflops: float = 0.0  # one multiply and one add an instruction pair, chains enough to hide latency
    fma_gflops: float = 0.0  # packed
    fma_all_gflops: float = 0.0
    int8_gops: float | None = None  # 8-bit multiply-adds, two operations each; None where there is no such instruction
    call_us: float = 0.0  # from Python into jitted code, two arrays in and a new one out
    exp_ns: float = 0.0  # one float64 exp
    fetch_ns: tuple[tuple[int, int, float], ...] = ()  # (tokens, bytes of a row, ns a float32), a tile at a time
    tile_ns: tuple[tuple[int, float], ...] = ()  # ns a multiply-add by bytes of out: a register of w from L1 each
    dot_ns: tuple[tuple[int, int, float], ...] = ()  # (block length, bytes of x, ns a multiply-add), both from L1 or x
    dot_chain_ns: tuple[tuple[int, float], ...] = ()  # by block length, one row alone: each sum waits for the last
    row_end_ns: float = 0.0  # adding up the lanes of one sum
    unpack_ns: dict[str, float] = field(default_factory=dict)  # a weight by type, of blocks in L1 into L1
    walks: tuple[Walk, ...] = ()

    @property
    def threads(self) -> int:
        """Cores that this process may keep busy."""
        return max(1, min(len(self.affinity) or self.cores, int(self.quota or self.cores)))

    @property
    def tlb_pages(self) -> int:
        """The page-stride knee: how many 4 KB pages a walk may touch before translation shows in its time."""
        reach = PAGES[0]
        for pages, ns in self.page_ns:
            if ns > 1.5 * curve(self.latency_ns, pages * LINE) + 1:
                break
            reach = pages
        return reach

    def read(self, nbytes: float, threads: int = 1) -> float:
        """GB/s of reading a working set of nbytes over and over; all cores where threads > 1."""
        return curve(self.read_all_gbs if threads > 1 else self.read_gbs, nbytes)

    def tile(self, out_bytes: float) -> float:
        """ns a multiply-add of a register-wide tile, where out takes out_bytes."""
        return curve(self.tile_ns, out_bytes)

    def fetch(self, tokens: int, row_bytes: float, nbytes: float) -> float:
        """ns to bring each float32 near, a register-wide tile of rows at a time, from nbytes in all.

        The longer the work on a tile, the less of it overlaps with fetching the next.
        """
        few, many = (curve([p[1:] for p in self.fetch_ns if p[0] == n], row_bytes) for n in (1, TOKENS))
        return curve(((1, few), (TOKENS, many)), tokens) * self.read_gbs[-1][1] / self.read(nbytes)

    def dot(self, length: int, tokens: int, x_bytes: float) -> float:
        """ns a multiply-add of blocks of `length` weights with `tokens` rows of x, x_bytes in all."""
        near = min((n for n, _ in self.dot_chain_ns), key=lambda n: abs(math.log(n / length)))
        overlapped = curve([point[1:] for point in self.dot_ns if point[0] == near], x_bytes)
        return max(overlapped, curve(self.dot_chain_ns, near) / tokens)

    def walk(self, lines: int, K: int, N: int) -> Walk | None:
        """The walk measured at exactly this shape, if it was asked for."""
        return next((w for w in self.walks if (w.lines, w.K, w.N) == (lines, K, N)), None)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> "Machine":
        """Inverse of to_json, also after a trip through json.dumps; unknown keys raise TypeError."""
        data = dict(data)
        data["caches"] = tuple(Cache(**c) for c in data["caches"])
        data["walks"] = tuple(Walk(**w) for w in data.get("walks", ()))
        for f in fields(cls):
            if str(f.type).startswith("tuple[tuple"):
                data[f.name] = tuple(tuple(point) for point in data.get(f.name, ()))
        return cls(**{**data, "affinity": tuple(data["affinity"])})


def curve(points, x: float) -> float:
    """y at x, linear in log x between points and flat beyond the ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return points[-1][1]


# Identity


def identify() -> Machine:
    """Who this machine is, nothing measured yet."""
    name = cpu_name()
    cores = os.cpu_count() or 1
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(cores))
    return Machine(
        name=name,
        slug=slug(name),
        cores=cores,
        affinity=affinity,
        quota=cgroup_quota(),
        caches=caches() or COMMON_CACHES,
        memory=psutil.virtual_memory().total,
        page_bytes=mmap.PAGESIZE,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"python": platform.python_version(), **{p: version(p) for p in ("numpy", "numba", "llvmlite")}},
    )


def cpu_name() -> str:
    """The CPU's marketing name; where a hypervisor keeps the model to itself, with LLVM's name for what is inside.

    'AMD EPYC (znver4)': the bare name stands for machines that share nothing but their maker.
    """
    name = sold_as()
    return name if re.search(r"\d", name) else f"{name} ({llvm.get_host_cpu_name()})"


def sold_as() -> str:
    """The CPU's name as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    return re.sub(r"\((?:R|TM|tm)\)|\s+(?=\s)", "", name).strip()


def slug(name: str) -> str:
    """A folder's name for reports/: lower case, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores granted by the control group (version 2's cpu.max, version 1's cfs files), None without a limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text("utf-8").split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{f}_us").read_text("utf-8") for f in ("quota", "period"))
        return None if float(quota) <= 0 else float(quota) / float(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def caches(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[Cache, ...]:
    """Data and unified caches, innermost first; empty where the system doesn't list them."""
    found = []
    for index in sorted(root.glob("index*")):
        try:
            text = {f: (index / f).read_text("utf-8").strip() for f in ("level", "type", "size")}
            unit = {"K": KB, "M": MB, "G": GB}.get(text["size"][-1], 1)
            size = int(text["size"].rstrip("KMG")) * unit
            ways = int((index / "ways_of_associativity").read_text("utf-8")) or size // LINE  # 0: fully associative
        except (OSError, ValueError, IndexError):
            continue
        if text["type"] != "Instruction":
            found.append(Cache(int(text["level"]), size, ways, max(1, size // LINE // ways)))
    return tuple(sorted(found, key=lambda c: c.level))


# Kernels


def vector_loop(builder, count, element, lanes, chains, step):
    """Emit `for i < count: acc[c] = step(c, i, acc[c])` over `chains` vectors; the sum of their lanes 0 is returned.

    LLVM keeps the accumulators in registers, and splits a vector wider than the machine's.
    """
    vector = ir.VectorType(element, lanes)
    slots = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(chains)]
    with cgutils.for_range(builder, count) as loop:
        for c, slot in enumerate(slots):
            builder.store(step(c, loop.index, builder.load(slot)), slot)
    add = builder.fadd if isinstance(element, ir.FloatType) else builder.add
    total = builder.load(slots[0])
    for slot in slots[1:]:
        total = add(total, builder.load(slot))
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))


def splat(builder, value, lanes):
    """A vector whose lanes all hold value."""
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    for lane in range(lanes):
        vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
    return vector


READ_LANES, READ_CHAINS = 16, 8  # two adds of latency 4 a cycle keep 8 accumulators busy; 16 floats are one line
GROUP = READ_LANES * READ_CHAINS * 4  # bytes read a round


@intrinsic
def sum_lanes(typingctx, address, count):
    """Sum count groups of GROUP bytes of float32 from address on."""

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(ir.FloatType(), READ_LANES)
        base = builder.inttoptr(args[0], vector.as_pointer())

        def step(c, i, acc):
            at = builder.add(builder.mul(i, ir.Constant(i.type, READ_CHAINS)), ir.Constant(i.type, c))
            load = builder.load(builder.gep(base, [at], source_etype=vector), typ=vector)
            load.align = 4
            return builder.fadd(acc, load)

        return vector_loop(builder, args[1], ir.FloatType(), READ_LANES, READ_CHAINS, step)

    return types.float32(types.int64, types.int64), codegen


def multiply_adds(lanes, chains):
    """An intrinsic (count, m) -> float32: count rounds of acc = acc * m + m on `chains` accumulators of `lanes`."""

    @intrinsic
    def lanes_multiply_add(typingctx, count, m):
        def codegen(context, builder, signature, args):
            factor = splat(builder, args[1], lanes)
            name = f"llvm.fmuladd.v{lanes}f32"  # fused where the machine can, else two instructions
            fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(factor.type, [factor.type] * 3), name)
            return vector_loop(
                builder,
                args[0],
                ir.FloatType(),
                lanes,
                chains,
                lambda c, i, acc: builder.call(fn, [acc, factor, factor]),
            )

        return types.float32(types.int64, types.float32), codegen

    return lanes_multiply_add


FMA_LANES, FMA_CHAINS = (8, 16), 12  # two units of latency 4 or 5 need 8 to 10 chains; 12 leave room in 16 registers
fma_8, fma_16 = (multiply_adds(lanes, FMA_CHAINS) for lanes in FMA_LANES)


class Int8(NamedTuple):
    """An instruction that multiplies 8-bit numbers and adds the products of neighbours."""

    feature: str  # of the CPU, by LLVM's name
    name: str
    bytes: int  # that it multiplies
    bits: int  # of a sum of neighbours
    adds: bool  # also to a register of sums; a chain without that multiplies its own sums again


INT8 = (  # best first
    Int8("avx512vnni", "llvm.x86.avx512.vpdpbusd.512", 64, 32, True),
    Int8("avxvnni", "llvm.x86.avx512.vpdpbusd.256", 32, 32, True),
    Int8("avx512bw", "llvm.x86.avx512.pmaddubs.w.512", 64, 16, False),
    Int8("avx2", "llvm.x86.avx2.pmadd.ub.sw", 32, 16, False),
)


@cache
def int8_instruction() -> Int8 | None:
    features = llvm.get_host_cpu_features()
    return next((one for one in INT8 if features.get(one.feature)), None)


@intrinsic
def int8_chains(typingctx, count, seed):
    """count rounds of FMA_CHAINS chains of this CPU's best 8-bit multiply-add."""
    one = int8_instruction()

    def codegen(context, builder, signature, args):
        sums, octets = (ir.VectorType(ir.IntType(b), one.bytes * 8 // b) for b in (one.bits, 8))
        kind = ir.FunctionType(sums, [sums] * one.adds + [octets] * 2)
        fn = cgutils.get_or_insert_function(builder.module, kind, one.name)
        factor = splat(builder, builder.trunc(args[1], sums.element), sums.count)
        factor = builder.bitcast(factor, octets)

        def step(c, i, acc):
            return builder.call(fn, [acc] * one.adds + [factor if one.adds else builder.bitcast(acc, octets), factor])

        total = vector_loop(builder, args[0], sums.element, sums.count, FMA_CHAINS, step)
        return builder.sext(total, ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@njit(nogil=True)
def read(address, groups, passes):
    """Read groups x GROUP bytes of float32, passes times."""
    total = np.float32(0)
    for _ in range(passes):
        total += sum_lanes(address, groups)
    return total


@njit(nogil=True)
def fma(count, m, wide):
    return fma_16(count, m) if wide else fma_8(count, m)


@njit
def int8(count, seed):
    return int8_chains(count, seed)


@njit
def add_chain(count, x):
    """count float32 adds, each waiting for the one before."""
    total = np.float32(0)
    for _ in range(count):
        total += x
    return total


@njit
def scalar_multiply_add(a, count):
    """count x 8 multiply-adds on 8 chains, one value at a time."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for i in range(count):
        x = a[i & 1023]
        s0 += x * s7
        s1 += x * x
        s2 += x * np.float32(3)
        s3 += x * np.float32(5)
        s4 += x * np.float32(7)
        s5 += x * np.float32(9)
        s6 += x * np.float32(11)
        s7 += x * np.float32(13)
    return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7


@njit
def link(nodes, count, step, jitter):
    """Write into nodes (int64) a cycle over count (a power of two) places, `step` int64 apart, in scattered order.

    The order is a linear congruential generator of full period, so it needs no shuffle (Knuth, TAOCP 2, 3.2.1.2).
    jitter = 1 moves each place to another of the 64 lines of its page, so that pages don't share one cache set.
    """
    for i in range(count):
        j = (i * 1664525 + 1013904223) & (count - 1)
        nodes[i * step + jitter * (i * 13 & 63) * 8] = j * step + jitter * (j * 13 & 63) * 8


@njit
def chase(nodes, start, steps):
    """Follow the links: each load needs the one before."""
    at = start
    for _ in range(steps):
        at = nodes[at]
    return at


@njit
def walk_columns(x, w, out, n0, n1, passes):
    """Walk columns n0 … n1 of w (K, N), each from top to bottom, multiplying by x and adding in one chain."""
    for _ in range(passes):
        for n in range(n0, n1):
            total = out[n]
            for k in range(w.shape[0]):
                total += x[k] * w[k, n]
            out[n] = total


@njit
def walk_rows(x, w, out, k0, k1, n0, n1, passes):
    """As walk_columns over rows k0 … k1 alone: a row that starts anywhere costs numba a test for a negative index."""
    for _ in range(passes):
        for n in range(n0, n1):
            total = out[n]
            for k in range(k0, k1):
                total += x[k] * w[k, n]
            out[n] = total


@njit
def tile_columns(x, w, out, passes):
    """Multiply-add x (T, K) and w (K, N) into out (T, N), REGISTER_ROWS rows and a register of columns at a time."""
    for _ in range(passes):
        for k0 in range(0, w.shape[0], REGISTER_ROWS):
            for n in range(0, out.shape[1], LANES):
                for k in range(k0, k0 + REGISTER_ROWS):
                    prefetch(w, (k, n + AHEAD))
                for t in range(out.shape[0]):
                    lanes = load_lanes(out, (t, n))
                    for k in range(k0, k0 + REGISTER_ROWS):
                        lanes = multiply_add(x[t, k], load_lanes(w, (k, n)), lanes)
                    store_lanes(out, (t, n), lanes)


@njit
def dot_blocks(x, block, sums, passes):
    """Multiply-add one block (length,) with each block's worth of x (T, K) into sums (T, LANES)."""
    for _ in range(passes):
        for b in range(0, x.shape[1], len(block)):
            for t in range(x.shape[0]):
                lanes = load_lanes(sums, (t, 0))
                for i in range(0, len(block), LANES):
                    lanes = multiply_add(load_lanes(x, (t, b + i)), load_lanes(block, i), lanes)
                store_lanes(sums, (t, 0), lanes)


@njit
def row_ends(sums, out, passes):
    """Add up each row of sums (T, LANES) into out (T,), and clear it."""
    for _ in range(passes):
        for t in range(sums.shape[0]):
            out[t] += total(load_lanes(sums, (t, 0)))
        sums[:] = 0


@njit
def unpack_blocks(kind, raw, size, out, passes):
    """Unpack the blocks of raw, `size` bytes each, into out, one over the other."""
    for _ in range(passes):
        for at in range(0, len(raw) - size + 1, size):
            quants.unpack(kind, raw, at, out)


@njit
def exponentials(a):
    total = 0.0
    for i in range(len(a)):
        total += math.exp(a[i])
    return total


@njit
def nothing(x, w):
    return np.empty_like(x)


# Measurements


def seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best(runs: dict, rounds: int = ROUNDS) -> dict:
    """The least of each run's results over interleaved rounds, so that a slow moment spoils no single point."""
    least = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for key, run in runs.items():
            least[key] = min(least[key], run())
    return least


def repeats(ns_each: float, target_ms: float = 1.0) -> int:
    """How many times to repeat work of ns_each for a timing of about target_ms."""
    return max(1, int(target_ms * 1e6 / ns_each))


def read_curve(buffer, threads: int) -> tuple[tuple[int, float], ...]:
    """GB/s over working-set size: the set is split evenly over the threads."""

    def point(nbytes):
        share = nbytes // threads // GROUP
        passes = repeats(share * GROUP / 30, 2.0 if threads > 1 else 0.7)
        starts = [buffer.ctypes.data + i * share * GROUP for i in range(threads)]

        def run():
            if threads == 1:
                return seconds(lambda: read(starts[0], share, passes)) / (share * GROUP * passes)
            return seconds(lambda: list(pool.map(lambda s: read(s, share, passes), starts))) / (
                share * GROUP * passes * threads
            )

        return run

    with ThreadPoolExecutor(threads) as pool:
        found = best({n: point(n) for n in SIZES if n <= buffer.nbytes})
    return tuple((n, round(1e-9 / s, 2)) for n, s in found.items())


def chase_curve(nodes, counts: Iterable[int], step: int, jitter: int) -> dict[int, float]:
    """ns per dependent load over `count` places, `step` int64 apart."""
    found = {}
    for count in counts:
        link(nodes, count, step, jitter)
        steps = min(max(count, 1 << 13), 1 << 16)
        chase(nodes, 0, count if count <= 1 << 16 else steps)
        found[count] = round(best({0: lambda steps=steps: seconds(lambda: chase(nodes, 0, steps)) / steps})[0] * 1e9, 3)
    return found


def page_curve() -> tuple[tuple[int, float], ...]:
    """ns per dependent load when each touches another page of the base size."""
    region = mmap.mmap(-1, PAGES[-1] * mmap.PAGESIZE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages has none to refuse
            region.madvise(mmap.MADV_NOHUGEPAGE)
    nodes = np.frombuffer(region, np.int64)
    return tuple(chase_curve(nodes, PAGES, mmap.PAGESIZE // 8, 1).items())


def stride_curve(buffer) -> tuple[tuple[int, int, float], ...]:
    """ns per access of a column walk over (lines, stride bytes), the lines walked again and again."""
    x, out = np.ones(max(WALK_LINES), np.float32), np.zeros(LINE_FLOATS, np.float32)
    runs = {}
    for lines in WALK_LINES:
        for stride in WALK_STRIDES:
            if lines * stride > buffer.nbytes:
                continue

            w = buffer[: lines * stride // 4].reshape(lines, stride // 4)
            passes = 1 + 4096 // lines  # the shortest timing is about 40 us

            def run(w=w, passes=passes):
                walk_columns(x, w, out, 0, 2, 1)
                spent = seconds(lambda: walk_columns(x, w, out, 0, LINE_FLOATS, passes))
                return spent / (LINE_FLOATS * len(w) * passes)

            runs[lines, stride] = run
    return tuple((*key, round(s * 1e9, 3)) for key, s in best(runs).items())


def exact_walks(buffer, shapes: Iterable[tuple[int, int, int]]) -> tuple[Walk, ...]:
    """Column walks at the very (lines, K, N) asked for, in arrays allocated as a stage would.

    A stride's own cache-set conflicts and the pages the system hands out decide such a walk, and no curve knows them.
    An array over half the buffer is cut to fewer rows.
    """
    arrays = {}
    for _, K, N in shapes:
        if (K, N) not in arrays:
            rows = max(1, min(K, buffer.nbytes // 2 // (4 * N)))
            arrays[K, N] = np.ones((rows, N), np.float32)
    samples = {shape: ([], []) for shape in shapes}
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for tile in (True, False):  # apart, so that the one doesn't warm the array for the other
            now = [s for s in samples if (s[0] < s[1]) == tile]
            read(buffer.ctypes.data, buffer.nbytes // GROUP, 1 if now else 0)  # pushes every array out of the caches
            for again in (0, 1):
                for shape in now:
                    w = arrays[shape[1:]]
                    samples[shape][again].append(time_walk(w, min(shape[0], len(w)), tile, again, rng))
    return tuple(
        Walk(*shape, *(round(float(np.median(s)) * 1e9, 3) for s in (cold, warm)))
        for shape, (cold, warm) in samples.items()
    )


def time_walk(w, lines: int, tile: bool, again: int, rng) -> float:
    """Seconds per access of a run of columns at a place drawn by rng; a tile's first time goes down all rows."""
    rows, N = w.shape
    columns, passes = min(RUN_COLUMNS, N), 1
    if again and tile:  # a tile is walked again at once
        columns, passes = min(columns, TILE_COLUMNS), 8
    x, out = np.ones(rows, np.float32), np.zeros(N, np.float32)
    n0 = int(rng.integers(0, (N - columns) // LINE_FLOATS + 1)) * LINE_FLOATS
    n1 = n0 + columns
    if not tile:
        walk_columns(x, w, out, n0, n0, 1)  # brings the code itself back
        if again:  # the matrix was walked to its end before, so it lies as far out as its size sends it
            read(w.ctypes.data, w.nbytes // GROUP, 2)
        return seconds(lambda: walk_columns(x, w, out, n0, n1, passes)) / (rows * columns)
    starts = range(0, rows - lines + 1, lines)
    if again:
        starts = [int(rng.choice(starts))]
        walk_rows(x, w, out, starts[0], starts[0] + lines, n0, n1, 1)
    walk_rows(x, w, out, 0, 0, n0, n0, 1)
    spent = seconds(lambda: [walk_rows(x, w, out, k0, k0 + lines, n0, n1, passes) for k0 in starts])
    return spent / (lines * columns * passes * len(starts))


def arithmetic(threads: int) -> dict:
    """The rates of arithmetic that touches no memory."""
    one, a = np.float32(1), np.full(1024, 1e-3, np.float32)
    count = 200_000
    wide = {
        w: (lambda w=w: seconds(lambda: fma(count, one, w)) / (count * 2 * FMA_CHAINS * (16 if w else 8)))
        for w in (0, 1)
    }
    runs = {
        "add": lambda: seconds(lambda: add_chain(count, one)) / count,
        "scalar": lambda: seconds(lambda: scalar_multiply_add(a, count)) / (count * 16),
        "call": lambda: seconds(lambda: [nothing(a, a) for _ in range(1000)]) / 1000,
        **wide,
    }
    if int8_instruction():
        products = FMA_CHAINS * int8_instruction().bytes
        runs["int8"] = lambda: seconds(lambda: int8(count, 1)) / (count * 2 * products)
    for run in runs.values():
        run()  # compiles
    found = best(runs)
    fast = found[1] < found[0]
    with ThreadPoolExecutor(threads) as pool:
        each = 4 * count

        def everyone():
            return list(pool.map(lambda _: fma(each, one, fast), range(threads)))

        together = (
            min(seconds(everyone) for _ in range(ROUNDS)) / threads / (each * 2 * FMA_CHAINS * (16 if fast else 8))
        )
    return {
        "fp_add_ns": round(found["add"] * 1e9, 4),
        "scalar_gflops": round(1e-9 / found["scalar"], 3),
        "fma_gflops": round(1e-9 / min(found[0], found[1]), 2),
        "fma_all_gflops": round(1e-9 / together, 2),
        "int8_gops": round(1e-9 / found["int8"], 2) if "int8" in found else None,
        "call_us": round(found["call"] * 1e6, 3),
    }


def lane_rates(buffer) -> dict:
    """The rates of loading, multiplying and unpacking registers: what a matmul in vector lanes is made of."""
    runs = {}
    for reach in REACHES:
        N = reach // 4 // TOKENS + LINE_FLOATS  # rows a line longer, since at 4 KB apart they would share cache sets
        products = REGISTER_ROWS * TOKENS * N
        runs["tile", reach] = timed(products, tile_columns, (TOKENS, REGISTER_ROWS), (REGISTER_ROWS, N), (TOKENS, N))
        for length in DOT_LENGTHS:
            runs["dot", length, reach] = timed(TOKENS * N, dot_blocks, (TOKENS, N), (length,), (TOKENS, LANES))
    regions = cycle(buffer[: len(buffer) // REGIONS * REGIONS].reshape(REGIONS, -1))
    for N in FETCHED:
        for tokens in (1, TOKENS):
            runs["fetch", tokens, N] = timed_fetch(regions, tokens, N)
    for length in DOT_LENGTHS:
        K = REACHES[0] // 4
        runs["chain", length] = timed(K, dot_blocks, (1, K), (length,), (1, LANES))
    runs["row end"] = timed(TOKENS, row_ends, (TOKENS, LANES), (TOKENS,))
    wide = np.linspace(-10, 10, 1 << 15)
    runs["exp"] = lambda: seconds(lambda: exponentials(wide)) / len(wide)
    for name in UNPACKED:
        runs["unpack", name] = timed_unpack(TYPES[name])
    for run in runs.values():
        run()  # compiles
    found = {key: round(s * 1e9, 4) for key, s in best(runs).items()}

    def points(kind):
        return tuple((*key[1:], ns) for key, ns in found.items() if key[0] == kind)

    tile = points("tile")
    return {
        "fetch_ns": tuple(  # what a pass over cold tiles takes beyond its multiply-adds
            (T, 4 * N, round(max(0.0, ns - T * curve(tile, 4 * T * N)), 4)) for T, N, ns in sorted(points("fetch"))
        ),
        "tile_ns": tile,
        "dot_ns": tuple(sorted(points("dot"))),
        "dot_chain_ns": points("chain"),
        "row_end_ns": found["row end"],
        "exp_ns": found["exp"],
        "unpack_ns": dict(points("unpack")),
    }


def timed(count: int, kernel: Callable, *shapes: tuple[int, ...]) -> Callable:
    """A run of kernel(*arrays, passes) that returns seconds for each of the `count` things it does a pass.

    A load that straddles two lines costs two, so the arrays start, one run after the other, at each place in a line
    where numba would put one.
    """
    sets = [neighbours(shapes, start) for start in starts()]
    passes = repeats(0.1 * count)

    def run():
        return seconds(lambda: [kernel(*arrays, passes) for arrays in sets]) / (count * passes * len(sets))

    return run


def starts() -> range:
    """Bytes into a cache line at which numba may start an array."""
    return range(0, LINE, cpu_target.target_context.get_preferred_array_alignment(types.float32))


def timed_fetch(regions: Iterator, tokens: int, N: int) -> Callable:
    """A run that returns seconds for each weight of the next region as a (K, N) matrix: one that no cache holds."""

    def run():
        spent = count = 0
        for at in starts():
            region = next(regions)[at // 4 :]
            K = len(region) // N // REGISTER_ROWS * REGISTER_ROWS
            arrays = array((tokens, K), at), region[: K * N].reshape(K, N), array((tokens, N), at)
            spent += seconds(lambda arrays=arrays: tile_columns(*arrays, 1))
            count += K * N
        return spent / count

    return run


def timed_unpack(kind) -> Callable:
    """A run that returns seconds a weight of this type, a row of 256 at once where the type has no blocks."""
    length = kind.block if kind.block > 1 else DOT_LENGTHS[-1]
    size = length // kind.block * kind.bytes
    count = 4 * KB // size
    raw, block = np.zeros(size * count, np.uint8), array((length,))
    passes = repeats(0.1 * count * length)
    return lambda: seconds(lambda: unpack_blocks(kind.id, raw, size, block, passes)) / (count * length * passes)


def array(shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """A float32 array of 0.001 that starts `start` bytes into a cache line."""
    return neighbours([shape], start)[0]


def neighbours(shapes: Iterable[tuple[int, ...]], start: int) -> list[np.ndarray]:
    """Arrays of 0.001 side by side from the start of a page on, each `start` bytes into a line.

    Where memory is handed out by chance, a sum may straddle two pages, which makes it several times as slow.
    """
    page = mmap.PAGESIZE // 4
    whole = np.full(sum(math.prod(shape) + LINE_FLOATS for shape in shapes) + 2 * page, 1e-3, np.float32)
    found, at = [], -whole.ctypes.data % mmap.PAGESIZE // 4
    for shape in shapes:
        at += (start - whole[at:].ctypes.data) % LINE // 4
        end = at + math.prod(shape)
        found.append(whole[at:end].reshape(shape))
        at = end
    return found


def make_buffer() -> np.ndarray:
    """Up to 1 GB of ones, and never over a quarter of what is free."""
    size = min(SIZES[-1], psutil.virtual_memory().available // 4)
    buffer = array((max(size, 64 * MB) // 4,))
    buffer.fill(1)
    return buffer


def store() -> Path:
    """The file that keeps this machine's measurements; another CPU, or an edit of what measures, names another."""
    me = identify()
    key = json.dumps([me.name, me.cores, me.affinity, me.quota, me.memory, me.versions])
    key += "".join(
        Path(file).read_text("utf-8") for file in (__file__, *(m.__file__ for m in (intrinsics, jit, quants)))
    )
    root = Path(os.environ.get("LESSON_CACHE") or platformdirs.user_cache_dir("lesson")) / "machine"
    return root / f"{me.slug}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def stored() -> Machine | None:
    """What was measured before; None where nothing was, or the file was cut short."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Machine.from_json(json.loads(store().read_text("utf-8")))
    return None


def measure(force: bool = False, walks: Iterable[tuple[int, int, int]] = ()) -> Machine:
    """This machine with everything measured, from the user's cache where it was measured before.

    walks: (lines, K, N) whose exact column walk is wanted too; only those not yet known are measured. force measures
    all anew. The first time takes about 15 s. A cache folder that can't be written costs that time on every call.
    """
    machine = None if force else stored()
    missing = [w for w in dict.fromkeys(walks) if machine is None or not machine.walk(*w)]
    if machine and not missing:
        return machine
    buffer = make_buffer()
    machine = machine or measure_all(buffer)
    if missing:
        say("column walks of this model")
        machine = replace(machine, walks=machine.walks + exact_walks(buffer, missing))
    say(None)
    save(machine, store())
    return machine


ROOFS = ("read_gbs", "read_all_gbs", "fma_gflops", "fma_all_gflops", "int8_gops")


def doubted(machine: Machine) -> Machine:
    """The machine after a time that beats its roofs: they are measured once more, and the higher of each kept.

    Another program that ran at the first measurement makes roofs too low. A machine that isn't the stored one comes
    back as it is; one whose roofs were raised since comes back so, and nothing is measured again.
    """
    kept = stored()
    if kept is None or kept.stride_ns != machine.stride_ns:
        return machine
    if all(getattr(kept, roof) == getattr(machine, roof) for roof in ROOFS):
        again = roofs(make_buffer(), kept.threads)
        say(None)
        kept = replace(kept, **{roof: higher(getattr(kept, roof), again[roof]) for roof in ROOFS})
        save(kept, store())
    return kept


def raised(machine: Machine) -> Machine:
    """The machine with the roofs that a doubt raised meanwhile; itself where none did, or it isn't the stored one."""
    kept = stored()
    return kept if kept is not None and kept.stride_ns == machine.stride_ns else machine


def higher(a, b):
    """The greater of two rates, or of two curves at each point."""
    if isinstance(a, tuple):
        other = dict(b)
        return tuple((x, max(y, other.get(x, y))) for x, y in a)
    return max(a or 0, b or 0) or None


def roofs(buffer, threads: int) -> dict:
    """The rates of arithmetic, and reading by one thread and by all."""
    say("arithmetic")
    rates = arithmetic(threads)
    say("read bandwidth")
    reads = read_curve(buffer, 1)
    return {
        **rates,
        "read_gbs": reads,
        "read_all_gbs": read_curve(buffer, threads) if threads > 1 else reads,
    }


def measure_all(buffer) -> Machine:
    machine = identify()
    rates = roofs(buffer, machine.threads)
    say("vector lanes")
    rates |= lane_rates(buffer)
    say("column walks")
    strides = stride_curve(buffer)
    say("latency")
    nodes = buffer.view(np.int64)
    latency = chase_curve(nodes, [n // LINE for n in SIZES if n <= buffer.nbytes], LINE // 8, 0)
    buffer.fill(1)  # small integers read as floats are denormals, which some CPUs add slowly
    pages = page_curve()
    return replace(
        machine,
        latency_ns=tuple((count * LINE, ns) for count, ns in latency.items()),
        page_ns=pages,
        stride_ns=strides,
        **rates,
    )


def save(machine: Machine, path: Path) -> None:
    """Keep the measurements, whole or not at all."""
    with suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(machine.to_json(), indent=1))
        part.replace(path)


def say(what: str | None) -> None:
    """Progress for a reader who waits at a terminal; None clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[Kmeasuring this machine: {what} …" if what else "\r\033[K", end="", file=sys.stderr, flush=True)
