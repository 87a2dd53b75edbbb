"""A rung's layers in a whole model: `python -m stages.int8._model --save DIR` writes what rounding costs SmolLM2.

The model is unpacked to floats, then rounded: the blocks of its file play no part. Calibration sees the end of the
text, figures are of its beginning. Everything is compared with the same stage in FP32. `--baseline` does the same with
Linear8bitLt of bitsandbytes, which needs PyTorch and runs on the CPU too.
"""

import argparse
import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from common import calibration, quality, sources
from common.calibration import OUTPUT, Quantized
from common.intrinsics import LANES
from common.model import open_model
from common.stage import load_stage
from common.tokenizer import Tokenizer

STAGE = "kv_cache"  # the last whose forward is plain Python on floats
TOKENS = quality.TOKENS  # of the text that are scored; those after them calibrate
SOME = 4  # windows of the trials that only tell what costs most
NEW = 32  # tokens of each greedy output
PROMPTS = (
    "Once upon a time, there was a little",
    "The capital of France is",
    "Water boils when",
    "The three primary colours are",
    "To make a cup of tea, first",
    "In the year 1969, two men",
    "A triangle has three sides, and a square",
    "The opposite of hot is",
    "My favourite season is autumn because",
    "The dog ran across the field and",
    "Computers store numbers as",
    "If it rains tomorrow, we will",
    "The largest planet of the solar system is",
    "She opened the letter and read:",
    "A good friend is someone who",
)
PLANTED = 6  # channels of each norm that the rescaling makes loud
FACTOR = 30  # how much louder
READERS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")  # the matrices that read a norm of their layer
SETS = {  # of matrices that are rounded, by the kinds that are not
    "without ffn_down": ("ffn_down",),
    "without ffn_down and output": ("ffn_down", OUTPUT),
    "attention's": ("ffn_gate", "ffn_up", "ffn_down", OUTPUT),
}


def opened(path):
    """(the model in floats, its tokenizer, windows that are scored, windows that calibrate)."""
    gguf = open_model(path)
    tokenizer = Tokenizer.from_gguf(gguf.gguf)
    ids = tokenizer.encode(quality.TEXT.read_text("utf-8"), bos=False)
    cut = [ids[i : i + quality.WINDOW] for i in range(0, len(ids), quality.WINDOW)]
    model = load_stage(STAGE).load(gguf, quality.WINDOW, 1)
    return model, tokenizer, cut[: TOKENS // quality.WINDOW], cut[TOKENS // quality.WINDOW :]


def kind_of(name: str) -> str:
    """'blk.3.ffn_up' is one of 'ffn_up'."""
    return name.split(".")[-1]


def rounded(model, seen: dict, skip=lambda name: False, rung: str = "outliers", heard=lambda highest: highest):
    """The model with every matrix rounded by a rung of this ladder, but for those that `skip` names.

    The rung looks for outliers among heard(the largest |x| of each channel): np.log tells it ratios instead.
    """
    module = importlib.import_module(f"stages.int8.{rung}")

    def make(name, w):
        if skip(name):
            return None
        nothing = np.zeros(w.shape[1], np.float32)  # these layers have no b
        return Quantized(module.multiply, module.quantize(np.ascontiguousarray(w.T), nothing, heard(seen[name])))

    return calibration.quantized(model, make)


def linear8bit(model, seen: dict, skip=lambda name: False):
    """The model with every matrix in a Linear8bitLt, which looks for outliers above 6 in each x; as `rounded`."""
    import torch
    from bitsandbytes.nn import Linear8bitLt

    def multiply(x, layer):
        with torch.no_grad():
            return layer(torch.from_numpy(np.ascontiguousarray(x)).half()).float().numpy()

    def make(name, w):
        if skip(name):
            return None
        layer = Linear8bitLt(*w.shape, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight.data = torch.from_numpy(np.ascontiguousarray(w.T)).half()
        layer.weight = layer.weight._quantize("cpu")
        return Quantized(multiply, layer.eval())  # in training, on a CPU, it multiplies by floats

    return calibration.quantized(model, make)


def halfway(model, seen: dict, weights: bool, tokens: bool, skip=lambda name: False):
    """The model with only its weights rounded, or only what they are multiplied by; in floats, as `rounded` otherwise.

    Neither instruction nor kernel multiplies so: it tells which of the two costs what.
    """
    from stages.int8 import outliers

    def multiply(x, layer):
        w, loud = layer
        if tokens:
            rest = x.copy()
            rest[:, loud] = 0
            steps = np.maximum(abs(rest).max(1, keepdims=True), 1e-30) / 127
            rest = np.rint(rest / steps) * steps
            rest[:, loud] = x[:, loud]
            x = rest
        return x @ w

    def make(name, w):
        if skip(name):
            return None
        loud = outliers.outliers(seen[name])
        if weights:
            kept, w = w[loud], w.copy()
            w[loud] = 0
            steps = np.maximum(abs(w).max(0), 1e-30) / 127
            w = np.rint(w / steps) * steps
            w[loud] = kept
        return Quantized(multiply, (w, loud))

    return calibration.quantized(model, make)


def plant(model, seed: int = 0):
    """The same function with loud channels: a norm's weight times FACTOR, the weights that read it divided by it."""
    draw, layers = np.random.default_rng(seed), []
    for layer in model.weights.layers:
        for norm, readers in (("attn_norm", ("w_q", "w_k", "w_v")), ("ffn_norm", ("w_gate", "w_up"))):
            scale = np.ones(len(getattr(layer, norm)), np.float32)
            scale[draw.choice(len(scale), PLANTED, replace=False)] = FACTOR
            layer = layer._replace(
                **{norm: getattr(layer, norm) * scale},
                **{name: getattr(layer, name) / scale[:, None] for name in readers},
            )
        layers.append(layer)
    return model._replace(weights=model.weights._replace(layers=tuple(layers)))


def rows(model, windows, see=None) -> list[np.ndarray]:
    """The logits rows (T - 1, V) of each window, in one pass; see(x, w) is told of every matmul."""
    stage = calibration.hooked(STAGE, see)
    return [stage.logits(model, stage.forward(model, ids[:-1], 0)) for ids in windows]


def scored(model, wanted, windows) -> dict:
    """Perplexity beside that of the wanted rows, KL divergence from them, and how often both put the same token first.

    more_percent is by how much the perplexity is above, with its interval of 95 %, on pairs of positions.
    """
    got = rows(model, windows)
    parts = zip(got, wanted, windows, strict=True)
    scores = quality.joined([quality.score(a, b, np.array(ids[1:])) for a, b, ids in parts])
    exact = np.concatenate([quality.nll(b, ids[1:]) for b, ids in zip(wanted, windows, strict=True)])
    more, kl = quality.paired_difference(scores.nll, exact, np.mean), scores.kl
    return {
        "perplexity": float(quality.perplexity(scores.nll)),
        "float_perplexity": float(quality.perplexity(exact)),
        "more_percent": 100 * float(np.expm1(more.value)),
        "more_percent_95": [100 * float(np.expm1(end)) for end in (more.low, more.high)],
        "kl": {"mean": float(kl.mean()), "p99": float(np.percentile(kl, 99)), "max": float(kl.max())},
        "same_top1": float(scores.same.mean()),
        "positions": len(exact),
    }  # fmt: skip


def outputs(model, tokenizer) -> list[list[int]]:
    """The greedy continuation of each prompt, as ids."""
    stage = calibration.hooked(STAGE)
    prompts = [tokenizer.encode(prompt, bos=False) for prompt in PROMPTS]
    return [[int(i) for i, _ in stage.generate(model, ids, NEW)] for ids in prompts]


def words_alike(a: str, b: str) -> int:
    """How many words of two texts are the same from the first on."""
    pairs = list(zip(a.split(), b.split(), strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def spoken(tokenizer, got, wanted) -> dict:
    """Outputs beside those in floating point, word for word."""
    texts = [(tokenizer.decode(a), tokenizer.decode(b)) for a, b in zip(got, wanted, strict=True)]
    return {
        "same": sum(a == b for a, b in texts),
        "of": len(texts),
        "words_alike": [words_alike(a, b) for a, b in texts],
        "words": [len(b.split()) for _, b in texts],
        "texts": [{"int8": a, "float": b} for a, b in texts],
    }


def layer_set(seen: dict, loud) -> list[dict]:
    """Of each kind of matrix: how many there are, their channels, and how many of these are outliers."""
    kinds: dict[str, list] = {}
    for name, highest in seen.items():
        kinds.setdefault(kind_of(name), []).append(highest)
    return [
        {
            "kind": kind,
            "matrices": len(found),
            "channels": len(found) * len(found[0]),
            "outliers": sum(len(loud(highest)) for highest in found),
        }
        for kind, found in kinds.items()
    ]


def nbytes(model) -> dict[str, int]:
    """Bytes that the matrices take: rounded, in FP16, and as Linear8bitLt keeps them (a byte a weight, 4 a row)."""
    found = {"int8": 0, "fp16": 0, "linear8bit": 0}
    for w in calibration.matrices(model.weights).values():
        if isinstance(w, Quantized) and hasattr(w.layer, "weight"):  # Linear8bitLt itself
            N, K = w.layer.weight.shape
            found["int8"] += w.layer.weight.nbytes + 4 * N
            found["fp16"] += 2 * N * K
            found["linear8bit"] += N * K + 4 * N
        elif isinstance(w, Quantized) and hasattr(w.layer, "q"):
            N, K = w.layer.N, w.layer.q.shape[0] * w.layer.q.shape[1] * w.layer.q.shape[2] // w.layer.N
            found["int8"] += sum(a.nbytes for a in w.layer[1:] if a is not w.layer.b)  # these layers have no b
            found["fp16"] += 2 * N * K
            found["linear8bit"] += N * K + 4 * N
    return found


def kept(model) -> dict[str, int]:
    """How many channels of the rounded matrices are outliers, and of how many."""
    layers = [w.layer for w in calibration.matrices(model.weights).values() if isinstance(w, Quantized)]
    rounded_here = [layer for layer in layers if hasattr(layer, "loud")]
    return {
        "outliers": sum(len(layer.loud) for layer in rounded_here),
        "channels": sum(layer.q.size // layer.q.shape[0] // LANES for layer in rounded_here),
    }


def measured(path, makers: dict, more: bool = True) -> dict:
    """What rounding costs a model, by each of `makers`, with and without the output projection, and with loud channels.

    `more` adds what makes up the cost of "outliers".
    """
    from common import kernel_cpu
    from stages.int8 import outliers

    model, tokenizer, windows, calibrating = opened(path)
    seen = calibration.highest(STAGE, model, calibrating)
    wanted, said = rows(model, windows), outputs(model, tokenizer)

    def told(make, model, seen, skip, speak=False, some=None, **names):
        small = make(model, seen=seen, skip=skip)
        found = names | scored(small, wanted[:some], windows[:some]) | {"bytes": nbytes(small), **kept(small)}
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found | ({"outputs": spoken(tokenizer, outputs(small, tokenizer), said)} if speak else {})

    loud = plant(model)
    seen_loud = calibration.highest(STAGE, loud, calibrating)
    found = {
        "schema": 1,
        "model": Path(path).name,
        "stage": STAGE,
        "text": quality.TEXT.name,
        "calibration_tokens": sum(map(len, calibrating)),
        "rows": [
            told(make, model, seen, lambda name, whole=whole: name == OUTPUT and not whole, True, rung=rung,
                 output_projection=whole)
            for rung, make in makers.items() for whole in (True, False)
        ],
        "planted": {
            "channels": PLANTED,
            "factor": FACTOR,
            "layer_set": READERS,
            "rows": [
                told(make, loud, seen_loud, lambda name: kind_of(name) not in READERS, rung=rung)
                for rung, make in makers.items()
            ],
            "float": scored(loud, wanted, windows),
        },
        "machine": kernel_cpu.machine(),
    }  # fmt: skip
    if not more:
        return found
    found["planted"]["found"] = found_beside(seen, seen_loud)
    make = partial(rounded, rung="outliers")
    return found | {
        "sigmas": outliers.SIGMAS,
        "layer_set": layer_set(seen, outliers.outliers),
        "one_kind_rounded": [
            told(make, model, seen, lambda name, kind=kind: kind_of(name) != kind, some=SOME, kind=kind)
            for kind in dict.fromkeys(map(kind_of, seen))
        ],
        "layer_sets": [
            told(make, model, seen, lambda name, kinds=kinds: kind_of(name) in kinds, layer_set=words)
            | {"outliers": share(seen, lambda name, kinds=kinds: kind_of(name) in kinds)}
            for words, kinds in SETS.items()
        ],
        "one_side_rounded": [
            told(partial(halfway, weights=weights, tokens=not weights), model, seen, lambda name: False, some=SOME,
                 only="weights" if weights else "activations")
            for weights in (True, False)
        ],
        "sigmas_tried": [tried(sigmas, model, seen, wanted[:SOME], windows[:SOME]) for sigmas in (3.0, 4.0, 6.0)],
    }  # fmt: skip


def share(seen: dict, skip) -> float:
    """Outliers among the channels of the matrices that are rounded."""
    from stages.int8 import outliers

    here = [highest for name, highest in seen.items() if not skip(name)]
    return sum(len(outliers.outliers(highest)) for highest in here) / sum(map(len, here))


def found_beside(seen: dict, seen_loud: dict) -> dict[str, int]:
    """How many channels of READERS were planted, how many were outliers before, and how many of each the rule finds."""
    from stages.int8 import outliers

    found = dict.fromkeys(("planted", "planted_found", "own", "own_found"), 0)
    for name in (name for name in seen if kind_of(name) in READERS):
        now = outliers.outliers(seen_loud[name])
        channels = {
            "planted": np.flatnonzero(seen_loud[name] > FACTOR / 2 * seen[name]),
            "own": outliers.outliers(seen[name]),
        }
        for which, there in channels.items():
            found[which] += len(there)
            found[f"{which}_found"] += len(np.intersect1d(there, now))
    return found


def loudest(model, seen: dict, windows) -> list[dict]:
    """Where each token's step comes from, by kind of matrix: means over the layers, of what is left without outliers.

    channels: how many are the loudest of some token; crest: the median token's loudest |x| over its root mean square.
    """
    from stages.int8 import outliers

    names, tokens = {id(w): name for name, w in calibration.matrices(model.weights).items()}, {}

    def see(x, w):
        name = names[id(w)]
        rest = abs(x)  # a copy
        rest[:, outliers.outliers(seen[name])] = 0
        tokens.setdefault(name, []).append((rest.argmax(1), rest.max(1) / np.sqrt((rest**2).mean(1))))

    rows(model, windows, see)
    kinds: dict[str, list] = {}
    for name, found in tokens.items():
        at, crests = map(np.concatenate, zip(*found, strict=True))
        kinds.setdefault(kind_of(name), []).append((len(np.unique(at)), np.median(crests)))
    return [
        {
            "kind": kind,
            "channels": float(np.mean([n for n, _ in found])),
            "crest": float(np.mean([c for _, c in found])),
        }
        for kind, found in kinds.items()
    ]


def tried(sigmas: float, model, seen, wanted, windows) -> dict:
    """What another threshold keeps and costs."""
    from stages.int8 import outliers

    before, outliers.SIGMAS = outliers.SIGMAS, sigmas
    try:
        kinds = layer_set(seen, outliers.outliers)
        return {"sigmas": sigmas, "layer_set": kinds, **scored(rounded(model, seen), wanted, windows)}
    finally:
        outliers.SIGMAS = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, required=True, help="folder for the record")
    parser.add_argument("--baseline", action="store_true", help="Linear8bitLt instead, as linear8bit.json")
    parser.add_argument("--loudest", action="store_true", help="where a token's step comes from, as loudest.json")
    parser.add_argument("--ratios", action="store_true", help="outliers by ratio instead, as ratios.json")
    options = parser.parse_args()
    path = sources.resolve("smollm2")
    if options.baseline:
        import bitsandbytes
        import torch

        name, found = "linear8bit", measured(path, {"bitsandbytes": linear8bit}, more=False)
        found["machine"] |= {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__}
    elif options.ratios:
        name, found = "ratios", measured(path, {"outliers": partial(rounded, heard=np.log)}, more=False)
    elif options.loudest:
        from common import kernel_cpu

        model, _, _, windows = opened(path)
        told = loudest(model, calibration.highest(STAGE, model, windows), windows)
        tokens = sum(len(ids) - 1 for ids in windows)
        name, found = "loudest", {"schema": 1, "tokens": tokens, "rows": told, "machine": kernel_cpu.machine()}
    else:
        makers = {rung: partial(rounded, rung=rung) for rung in ("absmax", "outliers")}
        name, found = "quality", measured(path, makers)
    options.save.mkdir(parents=True, exist_ok=True)
    (options.save / f"{name}.json").write_text(json.dumps(found, indent=1, default=list) + "\n")


if __name__ == "__main__":
    main()
