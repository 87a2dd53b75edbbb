"""The memory player: a stage's own matmul, translated to JavaScript that notes each address it touches, in order.

The page draws what these loops touch and plays it through a small simulated cache. Because they are translated from the
modules when the page is written, no second copy of a loop can fall behind the stage it stands for. Only what decides
an address is kept: every number in memory is 0.
"""

import ast
import json
import re
from functools import partial
from pathlib import Path

from common.diff import constant, definitions
from common.gguf import TYPES
from common.stage import code_path

PAGE = Path(__file__).parent / "page"
LOOPS = ("naive", "tiling", "simd", "quantized")
KERNELS = ("gemm/naive", "gemm/coalesced", "gemm/tiled")
CONSTANTS = ("TILE", "AHEAD")  # what a reader may change
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Mod: "%", ast.Lt: "<", ast.Eq: "=="}


class UntranslatedError(ValueError):
    """A loop uses something that the translation does not know; the message quotes it."""


def fragment() -> str:
    """The player as HTML that any page can hold: style, markup, loops and script."""
    loops = ",\n".join(f"{json.dumps(stage)}: {loop(stage)}" for stage in (*LOOPS, *KERNELS))
    lanes, block = constant(PAGE.parent / "intrinsics.py", "LANES"), TYPES["Q4_1"]
    css, html, js = ((PAGE / f"player.{kind}").read_text("utf-8") for kind in ("css", "html", "js"))
    return f"""<style>
{css}</style>
{html}<script>
const LANES = {lanes}; // floats of a vector register
const BLOCK = {{ name: "{block.name}", length: {block.block}, size: {block.bytes} }}; // weights, bytes
const LOOPS = {{\n{loops}\n}};
{js}</script>
"""


def loop(stage: str) -> str:
    """A JavaScript object: the text of a stage's matmul, the constants it uses, and the function that runs it."""
    path = code_path(stage)
    found = definitions(path.read_text("utf-8"))
    text = found["SOURCE.matmul" if stage in KERNELS else "matmul"].text
    run = kernel(text) if stage in KERNELS else function(text)
    constants = {name: constant(path, name) for name in CONSTANTS if name in found}
    return (
        f"{{ text: {json.dumps(text.removeprefix('@njit').strip())}, constants: {json.dumps(constants)}, run: {run} }}"
    )


# Python: a matmul's loops. `memory` notes an access; an array x is read by x.read(line, floats, index).


def function(text: str) -> str:
    """The JavaScript of a matmul given as Python. Raises UntranslatedError."""
    tree = ast.parse(text).body[0]
    first = tree.lineno - 1
    names = sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})
    body = "\n".join(statement(node, first) for node in tree.body)
    arguments = ", ".join(a.arg for a in tree.args.args)
    return f"(memory, {arguments}, {{ TILE, AHEAD, LANES }}) => {{\nlet {', '.join(names)};\n{body}\n}}"


def statement(node: ast.stmt, first: int) -> str:
    """One statement in JavaScript; an access notes its line, counted from `first`."""
    line, value = node.lineno - first, lambda n: expression(n, node.lineno - first)
    match node:
        case ast.For(target=ast.Name(i), iter=ast.Call(func=ast.Name("range"), args=args)):
            bounds = [value(a) for a in args]
            begin, end, step = ["0", *bounds, "1"] if len(bounds) == 1 else [*bounds, "1"][:3]
            body = "\n".join(statement(n, first) for n in node.body)
            return f"for ({i} = {begin}; {i} < {end}; {i} += {step}) {{\n{body}\n}}"
        case ast.Assign(targets=[target], value=new):
            return assigned(target, new, line)
        case ast.AugAssign(target=target, op=ast.Add(), value=new):
            sum_ = f"{value(as_load(target))} + {value(new)}"
            if isinstance(new, ast.BinOp) and isinstance(new.op, ast.Mult):
                sum_ = f"memory.multiplyAdd(1, {sum_})"
            return stored(target, sum_, line)
        case ast.Expr(value=ast.Call()):
            return f"{value(node.value)};"
        case ast.Return():
            return ""
    raise UntranslatedError(ast.unparse(node))


def assigned(target: ast.expr, value: ast.expr, line: int) -> str:
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            return " ".join(assigned(t, v, line) for t, v in zip(targets, values, strict=True))
        case ast.Name(name), ast.Call(func=ast.Attribute(ast.Name("np"), "empty" | "zeros"), args=[shape, _]):
            return f"{name} = memory.array({json.dumps(name)}, [{expression(shape, line)}].flat());"
        case ast.Subscript(ast.Name(name), ast.Slice()), ast.Constant(0):
            return f"{name}.fill({line});"
    return stored(target, expression(value, line), line)


def stored(target: ast.expr, value: str, line: int) -> str:
    if isinstance(target, ast.Subscript):
        return f"{expression(target.value, line)}.write({line}, 1, {expression(target.slice, line)}, {value});"
    return f"{expression(target, line)} = {value};"


def expression(node: ast.expr, line: int) -> str:
    def value(n):
        return expression(n, line)

    match node:
        case ast.Name(name):
            return name
        case ast.Constant(number):
            return repr(number)
        case ast.Tuple(elts=parts):
            return f"[{', '.join(map(value, parts))}]"
        case ast.BinOp(left=a, op=ast.FloorDiv(), right=b):
            return f"Math.floor({value(a)} / {value(b)})"
        case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]) if (
            type(op) in OPERATORS
        ):
            return f"({value(a)} {symbol(op)} {value(b)})"
        case ast.IfExp(test=test, body=a, orelse=b):
            return f"({value(test)} ? {value(a)} : {value(b)})"
        case ast.Attribute(value=ast.Name(name), attr="shape"):
            return f"{name}.shape"
        case ast.Subscript(value=ast.Attribute(), slice=index):
            return f"{value(node.value)}[{value(index)}]"
        case ast.Subscript(value=ast.Name(name), slice=index):
            return f"{name}.read({line}, 1, {value(index)})"
        case ast.Call(func=ast.Name("min"), args=args):
            return f"Math.min({', '.join(map(value, args))})"
        case ast.Call(func=ast.Name("load_lanes"), args=[array, index]):
            return f"{value(array)}.read({line}, LANES, {value(index)})"
        case ast.Call(func=ast.Name("store_lanes"), args=[array, index, new]):
            return f"{value(array)}.write({line}, LANES, {value(index)}, {value(new)})"
        case ast.Call(func=ast.Name("prefetch"), args=[array, index]):
            return f"{value(array)}.prefetch({line}, {value(index)})"
        case ast.Call(func=ast.Name("multiply_add"), args=args):
            return f"memory.multiplyAdd(LANES, {', '.join(map(value, args))})"
        case ast.Call(func=ast.Name("unpack"), args=[_, raw, at, out]):
            return f"memory.unpack({line}, {value(raw)}, {value(at)}, {value(out)})"
        case ast.Call(func=ast.Name("total") | ast.Attribute(ast.Name("np"), "float32"), args=[arg]):
            return value(arg)
    raise UntranslatedError(ast.unparse(node))


def symbol(op: ast.AST) -> str | None:
    return OPERATORS.get(type(op))


def as_load(target: ast.expr) -> ast.expr:
    """What `target += …` reads."""
    return ast.parse(ast.unparse(target), mode="eval").body


# CUDA C++: one thread of a kernel. Its syntax is nearly JavaScript's; what differs are types, integer division, arrays.

C_TO_JS = (
    (r"\(int64\)", ""),
    (r"\bconst int\b", "const"),
    (r"\b(?:int|float)\b", "let"),
    (r"(\([^()]*\)|[\w.]+) / (\w+)", r"Math.floor(\1 / \2)"),
    (r"__syncthreads\(\);", ""),
    (r"sum \+= (.*?);", r"sum = memory.multiplyAdd(1, sum + \1);"),
)
INDEXED = r"(\w+)\[([^][]*)\](?:\[([^][]*)\])?"


def kernel(text: str) -> str:
    """The JavaScript of one thread of a CUDA matmul. A load that it leaves out has null as its index."""
    head, body = text.split("{", 1)
    arguments = re.findall(r"(\w+)[,)]", head.split("matmul(")[1])
    lines = ["" for _ in head.splitlines()[1:]]
    for number, line in enumerate(body.splitlines(), len(lines) + 1):
        line = line.partition("//")[0]
        if shared := re.match(r"\s*__shared__ float (.*);", line):
            pieces = re.findall(INDEXED, shared[1])
            line = " ".join(f"const {name} = memory.shared('{name}', [{m}, {n}]);" for name, m, n in pieces)
        else:
            line = re.sub(rf"= (.*) \? {INDEXED} : 0;", rf"= \2.read({number}, 1, \1 ? \3 : null);", line)
            line = re.sub(rf"{INDEXED} = (.*);", partial(store, number), line)
            line = re.sub(INDEXED, partial(load, number), line)
            for pattern, new in C_TO_JS:
                line = re.sub(pattern, new, line)
        lines.append(line)
    return f"(memory, threadIdx, blockIdx, {', '.join(arguments)}, {{ TILE }}) => {{" + "\n".join(lines)


def load(line: int, match: re.Match) -> str:
    return f"{match[1]}.read({line}, 1, {index(match)})"


def store(line: int, match: re.Match) -> str:
    return f"{match[1]}.write({line}, 1, {index(match)}, {match[4]});"


def index(match: re.Match) -> str:
    return f"[{match[2]}, {match[3]}]" if match[3] else match[2]
