"""What a GPU stage needs before its first kernel: CuPy, a driver that serves it, types with a kernel, and room."""

import importlib

from common.cuda_unpack import TYPES_UNPACKED
from common.gguf import GGUFError
from common.stage import StageError

NEEDS_GPU = 4  # the exit code where a backend is missing
MOST_HEAD = 256  # head size: eight values in the registers of each lane of an attention warp


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
            f"this model needs {nbytes / 1e9:.2f} GB on the GPU and {free / 1e9:.2f} GB are free: take a smaller "
            "--context, fewer --layers or a smaller quantization, or end what else holds the GPU's memory",
            NEEDS_GPU,
        )
    return cupy


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


def broken(error: ImportError) -> StageError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip(" =-*")), "no reason")
    return StageError(
        f"CuPy is installed but cannot be imported ({said}): install one cupy wheel alone, the one for this driver",
        NEEDS_GPU,
    )


def supported(gguf) -> None:
    """Raises GGUFError for a matrix whose type no kernel unpacks, or a head too large for attention's registers."""
    weights = gguf.weights
    for tensor in (weights.token_embd, weights.output, *(t for layer in weights.layers for t in layer)):
        if len(tensor.shape) == 2 and tensor.type.name not in TYPES_UNPACKED:
            raise GGUFError(
                gguf.path,
                tensor.offset,
                f"has {tensor.name} of type {tensor.type.name}, which GPU stages do not unpack; they do "
                f"{', '.join(TYPES_UNPACKED)}",
            )
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
