"""Stages on tensor cores, on a GPU: packed tiles of every type against float64, each stage against the oracle."""

import importlib

import numpy as np
import pytest

from common import gate, reference
from common.cuda_tiles import FORMATS, deep
from common.gguf import TYPES
from common.model import open_model
from tests.test_gpu_stages import gpu, matrix  # noqa: F401  the fixture skips where there is no GPU

pytestmark = pytest.mark.gpu
NAMES = ("prefill", "graph", "fused")
QUANTS = ("f32", "f16", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k_m", "q5_k", "q6_k")


@pytest.fixture(params=NAMES)
def stage(request):
    return importlib.import_module(f"stages.{request.param}")


def halves(gpu, x):  # noqa: F811
    """x (T, K) as matmul takes it, and the float64 it stands for."""
    padded = np.zeros((len(x), 64 * deep(x.shape[1])), np.float16)
    padded[:, : x.shape[1]] = x
    return gpu.asarray(padded), padded[:, : x.shape[1]].astype(np.float64)


@pytest.mark.parametrize("kind", FORMATS)
def test_matmul_of_every_type(gpu, kind):  # noqa: F811
    from common.cuda_tiles import pack

    stage, draw, block = importlib.import_module("stages.prefill"), np.random.default_rng(5), TYPES[kind].block
    for K in (7, 65, 1031) if block == 1 else (block, 3 * block, 2816 // block * block):
        for T, N in ((3, 5), (17, 33), (64, 130), (65, 257), (130, 300)):
            w, exact = matrix(stage, gpu, kind, N, K, seed=K + N)
            x, told = halves(gpu, draw.standard_normal((T, K)))
            got = stage.matmul(x, pack(w)).sum(axis=0).get()
            assert reference.nmse(got, told @ exact.T) <= gate.MATMUL_TOLERANCE["float16"]


@pytest.mark.parametrize(("T", "start"), [(1, 0), (3, 0), (1, 66), (3, 64), (67, 0), (130, 77)])
@pytest.mark.parametrize(("H", "G", "hd"), [(1, 1, 8), (9, 3, 64), (4, 2, 40), (6, 3, 128), (4, 1, 96)])
def test_attention(gpu, T, start, H, G, hd):  # noqa: F811
    """Beyond the tokens seen the cache holds NaN, which must not be read."""
    stage, draw = importlib.import_module("stages.prefill"), np.random.default_rng(7)
    shapes = (T, H, hd), (start + T, G, hd), (start + T, G, hd)
    q, k, v = (draw.standard_normal(shape).astype(np.float16) for shape in shapes)
    beyond = np.full((5, G, hd), np.nan, np.float16)
    caches = (gpu.asarray(np.concatenate([a, beyond])) for a in (k, v))
    got = stage.attention(gpu.asarray(q), *caches, gpu.array([start], np.int64))[:, : H * hd].get()
    assert reference.nmse(got, gate.attention(q, k, v, start)) <= 1e-6


def forced(stage, model, ids, given):
    """Logits after ids[:-given] and after each of the given, through the stage's own decode path."""
    left = iter([*ids[-given:], 0])
    return [row for _, row in stage.generate(model, ids[:-given], given + 1, lambda row: next(left))]


@pytest.mark.parametrize("quant", QUANTS)
def test_logits_of_every_type(stage, tiny_of, quant):
    gguf, ids = open_model(tiny_of(quant)), [(i * 37 + 5) % 500 for i in range(30)]
    want, model = reference.compute(gguf, ids).logits, stage.load(gguf, 30, 1)
    rows = stage.logits(model, stage.forward(model, ids[:20], 0))
    assert max(map(reference.nmse, rows, want)) <= gate.TOLERANCE["float16"]
    assert max(map(reference.nmse, forced(stage, model, ids, 10), want[19:])) <= gate.TOLERANCE["float16"]


def test_a_context_filled_to_its_last_position(stage, tiny):
    gguf, ids = open_model(tiny), [(i * 37 + 5) % 500 for i in range(700)]
    want, model = reference.compute(gguf, ids).logits, stage.load(gguf, len(ids), 1)
    rows = forced(stage, model, ids, len(ids) - 9)
    assert max(map(reference.nmse, rows, want[8:])) <= gate.TOLERANCE["float16"]
    with pytest.raises(ValueError, match="701 tokens do not fit a context of 700"):
        stage.forward(model, [1], 700)


def test_two_runs_are_bit_identical_and_take_the_best(stage, tiny):
    model, ids = stage.load(open_model(tiny), 64, 1), [1, 17, 300, 17, 511]
    first = list(stage.generate(model, ids, 40))
    list(stage.generate(model, ids[::-1], 8))
    again = list(stage.generate(model, ids, 40))
    assert [i for i, _ in first] == [i for i, _ in again] == [int(row.argmax()) for _, row in first]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))


def test_blocks_that_come_early_change_nothing(gpu, tiny, monkeypatch):  # noqa: F811
    """Graph's kernels overlap; without that, each logit is the same, also where several blocks look back for a head."""
    from common.cuda import Program

    stage, ids = importlib.import_module("stages.graph"), [(i * 37 + 5) % 500 for i in range(300)]
    overlapped = forced(stage, stage.load(open_model(tiny), len(ids), 1), ids, 290)
    launch, asked = Program.launch, []

    def apart(*given, early=False):
        asked.append(early)
        launch(*given)

    monkeypatch.setattr(Program, "launch", apart)
    assert np.array_equal(forced(stage, stage.load(open_model(tiny), len(ids), 1), ids, 290), overlapped)
    assert any(asked)


def test_smollm2s_shape(stage, tmp_path):
    from common import synth

    gguf = open_model(synth.synth("smollm2", "q4_1", tmp_path / "shape.gguf", layers=3))
    ids = [(i * 37 + 5) % 500 for i in range(70)]
    want, model = reference.compute(gguf, ids).logits, stage.load(gguf, 70, 1)
    assert max(map(reference.nmse, forced(stage, model, ids, 50), want[19:])) <= gate.TOLERANCE["float16"]


def test_a_kernel_that_waits_for_ever_ends_with_one_sentence(gpu, tiny, monkeypatch):  # noqa: F811
    """Queries, keys and values are not sent: everyone looks for words that never come."""
    from common.stage import StageError

    stage = importlib.import_module("stages.fused")
    source = stage.STEP.replace("rows) put(b.m.qkv + column + tile * 16 + row, b.word(value))", "rows) (void)value")
    short = source.replace(f"PATIENCE = {stage.PATIENCE}", "PATIENCE = 20000000")
    assert len({stage.STEP, source, short}) == 3
    monkeypatch.setattr(stage, "STEP", short)
    model = stage.load(open_model(tiny), 16, 1)
    with pytest.raises(StageError, match="the kernel of position 2 was stuck .* and gave up"):
        list(stage.generate(model, [1, 2], 3))
