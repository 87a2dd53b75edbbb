"""Identity, curves, storage; and that each micro-benchmark runs the instructions it claims to."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common import machine
from common.machine import KB, MB, Cache, Walk


def measured(**changes):
    """A machine with made-up measurements."""
    return replace(
        machine.identify(),
        read_gbs=((16 * KB, 100.0), (MB, 50.0)),
        read_all_gbs=((16 * KB, 200.0), (MB, 60.0)),
        latency_ns=((16 * KB, 2.0), (MB, 4.0)),
        page_ns=((16, 2.0), (32, 2.1), (64, 2.0), (128, 9.0), (256, 9.0)),
        stride_ns=((64, 64, 1.0),),
        fp_add_ns=0.5,
        fetch_ns=((1, 64, 0.4), (1, 4096, 0.2), (8, 64, 0.8), (8, 4096, 0.2)),
        tile_ns=((KB, 0.02), (MB, 0.04)),
        dot_ns=((32, KB, 0.04), (32, MB, 0.08), (256, KB, 0.03), (256, MB, 0.06)),
        dot_chain_ns=((32, 0.4), (256, 0.1)),
        unpack_ns={"Q4_0": 0.07},
        walks=(Walk(64, 576, 1536, 2.0, 1.0),),
        **changes,
    )


def test_identity_names_this_machine():
    me = machine.identify()
    assert me.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", me.slug)
    assert 1 <= me.threads <= me.cores
    assert me.memory > 100 * MB
    assert {"python", "numpy", "numba", "llvmlite"} <= me.versions.keys()
    assert [c.level for c in me.caches] == sorted(c.level for c in me.caches)
    assert all(c.ways * c.sets <= c.bytes // 32 for c in me.caches)


def test_a_name_that_tells_no_model_is_told_apart(monkeypatch):
    monkeypatch.setattr(machine.llvm, "get_host_cpu_name", lambda: "znver3")
    monkeypatch.setattr(machine, "sold_as", lambda: "AMD EPYC")
    assert machine.identify().slug == "amd-epyc-znver3"
    monkeypatch.setattr(machine, "sold_as", lambda: "AMD EPYC 7763 64-Core Processor")
    assert machine.cpu_name() == "AMD EPYC 7763 64-Core Processor"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core-processor"),
        ("  Apple M2 Pro ", "apple-m2-pro"),
        ("«»", "unknown"),
    ],
)
def test_slug(name, want):
    assert machine.slug(name) == want


def test_quota_is_read_from_either_control_group(tmp_path):
    assert machine.cgroup_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.cgroup_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    assert machine.cgroup_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cgroup_quota(tmp_path) is None


def test_a_quota_limits_threads():
    me = replace(machine.identify(), cores=8, affinity=tuple(range(6)))
    assert replace(me, quota=None).threads == 6
    assert replace(me, quota=2.5).threads == 2
    assert replace(me, quota=0.5).threads == 1


def test_caches_are_read_from_the_system(tmp_path):
    for i, (level, kind, size, ways) in enumerate(
        [(1, "Data", "48K", 12), (1, "Instruction", "64K", 16), (2, "Unified", "2048K", 16), (3, "Unified", "30M", 0)]
    ):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in {"level": level, "type": kind, "size": size, "ways_of_associativity": ways}.items():
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "index9").mkdir()  # one that tells nothing
    want = (Cache(1, 48 * KB, 12, 64), Cache(2, 2 * MB, 16, 2048), Cache(3, 30 * MB, 30 * MB // 64, 1))
    assert machine.caches(tmp_path) == want
    assert machine.caches(tmp_path / "none") == ()


def test_a_curve_is_interpolated_by_ratio_and_flat_beyond_its_ends():
    points = ((10, 1.0), (1000, 3.0))
    assert [machine.curve(points, x) for x in (1, 10, 100, 1000, 10**6)] == pytest.approx([1, 1, 2, 3, 3])


def test_readings_come_from_the_curve_of_as_many_cores():
    m = measured()
    assert m.read(1) == 100.0 and m.read(10 * MB) == 50.0
    assert m.read(1, threads=2) == 200.0


def test_rates_of_lanes_depend_on_where_their_operands_live():
    m = measured()
    assert [m.tile(n) for n in (1, KB, MB)] == pytest.approx([0.02, 0.02, 0.04])
    assert m.dot(32, 100, KB) == 0.04 and m.dot(256, 100, MB) == pytest.approx(0.06)
    assert m.dot(32, 1, KB) == 0.4 and m.dot(32, 4, KB) == pytest.approx(0.1)  # a lone row waits for its own sums
    assert m.dot(64, 100, KB) == 0.04 and m.dot(5632, 100, KB) == 0.03  # the nearest length that was measured
    assert [m.fetch(T, 64, MB) for T in (1, 8, 99)] == pytest.approx([0.4, 0.8, 0.8])
    assert m.fetch(8, 4096, MB) == pytest.approx(0.2)
    assert m.fetch(1, 64, 16 * KB) == pytest.approx(0.2)  # L1 reads twice as fast as the last point


def test_the_knee_is_where_pages_cost_more_than_their_lines():
    assert measured().tlb_pages == 64
    flat = replace(measured(), page_ns=tuple((n, 2.0) for n in machine.PAGES))
    assert flat.tlb_pages == machine.PAGES[-1]


def test_json_round_trip():
    m = measured()
    assert machine.Machine.from_json(json.loads(json.dumps(m.to_json()))) == m
    with pytest.raises(TypeError):
        machine.Machine.from_json({**m.to_json(), "unheard of": 1})


def test_what_was_measured_is_kept_and_only_missing_walks_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(machine, "make_buffer", lambda: None)
    monkeypatch.setattr(machine, "measure_all", lambda buffer: asked.append("all") or measured())

    def walks(buffer, shapes):
        asked.append(list(shapes))
        return tuple(Walk(*s, 3.0, 2.0) for s in shapes)

    monkeypatch.setattr(machine, "exact_walks", walks)
    first = machine.measure()
    assert machine.measure() == first and asked == ["all"]
    second = machine.measure(walks=[(64, 576, 1536), (7, 8, 9), (7, 8, 9)])
    assert asked == ["all", [(7, 8, 9)]]
    assert second.walk(7, 8, 9) == Walk(7, 8, 9, 3.0, 2.0) and second.walk(64, 576, 1536) == first.walks[0]
    assert machine.measure(walks=[(7, 8, 9)]) == second
    assert machine.measure(force=True) == first and asked[-1] == "all"
    machine.store().write_text('{"name": ')  # cut short
    assert machine.measure() == first and asked[-2:] == ["all", "all"]


def test_a_doubted_machine_is_measured_once_more_and_keeps_its_higher_roofs(tmp_path, monkeypatch):
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path))
    asked = []

    def roofs(buffer, threads):
        asked.append(threads)
        higher = {"read_gbs": ((16 * KB, 90.0), (MB, 70.0)), "fma_gflops": 9.0, "fma_all_gflops": 7.0}
        return {**higher, "read_all_gbs": ((16 * KB, 1.0),), "int8_gops": None, "fp_add_ns": 9.0}

    monkeypatch.setattr(machine, "make_buffer", lambda: None)
    monkeypatch.setattr(machine, "roofs", roofs)
    first = measured(fma_gflops=5.0, fma_all_gflops=8.0)
    assert machine.doubted(first) == first and not asked  # nothing is stored
    machine.save(first, machine.store())
    other = replace(first, stride_ns=((64, 64, 2.0),))
    assert machine.doubted(other) == other and not asked
    raised = machine.doubted(first)
    want = {"read_gbs": ((16 * KB, 100.0), (MB, 70.0)), "fma_gflops": 9.0, "fma_all_gflops": 8.0}
    assert raised == replace(first, **want) and len(asked) == 1
    assert machine.stored() == machine.doubted(first) == raised and len(asked) == 1
    assert (machine.raised(first), machine.raised(other)) == (raised, other)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(machine, "make_buffer", lambda: None)
    monkeypatch.setattr(machine, "measure_all", lambda buffer: measured())
    assert machine.measure() == measured()


def test_best_takes_the_least_over_interleaved_rounds():
    order, times = [], {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 6.0, 4.0])}
    runs = {k: (lambda k=k: order.append(k) or next(times[k])) for k in times}
    assert machine.best(runs, rounds=3) == {"a": 1.0, "b": 4.0}
    assert order == ["a", "b"] * 3


# The kernels do what they say


@pytest.mark.parametrize(("count", "step", "jitter"), [(16, 8, 0), (1024, 8, 0), (64, 512, 1), (1, 8, 0)])
def test_links_form_one_cycle_through_every_place(count, step, jitter):
    nodes = np.full(count * step, -1, np.int64)
    machine.link(nodes, count, step, jitter)
    at, seen = 0, set()
    for _ in range(count):
        seen.add(at)
        at = int(nodes[at])
    assert at == 0 and len(seen) == count
    assert len({i // step for i in seen}) == count
    assert all(i % 8 == 0 for i in seen)
    assert machine.chase(nodes, 0, count) == 0


def test_jitter_spreads_pages_over_cache_sets():
    nodes = np.full(64 * 512, -1, np.int64)
    machine.link(nodes, 64, 512, 1)
    assert len({i % 512 // 8 for i in np.flatnonzero(nodes >= 0)}) == 64


def test_read_reads_every_float_as_often_as_asked():
    groups = 5
    a = np.zeros(groups * machine.GROUP // 4, np.float32)
    a[:: machine.READ_LANES] = range(groups * machine.READ_CHAINS)  # lane 0, which the sum returns
    assert machine.read(a.ctypes.data, groups, 3) == 3 * a.sum()


def test_walks_are_column_sums():
    rng = np.random.default_rng(0)
    w, x = rng.random((9, 21), np.float32), rng.random(9, np.float32)
    out, part = np.zeros(21, np.float32), np.zeros(21, np.float32)
    machine.walk_columns(x, w, out, 3, 10, 2)
    assert out[3:10] == pytest.approx(2 * (x @ w[:, 3:10]), rel=1e-5) and not out[:3].any() and not out[10:].any()
    machine.walk_rows(x, w, part, 2, 7, 3, 10, 2)
    assert part[3:10] == pytest.approx(2 * (x[2:7] @ w[2:7, 3:10]), rel=1e-5)


def test_walks_are_measured_at_every_shape(monkeypatch):
    monkeypatch.setattr(machine, "ROUNDS", 1)
    shapes = [(40, 40, 24), (8, 40, 24), (5, 5, 3)]
    walks = machine.exact_walks(np.ones(1 << 16, np.float32), shapes)
    assert [(w.lines, w.K, w.N) for w in walks] == shapes
    assert all(0 < v < math.inf for w in walks for v in (w.cold_ns, w.warm_ns))
    (cut,) = machine.exact_walks(np.ones(1 << 12, np.float32), [(400, 400, 24)])  # 38 KB, in a buffer of 16 KB
    assert cut.lines == 400 and cut.warm_ns > 0


def test_tiles_are_products_of_matrices():
    rng = np.random.default_rng(0)
    x, w = rng.random((3, 16), np.float32), rng.random((16, 32), np.float32)
    out = np.zeros((3, 32), np.float32)
    machine.tile_columns(x, w, out, 2)
    assert out == pytest.approx(2 * x @ w, rel=1e-5)


@pytest.mark.parametrize("length", machine.DOT_LENGTHS)
def test_dots_are_sums_over_lanes(length):
    rng = np.random.default_rng(0)
    x, block = rng.random((3, 2 * length), np.float32), rng.random(length, np.float32)
    sums, out = np.zeros((3, 16), np.float32), np.zeros(3, np.float32)
    machine.dot_blocks(x, block, sums, 2)
    machine.row_ends(sums, out, 5)
    assert out == pytest.approx(2 * x @ np.tile(block, 2), rel=1e-5) and not sums.any()


def test_every_block_is_unpacked_and_nothing_beyond():
    kind = machine.TYPES["Q8_0"]
    raw = np.zeros(3 * kind.bytes + 5, np.uint8)
    raw[2 * kind.bytes : 2 * kind.bytes + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    raw[2 * kind.bytes + 2 : 3 * kind.bytes] = 4
    out = np.zeros(32, np.float32)
    machine.unpack_blocks(kind.id, raw, kind.bytes, out, 1)
    assert (out == 2).all()  # the third block, unpacked last


def test_arrays_start_where_numba_may_start_one():
    assert 0 in machine.starts() and all(16 <= at < machine.LINE for at in list(machine.starts())[1:])
    for at in machine.starts():
        a = machine.array((3, 5), at)
        assert a.shape == (3, 5) and a.ctypes.data % machine.LINE == at and (a == np.float32(1e-3)).all()
        a, b = machine.neighbours([(3, 5), (16,)], at)
        assert (b.ctypes.data - at) % machine.LINE == 0 and 0 <= b.ctypes.data - a.ctypes.data - a.nbytes < machine.LINE


def test_lane_rates_know_every_type_and_reach(monkeypatch):
    monkeypatch.setattr(machine, "ROUNDS", 1)
    monkeypatch.setattr(machine, "REACHES", (24 * KB, 48 * KB))
    monkeypatch.setattr(machine, "FETCHED", (192, 768))
    rates = machine.lane_rates(np.ones(8 * MB // 4, np.float32))
    assert rates["unpack_ns"].keys() == set(machine.UNPACKED)
    assert [n for n, _ in rates["tile_ns"]] == [24 * KB, 48 * KB]
    assert [p[:2] for p in rates["dot_ns"]] == [(n, r) for n in machine.DOT_LENGTHS for r in (24 * KB, 48 * KB)]
    assert [p[:2] for p in rates["fetch_ns"]] == [(t, 4 * n) for t in (1, machine.TOKENS) for n in (192, 768)]
    times = [p[-1] for key in ("tile_ns", "dot_ns", "dot_chain_ns") for p in rates[key]]
    assert all(0 < ns < 1e6 for ns in (*times, rates["exp_ns"], rates["row_end_ns"], *rates["unpack_ns"].values()))
    machine.Machine.from_json(json.loads(json.dumps(replace(measured(), **rates).to_json())))


def test_the_best_8_bit_instruction_is_the_first_that_the_cpu_has(monkeypatch):
    for has, want in (({"avx2": True, "avxvnni": True, "avx512vnni": False}, "avxvnni"), ({"avx2": True}, "avx2")):
        monkeypatch.setattr(machine.llvm, "get_host_cpu_features", lambda has=has: has)
        assert machine.int8_instruction.__wrapped__().feature == want
    monkeypatch.setattr(machine.llvm, "get_host_cpu_features", dict)
    assert machine.int8_instruction.__wrapped__() is None


def test_curves_have_every_point_the_buffer_holds(monkeypatch):
    monkeypatch.setattr(machine, "ROUNDS", 1)
    monkeypatch.setattr(machine, "PAGES", (16, 32))
    buffer = np.ones(16 * KB, np.float32)
    for threads in (1, 2):
        assert [n for n, _ in machine.read_curve(buffer, threads)] == [16 * KB, 32 * KB, 64 * KB]
    assert all(lines * stride <= 64 * KB for lines, stride, _ in machine.stride_curve(buffer))
    assert [n for n, _ in machine.page_curve()] == [16, 32]
    rates = machine.arithmetic(2)
    assert all(v > 0 for v in rates.values() if v is not None)


ASSEMBLY = """
import json, os, sys
import numpy as np
from common import machine
a = np.ones(4096, np.float32)
machine.read(a.ctypes.data, 2, 1)
machine.fma(2, np.float32(1), 0)
machine.scalar_multiply_add(a, 2)
machine.add_chain(2, np.float32(1))
machine.walk_columns(a, a.reshape(64, 64), a, 0, 4, 1)
machine.walk_rows(a, a.reshape(64, 64), a, 1, 4, 0, 4, 1)
machine.tile_columns(a[:24].reshape(3, 8), a[:256].reshape(8, 32), a[:96].reshape(3, 32), 1)
machine.dot_blocks(a[:96].reshape(3, 32), a[:32], a[:48].reshape(3, 16), 1)
names = ("read", "fma", "scalar_multiply_add", "add_chain", "walk_columns", "walk_rows", "tile_columns", "dot_blocks")
print(json.dumps({n: "".join(getattr(machine, n).inspect_asm().values()) for n in names}))
"""


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """What the compiler made of the kernels, compiled anew: a kernel from the cache shows no code."""
    env = {**os.environ, "LESSON_CACHE": str(tmp_path_factory.mktemp("cache"))}
    root = Path(machine.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLY], cwd=root, env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_packed_benchmarks_are_packed(assembly):
    """x86 names packed adds addps; AArch64 writes them with .4s."""
    assert re.search(r"addps|fadd\s+v\d+\.4s", assembly["read"])
    assert len(re.findall(r"(?:vfmadd\d+|mul)ps|fmla\s+v\d+\.4s", assembly["fma"])) >= machine.FMA_CHAINS
    for name in ("tile_columns", "dot_blocks"):
        assert re.search(r"(?:vfmadd\d+|mul)ps|fmla\s+v\d+\.4s", assembly[name]), name


def test_scalar_benchmarks_are_scalar(assembly):
    for name in ("scalar_multiply_add", "add_chain", "walk_columns", "walk_rows"):
        assert not re.search(r"(add|mul|fmadd\d+)ps|f(add|mul|mla)\s+v\d+\.4s", assembly[name]), name
        assert re.search(r"addss|fadd\s+s\d", assembly[name]), name
