"""The int8 ladder: integer for integer, what rounding costs, and how a reader tells it from a bug."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common import calibration, diff, rounding
from common import kernel_ladder as kl
from common.model import open_model
from common.stage import load_stage
from stages import int8
from stages.int8 import _model, absmax, outliers, tensor_core
from tests.helpers import ROOT, rounded_exactly

FOLDER = Path(int8.__file__).parent
CPU = ("float", "absmax", "outliers")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Also where there is a GPU."""
    monkeypatch.setattr(int8, "DEVICE", "cpu", raising=False)
    monkeypatch.setattr(int8, "inputs", functools.partial(int8.inputs, xp=np))


# ---- the rungs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", CPU)
def test_a_rung_is_right_on_odd_shapes(stage):
    for i, shape in enumerate(int8.ODD_SHAPES):
        found = kl.check(int8, stage, shape, "int8", seed=i)
        assert found["right"], found


def test_a_rung_that_needs_a_gpu_is_absent_without():
    found = kl.check(int8, "tensor_core", (3, 4, 5), "int8")
    assert found["right"] is None and "tensor cores" in found["absent"]


def rounds_as_it_says(module, shape, seed) -> None:
    x, w, b, seen = int8.inputs(shape, "int8", seed)
    layer = module.quantize(w, b, seen)
    loud = layer.loud if module is outliers else []
    exact = rounded_exactly(x, w, b, loud)
    out = module.multiply(x, layer)
    assert out.shape == exact.shape and out.dtype == np.float32
    assert (abs(out - exact) <= 1e-6 * abs(exact) + 2e-6 * abs(exact).max()).all(), shape


@pytest.mark.parametrize("module", [absmax, outliers], ids=["absmax", "outliers"])
def test_a_rung_rounds_as_the_arithmetic_says(module):
    for seed, shape in enumerate([*int8.ODD_SHAPES, (9, 40, 2048)]):
        rounds_as_it_says(module, shape, seed)


@pytest.mark.parametrize("features", ["+avx2,+fma,+f16c,+avx", "+avx,+f16c"], ids=["avx2", "none"])
def test_a_cpu_without_these_instructions_gets_the_same_integers(features):
    code = """
import numpy as np
from tests import test_int8_ladder
from stages.int8 import absmax, outliers
import functools
from stages import int8
int8.inputs = functools.partial(int8.inputs, xp=np)
for module in (absmax, outliers):
    for seed, shape in enumerate([(1, 33, 70), (9, 20, 300)]):
        test_int8_ladder.rounds_as_it_says(module, shape, seed)
from common.intrinsics import DOTS
print(DOTS.__name__)
"""
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["dots_in_pairs" if "avx2" in features else "dots_in_turn"]


def test_nan_and_infinity_are_not_swallowed():
    for module in (absmax, outliers):
        for value in (np.nan, np.inf):
            x, w, b, seen = int8.inputs((9, 20, 70), "int8", 0)
            x[2, 5] = value
            out = module.multiply(x, module.quantize(w, b, seen))
            assert not np.isfinite(out[2]).any() and np.isfinite(np.delete(out, 2, 0)).all()


def test_zeros_stay_zeros():
    x, w, b, seen = int8.inputs((3, 20, 70), "int8", 0)
    x[1], w[4] = 0, 0
    for module in (absmax, outliers):
        out = module.multiply(x, module.quantize(w, b, seen))
        assert (out[1] == b).all() and (out[:, 4] == b[4]).all()


def test_outliers_are_three_deviations_above_their_layer():
    seen = np.ones(1000, np.float32)
    seen[[5, 700]] = 30, 40
    assert outliers.outliers(seen).tolist() == tensor_core.outliers(seen).tolist() == [5, 700]
    seen[5] = 3
    assert outliers.outliers(seen).tolist() == [700]


def test_outliers_keep_their_precision():
    """A channel thirty times as loud, whose weights are a thirtieth: absmax rounds both away."""
    x, w, b, _ = int8.inputs((64, 80, 512), "int8", 3)
    x /= np.maximum(abs(x).max(0), 1e-9)
    x[:, 7] *= 300
    w[:, 7] /= 300
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b
    nmse = []
    for module in (absmax, outliers):
        out = module.multiply(x, module.quantize(w, b, abs(x).max(0)))
        nmse.append(((out - exact) ** 2).mean() / (exact**2).mean())
    assert nmse[0] > 100 * nmse[1] and nmse[1] < 1e-4


@pytest.mark.parametrize("stage", int8.STAGES)
def test_a_rung_declares_what_it_changes(stage):
    rung = importlib.import_module(f"stages.int8.{stage}")
    assert list(diff.docstring(FOLDER / f"{stage}.py")) == ["", "Idea", "Was", "Change", "Expect"]
    if rung.PREVIOUS is None:
        assert rung.CHANGES == () and stage == next(iter(int8.STAGES))
        return
    old, new = FOLDER / f"{rung.PREVIOUS}.py", FOLDER / f"{stage}.py"
    assert diff.undeclared(old, new, rung.CHANGES) == []
    assert set(rung.CHANGES) <= {change.name for change in diff.changes(old, new)}
    assert len(new.read_text().splitlines()) <= 400


# ---- rounding and bugs -----------------------------------------------------------------------------------------

BUGS = {
    "every step a hundredth too large": lambda layer: layer._replace(steps=layer.steps * np.float32(1.01)),
    "a row's step a tenth too large": lambda layer: layer._replace(steps=scaled(layer.steps, 11, 1.1)),
    "an outlier's weights doubled": lambda layer: layer._replace(columns=doubled(layer.columns)),
    "a row's b of another": lambda layer: layer._replace(b=np.roll(layer.b, 1)),
}


def scaled(a, i, by):
    a = a.copy()
    a[i] *= np.float32(by)
    return a


def doubled(columns):
    return (columns.view(np.float16) * np.float16(2)).view(np.uint16)


def layer_and_exact(seed: int = 5):
    x, w, b, seen = int8.inputs((64, 256, 512), "int8", seed)
    return x, outliers.quantize(w, b, seen), x.astype(np.float64) @ w.astype(np.float64).T + b


@pytest.mark.parametrize("seed", range(5))
def test_rounding_is_told_for_what_it_is(seed):
    x, layer, exact = layer_and_exact(seed)
    told = rounding.told(outliers.multiply(x, layer), exact)
    assert told.is_rounding, told


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_not_taken_for_rounding(bug):
    x, layer, exact = layer_and_exact()
    told = rounding.told(outliers.multiply(x, BUGS[bug](layer)), exact)
    assert not told.is_rounding, told


def test_a_bug_of_one_channel_is_found_there():
    x, layer, exact = layer_and_exact()
    told = rounding.told(outliers.multiply(x, BUGS["a row's step a tenth too large"](layer)), exact)
    assert told.channel == 11 and told.uneven > rounding.UNEVEN


def test_nan_is_no_rounding():
    exact = np.ones((4, 5))
    assert not rounding.told(np.full((4, 5), np.nan), exact).is_rounding


# ---- a whole model ---------------------------------------------------------------------------------------------


def test_calibration_sees_what_each_matrix_is_multiplied_by(tiny):
    gguf = open_model(tiny)
    stage = load_stage("kv_cache")
    model = stage.load(gguf, 16, 1)
    seen = calibration.highest("kv_cache", model, [[1, 2, 3], [4, 5]])
    config = gguf.config
    assert len(seen) == 7 * config.L + 1
    assert {name: len(highest) for name, highest in seen.items()} == {
        name: len(w) for name, w in calibration.matrices(model.weights).items()
    }
    x = np.ascontiguousarray(model.weights.token_embd[:, [1, 2, 3, 4, 5]].T)
    h = stage.rms_norm(x, model.weights.layers[0].attn_norm, config.eps)
    for name in ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"):
        assert np.array_equal(seen[name], abs(h).max(0))


def test_a_hook_that_is_not_called_is_an_error(tiny):
    """A stage whose forward is jitted resolved its matmul when it was compiled."""
    model = load_stage("kv_cache").load(open_model(tiny), 16, 1)
    broken = calibration.import_file

    def stale(path):
        stage = broken(path)
        stage.forward = load_stage("kv_cache").forward  # which looks in its own module
        return stage

    calibration.import_file = stale
    try:
        with pytest.raises(ValueError, match="never multiplied by blk.0.attn_k"):
            calibration.highest("kv_cache", model, [[1, 2, 3]])
    finally:
        calibration.import_file = broken


def test_a_hook_leaves_the_stage_itself_alone(tiny):
    stage = load_stage("kv_cache")
    plain = stage.matmul
    model = stage.load(open_model(tiny), 16, 1)
    before = stage.forward(model, [1, 2, 3], 0)
    calibration.highest("kv_cache", model, [[1, 2, 3]])
    assert stage.matmul is plain
    assert np.array_equal(stage.forward(model, [1, 2, 3], 0), before)


def test_a_model_of_rounded_layers_computes_with_them(tiny):
    gguf = open_model(tiny)
    model = load_stage("kv_cache").load(gguf, 16, 1)
    seen = calibration.highest("kv_cache", model, [[1, 2, 3]])
    stage = calibration.hooked("kv_cache")
    exact = stage.logits(model, stage.forward(model, [1, 2, 3], 0))
    for skip, count in (
        (lambda name: False, 7 * gguf.config.L + 1),
        (lambda name: name == "output", 7 * gguf.config.L),
    ):
        small = _model.rounded(model, seen, skip, "outliers")
        found = calibration.matrices(small.weights).values()
        assert sum(isinstance(w, calibration.Quantized) for w in found) == count
        out = stage.logits(small, stage.forward(small, [1, 2, 3], 0))
        assert 0 < ((out - exact) ** 2).mean() / (exact**2).mean() < 1e-2


def test_words_are_compared_from_the_first_on():
    assert _model.words_alike("a b c", "a b d") == 2
    assert _model.words_alike("a b", "a b c") == 2
    assert _model.words_alike("x", "y") == 0


def test_the_loudest_of_one_token_is_one_channel(tiny):
    model = load_stage("kv_cache").load(open_model(tiny), 16, 1)
    windows = [[1, 2, 3, 4, 5, 6, 7, 8]]
    seen = calibration.highest("kv_cache", model, windows)
    one, many = (_model.loudest(model, seen, some) for some in ([windows[0][:2]], windows))
    assert {row["kind"] for row in one} == {_model.kind_of(name) for name in seen}
    assert all(row["channels"] == 1 for row in one)
    assert all(1 <= row["channels"] <= 7 and row["crest"] > 1 for row in many)
    assert any(row["channels"] > 1 for row in many)


def test_planted_channels_are_counted_beside_the_models_own():
    plain = np.tile(np.float32([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 9]), 10)
    loud = plain.copy()
    loud[:2] *= _model.FACTOR
    assert _model.found_beside({"blk.0.attn_q": plain}, {"blk.0.attn_q": loud}) == {
        "planted": 2, "planted_found": 2, "own": 10, "own_found": 0,
    }  # fmt: skip
    assert _model.found_beside({"blk.0.ffn_down": plain}, {"blk.0.ffn_down": loud})["planted"] == 0


def test_planted_outliers_cost_absmax_much_and_outliers_little(smollm2):
    model, _, windows, calibrating = _model.opened(smollm2)
    windows, loud = windows[:1], _model.plant(model)
    wanted = _model.rows(model, windows)
    assert np.abs(_model.rows(loud, windows)[0] - wanted[0]).max() < 1e-2  # the same function
    seen = calibration.highest(_model.STAGE, loud, calibrating[:2])
    cost = {}
    for rung in ("absmax", "outliers"):
        small = _model.rounded(loud, seen, lambda name: not name.endswith(_model.READERS), rung)
        cost[rung] = _model.scored(small, wanted, windows)
    assert cost["absmax"]["more_percent"] > 10 and cost["absmax"]["kl"]["mean"] > 10 * cost["outliers"]["kl"]["mean"]


# ---- an encoder and decoder, in PyTorch --------------------------------------------------------------------------


@pytest.mark.peers
def test_a_translator_is_rounded_by_its_linear_layers(monkeypatch):
    torch = pytest.importorskip("torch")
    from common import transformer
    from stages.int8 import _translate

    for name, value in {"BLOCKS": 1, "HEADS": 2, "WIDTH": 64, "VOCABULARY": 103, "WORDS": 8, "LONGEST": 5}.items():
        monkeypatch.setattr(transformer, name, value)
    found = _translate.measured("cpu", steps=60)
    rows = {(row["layers"], row["output_projection"]): row for row in found["rows"] if "error" not in row}
    fp16, int8_rows = rows["fp16", True], [rows["int8", True], rows["int8", False]]
    assert all(fp16["kl"] < row["kl"] < 1e-3 for row in int8_rows)
    assert int8_rows[0]["bytes"] < 0.6 * fp16["bytes"]
    model, _ = transformer.train(transformer.sdpa, "cpu", 2)
    batch = transformer.sentences(4, seed=1, device="cpu")
    layer = model.encoder[0].own.query
    seen = _translate.highest(model, batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given = model.encoder[0].norms[0](model.embed(batch.source))
    assert len(seen) == len(_translate.linears(model)) and len(seen["project"]) == layer.in_features
    assert np.allclose(seen["encoder.0.own.query"], given.abs().amax((0, 1)).float().numpy(), rtol=1e-2)
