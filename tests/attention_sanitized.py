"""The attention kernels on odd shapes, for compute-sanitizer: `compute-sanitizer … -m tests.attention_sanitized WHAT`.

WHAT is forward or backward: every rung in CUDA, whose results are compared; or triton: that rung's two passes. Memory
comes from CUDA itself, since an overrun inside a pool is none to the sanitizer (PyTorch's pool ends by
PYTORCH_NO_CUDA_MEMORY_CACHING=1). With the other words something is wrong that a tool must find, or finding nothing
means nothing: overrun is memcheck's, unset initcheck's, divergent synccheck's, race racecheck's.
"""

import contextlib
import sys

from common.kernel_ladder import entry, module, wide
from stages import attention, attention_backward
from tests.attention_faults import planted

SHAPES = [
    (1, 2, 1, 257, 257, 64),
    (1, 2, 2, 200, 261, 128),
    (2, 1, 1, 300, 130, 64),
    (1, 1, 1, 70, 200, 128, 0),
    (3, 2, 1, 191, 193, 64, 1, 1),
]
APART = {"float16": (0.004, 0.05), "bfloat16": (0.03, 0.4)}  # at most, by rounding: forward and backward
BARRIER = "        __syncthreads();  // this tile is there, and every warp has left the one that the next overwrites\n"
FAULTS = {  # of skip
    "overrun": ("row < rows);", "row <= rows);"),
    "unset": None,  # queries that nobody wrote
    "divergent": (BARRIER, BARRIER.replace("__sync", "if (threadIdx.x % 2) __sync")),
    "race": (BARRIER, ""),
}


def main(what: str) -> None:
    import cupy
    import numpy

    cupy.cuda.set_allocator(None)
    in_cuda = [[rung for rung in ladder.STAGES if rung != "triton"] for ladder in (attention, attention_backward)]
    passes = {"forward": (in_cuda[0], []), "backward": (["hopper"], in_cuda[1]),
              "triton": (["hopper", "triton"], ["hopper", "triton"])}  # fmt: skip
    if what in FAULTS:
        passes[what], program = (["skip"], []), module(attention, "skip").PROGRAM
        program.source = planted(program.source, FAULTS[what]) if FAULTS[what] else program.source
    if what not in passes:
        sys.exit(f"WHAT is one of {', '.join([*passes, *FAULTS])}, not {what}")
    forward, backward = passes[what]
    for dtype, apart in APART.items():
        for seed, shape in enumerate(SHAPES):
            *operands, causal = attention.inputs(shape, dtype, seed, numpy)  # CuPy's own kernels are not ours to judge
            q, k, v, lengths = map(cupy.asarray, operands)
            q = cupy.empty_like(q) if what == "unset" else q
            made = [entry(attention, rung)(q, k, v, lengths, causal) for rung in forward]
            dout = cupy.asarray(attention.inputs(shape, dtype, seed + 100, numpy)[0])
            gradients = [entry(attention_backward, rung)(q, k, v, *made[0], dout, lengths, causal) for rung in backward]
            cupy.cuda.Device().synchronize()
            if what not in FAULTS:
                outs, sums = zip(*made, strict=True)
                alike(outs, apart[0]), alike(sums, 1e-3)
                for each in zip(*gradients, strict=True):
                    alike(each, apart[1])
    print(what, "ran")


def alike(results, most: float) -> None:
    """Raises AssertionError where two results differ by more than `most` anywhere."""
    first, *others = (wide(a.get()) for a in results)
    for a in others:
        apart = abs(first - a)
        apart[first == a] = 0  # infinities
        assert apart.max() < most


if __name__ == "__main__":
    if sys.argv[1:] == ["triton"]:
        from tests.triton_interpreted import tiles  # one configuration: the sanitizer is slow

        one = tiles((64, 64, 4, 1), (64, 64, 4, 1))
    else:
        one = contextlib.nullcontext()
    with one:
        main(*sys.argv[1:])
