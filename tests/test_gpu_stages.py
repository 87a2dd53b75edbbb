"""The GPU stages on a GPU: every kernel against float64 at sizes nothing divides, every stage against the oracle."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from common import gate, reference
from common.gguf import TYPES
from common.model import open_model
from common.quants import unpack_blocks
from tests.helpers import copy_of, lesson, one_sentence
from tests.test_ops import attended, exact, turned

pytestmark = pytest.mark.gpu
NAMES = ("offload", "cuda", "resident")
ON_GPU = ("cuda", "resident")  # whose ops take and give arrays of the GPU
IDS = [1, 17, 300, 17, 511, 0, 42, 42, 9]
CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module", autouse=True)
def gpu():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no GPU here")
    return cupy


@pytest.fixture(params=NAMES)
def stage(request):
    return importlib.import_module(f"stages.{request.param}")


@pytest.fixture(params=ON_GPU)
def on_gpu(request):
    return importlib.import_module(f"stages.{request.param}")


@pytest.fixture
def draw():
    """Random float32 arrays, the same in every run."""
    stream = np.random.default_rng(7)
    return lambda *shape: stream.standard_normal(shape).astype(np.float32)


def host(array):
    return array if type(array) is np.ndarray else array.get()


def close(got, want, tolerance=1e-11):
    got = host(got)
    assert got.dtype == np.float32 and got.shape == np.shape(want)
    assert reference.nmse(got, want) <= tolerance


def matrix(stage, gpu, kind, N, K, seed=0):
    """Random blocks on the GPU, and the float64 (N, K) they stand for; their scales are near 1."""
    from common.synth import _random_blocks, _random_floats

    stream, of = np.random.PCG64(seed), TYPES[kind]
    count = N * K // of.block
    packed = _random_floats(stream, of, count, 1.0, 0.0) if of.block == 1 else _random_blocks(stream, of, count, 1.0)
    raw, rows = np.frombuffer(packed, np.uint8), np.empty(N * K, np.float32)
    length = of.block if of.block > 1 else K
    size = length // of.block * of.bytes
    unpack_blocks(of.id, raw, size, rows, length)
    return stage.Blocks(N, K, of.id, length, size, gpu.asarray(raw)), rows.reshape(N, K).astype(np.float64)


def lengths(kind):
    """Row lengths: a few of the type's blocks, and for floats what no eight and no tile divides."""
    block = TYPES[kind].block
    return (1, 7, 65, 1031) if block == 1 else (block, 3 * block, (2816 // block) * block)


FLOATS_AND_BLOCKS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", FLOATS_AND_BLOCKS)
def test_matmul_of_every_type(gpu, stage, draw, kind):
    place = np.asarray if stage.__name__.endswith("offload") else gpu.asarray
    for K in lengths(kind):
        for T, N in ((1, 1), (1, 130), (3, 5), (17, 33)):
            w, means = matrix(stage, gpu, kind, N, K, seed=K + N)
            x = draw(T, K)
            close(stage.matmul(place(x), w), exact(x) @ means.T)


@pytest.mark.parametrize("kind", FLOATS_AND_BLOCKS)
def test_one_weight_at_a_time(gpu, kind):
    """x picks single columns, so that an output is a weight: each within a rounding of the CPU's own unpacking."""
    stage = importlib.import_module("stages.resident")
    w, means = matrix(stage, gpu, kind, 5, 512)
    picked = host(stage.matmul(gpu.asarray(np.eye(512, dtype=np.float32)), w)).T
    assert np.all(np.abs(picked - means) <= np.abs(means) * 2**-22 + np.abs(means).max() * 2**-23)


@pytest.mark.parametrize("kind", FLOATS_AND_BLOCKS)
def test_embed_of_every_type(gpu, kind):
    stage = importlib.import_module("stages.resident")
    for D in lengths(kind):
        w, means = matrix(stage, gpu, kind, 11, D)
        ids = [10, 0, 3, 3]
        close(stage.embed(gpu.array(ids, np.int64), w), means[ids], 1e-14)


@pytest.mark.parametrize(("T", "F"), [(1, 1), (1, 127), (3, 129), (17, 5632)])
def test_elementwise(gpu, on_gpu, draw, T, F):
    a, b = draw(T, F), draw(T, F)
    close(on_gpu.add(*map(gpu.asarray, (a, b))), exact(a) + exact(b))
    close(on_gpu.mul(*map(gpu.asarray, (a, b))), exact(a) * exact(b))
    close(on_gpu.silu(gpu.asarray(a)), exact(a) / (1 + np.exp(-exact(a))))


def test_silu_of_large_values(gpu, on_gpu):
    x = np.array([[-100, -89, -30, 0, 30, 100]], np.float32)
    got = host(on_gpu.silu(gpu.asarray(x)))
    assert np.all(np.isfinite(got))
    close(got, exact(x) / (1 + np.exp(-exact(x))))


@pytest.mark.parametrize(("T", "D"), [(1, 1), (3, 7), (2, 127), (5, 2049)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm(gpu, on_gpu, draw, T, D, eps):
    x, w = draw(T, D), draw(D)
    root = np.sqrt((exact(x) ** 2).mean(axis=1, keepdims=True) + eps)
    close(on_gpu.rms_norm(gpu.asarray(x), gpu.asarray(w), eps), exact(x) / root * exact(w))


@pytest.mark.parametrize("eps", [1.18e-38, 3e38])
def test_rms_norm_of_extreme_eps(gpu, on_gpu, draw, eps):
    """The smallest float32 of full precision, since less is flushed to zero and refused, and nearly the largest."""
    x, w = draw(3, 129), draw(129)
    root = np.sqrt((exact(x) ** 2).mean(axis=1, keepdims=True) + eps)
    close(on_gpu.rms_norm(gpu.asarray(x), gpu.asarray(w), eps), exact(x) / root * exact(w))
    assert not host(on_gpu.rms_norm(gpu.zeros((1, 129), np.float32), gpu.asarray(w), eps)).any()


def at(gpu, start):
    return gpu.array([start], np.int64)


@pytest.mark.parametrize(("T", "heads", "hd"), [(1, 1, 2), (3, 2, 6), (5, 3, 64), (2, 32, 64)])
@pytest.mark.parametrize("start", [0, 5, 8000, 1_000_000])
def test_rope(gpu, on_gpu, draw, T, heads, hd, start):
    """Angles keep their precision far into the text."""
    x, freqs = draw(T, heads, hd), 1e4 ** (-np.arange(hd // 2) * 2 / hd)
    close(on_gpu.rope(gpu.asarray(x), gpu.asarray(freqs), at(gpu, start)), turned(x, freqs, start), 1e-13)


@pytest.mark.parametrize("base", [3.4e38, 1.0])
def test_rope_of_extreme_bases(gpu, on_gpu, draw, base):
    x, freqs = draw(3, 2, 64), base ** (-np.arange(32) * 2 / 64)
    close(on_gpu.rope(gpu.asarray(x), gpu.asarray(freqs), at(gpu, 8000)), turned(x, freqs, 8000), 1e-13)


def test_rope_leaves_dimensions_beyond_the_last_pair(gpu, on_gpu, draw):
    x, freqs = draw(3, 2, 10), gpu.array([1.0, 0.1, 3.0, 3.0, 3.0])[:2]  # what lies beyond must not be read
    got = host(on_gpu.rope(gpu.asarray(x), freqs, at(gpu, 4)))
    assert np.array_equal(got[..., 4:], x[..., 4:])
    assert not np.allclose(got[..., :4], x[..., :4])


def test_append_writes_its_rows_and_no_others(gpu, on_gpu, draw):
    cache, x = draw(9, 3, 10), draw(4, 3, 10)
    there = gpu.asarray(cache)
    on_gpu.append(there, gpu.asarray(x), at(gpu, 5))
    assert np.array_equal(host(there), np.concatenate([cache[:5], x]))


@pytest.mark.parametrize(("T", "start"), [(1, 0), (3, 0), (1, 66), (3, 64), (67, 0)])
@pytest.mark.parametrize(("H", "G", "hd"), [(1, 1, 2), (2, 1, 6), (3, 3, 64), (4, 2, 34), (6, 3, 128), (2, 1, 256)])
def test_attention(gpu, on_gpu, draw, T, start, H, G, hd):
    """Beyond the tokens seen the cache holds NaN, which must not be read."""
    q, k, v = draw(T, H, hd), draw(start + T, G, hd), draw(start + T, G, hd)
    beyond = np.full((5, G, hd), np.nan, np.float32)
    caches = (gpu.asarray(np.concatenate([a, beyond])) for a in (k, v))
    close(on_gpu.attention(gpu.asarray(q), *caches, at(gpu, start)), attended(q, k, v, start))


def test_attention_to_scores_of_any_size(gpu, on_gpu, draw):
    """Scores of some thousands: exp of one alone would overflow; the largest comes last, in the middle or first."""
    for place in (0, 33, 66):
        q, k, v = 60 * draw(1, 1, 64), draw(67, 1, 64), draw(67, 1, 64)
        k[place] = 10 * q[0]
        got = on_gpu.attention(*map(gpu.asarray, (q, k, v)), at(gpu, 66))
        close(got, v[place].reshape(1, 64))


@pytest.mark.parametrize("quant", ["f32", "f16", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k_m", "q5_k", "q6_k"])
def test_logits_at_every_position(stage, tiny_of, quant):
    gguf = open_model(tiny_of(quant))
    want = reference.compute(gguf, IDS).logits
    model = stage.load(gguf, len(IDS), 1)
    got = stage.logits(model, stage.forward(model, IDS, 0))
    assert type(got) is np.ndarray and got.dtype == np.float32 and got.shape == want.shape
    assert max(map(reference.nmse, got, want)) <= gate.TOLERANCE["float32"]


def test_a_context_filled_to_its_last_position(stage, tiny):
    """Teacher-forced through the stage's own decode path; then one token more is refused."""
    gguf, context, given = open_model(tiny), 300, 20
    ids = [i * 37 % 512 for i in range(context + 1)]
    model, forced = stage.load(gguf, context, 1), iter(ids[context - given :])
    pairs = list(stage.generate(model, ids[: context - given], given + 1, lambda row: next(forced)))
    assert [i for i, _ in pairs] == ids[context - given :]
    want = reference.compute(gguf, ids[:context], rows=given + 1).logits
    assert max(map(reference.nmse, [row for _, row in pairs], want)) <= gate.TOLERANCE["float32"]
    with pytest.raises(ValueError, match="301 tokens do not fit a context of 300"):
        stage.forward(model, [1], context)


def test_the_real_models_shape(stage, tmp_path_factory):
    """Four layers of TinyLlama's shape: prompt in two chunks, then teacher-forced to the context's end."""
    gguf = open_model(big(tmp_path_factory), 4)
    ids = [i * 7919 % 32000 for i in range(40)]
    want = wanted(gguf, tuple(ids))
    model, forced = stage.load(gguf, 40, 1), iter(ids[33:] + [0])
    rows = stage.logits(model, stage.forward(model, ids[:20], 0))
    rows = np.concatenate([rows, stage.logits(model, stage.forward(model, ids[20:33], 20))])
    told = [row for _, row in stage.generate(model, ids[:33], 8, lambda row: next(forced))]
    assert np.array_equal(np.argmax(rows[-1]), np.argmax(told[0]))
    for got, right in ((rows, want[:33]), (told, want[32:])):
        assert max(map(reference.nmse, got, right)) <= gate.TOLERANCE["float32"]


def test_logits_of_the_real_model(stage, smollm2):
    """The golden texts, prompt at once and the rest token by token: tied Q8_0, Q4_1, rows no tile divides."""
    golden = json.loads((CASES / "smollm2-golden.json").read_text())
    model = stage.load(open_model(smollm2), 64, 1)
    with np.load(CASES / "smollm2-golden.npz") as arrays:
        for name, given in golden.items():
            rows = stage.logits(model, stage.forward(model, given["ids"], 0))
            assert max(map(reference.nmse, rows, arrays[name])) <= gate.TOLERANCE["float32"]
            told = [i for i, _ in stage.generate(model, given["ids"], len(given["greedy"]))]
            assert told == given["greedy"]


BIG = {}


def big(tmp_path_factory):
    from common import synth

    if not BIG:
        BIG["path"] = synth.synth("tinyllama", "q4_k_m", tmp_path_factory.mktemp("big") / "big.gguf", layers=4)
    return BIG["path"]


def wanted(gguf, ids):
    if ids not in BIG:
        BIG[ids] = reference.compute(gguf, ids).logits
    return BIG[ids]


def test_two_runs_are_bit_identical(stage, tiny):
    model = stage.load(open_model(tiny), 64, 1)
    first = list(stage.generate(model, IDS, 8))
    list(stage.generate(model, IDS[::-1], 8))
    again = list(stage.generate(model, IDS, 8))
    assert [i for i, _ in first] == [i for i, _ in again]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))


def test_a_dropped_synchronization_is_caught(gpu, draw):
    """Without the barrier after unpacking, some warp reads weights that are not there yet, and the check sees it."""
    from common.cuda import Program

    stage = importlib.import_module("stages.resident")
    kept = stage.PROGRAM
    source = stage.SOURCE.replace(
        "weights + 8 * threadIdx.x);\n        __syncthreads();", "weights + 8 * threadIdx.x);"
    )
    assert source != stage.SOURCE
    w, means = matrix(stage, gpu, "Q4_K", 4096, 2816)
    x = draw(1, 2816)
    try:
        stage.PROGRAM = Program(source, stage.OPTIONS, stage.ARCHS)
        wrong = max(reference.nmse(host(stage.matmul(gpu.asarray(x), w)), exact(x) @ means.T) for _ in range(20))
    finally:
        stage.PROGRAM = kept
    assert not wrong <= 1e-7
    close(stage.matmul(gpu.asarray(x), w), exact(x) @ means.T)


def test_a_matrix_beyond_two_to_the_31(gpu, draw):
    """4.5 GB of float16: the last rows stand where 32 bits cannot point."""
    stage = importlib.import_module("stages.resident")
    N, K = 2**31 // 2048 + 50, 2048
    raw, tail = gpu.zeros(2 * N * K, np.uint8), draw(50, K).astype(np.float16)
    raw[-2 * 50 * K :] = gpu.asarray(tail.reshape(-1).view(np.uint8))
    x, w = draw(1, K), stage.Blocks(N, K, TYPES["F16"].id, K, 2 * K, raw)
    out = host(stage.matmul(gpu.asarray(x), w))
    assert not out[0, :-50].any()
    close(out[:, -50:], exact(x) @ tail.astype(np.float64).T)
    rows = host(stage.embed(gpu.array([N - 1, 0, N - 50], np.int64), w))
    assert np.array_equal(rows, np.stack([tail[-1], np.zeros(K), tail[0]]).astype(np.float32))


def test_elements_beyond_two_to_the_31(gpu):
    stage = importlib.import_module("stages.resident")
    n = 2**31 + 129
    a = gpu.zeros((1, n), np.float32)
    a[0, -1] = 3
    assert host(stage.add(a, a)[0, -2:]).tolist() == [0, 6]
    assert host(stage.mul(a, a)[0, -2:]).tolist() == [0, 9]
    assert host(stage.silu(a)[0, -2:]) == pytest.approx([0, 3 / (1 + np.exp(-3))])
    width, row = 4096, 2**31 // 4096 + 7
    cache = gpu.zeros((row + 1, 2, width // 2), np.float32)
    stage.append(cache, gpu.ones((1, 2, width // 2), np.float32), at(gpu, row))
    assert host(cache[row]).sum() == width and not host(cache[0]).any()
    q = gpu.ones((1, 2, 256), np.float32)
    keys = cache.reshape(-1, 1, 256)
    got = host(
        stage.attention(q, keys, keys, at(gpu, keys.shape[0] - 1))
    )  # the last 16 keys are ones, all others zeros
    seen, weight = keys.shape[0], np.exp(16.0)
    close(got, np.full((1, 512), 16 * weight / (16 * weight + seen - 16)), 1e-4)


def test_a_type_without_a_kernel_is_refused_by_name(stage, tiny_of):
    from common.gguf import GGUFError

    with pytest.raises(GGUFError, match=r"has token_embd.weight of type Q5_1, which GPU stages do not unpack"):
        stage.load(open_model(tiny_of("q5_1")), 8, 1)


def test_too_little_memory_is_one_sentence(gpu, stage, tiny, monkeypatch):
    from common.stage import StageError

    monkeypatch.setattr(gpu.cuda.runtime, "memGetInfo", lambda: (1000, 10**10))
    monkeypatch.setattr(gpu, "get_default_memory_pool", lambda: type("Pool", (), {"free_bytes": lambda self: 0})())
    with pytest.raises(StageError, match=r"needs 0.00 GB on the GPU and 0.00 GB are free: take") as caught:
        stage.load(open_model(tiny), 8, 1)
    assert caught.value.exit_code == 4


# ---- the commands ----------------------------------------------------------------------------------------------

WAIT = "return matmul(hidden, model.weights.output).get()"
FORGET = """import cupyx

    for _ in range(300):
        out = matmul(hidden, model.weights.output)
    rows = cupyx.zeros_pinned(out.shape, np.float32)
    out.get(out=rows, blocking=False)
    return rows"""


def test_logits_that_nobody_waited_for_are_caught(tiny, tmp_path):
    """They are there when they are checked, but not when the next id was chosen from them."""
    copy_of("resident", tmp_path, (WAIT, FORGET))
    done = lesson("run", "./mine.py", "-m", tiny, "--ids", "1,17,300", "-n", 4, "--json", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "is wrong, so no time is shown" in one_sentence(done)


def test_work_that_nobody_waited_for_is_timed(tiny, tmp_path):
    """100 million cycles behind each token, which are 50 ms at 2 GHz, and more at less."""
    late = "from common.gpu_profile import DELAYED\n\n        "
    late += "DELAYED.kernel('delay')((1,), (1,), (np.int64(10**8),))\n        yield new[0], row"
    copy_of("resident", tmp_path, ("yield new[0], row", late))
    words = ("-m", tiny, "--ids", "1,17,300", "-n", 3, "--json", "--save", tmp_path)
    done = lesson("run", "./mine.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ttft_ms"]["median"] > 40 and found["ms_per_token"]["median"] > 40


def test_a_wrong_kernel_is_named(tiny, tmp_path):
    copy_of("resident", tmp_path, ("rsqrtf(total(sum) / D + eps)", "rsqrtf(total(sum) / (D + 64) + eps)"))
    done = lesson("run", "./mine.py", "-m", tiny, "--ids", "1,17,300", "-n", 2, "--json", cwd=tmp_path)
    assert done.returncode == 5
    assert "token 0, layer 0, rms_norm" in one_sentence(done)


def test_a_comparison_on_a_gpu(tiny, tmp_path):
    words = ("-m", tiny, "--ids", "1,17,300", "-n", 3, "--budget", 1, "--json", "--save", tmp_path)
    done = lesson("compare", "quantized", "cuda", "resident", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["ttft_ms"]["median"] > 0 for run in found["stages"]] == [True] * 3
    names = [run["machine"]["name"] for run in found["stages"]]
    assert names[1] == names[2] != names[0] and found["recorded"] == []
    assert all(agreed["passed"] for agreed in found["agree"])


def test_a_profile_counts_every_launch_and_every_free(tiny, tmp_path):
    words = ("-m", tiny, "--ids", "1,17,300", "-n", 3, "--json", "--save", tmp_path)
    told = {name: json.loads(lesson("profile", name, *words).stdout) for name in ("offload", "cuda", "resident")}
    for name, found in told.items():
        for part in ("prefill", "decode"):
            calls = {row["call"]: row for row in found[part]["calls"]}
            assert calls["cudaLaunchKernel"]["calls"] == sum(row["calls"] for row in found[part]["kernels"])
            assert calls["cudaMemcpy, GPU to host"]["calls"] == (15 if name == "offload" else 1)
    kernels = {row["kernel"]: row["calls"] for row in told["cuda"]["prefill"]["kernels"]}
    matmuls = [row["weight"] for row in told["cuda"]["prefill"]["kernels"] if row["kernel"] == "matmul"]
    assert {"w_q", "w_down", "output"} <= set(matmuls)
    calls = {row["call"]: row["calls"] for row in told["cuda"]["prefill"]["calls"]}
    assert calls["cudaMalloc"] >= kernels["add"] and abs(calls["cudaMalloc"] - calls["cudaFree"]) <= 2
    assert "cudaMalloc" not in {row["call"] for row in told["resident"]["decode"]["calls"]}
