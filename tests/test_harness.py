"""What a run counts, on a clock that only the stage moves; and what becomes of stages that fail, in real processes."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from common import compare, diff, gate, gpu, harness, roofline, show
from common.harness import Request, RunError, Sample
from common.job import prepare
from common.model import open_model
from common.stage import arena
from tests.helpers import ROOT, copy_of, lesson

IDS = [1, 17, 300]
COMPILING, LOADING = 5.0, 2.0  # seconds
FIRST, GAPS = 0.100, (0.010, 0.020, 0.030, 0.040, 0.050, 0.060, 0.070)


class Clock:
    """perf_counter that stands still until told."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(harness, "time", made)
    return made


@pytest.fixture
def stage(clock, monkeypatch):
    """A stage that takes a known time for everything, and compiles on its first token."""
    made = SimpleNamespace(calls=[], rows=np.arange(5.0, dtype=np.float32))

    def load(gguf, context, threads):
        clock.now += LOADING
        return gguf

    def generate(model, ids, n, choose=None):
        if not made.calls:
            clock.now += COMPILING
        made.calls.append((model.config.L, list(ids), n))
        for i, took in enumerate(itertools.islice((FIRST, *GAPS), n)):
            clock.now += took
            yield 10 + i, made.rows

    made.load, made.generate = load, generate
    made.forward, made.logits = lambda model, ids, start: np.array(ids), lambda model, hidden: hidden * 2.0
    monkeypatch.setattr(harness, "load_stage", lambda name: made)
    return made


def request(tiny, **changes):
    return Request(**{"stage": "mine", "model": str(tiny), "ids": IDS, "n": 4, **changes})


def test_the_clock_waits_for_the_gpu(stage, clock, tiny, monkeypatch):
    """A stage that forgets to wait yields at once, and what it queued runs on: its time counts all the same."""
    queued = []

    def generate(model, ids, n, choose=None):
        for i in range(n):
            queued.append(0.5)  # seconds of kernels behind this token
            yield i, stage.rows

    def synchronize():
        clock.now += sum(queued)
        queued.clear()

    runtime = SimpleNamespace(deviceSynchronize=synchronize)
    monkeypatch.setattr(gpu, "backend", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    stage.generate, stage.ARCHS = generate, ("sm_75",)
    stage.load = lambda *_: queued.append(3.0) or SimpleNamespace()
    found = harness.measure(request(tiny))
    assert found.ttft_ms == pytest.approx(500) and found.gaps_ms == pytest.approx([500] * 3)
    assert found.load_ms == pytest.approx(3000)


def test_times_lie_where_they_belong(stage, tiny):
    seen = []
    found = harness.measure(request(tiny), lambda *token: seen.append(token))
    assert found.output_ids == [10, 11, 12, 13]
    assert found.stop_reason == "length"
    assert found.ttft_ms == pytest.approx(100)
    assert found.gaps_ms == pytest.approx([10, 20, 30])
    assert found.load_ms == pytest.approx(2000)
    assert found.jit_ms == pytest.approx(5000)
    assert [token for token, _ in seen] == found.output_ids
    assert [ms for _, ms in seen] == pytest.approx([100, 10, 20, 30])


def test_ms_per_token_leaves_out_the_first(stage, tiny):
    assert harness.measure(request(tiny)).ms_per_token() == pytest.approx(20)
    assert harness.measure(request(tiny)).ms_per_token(3) == pytest.approx(15)


def test_one_token_has_no_ms_per_token(stage, tiny):
    found = harness.measure(request(tiny, n=1))
    assert found.gaps_ms == []
    assert found.ms_per_token() is None
    assert harness.measure(request(tiny)).ms_per_token(1) is None


def test_time_between_tokens_that_the_caller_spends_does_not_count(stage, tiny, clock):
    def slow_reader(token, ms):
        clock.now += 60

    assert harness.measure(request(tiny), slow_reader).gaps_ms == pytest.approx([10, 20, 30])


def test_everything_is_warm_before_the_clock_starts(stage, tiny):
    """One layer twice, then all of them on two ids, then a short run at its own shape, then the run that counts."""
    harness.measure(request(tiny))
    assert stage.calls == [(1, IDS[:2], 2), (1, IDS[:2], 2), (2, IDS[:2], 2), (2, IDS, 4), (2, IDS, 4)]


def test_a_long_run_is_warmed_up_on_two_ids_alone(stage, tiny):
    ids = list(range(40))  # twenty times the warm prompt of 0.11 s, in two layers
    harness.measure(request(tiny, ids=ids))
    assert stage.calls == [*[(1, ids[:2], 2)] * 2, (2, ids[:2], 2), (2, ids, 4)]


def test_a_warm_up_that_is_longer_than_it_promised_ends(stage, tiny, clock):
    """Without a cache each token takes longer than the last, which two ids do not show."""
    made = []

    def generate(model, ids, n, choose=None):
        for i in range(n):
            clock.now += 0.01 * (len(ids) + i)
            made.append((len(ids), i))
            yield 10 + i, stage.rows

    stage.generate = generate
    harness.measure(request(tiny, n=30))
    warm = made.index((3, 0), made.index((3, 0)) + 1) - made.index((3, 0))
    assert sum(0.01 * (3 + i) for i in range(warm - 1)) <= harness.SHORT_S < sum(0.01 * (3 + i) for i in range(warm))
    assert made[-30:] == [(3, i) for i in range(30)]


@pytest.mark.parametrize("ids", [IDS, list(range(40))])
def test_what_a_gpu_stage_does_once_for_a_length_of_prompt_is_not_timed(stage, tiny, clock, monkeypatch, ids):
    """However long that takes, and however long it makes the run seem: a graph is captured, a program compiled."""
    generate, captured = stage.generate, set()

    def capturing(model, ids, n, choose=None):
        clock.now += 0 if (model.config.L, len(ids)) in captured else 3
        captured.add((model.config.L, len(ids)))
        for i, pair in enumerate(generate(model, ids, n)):
            clock.now += 0 if i != 1 or (model.config.L, 0) in captured else 3
            captured.add((model.config.L, 0)) if i else None
            yield pair

    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    monkeypatch.setattr(gpu, "backend", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    stage.generate, stage.ARCHS = capturing, ("sm_75",)
    found = harness.measure(request(tiny, ids=ids))
    assert found.ttft_ms == pytest.approx(100) and found.gaps_ms == pytest.approx([10, 20, 30])
    assert stage.calls == [*[(1, ids[:2], 2)] * 2, *[(2, ids, 4)] * 2]


def test_a_stop_token_ends_the_run_and_is_kept(stage, tiny):
    found = harness.measure(request(tiny, n=8, stop_ids=[99, 12]))
    assert found.output_ids == [10, 11, 12]
    assert found.stop_reason == "stop token"


def test_a_stop_token_at_once(stage, tiny):
    found = harness.measure(request(tiny, stop_ids=[10]))
    assert (found.output_ids, found.stop_reason, found.ms_per_token()) == ([10], "stop token", None)


@pytest.mark.parametrize(("budget_s", "tokens"), [(0.01, 2), (0.105, 2), (0.125, 3), (0.155, 4), (10, 8)])
def test_a_budget_ends_the_run_after_two_tokens_at_least(stage, tiny, budget_s, tokens):
    found = harness.measure(request(tiny, n=8, budget_s=budget_s))
    assert len(found.output_ids) == tokens
    assert found.stop_reason == ("length" if tokens == 8 else "budget")


def test_a_budget_that_is_spent_on_the_last_token_did_not_end_the_run(stage, tiny):
    assert harness.measure(request(tiny, n=2, budget_s=0.01)).stop_reason == "length"
    assert harness.measure(request(tiny, n=1, budget_s=0.01)).output_ids == [10]


@pytest.mark.parametrize(("context", "tokens"), [(3, 1), (4, 2), (6, 4), (7, 4), (None, 4)])
def test_the_context_ends_the_run(stage, tiny, context, tokens):
    """The last new id is chosen at the last position and needs no place of its own."""
    found = harness.measure(request(tiny, context=context))
    assert len(found.output_ids) == tokens
    assert found.stop_reason == ("length" if tokens == 4 else "context")


def test_rows_and_prompt_logits_are_kept(stage, tiny, tmp_path):
    rows, logits = str(tmp_path / "rows.npy"), str(tmp_path / "logits.npy")
    harness.measure(request(tiny, rows_file=rows, logits_file=logits))
    assert np.array_equal(np.load(rows), np.tile(stage.rows, (4, 1)))
    assert np.array_equal(np.load(logits), np.array(IDS) * 2.0)


def test_rows_are_kept_as_they_were(stage, tiny, tmp_path):
    """A stage may write its next row where the last one was."""
    generate = stage.generate

    def reusing(*arguments):
        for i, (token, row) in enumerate(generate(*arguments)):
            row[:] = i
            yield token, row

    stage.generate = reusing
    harness.measure(request(tiny, rows_file=str(tmp_path / "rows.npy")))
    assert np.load(tmp_path / "rows.npy")[:, 0].tolist() == [0, 1, 2, 3]


def test_faults_are_counted_by_phase(stage, tiny):
    generate = stage.generate

    def touching(*arguments):
        for i, pair in enumerate(generate(*arguments)):
            if i == 2:
                np.ones(64 << 20, np.uint8)  # more than malloc keeps, so pages never seen before
            yield pair

    stage.generate = touching
    faults = harness.measure(request(tiny)).faults
    assert set(faults) == {"load", "prefill", "decode"}
    assert faults["decode"]["minor"] >= 16  # huge pages make one fault of 512
    assert faults["prefill"]["minor"] < faults["decode"]["minor"]


# ---- real processes --------------------------------------------------------------------------------------------


def test_a_real_run(tiny):
    seen = []
    found = harness.run(Request("tiling", str(tiny), IDS, 3), lambda token, ms: seen.append((token, ms)))
    assert seen == list(zip(found.output_ids, [found.ttft_ms, *found.gaps_ms], strict=True))
    assert found.stop_reason == "length"
    assert found.ttft_ms > 0
    assert 20 < found.peak_rss_mb < 4000


def test_what_a_stage_prints_is_no_answer(tiny, tmp_path):
    loud = "print('{}', flush=True)\n    __import__('os').write(1, b'{\"sample\": 1}\\n')\n    hidden = hidden * 1"
    path = copy_of("tiling", tmp_path, ("    return matmul(hidden", f"    {loud}\n    return matmul(hidden"))
    quiet = harness.run(Request("tiling", str(tiny), IDS, 2))
    assert harness.run(Request(str(path), str(tiny), IDS, 2)).output_ids == quiet.output_ids


HIDDEN = "hidden = forward(model, ids, 0)"
# name: (old, new, what is said, exit code), each an edit of a copy of tiling
FAILING = {
    "syntax error": ("def forward(", "def forward((", r"mine.py: line \d+: SyntaxError: ", 1),
    "error on import": ("TILE = 64", "TILE = 64 // 0", r"mine.py: line \d+: ZeroDivisionError: ", 1),
    "error in forward": ("x = np.asc", "x = missing + np.asc", r"mine.py: line \d+: NameError: .*missing", 1),
    "error in a call": ("rms_norm(x, weights", "rms_norm(x, 3, weights", r"mine.py: line \d+: TypeError: ", 1),
    "no logits": ("def logits(", "def logit(", "mine.py lacks logits", 1),
    "no op": ("silu, softmax", "softmax", "mine.py lacks silu", 1),
    "killed": (HIDDEN, "__import__('os').kill(__import__('os').getpid(), 9)", "killed by SIGKILL", 1),
    "leaves": (HIDDEN, "__import__('os')._exit(7)", "exit code 7", 1),
    "exits": (HIDDEN, "raise SystemExit(0)", "ended without a result", 1),
    "no memory": (HIDDEN, "np.ones(1 << 50)", "needs more memory than there is: .*--context or fewer --layers", 1),
    "too few tokens": ("range(n)", "range(n - 1)", r"mine.py.*generate", 1),
    "yields no pairs": ("yield ids[-1], row", "yield ids[-1]", "mine.py", 1),
    "not finite": ("total += x[t, k]", "total += np.nan * x[t, k]", "is wrong: a logit is not finite", 5),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_failing_stage_is_told_in_one_sentence(what, tiny, tmp_path):
    old, new, told, code = FAILING[what]
    path = copy_of("tiling", tmp_path, (old, new))
    with pytest.raises(RunError, match=told) as error:
        harness.run(Request(str(path), str(tiny), IDS, 2))
    assert len(str(error.value).splitlines()) == 1
    assert error.value.exit_code == code


@pytest.mark.parametrize("shape", [(1 << 25, 1 << 25), (1 << 40, 1 << 40)])  # no address space has them
def test_a_context_beyond_memory_is_a_memory_error(shape):
    with pytest.raises(MemoryError, match="GB asked for at once"):
        arena(*shape)


def test_the_line_is_the_readers_own(tiny, tmp_path):
    path = copy_of("tiling", tmp_path, ("    x = np.ascontiguousarray(", "    x = np.stack([1, [2]])\n    x = np.asc("))
    line = path.read_text().split("np.stack")[0].count("\n") + 1
    with pytest.raises(RunError, match=f"line {line}: ValueError"):
        harness.run(Request(str(path), str(tiny), IDS, 2))


def test_a_bad_model_has_its_own_exit_code(tmp_path):
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(RunError) as error:
        harness.run(Request("tiling", str(tmp_path / "empty.gguf"), IDS, 2))
    assert error.value.exit_code == 3


def test_no_process_is_left_when_the_caller_gives_up(tiny):
    def give_up(token, ms):
        raise KeyboardInterrupt

    before = psutil.Process().children()  # other tests' pools keep a process that tracks what they share
    with pytest.raises(KeyboardInterrupt):
        harness.run(Request("tiling", str(tiny), IDS, 50), give_up)
    assert psutil.Process().children() == before


def test_a_worker_dies_with_its_parent(tiny, tmp_path):
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))"
    wait = f"{note}; __import__('time').sleep(600)"
    path = copy_of("tiling", tmp_path, (HIDDEN, wait))
    code = f"from common.harness import *; run(Request({str(path)!r}, {str(tiny)!r}, [1, 2], 2))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    worker = psutil.Process(int(patiently(lambda: read(tmp_path / "pid"))))
    assert worker.ppid() == parent.pid
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    patiently(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def patiently(found):
    """What found() gives once it is true; a minute is far more than it needs."""
    for _ in range(600):
        value = found()
        if value:
            return value
        time.sleep(0.1)
    return pytest.fail("it never came")


# ---- how many runs a comparison takes --------------------------------------------------------------------------


def sample(ttft_s, gap_s, n):
    return Sample([0] * n, "length", ttft_s * 1e3, [gap_s * 1e3] * (n - 1), 0, 0, 0, {})


@pytest.mark.parametrize(
    ("first", "budget_s", "plan"),
    [
        ([sample(0.1, 0.1, 8)], 60, (8, compare.MOST_ROUNDS)),  # cheap: as many as are of use
        ([sample(1, 1, 8)], 60, (8, 7)),  # 8 s, then 52 / 8
        ([sample(1, 1, 8)], 56, (8, compare.ROUNDS)),
        ([sample(1, 1, 8)], 55.9, (7, compare.ROUNDS)),  # cut to 7 tokens, so that seven runs fit
        ([sample(1, 1, 8), sample(0.1, 0.1, 8)], 55.9, (7, compare.ROUNDS)),  # the slowest decides
        ([sample(0.1, 0.1, 2), sample(0.1, 0.1, 8)], 60, (2, compare.MOST_ROUNDS)),  # the shortest decides
        ([sample(10, 1, 8)], 60, (1, 5)),  # 17 s, then 43 / 10
        ([sample(50, 50, 2)], 60, (1, 1)),  # one run is over the budget already
        ([sample(1, 1, 1)], 60, (1, compare.MOST_ROUNDS)),
    ],
)
def test_plan(first, budget_s, plan):
    assert compare.plan(first, budget_s) == plan


@pytest.fixture
def planted(monkeypatch, tiny, tmp_path):
    """planted(names, n) compares stages whose runs take planted times; -> (document, order of the runs)."""

    def of(names, n, ttft_ms=(100.0, 50.0)):
        order = []

        def run(request, on_token):
            slot = names.index(request.stage)
            order.append(slot)
            wobble = 1 + 0.001 * (len(order) % 3)
            took = ttft_ms[slot] * wobble
            return Sample([1] * request.n, "length", took, [took / 10] * (request.n - 1), 1, 1, 1, {"load": FAULTS})

        monkeypatch.setattr(harness, "run", run)
        monkeypatch.setattr(compare, "check", lambda *_: gate.Agreement(0.0, 0.0, True, None, True))
        monkeypatch.setattr(roofline, "plausible", lambda *_, **__: 0.5)
        job = prepare(str(tiny), ids="1,2", n=n)
        return compare.compare(names, job, 60, str(tmp_path)), order

    return of


FAULTS = {"minor": 0, "major": 0}


def test_a_comparison_runs_there_and_back(planted):
    """ABBA: a machine that slows down or warms up hits both alike."""
    _, order = planted(["naive", "tiling"], 3)
    assert order == [0, 1, 1, 0] * (compare.MOST_ROUNDS // 2)


@pytest.mark.parametrize("n", [1, 3])
def test_a_comparison_of_planted_times(planted, n):
    document, _ = planted(["naive", "tiling"], n)
    found = {pair["metric"]: pair for pair in document["pairs"]}
    assert set(found) == ({"ttft_ms"} if n == 1 else {"ttft_ms", "ms_per_token"})
    assert found["ttft_ms"]["ratio"] == pytest.approx(2, rel=0.01)
    assert found["ttft_ms"]["verdict"] == "faster"
    assert found["ttft_ms"]["expected_ratio"] > 0
    assert document["stages"][0]["ttft_ms"]["median"] == pytest.approx(100, rel=0.01)
    assert (document["stages"][0]["ms_per_token"] is None) == (n == 1)
    assert [r["stage"] for r in document["stages"]] == ["naive", "tiling"]
    assert document["changed"]["tiling"] == [c["name"] for c in diff.document("naive", "tiling")["changed"]]
    painted = shown(compare.result(document))
    assert "tiling is faster than naive on TTFT" in painted
    assert max(map(len, painted.splitlines())) <= 80


def test_a_comparison_with_the_readers_own_stage(planted, tmp_path, monkeypatch):
    """Nobody wrote its cost down, so it is expected to take what the stage it starts from takes."""
    monkeypatch.chdir(copy_of("tiling", tmp_path, ("TILE = 64", "TILE = 32")).parent)
    mine = "./mine.py"
    document, _ = planted(["tiling", mine], 3, (100.0, 200.0))
    assert {pair["verdict"] for pair in document["pairs"]} == {"slower"}
    assert document["stages"][1]["expect"]["reason"].startswith("as naive: ")
    assert document["changed"] == {mine: ["TILE"]}
    assert "slower than tiling" in shown(compare.result(document))
    assert "TILE" in shown(compare.introduction(["tiling", mine]))


SAID = ["", "PREVIOUS = None", 'PREVIOUS = "./mine.py"', 'PREVIOUS = "nothing"', "PREVIOUS = 1 + 1"]


@pytest.mark.parametrize("previous", SAID)
def test_a_readers_own_stage_may_say_anything_of_what_it_starts_from(previous, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy_of("tiling", tmp_path, ('PREVIOUS = "naive"', previous))
    assert roofline.modelled("./mine.py") == "naive"


def test_a_readers_own_stage_is_not_run_to_be_judged(tmp_path):
    mine = copy_of("tiling", tmp_path, ("TILE = 64", "raise SystemExit"))
    assert roofline.modelled(str(mine)) == "naive"


def test_a_stage_against_itself(planted):
    document, _ = planted(["naive", "naive"], 3)
    assert "nothing should be measured" in shown(compare.introduction(["naive", "naive"]))
    assert {pair["verdict"] for pair in document["pairs"]} == {"no measurable change"}
    assert [pair["ratio"] for pair in document["pairs"]] == pytest.approx([1, 1], rel=0.01)
    assert {pair["expected_ratio"] for pair in document["pairs"]} == {1.0}


@pytest.mark.parametrize(("a", "b", "said"), [("resident", "prefill", True), ("graph", "fused", False)])
def test_an_op_is_told_to_be_inside_another_where_it_goes_there(a, b, said):
    """fused says so too, of ops that were inside others already in graph."""
    assert ("silu is now inside swiglu." in compare.introduction([a, b])[-1]) is said


def shown(pieces) -> str:
    with (page := show.console()).capture() as caught:
        for piece in pieces:
            page.print(piece)
    return caught.get()


def test_a_runs_peak_memory_is_its_own_and_not_its_parents(tiny):
    """Linux hands ru_maxrss on to a child as it is started."""
    held = np.ones(400 << 20, np.uint8)
    sample = harness.run(Request("naive", str(tiny), [1, 2, 3], 1, context=8))
    assert 0 < sample.peak_rss_mb < held.nbytes / (1 << 20)


def test_weights_that_are_not_finite_are_the_models_fault_in_a_comparison_too(tiny, tmp_path):
    text = bytearray(tiny.read_bytes())
    norm = open_model(tiny).weights.output_norm.raw.tobytes()
    at = text.index(norm)
    text[at : at + len(norm)] = np.full(len(norm) // 4, np.nan, np.float32).tobytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(text)
    done = lesson("compare", "naive", "tiling", "--model", broken, "--ids", "1,2,3", "-n", "1", "--save", tmp_path)
    assert done.returncode == 3
    assert "weights that give logits that are not finite" in done.stderr.decode()
