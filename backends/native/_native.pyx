# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The CPU kernel as Python calls it: numbers and addresses in, no tensors. See native.h."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

cdef extern from "native.h":
    ctypedef struct Rows:
        char *data
        int64_t batch, row, head
    ctypedef struct Problem:
        int64_t batch, seq, heads, kv_heads, dim, span
        int dtype, causal, once
        double scale
        int64_t branches, groups
        const int64_t *length
        const int64_t *rate
        const int64_t *offset
        const uint64_t *group
        const char *mask
        int64_t blocks, block, round
        int64_t mask_batch, mask_row
        Rows q, k, v, out, dout, dq, dk, dv
        char *lse
        char *delta
    ctypedef struct Kernel:
        const char *name
        int (*runs_here)() nogil
        void (*exp)(const float *x, float *y, int64_t count) nogil
        int64_t (*multiply_add)(int64_t rounds, float *result) nogil
    const Kernel native_generic
    int FORWARD, BACKWARD_QUERY, BACKWARD_KEY
    int NATIVE_DONE, NATIVE_INTERRUPTED, NATIVE_NO_MEMORY
    int native_run(const Kernel *kernel, const Problem *problem, int phase, int threads, int (*interrupted)() noexcept) nogil

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef extern from *:
    """
    static const Kernel *const native_kernels[] = {
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
    enum { NATIVE_KERNELS = sizeof native_kernels / sizeof *native_kernels };
    """
    const Kernel *const native_kernels[]
    int NATIVE_KERNELS


def instruction_sets():
    """The names of the instruction sets that this machine can run, the fastest first."""
    return tuple(native_kernels[i].name.decode() for i in range(NATIVE_KERNELS) if native_kernels[i].runs_here())


cdef const Kernel *kernel_of(str name) except NULL:
    cdef int i
    for i in range(NATIVE_KERNELS):
        if native_kernels[i].name.decode() == name and native_kernels[i].runs_here():
            return native_kernels[i]
    raise ValueError(f"instruction set {name!r} is none of those that this machine can run: {', '.join(instruction_sets())}")


cdef Rows rows(tuple place):
    cdef Rows found
    found.data = <char *><uintptr_t>place[0]
    found.batch, found.row, found.head = place[1], place[2], place[3]
    return found


cdef class Layout:
    """A problem's sizes, and its branches: what a pattern comes to for a length and a number of heads.

    `length`, `rate` `(branches,)`, `offset` `(heads, branches)`: int64; `group` `(groups,)`: uint64. All contiguous.
    """

    cdef Problem problem
    cdef object kept

    def __init__(
        self, sizes, int dtype, int causal, int once, double scale, const int64_t[::1] length, const int64_t[::1] rate,
        const int64_t[:, ::1] offset, const uint64_t[::1] group
    ):
        cdef Problem *p = &self.problem
        p.batch, p.seq, p.heads, p.kv_heads, p.dim, p.span, p.blocks, p.block = sizes
        p.dtype, p.causal, p.once, p.scale = dtype, causal, once, scale
        p.branches, p.groups = length.shape[0], group.shape[0]
        p.length, p.rate, p.offset, p.group = &length[0], &rate[0], &offset[0, 0], &group[0]
        self.kept = length, rate, offset, group

    @property
    def nbytes(self):
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.kept)


cdef Problem problem_of(Layout layout, tensors, lse, mask):
    cdef Problem p = layout.problem
    p.q, p.k, p.v, p.out = rows(tensors[0]), rows(tensors[1]), rows(tensors[2]), rows(tensors[3])
    p.lse = <char *><uintptr_t>lse
    p.mask = <const char *><uintptr_t>mask[0]
    p.mask_batch, p.mask_row = mask[1], mask[2]
    return p


cdef int interrupted() noexcept with gil:
    """Whether a signal's handler has raised, as that of Ctrl-C does; what it raised stays set."""
    return PyErr_CheckSignals()


cdef int run(const Kernel *kernel, const Problem *problem, int phase, int threads) except -1:
    """Compute a phase without the GIL; an exception of a signal's handler, such as Ctrl-C, ends it."""
    cdef int end
    with nogil:
        end = native_run(kernel, problem, phase, threads, interrupted)
    if end == NATIVE_INTERRUPTED:
        return -1
    if end == NATIVE_NO_MEMORY:
        raise MemoryError("no memory for the scratch of the CPU kernel")
    return 0


def forward(Layout layout, str isa, int threads, tensors, lse, mask):
    """Write `out` and `lse`. `tensors`: (address, three strides in bytes) of q, k, v, out; `mask` two strides; address 0: none."""
    cdef Problem p = problem_of(layout, tensors, lse, mask)
    run(kernel_of(isa), &p, FORWARD, threads)


def backward(Layout layout, str isa, int threads, tensors, lse, mask, gradients, delta):
    """Write the gradients; `gradients`: dout, dq, dk, dv as `tensors`; `delta`: the address of room shaped like lse."""
    cdef Problem p = problem_of(layout, tensors, lse, mask)
    p.dout, p.dq = rows(gradients[0]), rows(gradients[1])
    p.dk, p.dv = rows(gradients[2]), rows(gradients[3])
    p.delta = <char *><uintptr_t>delta
    run(kernel_of(isa), &p, BACKWARD_QUERY, threads)
    for p.round in range(max(p.blocks, 1)):
        run(kernel_of(isa), &p, BACKWARD_KEY, threads)


def exp(str isa, const float[::1] x, float[::1] y):
    """Write e**x into `y`, as the kernel of `isa` computes it; the length must be a multiple of 16."""
    kernel_of(isa).exp(&x[0], &y[0], x.shape[0])


def multiply_add(str isa, int64_t rounds):
    """Do nothing but fused multiply-adds in registers, on this thread; return how many FLOPs that were."""
    cdef float result = 0.5
    cdef int64_t flops
    cdef const Kernel *kernel = kernel_of(isa)
    with nogil:
        flops = kernel.multiply_add(rounds, &result)
    return flops
