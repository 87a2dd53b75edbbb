"""Every CUDA source of every stage compiles for the GPUs it names, without a GPU, and keeps to its registers."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stages
from common import cuda, diff

REGISTERS = 128  # a thread: what a kernel may use that is not named here
MORE = {
    ("stages.gemm.warptiled", "matmul"): 240,  # 128 sums a thread, one block of 256 threads a processor
    ("stages.gemm.tensor_core", "matmul"): 255,  # likewise, and two sets of fragments
    ("stages.gemm.hopper", "matmul"): 168,  # 65536 / 384 threads; the multiplying ones take 232 of them at run time
    ("stages.gemm_q4k.tensor_core", "many"): 168,  # a block of weights in registers and the next on its way
}
STATIC_SHARED = 48 * 1024  # bytes a block may declare


def sources():
    """(module name, arch) of every module under stages/ that holds SOURCE and ARCHS."""
    for found in pkgutil.walk_packages(stages.__path__, "stages."):
        if "SOURCE" in (text := Path(found.module_finder.find_spec(found.name).origin).read_text()) and "ARCHS" in text:
            module = importlib.import_module(found.name)
            yield from ((found.name, arch) for arch in module.ARCHS)


SOURCES = list(sources())


def test_the_stages_are_found():
    names = {name for name, _ in SOURCES}
    assert {"stages.gemm.naive", "stages.gemm.hopper", "stages.gemm_q4k.tensor_core"} <= names


@pytest.mark.parametrize(("name", "arch"), SOURCES)
def test_a_source_compiles_and_spills_nothing(name, arch):
    module = importlib.import_module(name)
    cubin, kernels = cuda.compile(module.SOURCE, getattr(module, "OPTIONS", ()), arch)
    assert cubin.startswith(b"\x7fELF")
    plain = re.sub(r"__launch_bounds__\([^()]*\)", "", module.SOURCE)
    assert set(kernels) == set(re.findall(r"__global__\s+void\s+(\w+)\(", plain))
    for kernel, used in kernels.items():
        assert (used.stack, used.spills) == (0, 0), kernel
        assert used.registers <= MORE.get((name, kernel), REGISTERS), kernel
        assert used.shared <= STATIC_SHARED, kernel


def test_a_broken_source_says_why():
    with pytest.raises(cuda.CUDAError, match='identifier "nowhere" is undefined'):
        cuda.compile('extern "C" __global__ void f(float* x) { x[0] = nowhere; }')


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
    _, kernels = cuda.compile(source)
    assert set(kernels) == {"lean", "heavy"}
    assert kernels["lean"].stack == 0 and kernels["heavy"].stack >= 256
    assert 0 < kernels["lean"].registers < kernels["heavy"].registers


def test_a_gpu_gets_the_target_that_its_source_needs():
    assert cuda.arch_option(("sm_90a",), 90) == ("-arch=sm_90a",)
    assert cuda.arch_option(("sm_75", "sm_80"), 86) == ()
    with pytest.raises(cuda.CUDAError, match="needs a GPU of sm_90a, and this one is sm_80"):
        cuda.arch_option(("sm_90a",), 80)
    with pytest.raises(cuda.CUDAError, match="sm_80 or sm_90a, and this one is sm_75"):
        cuda.arch_option(("sm_80", "sm_90a"), 75)


LADDERS = {name: importlib.import_module(f"stages.{name}") for name in ("gemm", "gemm_q4k")}
RUNGS = [(ladder, stage) for ladder, package in LADDERS.items() for stage in package.STAGES]


def test_rungs_import_without_a_gpu_library():
    code = (
        "import importlib, sys\n"
        "sys.modules['cupy'] = sys.modules['torch'] = None\n"
        f"for ladder, stage in {RUNGS}: importlib.import_module(f'stages.{{ladder}}.{{stage}}').matmul\n"
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
