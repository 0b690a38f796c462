/* What CUDA and the C that the tests compile say differently. Everything else in the kernels is both.

   DEVICE     a function of the kernels              KERNEL(name)   a kernel, whose only argument is `const Call call`
   LOAD(p), STORE(p, x)   one element of global memory; on the CPU, both are checked
   STORAGE    what tensors hold: 0 float, 1 half, 2 bfloat16. Arithmetic is fp32 */
#ifndef DILKIT_INTRINSICS
#define DILKIT_INTRINSICS

#ifdef __CUDACC__

#define DEVICE static __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const Call call)
#define SHARED __shared__
#define LOAD(pointer) (*(pointer))
#define STORE(pointer, value) (*(pointer) = (value))
#define INFINITY __int_as_float(0x7f800000)

DEVICE int thread_index(void) { return threadIdx.x; }
DEVICE int block_index(void) { return blockIdx.x; }
DEVICE int block_count(void) { return gridDim.x; }
DEVICE void synchronize(void) { __syncthreads(); }
DEVICE void synchronize_warp(void) { __syncwarp(); }
DEVICE int atomic_add(int *place, int amount) { return atomicAdd(place, amount); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

#else

#include "host.h"

#endif

#endif
