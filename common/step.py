"""What a forward pass that is compiled as a whole is given, and how it reaches what is compiled apart.

A compiled function can hold no list of things of different types, such as matrices in blocks of different types: here
each is a row of numbers, its bytes and the code for its type among them, by address. That code is compiled once for
each type that a model has; numba would otherwise compile it again into every function that calls it.
"""

import time
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from common.int8 import STEP, Rounded, packed_bytes
from common.intrinsics import ROWS
from common.jit import CACHE, njit
from common.model import Layer

INT32, INT64, POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


class Matrix(NamedTuple):
    """N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block
    size: int  # bytes a block
    raw: int  # the address of the bytes
    alone: int  # of the code for one token
    together: int  # of the code for several


class Bytes(NamedTuple):
    """A matrix with its bytes as an array, as Blocks or Packed of the stages."""

    N: int
    K: int
    kind: int
    length: int
    size: int
    raw: Any


class Input(NamedTuple):
    """Activations as a matmul takes them, whatever the type of its matrix."""

    floats: Any  # (T, K) float32
    integers: Any  # Rounded


class Given(NamedTuple):
    """A model as the step takes it."""

    embedding: Matrix
    matrices: Any  # (L, 7, 8) int64: each layer's, in the order of Layer
    output: Matrix
    norms: Any  # (L, 2, D)
    output_norm: Any  # (D,)
    cache: Any  # (L, 2, context, G, hd) float32; half_cache's is uint16, and its step lays keys out otherwise
    freqs: Any  # (hd / 2,) float64
    eps: float
    clock: Any  # (phases + 1, 2) int64: nanoseconds and calls of each, and in the last row when the last one ended
    board: Any = None  # of the team that shares the work (common/team.py), where there is one
    parts: Any = None  # (n,) int64: the addresses of what it shares beside matrices


class Model(NamedTuple):
    """As common.stage.Model, and what the step is given; config, weights and cache keep alive what it points to."""

    config: Any
    weights: Any
    cache: Any
    given: Given
    team: Any = None


def given(config, weights, cache, described, phases):
    """Given, each matrix by described(w) -> Matrix."""
    return Given(
        described(weights.token_embd),
        np.array([[described(w) for w in layer if hasattr(w, "raw")] for layer in weights.layers]),
        described(weights.output),
        np.array([[layer.attn_norm, layer.ffn_norm] for layer in weights.layers]),
        weights.output_norm,
        cache,
        config.rope_freqs,
        config.eps,
        np.zeros((len(phases) + 1, 2), np.int64),
    )


# Arguments by example, since only their types count: TIMES of the code that a Matrix names, then of the other parts.
ONE = np.zeros((1, STEP), np.float32)
EIGHTH = Rounded(np.zeros((1, 8, 1, 4), np.int8), *(np.zeros((1, 1, 1), kind) for kind in ("f4", "i4", "f4")))
TIMES = Input(ONE, EIGHTH), Matrix(*range(len(Matrix._fields))), ONE  # activations, matrix, out (T, N)
HEADS, ROW = np.zeros((1, 1, 2), np.float32), np.zeros(1, np.float32)  # (T, heads, hd), a norm's (D,)
HALVES = np.zeros((1, 1, 2, 16), np.uint16), np.zeros((1, 16, 16), np.uint16)  # keys, values
JOINED = np.zeros((1, 1, 4, 16), np.float32), np.zeros((1, 1, 4, 2), np.float32)  # sums, found
PROJECT, GATE, LOOK, NORMED, ROUNDED, TURNED = range(6)  # places in Given.parts


@njit
def matrix(row):  # (8,) -> Matrix
    return Matrix(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])


@njit
def layer_of(m, l):
    """Layer l of what a step is given."""
    q, k, v, o, gate, up, down = m.matrices[l]
    return Layer(
        *(m.norms[l, 0], matrix(q), matrix(k), matrix(v), matrix(o)),
        *(m.norms[l, 1], matrix(gate), matrix(up), matrix(down)),
    )


@njit
def blocks_of(w):
    """A matrix in the file's order."""
    return Bytes(w.N, w.K, w.kind, w.length, w.size, bytes_at(w.raw, w.N * (w.K // w.length) * w.size))


@njit
def strips_in(w):
    """A packed matrix."""
    rows = packed_bytes(w.N, w.K, w.length, w.size) // ROWS
    return Bytes(w.N, w.K, w.kind, w.length, w.size, bytes_at(w.raw, (rows, ROWS)))


# ---- functions by address ---------------------------------------------------------------------------------------


def entry(arguments):
    """Decorator: body(pointer to a tuple like `arguments`, first, last), compiled at once; its address is .address."""
    signature = types.void(types.CPointer(numba.typeof(arguments)), types.int64, types.int64)
    return numba.cfunc(signature, cache=CACHE is not None, error_model="numpy")


@intrinsic
def kept(typing, arguments):
    """The address of a copy of a tuple, good until the function that asked returns.

    It takes no reference to the arrays in it: use each again after the call, or numba may free it before.
    The tuple's type must be exactly that of `entry`, which nobody checks.
    """

    def code(context, builder, signature, args):
        slot = cgutils.alloca_once(builder, context.get_data_type(signature.args[0]))
        context.pack_value(builder, signature.args[0], args[0], slot)
        return builder.ptrtoint(slot, INT64)

    return types.int64(arguments), code


@intrinsic
def call(typing, address, arguments, first, last):
    """What `entry` compiled, with arguments by their address."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64])
        body = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(body, [builder.inttoptr(args[1], POINTER), *args[2:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic
def byte_pointer(typing, address):
    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], POINTER)

    return types.CPointer(types.uint8)(types.int64), code


@njit
def bytes_at(address, shape):
    """The array of uint8 at an address."""
    return carray(byte_pointer(address), shape)


# ---- the step's own clock ---------------------------------------------------------------------------------------

EMBED, NORM, MATMUL, ROPE, ATTENTION, SILU = range(6)  # what takes its time, in the order of the stages' PHASES


@intrinsic
def now(typing):
    """Nanoseconds, of the clock of time.perf_counter."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(INT32, [INT32, INT64.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        slot = cgutils.alloca_once(builder, INT64, 2)
        builder.call(clock, [INT32(time.CLOCK_MONOTONIC), slot])
        s, ns = (builder.load(builder.gep(slot, [INT32(i)])) for i in range(2))
        return builder.add(builder.mul(s, INT64(10**9)), ns)

    return types.int64(), code


@njit
def begin_laps(clock):
    clock[-1, 0] = now()


@njit
def lap(clock, phase):
    """What has passed since the last lap is this phase's."""
    at = now()
    clock[phase, 0] += at - clock[-1, 0]
    clock[phase, 1] += 1
    clock[-1, 0] = at
