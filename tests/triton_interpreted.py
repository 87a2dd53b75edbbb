"""Triton's kernels on a CPU, in its interpreter: `TRITON_INTERPRET=1 python -m tests.triton_interpreted shapes`.

A process of its own, because Triton looks at that variable as it is imported. BF16 is left to the GPU: the interpreter
multiplies its bits. Tiles are small, so that small shapes have several.
"""

import contextlib
import sys

import numpy as np
import torch

from common import kernel_ladder as kl
from common.cuda_attention import HEADS
from common.torch_attention import Attention, attention
from stages import attention as forward_ladder
from stages import attention_backward as backward_ladder
from stages.attention import Shape
from stages.attention import triton as forward
from stages.attention_backward import triton as backward

TINY = [Shape(1, 2, 1, 3, 4, 64), Shape(2, 1, 1, 2, 3, 64, causal=0, padded=1)]
SMALL = (32, 16, 4, 1), (16, 32, 4, 1)  # FP32 has no tensor core: large tiles are thousands of instructions


@contextlib.contextmanager
def tiles(of_queries, of_keys):
    """One configuration for the kernels that own queries and one for the kernel that owns keys, all made anew."""
    kept = forward.CONFIGS, backward.CONFIGS
    forward.CONFIGS = dict.fromkeys(HEADS, [of_queries])
    backward.CONFIGS = dict.fromkeys(HEADS, ([of_queries], [of_keys]))
    forward.kernel.cache_clear(), backward.kernels.cache_clear()
    try:
        yield
    finally:
        forward.CONFIGS, backward.CONFIGS = kept
        forward.kernel.cache_clear(), backward.kernels.cache_clear()


def shapes() -> bool:
    """Both passes in FP16 against float64, on shapes that no tile divides."""
    return all(right(shape) for shape in forward_ladder.ODD_SHAPES if shape.B * shape.H * shape.Q * shape.K < 2e5)


def right(shape: Shape) -> bool:
    q, k, v, _, _, _, lengths, causal = given = backward_ladder.inputs(shape, "float16", 0, np)
    tensors = [torch.from_numpy(a) for a in given[:-1]]
    found = forward.on_tensors(*tensors[:3], tensors[6], causal), backward.on_tensors(*tensors, causal)
    exact = forward_ladder.oracle(q, k, v, lengths, causal), backward_ladder.oracle(*given)
    return all(
        kl.judge(ladder, tuple(a.numpy() for a in ours), *theirs, "float16")["right"]
        for ladder, ours, theirs in zip((forward_ladder, backward_ladder), found, exact, strict=True)
    )


def gradcheck() -> bool:
    """Autograd's function in FP32."""
    return all(checked(attention, shape) for shape in TINY)


def fault() -> bool:
    """True where gradcheck accepts a backward pass that forgets the row term."""

    def wrong(q, k, v, out, *others):
        return backward.on_tensors(q, k, v, torch.zeros_like(out), *others)

    def attend(q, k, v, lengths, causal):
        return Attention.apply(q, k, v, lengths, causal, forward.on_tensors, wrong)

    return checked(attend, Shape(1, 1, 1, 2, 2, 64))


def checked(attend, shape: Shape, device="cpu") -> bool:
    """torch.autograd.gradcheck with steps of 0.01, which leave FP32 four digits: within 1 %, or 0.0001 an element."""
    draw = torch.Generator().manual_seed(0)
    sizes = (shape.H, shape.Q), (shape.G, shape.K), (shape.G, shape.K)
    operands = [torch.randn((shape.B, *size, shape.D), generator=draw).to(device).requires_grad_() for size in sizes]
    lengths = [shape.K - b if shape.padded else shape.K for b in range(shape.B)]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return torch.autograd.gradcheck(lambda *qkv: attend(*qkv, lengths, shape.causal), operands, eps=1e-2, atol=1e-4,
                                    rtol=1e-2, fast_mode=True, raise_exception=False)  # fmt: skip


if __name__ == "__main__":
    with tiles(*SMALL):
        print({"shapes": shapes, "gradcheck": gradcheck, "fault": fault}[sys.argv[1]]())
