"""The attention ladder on a GPU: every rung against float64 on shapes that no tile divides, and planted faults."""

import functools
import itertools

import pytest

from common import kernel_ladder as kl
from common.cuda import Program
from stages import attention, attention_backward
from stages.attention import Shape
from tests.attention_faults import BACKWARD_FAULTS, FORWARD_FAULTS, planted
from tests.test_gemm_gpu import gpu  # noqa: F401  the fixture skips where there is no GPU

pytestmark = pytest.mark.gpu
LADDERS = (attention, attention_backward)
RUNGS = [(ladder, stage, dtype) for ladder in LADDERS for stage, dtypes in ladder.STAGES.items() for dtype in dtypes]


@pytest.mark.parametrize(("ladder", "stage", "dtype"), RUNGS)
def test_a_rung_is_right_on_odd_shapes(ladder, stage, dtype):
    for i, shape in enumerate(ladder.ODD_SHAPES):
        found = kl.check(ladder, stage, shape, dtype, seed=i)
        assert found["right"], found


@pytest.mark.parametrize("stage", attention.STAGES)
def test_a_long_sequence(stage):
    found = kl.check(attention, stage, Shape(1, 2, 1, 5000, 5000, 128), "float16", seed=1)
    assert found["right"], found


def right_where_maxima_rise(stage: str, shape, seed: int = 0) -> bool:
    """Within 0.01 of float64 where a maximum rises by more than SLACK when much of its row is summed: sums must shrink.

    Standard normal queries never make it rise so far after a first tile, so they are 16 times as large here. Weights of
    FP16's smallest numbers then matter to outputs near 0, hence no share of the ladder's own tolerance.
    """
    q, *others = attention.inputs(shape, "float16", seed)
    operands = q * q.dtype.type(16), *others
    results, (exact, _) = kl.entry(attention, stage)(*operands), attention.oracle(*operands)
    for ours, theirs in zip(results, exact, strict=True):
        apart = abs(kl.wide(ours) - theirs)
        apart[ours == theirs] = 0  # infinities
        if not float(apart.max()) < 0.01:  # NaN is not
            return False
    return True


@pytest.mark.parametrize("stage", attention.STAGES)
def test_a_rung_is_right_where_the_maximum_rises_late(stage):
    assert all(right_where_maxima_rise(stage, shape, seed=i) for i, shape in enumerate(attention.ODD_SHAPES))


@pytest.mark.parametrize(("stage", "fault"), FORWARD_FAULTS)
def test_a_planted_fault_is_caught(monkeypatch, stage, fault):
    rung = kl.module(attention, stage)
    monkeypatch.setattr(rung, "PROGRAM", Program(planted(rung.SOURCE, fault), rung.OPTIONS, rung.ARCHS))
    assert not all(right_where_maxima_rise(stage, shape) for shape in attention.ODD_SHAPES)


@pytest.mark.parametrize(("stage", "fault"), BACKWARD_FAULTS)
def test_a_fault_planted_in_the_backward_pass_is_caught(monkeypatch, stage, fault):
    rung = kl.module(attention_backward, stage)
    monkeypatch.setattr(rung, "PROGRAM", Program(planted(rung.SOURCE, fault), rung.OPTIONS, rung.ARCHS))
    shapes = attention_backward.ODD_SHAPES
    assert not all(kl.check(attention_backward, stage, shape, "float16")["right"] for shape in shapes)


def test_the_baselines_are_right_where_they_take_the_shape():
    pytest.importorskip("torch")
    for ladder, causal in itertools.product(LADDERS, (0, 1)):
        rows, _ = kl.judged(ladder, ladder.BASELINES, attention.square(512, 64, causal), "float16")
        assert all(row["right"] in (True, None) for row in rows.values()), rows
        assert rows["sdpa"]["right"]


def test_memory_grows_with_the_length_and_not_with_its_square(gpu):  # noqa: F811
    """Beyond inputs and outputs, the log-sum-exp included, at most 1 MB; the first rung keeps every score."""
    from common.kernel_gpu import memory, once

    for stage, n in itertools.product(attention.STAGES, (1000, 4000)):
        operands = attention.inputs(Shape(1, 8, 8, n, n, 64), "float16", 0)
        call = functools.partial(kl.entry(attention, stage), *operands)
        once(call)  # compiled before
        found, scores = memory(call), 4 * 8 * n * n / 1e6
        assert found["peak_mb"] > sum(a.nbytes for a in operands[:3]) / 1e6
        assert (found["beyond_mb"] <= 1) != (stage == "naive"), stage
        assert stage != "naive" or found["beyond_mb"] == pytest.approx(scores, rel=0.01)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda q, k, v, n: (q[..., :32], k[..., :32], v[..., :32], n), "heads of 64 or 128"),
        (lambda q, k, v, n: (q, k[:, :1], v, n), r"needs \(B, H, Q, D\)"),
        (lambda q, k, v, n: (q, k.astype("float32"), v, n), "needs FP16, or BF16"),
        (lambda q, k, v, n: (q, k, v, n[:1]), "a length for each of 2 batches"),
        (lambda q, k, v, n: (q[:, :3], k, v, n), "H a multiple of G"),
    ],
)
def test_operands_are_refused_by_name(gpu, edit, message):  # noqa: F811
    *operands, causal = attention.inputs(Shape(2, 4, 2, 8, 8, 64), "float16", 0)
    with pytest.raises(ValueError, match=message):
        kl.entry(attention, "flash")(*edit(*operands), causal)


def test_strided_operands(gpu):  # noqa: F811
    """Views that no kernel could read as they lie: heads and positions swapped, as a projection leaves them."""
    q, k, v, lengths, causal = attention.inputs(Shape(2, 4, 4, 70, 70, 64), "float16", 0)
    swapped = [gpu.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in (q, k, v)]
    for stage in attention.STAGES:
        out = kl.entry(attention, stage)(*swapped, lengths, causal)
        oracle = attention.oracle(q, k, v, lengths, causal)
        assert kl.judge(attention, out, *oracle, "float16")["right"], stage
