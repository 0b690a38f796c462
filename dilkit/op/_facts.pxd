from libc.stdint cimport int32_t, int64_t

cdef enum:
    MOST_SIZES = 8  # of a tensor that is described

# The dtypes of dilkit.problem.DTYPES in their order, and those of tensors beside them.
cdef enum Dtype:
    FLOAT64, FLOAT32, BFLOAT16, FLOAT16, INT8, INT64, BOOL, OTHER

cdef struct Facts:
    char *data
    int32_t device_type, device_id
    int dims
    Dtype dtype
    int64_t[MOST_SIZES] shape
    int64_t[MOST_SIZES] stride

cdef char *locate(tensor, int64_t *strides, int dims) except? NULL
cdef int facts_of(str name, tensor, Facts *facts) except -1
cdef int64_t reach(str name, tensor, const Facts *facts) except -1
