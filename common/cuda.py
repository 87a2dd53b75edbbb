"""CUDA source as data: compiled by CuPy at its first launch, or by NVRTC alone where there is no GPU.

A stage holds its source string, its options and the architectures that the source is written for. `Program` compiles
them lazily, so that importing a stage needs neither CuPy nor a GPU; `compile` is the check that needs no driver.
"""

import ctypes
import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import NamedTuple


class CUDAError(RuntimeError):
    """A kernel that cannot be compiled, or that this GPU cannot run."""

    exit_code = 1


class MissingCompiler(CUDAError):
    """No NVRTC is installed."""

    exit_code = 4


class Resources(NamedTuple):
    """What ptxas gave one kernel: registers a thread; bytes of stack, of spills, and of static shared memory; and
    whether it made each wgmma wait for the one before, as where it cannot prove that their registers are left alone.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    serialized: bool


class Program:
    """Every kernel of one source, compiled for the GPU in use when one is first launched.

    A cooperative launch is refused where its blocks do not all fit the GPU at once; so they may wait for each other.
    """

    def __init__(self, source: str, options: tuple = (), archs: tuple = (), cooperative: bool = False):
        self.source, self.options, self.archs, self.cooperative = source, options, archs, cooperative

    def launch(self, name: str, blocks: int, threads, args: tuple, shared: int = 0, early: bool = False) -> None:
        """Run kernel `name` on `blocks` blocks; `shared` is dynamic shared memory in bytes. Raises CUDAError.

        With `early` its blocks may start while the kernel before still runs: once each of that one's blocks has ended
        or executed griddepcontrol.launch_dependents. They wait for its results by griddepcontrol.wait. GPUs before
        sm_90 know neither, and start the kernel when the one before has ended.
        """
        kernel = self.kernel(name, shared)
        if early and capability(_device()) >= 90:
            _launch_early(kernel.kernel.ptr, blocks, threads, args, shared)
        else:
            kernel((blocks,), threads if isinstance(threads, tuple) else (threads,), args, shared_mem=shared)

    def kernel(self, name: str, shared: int = 0):
        """The compiled cupy.RawKernel, whose `num_regs` and `local_size_bytes` can be read."""
        return _kernel(self.source, self.options, self.archs, self.cooperative, name, shared, _device())


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]  # fmt: skip


# One CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, nothing, allowed
_EARLY = (ctypes.c_int * 18)(6, 0, 1)


def _launch_early(function: int, blocks: int, threads: int, args: tuple, shared: int) -> None:
    """Launch a CUfunction on CuPy's stream; CuPy itself cannot so. Source: CUDA driver API, cuLaunchKernelEx."""
    import cupy
    import numpy

    values = [numpy.array(a.data.ptr if isinstance(a, cupy.ndarray) else a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    stream = cupy.cuda.get_current_stream().ptr
    config = _Config((blocks, 1, 1), (threads, 1, 1), shared, stream, ctypes.addressof(_EARLY), 1)
    if error := _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None):
        raise CUDAError(f"cuLaunchKernelEx answered {error} for {blocks} blocks of {threads} threads")


def _device() -> int:
    import cupy

    return cupy.cuda.runtime.getDevice()


@functools.cache
def capability(device: int) -> int:
    """Compute capability as ptxas writes it: 90 for a Hopper GPU."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


@functools.cache
def processors(device: int = 0) -> int:
    """How many streaming multiprocessors the GPU has."""
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


def arch_option(archs: tuple, gpu: int) -> tuple:
    """The -arch option for a GPU of capability `gpu`: its own `a` target where the source asks for one, else none.

    Raises CUDAError where the source was written for other GPUs.
    """
    if f"sm_{gpu}a" in archs:
        return (f"-arch=sm_{gpu}a",)
    if not any(gpu >= int(arch[3:]) for arch in archs if not arch.endswith("a")):
        raise CUDAError(f"this kernel needs a GPU of {' or '.join(archs)}, and this one is sm_{gpu}")
    return ()


@functools.cache
def _module(source: str, options: tuple, archs: tuple, cooperative: bool, device: int):
    import cupy

    options = (*options, *arch_option(archs, capability(device)))
    return cupy.RawModule(code=source, options=options, enable_cooperative_groups=cooperative)


@functools.cache
def _kernel(source: str, options: tuple, archs: tuple, cooperative: bool, name: str, shared: int, device: int):
    import cupy

    kernel = _module(source, options, archs, cooperative, device).get_function(name)
    if shared:  # with its static memory perhaps above 48 KB, which a launch must have been allowed to ask for
        most = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
        kernel.max_dynamic_shared_size_bytes = most - kernel.shared_size_bytes  # other launches of it may ask for more
    return kernel


# The nvidia wheels' folders by CUDA version: where the library of NVRTC lies, and where the headers.
WHEELS = {
    13: ("cu13/lib", ("cu13/include", "cu13/include/cccl")),
    12: ("cuda_nvrtc/lib", ("cuda_runtime/include", "cuda_nvcc/include", "cuda_cccl/include")),
}
OLDEST = 75  # capability that CUDA 13 still compiles for; older GPUs need CUDA 12


def compilers() -> dict[int, Path]:
    """The NVRTC of each CUDA version that the nvidia wheels installed."""
    found = {}
    for version, (libraries, _) in WHEELS.items():
        for path in (p for root in wheel_folders() for p in (root / libraries).glob(f"libnvrtc.so.{version}")):
            found.setdefault(version, path)
    return found


def version_for(arch: str) -> int:
    """The CUDA version to compile with: the newest that is installed and knows `arch`."""
    return 12 if int(re.sub(r"\D", "", arch)) < OLDEST else max(compilers(), default=13)


def wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in spec.submodule_search_locations] if spec else []


@functools.cache
def library(path: Path) -> ctypes.CDLL:
    """NVRTC, which looks for its other half by name, and finds it once it is loaded."""
    for half in path.parent.glob(f"libnvrtc-builtins{path.suffix.replace('.', '.so.')}.*"):
        ctypes.CDLL(str(half))
    return ctypes.CDLL(str(path))


class Compiled(NamedTuple):
    """What NVRTC made of a source."""

    cubin: bytes
    kernels: dict[str, Resources]
    ptx: str


def compile(source: str, options: tuple = (), arch: str = "sm_90") -> Compiled:
    """Compile without a driver. Raises MissingCompiler where no NVRTC is installed for `arch`, else CUDAError with the
    compiler's log.
    """
    version = version_for(arch)
    if version not in compilers():
        wheels = {13: "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt",
                  12: "nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12"}[version]  # fmt: skip
        raise MissingCompiler(f"to compile for {arch} without a GPU: pip install {wheels}, of CUDA {version}")
    nvrtc = library(compilers()[version])
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def done(error):
        if error:
            raise CUDAError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error).decode()}")

    def text(what: str) -> bytes:
        """What nvrtcGet<what> gives, whose length nvrtcGet<what>Size says."""
        size = ctypes.c_size_t()
        done(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        done(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    program = ctypes.c_void_p()
    done(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"stage.cu", 0, None, None))
    try:
        folders = [root / folder for root in wheel_folders() for folder in WHEELS[version][1]]
        flags = [*options, f"-arch={arch}", "--ptxas-options=-v", *(f"-I{folder}" for folder in folders)]
        error = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
        log = text("ProgramLog").decode(errors="replace").strip("\0 \n")
        if error:
            raise CUDAError(f"{arch}: {log}")
        return Compiled(text("CUBIN"), _resources(log), text("PTX").rstrip(b"\0").decode())
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _resources(log: str) -> dict[str, Resources]:
    found = {}
    for name, report in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", log, re.S):

        def number(pattern, report=report):
            match = re.search(pattern, report)
            return int(match[1]) if match else 0

        found[name] = Resources(
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            number(r"(\d+) bytes smem"),
            bool(re.search(rf"wgmma\S* instructions are serialized .*'{name}'", log)),
        )
    return found


def operands(x, w, dtype: str, multiple: int = 1):
    """x (M, K) and w (K, N) as a kernel may read them, an empty out (M, N), and M, N, K as 32-bit integers.

    Rows of x, w and out are padded to a multiple of `multiple` elements where they are not (a copy), so that
    every row starts on a vector's boundary; pass out to `trim` at the end. N comes back padded, K as it was.
    Raises ValueError where the shapes do not agree, a dimension is 0 or reaches 2^31, or a dtype is another.
    """
    import cupy
    import numpy

    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"matmul needs (M, K) and (K, N), and was given {x.shape} and {w.shape}")
    if x.dtype != dtype or w.dtype != dtype:
        raise ValueError(f"matmul needs two arrays of {dtype}, and was given {x.dtype} and {w.dtype}")
    (m, k), n = x.shape, -(-w.shape[1] // multiple) * multiple
    if min(m, n, k) < 1 or max(m, n, k) >= 2**31:
        raise ValueError(f"matmul needs M, N and K of 1 to 2^31 - 1, and was given {m}, {w.shape[1]} and {k}")
    x, w = _padded(x, multiple), _padded(w, multiple)
    return x, w, cupy.empty((m, n), dtype), *(numpy.int32(size) for size in (m, n, k))


def _padded(a, multiple: int):
    import cupy

    width = -(-a.shape[1] // multiple) * multiple
    if width == a.shape[1] and a.flags.c_contiguous and a.data.ptr % (multiple * a.itemsize) == 0:
        return a
    out = cupy.zeros((a.shape[0], width), a.dtype)
    out[:, : a.shape[1]] = a
    return out


def trim(out, n: int):
    """out without the columns that `operands` padded it by."""
    return out if out.shape[1] == n else out[:, :n].copy()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def tensor_map(a, box: tuple[int, int], columns: int):
    """The 128-byte description of an array of 2 bytes an element that the copy engine (TMA) wants, as a kernel argument
    by value. More than two axes are matrices one after the other: a copy stays within one.

    `box` is (rows, columns) of one copy, stored with the 128-byte swizzle, so box columns are 64; `columns` is how
    many columns of `a` hold data. Elements outside come back as zeros. Source: CUDA driver API,
    cuTensorMapEncodeTiled.
    """
    import numpy

    place = numpy.zeros(192, numpy.uint8)  # the driver wants 64-byte alignment, which numpy does not promise
    place = place[-place.ctypes.data % 64 :][:128]
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    float16, no_interleave, swizzle_128, promote_256, zeros = 6, 0, 3, 3, 0
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place.ctypes.data),
        float16,
        a.ndim,
        ctypes.c_void_p(a.data.ptr),
        (u64 * a.ndim)(columns, *a.shape[-2::-1]),
        (u64 * (a.ndim - 1))(*(math.prod(a.shape[axis:]) * a.itemsize for axis in range(a.ndim - 1, 0, -1))),
        (u32 * a.ndim)(box[1], box[0], *[1] * (a.ndim - 2)),
        (u32 * a.ndim)(*[1] * a.ndim),
        no_interleave,
        swizzle_128,
        promote_256,
        zeros,
    )
    if error:
        raise CUDAError(f"cuTensorMapEncodeTiled answered {error} for an array of {a.shape}")
    return place.view("V128")  # one element of 128 bytes, which CuPy passes by value
