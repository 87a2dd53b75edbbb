"""The ladder's layers in an encoder and decoder whose output projection is the Linear(512, 52239) that was left out.

`python -m stages.int8._translate --save DIR` trains the small transformer of the attention ladders, calibrates its
linear layers by hooks, rounds them, and compares what it translates word for word. It needs PyTorch; with a GPU the
layers are tensor_core's, else those of outliers. Linear8bitLt of bitsandbytes is beside them where it is installed.
"""

import argparse
import contextlib
import copy
import importlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import transformer

STEPS = 120  # of training: enough to translate
CALIBRATION = 10**6  # a seed that training does not reach
PROJECT = "project"  # the output projection's name


class Rounded(nn.Module):
    """A linear layer rounded by a rung of this ladder."""

    def __init__(self, linear: nn.Linear, seen: np.ndarray, rung: str):
        super().__init__()
        self.rung, self.array = importlib.import_module(f"stages.int8.{rung}"), np.asarray
        kind, w, b = torch.float32, linear.weight.detach(), linear.bias.detach()
        if w.is_cuda:
            import cupy

            self.array, kind, seen = cupy.from_dlpack, torch.float16, cupy.asarray(seen)
        self.kind = kind
        self.layer = self.rung.quantize(self.array(w.to(kind)), self.array(b.to(kind)), seen)

    def forward(self, x):  # (…, K) -> (…, N)
        rows = x.reshape(-1, x.shape[-1]).to(self.kind).contiguous()
        out = torch.from_dlpack(self.rung.multiply(self.array(rows), self.layer))
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.layer[1:])


class Halves(nn.Module):
    """A layer that takes and makes FP16, between layers of any type: nn.Linear, or Linear8bitLt."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer.half().eval()

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.half()).to(x.dtype)

    def nbytes(self) -> int:
        scales = getattr(self.layer.weight, "SCB", None)
        if scales is None:
            scales = getattr(getattr(self.layer, "state", None), "SCB", None)
        held = [*self.layer.parameters(), *([] if scales is None else [scales])]
        return sum(a.nbytes for a in held)


def linear8bit(linear: nn.Linear, seen, rung):
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict({name: value.half().cpu() for name, value in linear.state_dict().items()})
    return Halves(layer.to(linear.weight.device))


KINDS = {"fp16": lambda linear, seen, rung: Halves(copy.deepcopy(linear)), "int8": Rounded, "bitsandbytes": linear8bit}


def linears(model) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def highest(model, batch) -> dict[str, np.ndarray]:
    """The largest |x| of each channel (K,) that each linear layer met, seen by hooks."""
    found = {}

    def see(name, x):
        most = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).float().cpu().numpy()
        found[name] = np.maximum(found.get(name, 0), most)

    hooks = [
        layer.register_forward_pre_hook(lambda module, given, name=name: see(name, given[0]))
        for name, layer in linears(model).items()
    ]
    logits(model, batch)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def logits(model, batch):  # -> (positions, V) float32, of positions that are no padding
    with torch.autocast(batch.source.device.type, torch.bfloat16):
        encoded = model.encode(batch.source, batch.source_lengths)
        hidden = model.decode(batch.target[:, :-1], batch.target_lengths, encoded, batch.source_lengths)
    inside = torch.arange(hidden.shape[1], device=hidden.device)[None, :] < batch.target_lengths[:, None]
    return model.project(hidden[inside].float()).float()


def perplexity(rows, batch) -> float:
    """Of the right next words, given the logits (positions, V) of `logits`."""
    target = batch.target[:, 1:]
    inside = torch.arange(target.shape[1], device=target.device)[None, :] < batch.target_lengths[:, None]
    return float(nn.functional.cross_entropy(rows, target[inside]).exp())


def rounded(model, seen: dict, kind: str, project: bool, rung: str):
    """A copy of the model with every linear layer of that kind, or all but the output projection."""
    small = copy.deepcopy(model)
    for name, linear in linears(small).items():
        if project or name != PROJECT:
            parent, _, last = name.rpartition(".")
            setattr(small.get_submodule(parent), last, KINDS[kind](linear, seen[name], rung))
    return small


def told(small, batch, wanted, exact) -> dict:
    """What the rounded model translates beside what the other did; ids are words."""
    got = transformer.translate(small, batch)
    rows = logits(small, batch).log_softmax(1)
    exact = exact.log_softmax(1)
    alike = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
             for a, b in zip(got, wanted, strict=True)]  # fmt: skip
    return {
        "same": transformer.equal(got, wanted),
        "of": len(wanted),
        "words_alike": sum(alike),
        "words": sum(map(len, wanted)),
        "perplexity": perplexity(rows, batch),
        "kl": float((exact.exp() * (exact - rows)).sum(1).mean()),
        "same_top1": float((rows.argmax(1) == exact.argmax(1)).float().mean()),
        "bytes": sum(module.nbytes() for module in small.modules() if isinstance(module, (Rounded, Halves))),
        "translations": got,
    }


def measured(device, steps: int = STEPS) -> dict:
    model, losses = transformer.train(transformer.sdpa, device, steps)
    model.eval()
    asked = transformer.sentences(transformer.SENTENCES, seed=0, device=device)
    wanted, exact = transformer.translate(model, asked), logits(model, asked)
    right = [row[1:n] for row, n in zip(asked.target.tolist(), asked.target_lengths.tolist(), strict=True)]
    seen = highest(model, transformer.sentences(transformer.BATCH, seed=CALIBRATION, device=device))
    rung, rows = "tensor_core" if torch.device(device).type == "cuda" else "outliers", []
    for kind in KINDS:
        for project in (True, False):
            row = {"layers": kind, "output_projection": project}
            try:
                row |= told(rounded(model, seen, kind, project, rung), asked, wanted, exact)
            except (ImportError, RuntimeError) as error:  # no bitsandbytes, or cuBLAS under it refuses a shape
                row["error"] = str(error).splitlines()[0]
            rows.append(row)
            print({name: value for name, value in row.items() if name != "translations"}, flush=True)
    from stages.int8 import outliers

    return {
        "schema": 1,
        "steps": steps,
        "loss": losses[-1],
        "rung": rung,
        "perplexity": perplexity(exact, asked),
        "right": transformer.equal(wanted, right),
        "outliers": sum(len(outliers.outliers(highest)) for highest in seen.values()),
        "channels": sum(map(len, seen.values())),
        "translations": wanted,
        "rows": rows,
    }


def versions() -> dict:
    if torch.cuda.is_available():
        from stages.int8._gpu import versions as on_gpu

        return on_gpu()
    from common import kernel_cpu

    found = kernel_cpu.machine() | {"torch": torch.__version__, "bitsandbytes": None}
    with contextlib.suppress(ImportError):
        found["bitsandbytes"] = importlib.import_module("bitsandbytes").__version__
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, required=True, help="folder for the record")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    options = parser.parse_args()
    record = {"machine": versions()} | measured("cuda" if torch.cuda.is_available() else "cpu", options.steps)
    options.save.mkdir(parents=True, exist_ok=True)
    (options.save / "translate.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
