"""Blocks: every type's unpacking is exact, and packing stays within what the format can hold."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import gguf
import numba
import numpy as np
import pytest

from common import packing, quants
from common.gguf import TYPES, Tensor

GOLDEN = dict(np.load(Path(__file__).parent / "cases" / "ggml-quant-golden.npz"))
FLOATS = ["F32", "F16", "BF16"]
LEGACY = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
ALL = [*FLOATS, *LEGACY, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
SCALES = {  # where the float16 fields of a block lie, in bytes
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "F16": [0],
}  # fmt: skip


def tensor(name, blocks):
    """Blocks, (rows, row bytes) uint8, as the loader would hand them out: a read-only view."""
    kind = TYPES[name]
    shape = (blocks.shape[0], blocks.shape[1] // kind.bytes * kind.block)
    raw = np.ascontiguousarray(blocks).reshape(-1)
    raw.flags.writeable = False
    return Tensor("weight", kind, shape, 0, raw)


def oracle(name, blocks):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def random_blocks(name, rows, row_blocks, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, row_blocks * TYPES[name].bytes), np.uint8)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize("name", [name for name in ALL if f"{name}_bytes" in GOLDEN])
def test_unpack_equals_the_golden_blocks(name):
    out = quants.dequantize(tensor(name, GOLDEN[f"{name}_bytes"].copy()))
    np.testing.assert_array_equal(bits(out), bits(GOLDEN[f"{name}_f32"]))


@pytest.mark.parametrize("name", ALL)
def test_unpack_equals_gguf_on_random_finite_blocks(name):
    blocks = random_blocks(name, 37, 24)
    each = blocks.reshape(-1, TYPES[name].bytes)
    for at in SCALES.get(name, []):
        each[:, at + 1] &= 0xBF  # clear an exponent bit: no infinity, no NaN
    if name in ("F32", "BF16"):
        each[:, -1] &= 0xBF
    out = quants.dequantize(tensor(name, blocks))
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(bits(out), bits(oracle(name, blocks)))


@pytest.mark.parametrize("name", ALL)
def test_unpack_equals_gguf_where_scales_are_not_finite(name):
    blocks = random_blocks(name, 50, 48, seed=1)
    out, expected = quants.dequantize(tensor(name, blocks)), oracle(name, blocks)
    assert not np.isfinite(expected).all()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(out)[numbers], bits(expected)[numbers])


def test_every_float16_is_exact():
    halves = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(1, -1)
    np.testing.assert_array_equal(quants.dequantize(tensor("F16", halves)), oracle("F16", halves))


@pytest.mark.parametrize("name", ALL)
def test_unpack_reads_from_an_offset_and_writes_one_block(name):
    kind = TYPES[name]
    blocks = random_blocks(name, 1, 3)[0]
    raw = np.concatenate([np.full(7 * 4, 255, np.uint8), blocks])  # 28 bytes before the first block
    out = np.full(kind.block + 2, 7, np.float32)
    one_block(kind.id, raw, 28 + kind.bytes, out[1:-1])
    assert out[0] == out[-1] == 7
    expected = oracle(name, blocks.reshape(3, -1)[1:2])[0]
    np.testing.assert_array_equal(out[1:-1], expected)


@numba.njit
def one_block(kind, raw, at, out):
    quants.unpack(kind, raw, at, out)


def test_shapes_of_any_rank_and_none():
    kind = TYPES["Q8_0"]
    raw = random_blocks("Q8_0", 1, 12)[0]
    flat = quants.dequantize(Tensor("w", kind, (384,), 0, raw))
    np.testing.assert_array_equal(quants.dequantize(Tensor("w", kind, (2, 3, 64), 0, raw)), flat.reshape(2, 3, 64))
    np.testing.assert_array_equal(quants.dequantize(Tensor("w", kind, (6, 64), 0, raw)[2:4]), flat.reshape(6, 64)[2:4])
    assert quants.dequantize(Tensor("w", kind, (0, 32), 0, raw[:0])).shape == (0, 32)


def test_a_type_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="unpacked"):
        quants.dequantize(Tensor("w", TYPES["IQ1_S"], (1, 256), 0, np.zeros(50, np.uint8)))
    with pytest.raises(ValueError, match="IQ4_XS"):
        packing.quantize("IQ4_XS", np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="256"):
        packing.quantize("Q4_K", np.zeros((1, 320), np.float32))


def weights(seed=0):
    """(rows, 1024) float32 of several kinds: normal, heavy-tailed, one-sided, an outlier, constant, zero."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((64, 1024))
    outlier = rng.standard_normal((4, 1024))
    outlier[:, 100] = 60
    rows = [normal, normal[:16] ** 5 * 1e-3, abs(normal[:8]), -abs(normal[:8]) - 1, outlier]
    constants = [np.full((2, 1024), 0.37), np.full((2, 1024), -0.37), np.zeros((2, 1024))]
    # Halfway between two bfloat16, and between two float16
    ties = [(0x3F800000 + (np.arange(1024, dtype=np.uint32)[None] << shift)).view(np.float32) for shift in (15, 12)]
    return np.concatenate([*rows, *constants, *ties]).astype(np.float32)


def there_and_back(name, x):
    blocks = packing.quantize(name, x)
    assert blocks.shape == (len(x), x.shape[1] // TYPES[name].block * TYPES[name].bytes)
    return quants.dequantize(tensor(name, blocks))


@pytest.mark.parametrize("name", ["F16", "BF16", *LEGACY])
def test_quantize_equals_gguf(name):
    x = weights()
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(len(x), -1)
    np.testing.assert_array_equal(packing.quantize(name, x), expected)


@pytest.mark.parametrize("name, steps", [("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 127)])
def test_error_of_symmetric_types(name, steps):
    # q is off by half a step, or by a whole one where the side away from the furthest weight is a step short; d, a
    # float16, is off by 2^-11 of itself (2^-25 where it is subnormal), `steps` times.
    x = weights().reshape(-1, 32)
    d = abs(x).max(1, keepdims=True) / steps
    bound = d * (0.5 if name == "Q8_0" else 1) + steps * (d * 2**-11 + 2**-25) + 1e-6 * abs(x)
    assert (abs(there_and_back(name, x) - x) <= bound).all()


@pytest.mark.parametrize("name, steps", [("Q4_1", 15), ("Q5_1", 31)])
def test_error_of_affine_types(name, steps):
    x = weights().reshape(-1, 32)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    d = (high - low) / steps
    bound = d / 2 + steps * (d * 2**-11 + 2**-25) + abs(low) * 2**-11 + 2**-25 + 1e-6 * abs(x)
    assert (abs(there_and_back(name, x) - x) <= bound).all()


# An ideal uniform quantizer of n bits over the +-2.2 sigma that 32 normal weights span has an error of about
# 4.4 sigma / 2^n / sqrt(12): 0.079, 0.040 and 0.020 of sigma for 4, 5 and 6 bits.
@pytest.mark.parametrize("name, relative", [("Q4_K", 0.079), ("Q5_K", 0.040), ("Q6_K", 0.020)])
def test_error_of_super_blocks(name, relative):
    x = np.random.default_rng(2).standard_normal((64, 1024)).astype(np.float32)
    assert rms(there_and_back(name, x) - x) < relative * rms(x)
    small = x * np.float32(1e-3)
    assert rms(there_and_back(name, small) - small) < 1.1 * relative * rms(small)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks_are_as_good_as_the_golden_ones(name):
    x = GOLDEN["x"]
    ours, golden = there_and_back(name, x) - x, GOLDEN[f"{name}_f32"] - x
    assert rms(ours) <= 1.1 * rms(golden)
    assert (rms(ours, axis=1) <= 1.1 * rms(golden, axis=1)).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks_of_constants(name):
    for value in (0.0, 0.37, -0.37):
        x = np.full((1, 256), value, np.float32)
        np.testing.assert_allclose(there_and_back(name, x), x, rtol=2e-3)


def rms(x, axis=None):
    return np.sqrt((x.astype(np.float64) ** 2).mean(axis))


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q6_K", "Q8_0"])
def test_unpacking_uses_vector_lanes(name):
    kernel = getattr(quants, f"unpack_{name.lower()}").py_func
    fresh = numba.njit(kernel, error_model="numpy")  # code from the cache has no assembly to read
    raw = np.zeros(TYPES[name].bytes, np.uint8)
    fresh(raw, 0, np.zeros(TYPES[name].block, np.float32))
    (assembly,) = fresh.inspect_asm().values()
    packed = {"x86_64": ("vcvtdq2ps", "vmulps"), "AMD64": ("vcvtdq2ps", "vmulps")}
    for instruction in packed.get(platform.machine(), ("scvtf", "fmul")):
        assert instruction in assembly


BOUNDS = """
import sys
import numba
import numpy as np
from common import quants
from common.gguf import TYPES


@numba.njit
def one_block(kind, raw, at, out):
    quants.unpack(kind, raw, at, out)


for name in sys.argv[1:]:
    kind = TYPES[name]
    raw, out = np.zeros(2 * kind.bytes, np.uint8), np.zeros(kind.block, np.float32)
    one_block(kind.id, raw, kind.bytes, out)
    for short, room in [(raw[:-1], out), (raw, out[:-1])] if kind.block > 1 else []:
        try:
            one_block(kind.id, short, kind.bytes, room)
        except IndexError:
            continue
        sys.exit(f"{name}: an access out of range went unseen")
print("every access lies within its block")
"""


def test_no_kernel_reads_or_writes_outside_its_block(tmp_path):
    where = {"NUMBA_BOUNDSCHECK": "1", "LESSON_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", BOUNDS, *ALL], env={**os.environ, **where}, cwd=root, capture_output=True, text=True
    )
    assert done.stdout.strip() == "every access lies within its block", done.stderr
