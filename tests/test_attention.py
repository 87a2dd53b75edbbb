"""Attention without a GPU: the kernels' own loop bounds and fragment indices, run in NumPy against float64.

Index formulas are read out of the CUDA source, so what runs here is what runs there. This proves the algorithm, the
bounds and the layouts, not the copies and barriers: tests/test_attention_gpu.py does that.
"""

import importlib
import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from common import cuda, cuda_attention
from common import kernel_commands as commands
from common import kernel_ladder as kl
from common.cuda_attention import visible
from stages import attention, attention_backward
from stages.attention import Shape
from tests.attention_faults import BACKWARD_FAULTS, FORWARD_FAULTS, planted
from tests.attention_sanitized import FAULTS as SANITIZED
from tests.helpers import lesson, one_sentence

TILED = [stage for stage in ("flash", "skip") if stage in attention.STAGES]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def formula(source: str, pattern: str):
    """A C expression of the source as a function of its names; integers are divided as in C."""
    (found,) = set(re.findall(pattern, source))
    text = found.replace("blockIdx.x", "block").replace("/", "//")
    return lambda **names: eval(text, {"visible": visible, "min": min, "max": max, **names})


def walk(stage: str, block: int, length: int, shape: Shape, tile: int):
    """(first query, last key + 1, keys that need no mask) of a block, by the rung's own formulas."""
    rung = importlib.import_module(f"stages.attention.{stage}")
    names = {"TILE_Q": tile, "tiles": -(-shape.Q // tile), "Q": shape.Q, "K": shape.K, "causal": shape.causal,
             "length": length, "block": block}  # fmt: skip
    names["i0"] = formula(rung.SOURCE, r"\bi0 = ([^;]*);")(**names)
    end = formula(rung.SOURCE, r"\bend = ([^;]*);")(**names)
    found = re.search(r"whole = ([^;]*);", rung.SOURCE)
    return names["i0"], end, formula(rung.SOURCE, r"whole = ([^;]*);")(**names) if found else 0


def tiled(stage: str, q, k, v, lengths, causal, tile_q: int, tile_k: int, fault: str = ""):
    """out and lse by the tiles that a rung visits, with running maxima and totals, in float64.

    A maximum rises only where a score exceeds it by more than the rung's SLACK, which is in powers of two.
    """
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    shape, tiles = Shape(B, H, G, Q, K, D, causal), -(-Q // tile_q)
    source = importlib.import_module(f"stages.attention.{stage}").SOURCE
    slack = float(re.search(r"\bSLACK = ([^;]*);", source)[1]) * math.log(2)
    out, lse = np.full(q.shape, np.nan), np.full((B, H, Q), np.nan)
    for block in range(B * H * tiles):
        b, h = divmod(block // tiles, H)
        i0, end, whole = walk(stage, block, int(lengths[b]), shape, tile_q)
        i = np.arange(i0, min(i0 + tile_q, Q))
        seen = np.array([visible(int(t), int(lengths[b]), Q, K, causal) for t in i]) + (fault == "off by one")
        total, most, gathered = np.zeros(len(i)), np.full(len(i), -math.inf), np.zeros((len(i), D))
        for j0 in range(0, end, tile_k):
            j = np.arange(j0, min(j0 + tile_k, K))
            score = q[b, h, i] @ k[b, h // (H // G), j].T / math.sqrt(D)
            if j0 + tile_k > whole:
                score[j[None, :] >= seen[:, None]] = -math.inf
            higher = np.where(score.max(1) > most + slack, score.max(1), most)
            from_ = np.where(higher == -math.inf, 0, higher) if fault != "-inf row" else higher
            keep, weight = np.exp(most - from_), np.exp(score - from_[:, None])
            if fault == "no rescale":
                keep[:] = 1
            most, total = higher, total * keep + weight.sum(1)
            gathered = gathered * keep[:, None] + weight @ v[b, h // (H // G), j]
        out[b, h, i] = gathered / np.where(total == 0, 1, total)[:, None]
        lse[b, h, i] = most + np.log(total)
    return out, lse


def drawn(shape: Shape, seed: int = 0, times: int = 1):
    """Inputs as float64, lengths, causal; and the exact result. With queries 16 times as large maxima rise late."""
    q, k, v, lengths, causal = attention.inputs(shape, "float16", seed, np)
    q = q * np.float16(times)
    exact, _ = attention.oracle(q, k, v, lengths, causal)
    return (kl.wide(q), kl.wide(k), kl.wide(v), lengths, causal), exact


SMALL = [shape for shape in attention.ODD_SHAPES if shape.B * shape.H * shape.Q * shape.K < 2e5]


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize(("stage", "times"), list(itertools.product(TILED, (1, 16))))
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_the_tiles_that_a_rung_visits_give_attention(stage, times, shape):
    operands, exact = drawn(shape, times=times)
    for tile_q, tile_k in ((128, 64), (32, 16)):
        for ours, theirs in zip(tiled(stage, *operands, tile_q, tile_k), exact, strict=True):
            assert np.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fault", ["off by one", "no rescale", "-inf row"])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_a_planted_fault_is_caught(fault):
    operands, (exact, _) = drawn(Shape(2, 2, 2, 300, 130, 64), times=16)
    assert np.allclose(tiled("skip", *operands, 64, 32)[0], exact, atol=1e-9)
    assert not np.allclose(tiled("skip", *operands, 64, 32, fault)[0], exact, atol=1e-2)


@pytest.mark.parametrize(
    ("ladder", "stage", "fault"),
    [("attention", *each) for each in FORWARD_FAULTS]
    + [("attention_backward", *each) for each in BACKWARD_FAULTS]
    + [("attention", "skip", fault) for fault in SANITIZED.values() if fault],
    ids=str,
)
def test_a_fault_for_the_gpu_can_be_planted_in_the_source_as_it_is(ladder, stage, fault):
    """test_attention_gpu.py or attention_sanitized.py plants it: here its text must stand in the source, and the new
    text compile.

    To PTX alone, which a virtual architecture asks for: most of the time of a whole compilation is ptxas's.
    """
    rung = importlib.import_module(f"stages.{ladder}.{stage}")
    virtual = rung.ARCHS[-1].replace("sm", "compute")
    assert ".entry" in cuda.compile(planted(rung.SOURCE, fault), rung.OPTIONS, virtual).ptx


def test_skip_visits_no_tile_that_nobody_sees_and_masks_none_that_all_see():
    lengths, tile = (0, 1, 63, 64, 65, 129, 300), 64
    for Q, K, length, causal in itertools.product((1, 64, 130, 300), (1, 65, 300), lengths, (0, 1)):
        length, shape = min(length, K), Shape(1, 1, 1, Q, K, 64, causal)
        every = [walk("skip", block, length, shape, tile) for block in range(-(-Q // tile))]
        assert sorted(i0 for i0, _, _ in every) == list(range(0, Q, tile))  # each tile of queries once
        for i0, end, whole in every:
            seen = [visible(i, length, Q, K, causal) for i in range(i0, min(i0 + tile, Q))]
            assert end == max(seen) <= K and whole == min(seen)


def test_half_of_the_tiles_of_a_long_causal_head_are_skipped():
    shape, tiles = attention.square(8192), 64
    visited = [walk("skip", block, 8192, shape, 128)[1] for block in range(tiles)]
    assert sum(visited) / (tiles * 8192) == pytest.approx(0.5, abs=0.01)
    assert visited == sorted(visited, reverse=True)  # the longest first


# ---- fragments -------------------------------------------------------------------------------------------------


def matrices(rows: np.ndarray, addresses, turned: bool) -> np.ndarray:
    """ldmatrix: (32 lanes, 4 registers, 2 elements) of the eight-element rows that the lanes' addresses name."""
    found = np.zeros((32, 4, 2))
    for lane, m, e in itertools.product(range(32), range(4), range(2)):
        row, column = lane // 4, lane % 4 * 2 + e
        row, column = (column, row) if turned else (row, column)
        i, j = addresses[m * 8 + row]
        found[lane, m, e] = rows[i, j + column]
    return found


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mma.m16n8k16: (32, 4, 2) and (32, 2, 2) -> the four sums of each lane."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane, e in itertools.product(range(32), range(2)):
        g, c = lane // 4, lane % 4 * 2 + e
        for r in range(4):
            left[g + r % 2 * 8, c + r // 2 * 8] = a[lane, r, e]
        for r in range(2):
            right[c + r * 8, g] = b[lane, r, e]
    full = left @ right
    return np.array([[full[lane // 4 + v // 2 * 8, lane % 4 * 2 + v % 2] for v in range(4)] for lane in range(32)])


@pytest.mark.parametrize("stage", TILED)
def test_fragments_are_those_that_the_tensor_core_takes(stage):
    """16 queries by 16 keys by 16 of D, and the weights by the values, through the source's own indices."""
    source = importlib.import_module(f"stages.attention.{stage}").SOURCE
    draw = np.random.default_rng(0).standard_normal
    q, k, v = draw((16, 16)), draw((16, 16)), draw((16, 16))

    def addresses(call: str, array: str):
        """What each lane passes to ldmatrix; tiles start at 0 here."""
        inside = re.search(rf"{call}\([^;]*&{array}\[([^\]]*)\]\[([^\]]*)\]", source)
        row, column = (formula(f"x = {text};", r"x = ([^;]*);") for text in inside.groups())
        return [(row(lane=i, down=0, r=0, n=0, d=0), column(lane=i, d=0)) for i in range(32)]

    a = matrices(q, addresses("fragment", "tile.q"), turned=False)
    b = matrices(k, addresses("fragment", "keys"), turned=False)
    score = [product(a, b[:, :2]), product(a, b[:, 2:])]  # fragments n and n + 1
    for n, lane, e in itertools.product(range(2), range(32), range(4)):
        i, j = lane // 4 + e // 2 * 8, n * 8 + lane % 4 * 2 + e % 2  # as the mask and the output count
        assert score[n][lane, e] == pytest.approx(q[i] @ k[j])
    weights, two = np.zeros((32, 4, 2)), re.search(r"two = &score\[r\]\[([^\]]*)\]\[([^\]]*)\];", source).groups()
    fragment, place = (formula(f"x = {text};", r"x = ([^;]*);") for text in two)
    for p, e in itertools.product(range(4), range(2)):
        weights[:, p, e] = score[fragment(n=0, p=p)][:, place(n=0, p=p) + e]
    b = matrices(v, addresses("fragment_turned", "values"), turned=True)
    full = q @ k.T @ v
    for n, half in enumerate((b[:, :2], b[:, 2:])):
        out = product(weights, half)
        for lane, e in itertools.product(range(32), range(4)):
            assert out[lane, e] == pytest.approx(full[lane // 4 + e // 2 * 8, n * 8 + lane % 4 * 2 + e % 2])


# ---- the ladder ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_the_oracle_is_attention():
    """Against the formula with whole matrices, one head at a time."""
    shape = Shape(2, 4, 2, 7, 9, 64, causal=1, padded=1)
    q, k, v, lengths, causal = attention.inputs(shape, "bfloat16", 3, np)
    (out, lse), _ = attention.oracle(q, k, v, lengths, causal)
    q, k, v = map(kl.wide, (q, k, v))
    for b, h in itertools.product(range(2), range(4)):
        score = q[b, h] @ k[b, h // 2].T / 8
        for i, j in itertools.product(range(7), range(9)):
            if j > i + 2 or j >= lengths[b]:
                score[i, j] = -math.inf
        for i in range(7):
            if (score[i] > -math.inf).any():
                weight = np.exp(score[i]) / np.exp(score[i]).sum()
                assert np.allclose(out[b, h, i], weight @ v[b, h // 2])
                assert lse[b, h, i] == pytest.approx(np.log(np.exp(score[i]).sum()))
            else:
                assert (out[b, h, i] == 0).all() and lse[b, h, i] == -math.inf


def test_bf16_is_rounded_to_nearest_even():
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159], "float32")
    assert kl.wide(attention.rounded(x, "bfloat16")).tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -3.140625]


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_one_wrong_element_of_either_output_fails():
    q, k, v, lengths, causal = attention.inputs(Shape(1, 2, 1, 40, 30, 64), "float16", 0, np)
    exact, size = attention.oracle(q, k, v, lengths, causal)
    right = exact[0].astype("float16"), exact[1].astype("float32")
    assert kl.judge(attention, right, exact, size, "float16")["right"]
    assert kl.judge(attention, (right[0], None), exact, size, "float16")["right"]  # a baseline without lse
    for which, wrong in ((0, 0.05), (0, np.nan), (1, 0.01), (1, np.nan), (1, -np.inf)):
        planted = [a.copy() for a in right]
        planted[which][0, 1, 35] += wrong
        assert not kl.judge(attention, tuple(planted), exact, size, "float16")["right"], (which, wrong)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("shape", [Shape(1, 2, 1, 5, 7, 64), Shape(2, 2, 2, 6, 4, 64, padded=1)], ids=str)
def test_the_gradients_are_those_of_small_differences(shape):
    """The forward oracle, moved a little along a random direction; in the second shape two queries see no key."""
    *operands, lengths, causal = attention_backward.inputs(shape, "float16", 1, np)
    q, k, v, out, lse, dout = operands
    gradients, _ = attention_backward.oracle(*operands, lengths, causal)
    draw, step = np.random.default_rng(0).standard_normal, 1e-5
    for which, gradient in enumerate(gradients):
        direction, ends = draw(gradient.shape), []
        for sign in (1, -1):
            moved = [kl.wide(a) for a in (q, k, v)]
            moved[which] += sign * step * direction
            ends.append((attention.oracle(*moved, lengths, causal)[0][0] * kl.wide(dout)).sum())
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-7)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_a_backward_pass_that_forgets_the_row_term_fails():
    operands = attention_backward.inputs(Shape(1, 2, 1, 40, 30, 64), "float16", 0, np)
    exact, size = attention_backward.oracle(*operands)
    judge = (attention_backward, exact, size, "float16")
    right = tuple(a.astype("float16") for a in exact)
    assert kl.judge(judge[0], right, *judge[1:])["right"]
    q, k, v, out, lse, dout = (kl.wide(a) for a in operands[:6])
    forgotten = [a.copy() for a in exact]
    for h in range(2):
        score = q[0, h] @ k[0, 0].T / 8
        seen = np.array([visible(i, 30, 40, 30, 1) for i in range(40)])
        weight = np.where(np.arange(30) < seen[:, None], np.exp(score - lse[0, h][:, None]), 0)
        forgotten[0][0, h] = (weight * (dout[0, h] @ v[0, 0].T)) @ k[0, 0] / 8
    assert not kl.judge(judge[0], tuple(a.astype("float16") for a in forgotten), *judge[1:])["right"]


def test_one_formula_counts_for_every_column():
    shape = attention.square(4096, 128)
    assert attention.flops(*shape) == 2 * 4 * 16 * 4096**2 * 128
    assert attention.flops(*shape._replace(causal=0)) == 2 * attention.flops(*shape)
    assert attention_backward.flops(*shape) == 2.5 * attention.flops(*shape)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("8192", (2, 32, 32, 8192, 8192, 64, 1, 0)),
        ("512,128", (32, 16, 16, 512, 512, 128, 1, 0)),
        ("1,8,2,33,700,64", (1, 8, 2, 33, 700, 64, 1, 0)),
        ("1x8x8x40x40x128x0x1", (1, 8, 8, 40, 40, 128, 0, 1)),
    ],
)
def test_a_shape_is_read(text, shape):
    assert commands.shape_of(attention, text) == shape


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pp64", "give B,H,G,Q,K,D,causal,padded, or N"),
        ("1,2,3", "give B,H,G,Q,K,D"),
        ("0", "sizes start at 1"),
        ("64,96", "D is 64 or 128"),
        ("1,8,3,5,5,64", "H a multiple of G"),
        ("1,8,8,5,5,64,2", "causal and padded 0 or 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(text, told):
    with pytest.raises(commands.UsageError, match=told):
        commands.shape_of(attention, text)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("compare", "attention/flash", "attention/skip", "--shape", 300, "--json"), 4, "no record has attention at"),
        (("compare", "attention/flash", "attention/skip", "-n", 3), 2, "--shape B,H,G,Q,K,D,causal,padded says"),
        (("compare", "attention/flash", "gemm/hopper"), 2, "are of different ladders"),
    ],
)
def test_without_a_gpu_one_sentence_says_so(words, code, told):
    done = lesson(*words, **NO_GPU)
    assert done.returncode == code
    assert told in one_sentence(done)


def test_without_a_gpu_the_nearest_recorded_shape_stands_in_for_the_ladders_own():
    """stored is too slow at 4096."""
    words = ("compare", "attention_backward/stored", "attention_backward/recomputed")
    told = " ".join(lesson(*words, **NO_GPU).stdout.decode().split())
    assert "4 x 32 x 32 x 4096 x 4096 x 64 x 1 x 0, was not recorded for all of these: shown is the nearest" in told
    found = json.loads(lesson(*words, "--json", **NO_GPU).stdout)
    nearest = [16, 32, 32, 1024, 1024, 64, 1, 0]
    assert found["shape"] == nearest and found["unrecorded"] == [4, 32, 32, 4096, 4096, 64, 1, 0]
    assert {tuple(row["shape"]) for row in found["recorded"][0]["rows"]} == {tuple(nearest)}


def test_without_a_gpu_a_shape_of_ones_own_is_not_replaced_but_the_nearest_is_named():
    done = lesson("compare", "attention_backward/skip", "attention_backward/hopper", "--shape", "5000,128", **NO_GPU)
    assert done.returncode == 4
    assert "--shape 4,16,16,4096,4096,128,1,0 was recorded elsewhere" in done.stderr.decode()


@pytest.mark.parametrize("ladder", ["attention", "attention_backward"])
def test_without_a_gpu_the_record_is_shown(ladder):
    done = lesson("compare", f"{ladder}/skip", f"{ladder}/hopper", **NO_GPU)
    here, there = done.stdout.decode().split(f"recorded on NVIDIA H200 (reports/nvidia-h200/{ladder}/ladder.json)")
    assert "not measured here" in here and "sdpa_cudnn" in there and "another version" not in there


def test_the_ladder_is_listed_and_read():
    told = lesson("list", "attention").stdout.decode()
    assert all(f"attention/{stage}" in told for stage in attention.STAGES)
    assert b"SOURCE.attend" in lesson("diff", "attention/flash", "attention/skip").stdout


def test_names_and_blocks_of_a_launch():
    q = np.zeros((2, 3, 130, 64), "uint16")
    assert cuda_attention.name("attention", q) == "attention_bfloat16_64"
    assert cuda_attention.blocks(q, 128) == 2 * 3 * 2


@pytest.mark.parametrize("version", [13, 14])
def test_pytorchs_stream_is_taken_as_each_cupy_wants_it(monkeypatch, version):
    """ExternalStream is deprecated in CuPy 14, which has Stream.from_external; before that there is nothing else."""

    class Theirs:
        cuda_stream = 7

        def __cuda_stream__(self):
            return 0, 7

    asked = {"from_external": lambda stream: ("new", stream.__cuda_stream__())} if version == 14 else {}
    cuda = SimpleNamespace(Stream=SimpleNamespace(**asked), ExternalStream=lambda number: ("old", number))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    assert cuda_attention.stream(Theirs()) == (("new", (0, 7)) if version == 14 else ("old", 7))
    assert cuda_attention.stream(SimpleNamespace(cuda_stream=7)) == ("old", 7)  # a PyTorch without the protocol
