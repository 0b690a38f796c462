# cython: language_level=3
"""Facts of tensors, read at every call: in C, because this is most of what a call costs beside its kernel."""


def facts_of(tuple names, tuple tensors):
    """Shape, strides, dtype and device of each tensor, one after the other in one hashable tuple.

    Raises TypeError, naming the tensor, for None, which torch hands to operators for a tensor that is undefined.
    """
    cdef Py_ssize_t i
    cdef list found = []
    for i in range(len(tensors)):
        x = tensors[i]
        if x is None:
            raise TypeError(f"{names[i]} is None; a tensor is needed")
        found.append(x.shape)
        found.append(x.stride())
        found.append(x.dtype)
        found.append(x.device)
    return tuple(found)


def first_beyond(tuple tensors, tuple spans):
    """The number of the first tensor that reaches beyond its storage; -1 if none does.

    `spans`: bytes from the first element of each tensor to the end of its last.
    """
    cdef Py_ssize_t i, span
    for i in range(len(spans)):
        x, span = tensors[i], spans[i]
        if <Py_ssize_t>x.storage_offset() * <Py_ssize_t>x.itemsize + span > <Py_ssize_t>x.untyped_storage().nbytes():
            return i
    return -1
