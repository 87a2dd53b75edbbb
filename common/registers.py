"""A tile of sums in vector registers: an array of Lanes that LLVM never leaves in memory."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from common.intrinsics import FLOATS


@intrinsic(prefer_literal=True)
def registers(typing, count):
    """`count` (a constant) values of sixteen floats, read and written by index, and zero at the call.

    LLVM keeps them in registers where every index is a constant once loops are unrolled; else they lie on the stack.
    """

    def code(context, builder, signature, args):
        vector, count = context.get_value_type(FLOATS), signature.args[0].literal_value
        place = cgutils.alloca_once(builder, vector, size=count)
        zeros = ir.Constant(ir.ArrayType(vector, count), None)
        builder.store(zeros, builder.bitcast(place, zeros.type.as_pointer()))
        return place

    return types.CPointer(FLOATS)(count), code
