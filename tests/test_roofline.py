"""Formulas against counted loops, bounds, and expectations on a made-up machine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common import records, roofline
from common.job import prepare
from common.machine import GB, KB, MB, Cache, Machine, Walk
from common.roofline import Work
from common.stage import source_path

MACHINE = Machine(
    name="Made-up 9000",
    slug="made-up-9000",
    cores=2,
    affinity=(0, 1),
    quota=None,
    caches=(Cache(1, 32 * KB, 8, 64), Cache(2, 512 * KB, 8, 1024), Cache(3, 32 * MB, 16, 32768)),
    memory=16 * GB,
    page_bytes=4096,
    os="Linux",
    versions={"python": "3.11"},
    read_gbs=((16 * KB, 200.0), (MB, 80.0), (16 * MB, 40.0), (GB, 20.0)),
    read_all_gbs=((16 * KB, 400.0), (MB, 160.0), (16 * MB, 60.0), (GB, 30.0)),
    latency_ns=((16 * KB, 1.5), (512 * KB, 4.0), (16 * MB, 15.0), (GB, 90.0)),
    page_ns=((16, 1.5), (64, 1.6), (2048, 6.0), (16384, 30.0)),
    # 64 bytes apart fills sets evenly: 256 lines live in L1, 4096 in L2, 16384 in L3. 4160 is the same, a page each.
    stride_ns=(
        (64, 64, 1.0), (256, 64, 1.0), (4096, 64, 1.2), (16384, 64, 2.0), (64, 4096, 1.2), (256, 4096, 6.0),
        (64, 4160, 1.0), (256, 4160, 1.0), (4096, 4160, 2.0), (16384, 4160, 8.0),
    ),
    fp_add_ns=1.0,
    scalar_gflops=4.0,
    fma_gflops=100.0,
    fma_all_gflops=190.0,
    int8_gops=300.0,
    call_us=0.5,
    exp_ns=5.0,
    # A row costs the same to fetch at any length, and what is in L1 as much as what is not.
    fetch_ns=((1, 1024, 0.2), (8, 1024, 0.4)),
    tile_ns=((16 * KB, 0.02), (MB, 0.08)),
    dot_ns=((32, 16 * KB, 0.05), (256, 16 * KB, 0.03)),
    dot_chain_ns=((32, 0.2), (256, 0.08)),
    row_end_ns=2.0,
    unpack_ns={"F32": 0.01, "Q4_1": 0.1, "Q8_0": 0.07, "Q4_K": 0.09, "Q6_K": 0.08},
)  # fmt: skip
SMALL = SimpleNamespace(L=2, D=96, H=3, G=1, hd=32, F=200, V=500)
BIG = SimpleNamespace(L=2, D=2048, H=32, G=4, hd=64, F=5632, V=32000)


class Counted(float):
    """A float whose operations are counted."""

    flops = 0

    def count(name):
        def operate(self, *others):
            Counted.flops += 1
            return Counted(getattr(float, name)(float(self), *map(float, others)))

        return operate

    __add__, __radd__, __sub__, __mul__, __rmul__ = map(
        count, ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__")
    )
    __truediv__, __rtruediv__, __neg__ = map(count, ("__truediv__", "__rtruediv__", "__neg__"))

    def __gt__(self, other):
        Counted.flops += 1
        return float(self) > float(other)

    def function(self, f):
        Counted.flops += 1
        return Counted(f(float(self)))


def counted(run) -> int:
    Counted.flops = 0
    run()
    return Counted.flops


def values(n):
    return [Counted(0.1 * i + 1) for i in range(n)]


def dot(a, b):
    total = Counted(0)
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def softmax(x):
    top = Counted(-1e9)
    for v in x:
        top = v if v > top else top
    e = [(v - top).function(math.exp) for v in x]
    total = Counted(0)
    for v in e:
        total = total + v
    return [v / total for v in e]


def rms_norm(x, w):
    inverse = 1.0 / (dot(x, x) / float(len(x)) + 1e-5).function(math.sqrt)
    return [v * inverse * g for v, g in zip(x, w, strict=True)]


def rope(heads, hd):
    for _ in range(hd // 2):
        angle = Counted(3) * 0.5
        cos, sin = angle.function(math.cos), angle.function(math.sin)
        for _ in range(heads):
            a, b = values(2)
            _ = a * cos - b * sin, a * sin + b * cos


def attention(T, S, H, hd):
    for t in range(T):
        seen = S - T + t + 1
        for _ in range(H):
            weights = softmax([dot(values(hd), values(hd)) * 0.5 for _ in range(seen)])
            out = [Counted(0)] * hd
            for w in weights:
                out = [o + w * v for o, v in zip(out, values(hd), strict=True)]


COUNTED = [
    ("matmul", (3, 7, 5), lambda T, K, N: [dot(values(K), values(K)) for _ in range(T * N)]),
    ("add", (3, 7), lambda T, D: [a + a for a in values(T * D)]),
    ("mul", (3, 7), lambda T, F: [a * a for a in values(T * F)]),
    ("rms_norm", (3, 7), lambda T, D: [rms_norm(values(D), values(D)) for _ in range(T)]),
    ("silu", (3, 7), lambda T, F: [a / ((-a).function(math.exp) + 1.0) for a in values(T * F)]),
    ("rope", (3, 5, 6), lambda T, heads, hd: [rope(heads, hd) for _ in range(T)]),
    ("scale", (7,), lambda S: [a * 0.5 for a in values(S)]),
    ("dot", (7,), lambda hd: dot(values(hd), values(hd))),
    ("softmax", (7,), lambda S: softmax(values(S))),
    ("argmax", (7,), lambda V: [a > 2.0 for a in values(V)]),
    ("attention", (3, 5, 4, 2, 6), lambda T, S, H, G, hd: attention(T, S, H, hd)),
]


@pytest.mark.parametrize(("op", "shape", "loop"), COUNTED, ids=[c[0] for c in COUNTED])
def test_flops_are_those_a_loop_counts(op, shape, loop):
    assert getattr(roofline, op)(*shape).flops == counted(lambda: loop(*shape))


BYTES = [  # float32 values read and written once each; freqs of rope are float64
    ("matmul", (3, 7, 5), 4 * (3 * 7 + 7 * 5 + 3 * 5)),
    ("add", (3, 7), 4 * 3 * (3 * 7)),
    ("mul", (3, 7), 4 * 3 * (3 * 7)),
    ("rms_norm", (3, 7), 4 * (3 * 7 + 7 + 3 * 7)),
    ("silu", (3, 7), 4 * 2 * (3 * 7)),
    ("rope", (3, 5, 6), 4 * 2 * (3 * 5 * 6) + 8 * 3),
    ("scale", (7,), 4 * 2 * 7),
    ("dot", (7,), 4 * (7 + 7 + 1)),
    ("softmax", (7,), 4 * 2 * 7),
    ("argmax", (7,), 4 * 7),
    ("attention", (3, 5, 4, 2, 6), 4 * (2 * 3 * 4 * 6 + 2 * 5 * 2 * 6)),
]


@pytest.mark.parametrize(("op", "shape", "nbytes"), BYTES, ids=[b[0] for b in BYTES])
def test_bytes_are_those_of_the_arrays(op, shape, nbytes):
    assert getattr(roofline, op)(*shape).bytes == nbytes


def test_matmul_takes_the_bytes_its_weights_are_stored_in():
    assert roofline.matmul(1, 256, 10, 144 * 10).bytes == 1440 + 4 * (256 + 10)
    assert roofline.matmul(1, 256, 10).intensity == pytest.approx(0.5, rel=0.12)


def test_a_model_is_its_ops():
    """One layer by hand: SMALL has q 96, k and v 32, o 96, gate and up 200, down 96, output 500."""
    weights = 96 * (96 + 32 + 32 + 96 + 200 + 200 + 200)
    stored = roofline.float_bytes(SMALL)
    assert sum(stored.values()) == 4 * (2 * weights + 96 * 500)
    parts = roofline.work(SMALL, T=5, S=5, weight_bytes=stored)
    assert parts["matmul"].flops == 2 * (5 * 2 * weights + 96 * 500)
    assert parts["rms_norm"] == roofline.rms_norm(5, 96).times(5)
    assert parts["argmax"].flops == 500
    halved = roofline.work(SMALL, 5, 5, {k: v // 2 for k, v in stored.items()})
    assert parts["matmul"].bytes - halved["matmul"].bytes == sum(stored.values()) // 2


def test_file_bytes_sum_what_each_layer_stores():
    def tensor(n):
        return SimpleNamespace(nbytes=n)

    layers = [SimpleNamespace(_asdict=lambda i=i: {"attn_norm": tensor(9), "w_q": tensor(10 + i)}) for i in range(3)]
    assert roofline.file_bytes(SimpleNamespace(layers=layers, output=tensor(7))) == {"output": 7, "w_q": 33}


def test_the_bound_is_memory_then_arithmetic():
    stored = roofline.float_bytes(BIG)
    one, many = (roofline.total(roofline.work(BIG, T, T, stored)) for T in (1, 512))
    assert roofline.bound_ms(one, MACHINE) == pytest.approx(one.bytes / MACHINE.read(one.bytes) / 1e6)
    assert roofline.bound_ms(many, MACHINE) == pytest.approx(many.flops / 100.0 / 1e6)
    assert roofline.bound_ms(many, MACHINE, threads=2) == pytest.approx(many.flops / 190.0 / 1e6)
    assert roofline.bound_ms(many, MACHINE, kind="int8") == pytest.approx(many.flops / 300.0 / 1e6)
    at = roofline.knee(BIG, stored, MACHINE)
    for T, memory in ((at - 1, True), (at, False)):
        w = roofline.total(roofline.work(BIG, T, T, stored))
        assert (w.intensity < roofline.ridge(MACHINE, w.bytes)) is memory


def test_a_pass_is_bound_by_what_its_stage_multiplies_and_keeps():
    stored = roofline.float_bytes(BIG)
    floats, integers, halves = (
        roofline.expect(s, BIG, stored, 512, 2, MACHINE) for s in ("quantized", "threads", "half_cache")
    )
    parts = roofline.work(BIG, 512, 512, stored)
    products, whole = parts["matmul"].flops, roofline.total(parts).flops
    assert floats.bound_ttft_ms == pytest.approx(whole / 100.0 / 1e6)
    assert integers.bound_ttft_ms == pytest.approx((products / 300.0 + (whole - products) / 100.0) / 1e6)
    assert integers.bound_ms_per_token == floats.bound_ms_per_token
    once = roofline.total(roofline.work(BIG, 1, 513, stored)).bytes
    fewer = 2 * 2 * 513 * BIG.G * BIG.hd * BIG.L  # two of the four bytes of each key's and value's number
    assert integers.bound_ms_per_token == pytest.approx(once / MACHINE.read(once) / 1e6)
    assert halves.bound_ms_per_token == pytest.approx((once - fewer) / MACHINE.read(once - fewer) / 1e6)
    assert halves.bound_ttft_ms == integers.bound_ttft_ms


def test_what_a_stage_multiplies_and_keeps_is_what_its_file_says(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text('OPERANDS = "int8"\n')
    names = ["naive", "quantized", "integer", "half_cache", "prefill", "llama.cpp", str(mine), "nothing.py"]
    kinds = ["float32", "float32", "int8", "int8", "float16", "int8", "int8", "float32"]
    assert [roofline.operands(n) for n in names] == kinds
    assert [roofline.cache_bytes(n) for n in names] == [4, 4, 4, 2, 2, 2, 2, 2]
    for stage in roofline.HALVED:
        assert "float16" in source_path(stage).read_text("utf-8")


def test_a_lone_token_is_expected_to_wait_for_all_keys_and_values():
    def attention(stage, S):
        return roofline.op_times(stage, BIG, 1, S, MACHINE)["attention"]

    assert attention("threads", 2) < attention("threads", 20000)
    read = {k: roofline.total(roofline.work(BIG, 1, 20000, roofline.float_bytes(BIG), kept=k)).bytes for k in (2, 4)}
    for stage, kept in (("threads", 4), ("half_cache", 2)):
        work = roofline.attention(1, 20000, BIG.H, BIG.G, BIG.hd, kept).times(BIG.L)
        fast = replace(MACHINE, fma_gflops=1e9, int8_gops=1e9)  # then only memory is left
        assert roofline.op_times(stage, BIG, 1, 20000, fast)["attention"] == pytest.approx(
            work.bytes / MACHINE.read(read[kept]) / 1e6
        )


def test_a_bound_never_falls_with_more_tokens():
    stored = roofline.float_bytes(BIG)
    least = [ms for _, _, ms in roofline.against_tokens("naive", BIG, stored, (1, 2, 8, 64, 256), MACHINE)]
    assert least == sorted(least)


def test_a_row_above_its_roof_is_an_error_not_a_number():
    w = Work(flops=0, bytes=GB)
    at_roof = GB / 20.0 / 1e6
    assert roofline.plausible(w, at_roof, MACHINE) == pytest.approx(1.0)
    assert roofline.plausible(w, at_roof / 1.04, MACHINE) == pytest.approx(1.04)
    with pytest.raises(roofline.AccountingError, match="106%"):
        roofline.plausible(w, at_roof / 1.06, MACHINE)
    with pytest.raises(roofline.AccountingError, match="GFLOP/s"):
        roofline.plausible(Work(10**9, 100), 9.0, MACHINE)
    with pytest.raises(roofline.AccountingError, match="clock"):
        roofline.plausible(w, 0.0, MACHINE)


def test_tokens_are_held_against_their_roof_each_and_a_gpus_by_their_mean(tiny):
    """A row that was fetched late leaves none to wait for, where the next step was queued ahead."""
    job = prepare(str(tiny), ids="1,2,3")

    def run(stage, *gaps):
        weights, kept = roofline.bytes_read(stage, job.gguf), roofline.cache_bytes(stage)
        token = roofline.total(roofline.work(job.gguf.config, 1, 5, weights, kept=kept))
        bound = roofline.bound_ms(token, MACHINE, kind=roofline.operands(stage))
        sample = SimpleNamespace(ttft_ms=1e6, gaps_ms=[bound * gap for gap in gaps])
        records.within_roof(job, stage, [sample], MACHINE)

    for stage in ("graph", "kv_cache"):
        run(stage)
        run(stage, 1.2, 1.2, 1.2)
        with pytest.raises(roofline.AccountingError, match="what this machine can do"):
            run(stage, 0.9, 0.9, 0.9)
    run("graph", 2.5, 0.01, 1.2)
    with pytest.raises(roofline.AccountingError, match="what this machine can do"):
        run("kv_cache", 2.5, 0.01, 1.2)


def test_a_stride_of_a_power_of_two_uses_few_cache_sets():
    held = roofline.held
    assert held(MACHINE.caches, 448, 64).levels == (1, 0, 0)  # seven of eight ways of each set
    assert held(MACHINE.caches, 1024, 64).levels == (0, 1, 0)
    assert held(MACHINE.caches, 7, 4096).levels == (1, 0, 0)  # one set of L1
    assert held(MACHINE.caches, 8, 4096).levels == (0, 1, 0)
    assert held(MACHINE.caches, 64, 4096).levels == (0, 1, 0)
    assert held(MACHINE.caches, 256, 4096).levels == (0, 0, 1)  # 16 sets of L2, eight ways: 128 lines
    assert held(MACHINE.caches, 256, 4160).levels == (1, 0, 0)
    assert held(MACHINE.caches, 10**6, 64).beyond == 1


def test_walks_cost_what_their_level_does():
    def level(i, lines, paged):
        return roofline.level_ns(MACHINE, i, lines, paged)

    assert [level(i, 256, False) for i in range(4)] == [1.0, 1.2, 2.0, 2.0]
    assert [level(2, lines, True) for lines in (256, 2048, 16384)] == pytest.approx([6.0, 7.0, 8.0])
    first, again = roofline.column_ns(MACHINE, 64, 576, 16)
    assert again == 1.0 and first == (15 * 1.0 + 2.0) / 16


def test_the_exact_walk_goes_before_the_curve():
    known = replace(MACHINE, walks=(Walk(2048, 2048, 5632, 9.0, 7.0), Walk(64, 2048, 5632, 3.0, 1.5)))
    assert roofline.matmul_ms("naive", known, 3, 2048, 5632) == pytest.approx(2048 * 5632 * (9.0 + 2 * 7.0) / 1e6)
    curve = roofline.matmul_ms("naive", MACHINE, 3, 2048, 5632)
    assert 0 < curve != roofline.matmul_ms("naive", known, 3, 2048, 5632)
    assert (2048, 2048, 5632) in roofline.walks(["naive", "tiling"], BIG)


def test_tiling_wins_where_columns_thrash_and_only_there():
    thin = SimpleNamespace(L=2, D=96, H=3, G=1, hd=32, F=208, V=112)

    def ratio(config):
        naive, tiled = (
            roofline.expect(s, config, roofline.float_bytes(config), 16, 1, MACHINE) for s in ("naive", "tiling")
        )
        return naive.ttft_ms / tiled.ttft_ms

    assert ratio(thin) == pytest.approx(1.0, abs=0.1)
    assert ratio(BIG) > 1.5


def test_an_expectation_follows_from_shape_and_machine():
    stored = roofline.float_bytes(SMALL)
    three = roofline.expect("naive", SMALL, stored, 9, 3, MACHINE)
    assert three == roofline.expect("naive", SMALL, stored, 9, 3, MACHINE)
    assert three.ttft_ms == pytest.approx(sum(three.ops.values()))
    ten, eleven = (sum(roofline.op_times("naive", SMALL, T, T, MACHINE).values()) for T in (10, 11))
    assert three.ms_per_token == pytest.approx((ten + eleven) / 2)  # nothing is kept, so all is computed again
    assert three.ms_per_token > three.ttft_ms > three.bound_ttft_ms > three.bound_ms_per_token > 0
    slow = replace(MACHINE, stride_ns=tuple((n, s, 2 * ns) for n, s, ns in MACHINE.stride_ns))
    slower = roofline.expect("naive", SMALL, stored, 9, 3, slow)
    assert slower.ops["matmul"] == pytest.approx(2 * three.ops["matmul"])
    one = roofline.expect("naive", SMALL, stored, 9, 1, MACHINE)
    assert one.ms_per_token is None and one.bound_ms_per_token is None
    assert roofline.expect("a stage without a model", SMALL, stored, 9, 3, MACHINE) is None


def test_a_long_text_is_expected_from_a_sample_of_its_tokens(monkeypatch):
    stored, passes = roofline.float_bytes(SMALL), []

    def pass_ms(stage, config, new, seen, machine, types):
        passes.append(seen)
        return float(seen)

    monkeypatch.setattr(roofline, "pass_ms", pass_ms)
    for n in (2, 3, 1000, 5000, 10**8):
        passes.clear()
        found = roofline.expect("kv_cache", SMALL, stored, 9, n, MACHINE)
        assert found.ms_per_token == pytest.approx(9 + n / 2, rel=1e-3)
        assert len(passes) == min(n - 1, len(passes)) <= roofline.SAMPLES
        assert n > 1000 or passes == list(range(10, 9 + n))  # every token of a short one


def test_a_stage_of_the_readers_own_is_expected_as_the_one_it_starts_from(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text('from stages.tiling import *\nfrom stages.tiling import PREVIOUS, TILE\nPREVIOUS = "tiling"\n')

    def tensor(nbytes):
        return SimpleNamespace(nbytes=nbytes, type=SimpleNamespace(name="F32"))

    layers = [SimpleNamespace(_asdict=lambda: {n: tensor(1000) for n in NAMES})] * 2
    weights = SimpleNamespace(layers=layers, output=tensor(5000))
    job = SimpleNamespace(gguf=SimpleNamespace(config=SMALL, weights=weights), ids=[1, 2, 3], room=4, threads=1)
    known, own = (roofline.expectation(s, job, MACHINE) for s in ("tiling", str(mine)))
    assert known["ttft_ms"] == own["ttft_ms"] > known["bound_ttft_ms"] == own["bound_ttft_ms"] > 0
    assert own["reason"] == f"as tiling: {known['reason']}" and own["stage"] == str(mine)
    assert roofline.sentence(["naive", "tiling"], job, MACHINE) == roofline.why(["naive", "tiling"], SMALL, 3, MACHINE)


TYPES = {name: {"Q4_1": 2} for name in ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")} | {
    "output": {"Q8_0": 1}
}


def test_types_split_matmuls_and_sum_to_the_file():
    mixed = {**TYPES, "w_v": {"Q4_K": 1, "Q6_K": 1}}
    every = roofline.matmuls(BIG, mixed)
    assert [(m.type, m.count) for m in every if m.name == "w_v"] == [("Q4_K", 1), ("Q6_K", 1)]
    assert len(every) == 9 and sum(m.count for m in every) == 15
    assert [roofline.block_bytes(m) for m in every if m.name == "w_v"] == [256 * 8 * 144, 256 * 8 * 210]
    assert {m.type for m in roofline.matmuls(BIG)} == {"F32"}


def test_file_types_count_layers():
    def tensor(name):
        return SimpleNamespace(type=SimpleNamespace(name=name))

    layers = [SimpleNamespace(_asdict=lambda t=t: {"attn_norm": tensor("F32"), "w_q": tensor(t)}) for t in "AAB"]
    weights = SimpleNamespace(layers=layers, output=tensor("C"))
    assert roofline.file_types(weights) == {"output": {"C": 1}, "w_q": {"A": 2, "B": 1}}


def test_lanes_fetch_each_weight_once_and_multiply_it_for_each_token():
    one, many = (roofline.lane_matmul(MACHINE, T, 1000, 1000) for T in (1, 300))
    assert one == pytest.approx((0.2, 0, 0.02))  # 1e6 weights; a row of out in L1
    assert many == pytest.approx((0.4, 0, 300 * 0.08))  # 1.2 MB of out
    near = roofline.lane_matmul(MACHINE, 1, 1000, 1000, held=MB)
    assert near.memory == pytest.approx(0.2 * 20 / 80)  # a model that L2 holds
    assert roofline.matmul_ms("kv_cache", MACHINE, 300, 1000, 1000) == pytest.approx(sum(many))


def test_a_pass_reads_floats_or_blocks_from_where_they_fit():
    tiny = SimpleNamespace(L=1, D=64, H=2, G=2, hd=32, F=128, V=256)
    types = {name: {"Q4_1": 1} for name in TYPES}
    weights = sum(m.K * m.N for m in roofline.matmuls(tiny))
    near = replace(MACHINE, read_gbs=((4 * weights - 1, 80.0), (4 * weights, 40.0), (GB, 20.0)))
    floats, blocks = (roofline.cost_of(s, tiny, 1, near, types).memory for s in ("simd", "quantized"))
    assert floats == pytest.approx(weights * 0.2 / 2 / 1e6)
    assert blocks == pytest.approx(weights * 20 / 32 / 80 / 1e6)


def test_blocks_are_read_and_unpacked_once_and_multiplied_for_each_token():
    cost = roofline.block_matmul(MACHINE, 40, 1024, 1000, "Q4_1")
    weights = 1.024
    assert cost == pytest.approx((weights * 20 / 32 / 20, weights * 0.1, weights * 40 * (0.05 + 2 / 1024)))
    alone = roofline.block_matmul(MACHINE, 1, 1024, 1000, "Q6_K")
    assert alone == pytest.approx((weights * 210 / 256 / 20, weights * 0.08, weights * (0.08 + 2 / 1024)))
    floats = roofline.block_matmul(MACHINE, 40, 1024, 1000, "F32")  # a row is one block, the longest there is
    assert floats == pytest.approx((weights * 4 / 20, weights * 0.01, weights * 40 * (0.03 + 2 / 1024)))


def test_a_stage_that_keeps_what_it_computed_pays_for_one_row():
    stored = roofline.float_bytes(BIG)
    simd, kept = (roofline.expect(s, BIG, stored, 64, 3, MACHINE) for s in ("simd", "kv_cache"))
    assert kept.ttft_ms == simd.ttft_ms
    assert kept.ms_per_token < simd.ms_per_token / 10
    ten, eleven = (sum(roofline.op_times("kv_cache", BIG, 1, S, MACHINE).values()) for S in (65, 66))
    assert kept.ms_per_token == pytest.approx((ten + eleven) / 2)
    assert "for a token after it reading weights decides" in kept.reason and ";" not in simd.reason


def test_quantized_is_expected_by_the_types_of_its_file():
    stored = roofline.float_bytes(BIG)
    short, long = (
        roofline.expect("quantized", BIG, stored, 9, 2, MACHINE, types={n: {t: 2} for n in TYPES})
        for t in ("Q4_1", "Q4_K")
    )
    assert short.ms_per_token > long.ms_per_token and short.ttft_ms > long.ttft_ms
    rows = roofline.against_tokens("quantized", BIG, stored, (9,), MACHINE, types={n: {"Q4_K": 2} for n in TYPES})
    assert rows[0][1] == pytest.approx(long.ttft_ms)


def test_other_ops_take_time_by_their_chains_and_functions():
    times, slow = (roofline.op_times("simd", BIG, 4, 4, m) for m in (MACHINE, replace(MACHINE, exp_ns=10.0)))
    assert times["attention"] == pytest.approx(10 * 32 * 2 * (64 * 1.0 + 5.0) / 1e6)  # 1 + 2 + 3 + 4 looks
    assert times["silu"] == pytest.approx(4 * 5632 * 2 * 5.0 / 1e6) and slow["silu"] == pytest.approx(2 * times["silu"])
    assert times["rms_norm"] == pytest.approx(5 * 4 * 2048 * 2 / 1e6)


def test_each_step_has_its_sentence():
    def why(*stages):
        return roofline.why(list(stages), BIG, 16, MACHINE, TYPES)

    simd = why("tiling", "simd")
    assert simd.startswith("Simd should be worth about ") and "`lesson compare tiling simd --shape pp1`" in simd
    kept = why("simd", "kv_cache")
    assert "computes 17 rows again" in kept and "reading weights decides" in kept and "-n 1`" in kept
    short = why("quantized", "kv_cache")
    assert "later here" in short and "--model tinyllama-shape --layers 2` shows blocks of 256" in short
    assert why("simd", "kv_cache", "quantized") == f"{kept} {short}"
    cheap = replace(MACHINE, unpack_ns=dict.fromkeys(MACHINE.unpack_ns, 0.01))
    long = roofline.why(["kv_cache", "quantized"], BIG, 16, cheap, {name: {"Q4_K": 2} for name in TYPES})
    assert "sooner here" in long and "`lesson compare kv_cache quantized` shows blocks of 32" in long


def test_a_roof_is_doubted_before_the_accounting_is(monkeypatch):
    w, ms = Work(flops=0, bytes=GB), GB / 30.0 / 1e6
    raised = replace(MACHINE, read_gbs=((GB, 30.0),))
    monkeypatch.setattr(roofline, "doubted", lambda machine: raised)
    assert roofline.plausible(w, ms, MACHINE) == pytest.approx(1.0)
    with pytest.raises(roofline.AccountingError, match="150%"):
        roofline.plausible(w, ms / 1.5, MACHINE)


NAMES = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")


def test_the_reason_names_the_limit():
    chain = replace(MACHINE, stride_ns=tuple((n, s, 1.0) for n, s, _ in MACHINE.stride_ns))
    loads = replace(MACHINE, stride_ns=tuple((n, s, 8.0) for n, s, _ in MACHINE.stride_ns))
    stored = roofline.float_bytes(BIG)
    assert roofline.expect("naive", BIG, stored, 9, 1, chain).reason.startswith("the chain of float additions decides")
    assert roofline.expect("naive", BIG, stored, 9, 1, loads).reason.startswith("loads decide")


def test_the_sentence_explains_and_points_to_the_other_answer():
    cost = {True: 8.0, False: 1.0}
    exact = [(lines, K, N) for lines, K, N in roofline.walks(["naive", "tiling"], BIG)]
    thrash = replace(MACHINE, walks=tuple(Walk(n, K, N, cost[n == K], cost[n == K]) for n, K, N in exact))
    even = replace(MACHINE, walks=tuple(Walk(*w, 1.0, 1.0) for w in exact))
    gain = roofline.why(["naive", "tiling"], BIG, 16, thrash)
    assert gain.startswith("Tiling should be worth about 8.0x here: a column of ")
    assert "2048 x 5632" in gain or "5632 x 2048" in gain
    assert "compare naive tiling`" in gain
    none = roofline.why(["naive", "tiling"], BIG, 16, even)
    assert "next to nothing" in none and "--model tinyllama-shape --layers 2" in none
    assert "in naive" in roofline.why(["naive", "naive"], BIG, 16, even)


def test_weights_count_in_powers_of_1000_and_caches_in_powers_of_1024():
    assert [roofline.megabytes(n) for n in (98_362_432, 4_131_000_000)] == ["98.4 MB", "4.13 GB"]
    assert [roofline.kilobytes(n) for n in (64, 6144, 32 * MB, GB)] == ["64 B", "6 KB", "32 MiB", "1 GiB"]
