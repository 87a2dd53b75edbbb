"""The int8 ladder on a GPU: right on odd shapes, and integer for integer what the arithmetic says."""

import importlib

import numpy as np
import pytest

from common import kernel_ladder as kl
from stages import int8
from tests.helpers import rounded_exactly
from tests.test_gemm_gpu import gpu  # noqa: F401  the fixture skips where there is no GPU

pytestmark = pytest.mark.gpu
RUNGS = ("absmax", "outliers", "tensor_core")
SHAPES = [
    *int8.ODD_SHAPES,
    (1, 5632, 2048),
    (2, 100, 2048),
    (4, 48, 5632),
    (8, 48, 2048),
    (16, 100, 512),
    (128, 128, 640),
]


@pytest.mark.parametrize("stage", int8.STAGES)
def test_a_rung_is_right_on_odd_shapes(stage):
    for i, shape in enumerate(int8.ODD_SHAPES):
        found = kl.check(int8, stage, shape, "int8", seed=i)
        assert found["right"], found


@pytest.mark.parametrize("stage", RUNGS)
def test_a_rung_rounds_as_the_arithmetic_says(gpu, stage):  # noqa: F811
    module = importlib.import_module(f"stages.int8.{stage}")
    for seed, shape in enumerate(SHAPES):
        x, w, b, seen = int8.inputs(shape, "int8", seed)
        layer = module.quantize(w, b, seen)
        loud = np.array([], int) if stage == "absmax" else layer.loud.get()
        exact = rounded_exactly(x.get(), w.get(), b.get(), loud)
        out = module.multiply(x, layer).get().astype(np.float64)
        assert out.shape == exact.shape
        allowed = 2.0**-10 * abs(exact) + 1e-4 * abs(exact).max()
        assert (abs(out - exact) <= allowed).all(), (shape, abs(out - exact).max())


def test_nan_and_infinity_are_not_swallowed(gpu):  # noqa: F811
    for stage in RUNGS:
        module = importlib.import_module(f"stages.int8.{stage}")
        for tokens in (1, 9, 40):
            x, w, b, seen = int8.inputs((tokens, 50, 128), "int8", 0)
            x[0, 5] = gpu.nan
            out = module.multiply(x, module.quantize(w, b, seen))
            assert gpu.isnan(out[0]).all() and gpu.isfinite(out[1:]).all(), (stage, tokens)
