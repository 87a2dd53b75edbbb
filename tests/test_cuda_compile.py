"""Every CUDA source of every stage compiles for the GPUs it names, without a GPU, and keeps to its registers."""

import ctypes
import hashlib
import importlib
import itertools
import json
import pkgutil
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

import stages
from common import chapters, cuda, diff, figures, gate, gpu, gpu_ladder, harness
from common.gguf import GGUFError
from common.model import open_model
from common.stage import GPU as GPU_STAGES
from common.stage import StageError

REGISTERS = 128  # a thread: what a kernel may use that is not named here
MORE = {
    ("stages.gemm.warptiled", "matmul"): 240,  # 128 sums a thread, one block of 256 threads a processor
    ("stages.gemm.tensor_core", "matmul"): 255,  # likewise, and two sets of fragments
    ("stages.gemm.hopper", "matmul"): 168,  # 65536 / 384 threads; the multiplying ones take 232 of them at run time
    ("stages.gemm_q4k.tensor_core", "many"): 168,  # a block of weights in registers and the next on its way
    **{(f"stages.{stage}", "matmul"): 64 for stage in ("offload", "cuda", "resident")},  # half the threads there can be
    **{(f"stages.{stage}", "attention"): 64 for stage in ("cuda", "resident")},
}
for stage in ("prefill", "graph", "fused"):
    MORE[f"stages.{stage}", "attention_64"] = 168  # four warps a block, whose sums, scores and queries are registers
    MORE[f"stages.{stage}", "attention_128"] = 240
for stage, size, kind in itertools.product(("flash", "skip"), (64, 128), ("float16", "bfloat16")):
    MORE[f"stages.attention.{stage}", f"attention_{kind}_{size}"] = 255  # 128 threads, whose sums and scores stay there
    for which in ("recomputed", "split", stage):
        MORE[f"stages.attention_backward.{which}", f"of_keys_{kind}_{size}"] = 255  # dk and dv stay in registers
        MORE[f"stages.attention_backward.{which}", f"of_queries_{kind}_{size}"] = 255
    MORE["stages.attention.hopper", f"attention_{kind}_{size}"] = 168  # as gemm's: the multiplying groups take 232
    MORE["stages.attention_backward.hopper", f"of_keys_{kind}_{size}"] = 168
    MORE["stages.attention_backward.hopper", f"of_queries_{kind}_{size}"] = 168
SPILLED = {}  # bytes of stack, bytes of spills at most
LINES = {"attend": 46, "dots": 46, "look": 84, "step": 44}  # which are one loop over tiles, heads or phases
STATIC_SHARED = 48 * 1024  # bytes a block may declare


def sources():
    """(module name, arch) of every module under stages/ that holds SOURCE and ARCHS; sm_50 where CUDA 12 is here."""
    for found in pkgutil.walk_packages(stages.__path__, "stages."):
        if "SOURCE" in (text := Path(found.module_finder.find_spec(found.name).origin).read_text()) and "ARCHS" in text:
            module = importlib.import_module(found.name)
            here = (arch for arch in module.ARCHS if arch != "sm_50" or cuda.version_for(arch) in cuda.compilers())
            yield from ((found.name, arch) for arch in here)


def texts(module):
    """(source, options) of a module's programs: SOURCE, and STEP where a token has a program of its own."""
    yield module.SOURCE, getattr(module, "OPTIONS", ())
    if hasattr(module, "STEP"):
        yield module.STEP, module.STEP_OPTIONS


SOURCES = list(sources())


def test_the_stages_are_found():
    names = {name for name, _ in SOURCES}
    assert {"stages.gemm.naive", "stages.gemm.hopper", "stages.gemm_q4k.tensor_core"} <= names
    assert {f"stages.{stage}" for stage in GPU_STAGES} <= names


@pytest.mark.parametrize(("name", "arch"), SOURCES)
def test_a_source_compiles_and_spills_nothing(name, arch):
    module = importlib.import_module(name)
    kernels = {}
    for source, options in texts(module):
        cubin, found, _ = cuda.compile(source, options, arch)
        assert cubin.startswith(b"\x7fELF")
        plain = re.sub(r"__launch_bounds__\([^()]*\)", "", source)
        assert set(found) == set(re.findall(r"__global__\s+void\s+(\w+)\(", plain))
        kernels |= found
    for kernel, used in kernels.items():
        stack, spills = SPILLED.get((name, kernel), (0, 0))
        assert used.stack <= stack and used.spills <= spills, kernel
        assert used.registers <= MORE.get((name, kernel), REGISTERS), kernel
        assert used.shared <= STATIC_SHARED, kernel
        assert not used.serialized, kernel


@pytest.mark.parametrize("sizes", [(576, 1536, 9, 3, 64, 49152, 30, 96), (4096, 14336, 32, 8, 128, 128256, 32, 128)])
def test_the_kernel_of_a_token_fits_a_processor(sizes):
    """Beside its ring and sums, whatever the model's dimensions."""
    from common.cuda_streams import Cut

    cut = Cut(*sizes)
    used = cuda.compile(importlib.import_module("stages.fused").STEP, cut.options).kernels["step"]
    assert used.shared + cut.shared <= 227 * 1024
    assert used.registers <= REGISTERS and (used.stack, used.spills) == (0, 0)


def test_a_broken_source_says_why():
    with pytest.raises(cuda.CUDAError, match='identifier "nowhere" is undefined'):
        cuda.compile('extern "C" __global__ void f(float* x) { x[0] = nowhere; }')


def test_an_old_gpu_needs_an_old_compiler(monkeypatch):
    assert cuda.version_for("sm_75") == cuda.version_for("sm_90a") == 13
    assert cuda.version_for("sm_50") == 12
    monkeypatch.setattr(cuda, "compilers", dict)
    with pytest.raises(cuda.MissingCompiler, match="to compile for sm_50 .* pip install nvidia-cuda-nvrtc-cu12"):
        cuda.compile("", (), "sm_50")
    with pytest.raises(cuda.MissingCompiler, match="to compile for sm_90 .* pip install nvidia-cuda-nvrtc nvidia"):
        cuda.compile("", (), "sm_90")


def test_resources_are_read_for_each_kernel():
    """A kernel with an array in local memory is told from one without, or the limits above would guard nothing."""
    source = (
        'extern "C" __global__ void lean(float* x) { x[threadIdx.x] += 1; }\n'
        'extern "C" __global__ void heavy(float* x, int n) {\n'
        "    float a[64];\n"
        "    for (int i = 0; i < 64; ++i) a[i] = x[i];\n"
        "    for (int r = 0; r < n; ++r) a[r * 7 % 64] += a[r * 5 % 64];\n"
        "    for (int i = 0; i < 64; ++i) x[i] = a[i];\n"
        "}\n"
    )
    kernels = cuda.compile(source).kernels
    assert set(kernels) == {"lean", "heavy"}
    assert kernels["lean"].stack == 0 and kernels["heavy"].stack >= 256
    assert 0 < kernels["lean"].registers < kernels["heavy"].registers


def test_a_wgmma_that_must_wait_is_told():
    """Sums that are set to 0 before they are added to; where the first product sets them, nothing waits."""
    hopper = importlib.import_module("stages.attention_backward.hopper")
    source = hopper.SOURCE.replace("sum[D / 2], less", "sum[D / 2] = {}, less")
    kernels = cuda.compile(source, hopper.OPTIONS, "sm_90a").kernels
    assert kernels["of_queries_float16_64"].serialized and not kernels["of_keys_float16_64"].serialized


def test_a_gpu_gets_the_target_that_its_source_needs():
    assert cuda.arch_option(("sm_90a",), 90) == ("-arch=sm_90a",)
    assert cuda.arch_option(("sm_75", "sm_80"), 86) == ()
    with pytest.raises(cuda.CUDAError, match="needs a GPU of sm_90a, and this one is sm_80"):
        cuda.arch_option(("sm_90a",), 80)
    with pytest.raises(cuda.CUDAError, match="sm_80 or sm_90a, and this one is sm_75"):
        cuda.arch_option(("sm_80", "sm_90a"), 75)


LADDERS = {
    name: importlib.import_module(f"stages.{name}") for name in ("gemm", "gemm_q4k", "attention", "attention_backward")
}
RUNGS = [(ladder, stage) for ladder, package in LADDERS.items() for stage in package.STAGES]


def test_rungs_import_without_a_gpu_library():
    code = (
        "import importlib, sys\n"
        "sys.modules['cupy'] = sys.modules['torch'] = None\n"
        f"for ladder, stage, entry in {[(ladder, stage, LADDERS[ladder].ENTRY) for ladder, stage in RUNGS]}:\n"
        "    getattr(importlib.import_module(f'stages.{ladder}.{stage}'), entry)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("ladder", "stage"), RUNGS)
def test_a_rung_declares_what_it_changes(ladder, stage):
    folder = Path(LADDERS[ladder].__file__).parent
    rung = importlib.import_module(f"stages.{ladder}.{stage}")
    if rung.PREVIOUS is None:
        assert rung.CHANGES == () and stage == next(iter(LADDERS[ladder].STAGES))
        return
    old, new = folder / f"{rung.PREVIOUS}.py", folder / f"{stage}.py"
    assert diff.undeclared(old, new, rung.CHANGES) == []
    assert set(rung.CHANGES) <= {change.name for change in diff.changes(old, new)}
    assert list(diff.docstring(new)) == ["", "Idea", "Was", "Change", "Expect"]


# ---- the LLM ladder's GPU stages, and what they say where there is no GPU --------------------------------------


def test_gpu_stages_import_without_a_gpu_library():
    code = "import sys\nsys.modules['cupy'] = None\n"
    code += "".join(f"import stages.{stage} as s\ns.load, s.forward, s.logits, s.generate\n" for stage in GPU_STAGES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_a_kernel_fits_on_a_screen(stage):
    for source, _ in texts(importlib.import_module(f"stages.{stage}")):
        for name, (text, _) in diff.cuda_functions(source).items():
            assert not name or len(text.splitlines()) <= LINES.get(name, 40), name


def test_an_early_launch_says_so_to_the_driver(monkeypatch):
    """Read back as cuda.h lays it out: a CUlaunchConfig of 56 bytes, with one CUlaunchAttribute of 72."""
    read, array = [], SimpleNamespace(data=SimpleNamespace(ptr=4096))
    cupy = SimpleNamespace(ndarray=SimpleNamespace, cuda=SimpleNamespace(get_current_stream=lambda: array.data))

    def launch(config, function, arguments, extra):
        *sizes, stream, attributes, count = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        of = ctypes.string_at(attributes, 72)
        given = b"".join(ctypes.string_at(arguments[i], size) for i, size in enumerate((8, 4, 9)))
        read.extend([sizes, stream, count, struct.unpack("3i60x", of), struct.unpack("=Qf9s", given), function.value])
        return len(read) // 12

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchKernelEx=launch))
    arguments = array, np.float32(2.5), np.array([b"by value!"], "V9")
    cuda._launch_early(77, 22, 704, arguments, 1000)
    assert read == [[22, 1, 1, 704, 1, 1, 1000], 4096, 1, (6, 0, 1), (4096, 2.5, b"by value!"), 77]
    with pytest.raises(cuda.CUDAError, match="cuLaunchKernelEx answered 1 for 22 blocks of 704 threads"):
        cuda._launch_early(77, 22, 704, arguments, 1000)


@pytest.mark.parametrize(("gpu", "early"), [(80, False), (90, True), (100, True)])
def test_a_gpu_that_cannot_launch_early_launches(gpu, early, monkeypatch):
    launched = []
    kernel = lambda *given, shared_mem: launched.append((*given, shared_mem))  # noqa: E731
    kernel.kernel = SimpleNamespace(ptr=77)
    monkeypatch.setattr(cuda, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(cuda, "_device", lambda: 0)
    monkeypatch.setattr(cuda, "capability", lambda device: gpu)
    monkeypatch.setattr(cuda, "_launch_early", lambda *given: launched.append(given))
    cuda.Program("").launch("f", 3, 64, ("x",), 8, early=True)
    assert launched == [(77, 3, 64, ("x",), 8) if early else ((3,), (64,), ("x",), 8)]


def test_the_matmul_of_cuda_is_the_one_of_resident():
    a, b = (diff.definitions((Path(stages.__path__[0]) / f"{stage}.py").read_text()) for stage in ("cuda", "resident"))
    kept = [name for name in a if name.startswith("SOURCE.")]
    assert "SOURCE.matmul" in kept
    assert all(a[name].text == b[name].text for name in [*kept, "matmul", "attention", "OPTIONS"])


class Runtime:
    """CUDA's runtime of a machine without a GPU, or with another's driver."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, driver, built=13000, devices=1):
        self.driver, self.built, self.devices = driver, built, devices

    def driverGetVersion(self):
        return self.driver

    def runtimeGetVersion(self):
        return self.built

    def getDeviceCount(self):
        if not self.devices:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.devices


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), r"need CuPy, which is not installed: pip install"),
        (ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"), r"cannot be imported \(No module named"),
        (ImportError("\n====\nlibcudart.so.13: cannot open"), r"cannot be imported \(libcudart.so.13: cannot open\)"),
        (Runtime(0), "need an NVIDIA driver, and none is loaded"),
        (Runtime(12040), "driver serves CUDA 12 and this CuPy was built for CUDA 13: pip install cupy-cuda12x"),
        (Runtime(13000, devices=0), "need an NVIDIA GPU, and CUDA says cudaErrorNoDevice"),
    ],
)
def test_what_is_missing_is_one_sentence(found, said, monkeypatch):
    def import_module(name):
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(cuda=SimpleNamespace(runtime=found))

    monkeypatch.setattr(gpu.importlib, "import_module", import_module)
    with pytest.raises(StageError, match=said) as caught:
        gpu.backend()
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_a_driver_newer_than_the_wheel_serves(monkeypatch):
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime(13020, 12090)))
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: cupy)
    assert gpu.backend() is cupy


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_a_load_without_a_backend_ends_with_its_sentence(stage, tiny, monkeypatch):
    """Which says no more than the sentence, and leaves the process with exit code 4."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StageError, match="CuPy") as caught:
        importlib.import_module(f"stages.{stage}").load(open_model(tiny), 8, 1)
    assert harness.explain(caught.value, stage) == (str(caught.value), 4)


class Full:
    """What stands for CuPy on a GPU whose memory runs out."""

    class OutOfMemoryError(MemoryError):
        pass

    def __init__(self):
        runtime = Runtime(13000)
        runtime.memGetInfo = lambda: (20_000_000, 141_000_000_000)
        self.cuda = SimpleNamespace(runtime=runtime, memory=SimpleNamespace(OutOfMemoryError=self.OutOfMemoryError))


@pytest.mark.parametrize(
    "error",
    [
        Full.OutOfMemoryError("Out of memory allocating 1,024 bytes (allocated so far: 512 bytes)."),
        Runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"),
    ],
)
def test_memory_that_runs_out_in_a_forward_is_one_sentence(error, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Full())
    request = harness.Request("cuda", str(tiny), [1] * 5, 1, context=8)
    told, code = harness.explain(gpu.out_of_memory(error, request), "cuda")
    assert code == 4 and "\n" not in told
    assert re.search(
        r"a cache of 8 tokens and a step of 5 need about 0.\d\d GB, and of its 141.00 GB 0.02 are free", told
    )
    assert gpu.LESS in told
    for other in (MemoryError("Unable to allocate"), Runtime.CUDARuntimeError("cudaErrorIllegalAddress: an illegal")):
        assert gpu.out_of_memory(other, request) is None


def test_an_eps_that_the_gpu_would_flush_to_zero_is_refused(tiny):
    gguf = open_model(tiny)
    gpu.supported(gguf)
    gpu.supported(gguf._replace(config=replace(gguf.config, eps=1.18e-38)))
    with pytest.raises(GGUFError, match="has an RMS norm eps of 1e-40, which is zero to GPU stages"):
        gpu.supported(gguf._replace(config=replace(gguf.config, eps=1e-40)))


def test_room_is_counted_once_for_a_tied_model(smollm2):
    gguf = open_model(smollm2)
    assert gguf.config.tied
    assert gpu.weight_bytes(gguf) == sum(t.nbytes for t in gguf.gguf.tensors.values())
    assert gpu.cache_bytes(gguf, 100) == 4 * 30 * 2 * 100 * 3 * 64


# ---- what was recorded on a GPU, and the chapters that quote it -------------------------------------------------

RECORDS = Path(cuda.__file__).parent.parent / "reports" / "nvidia-h200" / "llm"
PARTS = ["Idea", "Picture", "Arithmetic", "Predict", "Code", "Measured", "What it costs", "What lost, and why",
         "Three questions", "Sources"]  # fmt: skip


def record(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_a_record_measured_this_source_and_found_it_right(stage):
    module, found = importlib.import_module(f"stages.{stage}"), record(stage)
    compiled = "".join(f"{source}{options}" for source, options in texts(module))
    assert found["compiled"] == hashlib.sha256(compiled.encode()).hexdigest()
    assert found["agreement"]["nmse"] <= gate.tolerance(stage)
    assert found["agreement"]["bit_identical"] and all(found["agreement"]["top1"])
    assert len(found["commit"]["sha"]) == 40
    for row in found["rows"]:
        shown = row["ttft_ms" if row["ms_per_token"] is None else "ms_per_token"]
        assert found["ms"][row["shape"]] == shown["median"] == median(shown["samples"])


def test_where_the_time_goes():
    for stage in ("cuda", "resident"):
        for T in (16, 64, 512):
            ops = record(stage)["profile"][f"T={T}"]["op_ms"]
            assert ops["matmul"]["share"] >= 0.6
            assert ops["attention"]["share"] < 0.05
    assert 1000 / record("resident")["ms"]["tg32"] >= 100


def test_the_free_that_takes_long_is_the_wait_for_kernels():
    for T in (16, 512):
        one = record("cuda")["profile"][f"T={T}"]
        free = one["call_ms"]["cudaFree"]
        assert free["ms"] > (0.8 if T == 512 else 0.4) * one["watched_ms"]
        assert free["own_ms"] < 0.15 * free["ms"]
        waits = free["wait_ms"] + one["call_ms"]["cudaMalloc"]["wait_ms"]  # wherever the host was made to wait
        assert waits == pytest.approx(one["kernel_ms"], rel=0.3)


@pytest.mark.parametrize("stage", ["offload", "cuda", "resident"])
def test_a_chapters_prediction_holds(stage):
    """Within 1.3 times, each from the profile of the stage before."""
    told, found = gpu_ladder.expected(record)[stage], record(stage)
    assert found["expected"] == pytest.approx(told)
    assert set(told) == {"pp16", "pp512", "tg32"}
    for shape, ms in told.items():
        assert max(ms, found["ms"][shape]) <= 1.3 * min(ms, found["ms"][shape]), (shape, ms, found["ms"][shape])


def test_the_sanitizer_found_what_was_planted_and_nothing_else():
    exits = {(run["tool"], run["run"]): run["exit"] for run in record("sanitizer")["runs"]}
    clean = {tool for (tool, what), code in exits.items() if what == "clean" and code == 0}
    assert clean == {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert exits["memcheck", "planted"] and exits["racecheck", "race"]
    tests = record("tests")
    assert (tests["exit"], tests["skipped"]) == (0, 0)
    now = {name: gpu_ladder.compiled(importlib.import_module(f"stages.{name}")) for name in GPU_STAGES}
    assert tests["compiled"] == record("sanitizer")["compiled"] == now


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_a_chapter_quotes_the_code_and_the_records(stage):
    path = Path(stages.__path__[0]) / f"{stage}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)", text, re.M) == PARTS
    assert chapters.filled(text, path) == text
    assert text.count("<!--= ") > 10
    assert figures.figures(text, RECORDS) == text


def test_a_cell_names_the_shape_where_it_is_another():
    rows = [{"shape": shape, "ttft_ms": {"median": 9.0}, "ms_per_token": {"median": 2.0} if "tg" in shape else None}
            for shape in ("pp64", "tg32", "tg8@d1024")]  # fmt: skip
    assert chapters.cell(rows, "pp64") == "9.00"
    assert chapters.cell(rows, "tg128") == "2.00 (tg32)"
    assert chapters.cell(rows, "tg128@d1024") == "2.00 (tg8@d1024)"
    assert chapters.cell(rows, "pp512") == "–"
