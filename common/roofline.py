"""What an op costs at least, what this machine could do at best, and what a stage should take: all before it runs.

One FLOP and one byte formula per op, used for every column of every table. A FLOP is one add, multiply, divide,
comparison or function value; bytes count each array once, as if caches were perfect (Williams, Waterman & Patterson
2009, "Roofline"). Shapes by the course's alphabet: T new tokens, S seen in all, D, H, G, hd, F, V, matmul K and N.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import NamedTuple

from common import diff
from common.gguf import TYPES
from common.gpu import on_gpu
from common.machine import GB, LINE, LINE_FLOATS, Machine, curve, doubted
from common.stage import LADDER, PEERS, StageError, code_path, source_path

SLACK = 1.05  # a measured bandwidth is itself a measurement; beyond this the accounting is wrong
NEAR_CHAIN = 1.5  # up to this many times the addition's latency, the chain of additions decides
SAME = 1.1  # an expected ratio closer to 1 is none
WORTH = 1.8  # an expected ratio above this is a gain that nobody will miss
SAMPLES = 1024  # tokens of a long text whose times are summed, so that a million asked for cost no minute


class AccountingError(Exception):
    """A time shorter than the machine allows: bytes, FLOPs or clock are wrong, and no number may be shown."""

    exit_code = 5


class Work(NamedTuple):
    """What an op does at least."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, n: int) -> "Work":
        return Work(self.flops * n, self.bytes * n)


# One formula an op


def matmul(T: int, K: int, N: int, weight_bytes: int | None = None) -> Work:
    """(T, K), (K, N) -> (T, N); weights are float32 unless weight_bytes says what they take in all."""
    return Work(2 * T * K * N, (4 * K * N if weight_bytes is None else weight_bytes) + 4 * T * (K + N))


def add(T: int, D: int) -> Work:
    return Work(T * D, 12 * T * D)


def mul(T: int, F: int) -> Work:
    return Work(T * F, 12 * T * F)


def rms_norm(T: int, D: int) -> Work:
    """A sum of squares, then divide, add eps, root and reciprocal once a row, and two multiplies a value."""
    return Work(T * (4 * D + 4), 4 * (2 * T * D + D))


def silu(T: int, F: int) -> Work:
    """Negate, exp, add, divide."""
    return Work(4 * T * F, 8 * T * F)


def rope(T: int, heads: int, hd: int) -> Work:
    """One angle with its cosine and sine a pair and token, then four multiplies and two adds a head."""
    return Work(T * (hd // 2) * (3 + 6 * heads), 8 * T * heads * hd + 8 * (hd // 2))


def scale(S: int) -> Work:
    return Work(S, 8 * S)


def dot(hd: int) -> Work:
    return Work(2 * hd, 8 * hd + 4)


def softmax(S: int) -> Work:
    """Compare, subtract, exp, add, divide."""
    return Work(5 * S, 8 * S)


def argmax(V: int) -> Work:
    return Work(V, 4 * V)


def attention(T: int, S: int, H: int, G: int, hd: int, kept: int = 4) -> Work:
    """The last T of S tokens, each looking at itself and all before it: dot, scale, softmax, weighted sum.

    kept: bytes of each number of the keys and values.
    """
    seen = T * S - T * (T - 1) // 2
    return Work(seen * H * (4 * hd + 6), 8 * T * H * hd + 2 * kept * S * G * hd)


# A model's ops


class Matmul(NamedTuple):
    """One of a model's weight matrices: x (T, K) @ w (K, N), in `count` layers."""

    name: str
    K: int
    N: int
    count: int
    type: str = "F32"  # as the file holds it


def matmuls(config, types: dict[str, dict[str, int]] | None = None) -> tuple[Matmul, ...]:
    """Every matmul of a forward pass, one entry a type (types: from file_types); `output` sees one row a token."""
    D, F, L = config.D, config.F, config.L
    q, kv = config.H * config.hd, config.G * config.hd
    each = (
        Matmul("w_q", D, q, L),
        Matmul("w_k", D, kv, L),
        Matmul("w_v", D, kv, L),
        Matmul("w_o", q, D, L),
        Matmul("w_gate", D, F, L),
        Matmul("w_up", D, F, L),
        Matmul("w_down", F, D, L),
        Matmul("output", D, config.V, 1),
    )
    if types is None:
        return each
    return tuple(m._replace(type=kind, count=count) for m in each for kind, count in types[m.name].items())


def float_bytes(config) -> dict[str, int]:
    """Bytes of each matmul's weights over all layers, as float32."""
    return {m.name: 4 * m.K * m.N * m.count for m in matmuls(config)}


def file_bytes(weights) -> dict[str, int]:
    """Bytes of each matmul's weights over all layers, as the file's blocks hold them (Weights of Tensors)."""
    total: Counter = Counter({"output": weights.output.nbytes})
    for layer in weights.layers:
        total.update({name: t.nbytes for name, t in layer._asdict().items() if name.startswith("w_")})
    return dict(total)


def file_types(weights) -> dict[str, dict[str, int]]:
    """Each matmul's {type: in how many layers} (Weights of Tensors)."""
    found: dict[str, Counter] = {"output": Counter([weights.output.type.name])}
    for layer in weights.layers:
        for name, t in layer._asdict().items():
            if name.startswith("w_"):
                found.setdefault(name, Counter())[t.type.name] += 1
    return found


def block_bytes(m: Matmul) -> int:
    """Bytes of one such matrix in the file's blocks."""
    kind = TYPES[m.type]
    return m.K * m.N // kind.block * kind.bytes


def work(config, T: int, S: int, weight_bytes: dict[str, int], rows: int = 1, kept: int = 4) -> dict[str, Work]:
    """Each op's work in one forward pass of T new tokens, S seen with them, and logits of `rows` rows.

    kept: bytes of each number of the keys and values.
    """
    D, H, G, hd, F, L = config.D, config.H, config.G, config.hd, config.F, config.L
    products = Work(0, 0)
    for m in matmuls(config):
        one = matmul(rows if m.name == "output" else T, m.K, m.N, 0)
        products += one.times(m.count) + Work(0, weight_bytes[m.name])
    return {
        "matmul": products,
        "attention": attention(T, S, H, G, hd, kept).times(L),
        "rms_norm": rms_norm(T, D).times(2 * L + 1),
        "rope": (rope(T, H, hd) + rope(T, G, hd)).times(L),
        "silu": silu(T, F).times(L),
        "mul": mul(T, F).times(L),
        "add": add(T, D).times(2 * L),
        "argmax": argmax(config.V).times(rows),
    }


def total(parts: dict[str, Work]) -> Work:
    return sum(parts.values(), Work(0, 0))


# The roof


def peak(machine: Machine, threads: int = 1, kind: str = "float32") -> float:
    """GFLOP/s of packed multiply-adds; kind int8 takes the 8-bit rate where the CPU has one."""
    one = machine.int8_gops if kind == "int8" and machine.int8_gops else machine.fma_gflops
    return one * (machine.fma_all_gflops / machine.fma_gflops if threads > 1 else 1.0)


def ridge(machine: Machine, nbytes: int, threads: int = 1, kind: str = "float32") -> float:
    """FLOPs per byte at which memory and arithmetic take equally long, for a working set of nbytes."""
    return peak(machine, threads, kind) / machine.read(nbytes, threads)


def bytes_read(stage: str, gguf) -> dict[str, int]:
    """Bytes of each matmul's weights as this stage holds them: float32, or the file's blocks.

    A reader's own file may hold them either way, whatever it started from: it counts the fewer bytes.
    """
    return float_bytes(gguf.config) if stage in FLOAT else file_bytes(gguf.weights)


def cache_bytes(stage: str) -> int:
    """Bytes of each number of the keys and values that a stage keeps; of a reader's own file and a peer the fewer."""
    return 4 if stage in LADDER and stage not in HALVED else 2


def operands(stage: str) -> str:
    """What a stage's or a peer's matmul multiplies, as its file says; float32 where that can't be read."""
    try:
        return diff.constant(code_path(stage), "OPERANDS") or "float32"
    except (StageError, SyntaxError, ValueError):
        return "float32"


def pass_bound_ms(parts: dict[str, Work], machine: Machine, threads: int = 1, kind: str = "float32") -> float:
    """The least ms of a forward pass (parts from work): its matmuls multiply `kind`, all else is in floats."""
    whole = total(parts)
    return max(whole.bytes / machine.read(whole.bytes, threads), arithmetic_ns(parts, machine, threads, kind)) / 1e6


def arithmetic_ns(parts: dict[str, Work], machine: Machine, threads: int = 1, kind: str = "float32") -> float:
    products = parts["matmul"].flops
    others = total(parts).flops - products
    return products / peak(machine, threads, kind) + others / peak(machine, threads)


def bound_ms(w: Work, machine: Machine, threads: int = 1, kind: str = "float32") -> float:
    """The least milliseconds for this work: reading its bytes at their working set, or its FLOPs at the peak."""
    return max(w.bytes / machine.read(w.bytes, threads), w.flops / peak(machine, threads, kind)) / 1e6


def plausible(w: Work, ms: float, machine: Machine, threads: int = 1, kind: str = "float32") -> float:
    """Which share of its roof a measured time reaches. Raises AccountingError above 105 %, once measured anew."""
    if not ms > 0:
        raise AccountingError(f"a time of {ms} ms for {w.flops:,} FLOPs: the clock is wrong")
    share = bound_ms(w, machine, threads, kind) / ms
    if share > SLACK:
        share = bound_ms(w, doubted(machine), threads, kind) / ms
    if share > SLACK:
        raise AccountingError(
            f"{w.flops / ms / 1e6:.1f} GFLOP/s and {w.bytes / ms / 1e6:.1f} GB/s in {ms:.3g} ms are {share:.0%} of "
            "what this machine can do: the bytes, the FLOPs or the clock are wrong"
        )
    return share


# Walking down a column


class Held(NamedTuple):
    """Which share of a column's lines each cache level keeps until the next column wants them; the rest is `beyond`."""

    levels: tuple[float, ...]

    @property
    def beyond(self) -> float:
        return max(0.0, 1 - sum(self.levels))


@cache
def held(caches, lines: int, stride: int) -> Held:
    """Lines `stride` bytes apart, held against each cache's sets: one that gets as many lines as ways keeps none.

    A cache finds a line by its address modulo the number of sets, so a stride with a large power of two in it uses few
    sets. That holds for L1, and for L2 as far as huge pages reach; a shared L3 hashes addresses, so only size counts.
    """
    addresses = sorted({k * stride // LINE for k in range(lines)})
    shares, inner = [], 0.0
    for c in caches:
        if c.level >= 3:
            fit = len(addresses) if len(addresses) * LINE <= c.bytes else 0
        else:
            crowd = Counter(a % c.sets for a in addresses)
            fit = sum(n for n in crowd.values() if n < c.ways)  # x and out want room as well
        share = max(0.0, fit / len(addresses) - inner)
        shares.append(share)
        inner += share
    return Held(tuple(shares))


@cache
def level_points(stride_ns, caches, page_bytes: int) -> dict[tuple[int, bool], tuple[tuple[int, float], ...]]:
    """(level, paged) -> (lines, median ns) of the measured walks whose lines all live at that level."""
    points: dict[tuple[int, bool], dict[int, list[float]]] = {}
    for lines, stride, ns in stride_ns:
        shares = held(caches, lines, stride)
        for level, share in enumerate((*shares.levels, shares.beyond)):
            if share > 0.9:
                points.setdefault((level, stride >= page_bytes), {}).setdefault(lines, []).append(ns)
    return {key: tuple((n, median(found[n])) for n in sorted(found)) for key, found in points.items()}


def level_ns(machine: Machine, level: int, lines: int, paged: bool) -> float:
    """ns per access of walks down `lines` lines that all live at this level; level len(caches) is memory.

    paged: each line on a page of its own, so that translation counts too. A level no walk reached costs what the
    one inside it does.
    """
    points = level_points(machine.stride_ns, machine.caches, machine.page_bytes)
    for inner in range(level, -1, -1):
        if (inner, paged) in points:
            return curve(points[inner, paged], lines)
    return machine.fp_add_ns


def column_ns(machine: Machine, lines: int, K: int, N: int) -> tuple[float, float]:
    """(first time, again): ns per multiply-add of walking down columns of a (K, N) float32 matrix, `lines` at a time.

    The walk measured at this very shape where the machine has it. Else from the levels that hold the lines between one
    column and the next; one access in 16 meets a new line, from where the matrix or (first time) the model lives.
    """
    exact = machine.walk(lines, K, N)
    if exact:
        return exact.cold_ns, exact.warm_ns
    stride, paged = 4 * N, machine.page_bytes <= 4 * N
    shares = held(machine.caches, lines, stride)
    again = sum(s * level_ns(machine, i, lines, paged) for i, s in enumerate((*shares.levels, shares.beyond)))

    def fetch(nbytes):
        level = next((i for i, c in enumerate(machine.caches) if nbytes <= c.bytes), len(machine.caches))
        return max(again, level_ns(machine, level, lines, paged))

    tile = lines < K
    matrix = 4 * K * N
    new, old = fetch(max(matrix, machine.read_gbs[-1][0])), again if tile else fetch(matrix)
    return tuple((again * (LINE_FLOATS - 1) + f) / LINE_FLOATS for f in (new, old))


# What each stage's matmul should take


def naive_lines(K: int) -> int:
    return K


def tiling_lines(K: int) -> int:
    return min(K, tile())


@cache
def tile() -> int:
    return diff.constant(source_path("tiling"), "TILE")


# A stage that walks columns: how many rows it walks before it turns to the next column.
WALKS: dict[str, Callable[[int], int]] = {"naive": naive_lines, "tiling": tiling_lines}


class Cost(NamedTuple):
    """ms of one matmul by what the time goes to; a matmul spends one after the other."""

    memory: float = 0.0  # weights on their way into L1
    unpacking: float = 0.0
    arithmetic: float = 0.0  # multiply-adds with the loads and stores of their operands, and chains of additions


def column_matmul(lines: Callable[[int], int]) -> Callable:
    """The cost of a matmul that walks columns: T uses of each weight, the first one cold."""

    def cost(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
        first, again = column_ns(machine, lines(K), K, N)
        return Cost(memory=K * N * (first - again) / 1e6, arithmetic=K * N * T * again / 1e6)

    return cost


def lane_matmul(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
    """Four bytes a weight from memory, then T multiply-adds from L1; sums come and go from where out (T, N) lives."""
    weights = K * N / 1e6
    return Cost(memory=weights * machine.fetch(T, 4 * N, held), arithmetic=weights * T * machine.tile(4 * T * N))


def block_matmul(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
    """A block from memory, unpacked once, then T multiply-adds of two loads each; x (T, K) is read for each row."""
    weights, form = K * N / 1e6, TYPES[kind]
    length = form.block if form.block > 1 else K
    return Cost(
        memory=weights * form.bytes / form.block / machine.read(held),
        unpacking=weights * machine.unpack_ns.get(kind, 0.0),  # a type without a kernel is refused at load
        arithmetic=weights * T * (machine.dot(length, T, 4 * T * K) + machine.row_end_ns / K),
    )


def int8_ns(machine: Machine, dots: float, others: float) -> float:
    """ns of so many registers of 8-bit products, 64 to a register, and of other instructions on sixteen lanes."""
    each = 2 * 16 / machine.fma_gflops
    return dots * (128 / machine.int8_gops if machine.int8_gops else 4 * each) + others * each


def row_matmul(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
    """Blocks of a row taken apart once; for each token and register a product, and six instructions for its scales."""
    if kind not in INTEGER_TYPES:
        return block_matmul(machine, T, K, N, kind, held)
    weights, form = K * N / 1e6, TYPES[kind]
    return Cost(
        memory=weights * form.bytes / form.block / machine.read(held),
        unpacking=weights * machine.unpack_ns.get(kind, 0.0),
        arithmetic=weights * T * (int8_ns(machine, 1, 6) / 64 + machine.row_end_ns / K),
    )


# Instructions for 32 weights of sixteen rows, eight registers: to take them apart with their scales, and to add them.
APART, ADD = 24, 3


def strip_matmul(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
    """Strips are taken apart for each token; fetching goes on meanwhile, so memory costs what that does not hide."""
    if kind not in INTEGER_TYPES:
        return block_matmul(machine, T, K, N, kind, held)
    spans, form = K * N / 512 / 1e6, TYPES[kind]
    memory = 512 * spans * form.bytes / form.block / machine.read(held)
    apart, products = spans * T * int8_ns(machine, 0, APART), spans * T * int8_ns(machine, 8, ADD)
    return Cost(memory=max(0.0, memory - apart - products), unpacking=apart, arithmetic=products)


def tile_matmul(machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> Cost:
    """Strips are taken apart once for all tokens, which come eight at a time; one alone as in packed."""
    if T == 1 or kind not in INTEGER_TYPES:
        return strip_matmul(machine, T, K, N, kind, held)
    spans, form = K * N / 512 / 1e6, TYPES[kind]
    memory = 512 * spans * form.bytes / form.block / machine.read(held)
    apart = spans * int8_ns(machine, 0, APART)
    products = spans * math.ceil(T / 8) * 8 * int8_ns(machine, 8, ADD)
    return Cost(memory=max(0.0, memory - apart - products), unpacking=apart, arithmetic=products)


INTEGER_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as common/int8.py


# stage -> Cost of one matmul (machine, T, K, N, type, bytes of all weights a pass reads). A later stage adds its own.
COSTS: dict[str, Callable[..., Cost]] = {
    **{name: column_matmul(lines) for name, lines in WALKS.items()},
    "simd": lane_matmul,
    "kv_cache": lane_matmul,
    "quantized": block_matmul,
    "integer": row_matmul,
    "packed": strip_matmul,
    "blocked": tile_matmul,
    "compiled": tile_matmul,
    "threads": tile_matmul,
    "half_cache": tile_matmul,
}


def matmul_ms(stage: str, machine: Machine, T: int, K: int, N: int, kind: str = "F32", held: float = GB) -> float:
    """ms of one matmul of a stage in COSTS, its weights of type `kind` in the file, `held` bytes of all weights."""
    return sum(COSTS[stage](machine, T, K, N, kind, held))


WHOLE = {"compiled", "threads", "half_cache"}  # a step is one call
EXP = 20  # instructions of an exponential there, for sixteen lanes
SHARED = {"threads", "half_cache"}  # compute on all cores; what their meetings cost is left out
HALVED = {"half_cache", "prefill", "graph", "fused"}  # keep keys and values as float16
FLOAT = {"naive", "tiling", "simd", "kv_cache"}  # unpack every weight to float32 at load
CACHELESS = {"naive", "tiling", "simd"}  # compute the whole text again for each new token


@dataclass(frozen=True)
class Expectation:
    """What a stage should take, from shape and machine alone; times a token are None where only one is asked for.

    ttft_ms too is None for a GPU stage: its chapter predicts it, from the profile of the stage before.
    """

    stage: str
    ttft_ms: float | None
    ms_per_token: float | None
    bound_ttft_ms: float
    bound_ms_per_token: float | None
    ops: dict[str, float]  # ms in prefill
    reason: str

    def to_json(self) -> dict:
        return asdict(self)


def op_times(stage: str, config, T: int, S: int, machine: Machine, types: dict | None = None) -> dict[str, float]:
    """ms by op of one forward pass of T new tokens and one row of logits; types as in matmuls."""
    H, hd, F, L = config.H, config.hd, config.F, config.L
    parts = work(config, T, S, float_bytes(config))
    streamed = {op: parts[op].bytes / machine.read(parts[op].bytes) for op in ("mul", "add")}
    chained = 2 * machine.fp_add_ns * T * config.D * (2 * L + 1)  # a float64 sum, then a product of three
    looks = (T * S - T * (T - 1) // 2) * H * L
    # dot is one chain of additions; from blocked on, eight tokens and sixteen positions are added up at once
    look_ns = 2 * hd * 2 / machine.fma_gflops if stage in ("blocked", *WHOLE) else hd * machine.fp_add_ns
    exp_ns = int8_ns(machine, 0, EXP) / 16 if stage in WHOLE else machine.exp_ns
    attention = looks * (look_ns + exp_ns)
    if T == 1:  # which reads keys and values of all before it, from as far away as weights
        least = work(config, T, S, float_bytes(config), kept=cache_bytes(stage))
        attention = max(attention, least["attention"].bytes / machine.read(total(least).bytes))
    angles = T * hd // 2 * (1 if stage in WHOLE else 2 * L)  # of q and of k, each a cosine and a sine
    ns = {
        "matmul": sum(cost_of(stage, config, T, machine, types)) * 1e6,
        "attention": attention,
        "rms_norm": chained,
        "rope": angles * 2 * machine.exp_ns + parts["rope"].flops / machine.scalar_gflops,
        "silu": T * F * L * exp_ns,
        **streamed,
        "argmax": parts["argmax"].flops / machine.scalar_gflops,
        "calls": (3 if stage in WHOLE else 15 * L + 3) * machine.call_us * 1e3,
    }
    return {op: each / 1e6 for op, each in ns.items()}


def cost_of(stage: str, config, T: int, machine: Machine, types: dict | None = None) -> Cost:
    """ms of all matmuls of one forward pass of T new tokens and one row of logits, by what they go to."""
    every = matmuls(config, types)
    held = sum(m.count * (4 * m.K * m.N if stage in FLOAT else block_bytes(m)) for m in every)
    costs = [(m.count, COSTS[stage](machine, 1 if m.name == "output" else T, m.K, m.N, m.type, held)) for m in every]
    return Cost(*(sum(count * cost[i] for count, cost in costs) for i in range(len(Cost._fields))))


def expect(
    stage: str,
    config,
    weight_bytes: dict[str, int],
    T: int,
    n: int,
    machine: Machine,
    threads: int = 1,
    types: dict[str, dict[str, int]] | None = None,
    like: str | None = None,
) -> Expectation | None:
    """What `stage` takes for a prompt of T tokens and n new ones; None for a stage without a cost function.

    like: the stage whose expectation this is, where that has no cost function of its own: the bound is its.

    The bound is that of the file (weight_bytes from file_bytes), each weight read once a forward pass, as stored, and
    of what the stage multiplies and keeps. A stage that computes from the file's blocks needs their types (file_types),
    else takes them for float32.
    """
    if stage not in COSTS:
        return None
    alone, machine = machine, of_team(stage, machine, threads)
    kind, kept = operands(like or stage), cache_bytes(like or stage)

    def forward(new: int, seen: int) -> float:
        return pass_ms(stage, config, new, seen, machine, types)

    def bound(new: int, seen: int) -> float:
        return pass_bound_ms(work(config, new, seen, weight_bytes, kept=kept), alone, threads, kind)

    step = n // SAMPLES + 1
    later = range(T + 1 + step // 2, T + n, step)  # the middle of each step: what a token takes grows nearly in line
    ops = op_times(stage, config, T, T, machine, types)
    return Expectation(
        stage=stage,
        ttft_ms=sum(ops.values()),
        ms_per_token=mean(forward(*((s, s) if stage in CACHELESS else (1, s))) for s in later),
        bound_ttft_ms=bound(T, T),
        bound_ms_per_token=mean(bound(1, s) for s in later),
        ops=ops,
        reason=limit(stage, config, T, machine, types),
    )


def of_team(stage: str, machine: Machine, threads: int) -> Machine:
    """The machine as a stage that shares its work finds it: what all cores do together."""
    if threads == 1 or stage not in SHARED:
        return machine
    more = machine.fma_all_gflops / machine.fma_gflops
    gops = machine.int8_gops and machine.int8_gops * more
    return replace(machine, read_gbs=machine.read_all_gbs, fma_gflops=machine.fma_all_gflops, int8_gops=gops)


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def multiply_adds(config, T: int) -> int:
    return sum(m.count * m.K * m.N * (1 if m.name == "output" else T) for m in matmuls(config))


AND_TOKEN = "; for a token after it "  # between what decides a prompt's time and what a token's


def limit(stage: str, config, T: int, machine: Machine, types: dict | None = None) -> str:
    """Which of the machine's limits decides the time of a stage's matmuls, for a prompt and for a token after it."""
    if stage not in WALKS:
        prompt, token = (decides(cost_of(stage, config, new, machine, types)) for new in (T, 1))
        return prompt if stage in CACHELESS else f"{prompt}{AND_TOKEN}{token}"
    ns = sum(cost_of(stage, config, T, machine, types)) * 1e6 / multiply_adds(config, T)
    pace = f"{ns:.2g} ns a multiply-add, where a float addition alone takes {machine.fp_add_ns:.2g}"
    if ns <= NEAR_CHAIN * machine.fp_add_ns:
        return f"the chain of float additions decides: {pace}"
    return f"loads decide: {pace}"


SPENT = Cost("reading weights", "unpacking blocks", "arithmetic on what is in L1")


def decides(cost: Cost) -> str:
    """'reading weights decides (30 of 41 ms, arithmetic on what is in L1 11)'"""
    first, *rest = sorted(zip(cost, SPENT, strict=True), reverse=True)
    others = [f"{what} {milliseconds(ms)}" for ms, what in rest if ms > 0.01 * sum(cost)]
    times = f"{milliseconds(first[0])} of {milliseconds(sum(cost))} ms"
    return f"{first[1]} decides ({', '.join([times, *others])})"


def milliseconds(ms: float) -> str:
    """Two digits, or as many as stand before the point."""
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"


def walks(stages: Iterable[str], config) -> list[tuple[int, int, int]]:
    """The (lines, K, N) whose exact walk sharpens the expectation of these stages: give them to machine.measure."""
    known = [s for s in map(modelled, stages) if s in WALKS]
    return [(WALKS[s](m.K), m.K, m.N) for s in known for m in matmuls(config)]


def modelled(stage: str) -> str:
    """The stage whose cost function speaks for `stage`: itself, or the nearest below it that has one, else naive.

    A reader's file is read, not run: what is wrong with it comes to light in the process that runs it. A peer reads the
    file's blocks, as quantized does.
    """
    if stage in PEERS:
        return "quantized"
    seen = set()
    while stage not in COSTS:
        if stage in seen:
            return "naive"
        seen.add(stage)
        try:
            stage = diff.constant(source_path(stage), "PREVIOUS") or "naive"
        except (StageError, SyntaxError, ValueError):
            return "naive"
    return stage


def expectation(stage: str, job, machine: Machine) -> dict:
    """`expect` for a job, as a record keeps it. A stage without a cost function is expected to be no faster than the
    one it starts from, and its reason says so.
    """
    known = modelled(stage)
    weights = job.gguf.weights
    if on_gpu(stage):
        return bounds(stage, job, machine).to_json()
    found = expect(
        *(known, job.gguf.config, file_bytes(weights), len(job.ids), job.room, machine, job.threads),
        *(file_types(weights), stage),
    )
    if stage in PEERS:
        nothing = {"ttft_ms": None, "ms_per_token": None, "ops": {}}
        return replace(found, stage=stage, reason="a peer's time is not predicted", **nothing).to_json()
    if known != stage:
        found = replace(found, stage=stage, reason=f"as {known}: {found.reason}")
    return found.to_json()


def bounds(stage: str, job, machine: Machine) -> Expectation:
    """The bounds of a job on a machine, and no expectation."""
    config, weights, T = job.gguf.config, file_bytes(job.gguf.weights), len(job.ids)

    def bound(new: int, seen: int) -> float:
        return pass_bound_ms(work(config, new, seen, weights, kept=cache_bytes(stage)), machine, job.threads)

    later = mean(bound(1, T + i) for i in range(1, job.room))
    return Expectation(stage, None, None, bound(T, T), later, {}, "its chapter predicts it from the stage before")


# In words


def sentence(stages: list[str], job, machine: Machine) -> str:
    """A sentence for each step: why this model shows what it shows, and which command shows the other answer."""
    return why(stages, job.gguf.config, len(job.ids), machine, file_types(job.gguf.weights))


def why(stages: list[str], config, T: int, machine: Machine, types: dict | None = None) -> str:
    """As `sentence`, for a prompt of T tokens."""
    steps = [explain for pair, explain in STEPS.items() if set(pair) <= set(stages)]
    if steps:
        return " ".join(explain(config, T, machine, types) for explain in steps)
    known = [s for s in dict.fromkeys(stages) if s in COSTS]
    if not known and any(map(on_gpu, stages)):
        return "What a GPU stage should take its chapter predicts, from the profile of the stage before."
    parts = [f"in {s} {limit(s, config, T, machine, types)}" for s in known]
    return "; ".join(parts) + "." if parts else "No expectation is computed for these stages."


def why_simd(config, T: int, machine: Machine, types: dict | None) -> str:
    tiled, lanes = (cost_of(s, config, T, machine, types) for s in ("tiling", "simd"))
    slow, fast = (sum(cost) * 1e6 / multiply_adds(config, T) for cost in (tiled, lanes))
    gain, lone = (
        pass_ms("tiling", config, new, new, machine, types) / pass_ms("simd", config, new, new, machine, types)
        for new in (T, 1)
    )
    return (
        f"Simd should be worth about {gain:.2g}x here: a multiply-add takes {slow:.2g} ns in tiling, where each "
        f"addition waits {machine.fp_add_ns:.2g} for the one before, and {fast:.2g} in sixteen lanes, where none waits "
        f"for another token's and {decides(lanes)}; `lesson compare tiling simd --shape pp1` shows a lone token, which "
        f"uses each weight once, where it is worth {lone:.2g}x."
    )


def why_kv_cache(config, T: int, machine: Machine, types: dict | None) -> str:
    again = pass_ms("simd", config, T + 1, T + 1, machine, types)
    once = pass_ms("kv_cache", config, 1, T + 1, machine, types)
    held = megabytes(sum(float_bytes(config).values()))
    return (
        f"A token after {T} others should come about {again / once:.2g}x sooner: simd computes {T + 1} rows again in "
        f"{milliseconds(again)} ms, kv_cache one row in {milliseconds(once)}, but still reads {held} of weights, "
        f"so {decides(cost_of('kv_cache', config, 1, machine, types))}; `lesson compare simd kv_cache -n 1` shows the "
        "prompt alone, where there is nothing to win."
    )


def why_quantized(config, T: int, machine: Machine, types: dict | None) -> str:
    before, now = (pass_ms(s, config, 1, T + 1, machine, types) for s in ("kv_cache", "quantized"))
    floats, blocks = (cost_of(s, config, 1, machine, types) for s in ("kv_cache", "quantized"))
    ratio = before / now
    verdict = f"come about {max(ratio, 1 / ratio):.2g}x {'sooner' if ratio > 1 else 'later'}"
    if 1 / SAME < ratio < SAME:
        verdict = "take about as long as before"
    every = matmuls(config, types)
    held = sum(m.count * block_bytes(m) for m in every)
    lengths: Counter = Counter()
    for m in every:
        lengths[TYPES[m.type].block] += m.count * m.K * m.N
    model, other = "", "blocks of 32, where there is less to win"
    if lengths.most_common(1)[0][0] <= 32:
        model, other = " --model tinyllama-shape --layers 2", "blocks of 256, where there is more to win"
    return (
        f"A token after the prompt should {verdict} here: reading {megabytes(held)} of blocks instead of "
        f"{megabytes(sum(float_bytes(config).values()))} of floats saves "
        f"{milliseconds(floats.memory - blocks.memory)} ms, but unpacking takes {milliseconds(blocks.unpacking)}, and "
        f"multiply-adds that load both operands {milliseconds(blocks.arithmetic)} where kv_cache's take "
        f"{milliseconds(floats.arithmetic)}; `lesson compare kv_cache quantized{model}` shows {other}."
    )


def pass_ms(stage: str, config, T: int, S: int, machine: Machine, types: dict | None) -> float:
    """ms of one forward pass of T new tokens, S seen with them."""
    return sum(op_times(stage, config, T, S, machine, types).values())


def why_tiling(config, T: int, machine: Machine, types: dict | None) -> str:
    naive, tiled = (op_times(s, config, T, T, machine)["matmul"] for s in ("naive", "tiling"))
    layer = [m for m in matmuls(config) if m.name != "output"]
    m = max(layer, key=lambda m: matmul_ms("naive", machine, T, m.K, m.N))
    rows = tiling_lines(m.K)
    slow, fast = (column_ns(machine, lines, m.K, m.N)[1] for lines in (m.K, rows))
    column = (
        f"a column of {m.name} ({m.K} x {m.N}) touches {m.K:,} cache lines on {pages(m.K, m.N, machine):,} pages, "
        f"{kilobytes(4 * m.N)} apart, and before the next column wants their neighbours {kept(machine, m.K, 4 * m.N)}"
    )
    cost = (
        f"so a multiply-add takes {slow:.2g} ns, where the chain of additions alone takes {machine.fp_add_ns:.2g} "
        f"and a column of {rows} rows {fast:.2g}"
    )
    ratio = naive / tiled
    small = "`lesson compare naive tiling`"
    if ratio >= WORTH:
        verdict = f"tiling should be worth about {ratio:.1f}x here"
        other = f"{small} shows small matrices, where it is worth less" if config.D > 1024 else BIG
    elif ratio >= SAME:
        verdict, other = f"tiling should be worth about {ratio:.1f}x here, no more", BIG
    else:
        verdict, other = "there is next to nothing for tiling to win here", BIG
    return f"{verdict[0].upper()}{verdict[1:]}: {column}, {cost}; {other}."


BIG = "`lesson compare naive tiling --model tinyllama-shape --layers 2` shows larger ones, where it is worth more"


def why_int8(before: str, now: str) -> Callable:
    """The sentence on a step between stages that take blocks apart: a prompt, and a token after it."""

    def why(config, T: int, machine: Machine, types: dict | None) -> str:
        prompt, token = (
            pass_ms(before, config, new, T + (new == 1), machine, types)
            / pass_ms(now, config, new, T + (new == 1), machine, types)
            for new in (T, 1)
        )
        return (
            f"{now.capitalize()} should be worth about {prompt:.2g}x for the prompt and {token:.2g}x for a token after "
            f"it: in {before} {limit(before, config, T, machine, types)}; in {now} "
            f"{limit(now, config, T, machine, types)}; `lesson compare {before} {now} --shape pp64+tg8` shows a longer "
            "prompt."
        )

    return why


def why_compiled(config, T: int, machine: Machine, types: dict | None) -> str:
    def parts(new: int) -> tuple[dict, dict]:
        return tuple(op_times(s, config, new, T + (new == 1), machine, types) for s in ("blocked", "compiled"))

    def exponentials(ops: dict) -> str:
        return milliseconds(ops["attention"] + ops["silu"])

    (before, now), (slow, fast) = parts(1), parts(T)
    return (
        f"A token should come about {sum(before.values()) / sum(now.values()):.2g}x sooner: calls take "
        f"{milliseconds(before['calls'])} ms of {milliseconds(sum(before.values()))} in blocked, attention and silu "
        f"{exponentials(before)}, and in compiled {exponentials(now)}; the prompt about "
        f"{sum(slow.values()) / sum(fast.values()):.2g}x, where attention and silu go from {exponentials(slow)} ms to "
        f"{exponentials(fast)}; `lesson compare blocked compiled --shape pp512` shows a longer one."
    )


# (stage before, stage) -> the sentence on that step.
STEPS = {
    ("naive", "tiling"): why_tiling,
    ("tiling", "simd"): why_simd,
    ("simd", "kv_cache"): why_kv_cache,
    ("kv_cache", "quantized"): why_quantized,
    ("quantized", "integer"): why_int8("quantized", "integer"),
    ("integer", "packed"): why_int8("integer", "packed"),
    ("packed", "blocked"): why_int8("packed", "blocked"),
    ("blocked", "compiled"): why_compiled,
}


def pages(lines: int, N: int, machine: Machine) -> int:
    """Pages of the base size that one column of `lines` rows of N float32 touches."""
    return min(lines, math.ceil(lines * 4 * N / machine.page_bytes))


def kept(machine: Machine, lines: int, stride: int) -> str:
    """Where a column's lines are by the time the next column wants them."""
    shares = held(machine.caches, lines, stride)
    names = [f"L{c.level}" for c in machine.caches] + ["memory"]
    places = [(share, name) for share, name in zip((*shares.levels, shares.beyond), names, strict=True) if share > 0.05]
    share, place = max(places)
    some = "they are" if share > 0.95 else f"{share:.0%} of them are"
    text = f"{some} still in L1" if place == "L1" else f"{some} back in {place}"
    first = machine.caches[0]
    sets = len({k * stride // LINE % first.sets for k in range(lines)})
    crowded = sets < first.sets and lines > sets * first.ways
    return text + (f" (that stride uses {sets} of L1's {first.sets} sets)" if crowded else "")


def megabytes(n: float) -> str:
    """Bytes of weights, in powers of 1000."""
    return f"{n / 1e9:.3g} GB" if n >= 1e9 else f"{n / 1e6:.3g} MB"


def kilobytes(n: float) -> str:
    """Bytes of a cache, a page or a stride, in powers of 1024."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KB", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def against_tokens(
    stage: str,
    config,
    weight_bytes: dict[str, int],
    tokens: Iterable[int],
    machine: Machine,
    threads: int = 1,
    types: dict[str, dict[str, int]] | None = None,
) -> list[tuple[int, float | None, float]]:
    """(T, expected ms, bound ms) of one forward pass for each T; types as in expect."""
    found, kept = [], cache_bytes(stage)
    for T in tokens:
        least = pass_bound_ms(work(config, T, T, weight_bytes, kept=kept), machine, threads, operands(stage))
        known = stage in COSTS
        found.append((T, pass_ms(stage, config, T, T, machine, types) if known else None, least))
    return found


def knee(
    config, weight_bytes: dict[str, int], machine: Machine, threads: int = 1, kind: str = "float32", most: int = 4096
) -> int | None:
    """The fewest tokens in one pass at which arithmetic, not memory, sets the bound; None up to `most`."""
    for T in range(1, most + 1):
        parts = work(config, T, T, weight_bytes)
        nbytes = total(parts).bytes
        if arithmetic_ns(parts, machine, threads, kind) >= nbytes / machine.read(nbytes, threads):
            return T
    return None
