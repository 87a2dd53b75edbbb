"""Several cores at one step: threads that wait for work, claim chunks of it, and sleep when there is none.

A job is a function by address, its arguments, and a number of units. It is cut into chunks; whoever is free claims the
next one by an atomic addition, the first thread, which asked, as well. The job is done when all chunks are, whether the
others came or not: a thread that the system has put aside delays nobody, unless it holds a chunk. Where the first
thread waits for that longer than PATIENCE_NS, and than four times a chunk of its own, it goes alone for a while: twice
as long as the last time if the help in between lasted for no more than WORTH times the delay, else half as long, from
LEAST_NS to MOST_NS.

Threads are Python's; within `work` they hold no lock of the interpreter. They spin for a short while, since a call into
the system takes longer than most jobs, then sleep in a lock of Python's, which compiled code can open as well.
"""

import ctypes
import os
import threading
import weakref

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from common.jit import njit
from common.step import call, now

SPIN_NS = 500_000  # a thread without work sleeps after this: longer than a token's text takes to print
PATIENCE_NS = 150_000  # for a chunk that another has claimed, or four times what one took here, if that is more
LEAST_NS = 5_000_000  # alone after a delay, at least
MOST_NS = 4_000_000_000  # and at most
WORTH = 16  # delays: help that lasted for less than so many times the delay that ended it was not worth it

# The board: rows of int64, each on two cache lines of its own, since what one thread writes others read.
TICKET, DONE, JOB, STATE, WORKERS = range(5)  # a worker's row is WORKERS + its number
WIDTH = 16
FUNCTION, ARGUMENTS, UNITS, CHUNK = range(4)  # of JOB
STOP, ALONE_UNTIL, BACK_OFF, DELAYS, DELAYED_NS = range(5)  # of STATE; the last two since the team began
PARKED, LOCK = range(2)  # of a worker's row
# A ticket is a job's number (only to be seen: nobody compares it), its count of chunks, and the next chunk.
COUNT, NUMBER = 16, 32  # their first bits; the next chunk's is 0
MASK = (1 << COUNT) - 1

INT32, INT64, POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


# ---- what compiled code has no words for -------------------------------------------------------------------------


def cell(context, builder, signature, args):
    """A pointer to board[row, column]."""
    board, row, column = args[:3]
    array = context.make_array(signature.args[0])(context, builder, board)
    return builder.gep(array.data, [builder.add(builder.mul(row, row.type(WIDTH)), column)])


@intrinsic
def load(typing, board, row, column):
    """What stands there now, and all that was written before it was."""

    def code(context, builder, signature, args):
        return builder.load_atomic(cell(context, builder, signature, args), "acquire", 8)

    return types.int64(board, types.int64, types.int64), code


def atomic(operation):
    @intrinsic
    def change(typing, board, row, column, value):
        def code(context, builder, signature, args):
            return builder.atomic_rmw(operation, cell(context, builder, signature, args), args[3], "seq_cst")

        return types.int64(board, types.int64, types.int64, types.int64), code

    return change


add, exchange = atomic("add"), atomic("xchg")  # -> what stood there before


@intrinsic
def pause(typing):
    """Let the core know that this is a loop that waits."""

    def code(context, builder, signature, args):
        if PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, PAUSE), [])
        return context.get_dummy_value()

    return types.void(), code


PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(os.uname().machine)


def python_lock(name, *more):
    """A function on a lock of Python's, which needs no interpreter."""

    @intrinsic
    def function(typing, lock):
        def code(context, builder, signature, args):
            kind = ir.FunctionType(INT32 if more else ir.VoidType(), [POINTER, *(n.type for n in more)])
            body = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(body, [builder.inttoptr(args[0], POINTER), *more])
            return context.get_dummy_value()

        return types.void(types.int64), code

    return function


acquire = python_lock("PyThread_acquire_lock", INT32(1))  # and wait for it
release = python_lock("PyThread_release_lock")


# ---- the two sides ------------------------------------------------------------------------------------------------


@njit
def share(board, function, arguments, units, least, each):
    """function(arguments, first, last) over all units; returns when all is done.

    It is cut into `each` chunks a thread, or fewer, so that none has fewer units than `least`.
    """
    workers = len(board) - WORKERS
    began = now() if workers else 0
    if workers == 0 or units <= least or began < board[STATE, ALONE_UNTIL]:
        call(function, arguments, 0, units)
        return
    chunks = each * (workers + 1)
    chunk = max(least, (units + chunks - 1) // chunks, units // MASK + 1)  # the last: count must fit its bits
    count = (units + chunk - 1) // chunk
    board[JOB, FUNCTION], board[JOB, ARGUMENTS], board[JOB, UNITS], board[JOB, CHUNK] = (
        function,
        arguments,
        units,
        chunk,
    )
    board[DONE, 0] = 0
    exchange(board, TICKET, 0, ((load(board, TICKET, 0) >> NUMBER) + 1) << NUMBER | count << COUNT)
    for i in range(WORKERS, len(board)):
        if load(board, i, PARKED):
            wake(board, i)
    mine = 0
    while True:
        i = add(board, TICKET, 0, 1) & MASK
        if i >= count:
            break
        call(function, arguments, i * chunk, min(units, (i + 1) * chunk))
        mine += 1
    wait(board, count - mine, began, mine)


@njit
def wait(board, others, began, mine):
    """Until the chunks that others have claimed are done."""
    if load(board, DONE, 0) == others:
        return
    ended = now()
    patience, late = max(PATIENCE_NS, 4 * (ended - began) // max(mine, 1)), False
    while load(board, DONE, 0) != others:
        pause()
        late = late or now() - ended > patience
    if late:
        go_alone(board, ended, now())


@njit
def go_alone(board, delay_began, delay_ended):
    """For a while that the help before the delay decides."""
    board[STATE, DELAYS] += 1
    board[STATE, DELAYED_NS] += delay_ended - delay_began
    worth = delay_began - board[STATE, ALONE_UNTIL] > WORTH * (delay_ended - delay_began)
    back_off = board[STATE, BACK_OFF] // 2 if worth else 2 * board[STATE, BACK_OFF]
    board[STATE, BACK_OFF] = max(LEAST_NS, min(back_off, MOST_NS))
    board[STATE, ALONE_UNTIL] = delay_ended + board[STATE, BACK_OFF]


@njit
def wake(board, i):
    if exchange(board, i, PARKED, 0):
        release(board[i, LOCK])


@njit(nogil=True)
def work(board, i):
    """What thread i does until it is told to stop."""
    since = now()
    while load(board, STATE, STOP) == 0:
        ticket = load(board, TICKET, 0)
        if ticket & MASK < ticket >> COUNT & MASK:
            ticket = add(board, TICKET, 0, 1)  # whatever job this is by now
            chunk, count = ticket & MASK, ticket >> COUNT & MASK
            if chunk < count:  # so the job cannot end, nor another begin, before this chunk is done
                first, size = chunk * board[JOB, CHUNK], board[JOB, CHUNK]
                call(board[JOB, FUNCTION], board[JOB, ARGUMENTS], first, min(board[JOB, UNITS], first + size))
                add(board, DONE, 0, 1)
            since = now()
        elif now() - since < SPIN_NS:
            for _ in range(16):
                pause()
        else:
            exchange(board, i, PARKED, 1)  # a job just published may be missed: nobody waits, and the next one wakes
            if load(board, STATE, STOP) == 0:  # told to stop since, nobody would open the lock
                acquire(board[i, LOCK])
            since = now()


@njit
def stop(board):
    exchange(board, STATE, STOP, 1)
    for i in range(WORKERS, len(board)):
        wake(board, i)


# ---- from Python --------------------------------------------------------------------------------------------------


class Team:
    """The first thread, which calls, and as many more as there are cores for; they end with this object or the process.

    board is what compiled code takes, from one caller at a time. `with team:` keeps the first thread on the first core.
    """

    def __init__(self, threads: int, cores: list[int] | None = None):
        self.cores = (granted() if cores is None else cores)[: max(1, min(threads, most()))]
        size = (WORKERS + len(self.cores) - 1) * WIDTH
        memory = np.zeros(size + WIDTH, np.int64)
        first = -memory.ctypes.data // 8 % WIDTH
        self.board = memory[first : first + size].reshape(-1, WIDTH)
        if len(self.cores) > 1:
            work.compile((numba.typeof(self.board), types.int64))  # by one thread, not by all at once
        self.threads = [
            threading.Thread(target=follow, args=(self.board, WORKERS + i, core), daemon=True)
            for i, core in enumerate(self.cores[1:])
        ]
        for i, thread in enumerate(self.threads):
            self.board[WORKERS + i, LOCK] = new_lock()
            thread.start()
        weakref.finalize(self, stop, self.board)

    def __enter__(self):
        self.before = granted() if self.threads else None
        if self.threads:
            confine(self.cores[:1])
        return self

    def __exit__(self, *_):
        if self.threads:
            confine(self.before)


def follow(board, i, core):
    confine([core])
    work(board, i)


def granted() -> list[int]:
    """The cores that this thread may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def most() -> int:
    """Threads that the control group lets run at once."""
    from common.machine import cgroup_quota

    return int(cgroup_quota() or 1 << 30)


def confine(cores) -> None:
    """Keep this thread to these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def new_lock() -> int:
    """The address of a lock of Python's, closed."""
    api = ctypes.pythonapi
    api.PyThread_allocate_lock.restype = ctypes.c_void_p
    lock = api.PyThread_allocate_lock()
    api.PyThread_acquire_lock(ctypes.c_void_p(lock), 1)
    return lock
