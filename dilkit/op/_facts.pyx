# cython: language_level=3
"""Facts of tensors, read at every call: in C, because this is most of what a call costs beside its kernel.

Newer versions of torch describe a tensor to C in one call, as a DLTensor (the DLPack exchange API, dlpack.h). In older ones, and
where DLPack cannot describe a tensor, its attributes are read one by one, which takes longer.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy

import torch
from torch.autograd import forward_ad


cdef struct DLTensor:
    void *data
    int32_t device_type, device_id, ndim
    uint8_t kind, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset


cdef struct ExchangeAPI:
    uint32_t major, minor
    void *older
    void *allocate
    void *export_managed
    void *import_managed
    int (*export_borrowed)(void *tensor, DLTensor *out) except -1


cdef ExchangeAPI *find_api() except? NULL:
    """Torch's DLPack exchange API; NULL if it lacks the major version that is declared here."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return NULL
    cdef ExchangeAPI *api = <ExchangeAPI *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    return api if api.major == 1 else NULL


cdef enum:
    INTEGER = 0  # of the kinds of dtypes
    FLOAT = 2
    BFLOAT = 4
    TRUTH = 6
    MOST_TENSORS = 16
    MOST_DIMS = 4
    MOST_DEPTH = 3  # of tuples in tuples: the tensors of a backward pass have `Inputs`, and these a bias
    HEADER = 4 * sizeof(int32_t)
    MOST_OF_ONE = 1 + HEADER + 2 * MOST_DIMS * sizeof(int64_t)
    MOST_BYTES = (MOST_TENSORS + 1) * MOST_OF_ONE
    ABSENT = 0  # what a key says of the next of its inputs
    DESCRIBED = 1
    OPENED = 2
    CLOSED = 3


cdef uint64_t keys_named(names):
    """A set of dispatch keys of torch, as bits."""
    cdef uint64_t bits = 0
    for name in names:
        bits |= <uint64_t>torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


cdef ExchangeAPI *API = find_api()
cdef uint64_t OF_THREAD = keys_named(("BackendSelect", "ADInplaceOrView"))  # what torch has in a thread that nothing was asked of
cdef uint64_t OF_TENSOR = keys_named(
    ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
)
# Of the module, and of no dictionary: each of these is looked up several times in a call.
cdef object Tensor = torch.Tensor, Parameter = torch.nn.Parameter
cdef object ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool)
cdef object transforms_active = torch._C._are_functorch_transforms_active
cdef object keys_of_thread = torch._C._dispatch_tls_local_include_set, keys_of_tensor = torch._C._dispatch_keys
cdef object function_mode = torch._C._is_torch_function_mode_enabled, profiling = torch._C._autograd._profiler_enabled
cdef object autocasting = torch._C._is_any_autocast_enabled, forward_level = forward_ad


def undispatched(inputs):
    """True if torch's dispatcher has nothing to do with an operator of these tensors but record a gradient and call its kernel.

    It has more to do under modes, transforms, autocast, tracing or a profiler, and for tensors of subclasses, without memory or
    in a form that is not their memory's. `inputs` has tensors, None, and tuples that hold tensors among other things.
    """
    return not thread_is_odd() and are_plain(of_tuple(inputs), 0)


def call_key(inputs):
    """Return the `tensor_key` of inputs, None where torch's dispatcher has something to do with them, or key and value differ in width."""
    cdef tuple items = of_tuple(inputs)
    if thread_is_odd() or not are_plain(items, 0):
        return None
    key = tensor_key(items)
    return key if equally_wide(key) else None


def tensor_key(inputs):
    """Return a value that is the same for tensors of the same shapes, strides, dtypes and devices in the same places, and for no others."""
    cdef char[MOST_BYTES] found
    cdef char *end = found
    if API is not NULL:
        try:
            end = describe_all(of_tuple(inputs), end, found + MOST_BYTES)
            return PyBytes_FromStringAndSize(found, end - found)
        except (BufferError, RuntimeError):
            pass  # whether the tensors can be used is not decided here
    return key_by_attributes(of_tuple(inputs))


cdef tuple of_tuple(inputs):
    """The items of a tuple of whatever class: those of a named one take Cython long."""
    if not isinstance(inputs, tuple):
        raise TypeError(f"inputs is a {type(inputs).__name__}; a tuple is needed")
    return tuple(inputs)


cdef tuple key_by_attributes(tuple inputs):
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else key_by_attributes(tuple(x)) if isinstance(x, tuple) else None
        for x in inputs
    ])


cdef bint are_plain(tuple inputs, int depth) except -1:
    """True if all tensors have memory of the usual form; within a tuple among the inputs, at a `depth`, there is more than tensors."""
    for x in inputs:
        if type(x) is Tensor or type(x) is Parameter:
            if <uint64_t>keys_of_tensor(x).raw_repr() & ~OF_TENSOR:
                return False
        elif isinstance(x, tuple):
            if depth == MOST_DEPTH or not are_plain(tuple(x), depth + 1):
                return False
        elif x is not None and (depth == 0 or is_tensor(x)):
            return False
    return True


cdef bint thread_is_odd() except -1:
    """True if torch's dispatcher has something to do with any operator that this thread calls."""
    if function_mode() or profiling() or <uint64_t>keys_of_thread().raw_repr() & ~OF_THREAD:
        return True
    return autocasting() or forward_level._current_level >= 0


cdef bint equally_wide(key) except -1:
    """False if the key begins with three tensors, and the last dimensions of the second and the third differ."""
    cdef const char *at
    cdef int64_t width[3]
    cdef int32_t dims
    cdef int i
    if not isinstance(key, bytes):
        return len(key) < 3 or not all([isinstance(x, tuple) and isinstance(x[0], tuple) for x in key[:3]]) or key[1][0][-1:] == key[2][0][-1:]
    at = key
    for i in range(3):
        width[i] = 0
        if at[0] != DESCRIBED:  # also the 0 after the last byte
            return True
        memcpy(&dims, at + 1 + 2 * sizeof(int32_t), sizeof(dims))
        if dims > 0:
            memcpy(&width[i], at + 1 + HEADER + (dims - 1) * sizeof(int64_t), sizeof(int64_t))
        at += 1 + HEADER + 2 * dims * sizeof(int64_t)
    return width[1] == width[2]


def want_gradient(inputs):
    """True if one of these, or in a tuple among them, is a tensor that requires a gradient."""
    for x in of_tuple(inputs):
        if is_tensor(x):
            if x.requires_grad:
                return True
        elif isinstance(x, tuple) and want_gradient(x):
            return True
    return False


cdef bint is_tensor(x) except -1:
    """isinstance, which takes long for what is none."""
    return x is not None and (type(x) is Tensor or type(x) is Parameter or (not isinstance(x, tuple) and isinstance(x, Tensor)))


cdef char *describe_all(tuple inputs, char *end, const char *limit) except NULL:
    """Write device, dtype, shape and strides of each tensor, and a mark for all else. Raises BufferError for what is not described."""
    cdef DLTensor x
    for tensor in inputs:
        if end + MOST_OF_ONE > limit:
            raise BufferError
        if is_tensor(tensor):
            API.export_borrowed(<void *>tensor, &x)
            if x.ndim > MOST_DIMS:
                raise BufferError
            end = describe(&x, end)
        elif isinstance(tensor, tuple):
            end[0] = OPENED
            end = describe_all(tuple(tensor), end + 1, limit)
            if end == limit:
                raise BufferError
            end[0] = CLOSED
            end += 1
        else:
            end[0] = ABSENT
            end += 1
    return end


cdef char *describe(const DLTensor *x, char *end) noexcept:
    """Write the key of a tensor at `end`; returns where it ends then."""
    cdef Py_ssize_t dims = x.ndim * sizeof(int64_t)
    end[0] = DESCRIBED
    memcpy(end + 1, &x.device_type, HEADER)
    memcpy(end + 1 + HEADER, x.shape, dims)
    memcpy(end + 1 + HEADER + dims, x.strides, dims)
    return end + 1 + HEADER + 2 * dims


cdef char *locate(tensor, int64_t *strides, int dims) except? NULL:
    """The address of a tensor; writes the strides of its first `dims` dimensions, in bytes."""
    cdef DLTensor x
    cdef int i
    if API is not NULL and isinstance(tensor, Tensor):
        try:
            API.export_borrowed(<void *>tensor, &x)
            for i in range(dims):
                strides[i] = x.strides[i] * (x.bits // 8)
            return <char *>x.data + x.byte_offset
        except (BufferError, RuntimeError):
            pass
    step, size = tensor.stride(), tensor.element_size()
    for i in range(dims):
        strides[i] = step[i] * size
    return <char *><uintptr_t>tensor.data_ptr()


cdef int facts_of(str name, tensor, Facts *facts) except -1:
    """Describe a strided tensor. Raises TypeError, naming it, for what is none, and ValueError for too many dimensions."""
    cdef DLTensor x
    cdef int i
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
    if API is not NULL:
        try:
            API.export_borrowed(<void *>tensor, &x)
            if x.ndim <= MOST_SIZES:
                facts.data, facts.device_type, facts.device_id, facts.dims = <char *>x.data + x.byte_offset, x.device_type, x.device_id, x.ndim
                facts.dtype = dtype_of(x.kind, x.bits) if x.lanes == 1 else OTHER
                for i in range(x.ndim):
                    facts.shape[i], facts.stride[i] = x.shape[i], x.strides[i]
                return 0
        except (BufferError, RuntimeError):
            pass
    return read_facts(name, tensor, facts)


cdef int read_facts(str name, tensor, Facts *facts) except -1:
    """The same by the attributes of a tensor."""
    cdef int number = ALL_DTYPES.index(tensor.dtype) if tensor.dtype in ALL_DTYPES else <int>OTHER
    if tensor.layout is not torch.strided or tensor.dim() > MOST_SIZES:
        raise ValueError(f"{name} is {tensor.layout} with {tensor.dim()} dimensions; a plain tensor with at most {MOST_SIZES} is needed")
    facts.data, facts.dims = <char *><uintptr_t>tensor.data_ptr(), tensor.dim()
    facts.device_type, facts.device_id = (1 if tensor.is_cpu else 0), tensor.get_device()
    facts.dtype = <Dtype>number
    for i, (size, step) in enumerate(zip(tensor.shape, tensor.stride())):
        facts.shape[i], facts.stride[i] = size, step
    return 0


cdef Dtype dtype_of(uint8_t kind, uint8_t bits) noexcept:
    if kind == FLOAT:
        return FLOAT64 if bits == 64 else FLOAT32 if bits == 32 else FLOAT16 if bits == 16 else OTHER
    if kind == BFLOAT or kind == TRUTH:
        return BFLOAT16 if kind == BFLOAT else BOOL
    return OTHER if kind != INTEGER else INT8 if bits == 8 else INT64 if bits == 64 else OTHER


cdef int64_t reach(str name, tensor, const Facts *facts) except -1:
    """The elements from the first of a tensor to the end of the last. Raises ValueError where its storage ends before, and for a view
    that negates it: memory has other numbers."""
    cdef int64_t end = 1
    cdef int i
    if tensor.is_neg():
        raise ValueError(f"{name} is a view that negates its memory; make it plain ({name}.resolve_neg())")
    for i in range(facts.dims):
        if facts.shape[i] == 0:
            return 0
        end += (facts.shape[i] - 1) * facts.stride[i]
    if <int64_t>(tensor.storage_offset() + end) * <int64_t>tensor.itemsize > <int64_t>tensor.untyped_storage().nbytes():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}, beyond the "
            f"{tensor.untyped_storage().nbytes()} bytes of its storage; was the storage resized?"
        )
    return end


def first_beyond(inputs, tuple spans):
    """The number of the first tensor, also of tuples among the inputs, that reaches beyond its storage; -1 if none does.

    `spans`: bytes from the first element of each tensor to the end of its last; an empty one has 0, and may begin anywhere.
    """
    cdef Py_ssize_t number = 0
    return number if any_beyond(of_tuple(inputs), spans, &number) else -1


cdef bint any_beyond(tuple inputs, tuple spans, Py_ssize_t *number) except -1:
    cdef Py_ssize_t span, offset
    for x in inputs:
        if is_tensor(x):
            span = spans[number[0]]
            if span > 0:
                offset = x.storage_offset()
                if offset:
                    offset *= <Py_ssize_t>x.itemsize
                if offset + span > <Py_ssize_t>x.untyped_storage().nbytes():
                    return True
            number[0] += 1
        elif isinstance(x, tuple) and any_beyond(tuple(x), spans, number):
            return True
    return False


def spans_that_meet(tuple tensors, tuple spans, list written):
    """The pairs of a tensor of those numbered `written`, and of another, whose bytes from first to last have one in common.

    A pair of two that are written comes once, the one that is named first before the other. `spans`: as of `first_beyond`.
    """
    cdef int64_t[MOST_TENSORS] start, end
    cdef Py_ssize_t i, j, n, count = len(tensors)
    if count > MOST_TENSORS:
        raise ValueError(f"{count} tensors; at most {MOST_TENSORS} are needed")
    for i in range(count):
        start[i] = <int64_t><uintptr_t>locate(tensors[i], NULL, 0)
        end[i] = start[i] + <int64_t>spans[i]
    pairs = []
    for n in range(len(written)):
        i = written[n]
        for j in range(count):
            if start[i] < end[j] and start[j] < end[i] and j not in written[: n + 1]:
                pairs.append((i, j))
    return pairs
