"""Every kernel of the GPU stages on small models, for compute-sanitizer: `compute-sanitizer … -m tests.gpu_sanitized`,
or of some with some types of weights alone: `… clean fused q4_k_m f16`.

Memory comes from CUDA itself, since an overrun inside CuPy's pool is none to the sanitizer. With `planted` the matrix
has one row more than it has bytes, with `race` a kernel lacks a barrier: each must be found, or finding nothing means
nothing.
"""

import sys
import tempfile
from pathlib import Path

from common import synth
from common.model import open_model
from common.stage import GPU, load_stage

IDS = [1, 17, 300, 17, 511, 0, 42]
QUANTS = ("q4_k_m", "q5_k", "q8_0", "q5_0", "q4_1", "f16")


def main(what: str = "clean", *only: str) -> None:
    import cupy

    cupy.cuda.set_allocator(None)
    with tempfile.TemporaryDirectory() as folder:
        for quant in chosen(QUANTS, only) if what == "clean" else QUANTS[:1]:
            gguf = open_model(synth.synth("tiny", quant, Path(folder) / f"{quant}.gguf"))
            for name in chosen(GPU, only) if what == "clean" else ("resident",):
                run(load_stage(name), gguf, what)
    print(what, "ran")


def chosen(names: tuple, only: tuple) -> list:
    return [name for name in names if name in only] or list(names)


def run(stage, gguf, what: str) -> None:
    if what == "race":
        old = "weights + 8 * threadIdx.x);\n        __syncthreads();"
        assert old in stage.SOURCE
        stage.PROGRAM.source = stage.SOURCE.replace(old, old.partition("\n")[0])
    model = stage.load(gguf, len(IDS) + 4, 1)
    if what == "planted":
        output = model.weights.output
        model = model._replace(weights=model.weights._replace(output=output._replace(N=output.N + 1)))
    for _ in stage.generate(model, IDS, 3):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
