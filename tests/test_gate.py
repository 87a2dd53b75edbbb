"""Stages broken on purpose: the gate shows no time for any of them, and says where each one goes wrong."""

from dataclasses import replace

import numpy as np
import pytest

from common import gate, reference, roofline
from common.harness import Request
from common.machine import identify
from common.model import open_model
from common.stage import load_stage
from tests.helpers import copy_of, lesson, one_sentence
from tests.test_model import llama

IDS = [1, 17, 300, 511, 42, 8]
NEW = 3

# name: (old, new, where it must be seen first), each an edit of a copy of tiling
BROKEN = {
    "dropped row": ("return out\n", "out[T - 1] = 0\n    return out\n", "token 5, layer 0, matmul (w_q)"),
    "dropped tile": ("range(0, K, TILE)", "range(0, K - TILE, TILE)", "token 0, layer 0, matmul (w_q)"),
    "rope off by one": ("config.rope_freqs, start)\n", "config.rope_freqs, start + 1)\n", "token 1, layer 0: each op"),
    "wrong scale": ("1 / math.sqrt(hd)", "1 / math.sqrt(hd + 1)", "token 1, layer 0, attention"),
    "mask off by one": ("S = start + t + 1", "S = start + max(t, 1)", "layer 0, attention"),
    "sees one ahead": ("S = start + t + 1", "S = min(start + t + 2, k.shape[0])", "token 0, layer 0, attention"),
    "kv heads swapped": ("g = h // (H // G)", "g = h % G", "token 0, layer 0, attention"),
    "wrong eps": ("layer.ffn_norm, config.eps", "layer.ffn_norm, 1e-2", "layer 0: each op is right on its inputs"),
    "no residual": ("x = add(x, matmul(mul", "x = add(0 * x, matmul(mul", "the feed-forward"),
    "equal inputs": ("weights.token_embd[:, ids]", "weights.token_embd[:, [5] * T]", "layer 0: each op is right"),
    "constant logits": ("return matmul(hidden, model", "return 1 + 0 * matmul(hidden, model", "logits"),
    "logits not finite": ("total += x[t, k]", "total += np.nan * x[t, k]", "token 0, layer 0, matmul (w_q)"),
    "last layer skipped": ("in weights.layers:", "in weights.layers[:1]:", "layer 1"),
    "forgets its text": ("forward(model, ids, 0)", "forward(model, ids[-6:], 0)", "fault is in generate"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gguf(tiny):
    return open_model(tiny)


def outcome(path, gguf):
    """The gate's verdict on what a stage file generates."""
    stage = load_stage(str(path))
    model = stage.load(gguf, len(IDS) + NEW, 1)
    pairs = list(stage.generate(model, IDS, NEW, lambda row: int(np.argmax(row))))
    ids, rows = zip(*pairs, strict=True)
    want = reference.compute(gguf, [*IDS, *ids[:-1]], rows=NEW).logits
    return gate.agreement(rows, ids, want, gate.tolerance(str(path)))


def request(path, gguf):
    return Request(str(path), str(gguf.path), IDS, 1)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_stage_does_not_pass_and_its_fault_is_named(what, gguf, tmp_path):
    old, new, place = BROKEN[what]
    path = copy_of("tiling", tmp_path, (old, new))
    found = outcome(path, gguf)
    assert not found.passed
    assert not found.nmse <= gate.tolerance(str(path))
    told = gate.first_fault(request(path, gguf))
    assert place in told
    assert len(told.splitlines()) == 1
    assert (what == "forgets its text") == ("right at every position" in told)


def test_a_broken_shared_op_is_named(gguf, tmp_path):
    """An op written into the file, with another eps, is found on its own inputs."""
    norm = "@njit\ndef rms_norm(x, weight, eps):\n    out = np.empty_like(x)\n    for t in range(len(x)):\n"
    norm += "        out[t] = x[t] / np.sqrt(np.mean(x[t] * x[t]) + np.float32(0.1)) * weight\n    return out\n\n\n"
    path = copy_of("tiling", tmp_path, ("@njit\ndef attention", norm + "@njit\ndef attention"))
    assert not outcome(path, gguf).passed
    assert "token 0, layer 0, rms_norm" in gate.first_fault(request(path, gguf))


ROWS = "rope(matmul(h, layer.w_k).reshape(T, G, hd), config.rope_freqs, start)"
CACHE = "cache = arena(config.L, 2, context, config.G, config.hd)"
CONTINUED = {  # the same of kv_cache, wrong only beyond a first text from 0 on: (edits, what is said)
    "sees its own alone": (
        [("keys[:end], values[:end]", "keys[start:], values[start:]")],
        "but wrong at start = 3, where it follows",
    ),
    "appends": (
        [
            (CACHE, "cache = [[[], []] for _ in range(config.L)]"),
            ("    if end > model.cache.shape[2]:\n", "    if False:\n"),
            (f"keys[start:end] = {ROWS}", f"keys.extend({ROWS})"),
            ("values[start:end] = matmul(h, layer.w_v)", "values.extend(matmul(h, layer.w_v)"),
            (".reshape(T, G, hd)\n        x = add", ".reshape(T, G, hd))\n        x = add"),
            ("keys[:end], values[:end]", "np.stack(keys), np.stack(values)"),
        ],
        "does not begin anew: a second text",
    ),
    "a lone token": ([("keys[:end], values[:end]", "keys[int(T == 1) : end], values[:end]")], "but wrong at start = 5"),
    "start stands still": ([("start + len(new), [choose", "start, [choose")], "fault is in generate"),
}


@pytest.mark.parametrize("what", CONTINUED)
def test_a_fault_beyond_a_first_text_is_blamed_on_who_made_it(what, gguf, tmp_path):
    edits, told = CONTINUED[what]
    path = copy_of("kv_cache", tmp_path, *edits)
    found = gate.first_fault(request(path, gguf))
    assert told in found
    assert ("right at every position" in found) == (what == "start stands still")


def test_an_unbroken_copy_passes(gguf, tmp_path):
    path = copy_of("tiling", tmp_path)
    assert outcome(path, gguf).passed
    assert "right at every position" in gate.first_fault(request(path, gguf))


class Away(np.ndarray):
    """An array that must be fetched, as one of the GPU: nothing but `get` gives its values."""

    def get(self):
        return np.array(self.view(np.ndarray))

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion")


def test_the_oracle_takes_what_lies_on_a_gpu():
    away = np.arange(6.0).view(Away)
    assert type(gate.here(away)) is np.ndarray and gate.here(away).sum() == 15
    assert gate.here(np.array([7]).view(Away)) == 7  # the position, which kernels read there
    assert gate.here(1e-5) == 1e-5
    stage = load_stage("quantized")
    w = stage.Blocks(2, 32, 0, 32, 128, np.arange(64, dtype=np.float32).view(np.uint8).view(Away))
    x = np.ones((1, 32), np.float32).view(Away)
    assert gate.matmul(gate.here(x), gate.here(w)).tolist() == [[496, 1520]]


def test_tracing_leaves_the_stage_as_it_was(gguf):
    stage = load_stage("tiling")
    before = dict(vars(stage))
    gate.first_fault(request("tiling", gguf))
    assert vars(stage) == before


# ---- judging rows ----------------------------------------------------------------------------------------------

WANT = np.array([[0.0, 1.0, 3.0], [5.0, 4.0, 0.0]])


def test_equal_rows_pass():
    assert gate.agreement(WANT, [2, 0], WANT, 0.0) == gate.Agreement(0.0, 0.0, True, None, True)


def test_another_id_does_not_pass_though_the_rows_do():
    found = gate.agreement(WANT, [2, 1], WANT, 1.0)
    assert (found.tokens_equal, found.first_difference, found.passed) == (False, 1, False)


def test_a_tie_within_the_error_passes_and_is_told():
    want = np.array([[1.0, 1.0 + 1e-6, 0.0]])
    rows = want + [[1e-6, -1e-6, 1e-6]]
    found = gate.agreement(rows, [0], want, 1e-8)
    assert (found.tokens_equal, found.first_difference, found.passed) == (True, 0, True)
    assert not gate.agreement(rows, [2], want, 1e-8).passed


@pytest.mark.parametrize(("times", "equal"), [(7, True), (9, False)])
def test_a_tie_is_eight_times_the_rms_error(times, equal):
    want = np.array([[1.0, 1.0 + times * 1e-6, 0.0]])
    rows = want + np.array([[1e-6, -1e-6, 1e-6]])
    assert gate.agreement(rows, [0], want, 1.0).tokens_equal == equal


def test_rows_beyond_the_tolerance_do_not_pass():
    rows = WANT * (1 + 1e-3)
    assert gate.agreement(rows, [2, 0], WANT, 1.1e-6).passed
    assert not gate.agreement(rows, [2, 0], WANT, 0.9e-6).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_do_not_pass(bad):
    rows = WANT.copy()
    rows[1, 2] = bad
    with np.errstate(invalid="ignore"):
        assert not gate.agreement(rows, [2, 0], WANT, 1.0).passed


def test_divergence():
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert gate.divergence(p, q) == pytest.approx([0.5 * np.log(2) + 0.5 * np.log(2 / 3)])
    assert gate.divergence(p + 1e3, p - 1e3) == pytest.approx([0])


# ---- the whole way: no time on the screen ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["dropped row", "rope off by one", "equal inputs"])
def test_run_shows_no_time_for_a_broken_stage(what, tiny, tmp_path):
    old, new, place = BROKEN[what]
    copy_of("tiling", tmp_path, (old, new))
    done = lesson("run", "./mine.py", "-m", tiny, "--ids", "1,17,300,511,42,8", "-n", 2, "--json", cwd=tmp_path)
    assert done.returncode == 5
    told = one_sentence(done)
    assert "./mine.py is wrong, so no time is shown" in told
    assert place.split(":")[0].partition(", ")[2] in told  # layer and op; the token may lie in the new text
    assert " ms" not in told
    assert not (tmp_path / "reports").exists()


def test_run_shows_no_time_where_a_logit_is_not_finite(tiny, tmp_path):
    old, new, _ = BROKEN["logits not finite"]
    copy_of("tiling", tmp_path, (old, new))
    done = lesson("run", "./mine.py", "-m", tiny, "--ids", "1,2", "-n", 2, "--json", cwd=tmp_path)
    assert done.returncode == 5
    assert "not finite" in one_sentence(done)


def test_a_model_that_is_not_finite_is_not_the_stages_fault(tmp_path):
    data = {"output.weight": b"\xff" * (10 * 64 // 32 * 34)}  # Q8_0 blocks whose scale is NaN
    path = llama(tmp_path / "a.gguf", {"tokenizer.ggml.model": None}, data=data)
    done = lesson("run", "tiling", "-m", path, "--ids", "1,2", "-n", 2, "--json", "--save", tmp_path)
    assert done.returncode == 3
    assert "weights that give logits that are not finite" in one_sentence(done)


def test_compare_shows_no_time_beside_a_broken_stage(tiny, tmp_path):
    old, new, _ = BROKEN["dropped row"]
    copy_of("tiling", tmp_path, (old, new))
    words = ("tiling", "./mine.py", "-m", tiny, "--ids", "1,2", "-n", 2, "--json", "--save", tmp_path / "kept")
    done = lesson("compare", *words, cwd=tmp_path)
    assert done.returncode == 5
    assert done.stdout == b""
    assert "./mine.py is wrong, so no time is shown" in done.stderr.decode().splitlines()[-1]
    assert not list((tmp_path / "kept").rglob("*.json"))


def test_a_stage_faster_than_the_machine_is_refused(tiny, tmp_path):
    """It remembers its answers from the warm-up: right, and quicker than the weights can be read."""
    remember = "def generate(model, ids, n, choose=argmax):\n    key = (*ids, n, model.config.L)\n"
    remember += "    if key not in KNOWN:\n        KNOWN[key] = list(afresh(model, ids, n, choose))\n"
    remember += "    yield from KNOWN[key]\n\n\nKNOWN = {}\n\n\ndef afresh(model, ids, n, choose=argmax):"
    copy_of("tiling", tmp_path, ("def generate(model, ids, n, choose=argmax):", remember))
    ids = ",".join(str(i) for i in range(64))
    words = ("./mine.py", "-m", tiny, "--ids", ids, "-n", 3, "--json", "--save", tmp_path / "kept")
    done = lesson("run", *words, cwd=tmp_path)
    assert done.returncode == 5
    assert "of what this machine can do" in one_sentence(done)
    assert not list((tmp_path / "kept").rglob("*.json"))


# ---- the roof --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine():
    """One that reads 10 GB/s and does 100 GFLOP/s."""
    rates = {"read_gbs": ((1 << 14, 10.0), (1 << 30, 10.0)), "read_all_gbs": ((1 << 14, 20.0), (1 << 30, 20.0))}
    rates |= {"fma_gflops": 100.0, "fma_all_gflops": 200.0, "int8_gops": None}
    return replace(identify(), **rates)


def test_bound_is_the_slower_of_memory_and_arithmetic(machine):
    assert roofline.bound_ms(roofline.Work(1, 10_000_000), machine) == pytest.approx(1)
    assert roofline.bound_ms(roofline.Work(200_000_000, 1), machine) == pytest.approx(2)
    assert roofline.bound_ms(roofline.Work(200_000_000, 1), machine, threads=2) == pytest.approx(1)


@pytest.mark.parametrize("work", [roofline.Work(1, 10_000_000), roofline.Work(100_000_000, 1)])
def test_a_time_beyond_the_roof_is_an_error_in_the_accounting(machine, work):
    assert roofline.plausible(work, 2.0, machine) == pytest.approx(0.5)
    assert roofline.plausible(work, 0.96, machine) == pytest.approx(1 / 0.96)
    for ms in (0.94, 0.1):
        with pytest.raises(roofline.AccountingError, match="of what this machine can do"):
            roofline.plausible(work, ms, machine)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_still_is_an_error(machine, ms):
    with pytest.raises(roofline.AccountingError, match="clock"):
        roofline.plausible(roofline.Work(1, 1), ms, machine)


def test_an_accounting_error_has_the_exit_code_of_the_gate():
    assert roofline.AccountingError.exit_code == 5


def test_few_rows_of_eight_bits_are_allowed_more_and_many_are_not():
    assert gate.tolerance("naive", 1) == gate.tolerance("naive") == gate.TOLERANCE["float32"]
    assert gate.tolerance("packed", 1) == 8 * gate.tolerance("packed", 100) == 8 * gate.TOLERANCE["int8"]
