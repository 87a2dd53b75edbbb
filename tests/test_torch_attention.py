"""Our attention in PyTorch. Without a GPU Triton's interpreter runs its kernels, in FP32 and FP16; the rest needs one.

gradcheck wants more digits than FP16 has, and FP64 is no kernel's type. So the same Triton kernels are checked in FP32,
with steps of 0.01 and a tolerance of 1 %: differences then have four digits. FP16 and BF16 are checked within 3 % along
one direction for each operand, where the rounding of thousands of outputs averages out.
"""

import itertools
import math
import os
import subprocess
import sys

import pytest

from stages.attention import Shape

pytestmark = pytest.mark.peers
PAIRS = [("triton", "triton"), ("hopper", "hopper"), ("skip", "skip"), ("flash", "recomputed")]
TYPES = ("float16", "bfloat16")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cuda(torch):
    pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda")


@pytest.fixture(scope="module")
def one_configuration():
    """Triton compiles each of its configurations anew for each type, in seconds: one will do here."""
    pytest.importorskip("torch")
    from tests.triton_interpreted import tiles

    with tiles((64, 64, 4, 1), (64, 64, 4, 1)):
        yield


def drawn(torch, shape: Shape, dtype, device="cpu", seed=0):
    """q, k and v that need gradients, the lengths, and a gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (shape.H, shape.Q), (shape.G, shape.K), (shape.G, shape.K), (shape.H, shape.Q)
    made = [torch.randn((shape.B, *size, shape.D), generator=draw).to(device, dtype) for size in sizes]
    lengths = [(b * 7919 + 5) % (shape.K + 1) if shape.padded else shape.K for b in range(shape.B)]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return [a.requires_grad_() for a in made[:3]], lengths, made[3]


def exact(torch, q, k, v, lengths, causal):
    """The formula in float64, for autograd."""
    q, k, v = (a.double() for a in (q, k, v))
    Q, K, shared = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (a.repeat_interleave(shared, 1) for a in (k, v))
    j = torch.arange(K, device=q.device)
    seen = (j[None, None, :] < lengths[:, None, None]).expand(-1, Q, -1)
    if causal:
        seen = seen & (j[None, :] <= torch.arange(Q, device=q.device)[:, None] + K - Q)
    score = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~seen[:, None], -1e30)
    return torch.where(seen[:, None], score.softmax(-1), 0.0) @ v


@pytest.mark.parametrize(("what", "told"), [("shapes", "True"), ("gradcheck", "True"), ("fault", "False")])
def test_the_kernels_as_tritons_interpreter_runs_them(torch, what, told):
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_interpreted", what]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know NumPy from 2.4 on")
    assert (done.returncode, done.stdout.split()) == (0, [told]), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_gradcheck_on_the_gpu(cuda):
    from common.torch_attention import attention
    from tests.triton_interpreted import SMALL, TINY, checked, tiles

    with tiles(*SMALL):
        assert all(checked(attention, shape, cuda) for shape in TINY)


@pytest.mark.gpu
@pytest.mark.parametrize(("pair", "dtype"), list(itertools.product(PAIRS, TYPES)), ids=str)
def test_gradients_are_differences_of_the_outputs(torch, cuda, one_configuration, pair, dtype):
    """Of the rung's own outputs: (f(x + h u) - f(x - h u)) / 2 h for f = sum of out times a constant."""
    from common.torch_attention import attention

    shape = Shape(2, 4, 2, 130, 190, 64, padded=1)
    operands, lengths, dout = drawn(torch, shape, getattr(torch, dtype), cuda)

    def value(q, k, v):
        return (attention(q, k, v, lengths, shape.causal, *pair).double() * dout.double()).sum()

    gradients = torch.autograd.grad(value(*operands), operands)
    for which, (x, gradient) in enumerate(zip(operands, gradients, strict=True)):
        step = 0.25 * gradient.double() / gradient.double().abs().max()  # uphill: the difference is far from zero
        ends = [(x.detach().double() + sign * step).to(x.dtype) for sign in (1, -1)]
        values = [value(*operands[:which], end, *operands[which + 1 :]) for end in ends]
        expected = (gradient.double() * (ends[0].double() - ends[1].double())).sum()
        assert float(values[0] - values[1]) == pytest.approx(float(expected), rel=0.03), which


@pytest.mark.gpu
@pytest.mark.parametrize(("pair", "dtype"), list(itertools.product(PAIRS, TYPES)), ids=str)
def test_autograd_through_any_pair_of_rungs(torch, cuda, one_configuration, pair, dtype):
    """Projections leave heads and positions swapped, and a model runs on a stream of its own."""
    from common.torch_attention import attention

    shape, most = Shape(2, 4, 2, 77, 101, 64, padded=1), {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
    operands, lengths, dout = drawn(torch, shape, getattr(torch, dtype), cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**7)  # a kernel on another stream would be through before its operands are there
        strided = [a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in operands]
        out = attention(*strided, lengths, shape.causal, *pair)
        found = out, *torch.autograd.grad(out, strided, dout)
    torch.cuda.synchronize()
    right = exact(torch, *operands, lengths, shape.causal)
    right = right, *torch.autograd.grad(right, operands, dout.double())
    for ours, theirs in zip(found, right, strict=True):
        assert float((ours.double() - theirs.double()).abs().max()) < most * (1 + float(theirs.abs().max()))


def test_a_small_transformer_learns_and_translates_the_same_twice(torch, monkeypatch):
    from common import transformer

    for name, value in {"BLOCKS": 1, "HEADS": 2, "WIDTH": 64, "VOCABULARY": 100, "WORDS": 8, "LONGEST": 5}.items():
        monkeypatch.setattr(transformer, name, value)
    found = transformer.measured("cpu", {"sdpa": transformer.sdpa, "sdpa, math": transformer.sdpa}, steps=40, starts=2)
    for run in found["runs"].values():
        assert all(losses[-1] < losses[0] - 1 for losses in run["losses"]) and len(run["losses"]) == 2
        assert run["losses"][0] != run["losses"][1]
        assert run["parted_from_sdpa"]["largest"] == 0 and run["within_tolerance"]
        assert run["as_sdpa_trained"] == run["as_sdpa_with_its_weights"] == 2 * transformer.SENTENCES


def test_losses_are_held_against_what_pytorchs_own_attentions_part(torch):
    from common import transformer

    def run(apart, later=0.0):
        return {"losses": [[9 + apart] * 2 + [3 + later] * 8, [9 + apart / 2] * 2 + [3 + later] * 8]}

    runs = {"sdpa": run(0), "sdpa, math": run(0.01, later=0.1), "near": run(0.015, later=-0.15), "far": run(0.03)}
    found = transformer.compared(runs | {"late": run(0, later=0.3)})
    assert {name: row["within_tolerance"] for name, row in found.items()} == {
        "sdpa": True, "sdpa, math": True, "near": True, "far": False, "late": False,
    }  # fmt: skip
    apart = {"first_fifth": 0.01125, "largest": 0.15, "mean": 0.12225}
    assert found["near"]["parted_from_sdpa"] == pytest.approx(apart)


def test_the_transformers_attention_is_the_formula(torch):
    """Lengths and the causal mask as sdpa is told them."""
    from common import transformer

    for causal in (0, 1):
        operands, lengths, _ = drawn(torch, Shape(3, 2, 2, 7, 7, 64), torch.float64)
        lengths = torch.tensor([3, 7, 5], dtype=torch.int32)
        found = transformer.sdpa(*operands, lengths, causal)
        assert torch.allclose(found, exact(torch, *operands, lengths, causal))
