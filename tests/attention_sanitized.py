"""The attention kernels on odd shapes, for compute-sanitizer: `compute-sanitizer … -m tests.attention_sanitized WHAT`.

Memory comes from CUDA itself, since an overrun inside CuPy's pool is none to the sanitizer. WHAT is forward or
backward: each rung that works by tiles, and hopper's forward pass before the backward ones. Their results are compared.
"""

import sys

RUNGS = {"forward": ("hopper", "flash", "skip"), "backward": ("hopper", "recomputed", "split", "skip")}
SHAPES = [
    (1, 2, 1, 257, 257, 64, 1),
    (1, 2, 2, 200, 261, 128, 1),
    (2, 1, 1, 300, 130, 64, 1),
    (1, 1, 1, 70, 200, 128, 0),
]


def main(what: str) -> None:
    import cupy
    import numpy

    from common.kernel_ladder import entry
    from stages import attention, attention_backward

    cupy.cuda.set_allocator(None)
    draw = numpy.random.default_rng(0).standard_normal
    for B, H, G, Q, K, D, causal in SHAPES:
        sizes = (B, H, Q, D), (B, G, K, D), (B, G, K, D), (B, H, Q, D)
        q, k, v, dout = (cupy.asarray(draw(size).astype("float16")) for size in sizes)
        lengths = cupy.full(B, K, "int32")
        rungs = RUNGS["forward"] if what == "forward" else ("hopper",)
        given, *others = [entry(attention, rung)(q, k, v, lengths, causal) for rung in rungs]
        alike([out.get() for out, _ in (given, *others)], 4e-3)
        if what == "backward":
            passes = [entry(attention_backward, rung) for rung in RUNGS["backward"]]
            results = [each(q, k, v, *given, dout, lengths, causal) for each in passes]
            for gradients in zip(*results, strict=True):
                alike([a.get() for a in gradients], 0.05)
    print(what, "ran")


def alike(results, most: float) -> None:
    """Raises AssertionError where two results differ by more than `most` anywhere."""
    first, *others = (a.astype("float32") for a in results)
    assert all(abs(first - a).max() < most for a in others)


if __name__ == "__main__":
    main(sys.argv[1])
