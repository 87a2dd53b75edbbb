"""Blocks as integers: their exactness, the packed layout, every form of the dot product, and the stages on them."""

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common import gate, reference
from common.gguf import TYPES
from common.harness import Request
from common.int8 import GROUP, INTEGER, STEP, by_type, pack, packed_bytes, row_apart, to_int8, unpacked
from common.jit import njit
from common.model import open_model
from common.packing import quantize
from common.quants import unpack_blocks
from stages import quantized
from stages.quantized import Blocks
from tests.helpers import copy_of

STAGES = ("integer", "packed", "blocked", "compiled", "threads", "half_cache")
NAMES = [name for name, kind in TYPES.items() if kind.id in INTEGER]
SHAPES = [(1, 3, 512), (3, 17, 256), (9, 33, 768)]  # T, N, K
SHORT = [(1, 5, 32), (7, 2, 96)]  # for blocks of 32
EXACT = 1e-9  # NMSE to the same sums of integers in float64; the ladder allows 1e-7
ROUNDED = 5e-4  # NMSE to the product of unrounded activations
LOGITS = 5e-3
IDS = [1, 17, 300, 17, 511, 0, 42, 42, 9, 3, 77]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def matrix(name, N, K):
    """(Blocks, float64 (N, K)) of random weights in blocks of the type."""
    kind = TYPES[name]
    raw = quantize(name, draw(N, K)).reshape(-1)
    w = Blocks(N, K, kind.id, kind.block, kind.bytes, raw)
    exact = np.empty(N * K, np.float32)
    unpack_blocks(kind.id, raw, kind.bytes, exact, kind.block)
    return w, exact.reshape(N, K).astype(np.float64)


def shapes(name):
    return SHAPES + (SHORT if TYPES[name].block == STEP else [])


@pytest.fixture(params=STAGES, scope="module")
def stage(request):
    return importlib.import_module(f"stages.{request.param}")


def ready(stage, w):
    return stage.pack_rows(w) if hasattr(stage, "pack_rows") else w


def by_rows(x8, T):
    """p, s and the sums of Rounded, token by token."""
    p = x8.p.transpose(0, 2, 1, 3).reshape(-1, 4 * x8.p.shape[1])
    return [p[:T], *(a.transpose(0, 2, 1).reshape(-1, a.shape[1])[:T] for a in x8[1:])]


@pytest.mark.parametrize("tokens", [1, 8])
def test_activations_are_rounded_to_the_nearest_step(tokens):
    x = draw(5, 96) * np.float32([[1], [1e-3], [50], [1], [0]])
    x[3, 32:64] = 0
    p, s, sums, offsets = by_rows(to_int8(x, tokens), 5)
    assert p.dtype == np.int8
    assert np.abs(p.astype(int)).max() == 127
    steps = np.repeat(s.astype(np.float64), STEP, axis=1)
    assert np.all(np.abs(x - p[:, :96] * steps[:, :96]) <= 0.5001 * steps[:, :96])
    assert not p[:, 96:].any()
    assert not sums[:, 96 // GROUP :].any()
    assert not p[4].any()
    assert not s[4].any()
    want = p[:, :96].astype(int).reshape(5, -1, GROUP).sum(axis=2)
    assert np.array_equal(sums[:, : want.shape[1]], want)
    exact = (p[:, :96] * steps[:, :96]).reshape(5, -1, STEP).sum(axis=2)
    assert np.allclose(offsets[:, :3], exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_tokens_beyond_the_last_are_zeros():
    x8 = to_int8(draw(9, 64), 8)
    assert len(x8.p) == 2
    assert not any(a[1, :, 1:].any() for a in x8)


def test_halves_round_to_even():
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 127, 0.5, 1.5, -2.5
    assert to_int8(x).p[0, 0, 0].tolist() == [127, 0, 2, -2]


def test_tiny_activations_are_zero_and_do_not_overflow():
    x = np.full((1, 32), 1e-38, np.float32)
    x8 = to_int8(x)
    assert not x8.p.any()
    assert not x8.offsets.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(stage, value):
    w, _ = matrix("Q4_1", 16, 64)
    x = draw(2, 64)
    x[1, 40] = value
    got = stage.matmul(x, ready(stage, w))
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1]).any()


@njit
def apart(kind, raw, at, K, length, size, q, d, m):
    by_type(row_apart, kind, raw, at, K, length, size, q, d, m)


@pytest.mark.parametrize("name", NAMES)
def test_integers_and_scales_make_the_weights(name):
    w, exact = matrix(name, 6, 512)
    for n in range(6):
        q, d, m = np.empty(512, np.uint8), *np.empty((2, 512 // GROUP), np.float32)
        apart(w.kind, w.raw, n * 512 // w.length * w.size, 512, w.length, w.size, q, d, m)
        got = q * np.repeat(d, GROUP).astype(np.float64) + np.repeat(m, GROUP)
        assert np.allclose(got, exact[n], rtol=0, atol=1e-6 * np.abs(exact).max())


def packed(w):
    out = np.zeros((packed_bytes(w.N, w.K, w.length, w.size) // 16, 16), np.uint8)
    pack(w.kind, w.raw, w.N, w.K // w.length, w.size, out)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_what_is_packed_can_be_had_back(name):
    w, exact = matrix(name, 21, 512)
    got = unpacked(w.kind, packed(w), w.N, w.K, w.length, w.size)
    assert np.allclose(got, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("name", NAMES)
def test_no_byte_is_added_and_none_is_shared(name):
    """Every bit of a row's blocks that tells of a weight is in the strip once, and other rows' bytes stay zero."""
    w, _ = matrix(name, 1, 256)
    assert packed(w).size == 16 * w.raw.size
    assert np.count_nonzero(packed(w)) <= w.raw.size


@pytest.mark.parametrize("name", NAMES)
def test_matmul(stage, name):
    for T, N, K in shapes(name):
        (w, exact), x = matrix(name, N, K), draw(T, K, seed=1)
        got = stage.matmul(x, ready(stage, w))
        assert got.dtype == np.float32
        assert got.shape == (T, N)
        p, s, *_ = by_rows(to_int8(x), T)
        rounded = p[:, :K] * np.repeat(s.astype(np.float64), STEP, axis=1)[:, :K]
        assert reference.nmse(got, rounded @ exact.T) <= EXACT, (T, N, K)
        assert reference.nmse(got, x.astype(np.float64) @ exact.T) <= ROUNDED, (T, N, K)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_alone_gives_what_it_gives_among_others(stage, name):
    w, x = ready(stage, matrix(name, 19, 768)[0]), draw(13, 768)
    together = stage.matmul(x, w)
    alone = np.concatenate([stage.matmul(x[t : t + 1], w) for t in range(13)])
    assert reference.nmse(alone, together) <= 1e-12


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_a_type_without_integers_is_computed_in_floats(stage, name):
    kind, N, K, x = TYPES[name], 5, 256, draw(3, 256)
    raw = np.random.default_rng(3).integers(0, 60, N * K // kind.block * kind.bytes, dtype=np.uint8)
    length = kind.block if kind.block > 1 else K
    w = Blocks(N, K, kind.id, length, length // kind.block * kind.bytes, raw)
    assert np.array_equal(stage.matmul(x, ready(stage, w)), quantized.matmul(x, w))


# ---- every form of the dot product ---------------------------------------------------------------------------------

FORMS = """
import hashlib, json, sys
import numpy as np
from common import intrinsics
from common.gguf import TYPES
from common.intrinsics import DOTS, dots, dots_of_panel, dots_of_tokens, load_bytes, load_lanes, no_sums, row_bytes
from common.intrinsics import store_lanes
from common.jit import numba
from stages import blocked

@numba.njit
def all_dots(floats, q, rows, x, out):
    start = no_sums(load_lanes(floats, 0))
    a, b = load_bytes(q, 0, 64), load_bytes(x, (0, 0), 64)
    tile = x.reshape(2, 16, 1, 4)
    store_lanes(out, (0, 0), dots(start, a & 127, b, 127))
    store_lanes(out, (1, 0), dots(start, a, b, 255))
    weights = row_bytes(rows, 0, 32)
    store_lanes(out, (2, 0), dots_of_tokens(start, weights & 15, tile, (1, 4), 15))
    store_lanes(out, (3, 0), dots_of_tokens(start, weights & 31, tile, (1, 4), 31))
    store_lanes(out, (4, 0), dots_of_tokens(start, weights & 63, tile, (1, 4), 63))
    store_lanes(out, (5, 0), dots_of_tokens(start, weights & 127, tile, (1, 4), 127))
    store_lanes(out, (6, 0), dots_of_tokens(start, weights, tile, (1, 4), 255))
    store_lanes(out, (7, 0), dots_of_panel(start, rows, 0, 32, tile, (1, 4), 255))
    store_lanes(out, (8, 0), dots_of_panel(start, rows, 16, 16, tile, (1, 8), 255))

random, wrong = np.random.default_rng(0), 0
for case in range(20):
    q, rows = random.integers(0, 256, 64, dtype=np.uint8), random.integers(0, 256, (32, 16), dtype=np.uint8)
    x = random.integers(-127, 128, (2, 64), dtype=np.int8)
    if case == 0:
        q[:], rows[:], x[:] = 255, 255, 127
    if case == 1:
        q[:], rows[:], x[:] = 255, 255, -127
    out = np.zeros((9, 16), np.int32)
    all_dots(np.zeros(16, np.float32), q, rows, x, out)
    wide = x.astype(int)
    want = [(a.astype(int).reshape(16, 4) * wide[0].reshape(16, 4)).sum(axis=1) for a in (q & 127, q)]
    weights, quads = rows.astype(int).reshape(8, 16, 4), wide[1, 16:48].reshape(8, 1, 4)
    want += [((weights & most) * quads).sum(axis=(0, 2)) for most in (15, 31, 63, 127, 255, 255)]
    want += [(weights[4:] * quads[4:]).sum(axis=(0, 2))]
    wrong += not np.array_equal(out, want)

digest, given = hashlib.sha256(), np.load(sys.argv[1])
for name in given["names"]:
    kind = TYPES[name]
    w = blocked.pack_rows(blocked.Blocks(19, 256, kind.id, kind.block, kind.bytes, given[name]))
    for T in (1, 9):
        digest.update(blocked.matmul(given["x"][:T], w).tobytes())
print(json.dumps([DOTS.__name__, wrong, digest.hexdigest()]))
"""

BASE = "+sse4.2,+avx,+fma,+f16c"  # so that floats round alike
X86 = platform.machine() in ("x86_64", "AMD64")
TARGETS = [None, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": BASE}] if X86 else [None]
TARGETS += [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": BASE + ",+avx2"}] if X86 else []


def test_every_form_of_the_dot_product_gives_the_same_bits(tmp_path):
    given = tmp_path / "given.npz"  # made here, since each process would compile for itself what makes it
    raw = {name: matrix(name, 19, 256)[0].raw for name in NAMES}
    np.savez(given, names=NAMES, x=draw(9, 256, seed=2), **raw)
    found = []
    for target in TARGETS:
        done = subprocess.run(
            [sys.executable, "-c", FORMS, given],
            env={**os.environ, **(target or {})},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [wrong for _, wrong, _ in found] == [0] * len(TARGETS)
    assert len({digest for _, _, digest in found}) == 1
    if X86:
        assert [form for form, _, _ in found[1:]] == ["dots_in_turn", "dots_in_pairs"]


# ---- whole models --------------------------------------------------------------------------------------------------


def rows_of(stage, gguf, ids, *cuts):
    """Logits at every position, the prompt fed in pieces that end at cuts."""
    model = stage.load(gguf, len(ids), 1)
    pieces = zip((0, *cuts), (*cuts, len(ids)), strict=True)
    return np.concatenate([stage.logits(model, stage.forward(model, ids[a:b], a)) for a, b in pieces])


@pytest.mark.parametrize("quant", ["q4_k_m", "q8_0", "q5_k", "q4_0", "f16"])
def test_logits_of_small_models(stage, tiny_of, quant):
    gguf = open_model(tiny_of(quant))
    want = reference.compute(gguf, IDS).logits
    together = rows_of(stage, gguf, IDS)
    assert together.dtype == np.float32
    assert max(map(reference.nmse, together, want)) <= LOGITS
    for cuts in [(1, 3), range(1, len(IDS))]:
        assert max(map(reference.nmse, rows_of(stage, gguf, IDS, *cuts), together)) <= LOGITS


def test_logits_of_the_real_model(stage, smollm2):
    gguf = open_model(smollm2)
    ids = json.loads((Path(__file__).parent / "cases" / "smollm2-golden.json").read_text())["story"]["ids"]
    want = reference.logits(gguf, ids)
    got = rows_of(stage, gguf, ids)
    assert reference.nmse(got, want) <= LOGITS
    assert reference.nmse(rows_of(stage, gguf, ids, 3), got) <= LOGITS


@pytest.mark.parametrize(
    ("name", "old", "new", "where"),
    [
        (
            "integer",
            "multiply_add(load_lanes(m, g), sums",
            "multiply_add(load_lanes(m, g) * 2, sums",
            "token 0, layer 0, matmul (w_q)",
        ),
        ("packed", "(strip * blocks + b)", "(strip * blocks + max(b, 1))", "token 0, layer 0, matmul (w_q)"),
        ("packed", "return rms_norm(x, weights", "return rms_norm(2 * x - x[:1], weights", "the output norm"),
        (
            "compiled",
            "x = add(x, times(h, layer.w_down))",
            "x = times(h, layer.w_down)",
            "token 0, layer 0: each op is",
        ),
    ],
)
def test_the_gate_names_a_fault_in_integers(name, old, new, where, tiny, tmp_path):
    path = copy_of(name, tmp_path, (old, new))
    assert where in gate.first_fault(Request(str(path), str(tiny), IDS, 1))
    assert "right at every position" in gate.first_fault(Request(name, str(tiny), IDS, 1))
