"""SIMD values in numba: sixteen numbers side by side in vector registers, as ordinary locals of a jitted function.

A `Lanes` value is one LLVM vector, which LLVM keeps in registers as wide as the CPU's: sixteen floats take one of 512
bits, two of 256 or four of 128. So one source serves every CPU. `+ - * & | << >>` work lane by lane; a plain number
stands for sixteen of it. Each lane rounds as the scalar operation does, save in `multiply_add`.
"""

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model
from numba.np.arrayobj import make_array

LANES = 16  # floats in a 64-byte cache line, bytes in a 128-bit register


class Lanes(types.Type):
    """Sixteen values of one numba number type."""

    def __init__(self, element):
        self.element = element
        super().__init__(f"{LANES} lanes of {element}")


BYTES, FLOATS = Lanes(types.uint8), Lanes(types.float32)


@register_model(Lanes)
class LanesModel(PrimitiveModel):
    def __init__(self, models, lanes):
        super().__init__(models, lanes, ir.VectorType(models.lookup(lanes.element).get_value_type(), LANES))


def spread(context, builder, value, kind, lanes):
    """A number into all lanes; lanes as they are."""
    if kind == lanes:
        return value
    vector, index = context.get_value_type(lanes), ir.IntType(32)
    number = context.cast(builder, value, types.unliteral(kind), lanes.element)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, index(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))


def lane_operator(symbol, instruction):
    @infer_global(symbol)
    class LaneTyping(AbstractTemplate):
        def generic(self, args, kws):
            lanes = next((kind for kind in args if isinstance(kind, Lanes)), None)
            return lanes and lanes(*args)

    def code(context, builder, signature, args):
        pair = zip(args, signature.args, strict=True)
        return getattr(builder, instruction)(*(spread(context, builder, *one, signature.return_type) for one in pair))

    for kinds in (Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes):
        lower_builtin(symbol, *kinds)(code)


for symbol, instruction in [
    (operator.mul, "fmul"),
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.and_, "and_"),
    (operator.or_, "or_"),
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
    """Sixteen neighbours from array[index] on, along the last axis (which must be contiguous)."""
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
def multiply_add(typing, a, b, c):
    """a * b + c: one instruction and one rounding where the CPU has that, two of each where not."""

    def code(context, builder, signature, args):
        values = [spread(context, builder, v, kind, FLOATS) for v, kind in zip(args, signature.args, strict=True)]
        kind = ir.FunctionType(values[2].type, [values[2].type] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    return FLOATS(a, b, FLOATS), code


@intrinsic
def total(typing, values):
    """The sum of all sixteen lanes, as pairs, then pairs of pairs."""

    def code(context, builder, signature, args):
        (values,), index = args, ir.IntType(32)
        for width in (8, 4, 2, 1):
            halves = [ir.Constant(ir.VectorType(index, width), list(range(at, at + width))) for at in (0, width)]
            values = builder.fadd(*(builder.shuffle_vector(values, values, half) for half in halves))
        return builder.extract_element(values, index(0))

    return types.float32(values), code
