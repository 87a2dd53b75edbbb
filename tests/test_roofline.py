"""Formulas against counted loops, bounds, and expectations on a made-up machine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common import roofline
from common.machine import GB, KB, MB, Cache, Machine, Walk
from common.roofline import Work

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
    assert roofline.MATMUL_MS["naive"](known, 3, 2048, 5632) == pytest.approx(2048 * 5632 * (9.0 + 2 * 7.0) / 1e6)
    curve = roofline.MATMUL_MS["naive"](MACHINE, 3, 2048, 5632)
    assert 0 < curve != roofline.MATMUL_MS["naive"](known, 3, 2048, 5632)
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


def test_a_stage_of_the_readers_own_is_expected_as_the_one_it_starts_from(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text('from stages.tiling import *\nfrom stages.tiling import PREVIOUS, TILE\nPREVIOUS = "tiling"\n')
    layers = [SimpleNamespace(_asdict=lambda: {n: SimpleNamespace(nbytes=1000) for n in NAMES})] * 2
    weights = SimpleNamespace(layers=layers, output=SimpleNamespace(nbytes=5000))
    job = SimpleNamespace(gguf=SimpleNamespace(config=SMALL, weights=weights), ids=[1, 2, 3], n=4, threads=1)
    known, own = (roofline.expectation(s, job, MACHINE) for s in ("tiling", str(mine)))
    assert known["ttft_ms"] == own["ttft_ms"] > known["bound_ttft_ms"] == own["bound_ttft_ms"] > 0
    assert own["reason"] == f"as tiling: {known['reason']}" and own["stage"] == str(mine)
    assert roofline.sentence(["naive", "tiling"], job, MACHINE) == roofline.why(["naive", "tiling"], SMALL, 3, MACHINE)


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
