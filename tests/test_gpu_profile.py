"""What a GPU stage's profile counts, on a clock that made-up kernels and calls move; and what explain reads."""

import importlib
import io
import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from common import cuda, gpu_explain, gpu_profile, show
from common.cuda import Program
from common.stage import StageError
from tests.helpers import lesson, one_sentence
from tests.test_profile import MACHINE

LAUNCH, KERNEL, MALLOC, FREE, COPY = 0.002, 0.5, 0.003, 0.001, 0.010  # seconds


class Gpu:
    """CuPy as far as a profile needs it: kernels run behind the host, and a free or a copy back waits for them."""

    def __init__(self):
        self.now, self.busy, self.launches = 0.0, 0.0, []
        outer = self

        class Event:
            def record(self):
                self.at = max(outer.busy, outer.now)

        class ndarray:
            nbytes = 64

            def get(self):
                outer.synchronize()
                outer.now += COPY

            def set(self, source):
                outer.now += COPY

        runtime = SimpleNamespace(deviceSynchronize=self.synchronize, malloc=self.malloc, free=self.free)
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Event=Event,
            get_elapsed_time=lambda a, b: 1e3 * (b.at - a.at),
            PythonFunctionAllocator=lambda malloc, free: SimpleNamespace(
                malloc=lambda size: malloc(size, 0), free=free
            ),
            MemoryPool=lambda malloc: SimpleNamespace(malloc=malloc),
            using_allocator=self.using,
        )
        self.ndarray = ndarray
        self.asarray = self.array = lambda source: self.ndarray().set(source)
        self.allocators = []

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now = max(self.now, self.busy)

    def malloc(self, size):
        self.now += MALLOC
        return len(self.launches) + size

    def free(self, address):
        self.synchronize()
        self.now += FREE

    @contextmanager
    def using(self, allocate=None):
        self.allocators.append(allocate)
        yield
        self.allocators.pop()

    def launch(self, program, name, blocks, threads, args, shared=0):
        self.now += LAUNCH
        self.busy = max(self.busy, self.now) + KERNEL
        self.launches.append(name)


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(gpu_profile, "time", made)
    monkeypatch.setattr(Program, "launch", made.launch.__func__.__get__(made))
    monkeypatch.setattr(gpu_profile.DELAYED, "kernel", lambda name: lambda *_: made.launches.append(name))
    return made


def step(gpu, watch):
    """A launch into memory that is really allocated, and freed while the kernel runs; then a copy back."""
    with gpu.cuda.using_allocator(None):
        address = gpu.allocators[-1](8)
        Program.launch(PROGRAM, "matmul", 1, 1, ())
        watch.free(address, 0)
        gpu.ndarray.get(gpu.ndarray())
    return watch.taken()


PROGRAM = Program("")


def test_a_free_that_waits_for_kernels_is_told_from_one_that_costs(gpu):
    launch, get = Program.launch, gpu.ndarray.get
    with gpu_profile.Calls(apart=False) as calls:
        together = step(gpu, calls)
    with gpu_profile.Calls(apart=True) as calls:
        apart = step(gpu, calls)
        assert calls.most == 8 and calls.live == 0
    rows = {row["call"]: row for row in gpu_profile.summed_calls([together], [apart])}
    assert rows["cudaFree"]["ms"] == pytest.approx(1e3 * (KERNEL + FREE))
    assert rows["cudaFree"]["wait_ms"] == pytest.approx(1e3 * KERNEL)
    assert rows["cudaFree"]["own_ms"] == pytest.approx(1e3 * FREE)
    assert rows["cudaMalloc"]["own_ms"] == pytest.approx(1e3 * MALLOC)
    assert (rows["cudaMalloc"]["calls"], rows["cudaMalloc"]["bytes"]) == (1, 8)
    assert rows["cudaLaunchKernel"]["ms"] == pytest.approx(1e3 * LAUNCH)
    assert rows["cudaMemcpy, GPU to host"]["ms"] == pytest.approx(1e3 * COPY)
    assert rows["cudaMemcpy, GPU to host"]["bytes"] == 64
    assert (Program.launch, gpu.ndarray.get) == (launch, get), "what was watched is as it was"


def test_a_call_within_a_call_is_counted_once(gpu):
    with gpu_profile.Calls(apart=False) as calls:
        gpu.asarray(np.ones(4))
        seen = calls.taken()
    assert seen["cudaMemcpy, host to GPU"][0] == 2  # asarray's own, and the set within it
    assert sum(s for *_, s in seen.values()) == pytest.approx(COPY)


def test_kernels_are_timed_behind_a_delay_and_named_by_their_matrix(gpu):
    weights = SimpleNamespace(data=SimpleNamespace(ptr=77))
    with gpu_profile.Kernels({77: ("w_q", 4, 8, 32)}) as kernels:
        for args in ((weights,), (weights,), (1,)):
            Program.launch(PROGRAM, "matmul" if args != (1,) else "add", 1, 1, args)
        rows = gpu_profile.summed_kernels([kernels.taken()])
    assert gpu.launches == ["delay", "matmul", "delay", "matmul", "delay", "add"]
    assert [(r["kernel"], r["weight"], r["calls"]) for r in rows] == [("matmul", "w_q", 2), ("add", None, 1)]
    assert rows[1]["ms"] == pytest.approx(1e3 * KERNEL, rel=0.01)


NCU = """==PROF== Connected
"ID","Kernel Name","Grid Size",@TITLES@
"","","",@UNITS@
"0","matmul(const float*, int)","(32, 1, 1)","2,000","32","90.0","0.5","80","99","70","1,000"
"1","matmul(const float*, int)","(32, 1, 1)","4,000","32","92.0","1.5","82","97","70","3,000"
"2","matmul(const float*, int)","(32, 1, 1)","1,000","32","10","1","1","1","1","7"
"""


def test_counters_are_means_over_launches_of_a_kernel_and_pass():
    units = ("ns", "register/thread", "%", "%", "%", "%", "%", "inst")
    quoted = [",".join(f'"{word}"' for word in words) for words in (gpu_profile.COUNTED, units)]
    raw = NCU.replace("@TITLES@", quoted[0]).replace("@UNITS@", quoted[1])
    prompt, token = gpu_profile.counted(raw, prefill=2)
    assert (prompt["pass"], prompt["kernel"], prompt["grid"]) == ("prefill", "matmul", "(32, 1, 1)")
    assert (prompt["launches"], prompt["us"], prompt["registers"]) == (2, pytest.approx(3), 32)
    assert (prompt["occupancy_percent"], prompt["l2_hit_percent"], prompt["warp_instructions"]) == (91, 98, 2000)
    assert (token["pass"], token["us"]) == ("decode", pytest.approx(1))


def document():
    """A profile as a run would make it: ms of a step of 4 tokens."""
    kernels = [
        {"kernel": "matmul", "weight": w, "N": 64, "K": 64, "bytes_each": 2304, "calls": 2, "ms": ms}
        for w, ms in (("w_q", 6.0), ("output", 3.0))
    ] + [{"kernel": "add", "weight": None, "N": None, "K": None, "bytes_each": None, "calls": 4, "ms": 1.0}]
    calls = [
        {"call": "cudaFree", "calls": 8, "bytes": 0, "ms": 11.4, "wait_ms": 10.0, "own_ms": 0.4},
        {"call": "cudaMemcpy, GPU to host", "calls": 1, "bytes": 4096, "ms": 0.1, "wait_ms": 0, "own_ms": 0.1},
    ]
    one = {"new_tokens": 4, "steps": 1, "ms": 12.0, "samples_ms": [12.0], "watched_ms": 12.0}
    one |= {"kernels": kernels, "calls": calls}
    heading = {"stage": "cuda", "machine": {"name": "Made-up"}, "threads": 1, "shape": "pp4+tg1", "commit": None}
    heading["model"] = {"name": "m", "quant": "Q4_K", "layers": 1, "file_layers": 1}
    return heading | {"prefill": one, "decode": None, "counters": None, "event_us": 1.5,
                      "gpu_mb": {"model": 10, "peak": 12, "cuda": 500}}  # fmt: skip


def test_the_table_tells_shares_calls_and_what_a_free_waits_for():
    told = document()
    gpu_profile.judge(told["prefill"], MACHINE, SimpleNamespace(threads=1))
    page = show.Page(width=100, record=True, file=io.StringIO())
    for piece in gpu_profile.render(told):
        page.print(piece)
    text = page.export_text()
    assert "of which kernels run 10.0" in text
    assert [words[1] for line in text.splitlines() if (words := line.split())[:1] == ["matmul"]] == ["90.0%"]
    assert "w_q" in text and "output" in text
    assert "cudaFree takes 95% of the step, but its own cost is 3.3%" in text


def test_a_matrix_faster_than_the_gpu_is_an_error_in_the_accounting():
    told = document()["prefill"]
    told["kernels"][0]["ms"] = 1e-9
    from common.roofline import AccountingError

    with pytest.raises(AccountingError):
        gpu_profile.judge(told, MACHINE, SimpleNamespace(threads=1))


def test_counters_need_a_gpu_stage(tiny):
    done = lesson("profile", "quantized", "--ncu", "-m", tiny, "--ids", "1,2")
    assert done.returncode == 2
    assert "name a GPU stage" in one_sentence(done)


# ---- explain ---------------------------------------------------------------------------------------------------


def test_explain_reads_a_kernel_without_a_gpu(tiny, tmp_path):
    done = lesson("explain", "resident", "matmul", "-m", tiny, "--save", tmp_path, "--json", PATH="/usr/bin")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    used = cuda.compile(*source("resident"), "sm_90").kernels["matmul"]
    assert (found["registers"], found["shared"], found["spills"]) == (used.registers, used.shared, 0)
    assert (found["arch"], found["language"], found["threads"]) == ("sm_90", "PTX", 128)
    assert found["loop"]["classes"]["float arithmetic"] == found["loop"]["classes"]["global loads"] / 2 == 4
    assert found["functions"]["unpack_q6_k"] > 0 and sum(found["classes"].values()) == found["instructions"]
    summing = next(i for i, line in enumerate(found["source"], found["first_line"]) if "sum += x[" in line)
    assert {line for _, line in found["loop"]["instructions"]} == {summing}
    text = lesson("explain", "resident", "softmax", "-m", tiny, "--save", tmp_path).stdout.decode()
    assert "attention of resident, compiled for sm_90" in text and "fma.rn.f32" in text


def source(stage):
    module = importlib.import_module(f"stages.{stage}")
    return module.SOURCE, module.OPTIONS


def test_explain_names_the_kernels_there_are(tiny):
    done = lesson("explain", "offload", "rope", "-m", tiny)
    assert done.returncode == 2
    assert "offload has no kernel 'rope': name one of matmul" in one_sentence(done)


SASS = """
	//## File "/x/stage.cu", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
	//## File "/x/stage.cu", line 9
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   FFMA R0, R4, R5, R0 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
        /*0060*/                   NOP;
"""


def test_sass_is_read_by_line_class_and_loop():
    listed, labels = gpu_explain.instructions(SASS, sass=True)
    assert [line for _, line in listed] == [7, 9, 9, 9, 9, 9]
    assert labels == {".L_x_1": 1, ".L_x_2": 5}
    first, _ = gpu_explain.innermost(listed, labels, gpu_explain.SASS_JUMP)
    assert [gpu_explain.mnemonic(text) for text, _ in first.instructions] == ["LDG.E.128", "FFMA", "BRA"]
    found = gpu_explain.classes([text for text, _ in listed], sass=True)
    assert (found["global loads"], found["float arithmetic"], found["branches"]) == (1, 1, 3)
    assert gpu_explain.widths([text for text, _ in listed]) == {"LDG.E.128": 1}


def test_a_cubin_that_the_disassembler_cannot_read_says_so():
    with pytest.raises(StageError, match="install one as new as the compiler"):
        gpu_explain.disassembled("/bin/true", b"", "matmul")
