"""A stage whose matrix products are watched, or computed by something else: calibration, and a model of rounded layers.

`forward` looks up `matmul` in its own module, so replacing it elsewhere changes nothing and raises no error. What is
replaced here is the name in a copy of the module, which the copy's own `forward` resolves, and which nobody else sees.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from common.model import LAYER_NAMES, Weights
from common.stage import Model, import_file, source_path

OUTPUT = "output"  # the name of the output projection


class Quantized(NamedTuple):
    """What stands in a model's weights in a matrix's place."""

    multiply: Callable  # (x, layer) -> (T, N)
    layer: Any


def hooked(name: str, see: Callable[[np.ndarray, Any], None] | None = None):
    """A copy of a stage whose matmul(x, w) calls see(x, w) first, and leaves a Quantized w to its own function.

    The stage is one whose `forward` is plain Python (naive … kv_cache). Raises StageError for an unknown name.
    """
    stage = import_file(source_path(name))
    plain = stage.matmul

    def matmul(x, w):
        if see:
            see(x, w)
        return w.multiply(x, w.layer) if isinstance(w, Quantized) else plain(x, w)

    stage.matmul = matmul
    return stage


def matrices(weights: Weights) -> dict[str, Any]:
    """Every matrix that a token is multiplied by, by its name in the file ('blk.0.attn_q', 'output')."""
    found = {
        f"blk.{i}.{name}": w
        for i, layer in enumerate(weights.layers)
        for name, w in zip(LAYER_NAMES, layer, strict=True)
        if not name.endswith("norm")
    }
    return {**found, OUTPUT: weights.output}


def highest(stage: str, model: Model, windows: Iterable[list[int]]) -> dict[str, np.ndarray]:
    """The largest |x| of each channel (K,) that each matrix met, over windows of ids; by `matrices`' names.

    `model` is one that the stage loaded. Raises ValueError where a matrix was never used.
    """
    names = {id(w): name for name, w in matrices(model.weights).items()}
    found: dict[str, np.ndarray] = {}

    def see(x, w):
        seen = np.abs(x).max(axis=0)
        found[names[id(w)]] = np.maximum(found.get(names[id(w)], 0), seen)

    watched = hooked(stage, see)
    for ids in windows:
        watched.logits(model, watched.forward(model, ids, 0))
    if missing := set(names.values()) - set(found):
        raise ValueError(f"{stage} never multiplied by {sorted(missing)[0]}: its forward does not look up matmul")
    return found


def quantized(model: Model, make: Callable[[str, np.ndarray], Quantized | None]) -> Model:
    """The model with make(name, w) in place of each matrix w (K, N), or the matrix itself where that is None.

    Where the output projection is tied to the embedding, the embedding stays as it is.
    """

    def turn(name, w):
        return make(name, w) or w

    layers = tuple(
        layer._replace(**{
            field: turn(f"blk.{i}.{name}", w)
            for field, name, w in zip(layer._fields, LAYER_NAMES, layer, strict=True)
            if not name.endswith("norm")
        })
        for i, layer in enumerate(model.weights.layers)
    )  # fmt: skip
    weights = model.weights
    return model._replace(weights=weights._replace(layers=layers, output=turn(OUTPUT, weights.output)))
