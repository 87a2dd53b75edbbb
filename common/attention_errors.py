"""How far each rung of the attention ladders is from float64 and from PyTorch, on a GPU.

`python -m common.attention_errors --save reports/MACHINE/attention` writes errors.json: for each rung, type and result
the largest and the mean absolute difference. D is the term that all scores of a row share, the sum of out times dout.
"""

import argparse
import json
from pathlib import Path

from common import kernel_ladder
from common.cuda_attention import HEADS, array, given, tensor
from common.kernel_ladder import wide
from stages import attention, attention_backward

SHAPES = [attention.Shape(2, 8, 8, 1024, 1024, D) for D in HEADS]


def row_term(rung, q, k, v, out, lse, dout, lengths, causal):
    """What a backward rung computes D to be."""
    import torch

    if hasattr(rung, "PROGRAM"):
        return given(rung.PROGRAM, q, k, v, out, lse, dout, lengths, causal)[5]
    tensors = [tensor(a) for a in (q, k, v, out, lse, dout, lengths)]
    delta, *gradients = map(torch.empty_like, (tensors[4], *tensors[:3]))
    rung.launch(*tensors, delta, *gradients, causal)
    return array(delta)


def by_torch(q, k, v, out, dout, causal) -> dict:
    """PyTorch's results on the same operands; its log-sum-exp is FlashAttention's."""
    import torch

    leaves = [tensor(a).detach().requires_grad_() for a in (q, k, v)]
    made = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=bool(causal))
    gradients = torch.autograd.grad(made, leaves, tensor(dout))
    lse = torch.ops.aten._scaled_dot_product_flash_attention(*(a.detach() for a in leaves), 0.0, bool(causal))[1]
    term = (tensor(out).float() * tensor(dout).float()).sum(-1)
    results = made, lse[..., : q.shape[2]], term, *gradients
    return {name: array(a.contiguous()) for name, a in zip(("out", "lse", "D", "dq", "dk", "dv"), results, strict=True)}


def errors(shape, dtype: str) -> list[dict]:
    """Rows of every rung at one shape and type; PyTorch against float64 first."""
    operands = attention_backward.inputs(shape, dtype, seed=3)
    q, k, v, out, lse, dout, lengths, causal = operands
    exact = dict(zip(("out", "lse"), attention.oracle(q, k, v, lengths, causal)[0], strict=True))
    exact |= dict(zip(("dq", "dk", "dv"), attention_backward.oracle(*operands)[0], strict=True))
    exact["D"] = (wide(out) * wide(dout)).sum(-1)
    torchs = by_torch(q, k, v, out, dout, causal)
    found = {"PyTorch": torchs}
    for stage in attention.STAGES:
        results = kernel_ladder.entry(attention, stage)(q, k, v, lengths, causal)
        found[f"attention/{stage}"] = dict(zip(("out", "lse"), results, strict=True))
    for stage in attention_backward.STAGES:
        rung = kernel_ladder.module(attention_backward, stage)
        results = row_term(rung, *operands), *rung.backward(*operands)
        found[f"attention_backward/{stage}"] = dict(zip(("D", "dq", "dk", "dv"), results, strict=True))
    rows = []
    for rung, results in found.items():
        for what, result in results.items():
            for other, right in (("float64", exact[what]), ("PyTorch", torchs[what])):
                if rung != other:
                    apart = abs(wide(result) - wide(right))
                    rows.append({"rung": rung, "dtype": dtype, "shape": shape, "result": what, "against": other,
                                 "max_abs": float(apart.max()), "mean_abs": float(apart.mean())})  # fmt: skip
    return rows


def main() -> None:
    """Compare every rung's results with float64 and with PyTorch's; write DIR/errors.json."""
    from common.kernel_gpu import machine

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    rows = [row for shape in SHAPES for dtype in ("float16", "bfloat16") for row in errors(shape, dtype)]
    options.save.mkdir(parents=True, exist_ok=True)
    sources = {f"{ladder.__name__.rpartition('.')[2]}/{stage}": kernel_ladder.source_digest(ladder, stage)
               for ladder in (attention, attention_backward) for stage in ladder.STAGES}  # fmt: skip
    record = {"schema": 1, "machine": machine(), "sources": sources, "rows": rows}
    (options.save / "errors.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        if row["shape"] == SHAPES[0]:
            print(f"{row['rung']:30} {row['dtype']:8} {row['result']:3} against {row['against']:7} "
                  f"{row['max_abs']:.2e} at most, {row['mean_abs']:.2e} on average")  # fmt: skip


if __name__ == "__main__":
    main()
