"""What a GPU stage needs around its kernels: CuPy, a driver that serves it, types with a kernel, room, a clock that
waits for the GPU, and arrays brought back.
"""

import importlib
import sys
from collections.abc import Callable

from common import diff
from common.cuda_unpack import TYPES_UNPACKED
from common.gguf import GGUFError
from common.stage import StageError, code_path

NEEDS_GPU = 4  # the exit code where a backend is missing
LEAST_EPS = 2.0**-126  # the smallest float32 of full precision
MOST_HEAD = 256  # head size: eight values in the registers of each lane of an attention warp


LESS = "take a smaller --context, fewer --layers or a smaller quantization, or end what else holds the GPU's memory"


def on_gpu(stage: str) -> bool:
    """Whether a stage, or the reader's own file, names the GPUs that its CUDA source is for. Raises StageError."""
    try:
        return bool(diff.constant(code_path(stage), "ARCHS"))
    except (SyntaxError, ValueError):  # of the reader's own; the process that runs it says what is wrong
        return False


def settler(stage) -> Callable[[], None]:
    """What waits until all that a stage has asked of the GPU is done; nothing to wait for in a stage without CUDA.

    A kernel runs on after the call that queued it, so a clock may only be read after this.
    """
    if not hasattr(stage, "ARCHS"):
        return lambda: None
    return backend().cuda.runtime.deviceSynchronize


def host(array):
    """An array of the GPU brought here; anything else as it is."""
    return array.get() if hasattr(array, "get") else array


def ready(gguf, nbytes: int):
    """The module cupy, once a GPU can hold `nbytes` bytes and every matrix of `gguf` has a kernel.

    Raises StageError (exit code 4) for what this machine lacks, GGUFError for what the model file asks for.
    """
    cupy = backend()
    supported(gguf)
    free, _ = cupy.cuda.runtime.memGetInfo()
    free += cupy.get_default_memory_pool().free_bytes()  # what earlier models left in CuPy's pool
    if nbytes > free:
        raise StageError(
            f"this model needs {nbytes / 1e9:.2f} GB on the GPU and {free / 1e9:.2f} GB are free: {LESS}", NEEDS_GPU
        )
    return cupy


def out_of_memory(error: Exception, request) -> StageError | None:
    """The sentence for a GPU whose memory ran out while a harness.Request ran; None for any other error."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(error, (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError)):
        return None
    if "emory" not in str(error):  # CUDA's own says cudaErrorMemoryAllocation, CuPy's pool Out of memory
        return None
    from common.model import open_model

    gguf = open_model(request.model, request.layers)
    context, T = request.context or gguf.config.context, len(request.ids)
    need = weight_bytes(gguf) + cache_bytes(gguf, context) + step_bytes(gguf.config, T)
    free, total = cupy.cuda.runtime.memGetInfo()
    return StageError(
        f"the GPU's memory ran out: the model, a cache of {context} tokens and a step of {T} need about "
        f"{need / 1e9:.2f} GB, and of its {total / 1e9:.2f} GB {free / 1e9:.2f} are free now: {LESS}",
        NEEDS_GPU,
    )


def backend():
    """The module cupy, where it has a GPU to work on. Raises StageError (exit code 4) with what is missing."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise broken(error) from error
        raise StageError(
            "GPU stages need CuPy, which is not installed: pip install 'lesson[cuda13x]', or 'lesson[cuda12x]' where "
            "nvidia-smi shows CUDA 12",
            NEEDS_GPU,
        ) from error
    except ImportError as error:
        raise broken(error) from error
    runtime = cupy.cuda.runtime
    try:
        driver, built = (version // 1000 for version in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
        if not driver:
            raise StageError(
                "GPU stages need an NVIDIA driver, and none is loaded here (nvidia-smi shows it): "
                "install one, or run a CPU stage",
                NEEDS_GPU,
            )
        if driver < built:
            raise StageError(
                f"the NVIDIA driver serves CUDA {driver} and this CuPy was built for CUDA {built}: "
                f"pip install cupy-cuda{driver}x in its place, or update the driver",
                NEEDS_GPU,
            )
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise StageError(
            f"GPU stages need an NVIDIA GPU, and CUDA says {error}: see nvidia-smi, or run a CPU stage", NEEDS_GPU
        ) from error
    return cupy


def missing() -> str | None:
    """Why no GPU can be used here; None where one can."""
    try:
        backend()
    except StageError as error:
        return str(error)
    return None


def broken(error: ImportError) -> StageError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip(" =-*")), "no reason")
    return StageError(
        f"CuPy is installed but cannot be imported ({said}): install one cupy wheel alone, the one for this driver",
        NEEDS_GPU,
    )


def supported(gguf) -> None:
    """Raises GGUFError for a matrix whose type no kernel unpacks, a head too large for attention's registers, or an eps
    that would be zero: CuPy has the compiler flush what float32 holds only in part (-ftz=true).
    """
    weights = gguf.weights
    for tensor in (weights.token_embd, weights.output, *(t for layer in weights.layers for t in layer)):
        if len(tensor.shape) == 2 and tensor.type.name not in TYPES_UNPACKED:
            raise GGUFError(
                gguf.path,
                tensor.offset,
                f"has {tensor.name} of type {tensor.type.name}, which GPU stages do not unpack; they do "
                f"{', '.join(TYPES_UNPACKED)}",
            )
    if gguf.config.eps < LEAST_EPS:
        raise GGUFError(gguf.path, None, f"has an RMS norm eps of {gguf.config.eps:.3g}, which is zero to GPU stages")
    if gguf.config.hd > MOST_HEAD:
        raise GGUFError(gguf.path, None, f"has heads of {gguf.config.hd}, and GPU stages take up to {MOST_HEAD}")


def weight_bytes(gguf) -> int:
    """Bytes of every tensor as the file holds it; a tied output is counted once."""
    sizes = []
    gguf.weights.map(lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def cache_bytes(gguf, context: int) -> int:
    """Bytes of float32 keys and values (L, 2, context, G, hd)."""
    config = gguf.config
    return 4 * config.L * 2 * context * config.G * config.hd


def step_bytes(config, T: int) -> int:
    """Bytes of float32 that a step of T tokens holds at most: around the feed-forward's product."""
    return 4 * T * (2 * config.D + 3 * config.F)
