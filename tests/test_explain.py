"""What `lesson explain` reads from assembly and remarks, and whether a stress does what it says and nothing else."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from common import explain, harness, profile, stress
from common.harness import Request, RunError
from common.job import UsageError, prepare
from common.stage import StageError, load_stage
from tests.helpers import copy_of
from tests.test_profile import MACHINE, lines

STAGES = ("naive", "tiling", "simd", "kv_cache", "quantized")
KINDS = explain.STRESSES

# An outer loop around an inner one of two multiply-adds, one of them fused, with a spill; then a scalar loop.
X86 = """
	.file	1 "/stages" "mine.py"
	.file	2 "/numba" "other.py"
	.loc	1 10 0
.LBB0_1:
	.loc	1 12 1
.LBB0_2:
	.loc	1 14 1 is_stmt 0
	vmovups	(%rdi,%rax,4), %ymm1
	vmulps	(%rsi,%rax,4), %ymm1, %ymm2  # a comment
	vaddps	%ymm2, %ymm0, %ymm0
	vfmadd231ps	32(%rsi,%rax,4), %ymm1, %ymm3
	.loc	2 99 1
	movq	%rdx, 16(%rsp)
	leaq	(%rax,%rax), %rcx
	vmovups	%ymm0, (%r8)
	jne	.LBB0_2
	decq	%r9
	jg	.LBB0_1
	.p2align 4
.LBB0_3:
	.loc	1 16 1
	vmulss	(%rdi), %xmm0, %xmm1
	vaddss	%xmm1, %xmm2, %xmm2
	cmpq	%rax, %rbx
	jne	.LBB0_3
	jmp	.LBB0_9
"""
ARM = """
	.file	1 "/stages" "mine.py"
.LBB0_2:
	.loc	1 14 1
	ldr	q0, [x1, x8]
	ldr	q1, [x2], #16
	fmla	v2.4s, v0.4s, v1.4s
	str	q2, [sp, #16]
	subs	x9, x9, #1
	b.ne	.LBB0_2
"""


def test_an_inner_loop_is_counted():
    first, second = explain.loops_of(X86, "mine.py", explain.X86)
    assert first.facts(explain.X86) == {
        "lines": [14],
        "instructions": 8,
        "multiply_adds": 16,
        "packed_multiply_adds": 2,
        "vector_bits": 256,
        "loads": 3,
        "stores": 2,
        "stack": 1,
    }
    found = second.facts(explain.X86)
    assert (found["multiply_adds"], found["packed_multiply_adds"], found["vector_bits"]) == (1, 0, 32)
    assert (found["lines"], found["loads"], found["stores"]) == ([16], 1, 0)


def test_arm_is_read_too():
    (loop,) = explain.loops_of(ARM, "mine.py", explain.ARM)
    found = loop.facts(explain.ARM)
    assert (found["multiply_adds"], found["packed_multiply_adds"], found["vector_bits"]) == (4, 1, 128)
    assert (found["loads"], found["stores"], found["stack"], found["instructions"]) == (2, 1, 1, 6)


def test_the_hottest_loop_is_the_most_deeply_nested():
    loops = explain.loops_of(X86, "mine.py", explain.X86)
    assert explain.hottest(loops, {14: 1, 16: 2}, explain.X86) is loops[1]
    assert explain.hottest(loops, {14: 2, 16: 2}, explain.X86) is loops[0]  # it does more
    assert explain.hottest([], {}, explain.X86) is None


def test_nesting_is_by_source_line():
    lines = ["@njit", "def f(x):", "    a = 0", "    for i in x:", "        a += 1", "        for j in x:"]
    source = "\n".join([*lines, "            a += 2", "    return a"])
    depths = explain.nesting(source, 30)
    assert [depths[line] for line in (32, 34, 36, 37)] == [0, 1, 2, 0]


def test_remarks_stand_at_their_lines_once():
    said = [
        "remark: mine.py:43:1: loop not vectorized: cannot prove it is safe",
        "remark: mine.py:43:1: loop not vectorized: cannot prove it is safe",
        "remark: other.py:43:1: vectorized loop",
        "remark: <unknown>:0:0: loop not vectorized",
        "remark: mine.py:40:1: 3 virtual registers copies 1.0e+00 total copies cost generated in loop",
        "remark: mine.py:40:1: 1 spills 9.6 total spills cost 2 reloads 19 total reloads cost generated in loop",
    ]
    assert explain.by_line(said, "mine.py") == {
        43: ["loop not vectorized: cannot prove it is safe"],
        40: ["1 spills, 2 reloads in this loop"],
    }


# ---- real kernels, compiled anew -------------------------------------------------------------------------------


def request(tiny, stage: str) -> Request:
    return Request(stage=stage, model=str(tiny), ids=[1, 17, 300], n=2)


def explained(tiny, stage: str, op: str) -> dict:
    return harness.talk("explain", request(tiny, stage), op=op, stress=None)["explain"]


@pytest.fixture(scope="module")
def found(tiny):
    return {name: explained(tiny, name, "matmul") for name in ("naive", "simd", "quantized")}


def test_a_scalar_stage_is_scalar_and_the_compiler_says_why(found):
    made = found["naive"]
    assert (made["hottest"]["vector_bits"], made["hottest"]["packed_multiply_adds"]) == (32, 0)
    assert made["hottest"]["loads"] >= 2 * made["hottest"]["multiply_adds"] > 0
    at = next(i for i, text in enumerate(made["source"], made["first_line"]) if "total +=" in text)
    assert at in made["hottest"]["lines"]
    assert any("reorder floating-point operations" in text for text in made["remarks"][str(at)])


@pytest.mark.parametrize("name", ["simd", "quantized"])
def test_lanes_are_seen_in_the_hottest_loop(found, name):
    made = found[name]["hottest"]
    assert made["vector_bits"] >= 128
    assert made["multiply_adds"] >= 16 and made["multiply_adds"] % 16 == 0
    assert made["packed_multiply_adds"] >= made["multiply_adds"] // 16
    at = next(i for i, text in enumerate(found[name]["source"], found[name]["first_line"]) if "multiply_add(" in text)
    assert at in made["lines"]


def test_the_listing_is_that_loop(found):
    made = found["simd"]
    assert len(made["assembly"]) == made["hottest"]["instructions"]
    assert {line for _, line in made["assembly"] if line} == set(made["hottest"]["lines"])


def test_line_numbers_do_not_change_the_code():
    import numba

    kernel = importlib.import_module("stages.simd").matmul.py_func
    x, w = np.ones((2, 40), np.float32), np.ones((40, 40), np.float32)
    mnemonics = []
    for options in ({}, explain.WITH_LINES):
        made = explain.fresh(kernel, **options)
        made.compile(tuple(map(numba.typeof, (x, w))))
        listed, _ = explain.instructions_of(made.inspect_asm(made.signatures[0]), "simd.py", explain.isa())
        mnemonics.append([text.split(" ")[0] for text, _ in listed])
    assert len(mnemonics[0]) > 100
    assert mnemonics[0] == mnemonics[1]


def test_an_op_that_only_other_ops_call_is_explained_too(tiny):
    made = explained(tiny, "naive", "dot")
    assert made["file"] == "cpu_ops.py"
    assert made["hottest"]["multiply_adds"] > 0


@pytest.mark.parametrize(
    ("op", "said"), [("matmull", "has no op 'matmull': name one of add,"), ("forward", "is not compiled by numba")]
)
def test_what_can_not_be_explained_is_told(tiny, op, said):
    with pytest.raises(RunError, match=said) as raised:
        explained(tiny, "naive", op)
    assert raised.value.exit_code == 2


# ---- stress ----------------------------------------------------------------------------------------------------


def calls_of(stage: str, model) -> list[tuple]:
    """(x, w) of every matmul of a prefill and of a step, by a stage on a model file."""
    loaded = load_stage(stage)
    return [c for one in explain.arguments_of(loaded, "matmul", request(model, stage)) for c in one]


@pytest.fixture(scope="module")
def kernels():
    def made(stage):
        function = load_stage(stage).matmul.py_func
        return {kind: stress.compiled(function, stress.variant(function, kind)) for kind in (None, *KINDS)}

    return {stage: made(stage) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stressed_kernel_gives_the_very_same_result(kernels, stage, tiny):
    zero = np.float32(0)
    for x, w in calls_of(stage, tiny):
        want = load_stage(stage).matmul(x, w)
        second = stress.copied(w)
        for kind, kernel in kernels[stage].items():
            assert np.array_equal(kernel(x, w, second, zero, 0), want), kind


def per_multiply_add(kernel, stage: str) -> dict:
    """Multiply-adds and loads of a kernel's hottest loop, the plain kernel's multiply-adds being one."""
    loops = explain.loops_of(kernel.inspect_asm(kernel.signatures[0]), "", explain.isa())
    found = [loop.facts(explain.isa()) for loop in loops]
    return max(found, key=lambda f: (f["vector_bits"] if stage == "simd" else 0, f["multiply_adds"]))


@pytest.mark.parametrize("stage", ["naive", "simd"])
def test_a_stress_doubles_one_resource_and_holds_the_other(kernels, stage, tiny):
    x, w = calls_of(stage, tiny)[0]
    for kernel in kernels[stage].values():
        kernel(x, w, w, np.float32(0), 0)
    plain, compute, loads = (per_multiply_add(kernels[stage][kind], stage) for kind in (None, *KINDS))
    rate, twice, more = (f["multiply_adds"] / (f["loads"] - f["stack"]) for f in (plain, compute, loads))  # of arrays
    assert twice == pytest.approx(2 * rate, rel=0.2)
    assert 1.35 < rate / more < 2.1  # x is loaded once as before, the weight twice


@pytest.mark.parametrize("quant", ["q4_1", "q8_0", "f16"])
def test_blocks_of_every_size_are_read_whole(kernels, quant, tiny_of):
    for x, w in calls_of("quantized", tiny_of(quant))[:8]:
        want = load_stage("quantized").matmul(x, w)
        for kernel in kernels["quantized"].values():
            assert np.array_equal(kernel(x, w, stress.copied(w), np.float32(0), 0), want)


def test_a_second_array_is_another_of_the_same_type(tiny):
    import numba

    for stage in ("naive", "quantized"):
        _, w = calls_of(stage, tiny)[0]
        second = stress.copied(w)
        assert numba.typeof(second) == numba.typeof(w)
        a, b = (v if stage == "naive" else v.raw for v in (w, second))
        assert not np.shares_memory(a, b) and np.array_equal(a, b)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stress_changes_is_shown(stage):
    function = load_stage(stage).matmul.py_func
    plain = stress.variant(function, None)
    for kind in KINDS:
        changed = stress.changed(plain, stress.variant(function, kind))
        assert changed and all(line.startswith("+") for line in changed)
        assert any(("touch" if kind == "bytes" else "_again") in line for line in changed)


def test_a_kernel_of_another_form_is_refused():
    def matmul(x, w):
        return x @ w

    with pytest.raises(StageError, match="no recipe for this matmul"):
        stress.variant(matmul, "compute")


def test_an_op_without_weights_is_refused(tiny):
    with pytest.raises(RunError, match="--stress needs an op that multiplies by weights"):
        harness.talk("explain", request(tiny, "naive"), op="add", stress=["compute"])


def test_an_unknown_stress_is_a_usage_error(tiny, tmp_path):
    with pytest.raises(UsageError, match="choose compute, bytes or both"):
        explain.explain("naive", "matmul", prepare(str(tiny), ids="1"), "memory", str(tmp_path))


def test_a_variant_that_computes_something_else_shows_no_time(monkeypatch, tiny):
    function = load_stage("naive").matmul.py_func
    right = stress.variant

    def wrong(function, kind):
        return right(function, kind).replace("* zero", "* (zero + np.float32(1))")

    monkeypatch.setattr(stress, "variant", wrong)
    with pytest.raises(StageError, match="the compute variant does not give the plain kernel's result"):
        stress.stress_run(function, {"prefill": calls_of("naive", tiny)[:1]}, ("compute",))


def test_a_stress_of_both_passes_is_recorded(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    job = prepare(str(tiny), ids="1,2,3", n=2)
    record = explain.explain("kv_cache", "matmul", job, "both", str(tmp_path))
    assert [(one["pass"], one["tokens"]) for one in record["passes"]] == [("prefill", 3), ("decode", 1)]
    L = job.gguf.config.L
    for one in record["passes"]:
        assert (one["calls"], one["of"]) == (7 * L + 1, 7 * L + 1)
        assert list(one["stressed"]) == ["compute", "bytes", "loads"]
        assert one["weight_mb"] == pytest.approx(sum(weights(job)) / 1e6)
    assert len(list(tmp_path.glob("*/explain/*both*.json"))) == 1
    assert max(map(len, lines(explain.render(record)))) <= 80


def weights(job) -> list[int]:
    from common.roofline import float_bytes

    return list(float_bytes(job.gguf.config).values())


def one_pass(**costs) -> dict:
    """A pass whose stresses cost what is given, beyond doubt where not zero."""
    made = {
        kind: {"ms": 1.0, "cost": c, "low": c - 0.01, "high": c + 0.01, "costs": c > 0.03} for kind, c in costs.items()
    }
    return {"pass": "decode", "stressed": made}


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"compute": 0.9}, "decode: twice the arithmetic costs 90%, so that is what binds."),
        ({"compute": 0.01}, "twice the arithmetic costs 0%, next to nothing: that is not what binds."),
        ({"bytes": 0.95, "loads": 0.1}, "fetching twice the bytes costs 85% (twice the load instructions 10%)"),
        ({"bytes": 0.7, "loads": 0.6}, "twice the load instructions costs 60% (fetching twice the bytes 10%)"),
        ({"compute": 0.3, "bytes": 0.2, "loads": 0.15}, "twice the arithmetic costs 30%"),
        ({"compute": 0.4, "bytes": 0.3, "loads": 0.15}, "it binds in part."),
        ({"compute": 0.3, "bytes": 0.1, "loads": 0.05}, "in part; mostly each instruction waits for earlier ones."),
        ({"compute": 0.3}, "twice the arithmetic costs 30%: it binds in part."),
        ({"compute": 0.0, "bytes": 0.0, "loads": 0.0}, "next to nothing: each instruction waits for earlier ones."),
        ({"bytes": 0.0, "loads": 0.0}, "next to nothing: that is not what binds."),
    ],
)
def test_the_verdict_follows_from_the_costs(costs, said):
    assert said in explain.binds(one_pass(**costs))


def test_noise_is_no_verdict():
    noisy = one_pass(compute=0.2)
    noisy["stressed"]["compute"].update(low=-0.3, high=0.9, costs=False)
    assert "too noisy to tell" in explain.binds(noisy)


def test_a_cost_is_the_time_added():
    found = stress.cost([10.0, 10.2, 9.8, 10.0], [15.0, 15.3, 14.7, 15.0])
    assert found["cost"] == pytest.approx(0.5)
    assert found["low"] < 0.5 < found["high"] and found["costs"]
    assert not stress.cost([10.0, 10.2, 9.8], [10.1, 10.0, 9.9])["costs"]


# ---- shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "simd", "quantized"])
def test_an_explanation_fits_eighty_columns(found, tiny, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record = {**profile.heading(name, prepare(str(tiny), ids="1"), MACHINE), "stress": None, **found[name]}
    text = lines(explain.render(record, asm=True))
    assert max(map(len, text)) <= 80
    assert sum(line.startswith("> line") for line in text) == 1
    assert any("def matmul(x, w)" in line for line in text)
    mnemonic = record["assembly"][0][0].split(" ")[0]
    assert any(line.strip().startswith(mnemonic) for line in text)
    assert len(lines(explain.render(record))) < len(text)


def test_code_without_a_loop_is_told():
    assert explain.loop_table({"loops": [], "hottest": None}) == [
        "No loop: the code runs straight through, or in a function that it calls."
    ]


def test_a_readers_own_stage_is_explained(tiny, tmp_path):
    mine = copy_of("naive", tmp_path, ("total += x[t, k] * w[k, n]", "total += w[k, n] * x[t, k]"))
    made = explained(tiny, str(mine), "matmul")
    assert made["file"] == "mine.py"
    assert any("w[k, n] * x[t, k]" in line for line in made["source"])


def test_another_architecture_is_refused(monkeypatch, tiny):
    monkeypatch.setattr(explain.platform, "machine", lambda: "riscv64")
    assert explain.isa() is None
    monkeypatch.setattr(explain, "ask_for_remarks", lambda: None)

    def matmul(x, w):
        return x @ w

    matmul.py_func = matmul
    monkeypatch.setattr(explain, "load_stage", lambda name: SimpleNamespace(matmul=matmul))
    with pytest.raises(StageError, match="not of riscv64"):
        explain.explain_run(request(tiny, "naive"), "matmul", None)
