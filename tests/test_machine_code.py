"""What the compiler made of the kernels. Each is compiled anew: code from numba's cache shows no assembly."""

import json
import os
import platform
import re
import subprocess
import sys

import pytest

from common.model import UNPACKED

# Runs in a process of its own. What `show` prints last is the answer.
COMPILE = """
import importlib, json
import numpy as np
from common.jit import numba

def fresh(stage):
    kernel = importlib.import_module(f"stages.{stage}").matmul
    return numba.njit(**kernel.targetoptions)(kernel.py_func)  # its own options, but for the cache

def inputs(T, K, N):
    random = np.random.default_rng(T * K * N)
    return random.standard_normal((T, K)).astype(np.float32), random.standard_normal((K, N)).astype(np.float32)

def show(answer):
    print(json.dumps(answer))
"""

X86 = platform.machine() in ("x86_64", "AMD64")
FUSED = re.compile(r"\bvfn?madd\d*ps\s.*%[yz]mm" if X86 else r"\bfmla\s+v\d+\.4s")
PACKED = re.compile(r"\bv?(?:mul|add|fn?madd\d*)ps\s" if X86 else r"\bf(?:mla|mul|add)\s+v\d+\.4s")
VECTOR_IR = re.compile(r"(?:llvm\.fmuladd|fadd|fmul)[^\n]*(?:v\d+f32|<\d+ x float>)")


def run(code: str, **env) -> dict:
    """The last line that `code` prints after COMPILE, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE + code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def code_of(*stages: str) -> dict:
    """stage -> {asm, llvm} of its matmul on float32 matrices."""
    return run(f"""
answer = {{}}
for stage in {stages!r}:
    kernel = fresh(stage)
    kernel(*inputs(2, 8, 64))
    answer[stage] = {{"asm": list(kernel.inspect_asm().values())[0], "llvm": list(kernel.inspect_llvm().values())[0]}}
show(answer)
""")


@pytest.fixture(scope="module")
def code():
    return code_of("naive", "tiling", "simd")


@pytest.mark.parametrize("stage", ["naive", "tiling"])
def test_a_scalar_stage_has_no_packed_arithmetic(code, stage):
    assert "ss" in code[stage]["asm"] or not X86  # there is code, and it is scalar
    assert not PACKED.findall(code[stage]["asm"])
    assert not VECTOR_IR.findall(code[stage]["llvm"])


def test_simd_multiplies_and_adds_in_vector_registers(code):
    assert re.search(r"call <16 x float> @llvm\.fmuladd\.v16f32", code["simd"]["llvm"])
    assert len(FUSED.findall(code["simd"]["asm"])) >= 8  # a tile's rows, unrolled


RIGHT = """
shapes = [(1, 1, 1), (1, 8, 16), (2, 7, 15), (3, 9, 17), (1, 576, 192), (9, 33, 200), (16, 64, 48), (5, 2048, 80)]
error = 0.0
kernel = fresh("simd")
for T, K, N in shapes:
    x, w = inputs(T, K, N)
    want = x.astype(np.float64) @ w
    got = kernel(x, w)
    assert got.shape == (T, N) and got.dtype == np.float32
    error = max(error, float(np.sum((got - want) ** 2) / np.sum(want**2)))
show({"error": error, "asm": list(kernel.inspect_asm().values())[0]})
"""


def test_simd_is_right_at_any_shape():
    assert run(RIGHT)["error"] < 1e-12


def test_simd_is_right_on_a_cpu_without_wide_registers_or_fused_multiply_add():
    # numba then compiles for the first CPU of the architecture: on x86, SSE2.
    answer = run(RIGHT, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert answer["error"] < 1e-12
    if X86:
        assert not re.search(r"%[yz]mm|vfmadd", answer["asm"])
        assert re.search(r"\bmulps\s", answer["asm"])


# Arrays whose last byte is the last of a readable page: one read too far ends the process.
GUARD = """
import ctypes, mmap

def guarded(array):
    pages = -(-array.nbytes // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = (pages - 1) * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    view = np.frombuffer(memory, array.dtype, array.size, end - array.nbytes).reshape(array.shape)
    view[...] = array
    return view
"""


def test_simd_reads_nothing_beyond_its_arrays():
    code = """
kernel = fresh("simd")
for T, K, N in [(1, 1, 1), (3, 8, 17), (2, 8, 16), (5, 16, 100)]:
    x, w = inputs(T, K, N)
    assert np.array_equal(kernel(guarded(x), guarded(w)), kernel(x, w))
show({"done": True})
"""
    assert run(GUARD + code) == {"done": True}


QUANTIZED = """
from common.gguf import TYPES
from common.quants import dequantize
from stages.quantized import Blocks

class Tensor:
    pass

def blocks(name, N, K):  # a matrix of random blocks, and its weights
    tensor = Tensor()
    tensor.type, tensor.shape = TYPES[name], (N, K)
    size = N * K // tensor.type.block * tensor.type.bytes
    random = np.random.default_rng(N * K)
    if tensor.type.block == 1:
        weights = random.standard_normal((N, K)).astype(np.float32)
        low = {"F32": 0, "F16": 0, "BF16": 2}[name]
        raw = weights.astype(np.float16) if name == "F16" else weights
        tensor.raw = raw.view(np.uint8).reshape(N * K, -1)[:, low:].reshape(-1).copy()
        length = K
    else:
        tensor.raw = random.integers(0, 60, size, dtype=np.uint8)  # as high bytes of a float16: finite
        length = tensor.type.block
    return Blocks(N, K, tensor.type.id, length, length // tensor.type.block * tensor.type.bytes, tensor.raw), tensor

kernel, answer = fresh("quantized"), {}
for name in NAMES:
    error = 0.0
    for T, N, K in [(1, 3, 256), (5, 2, 512)] + ([(2, 3, 33), (1, 1, 1)] if TYPES[name].block == 1 else []):
        w, tensor = blocks(name, N, K)
        x = inputs(T, K, 1)[0]
        got = kernel(guarded(x), w._replace(raw=guarded(w.raw)))
        want = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
        error = max(error, float(np.sum((got - want) ** 2) / np.sum(want**2)))
    answer[name] = error
answer["asm"] = list(kernel.inspect_asm().values())[0]
show(answer)
"""


def test_quantized_is_right_for_every_type_and_reads_nothing_beyond_its_arrays():
    names = sorted(UNPACKED)
    answer = run(f"{GUARD}\nNAMES = {names!r}\n{QUANTIZED}")
    assert FUSED.search(answer.pop("asm"))
    assert {name: error for name, error in answer.items() if not error < 1e-11} == {}
    assert sorted(answer) == names


INTEGERS = """
from common.int8 import to_int8
from common.intrinsics import DOTS
from common.quants import Q4_1
from stages import blocked

@numba.njit
def tiles(x, w, out, q, d, m, totals):
    blocked.tiles_of(Q4_1, x, w, out, 0, 1, q, d, m, totals)

w = blocked.Packed(16, 32, Q4_1, 32, 20, np.zeros((20, 16), np.uint8))
T = blocked.TILE
scratch = np.empty((256, 16), np.uint8), *np.empty((2, 16, 16), np.float32), np.empty((T, 16), np.float32)
tiles(to_int8(np.ones((T, 32), np.float32), T), w, np.empty((T, 16), np.float32), *scratch)
show({"form": DOTS.__name__, "asm": list(tiles.inspect_asm().values())[0]})
"""


def test_integers_are_multiplied_by_the_instruction_for_them():
    found = run(INTEGERS)
    names = {"dots_at_once": r"\bvpdpbusd\s", "dots_in_pairs": r"\bvpmaddubsw\s"}
    if found["form"] in names:
        products = re.findall(names[found["form"]], found["asm"])
        assert len(products) >= 8 * 8  # 32 weights of sixteen rows, the registers of a tile


def test_sums_of_a_tile_stay_in_registers():
    found = run(INTEGERS)
    name = {"dots_at_once": "vpdpbusd", "dots_in_pairs": "vpmaddubsw"}.get(found["form"])
    if name:
        lines = found["asm"].splitlines()
        products = [i for i, line in enumerate(lines) if name in line]
        loop = lines[products[0] : products[-1]]
        stores = [line for line in loop if re.search(r"vmov\w+\s+%[yz]mm\d+, [-\d]*\(%rsp\)", line)]
        assert not stores
