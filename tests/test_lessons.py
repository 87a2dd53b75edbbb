"""The copies are kept honest: each stage is the one before it, plus what it declares and nothing else."""

import ast
import inspect
import re
import shutil

import pytest

from common import diff
from common.stage import FOLDER, LADDER, OPS, fused, load_stage
from tests.helpers import copy_of


def path(name):
    return FOLDER / f"{name}.py"


def mark(name, which):
    return diff.constant(path(name), which)


STEPS = [name for name in LADDER if mark(name, "PREVIOUS")]
MEASURED = re.compile(
    r"\d(?:[.,]?\d)*(?:\s*-)?\s*(?:ms|µs|ns|s|x|×|times|GB/s|%|percent|tokens/s|tok/s|GFLOP/s)(?![\w/]|\s*\d)"
)

# Lines a stage may hold and may add to the one before it. A segment's first stage has no step budget.
BUDGETS = {
    "naive": (200, None),
    "tiling": (200, 40),
    "simd": (200, 40),
    "kv_cache": (200, 40),
    "quantized": (200, None),
    "integer": (350, 120),
    "packed": (350, 120),
    "blocked": (350, 125),  # a lone token's attention has a loop of its own, since tiles lose there
    "compiled": (460, 140),  # the step, and what it is given, beside the ops that it calls
    "threads": (600, 190),  # ops become parts of a range, and what they write has its place before they start
    "half_cache": (660, 150),  # a token and a prompt look back in two ways
    "offload": (600, None),
    "cuda": (600, 250),
    "resident": (600, 250),
    "prefill": (600, 310),  # a matmul and an attention on tensor cores, and nothing of the old ones left
    "graph": (1000, 510),  # a token's kernels beside a prompt's, each asking ahead for what it multiplies and looks at
    "fused": (1220, 630),  # beside a prompt's kernels, a token's is a program: a ring, exchanges, six phases
}
NAMED = ("load", "attention", "forward", "logits", "generate")
SECTIONS = ["docstring", "import", *diff.MARKS, "constant"]
SECTIONS += ["load", "ops", "attention", "step", "forward", "logits", "generate"]


def undeclared(old, new):
    return diff.undeclared(old, new, ("matmul",))


@pytest.mark.parametrize("name", STEPS)
def test_a_stage_declares_what_it_changes(name):
    previous, declared = mark(name, "PREVIOUS"), mark(name, "CHANGES")
    assert previous in LADDER[: LADDER.index(name)]
    assert diff.undeclared(path(previous), path(name), declared) == []
    differing = {change.name for change in diff.changes(path(previous), path(name))}
    assert set(declared) <= differing, "a change is declared that is none"


def test_the_ladder_begins_with_nothing_before_it():
    assert mark(LADDER[0], "PREVIOUS") is None
    assert mark(LADDER[0], "CHANGES") == ()
    assert len(STEPS) == len(LADDER) - 1


@pytest.mark.parametrize("name", LADDER)
def test_sections_are_in_order(name):
    assert sections(path(name).read_text()) == []


@pytest.mark.parametrize("name", LADDER)
def test_the_docstring_tells_the_four_parts(name):
    told = diff.docstring(path(name))
    assert list(told) == ["", "Idea", "Was", "Change", "Expect"]
    assert all(told.values())


@pytest.mark.parametrize("name", LADDER)
def test_no_docstring_holds_a_measured_number(name):
    assert measured(path(name).read_text()) == []


@pytest.mark.parametrize("name", LADDER)
def test_budgets(name):
    most, step = BUDGETS[name]
    text = path(name).read_text().splitlines()
    assert len(text) <= most
    if step is not None:
        added = diff.changes(path(mark(name, "PREVIOUS")), path(name))
        assert sum(line.startswith("+") for change in added for line in change.unified()) <= step


@pytest.mark.parametrize("name", LADDER)
def test_a_chapter_stands_beside_the_stage(name):
    assert (FOLDER / f"{name}.md").is_file()


@pytest.mark.parametrize("name", LADDER)
def test_ops_resolve_with_the_same_signatures(name):
    stage, first = load_stage(name), load_stage(LADDER[0])
    assert set(fused(stage)) <= set(OPS)
    assert all(hasattr(stage, name) for name in fused(stage).values())
    for op in {*OPS, *NAMED} - set(fused(stage)):
        assert parameters(stage, op) == parameters(first, op), op


def parameters(stage, name):
    function = getattr(stage, name)
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


def sections(source):
    """What stands out of order in a stage: pairs (a, b) where b comes after a but belongs before it."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr):
            found.append("docstring")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.append("import")
        elif isinstance(node, ast.ClassDef):
            found.append("constant")  # a type, such as what load makes of a tensor
        elif isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            found.append(target if target in diff.MARKS else "constant")
        else:
            apart = node.name in NAMED or (node.name == "step" and "attention" in found)  # what forward calls once
            found.append(node.name if apart else "ops")
    places = [SECTIONS.index(part) for part in found]
    assert set(SECTIONS) - set(found) <= {"constant", "step", *diff.MARKS} - {"PREVIOUS", "CHANGES"}, (
        "a section is missing"
    )
    return [(a, b) for a, b, x, y in zip(found, found[1:], places, places[1:], strict=False) if x > y]


def measured(source):
    """The measured numbers in a module's docstrings."""
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef)]
    return [hit[0] for n in documented for hit in MEASURED.finditer(ast.get_docstring(n) or "")]


# ---- the tests above, tested -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["3 ms", "2.4x", "2.4×", "12 GB/s", "30 %", "5 tokens/s", "0.2 s", "10 times"])
def test_a_measured_number_would_be_found(told):
    assert measured(f'"""Expect  It took {told}."""') == [told]
    assert measured(f'def f():\n    """It took {told}, once."""') == [told]


@pytest.mark.parametrize("told", ["16 KB", "64 x 64 floats", "a tile of 64", "float32", "2 simd lanes", "(K, N)"])
def test_a_shape_is_no_measured_number(told):
    assert measured(f'"""Idea  {told}."""') == []


def test_sections_out_of_order_would_be_found():
    source = path("tiling").read_text()
    constant = next(line for line in source.splitlines(True) if line.startswith("TILE"))
    assert sections(source.replace(constant, "") + constant) == [("generate", "constant")]


# What may not slip in beside a declared change. Each edits a copy of tiling, which declares matmul alone.
PLANTED = {
    "a body": ("scores[s] = dot(q[t, h], k[s, g])", "scores[s] = dot(k[s, g], q[t, h])", ["attention"]),
    "a comment in a body": ("  # a token sees itself and all before it", "", ["attention"]),
    "a decorator": ("@njit\ndef attention", "@njit(fastmath=True)\ndef attention", ["attention"]),
    "a decorator more": ("def forward", "@timed\ndef forward", ["forward"]),
    "a default": ("choose=argmax", "choose=None", ["generate"]),
    "a function nobody uses": ("def load", "def spare():\n    return 1\n\n\ndef load", ["spare"]),
    "a function that calls itself": ("def load", "def spare():\n    return spare()\n\n\ndef load", ["spare"]),
    "a constant nobody uses": ("def load", "SPARE = 1\n\n\ndef load", ["SPARE"]),
    "a constant that others use": ("def load", "math = 1\n\n\ndef load", ["math"]),
    "a removed function": (
        "def logits(model, hidden):  # (T, D) -> (T, V)\n    return matmul(hidden, model.weights.output)\n",
        "",
        ["logits"],
    ),
    "an op from elsewhere": (
        "from common.cpu_ops import add, argmax, dot,",
        "from elsewhere import dot\nfrom common.cpu_ops import add, argmax,",
        ["dot"],
    ),
    "an op under another name": ("scale, silu, softmax", "scale, scale as silu, softmax", ["silu"]),
    "an op overridden": ("def load", "silu = mul\n\n\ndef load", ["silu"]),
    "an op written out": ("def load", "@njit\ndef silu(x):\n    return x\n\n\ndef load", ["silu"]),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_change_is_found(what, tmp_path):
    old, new, names = PLANTED[what]
    assert undeclared(path("naive"), copy_of("tiling", tmp_path, (old, new))) == names


def test_a_planted_statement_is_found(tmp_path):
    for statement in ("TILE += 1", "if math:\n    TILE = 1", "print(1)"):
        planted = copy_of("tiling", tmp_path, ("def load", f"{statement}\n\n\ndef load"))
        assert undeclared(path("naive"), planted), statement


def test_a_second_definition_does_not_hide_the_first(tmp_path):
    again = ("def logits", "attention = njit(attention)\n\n\ndef logits")
    naive = copy_of("naive", tmp_path, again, name="old.py")
    tiling = copy_of("tiling", tmp_path, again, ("out[t, h, d] +=", "out[t, h, d] -="))
    assert undeclared(naive, tiling) == ["attention"]


def test_a_constant_of_both_counts(tmp_path):
    planted = copy_of("tiling", tmp_path, ("TILE = 64", "TILE = 128"))
    assert undeclared(path("tiling"), planted) == ["TILE"]


def test_a_helper_of_a_declared_change_needs_no_declaring(tmp_path):
    helper = "LANES = 8\n\n\ndef blank(shape, dtype):\n    return LANES\n\n\n"
    planted = copy_of("tiling", tmp_path, ("def load", helper + "def load"), ("np.zeros((T, N)", "blank((T, N)"))
    assert undeclared(path("naive"), planted) == []


def test_a_helper_that_an_undeclared_function_uses_too_is_found(tmp_path):
    planted = copy_of("tiling", tmp_path, ("h // (H // G)", "h // (H // G) + 0 * TILE"))
    assert set(undeclared(path("naive"), planted)) == {"TILE", "attention"}


def test_the_unchanged_copies_pass(tmp_path):
    shutil.copy(path("naive"), tmp_path / "mine.py")
    assert diff.undeclared(path("naive"), tmp_path / "mine.py", ()) == []
    assert undeclared(path("naive"), copy_of("tiling", tmp_path)) == []


CUDA = '''
SOURCE = r"""
#define TILE 64

__device__ __forceinline__ float unpack(const char* block, int i) {
    if (i) { return 0; }
    return block[i];
}

extern "C" __global__ void __launch_bounds__(256) matmul(const float* x, float* out) {
    out[0] = unpack(0, 1);
}

extern "C" __global__ void __launch_bounds__(256) attention(const float* x, float* out) {
    out[0] = 1;
}

template <typename T, int N>
__global__ void rope(T* x) { x[0] = N; }
"""
'''
CUDA_PLANTED = {
    "return block[i]": ("return block[i + 1]", "SOURCE.unpack"),
    "out[0] = unpack(0, 1)": ("out[0] = unpack(1, 1)", "SOURCE.matmul"),
    "__launch_bounds__(256) attention": ("__launch_bounds__(512) attention", "SOURCE.attention"),
    "out[0] = 1;": ("out[0] = 2;", "SOURCE.attention"),
    "x[0] = N": ("x[0] = 0", "SOURCE.rope"),
    "#define TILE 64": ("#define TILE 32", "SOURCE"),
}


@pytest.mark.parametrize("old", CUDA_PLANTED)
def test_a_planted_change_of_cuda_source_is_found(old, tmp_path):
    new, name = CUDA_PLANTED[old]
    (tmp_path / "old.py").write_text(CUDA)
    (tmp_path / "new.py").write_text(CUDA.replace(old, new, 1))
    assert diff.undeclared(tmp_path / "old.py", tmp_path / "new.py", ()) == [name]
    assert diff.undeclared(tmp_path / "old.py", tmp_path / "new.py", (name,)) == []
