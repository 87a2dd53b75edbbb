"""Every kernel of the int8 ladder on odd shapes, for compute-sanitizer: `compute-sanitizer … -m tests.int8_sanitized`.

Memory comes from CUDA itself, since an overrun inside CuPy's pool is none to the sanitizer. With `planted` a layer says
that it has a row more than it has, with `race` a kernel lacks a barrier: each must be found, or finding nothing means
nothing. CuPy's own kernels are not ours to judge: `--kernel-regex-exclude kns=cupy_`.
"""

import importlib
import sys

RUNGS = ("absmax", "outliers", "tensor_core")
SHAPES = [(1, 33, 1000), (3, 130, 70), (5, 17, 2200), (17, 130, 256), (150, 257, 520)]
BARRIER = (
    "        __syncthreads();  // this tile is there, and everyone has left the one that the next copies overwrite\n"
)


def main(what: str = "clean") -> None:
    import cupy

    from stages import int8

    cupy.cuda.set_allocator(None)
    for rung in RUNGS if what == "clean" else RUNGS[2:]:
        module = importlib.import_module(f"stages.int8.{rung}")
        if what == "race":
            assert BARRIER in module.SOURCE
            module.PROGRAM.source = module.SOURCE.replace(BARRIER, "")
        for seed, shape in enumerate(SHAPES if what == "clean" else SHAPES[-1:]):
            x, w, b, seen = int8.inputs(shape, "int8", seed)
            layer = module.quantize(w, b, seen)
            if what == "planted":
                layer = layer._replace(N=layer.N + 1)
            module.multiply(x, layer)
            cupy.cuda.Device().synchronize()
    print(what, "ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
