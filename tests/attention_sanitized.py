"""The attention kernels on odd shapes, for compute-sanitizer: `compute-sanitizer … -m tests.attention_sanitized WHAT`.

Memory comes from CUDA itself, since an overrun inside CuPy's pool is none to the sanitizer. WHAT is forward or
backward: every rung in CUDA, whose results are compared. With planted, skip reads one row more than there is, with race
it lacks a barrier: each must be found, or finding nothing means nothing.
"""

import sys

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
FAULTS = {"planted": ("row < rows);", "row <= rows);"), "race": (BARRIER, "")}


def main(what: str) -> None:
    import cupy
    import numpy

    from common.kernel_ladder import entry, module, wide
    from stages import attention, attention_backward

    cupy.cuda.set_allocator(None)
    forward = ["skip"] if what in FAULTS else [rung for rung in attention.STAGES if rung != "triton"]
    backward = [rung for rung in attention_backward.STAGES if rung != "triton"] if what == "backward" else []
    if what in FAULTS:
        skip = module(attention, "skip")
        skip.PROGRAM.source = planted(skip.SOURCE, FAULTS[what])
    for dtype, apart in APART.items():
        for seed, shape in enumerate(SHAPES):
            *operands, causal = attention.inputs(shape, dtype, seed, numpy)  # CuPy's own kernels are not ours to judge
            q, k, v, lengths = map(cupy.asarray, operands)
            made = {rung: entry(attention, rung)(q, k, v, lengths, causal) for rung in forward}
            if what not in FAULTS:
                alike([wide(out.get()) for out, _ in made.values()], apart[0])
            dout = cupy.asarray(attention.inputs(shape, dtype, seed + 100, numpy)[0])
            passes = [entry(attention_backward, rung) for rung in backward]
            results = [each(q, k, v, *made["hopper"], dout, lengths, causal) for each in passes]
            for gradients in zip(*results, strict=True):
                alike([wide(a.get()) for a in gradients], apart[1])
            cupy.cuda.Device().synchronize()
    print(what, "ran")


def alike(results, most: float) -> None:
    """Raises AssertionError where two results differ by more than `most` anywhere."""
    first, *others = results
    assert all(abs(first - a).max() < most for a in others)


if __name__ == "__main__":
    main(sys.argv[1])
