"""Where a profile says the time goes: on a clock that only ops move, with counters that are made up."""

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from common import cold, events, harness, profile, roofline, show
from common.harness import Request
from common.job import prepare
from common.machine import GB, KB, MB, Cache, Machine
from common.model import open_model
from common.profile import Call, Ledger, Stamps, exclusive, summed
from common.roofline import AccountingError, Work
from tests.helpers import copy_of

IDS = [1, 17, 300, 4, 5]
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
    fp_add_ns=1.0,
    scalar_gflops=4.0,
    fma_gflops=100.0,
    fma_all_gflops=190.0,
    call_us=0.5,
)
# Ops that take 100, 7, 20 and 3 ns on a clock that nothing else moves but 5 ns of Python in forward.
STAGE = """
def matmul(x, w):
    clock.now += 100
    return x @ w

def mul(a, b):
    clock.now += 7
    return a * b

def silu(x):
    clock.now += 20
    return x

def argmax(x):
    clock.now += 3
    return 0

def dot(a, b):
    return a @ b

class Helper:
    pass

def load(gguf, context, threads):
    return None

def forward(model, ids, start):
    clock.now += 5
    Helper()
    h = silu(matmul(np.ones((len(ids), 4), np.float32), model.weights.layers[0].w_q))
    return mul(mul(h, h), h)

def logits(model, hidden):
    return matmul(hidden, model.weights.output)

def generate(model, ids, n, choose=argmax):
    for _ in range(n):
        row = logits(model, forward(model, ids, 0)[-1:])[0]
        yield choose(row), row
        ids = [0]
"""


class Layer(SimpleNamespace):
    def _asdict(self):
        return vars(self)


def a_model():
    layer = Layer(w_q=np.ones((4, 4), np.float32), ffn_norm=np.ones(4, np.float32))
    return SimpleNamespace(weights=SimpleNamespace(layers=[layer], output=np.ones((4, 9), np.float32)), config=None)


@pytest.fixture
def clock():
    return SimpleNamespace(now=0)


@pytest.fixture
def stage(clock):
    made = ModuleType("made_up")
    vars(made).update(clock=clock, np=np)
    exec(STAGE, vars(made))
    return made


def steps_of(stage, clock, n=3) -> list:
    model = a_model()
    ledger = Ledger(stage, lambda: (clock.now,), profile.weights_held(model))
    try:
        return profile.one_round(stage, model, [1, 2, 3], n, ledger)
    finally:
        ledger.undo()


def test_what_python_calls_is_timed_and_nothing_else(stage):
    assert set(profile.called(stage)) == {"matmul", "mul", "silu", "argmax"}


def test_a_pass_is_its_ops_and_the_python_between_them(stage, clock):
    made = summed([steps_of(stage, clock)[:1]], 3, 0, 0)
    rows = {(row["op"], row["weight"]): (row["calls"], row["ms"] * 1e6) for row in made["rows"]}
    assert rows == {
        ("matmul", "w_q"): (1, pytest.approx(100)),
        ("matmul", "output"): (1, pytest.approx(100)),
        ("mul", None): (2, pytest.approx(14)),
        ("silu", None): (1, pytest.approx(20)),
        ("argmax", None): (1, pytest.approx(3)),
    }
    assert made["ms"] * 1e6 == pytest.approx(237 + 5)


def test_decode_is_a_mean_over_its_steps(stage, clock):
    made = summed([steps_of(stage, clock, n=4)[1:]], 1, 0, 0)
    assert (made["steps"], made["ms"] * 1e6) == (3, pytest.approx(242))
    assert {row["op"]: row["calls"] for row in made["rows"]} == {"matmul": 1, "mul": 2, "silu": 1, "argmax": 1}


def test_work_is_that_of_the_shapes_and_of_the_weights_as_held(stage, clock):
    made = summed([steps_of(stage, clock)[:1]], 3, 0, 0)
    found = {(row["op"], row["weight"]): Work(row["flops"], row["bytes"]) for row in made["rows"]}
    assert found == {
        ("matmul", "w_q"): roofline.matmul(3, 4, 4),
        ("matmul", "output"): roofline.matmul(1, 4, 9),
        ("mul", None): roofline.mul(3, 4).times(2),
        ("silu", None): roofline.silu(3, 4),
        ("argmax", None): roofline.argmax(9),
    }


def test_the_wrappers_own_time_is_taken_out(stage, clock):
    steps = steps_of(stage, clock)[:1]
    plain, less = summed([steps], 3, 0, 0), summed([steps], 3, 2, 1)
    assert (plain["ms"] - less["ms"]) * 1e6 == pytest.approx(6 * 3)  # six calls
    assert less["wrapper_ms"] * 1e6 == pytest.approx(18)
    mul = [next(row["ms"] for row in made["rows"] if row["op"] == "mul") for made in (plain, less)]
    assert (mul[0] - mul[1]) * 1e6 == pytest.approx(2 * 2)


def test_a_wrapper_costs_something_and_leaves_no_trace(stage):
    import time

    before = dict(vars(stage))
    ledger = Ledger(stage, lambda: (time.perf_counter_ns(),), {})
    assert vars(stage)["matmul"] is not before["matmul"]
    between, around = ledger.cost()
    assert between >= 0 and around > 0
    assert ledger.taken(1, 1) == []
    ledger.undo()
    assert vars(stage) == before


def test_an_op_within_an_op_is_counted_once():
    inner = Call("matmul", None, (10,), (40,), None)
    outer = Call("attention", None, (5,), (50,), None)
    after = Call("add", None, (50,), (52,), None)
    assert [own for _, own in exclusive([inner, outer, after])] == [[30], [15], [2]]


def test_the_round_of_median_time_is_shown(stage, clock):
    rounds = []
    for extra in (500, 0, 100):
        steps = steps_of(stage, clock)[:1]
        rounds.append([steps[0]._replace(after=(steps[0].after[0] + extra,))])
    made = summed(rounds, 3, 0, 0)
    assert made["ms"] * 1e6 == pytest.approx(342)
    assert sorted(ms * 1e6 for ms in made["samples_ms"]) == pytest.approx([242, 342, 742])


def test_a_stage_that_stamps_a_clock_itself_is_read_from_its_stamps(tiny):
    config = open_model(tiny).config
    array = np.array([[900, 15], [50, 2], [7, 1]])
    stage = SimpleNamespace(PHASES=("matmul", "attention", "barrier"), stamps=lambda model: array)
    held = {i: (m.name, 4 * m.K * m.N * m.count) for i, m in enumerate(roofline.matmuls(config))}
    ledger = Stamps(stage, SimpleNamespace(config=config), lambda: (0,), held)
    steps = [profile.Step((0,), (1000,), ledger.taken(1, 9), {"minor": 0, "major": 0}, 1, None)]
    assert not array.any()  # the next step begins at zero
    made = summed([steps], 1, *ledger.cost())
    assert {r["op"]: (r["calls"], round(r["ms"] * 1e6)) for r in made["rows"]} == {
        "matmul": (15, 900),
        "attention": (2, 50),
        "barrier": (1, 7),
    }
    want = roofline.work(config, 1, 9, roofline.float_bytes(config))
    assert [made["rows"][i]["flops"] for i in (0, 1)] == [want["matmul"].flops, want["attention"].flops]
    assert made["rows"][2]["flops"] is None


# ---- real stages -----------------------------------------------------------------------------------------------


def request(tiny, stage: str, **changes) -> Request:
    return Request(**{"stage": stage, "model": str(tiny), "ids": IDS, "n": 3, **changes})


@pytest.fixture(scope="module")
def found(tiny):
    """Profiles of a stage that unpacks, and of one that keeps blocks."""
    return {name: profile.profile_run(request(tiny, name)) for name in ("naive", "quantized")}


@pytest.mark.parametrize("name", ["naive", "quantized"])
def test_calls_flops_and_bytes_are_the_models(found, tiny, name):
    gguf = open_model(tiny)
    config, T, L = gguf.config, len(IDS), gguf.config.L
    held = roofline.float_bytes(config) if name == "naive" else roofline.file_bytes(gguf.weights)
    assert found[name]["weight_bytes"] == held
    for kind, (new, seen) in {"prefill": (T, T), "decode": (1, T + 1)}.items():
        rows = found[name][kind]["rows"]
        calls = {op: sum(r["calls"] for r in rows if r["op"] == op) for op in {r["op"] for r in rows} - {"embed"}}
        assert calls == {
            "matmul": 7 * L + 1, "attention": L, "rms_norm": 2 * L + 1, "rope": 2 * L, "silu": L, "mul": L,
            "add": 2 * L, "argmax": 1,
        }  # fmt: skip
        if kind == "decode" and name == "naive":
            continue  # it computes the whole text again, one token longer at each step
        want = roofline.work(config, new, seen, held)
        for op in (
            "matmul",
            "silu",
            "mul",
            "add",
            "argmax",
            *(("rms_norm", "rope", "attention") * (kind == "prefill")),
        ):
            done = [Work(r["flops"], r["bytes"]) for r in rows if r["op"] == op]
            assert roofline.total(dict(enumerate(done))) == want[op], op


@pytest.mark.parametrize("name", ["naive", "quantized"])
def test_ops_and_what_lies_between_them_make_the_whole_pass(found, tiny, name):
    job = prepare(str(tiny), ids="1,2", n=3)
    for kind in ("prefill", "decode"):
        made = profile.judged(found[name][kind], job, found[name], fast(MACHINE), None)
        assert sum(r["ms"] for r in made["rows"]) + made["outside_ms"] == pytest.approx(made["ms"])
        assert sum(r["share"] for r in made["rows"]) == pytest.approx(made["coverage"])
        assert sum(step["ms"] for step in made["waterfall"]) == pytest.approx(made["ms"])


def fast(machine):
    """The machine a million times as fast, so that no time measured elsewhere can be too good for it."""
    curve = tuple((size, gbs * 1e6) for size, gbs in machine.read_gbs)
    return replace(machine, read_gbs=curve, fma_gflops=machine.fma_gflops * 1e6)


def test_the_stage_is_as_it_was_afterwards(found):
    from common import cpu_ops
    from common.stage import load_stage

    stage = load_stage("naive")
    assert stage.add is cpu_ops.add
    assert hasattr(stage.matmul, "py_func")


def test_ops_hold_nearly_all_of_a_pass_when_only_they_move_the_clock(tiny, monkeypatch):
    """On a real stage with a clock that a call of any op moves by 1 µs, and the rest by nothing."""
    from common import stage as staging

    loaded = staging.load_stage("tiling")
    clock = SimpleNamespace(now=0)
    model = loaded.load(open_model(tiny), 64, 1)
    for _ in loaded.generate(model, IDS, 2):
        pass  # compiled while the names are the ops themselves

    def ticking(op):
        def run(*inputs):
            clock.now += 1000
            return op(*inputs)

        return run

    for name in profile.called(loaded):
        monkeypatch.setitem(vars(loaded), name, ticking(vars(loaded)[name]))
    ledger = Ledger(loaded, lambda: (clock.now,), profile.weights_held(model))
    steps = profile.one_round(loaded, model, IDS, 2, ledger)
    ledger.undo()
    made = summed([steps[:1]], len(IDS), 0, 0)
    assert sum(r["ms"] for r in made["rows"]) / made["ms"] >= profile.ENOUGH
    assert made["ms"] * 1e3 == pytest.approx(sum(r["calls"] for r in made["rows"]))


# ---- held against the machine ----------------------------------------------------------------------------------


def a_pass(ms=100.0, matmul_ms=80.0, T=1, **row) -> dict:
    gflop = 2 * 10**8
    matmul = {"op": "matmul", "weight": "w_q", "calls": 30, "ms": matmul_ms, "flops": gflop, "bytes": 5 * 10**8}
    add = {"op": "add", "weight": None, "calls": 60, "ms": 10.0, "flops": 60 * 600, "bytes": 60 * 7200}
    rows = [{"counts": [], **matmul, **row}, {"counts": [], **add}]
    faults = {"minor": 1234, "major": 5}
    return {"new_tokens": T, "steps": 7, "ms": ms, "samples_ms": [ms] * 5, "wrapper_ms": 1.5, "page_faults": faults,
            "rows": rows}  # fmt: skip


def a_record(tiny, **changes) -> dict:
    job = prepare(str(tiny), ids="1,2", n=3)
    worker = {
        "prefill": a_pass(T=9), "decode": a_pass(), "page_faults_load": {"minor": 107_000, "major": 3},
        "memory": {"peak_mb": 1024.0, "anon_mb": 800.0, "file_mb": 190.5}, "counters": None,
        "no_counters": "this machine shows no hardware counters, as most virtual machines", "clock_ghz": 3.5,
        "weight_bytes": roofline.float_bytes(job.gguf.config), "output_ids": [1, 2, 3], **changes,
    }  # fmt: skip
    estimate = {"instructions_per_multiply_add": 4.4, "clock_ghz": 3.5}
    judged = {k: worker[k] and profile.judged(worker[k], job, worker, MACHINE, estimate) for k in ("prefill", "decode")}
    return {**profile.heading("naive", job, MACHINE), **worker, **judged, "estimate": estimate}


def test_a_row_is_rated_by_its_formulas():
    found = {"counters": None, "clock_ghz": 3.5}
    row = a_pass()["rows"][0]
    rated = profile.rated(row, 100.0, found, MACHINE, 1, {"instructions_per_multiply_add": 7.0})
    assert rated["share"] == 0.8
    assert rated["gbs"] == pytest.approx(0.5 / 0.08)
    assert rated["gflops"] == pytest.approx(0.2 / 0.08)
    assert rated["bound_ms"] == pytest.approx(0.5 / MACHINE.read(5 * 10**8) * 1e3)
    assert rated["ipc"] == pytest.approx(7 * 10**8 / (80e6 * 3.5))  # 1e8 multiply-adds of seven instructions


def test_counted_instructions_are_preferred_to_an_estimate():
    found = {"counters": ["cycles", "instructions", "cache misses", "branch misses"], "clock_ghz": 3.5}
    row = a_pass(counts=[1000, 2500, 7, 1])["rows"][0]
    assert profile.rated(row, 100.0, found, MACHINE, 1, None)["ipc"] == 2.5


def test_a_time_no_machine_could_reach_is_an_error():
    with pytest.raises(AccountingError, match="wrong"):
        profile.rated(a_pass(matmul_ms=1.0)["rows"][0], 100.0, {"counters": None}, MACHINE, 1, None)


def test_the_waterfall_names_what_keeps_a_pass_from_the_bound(tiny):
    made = a_record(tiny)["decode"]
    steps = {step["step"]: step["ms"] for step in made["waterfall"]}
    job = prepare(str(tiny), ids="1,2", n=3)
    file, held = roofline.file_bytes(job.gguf.weights), roofline.float_bytes(job.gguf.config)
    one, four = (
        roofline.bound_ms(roofline.work(job.gguf.config, 1, 1, b)["matmul"], MACHINE) for b in (file, held)
    )  # fmt: skip
    assert steps["the file's weights at peak"] == pytest.approx(one)
    assert steps["held in more bytes"] == pytest.approx(four - one)
    assert steps["the text computed again"] == pytest.approx(0.5 / MACHINE.read(5 * 10**8) * 1e3 - four)
    assert steps["calls, and Python between them"] == pytest.approx(90 * 0.0005 + 10)
    assert steps["other ops"] == pytest.approx(10 - 60 * 0.0005)
    assert sum(steps.values()) == pytest.approx(100)


def lines(shown) -> list[str]:
    page = show.console()
    with page.capture() as held:
        for piece in shown:
            page.print(piece)
    return held.get().splitlines()


def test_a_profile_fits_eighty_columns(tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = lines(profile.render(a_record(tiny)))
    assert max(map(len, text)) <= 80
    assert any(line.startswith("matmul") and "~" in line for line in text)  # an estimate is marked as one
    assert any("4.4 instructions a multiply-add" in " ".join(text[i : i + 3]) for i in range(len(text)))
    assert any("(between ops)" in line and "10.0%" in line for line in text)
    assert "Only 90% of the time lies inside ops: the rest is Python and calls." in text
    assert any("107,000" in line for line in text)
    assert "matmul's own inefficiency" in "\n".join(text)


def test_a_single_token_has_no_decode(tiny):
    record = a_record(tiny, decode=None)
    assert record["decode"] is None
    assert not any("a token after it" in line for line in lines(profile.render(record)))


# ---- counters and memory ---------------------------------------------------------------------------------------


class Kernel:
    """perf_event_open and what it opens, made up."""

    def __init__(self, counts=(), refuse=None, enabled=100, running=100):
        self.counts, self.refuse, self.times, self.opened, self.closed = counts, refuse, (enabled, running), [], []

    def open(self, config, group):
        if self.refuse and len(self.opened) == self.refuse[0]:
            raise OSError(self.refuse[1], os.strerror(self.refuse[1]))
        self.opened.append((config, group))
        return 30 + len(self.opened)

    def read(self, fd, size):
        assert fd == 31  # the leader speaks for all
        answer = struct.pack(f"={3 + len(self.counts)}Q", len(self.counts), *self.times, *self.counts)
        assert len(answer) == size
        return answer

    def counters(self):
        return events.Counters(self.open, self.read, self.closed.append)


def test_counters_are_one_group():
    kernel = Kernel(counts=(1000, 2500, 7, 1))
    counters = kernel.counters()
    assert kernel.opened == [(0, -1), (1, 31), (3, 31), (5, 31)]
    assert dict(zip(counters.names, counters.read(), strict=True)) == {
        "cycles": 1000,
        "instructions": 2500,
        "cache misses": 7,
        "branch misses": 1,
    }
    counters.close()
    assert kernel.closed == [31, 32, 33, 34]


def test_shared_counters_are_scaled_up():
    assert Kernel(counts=(10, 20, 30, 40), enabled=100, running=50).counters().read() == (20, 40, 60, 80)
    assert Kernel(counts=(0, 0, 0, 0), enabled=100, running=0).counters().read() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOENT, "this machine shows no hardware counters"),
        (errno.EACCES, "perf_event_paranoid"),
        (errno.EPERM, "perf_event_paranoid"),
        (errno.ENOSYS, "can't be opened (Function not implemented)"),
    ],
)
def test_without_counters_the_reason_is_told(code, said):
    kernel = Kernel(refuse=(1, code))
    with pytest.raises(OSError) as raised:
        kernel.counters()
    assert said in events.reason(raised.value)
    assert kernel.closed == [31]  # what was open already


def test_this_machine_answers_one_way_or_the_other():
    try:
        counters = events.Counters()
    except OSError as error:
        assert events.reason(error)
    else:
        assert len(counters.read()) == len(events.EVENTS)
        counters.close()


def test_counters_reach_the_rows_of_a_profile(tiny, monkeypatch):
    kernel = Kernel(counts=(0, 0, 0, 0))

    def count(fd, size):
        kernel.counts = tuple(c + step for c, step in zip(kernel.counts, (100, 250, 1, 2), strict=True))
        return kernel.read(fd, size)

    monkeypatch.setattr(profile, "open_counters", lambda _: (events.Counters(kernel.open, count, print), None))
    made = profile.profile_run(request(tiny, "naive", n=1))
    assert made["counters"] == ["cycles", "instructions", "cache misses", "branch misses"]
    assert {tuple(r["counts"]) for r in made["prefill"]["rows"] if r["calls"] == 1} == {(100, 250, 1, 2)}


def test_memory_is_told_apart():
    status = "Name:\tpython\nVmHWM:\t 20480 kB\nRssAnon:\t  10240 kB\nRssFile:\t   5120 kB\n"
    found = events.memory(status)
    assert (found["anon_mb"], found["file_mb"]) == (10, 5)
    assert found["peak_mb"] > 1
    assert events.memory("")["anon_mb"] is None


def test_the_clock_is_a_clock():
    assert 0.1 < events.clock_ghz(100_000) < 20


# ---- cold ------------------------------------------------------------------------------------------------------


def test_a_cold_run_counts_each_step(tiny, tmp_path):
    rows_file = str(tmp_path / "row.npy")
    made = cold.cold_run(request(tiny, "naive", n=1, rows_file=rows_file))
    assert [step["step"] for step in made["steps"]] == ["load", "first forward", "second forward"]
    assert all(step[k] >= 0 for step in made["steps"] for k in ("ms", "minor", "major"))
    assert made["steps"][0]["minor"] + made["steps"][0]["major"] > 0  # every weight was unpacked to new memory
    assert made["output_ids"] == [int(np.argmax(np.load(rows_file)))]


def test_a_file_that_nobody_maps_can_be_evicted(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    path.read_bytes()
    made = cold.evict(path)
    assert made["pages"] == 256
    assert made["before"] in (256, None)
    assert bool(made["reason"]) == (made["after"] != 0)  # where a page stays, as in a memory file system, it is told


def test_a_mapped_file_stays_and_that_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    held = np.memmap(path, np.uint8, "r")
    assert held.sum() > 0
    made = cold.evict(path)
    assert made["after"] and "stayed in memory" in made["reason"]
    cold.unmap(held)
    assert held[0] == path.read_bytes()[0]


def test_a_map_let_go_can_be_evicted(tiny, tmp_path):
    path = tmp_path / "copy.gguf"
    path.write_bytes(Path(tiny).read_bytes())
    gguf = open_model(path)
    assert sum(int(t.raw.sum()) for t in gguf.gguf.tensors.values()) > 0
    assert cold.evict(path)["after"]
    cold.unmap(gguf.gguf.file)
    (tmp_path / "unmapped").write_bytes(b"x")
    assert cold.evict(path)["after"] == cold.evict(tmp_path / "unmapped")["after"]  # 0, but in a memory file system


def test_a_system_that_can_not_evict_says_so(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert cold.evict(path)["reason"] == "this system can't evict a single file"


def test_a_cold_run_is_shown_in_eighty_columns(tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    step = {"step": "second forward", "ms": 1712.0, "minor": 107_314, "major": 1234, "anon_mb": 518.8, "file_mb": None}
    evicted = {"before": 9, "after": 0, "pages": 24_046, "reason": None}
    record = {
        **profile.heading("naive", prepare(str(tiny), ids="1"), MACHINE), "steps": [step], "evicted": evicted,
        "file_mb": 94.0,
    }  # fmt: skip
    text = lines(cold.render(record))
    assert max(map(len, text)) <= 80
    assert "107,314" in text[1] and "+518.8" in text[1]
    assert "All 24,046 pages of the file (94 MiB) were out of memory at first." in text
    record["evicted"] = {**evicted, "reason": "448 of the file's 24,015 pages stayed in memory"}
    assert any("Not cold: 448" in line for line in lines(cold.render(record)))


def test_both_run_in_a_worker_and_are_checked_and_kept(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(profile.machine, "measure", lambda: fast(MACHINE))
    job = prepare(str(tiny), ids="1,2,3", n=2)
    made = profile.profile("naive", job, str(tmp_path))
    assert made["agreement"]["passed"]
    kept = list(tmp_path.glob("made-up-9000/profile/*.json"))
    assert [path.name for path in kept] == ["naive-tiny-shape-random-weights-q4-k-2-layers-pp3-tg2.json"]
    assert cold.cold("naive", job, str(tmp_path))["agreement"]["passed"]
    assert len(list(tmp_path.glob("*/cold/*.json"))) == 1


def test_a_wrong_stage_is_not_profiled(tiny, tmp_path, monkeypatch):
    from common.run import WrongError

    monkeypatch.setattr(profile.machine, "measure", lambda: fast(MACHINE))
    wrong = copy_of("naive", tmp_path, ("total += x[t, k]", "total += np.float32(2) * x[t, k]"))
    with pytest.raises(WrongError):
        profile.profile(str(wrong), prepare(str(tiny), ids="1,2,3", n=2), str(tmp_path))
    assert not list(tmp_path.glob("*/profile/*"))


def test_a_stage_that_fails_is_one_sentence(tiny, tmp_path):
    wrong = copy_of(
        "naive", tmp_path, ("def forward(model, ids, start):", "def forward(model, ids, start):\n    1 / 0\n")
    )
    with pytest.raises(harness.RunError, match="ZeroDivisionError"):
        harness.talk("profile", request(tiny, str(wrong)))
