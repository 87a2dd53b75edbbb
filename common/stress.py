"""Which resource a matmul waits for: a variant of its own source that uses one resource twice and the other as before.

compute  every multiply-add is done twice, the second time on the registers that hold the weight already; a block is
         unpacked twice, from the cache line just read. No byte more comes from beyond the first-level cache.
bytes    every weight is loaded from a second array of the same size as well, and the value dropped. No arithmetic more.

Both give the very result of the plain kernel, and that is checked. The recipe finds a sum in a local name, built by
`total += x * w` or `total = multiply_add(x, w, total)` in the innermost loop, so it serves a kernel of that form alone.
"""

import ast
import copy
import difflib
import inspect
import textwrap
import time

import numpy as np
from llvmlite.ir import instructions
from numba import njit
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from common.intrinsics import BYTES, LANES, Lanes, address
from common.stage import StageError
from common.stats import verdict

ROUNDS = 7
REPLAY_S = 0.5  # of plain calls in a round; the first ones of a pass until this is spent
REPLAY_BYTES = 1 << 30  # of weights in a round: the second array takes as much again


class VolatileLoad(instructions.LoadInstr):
    """A load that the compiler may not drop, though nobody uses the value."""

    def descr(self, buf):
        text: list[str] = []
        super().descr(text)
        buf.append("".join(text).replace("load ", "load volatile ", 1))


def load_and_drop(builder, pointer, align: int) -> None:
    load = VolatileLoad(builder.block, pointer)
    load.align = align
    builder._insert(load)


@intrinsic
def touch(typing, array, index):
    """Load array[index] and drop it."""

    def code(context, builder, signature, args):
        kind, (array, index) = signature.args[0], args
        indices = cgutils.unpack_tuple(builder, index) if kind.ndim > 1 else [index]
        pointer = cgutils.get_item_pointer(context, builder, kind, make_array(kind)(context, builder, array), indices)
        load_and_drop(builder, pointer, kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return numba_types.void(array, index), code


@intrinsic
def touch_lanes(typing, array, index):
    """Load sixteen neighbours from array[index] on and drop them."""

    def code(context, builder, signature, args):
        lanes = Lanes(signature.args[0].dtype)
        load_and_drop(builder, address(context, builder, signature.args[0], *args, lanes), lanes.element.bitwidth // 8)
        return context.get_dummy_value()

    return numba_types.void(array, index), code


@intrinsic
def touch_address(typing, at):
    """Load the sixteen bytes at an address and drop them."""

    def code(context, builder, signature, args):
        load_and_drop(builder, builder.inttoptr(args[0], context.get_value_type(BYTES).as_pointer()), 1)
        return context.get_dummy_value()

    return numba_types.void(at), code


@njit
def touch_block(start, at, size):
    """Load `size` bytes, at least sixteen, from address start + at on and drop them, sixteen at a time."""
    for i in range(start + at, start + at + size - LANES + 1, LANES):
        touch_address(i)
    if size % LANES:
        touch_address(start + at + size - LANES)


# ---- the variants ----------------------------------------------------------------------------------------------

SUFFIX = "_again"
EXTRA = ("weights_again", "zero", "nothing")  # a second array like the weights, 0.0 and 0: the compiler knows neither


def variant(function, kind: str | None) -> str:
    """The source of `function` under a stress ('compute', 'bytes', None for none), with EXTRA as further arguments.

    Raises StageError for a kernel without a sum that the recipe knows.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    tree.decorator_list = []
    tree.args.args += [ast.arg(name) for name in EXTRA]
    weight = tree.args.args[1].arg
    sums = edit(tree, kind, weight)
    if "touch_block" in ast.unparse(tree):  # an address: numba would count references to an array at each block
        tree.body.insert(0, parsed(f"start{SUFFIX}, size{SUFFIX} = ({EXTRA[0]}.raw.ctypes.data, {EXTRA[0]}.size)"))
    if not sums:
        raise StageError(
            f"--stress has no recipe for this {function.__name__}: it knows sums built by `total += x * w` or "
            "`total = multiply_add(x, w, total)` in a local name"
        )
    return ast.unparse(ast.fix_missing_locations(tree))


def edit(tree: ast.FunctionDef, kind: str | None, weight: str) -> int:
    """Apply a stress to every sum and every unpacking of a function; the number of sums found."""
    found = 0
    for body in bodies(tree):
        for statement in list(body):
            total = sum_in(statement)
            if total and any(assigns(s, total[0]) for s in body[: body.index(statement)]):
                found += 1
                stress_sum(body, statement, *total, kind, weight)
            elif kind and is_call(statement, "unpack"):
                stress_unpack(body, statement, kind)
            elif kind == "compute" and (name := scratch(statement, tree)):
                at = body.index(statement) + 1
                body.insert(at, parsed(f"{name}{SUFFIX} = np.empty_like({name})"))
    return found


def bodies(tree):
    """Every list of statements, outermost first."""
    found = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    return found + [node.orelse for node in ast.walk(tree) if isinstance(getattr(node, "orelse", None), list)]


def parsed(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def sum_in(statement) -> tuple[str, ast.AST, ast.expr, ast.expr] | None:
    """(name, the multiply-add, x, w) of a loop whose body adds products to a local name."""
    if not isinstance(statement, ast.For):
        return None
    for inner in statement.body:
        if (
            isinstance(inner, ast.AugAssign)
            and isinstance(inner.target, ast.Name)
            and isinstance(inner.op, ast.Add)
            and isinstance(inner.value, ast.BinOp)
            and isinstance(inner.value.op, ast.Mult)
        ):
            return inner.target.id, inner, inner.value.left, inner.value.right
        if (
            isinstance(inner, ast.Assign)
            and isinstance(inner.targets[0], ast.Name)
            and isinstance(inner.value, ast.Call)
            and ast.unparse(inner.value.func) == "multiply_add"
            and ast.unparse(inner.value.args[2]) == inner.targets[0].id
        ):
            return inner.targets[0].id, inner, *inner.value.args[:2]
    return None


def assigns(statement, name: str) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name


def is_call(statement, name: str) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) == name
    )


def scratch(statement, tree) -> str | None:
    """The name that a statement allocates, where a block is unpacked into it."""
    into = {ast.unparse(node.args[-1]) for node in ast.walk(tree) if is_call(ast.Expr(node), "unpack")}
    return next((name for name in into if assigns(statement, name)), None)


def stress_sum(body: list, loop: ast.For, name: str, step, x: ast.expr, w: ast.expr, kind: str | None, weight: str):
    """A second sum beside the first, or a second load beside the weight's."""
    at, again, own = loop.body.index(step) + 1, name + SUFFIX, root(w) == weight
    if kind == "compute":
        # Another product, or the compiler would see that both sums are one.
        first, second = (w, w) if own else (x, renamed(w, {root(w): root(w) + SUFFIX}))
        if isinstance(step, ast.AugAssign):
            text = f"{again} += {ast.unparse(first)} * {ast.unparse(second)}"
        else:
            text = f"{again} = multiply_add({ast.unparse(first)}, {ast.unparse(second)}, {again})"
        loop.body.insert(at, parsed(text))
        place = body.index(loop)
        body.insert(place + 1, parsed(f"{name} = {name} + {again} * zero"))
        body.insert(place, parsed(f"{again} = {name} * zero"))
    elif kind == "bytes" and own:
        index = w.slice if isinstance(w, ast.Subscript) else w.args[1]
        name = "touch" if isinstance(w, ast.Subscript) else "touch_lanes"
        loop.body.insert(at, parsed(f"{name}({EXTRA[0]}, {ast.unparse(index)})"))


def root(expression: ast.expr) -> str:
    """The name of the array that w[k, n] or load_lanes(w, (k, n)) reads."""
    if isinstance(expression, ast.Call) and expression.args:
        expression = expression.args[0]
    while isinstance(expression, ast.Subscript | ast.Attribute):
        expression = expression.value
    return ast.unparse(expression)


def renamed(expression: ast.expr, names: dict[str, str]) -> ast.expr:
    made = copy.deepcopy(expression)
    for node in ast.walk(made):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return made


def stress_unpack(body: list, statement, kind: str) -> None:
    """Unpack a block a second time, or load its bytes from a second array."""
    form, raw, at, out = map(ast.unparse, statement.value.args)
    if kind == "compute":
        text = f"unpack({form}, {raw}, {at} + nothing, {out}{SUFFIX})"
    else:
        text = f"touch_block(start{SUFFIX}, {at}, size{SUFFIX})"
    body.insert(body.index(statement) + 1, parsed(text))


def compiled(function, source: str):
    """The variant as a kernel, with the names that the stage's own file gives it."""
    space = {**function.__globals__, "touch": touch, "touch_lanes": touch_lanes, "touch_block": touch_block}
    exec(compile(source, f"<{function.__name__} under stress>", "exec"), space)
    return njit(error_model="numpy")(space[function.__name__])


# ---- measuring -------------------------------------------------------------------------------------------------


def stress_run(function, passes: dict[str, list[tuple]], kinds: tuple[str, ...]) -> dict:
    """Replay calls (x, w) of each pass with the plain kernel and each variant, in turns.

    -> {changed: {kind: [lines]}, passes: [{pass, tokens, calls, of, weight_mb, plain_ms, stressed: {kind: {ms, cost,
    low, high, costs}}}]}; cost is the time added, as a share of the plain kernel's. Beside bytes stands `loads`, its
    control: the same code aimed at the weights themselves, so that every load is there, but nothing is fetched for it.
    Raises StageError.
    """
    sources = {kind: variant(function, kind) for kind in (None, *kinds)}
    kernels = {kind: compiled(function, source) for kind, source in sources.items()}
    return {
        "changed": {kind: changed(sources[None], sources[kind]) for kind in kinds},
        "passes": [one_pass(name, calls, kernels) for name, calls in passes.items()],
    }


def changed(plain: str, stressed: str) -> list[str]:
    """The lines that a variant adds or removes, each with its mark and indent."""
    lines = difflib.unified_diff(plain.splitlines(), stressed.splitlines(), lineterm="", n=0)
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def one_pass(name: str, calls: list[tuple], kernels: dict) -> dict:
    """Time one pass's calls under each kernel."""
    runs = {kind or "plain": (kernel, kind == "bytes") for kind, kernel in kernels.items()}
    if "bytes" in runs:
        runs["loads"] = (kernels["bytes"], False)
    kept, second, spent, size = [], {}, 0.0, 0
    for x, w in calls:
        if kept and (spent > REPLAY_S or size > REPLAY_BYTES):
            break
        if id(w) not in second:
            second[id(w)] = copied(w)
            size += weight_bytes(w)
        kept.append((x, w, second[id(w)]))
        want = call(runs["plain"], kept[-1])  # compiles, the first time
        for kind, run in runs.items():
            if not np.array_equal(call(run, kept[-1]), want):
                raise StageError(f"the {kind} variant does not give the plain kernel's result: no time of it is shown")
        started = time.perf_counter()
        call(runs["plain"], kept[-1])
        spent += time.perf_counter() - started
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(ROUNDS):
        for kind in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            for one in kept:
                call(runs[kind], one)
            times[kind].append((time.perf_counter() - started) * 1e3)
    return {
        "pass": name,
        "tokens": len(kept[0][0]),
        "calls": len(kept),
        "of": len(calls),
        "weight_mb": size / 1e6,
        "plain_ms": float(np.median(times["plain"])),
        "stressed": {kind: cost(times["plain"], times[kind]) for kind in runs if kind != "plain"},
    }


def call(run: tuple, one: tuple):
    kernel, apart = run
    x, w, second = one
    return kernel(x, w, second if apart else w, np.float32(0), 0)


def cost(plain: list[float], stressed: list[float]) -> dict:
    """What a stress adds, as a share of the plain time, with its 99 % interval; costs: beyond doubt."""
    judged = verdict(stressed, plain)  # its ratio is stressed over plain
    low, high = (None if v is None else v - 1 for v in (judged.low, judged.high))
    sure = judged.verdict == "faster"  # the plain one is
    return {"ms": float(np.median(stressed)), "cost": judged.ratio - 1, "low": low, "high": high, "costs": sure}


def weight_bytes(w) -> int:
    return w.nbytes if hasattr(w, "nbytes") else w.raw.nbytes


def copied(w):
    """The same bytes elsewhere, of the same numba type."""
    if not hasattr(w, "nbytes"):
        return w._replace(raw=copied(w.raw))
    made = w.copy()
    made.flags.writeable = w.flags.writeable
    return made
