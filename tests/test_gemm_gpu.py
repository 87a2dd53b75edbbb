"""The kernel ladders on a GPU: every rung against float64, on shapes that no tile divides."""

import importlib

import pytest

from common import kernel_ladder as kl

pytestmark = pytest.mark.gpu
LADDERS = {name: importlib.import_module(f"stages.{name}") for name in ("gemm", "gemm_q4k")}
RUNGS = [
    (ladder, stage, dtype)
    for ladder, package in LADDERS.items()
    for stage, dtypes in package.STAGES.items()
    for dtype in dtypes
]


@pytest.fixture(autouse=True)
def gpu():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no GPU here")
    return cupy


@pytest.mark.parametrize(("ladder", "stage", "dtype"), RUNGS)
def test_a_rung_is_right_on_odd_shapes(ladder, stage, dtype):
    rungs = LADDERS[ladder]
    if stage == "triton":
        pytest.importorskip("triton")
    for i, shape in enumerate(rungs.ODD_SHAPES[: 3 if stage == "triton" else None]):  # Triton tunes each shape
        found = kl.check(rungs, stage, shape, dtype, seed=i)
        assert found["right"], found


def test_ones_do_not_see_a_swapped_index_and_random_numbers_do(gpu):
    """All ones is a bad test: any index reads a 1."""
    import numpy

    from common.cuda import Program
    from stages import gemm
    from stages.gemm import tiled

    wrong = tiled.SOURCE.replace("w_tile[k][threadIdx.x]", "w_tile[threadIdx.x][k]")
    assert wrong != tiled.SOURCE

    def matmul(x, w):
        out = gpu.empty((x.shape[0], w.shape[1]), "float32")
        sizes = map(numpy.int32, (x.shape[0], w.shape[1], x.shape[1]))
        Program(wrong, tiled.OPTIONS, tiled.ARCHS).launch("matmul", 4 * 4, (32, 32), (x, w, out, *sizes))
        return out

    ones = (gpu.ones((128, 128), "float32"),) * 2
    drawn = gemm.inputs((128, 128, 128), "float32", 0)
    judge = {**gemm.TOLERANCE["float32"]}
    assert kl.verdict(matmul(*ones), *gemm.oracle(*ones), **judge)["right"]
    assert not kl.verdict(matmul(*drawn), *gemm.oracle(*drawn), **judge)["right"]
    assert kl.verdict(tiled.matmul(*drawn), *gemm.oracle(*drawn), **judge)["right"]


def test_one_wrong_element_fails(gpu):
    from stages import gemm

    x, w = gemm.inputs((512, 512, 512), "float32", 0)
    out, (exact, size) = x @ w, gemm.oracle(x, w)
    assert kl.verdict(out, exact, size, **gemm.TOLERANCE["float32"])["right"]
    for wrong in (out[3, 5] + 0.01, gpu.nan):
        planted = out.copy()
        planted[3, 5] = wrong
        assert not kl.verdict(planted, exact, size, **gemm.TOLERANCE["float32"])["right"]


def test_q4k_weights_are_those_of_the_cpu(gpu):
    """The oracle's own unpacking, bit for bit, where the course's dequantization is installed."""
    quants = pytest.importorskip("common.quants")
    import numpy

    from stages import gemm_q4k

    _, w = gemm_q4k.inputs((1, 8, 512), "q4_k", 0)
    raw, out = gpu.asnumpy(w).ravel(), numpy.empty(256, "float32")
    exact = gpu.asnumpy(gemm_q4k.unpack(w)).reshape(-1, 256)
    for i, weights in enumerate(exact):
        quants.unpack(12, raw, i * 144, out)
        assert numpy.allclose(out, weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("x", "w", "message"), [
    (((4, 3), "float32"), ((4, 3), "float32"), r"needs \(M, K\) and \(K, N\)"),
    (((4, 3), "float64"), ((3, 4), "float32"), "needs two arrays of float32"),
    (((4, 0), "float32"), ((0, 4), "float32"), "needs M, N and K of 1"),
])  # fmt: skip
def test_operands_are_refused_by_name(gpu, x, w, message):
    from stages.gemm import naive

    with pytest.raises(ValueError, match=message):
        naive.matmul(gpu.zeros(*x), gpu.zeros(*w))


def test_strided_and_misaligned_operands(gpu):
    """Views that no kernel could read as they lie: transposed, and starting off a vector's boundary."""
    from stages import gemm

    base = gpu.random.RandomState(0).standard_normal((200, 201), "float32")
    for stage, dtypes in gemm.STAGES.items():
        if stage == "triton":
            continue
        wide = base.astype(dtypes[0])
        for x, w in ((wide[:, 1:], wide[:200]), (wide.T[:, :64], wide[:64, 3:])):
            out = kl.entry(gemm, stage)(x, w)
            assert kl.verdict(out, *gemm.oracle(x, w), **gemm.TOLERANCE[dtypes[0]])["right"], stage
