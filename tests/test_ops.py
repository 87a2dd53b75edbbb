"""Every op of every stage against its formula in float64, at sizes that no block and no vector divides."""

import numpy as np
import pytest

from common.reference import nmse
from common.stage import CPU, fused, load_stage
from tests.helpers import weight

TOLERANCES = {"softmax": 1e-6}  # NMSE; any other op of a float stage rounds to 1e-7 or better
SIZES = (1, 7, 64, 65)  # of K and D
HEADS = [(1, 1, 2), (2, 1, 6), (3, 3, 64), (4, 2, 6), (6, 3, 10)]  # H, G, hd


@pytest.fixture(params=CPU, scope="module")
def stage(request):
    return load_stage(request.param)


@pytest.fixture
def draw():
    """Random float32 arrays, the same in every run."""
    stream = np.random.default_rng(7)
    return lambda *shape: stream.standard_normal(shape).astype(np.float32)


def close(op, got, want):
    got = np.asarray(got)
    assert got.dtype == np.float32, op
    assert got.shape == np.shape(want), op
    assert nmse(got, want) <= TOLERANCES.get(op, 1e-7), (op, nmse(got, want))


def exact(array):
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("K", [*SIZES, 577])
@pytest.mark.parametrize("N", [1, 5, 130])
def test_matmul(stage, draw, T, K, N):
    x, (w, means) = draw(T, K), weight(stage, draw(K, N))
    close("matmul", stage.matmul(x, w), exact(x) @ means)


def test_matmul_leaves_its_inputs_and_earlier_outputs_alone(stage, draw):
    x, (w, means) = draw(3, 65), weight(stage, draw(65, 5))
    kept = x.copy()
    first = stage.matmul(x, w)
    stage.matmul(draw(3, 65), w)
    assert np.array_equal(x, kept)
    close("matmul", first, exact(x) @ means)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("F", [*SIZES, 130])
def test_elementwise(stage, draw, T, F):
    a, b = draw(T, F), draw(T, F)
    close("add", stage.add(a, b), exact(a) + exact(b))
    if "silu" in fused(stage):
        out = np.pad(a, [(0, 0), (0, -F % 16)])
        stage.gated(out, np.pad(b, [(0, 0), (0, -F % 16)]), 0, F)
        close("silu", out[:, :F], exact(b) * exact(a) / (1 + np.exp(-exact(a))))
    else:
        close("mul", stage.mul(a, b), exact(a) * exact(b))
        close("silu", stage.silu(a), exact(a) / (1 + np.exp(-exact(a))))


def test_silu_of_large_values(stage):
    x = np.array([[-100, -30, 0, 30, 100]], np.float32)
    if "silu" in fused(stage):
        out = np.pad(x, [(0, 0), (0, 11)])
        stage.gated(out, np.ones_like(out), 0, 5)
        assert np.all(np.isfinite(out))
        close("silu", out[:, :5], exact(x) / (1 + np.exp(-exact(x))))
        return
    assert np.all(np.isfinite(stage.silu(x)))
    close("silu", stage.silu(x), exact(x) / (1 + np.exp(-exact(x))))


@pytest.mark.parametrize("S", [1, 5, 64, 67])
def test_scale_dot_softmax(stage, draw, S):
    a, b = draw(S), draw(S)
    if "scale" not in fused(stage):
        close("scale", stage.scale(a, 1 / 3), exact(a) / 3)
    if "dot" not in fused(stage):  # else test_attention has it
        close("dot", np.float32(stage.dot(a, b)), np.sum(exact(a) * exact(b)))
    if "softmax" not in fused(stage):
        close("softmax", stage.softmax(a), np.exp(exact(a)) / np.exp(exact(a)).sum())


@pytest.mark.parametrize("offset", [-3e4, 100, 3e38])
def test_softmax_of_large_values(stage, draw, offset):
    if "softmax" in fused(stage):
        return  # test_attention has it
    x = np.float32(offset) + np.linspace(0, 4, 67, dtype=np.float32)
    shifted = exact(x) - exact(x).max()
    close("softmax", stage.softmax(x), np.exp(shifted) / np.exp(shifted).sum())


def test_softmax_of_one_value_far_above(stage):
    if "softmax" in fused(stage):
        return
    x = np.zeros(67, np.float32)
    x[40] = 1e4
    assert np.array_equal(stage.softmax(x), np.eye(67, dtype=np.float32)[40])


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("D", SIZES)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm(stage, draw, T, D, eps):
    x, w = draw(T, D), draw(D)
    root = np.sqrt((exact(x) ** 2).mean(axis=1, keepdims=True) + eps)
    close("rms_norm", stage.rms_norm(x, w, eps), exact(x) / root * exact(w))


def test_rms_norm_of_zeros(stage):
    zeros = np.zeros((1, 7), np.float32)
    assert np.array_equal(stage.rms_norm(zeros, np.ones(7, np.float32), 1e-5), zeros)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(("heads", "hd"), [(1, 2), (2, 6), (3, 64)])
@pytest.mark.parametrize("start", [0, 5, 8000])
def test_rope(stage, draw, T, heads, hd, start):
    x, freqs = draw(T, heads, hd), 1e4 ** (-np.arange(hd // 2) * 2 / hd)
    close("rope", stage.rope(x, freqs, start), turned(x, freqs, start))


def test_rope_is_exact_far_into_the_text(stage, draw):
    """An angle in float32 would be off by some 1e-4 radians there, which is an NMSE of some 1e-8."""
    x, freqs = draw(3, 2, 6), np.array([0.9, 0.7, 0.3])
    assert nmse(stage.rope(x, freqs, 8000), turned(x, freqs, 8000)) <= 1e-12


def turned(x, freqs, start):
    want, T = exact(x), len(x)
    for t in range(T):
        for i, freq in enumerate(freqs):
            cos, sin = np.cos((start + t) * freq), np.sin((start + t) * freq)
            turn = np.array([[cos, -sin], [sin, cos]])
            want[t, :, 2 * i : 2 * i + 2] = want[t, :, 2 * i : 2 * i + 2] @ turn.T
    return want


def test_rope_leaves_dimensions_beyond_the_last_pair(stage, draw):
    x = draw(3, 2, 10)
    got = stage.rope(x, np.array([1.0, 0.1]), 4)
    assert np.array_equal(got[..., 4:], x[..., 4:])
    assert not np.allclose(got[..., :4], x[..., :4])


def attended(q, k, v, start):
    """Softmax attention row by row, as its definition says."""
    q, k, v = exact(q), exact(k), exact(v)
    T, H, hd = q.shape
    out = np.empty((T, H, hd))
    for t in range(T):
        for h in range(H):
            g, seen = h * k.shape[1] // H, start + t + 1
            weights = np.exp(k[:seen, g] @ q[t, h] / np.sqrt(hd))
            out[t, h] = weights @ v[:seen, g] / weights.sum()
    return out.reshape(T, H * hd)


@pytest.mark.parametrize(("T", "start"), [(1, 0), (3, 0), (1, 66), (3, 64), (67, 0)])
@pytest.mark.parametrize(("H", "G", "hd"), HEADS)
def test_attention(stage, draw, T, start, H, G, hd):
    q, k, v = draw(T, H, hd), draw(start + T, G, hd), draw(start + T, G, hd)
    got, want = stage.attention(q, k, v, start), attended(q, k, v, start)
    if stage.__name__ == "stages.half_cache":  # what it keeps is rounded to eleven bits
        assert nmse(got, want) <= 1e-6
        q, k, v = (a.astype(np.float16).astype(np.float32) for a in (q, k, v))
        got, want = stage.attention(q, k, v, start), attended(q, k, v, start)
    close("attention", got, want)


def test_attention_never_looks_ahead(stage, draw):
    q, k, v = draw(4, 2, 6), draw(9, 2, 6), draw(9, 2, 6)
    before = stage.attention(q, k, v, 5)
    k[7:], v[7:] = draw(2, 2, 6), draw(2, 2, 6)  # positions 7 and 8 belong to the last two rows alone
    after = stage.attention(q, k, v, 5)
    assert np.array_equal(before[:2], after[:2])
    assert not np.array_equal(before[2:], after[2:])


def test_argmax(stage, draw):
    x = draw(130)
    x[77] = 9
    assert stage.argmax(x) == 77
    assert stage.argmax(-np.abs(x)) == np.argmin(np.abs(x))


def test_argmax_takes_the_first_of_equals(stage):
    x = np.zeros(65, np.float32)
    assert stage.argmax(x) == 0
    x[[7, 64]] = 1
    assert stage.argmax(x) == 7


@pytest.mark.parametrize("at", [0, 1, 129])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_argmax_refuses_what_is_not_finite(stage, draw, at, value):
    x = draw(130)
    x[at] = value
    with pytest.raises(FloatingPointError):
        stage.argmax(x)
