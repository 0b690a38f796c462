# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The CPU kernel as Python calls it. kernels/native.h describes what the numbers mean."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from functools import cache
from time import perf_counter

import torch

from dilkit.decoding._checked cimport (
    FIRST_HEAD, HEAD_STEP, HEADS, KEY, KEY_ROW, PAGE, PAGE_FIRST, PAGE_ROWS, PAGE_STEP, PAGES, POSITION, POSITION_STEP, POSITIONS,
    QUERY_POSITION, ROW, ROWS, SEEN, TO_KEY, TO_VALUE, UNSEEN, VALUE, VALUE_ROW, Checked, checked
)
from dilkit.op._facts cimport Facts, locate

from dilkit.op.boundary import empty_outputs

cdef enum:
    CPU = 1  # as DLPack numbers devices
    BYTES_PER_THREAD = 1 << 19  # of stored rows, for which one more thread is worth its start
    ROUNDS = 2  # of the products of a tile, in each of the samples of their speed
    SAMPLES = 8
    MOST_PARTS = 1 << 23  # numbers of the gradient of a bias in parts; beyond, tasks add to one part, one after the other

cdef object zeros_like = torch.zeros_like, empty_like = torch.empty_like, empty = torch.empty
cdef object contiguous_format = torch.contiguous_format
cdef object float64 = torch.float64, float32 = torch.float32
DTYPES = "float64", "float32", "bfloat16", "float16", "int8"  # by their numbers in native.h and step.h
cdef int64_t[5] BYTES = [8, 4, 2, 2, 1]
LEAST_GAIN = 1.25
"""Least rate of products of bf16 pairs over those of floats for which they are used: 0.5, nearly 2 or 8 on CPUs measured so far."""

include "headers.pxi"

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef extern from *:
    """
    static const InstructionSet *const native_codes[] = {
    #ifdef HAVE_AMX
        &native_amx,
    #endif
    #ifdef HAVE_AVX512BF16
        &native_avx512bf16,
    #endif
    #ifdef HAVE_AVX512
        &native_avx512,
    #endif
    #ifdef HAVE_AVX2
        &native_avx2,
    #endif
        &native_generic,
    };
    enum { NATIVE_CODES = sizeof native_codes / sizeof *native_codes };
    """
    const InstructionSet *const native_codes[]
    int NATIVE_CODES


@cache
def instruction_sets():
    """The instruction sets that this machine can run, the fastest first: those for bf16 are last where they are slow."""
    here = [i for i in range(NATIVE_CODES) if native_codes[i].runs_here()]
    return tuple(native_codes[i].name.decode() for i in sorted(here, key=is_slow))


def is_slow(int i):
    """True if products of bf16 pairs are hardly faster here than those in whose place they are, or slower; takes microseconds."""
    cdef const InstructionSet *code = native_codes[i]
    return code.instead is not NULL and flops_of(code) < LEAST_GAIN * flops_of(code.instead)


cdef double flops_of(const InstructionSet *code):
    """FLOP/s of the products of a tile: the most of several samples."""
    cdef double best = 0, start
    cdef int sample
    for sample in range(SAMPLES):
        start = perf_counter()
        best = max(best, code.score_tiles(ROUNDS) / (perf_counter() - start))
    return best


def built_for():
    """The names of the instruction sets that there is code for."""
    return tuple(native_codes[i].name.decode() for i in range(NATIVE_CODES))


cdef object last_name = None  # of the instruction set that was asked for last, which is that of nearly every call
cdef const InstructionSet *last_code = NULL


cdef const InstructionSet *code_of(str name) except NULL:
    global last_name, last_code
    cdef int i
    if name is last_name:
        return last_code
    for i in range(NATIVE_CODES):
        if native_codes[i].name.decode() == name and native_codes[i].runs_here():
            last_code, last_name = native_codes[i], name
            return last_code
    raise ValueError(f"instruction set {name!r} is none of those that this machine can run: {', '.join(instruction_sets())}")


include "problem.pxi"


cdef int interrupted() noexcept with gil:
    """True if a signal's handler has raised, as that of Ctrl-C does; what it raised stays set."""
    return PyErr_CheckSignals()


cdef int run(const InstructionSet *code, const Problem *problem, int phase, int threads) except -1:
    """Compute a phase without the GIL; an exception of a signal's handler ends it."""
    cdef int end
    with nogil:
        end = native_run(code, problem, phase, threads, interrupted)
    return check_end(end)


cdef int check_end(int end) except -1:
    """Raise what ended a call before its time."""
    if end == NATIVE_INTERRUPTED:
        return -1
    if end == NATIVE_NO_MEMORY:
        raise MemoryError("no memory for the scratch of the CPU kernel")
    return 0


cdef Problem problem_of_call(EncodedProblem encoded, q, k, v, out, lse, mask, starts, dropout, bias, given, positions) except *:
    cdef Problem p = encoded.problem
    set_tensors(&p, q, k, v, out, lse, mask)
    set_dropout(&p, dropout, starts)
    set_bias(&p, bias, k.shape[1])
    set_layout(&p, given)
    set_sequences(&p, starts, q)
    if not p.is_square:
        set_positions(&p, q, k, starts, positions[0], positions[1], positions[2])
    return p


def forward(
    EncodedProblem encoded, str isa, int threads, q, k, v, mask, starts=None, dropout=None, bias=None, given=None, positions=None
):
    """`(out, lse)`, as `Backend.forward` returns them. The tensors must be what the problem says; `mask` may be None.

    `starts`: contiguous int32 on the CPU, where the sequences of a packed call begin, and the end of the last. `dropout`: a
    `Dropout` whose `places`, if there are any, are contiguous int64 on the CPU. `bias`: a `LoweredBias`, where the problem has one.
    `positions`: where query i is not key i, what `set_positions` takes.
    """
    out, lse = results_of(encoded, q)
    cdef Problem p = problem_of_call(encoded, q, k, v, out, lse, mask, starts, dropout, bias, given, positions)
    if not p.is_square and p.causal:  # queries before the first key have no task
        out.zero_(), lse.fill_(float("-inf"))
    run(code_of(isa), &p, FORWARD, threads)
    return out, lse


def forward_last(EncodedProblem encoded, str isa, int threads, q, k, v, lengths, bias=None):
    """`(out, lse)` of the last rows of sequences of these `lengths`, contiguous int32, none less than the rows of `q`."""
    out, lse = empty_outputs(q)
    cdef Problem p = encoded.problem
    set_tensors(&p, q, k, v, out, lse, None)
    cdef int64_t i, capacity = k.shape[1]
    p.lengths, p.batch = int32_of(lengths), len(lengths)
    p.rows = p.lse_head = q.shape[1]
    p.aligns_last = 1
    if not p.batch == q.shape[0] == k.shape[0]:
        raise ValueError(f"{p.batch} lengths for {q.shape[0]} sequences and {k.shape[0]} in the cache; as many are needed")
    set_bias(&p, bias, capacity)
    set_layout(&p, None)
    for i in range(p.batch):
        if not p.rows <= p.lengths[i] <= capacity:
            raise ValueError(f"lengths[{i}] = {p.lengths[i]}; from {p.rows} rows to the {capacity} of the cache are needed")
        check_grids(&p, p.lengths[i])
    run(code_of(isa), &p, FORWARD, threads)
    return out, lse


def zero_sums(x, lse):
    """Zeros for the gradient of `x`, of the dtype of `lse`: laid out as results, or head by head, as tasks add to them."""
    if x.dtype is lse.dtype:
        return zeros_like(x, memory_format=contiguous_format)
    return zeros_like(x.transpose(1, 2), dtype=lse.dtype, memory_format=contiguous_format).transpose(1, 2)


def backward(
    EncodedProblem encoded, str isa, int threads, dout, q, k, v, out, lse, mask, starts=None, dropout=None, bias=None, given=None,
    positions=None
):
    """`(dq, dk, dv, dbias)` in the dtype of `lse`, which is contiguous.

    `dbias` is that of the weights of a learned bias in parts `(parts, *weights.shape)`, float64, to be added up; else None.
    """
    if lse.dtype is not (float64 if encoded.problem.dtype == 0 else float32):
        raise TypeError(f"lse is {lse.dtype}, in which the kernel would sum gradients up; it would write beyond the tensors")
    dq, dk, dv, delta = zero_sums(q, lse), zero_sums(k, lse), zero_sums(v, lse), empty_like(lse)
    cdef Problem p = problem_of_call(encoded, q, k, v, out, lse, mask, starts, dropout, bias, given, positions)
    cdef int64_t[1] none
    cdef int64_t parts = 1
    gradient = None
    if bias is not None and bias.form.learned:
        parts = 1 if p.row_entries else native_parts(&p)
        p.one_part = parts * p.heads * p.entries > MOST_PARTS
        gradient = lse.new_zeros((1 if p.one_part else max(parts, 1), *bias.weights.shape), dtype=torch.float64)
        p.dbias = <double *>locate(gradient, none, 0)
    p.dout, p.dq, p.dk, p.dv, p.delta = view_of(dout), view_of(dq), view_of(dk), view_of(dv), locate(delta, none, 0)
    run(code_of(isa), &p, DELTA, threads)
    run(code_of(isa), &p, BACKWARD, 1 if p.one_part else threads)
    return dq, dk, dv, gradient


include "step.pxi"


def exp2(str isa, const float[::1] x, float[::1] y):
    """Write 2**x into `y`, as the kernel of `isa` computes it; the length must be a multiple of 16."""
    code_of(isa).exp2(&x[0], &y[0], x.shape[0])


def multiply_add(str isa, int64_t rounds):
    """Run fused multiply-adds in registers and nothing else, on this thread; return the number of FLOPs."""
    cdef float result = 0.5
    cdef int64_t flops
    cdef const InstructionSet *code = code_of(isa)
    with nogil:
        flops = code.multiply_add(rounds, &result)
    return flops
