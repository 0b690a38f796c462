from libc.stdint cimport int64_t

cdef char *locate(tensor, int64_t *strides, int dims) except? NULL
