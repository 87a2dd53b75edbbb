"""SIMD values in numba: sixteen numbers side by side in vector registers, as ordinary locals of a jitted function.

A `Lanes` value is one LLVM vector, which LLVM keeps in registers as wide as the CPU's: sixteen floats take one of 512
bits, two of 256 or four of 128. So one source serves every CPU. `+ - * / & | ^ << >>` work lane by lane; a plain number
stands for as many of it. Each lane rounds as the scalar operation does, save in `multiply_add`.

A value may hold more than sixteen numbers: LLVM then keeps it in several registers. That is how a kernel says how many
registers its sums take, and how one text serves a block of one row and a block of sixteen rows interleaved.
"""

import operator

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model
from numba.np.arrayobj import make_array

LANES = 16  # floats in a 64-byte cache line, bytes in a 128-bit register


class Lanes(types.Type):
    """Sixteen values, or another count, of one numba number type."""

    def __init__(self, element, count=LANES):
        self.element, self.count = element, count
        super().__init__(f"{count} lanes of {element}")


BYTES, FLOATS = Lanes(types.uint8), Lanes(types.float32)


@register_model(Lanes)
class LanesModel(PrimitiveModel):
    def __init__(self, models, lanes):
        super().__init__(models, lanes, ir.VectorType(models.lookup(lanes.element).get_value_type(), lanes.count))


def spread(context, builder, value, kind, lanes):
    """A number into all lanes; fewer lanes over and over; lanes as they are."""
    if kind == lanes:
        return value
    if isinstance(kind, Lanes):
        return join(builder, [value] * (lanes.count // kind.count))
    vector, index = context.get_value_type(lanes), ir.IntType(32)
    number = context.cast(builder, value, types.unliteral(kind), lanes.element)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, index(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(index, lanes.count), [0] * lanes.count))


def lane_operator(symbol, instruction):
    @infer_global(symbol)
    class LaneTyping(AbstractTemplate):
        def generic(self, args, kws):
            lanes = next((kind for kind in args if isinstance(kind, Lanes)), None)
            return lanes and lanes(*args)

    def code(context, builder, signature, args):
        lanes = signature.return_type
        pair = (spread(context, builder, *one, lanes) for one in zip(args, signature.args, strict=True))
        symbols = (operator.mul, operator.add, operator.sub, operator.truediv)
        floats = symbol in symbols and isinstance(lanes.element, types.Float)
        return getattr(builder, "f" * floats + instruction)(*pair)

    for kinds in (Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes):
        lower_builtin(symbol, *kinds)(code)


for symbol, instruction in [
    (operator.mul, "mul"),
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.truediv, "div"),
    (operator.and_, "and_"),
    (operator.or_, "or_"),
    (operator.xor, "xor"),
    (operator.lshift, "shl"),
    (operator.rshift, "lshr"),
]:
    lane_operator(symbol, instruction)


def address(context, builder, array_type, array, index, lanes):
    """A pointer to lanes at array[index]; index is an integer, or a tuple of one for each axis."""
    indices = cgutils.unpack_tuple(builder, index) if array_type.ndim > 1 else [index]
    struct = make_array(array_type)(context, builder, array)
    item = cgutils.get_item_pointer(context, builder, array_type, struct, indices)
    return builder.bitcast(item, context.get_value_type(lanes).as_pointer())


@intrinsic
def load_lanes(typing, array, index):
    """Sixteen neighbours from array[index] on along the last, contiguous axis; of a matrix load_lanes(w, (k, n))."""
    lanes = Lanes(array.dtype)

    def code(context, builder, signature, args):
        pointer = address(context, builder, signature.args[0], *args, lanes)
        return builder.load(pointer, align=lanes.element.bitwidth // 8)

    return lanes(array, index), code


@intrinsic
def store_lanes(typing, array, index, values):
    """values to the sixteen neighbours from array[index] on."""

    def code(context, builder, signature, args):
        pointer = address(context, builder, signature.args[0], *args[:2], values)
        builder.store(args[2], pointer, align=values.element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, values), code


@intrinsic
def load_halves(typing, array, index):
    """Sixteen neighbours from array[index] on, float16 by their bits, as float32."""
    halves = Lanes(array.dtype)

    def code(context, builder, signature, args):
        values = builder.load(address(context, builder, signature.args[0], *args, halves), align=2)
        return builder.fpext(builder.bitcast(values, ir.VectorType(HALF, LANES)), context.get_value_type(FLOATS))

    return FLOATS(array, index), code


@intrinsic
def store_halves(typing, array, index, values):
    """values, rounded to float16, to the sixteen neighbours from array[index] on."""
    halves = Lanes(array.dtype)

    def code(context, builder, signature, args):
        rounded = builder.fptrunc(args[2], ir.VectorType(HALF, LANES))
        pointer = address(context, builder, signature.args[0], *args[:2], halves)
        builder.store(builder.bitcast(rounded, context.get_value_type(halves)), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, values), code


def call(builder, name, result, *args):
    """One of LLVM's own functions, by name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def take(builder, values, lanes):
    """The lanes of these indices, in this order."""
    return builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def join(builder, parts):
    """Equal parts one after another; their number is a power of two."""
    while len(parts) > 1:
        index = ir.Constant(
            ir.VectorType(ir.IntType(32), 2 * parts[0].type.count), list(range(2 * parts[0].type.count))
        )
        parts = [builder.shuffle_vector(a, b, index) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def fold(builder, values, combine):
    """One number of all lanes: the halves combined, then the halves of that."""
    while values.type.count > 1:
        half = values.type.count // 2
        values = combine(take(builder, values, range(half)), take(builder, values, range(half, 2 * half)))
    return builder.extract_element(values, ir.IntType(32)(0))


@intrinsic
def multiply_add(typing, a, b, c):
    """a * b + c: one instruction and one rounding where the CPU has that, two of each where not."""
    lanes = c if isinstance(c, Lanes) else FLOATS

    def code(context, builder, signature, args):
        values = [spread(context, builder, v, kind, lanes) for v, kind in zip(args, signature.args, strict=True)]
        return call(builder, f"llvm.fmuladd.v{lanes.count}f32", values[2].type, *values)

    return lanes(a, b, lanes), code


@intrinsic
def total(typing, values):
    """The sum of all lanes, as pairs, then pairs of pairs."""

    def code(context, builder, signature, args):
        return fold(builder, args[0], builder.fadd)

    return types.float32(values), code


def lanewise(name, builder, values, *others):
    return call(builder, f"llvm.{name}.v{values.type.count}f32", values.type, values, *others)


@intrinsic
def larger(typing, a, b):
    """The larger of each pair of lanes; NaN if one is NaN."""

    def code(context, builder, signature, args):
        return lanewise("maximum", builder, *args)

    return a(a, b), code


@intrinsic
def highest(typing, values):
    """The largest of all lanes."""

    def code(context, builder, signature, args):
        return fold(builder, args[0], lambda a, b: lanewise("maximum", builder, a, b))

    return types.float32(values), code


@intrinsic
def between(typing, values, least, most):
    """values, none below the number `least` or above `most`; NaN stays."""

    def code(context, builder, signature, args):
        least, most = (spread(context, builder, args[i], signature.args[i], values) for i in (1, 2))
        return lanewise("minimum", builder, lanewise("maximum", builder, args[0], least), most)

    return values(values, least, most), code


@intrinsic
def zero_below(typing, values, x, least):
    """values, but 0 where x is below the number `least`."""

    def code(context, builder, signature, args):
        values, x, least = args
        below = builder.fcmp_ordered("<", x, spread(context, builder, least, signature.args[2], signature.args[1]))
        return builder.select(below, ir.Constant(values.type, None), values)

    return values(values, x, least), code


@intrinsic
def power_of_two(typing, n):
    """2^n for integers of -126 to 127, which is their place in a float's bits."""

    def code(context, builder, signature, args):
        kind = args[0].type
        bits = builder.add(args[0], ir.Constant(kind, [127] * kind.count))
        bits = builder.shl(bits, ir.Constant(kind, [23] * kind.count))
        return builder.bitcast(bits, context.get_value_type(signature.return_type))

    return Lanes(types.float32, n.count)(n), code


# Eight-bit integers. A quad, four neighbours of a row, is multiplied and summed into one lane of 32 bits.

QUAD = 4
ROWS = LANES  # rows interleaved in a packed matrix: one vector serves them all
INT8, INT16, INT32, INT64, FLOAT, HALF = *map(ir.IntType, (8, 16, 32, 64)), ir.FloatType(), ir.HalfType()


def cpu_features() -> set[str]:
    """What numba compiles for: this CPU's instruction sets, or those that NUMBA_CPU_FEATURES names instead."""
    named = config.CPU_FEATURES
    if named is None:
        return {name for name, has in get_host_cpu_features().items() if has}
    return {feature[1:] for feature in named.split(",") if feature.startswith("+")}


def dots_at_once(builder, sums, steps, most):
    """AVX-512 VNNI: one instruction multiplies and sums."""
    for pairs in steps():
        for i, (q, x) in enumerate(pairs):
            q, x = (builder.bitcast(v, sums[i].type) for v in (q, x))
            name = f"llvm.x86.avx512.vpdpbusd.{32 * q.type.count}"
            sums[i] = call(builder, name, q.type, sums[i], q, x)
    return sums


def dots_in_pairs(builder, sums, steps, most):
    """AVX2: products summed in pairs to 16 bits, as many such sums added there as fit, and pairs of those to 32."""
    if most <= 127:
        return pairs_of(builder, sums, steps, most)
    for shift in (0, 4):  # not even one pair fits: the lower four bits, then the upper
        half = lambda: ([(bits(builder, q, shift, 15), x) for q, x in pairs] for pairs in steps())  # noqa: B023,E731
        sums = pairs_of(builder, sums, half, 15, 1 << shift)
    return sums


def pairs_of(builder, sums, steps, most, unit=1):
    kind = ir.VectorType(INT16, 2 * sums[0].type.count)
    fit, units = (2**15 - 1) // (2 * 127 * most), ir.Constant(kind, [unit] * kind.count)

    def widened(small):
        wide = [call(builder, "llvm.x86.avx2.pmadd.wd", sums[0].type, v, units) for v in small]
        return [builder.add(*pair) for pair in zip(sums, wide, strict=True)]

    small = None
    for k, pairs in enumerate(steps()):
        products = [call(builder, "llvm.x86.avx2.pmadd.ub.sw", kind, *pair) for pair in pairs]
        small = [builder.add(*pair) for pair in zip(small, products, strict=True)] if small else products
        small = in_order(builder, small)
        if k % fit == fit - 1:
            sums, small = widened(small), None
    return widened(small) if small else sums


def in_order(builder, values):
    """values, computed before anything after this is loaded. No instruction.

    Else the compiler loads first what all steps need, more than there are registers.
    """
    kind = ir.LiteralStructType([v.type for v in values])
    ties = ",".join(["=x"] * len(values) + list(map(str, range(len(values)))) + ["~{memory}"])
    asm = ir.InlineAsm(ir.FunctionType(kind, [v.type for v in values]), "", ties, side_effect=True)
    found = builder.call(asm, values)
    return [builder.extract_value(found, i) for i in range(len(values))]


def dots_in_turn(builder, sums, steps, most):
    """Any CPU: the bytes of a quad one by one, as 32 bits."""
    for pairs in steps():
        for i, pair in enumerate(pairs):
            for byte in range(QUAD):
                q, x = (take(builder, v, range(byte, v.type.count, QUAD)) for v in pair)
                product = builder.mul(builder.zext(q, sums[i].type), builder.sext(x, sums[i].type))
                sums[i] = builder.add(sums[i], product)
    return sums


FEATURES = cpu_features()
# WIDEST: lanes that an instruction fills. TOKENS: as many as have sums of sixteen rows in eight registers: of 512 bits
# there are 24 more, for float sums too; of 256 bits eight more, and float sums wait on the stack.
if {"avx512vnni", "avx512vl"} <= FEATURES:
    DOTS, WIDEST, TOKENS = dots_at_once, 16, 8
elif "avx2" in FEATURES:
    DOTS, WIDEST, TOKENS = dots_in_pairs, 8, 4
else:
    DOTS, WIDEST, TOKENS = dots_in_turn, 16, 4
# Bytes to ask for before they are needed: what memory delivers in the time one line takes. Where registers are of 512
# bits, so few instructions lie between two lines that the CPU's own look ahead is far enough.
AHEAD = 0 if DOTS is dots_at_once else 3072


def bits(builder, values, shift, mask):
    kind = values.type
    shifted = builder.lshr(values, ir.Constant(kind, [shift] * kind.count))
    return builder.and_(shifted, ir.Constant(kind, [mask] * kind.count))


def registers(builder, values, width):
    """values in parts of so many lanes."""
    return [take(builder, values, range(at, at + width)) for at in range(0, values.type.count, width)]


@intrinsic(prefer_literal=True)
def dots(typing, total, q, x, most):
    """total + the sum of a quad of q times a quad of x in each lane, exactly.

    q is 0 to `most`, a constant and at most 255; x is -127 to 127.
    """

    def code(context, builder, signature, args):
        total, q, x, _ = args
        width = min(WIDEST, total.type.count)
        sums = registers(builder, total, width)
        pairs = list(zip(*(registers(builder, v, QUAD * width) for v in (q, x)), strict=True))
        return join(builder, DOTS(builder, sums, lambda: [pairs], most.literal_value))

    return total(total, q, x, most), code


def dots_with_tile(context, builder, total, weights, array_type, array, index, most):
    """total of sixteen rows and some tokens, plus weights(k), a quad of each row, times the quads array[*index + k]."""
    tokens, width = total.type.count // ROWS, min(WIDEST, ROWS)
    quads = tile_pointer(context, builder, array_type, array, index, INT32)

    def steps():
        for k, rows in enumerate(weights):
            parts, pairs = registers(builder, rows(), QUAD * width), []
            for i in range(tokens):
                quad = splat(builder, builder.load(builder.gep(quads, [INT32(tokens * k + i)]), align=1), width)
                pairs += [(part, builder.bitcast(quad, part.type)) for part in parts]
            yield pairs

    return join(builder, DOTS(builder, registers(builder, total, width), steps, most))


@intrinsic(prefer_literal=True)
def dots_of_tokens(typing, total, q, x, index, most):
    """total + the products of sixteen rows' q with the quads from x[*index] on, for each token that total is for."""

    def code(context, builder, signature, args):
        total, q, x, index, _ = args
        weights = [lambda v=v: v for v in registers(builder, q, QUAD * ROWS)]
        return dots_with_tile(context, builder, total, weights, signature.args[2], x, index, most.literal_value)

    return total(total, q, x, index, most), code


@intrinsic(prefer_literal=True)
def dots_of_panel(typing, total, q, k, count, x, index, most):
    """The same for `count` weights, a constant, from weight k on of q (K, 16), which lies as (K / 4, 16 rows, 4)."""

    def code(context, builder, signature, args):
        total, q, k, _, x, index, _ = args
        first = row_pointer(context, builder, signature.args[1], q, k, INT8, QUAD * ROWS)

        def load(quad):
            return builder.load(builder.gep(first, [INT32(quad)]), align=1)

        weights = [lambda quad=quad: load(quad) for quad in range(count.literal_value // QUAD)]
        return dots_with_tile(context, builder, total, weights, signature.args[4], x, index, most.literal_value)

    return total(total, q, k, count, x, index, most), code


def splat(builder, number, count):
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, count), ir.Undefined), number, INT32(0))
    return take(builder, one, [0] * count)


def tile_pointer(context, builder, array_type, array, index, element):
    """A pointer to the first token of a tile at array[*index], whose last axes hold one token after the other."""
    indices = cgutils.unpack_tuple(builder, index)
    index = cgutils.pack_array(builder, indices + [INT64(0)] * (array_type.ndim - len(indices)))
    return builder.bitcast(address(context, builder, array_type, array, index, BYTES), element.as_pointer())


@intrinsic
def of_tile(typing, like, array, index):
    """array[*index, i] in the i-th sixteen lanes, for as many tokens as `like` has lanes for."""
    lanes = Lanes(array.dtype, like.count)

    def code(context, builder, signature, args):
        like, array, index = args
        element = context.get_value_type(lanes.element)
        first = tile_pointer(context, builder, signature.args[1], array, index, element)
        values = [builder.load(builder.gep(first, [INT32(i)])) for i in range(like.type.count // ROWS)]
        return join(builder, [splat(builder, value, ROWS) for value in values])

    return lanes(like, array, index), code


@intrinsic
def no_sums(typing, like):
    """Integers 0 in as many lanes as `like` has."""

    def code(context, builder, signature, args):
        return context.get_constant_null(signature.return_type)

    return Lanes(types.int32, like.count)(like), code


@intrinsic
def sums_as_floats(typing, sums):
    """Signed integers as floats: exact up to 2^24."""

    def code(context, builder, signature, args):
        return builder.sitofp(args[0], context.get_value_type(signature.return_type))

    return Lanes(types.float32, sums.count)(sums), code


@intrinsic(prefer_literal=True)
def load_spread(typing, array, index, count):
    """`count` neighbours, a constant, from array[index] on, each in as many of sixteen lanes."""
    lanes = Lanes(array.dtype)

    def code(context, builder, signature, args):
        pointer = address(context, builder, signature.args[0], *args[:2], lanes)
        few = ir.VectorType(context.get_value_type(lanes.element), count.literal_value)
        values = builder.load(builder.bitcast(pointer, few.as_pointer()), align=4)
        return take(builder, values, [i * few.count // LANES for i in range(LANES)])

    return lanes(array, index, count), code


@intrinsic(prefer_literal=True)
def load_bytes(typing, array, index, count):
    """`count` neighbours, a constant, from array[index] on."""
    lanes = Lanes(array.dtype, count.literal_value)

    def code(context, builder, signature, args):
        return builder.load(address(context, builder, signature.args[0], *args[:2], lanes), align=1)

    return lanes(array, index, count), code


@intrinsic
def prefetch(typing, array, index):
    """Ask for the cache line of array[index], which may lie beyond the end, and do not wait.

    It comes into L2: a core waits for some twenty lines of L1 at a time, too few for what memory can deliver.
    """

    def code(context, builder, signature, args):
        pointer = address(context, builder, signature.args[0], *args, Lanes(types.uint8))
        pointer = builder.bitcast(pointer, INT8.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, INT32(0), INT32(2), INT32(1))  # to read, L2, data
        return context.get_dummy_value()

    return types.void(array, index), code


# A block of one row (an array of one axis), or of sixteen rows interleaved word by word (a second axis, of 16): what
# is read or written below then holds sixteen times as much, sixteen times as far on, and one text serves both.


def rows_of(array):
    return 1 if array.ndim == 1 else ROWS


def row_pointer(context, builder, array_type, array, at, element, count):
    """A pointer to `count` elements at byte, or number, `at` of the rows."""
    at = builder.mul(at, at.type(rows_of(array_type)))
    item = builder.gep(make_array(array_type)(context, builder, array).data, [at])
    return builder.bitcast(item, ir.VectorType(element, count).as_pointer())


@intrinsic(prefer_literal=True)
def row_bytes(typing, raw, at, count):
    """`count` bytes, a constant, of each row from `at` on; of sixteen rows, four bytes of each in turn."""
    lanes = Lanes(types.uint8, count.literal_value * rows_of(raw))

    def code(context, builder, signature, args):
        return builder.load(row_pointer(context, builder, signature.args[0], *args[:2], INT8, lanes.count), align=1)

    return lanes(raw, at, count), code


@intrinsic
def row_words(typing, raw, at):
    """The 32 bits from byte `at` of each row on."""
    lanes = Lanes(types.int32, rows_of(raw))

    def code(context, builder, signature, args):
        return builder.load(row_pointer(context, builder, signature.args[0], *args, INT32, lanes.count), align=1)

    return lanes(raw, at), code


@intrinsic
def row_halves(typing, raw, at):
    """The float16 at byte `at` of each row, as float32."""
    lanes = Lanes(types.float32, rows_of(raw))

    def code(context, builder, signature, args):
        pointer = row_pointer(context, builder, signature.args[0], *args, INT16, lanes.count)
        halves = builder.bitcast(builder.load(pointer, align=1), ir.VectorType(HALF, lanes.count))
        return builder.fpext(halves, context.get_value_type(lanes))

    return lanes(raw, at), code


@intrinsic
def row_store(typing, out, at, values):
    """values to out[at] and on, for each row."""

    def code(context, builder, signature, args):
        out, at, values = args
        pointer = row_pointer(context, builder, signature.args[0], out, at, values.type.element, values.type.count)
        builder.store(values, pointer, align=1)
        return context.get_dummy_value()

    return types.void(out, at, values), code


@intrinsic
def both(typing, first, second):
    """The values of one, then of the other."""

    def code(context, builder, signature, args):
        return join(builder, list(args))

    return Lanes(first.element, 2 * first.count)(first, second), code


@intrinsic
def row_bits(typing, words, first):
    """Sixteen bits of each row's word, from bit `first` on, as bytes 0 or 1 in the order of row_bytes."""

    def code(context, builder, signature, args):
        words, first = args
        kind = words.type

        def number(n):
            return ir.Constant(kind, [n] * kind.count)

        quads = []
        for bit in range(0, LANES, QUAD):
            shift = splat(builder, builder.add(builder.trunc(first, INT32), INT32(bit)), kind.count)
            four = builder.and_(builder.lshr(words, shift), number(15))
            # Times 2^0 + 2^7 + 2^14 + 2^21: bit i of the four is then bit 0 of byte i.
            quads.append(builder.and_(builder.mul(four, number(0x00204081)), number(0x01010101)))
        return builder.bitcast(join(builder, quads), ir.VectorType(INT8, LANES * kind.count))

    return Lanes(types.uint8, LANES * words.count)(words, types.int64), code


@intrinsic
def signed_byte(typing, words, i):
    """Byte i of each word, -128 to 127."""

    def code(context, builder, signature, args):
        words, i = args
        up = splat(builder, builder.trunc(builder.sub(i.type(24), builder.mul(i.type(8), i)), INT32), words.type.count)
        return builder.ashr(builder.shl(words, up), ir.Constant(words.type, [24] * words.type.count))

    return words(words, types.int64), code


# Activations as integers.


@intrinsic
def largest(typing, a, b):
    """The largest absolute value in a and b; NaN if one is NaN."""

    def code(context, builder, signature, args):
        kind = args[0].type
        a, b = (call(builder, f"llvm.fabs.v{kind.count}f32", kind, v) for v in args)
        larger = lambda a, b: call(builder, f"llvm.maximum.v{a.type.count}f32", a.type, a, b)  # noqa: E731
        return fold(builder, larger(a, b), larger)

    return types.float32(a, b), code


@intrinsic
def nearest(typing, values):
    """Floats of -127 to 127 rounded to integers, halves to even."""

    def code(context, builder, signature, args):
        rounded = call(builder, f"llvm.rint.v{args[0].type.count}f32", args[0].type, args[0])
        return builder.fptosi(rounded, context.get_value_type(signature.return_type))

    return Lanes(types.int32, values.count)(values), code


@intrinsic
def store_quads(typing, array, index, values):
    """Sixteen integers of -128 to 127 as bytes: four to array[*index], the next four where the second axis goes on."""

    def code(context, builder, signature, args):
        array, index, values = args
        first = tile_pointer(context, builder, signature.args[0], array, index, INT32)
        quads = builder.bitcast(builder.trunc(values, ir.VectorType(INT8, LANES)), ir.VectorType(INT32, LANES // QUAD))
        shape = make_array(signature.args[0])(context, builder, array).shape
        tokens = builder.extract_value(shape, 2)
        for i in range(LANES // QUAD):
            pointer = builder.gep(first, [builder.mul(tokens, tokens.type(i))])
            builder.store(builder.extract_element(quads, INT32(i)), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, index, values), code


@intrinsic
def sum_of(typing, values):
    """The sum of all integer lanes."""

    def code(context, builder, signature, args):
        return fold(builder, args[0], builder.add)

    return types.int32(values), code


@intrinsic(prefer_literal=True)
def zero_lanes(typing, tokens):
    """Floats 0 for sixteen rows and `tokens` tokens, a constant."""

    def code(context, builder, signature, args):
        return context.get_constant_null(signature.return_type)

    return Lanes(types.float32, ROWS * tokens.literal_value)(tokens), code


@intrinsic(prefer_literal=True)
def load_rows(typing, q, k, count):
    """`count` weights, a constant, of sixteen rows from weight k on. q (K, 16) lies as (K / 4, 16 rows, 4)."""
    lanes = Lanes(types.uint8, count.literal_value * ROWS)

    def code(context, builder, signature, args):
        return builder.load(row_pointer(context, builder, signature.args[0], *args[:2], INT8, lanes.count), align=1)

    return lanes(q, k, count), code


def row_address(context, builder, array_type, array, index, i, element):
    """A pointer to array[t + i, k], index (t, k)."""
    t, k = cgutils.unpack_tuple(builder, index)
    index = cgutils.pack_array(builder, [builder.add(t, t.type(i)), k])
    return builder.bitcast(address(context, builder, array_type, array, index, BYTES), element.as_pointer())


@intrinsic
def load_tokens(typing, like, array, index):
    """Sixteen neighbours from array[t + i, k] on for each token that `like` has lanes for; index is (t, k)."""

    def code(context, builder, signature, args):
        like, array, index = args
        kind = ir.VectorType(FLOAT, ROWS)
        rows = range(like.type.count // ROWS)
        pointers = [row_address(context, builder, signature.args[1], array, index, i, kind) for i in rows]
        return join(builder, [builder.load(pointer, align=4) for pointer in pointers])

    return like(like, array, index), code


@intrinsic
def store_tokens(typing, array, index, values):
    """Each token's sixteen lanes to array[t + i, k] and on; index is (t, k)."""

    def code(context, builder, signature, args):
        array, index, values = args
        kind = ir.VectorType(FLOAT, ROWS)
        for i in range(values.type.count // ROWS):
            pointer = row_address(context, builder, signature.args[0], array, index, i, kind)
            builder.store(take(builder, values, range(ROWS * i, ROWS * (i + 1))), pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, index, values), code


@intrinsic
def of_tokens(typing, like, array, index):
    """array[t + i, k] in the i-th sixteen lanes, for as many tokens as `like` has lanes for; index is (t, k)."""

    def code(context, builder, signature, args):
        like, array, index = args
        rows = range(like.type.count // ROWS)
        pointers = [row_address(context, builder, signature.args[1], array, index, i, FLOAT) for i in rows]
        return join(builder, [splat(builder, builder.load(pointer), ROWS) for pointer in pointers])

    return like(like, array, index), code
