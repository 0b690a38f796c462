/* What is written differently in CUDA and in the C that the tests compile. Everything else in the kernels is both.

       *.cu --> intrinsics.cuh --> with nvrtc: the definitions below, PTX instructions   --> machine code for one kind of GPU
                               --> with a C compiler: host.h of the tests, in plain C    --> a library for the CPU

   DEVICE     a function of the kernels              KERNEL(name)   a kernel, whose only argument is `const Args args`
   SHARED     a static array in shared memory        DYNAMIC_SHARED(name)   bytes of shared memory, as many as the launch says
   KEEP_APART(name)   in a branch: it is not merged with others like it into one that indexes registers, which would move them
              to memory
   LOAD(p), STORE(p, x)   one element of global memory; on the CPU, both are checked
   STORAGE    what tensors hold: 0 float, 1 half, 2 bfloat16. Arithmetic is fp32
   opaque(x)  the int x, of which the compiler then knows nothing: it computes what follows from it there, not ahead of loops

   fence()    what this thread has stored before is there for all blocks before what it stores after

   Words      load_words(p), store_words(p, x)       uint4: 16 bytes of global memory at a multiple of 16
              load_floats(p), store_floats(p, x)     float4: the same
   Numbers    half_to_float, float_to_half, bfloat_to_float, float_to_bfloat     bits of 16: unsigned short
              pack_halves(low, high), pack_bfloats(low, high)                    two in a word
              Storage, from_storage(x), to_storage(x), pack(low, high), low_of(word), high_of(word)     by STORAGE
              exp2_fast(x), exp2_capped(x)           2^x within 2 ulp, 0 for -inf; capped, 1 for x above 0, and NaN for NaN
   Copies     copy_async(to, from)                   16 bytes from global to shared memory, both at multiples of 16
              copy_async_or_zero(to, from, present)  or 16 bytes of zero; `from` is not read then, but is an address all the same
              copy_async_commit()                    what this thread has begun since the last one is a group
              copy_async_wait(n)                     until at most n groups of this thread are under way; then synchronize
   Warps      of 32 threads, all of which take part
              synchronize_warp(), ballot(condition), shuffle(value, lane), shuffle_xor(value, mask), shuffle_up(value, delta),
              shuffle_down(value, delta), shuffle_word(word, lane), shuffle_word_xor(word, mask),
              warp_min(x), warp_max(x), warp_sum(x)      of ints; bit_count(word) is of a thread alone
   Matrices   of 8 x 8 elements of 2 bytes in shared memory: lane i says where row i % 8 of matrix i / 8 is, at a multiple of 16
              load_matrix(out, row), load_matrices_2(out, row), load_matrices_4(out, row); the same ..._transposed
              lane i gets elements (i / 4, i % 4 * 2 + {0, 1}) of each; transposed, (i % 4 * 2 + {0, 1}, i / 4)
   Products   sum (16 x 8 float) += left (16 x k) right (k x 8); k is 8 or 16; g = lane / 4, t = lane % 4 * 2
              mma_k16_half(sum, left, right), mma_k8_half, mma_k16_bfloat, mma_k8_bfloat; mma(sum, left, right) is k16 by STORAGE
              left: (g, t..), (g + 8, t..), then (g, t + 8..), (g + 8, t + 8..)    right: (t.., g), then (t + 8.., g)
              sum: (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)
   Copies are plain ones before sm_80. Products need sm_75 (half) or sm_80 (bfloat16), matrices sm_75. */
#ifndef DILKIT_INTRINSICS
#define DILKIT_INTRINSICS

#ifdef __CUDACC__

#define DEVICE static __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const Args args)
#define SHARED __shared__ __align__(16)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define LOAD(pointer) (*(pointer))
#define STORE(pointer, value) (*(pointer) = (value))
#define KEEP_APART(branch) asm volatile("// " #branch)
#define INFINITY __int_as_float(0x7f800000)

DEVICE int thread_index(void) { return threadIdx.x; }
DEVICE int block_index(void) { return blockIdx.x; }
DEVICE int block_count(void) { return gridDim.x; }
DEVICE void synchronize(void) { __syncthreads(); }
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE int atomic_add(int *place, int amount) { return atomicAdd(place, amount); }
DEVICE void fence(void) { __threadfence(); }

/* Words */

DEVICE uint4 load_words(const void *from) { return *(const uint4 *)from; }
DEVICE float4 load_floats(const void *from) { return *(const float4 *)from; }
DEVICE void store_words(void *to, uint4 words) { *(uint4 *)to = words; }
DEVICE void store_floats(void *to, float4 floats) { *(float4 *)to = floats; }

/* Numbers */

DEVICE float half_to_float(unsigned short half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

DEVICE unsigned short float_to_half(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

DEVICE float bfloat_to_float(unsigned short bfloat) { return __uint_as_float((unsigned)bfloat << 16); }

/* Before sm_80 by hand: half of the last place that is kept is added, or just less where that place is even. */
DEVICE unsigned short float_to_bfloat(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short bfloat;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bfloat) : "f"(value));
    return bfloat;
#else
    unsigned bits = __float_as_uint(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

DEVICE unsigned pack_halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return float_to_half(low) | (unsigned)float_to_half(high) << 16;
#endif
}

DEVICE unsigned pack_bfloats(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return float_to_bfloat(low) | (unsigned)float_to_bfloat(high) << 16;
#endif
}

DEVICE float exp2_fast(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

DEVICE float exp2_capped(float x) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(0.0f));
    return exp2_fast(x);
#else
    return exp2_fast(x > 0.0f ? 0.0f : x);
#endif
}

/* Copies */

DEVICE unsigned shared_address(const void *pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

#if __CUDA_ARCH__ >= 800

DEVICE void copy_async(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

DEVICE void copy_async_or_zero(void *to, const void *from, int present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

DEVICE void copy_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

#define copy_async_wait(pending) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory")

#else

DEVICE void copy_async(void *to, const void *from) { *(uint4 *)to = *(const uint4 *)from; }
DEVICE void copy_async_or_zero(void *to, const void *from, int present) {
    *(uint4 *)to = present ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
}
DEVICE void copy_async_commit(void) {}

#define copy_async_wait(pending) ((void)(pending))

#endif

/* Warps */

#define ALL_LANES 0xffffffffu

DEVICE void synchronize_warp(void) { __syncwarp(); }
/* A macro, for CUDA's headers have a `ballot(bool)` of old GPUs, which a function would leave calls to. */
#define ballot(condition) __ballot_sync(ALL_LANES, condition)
DEVICE float shuffle(float value, int lane) { return __shfl_sync(ALL_LANES, value, lane); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(ALL_LANES, value, mask); }
DEVICE float shuffle_up(float value, int delta) { return __shfl_up_sync(ALL_LANES, value, delta); }
DEVICE float shuffle_down(float value, int delta) { return __shfl_down_sync(ALL_LANES, value, delta); }
DEVICE unsigned shuffle_word(unsigned word, int lane) { return __shfl_sync(ALL_LANES, word, lane); }
DEVICE unsigned shuffle_word_xor(unsigned word, int mask) { return __shfl_xor_sync(ALL_LANES, word, mask); }
DEVICE int bit_count(unsigned word) { return __popc(word); }

#if __CUDA_ARCH__ >= 800
DEVICE int warp_min(int x) { return __reduce_min_sync(ALL_LANES, x); }
DEVICE int warp_max(int x) { return __reduce_max_sync(ALL_LANES, x); }
DEVICE int warp_sum(int x) { return __reduce_add_sync(ALL_LANES, x); }
#else
DEVICE int warp_min(int x) {
    for (int mask = 16; mask; mask /= 2)
        x = min(x, (int)shuffle_word_xor(x, mask));
    return x;
}
DEVICE int warp_max(int x) { return ~warp_min(~x); }
DEVICE int warp_sum(int x) {
    for (int mask = 16; mask; mask /= 2)
        x += (int)shuffle_word_xor(x, mask);
    return x;
}
#endif

/* Matrices */

#if __CUDA_ARCH__ >= 750

#define LOAD_MATRICES_1(name, form)                                                                                                \
    DEVICE void name(unsigned *out, const void *row) {                                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x1" form ".shared.b16 {%0}, [%1];"                                                \
                     : "=r"(out[0])                                                                                                \
                     : "r"(shared_address(row))                                                                                    \
                     : "memory");                                                                                                  \
    }
#define LOAD_MATRICES_2(name, form)                                                                                                \
    DEVICE void name(unsigned *out, const void *row) {                                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0, %1}, [%2];"                                            \
                     : "=r"(out[0]), "=r"(out[1])                                                                                  \
                     : "r"(shared_address(row))                                                                                    \
                     : "memory");                                                                                                  \
    }
#define LOAD_MATRICES_4(name, form)                                                                                                \
    DEVICE void name(unsigned *out, const void *row) {                                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0, %1, %2, %3}, [%4];"                                    \
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])                                                      \
                     : "r"(shared_address(row))                                                                                    \
                     : "memory");                                                                                                  \
    }
LOAD_MATRICES_1(load_matrix, "")
LOAD_MATRICES_1(load_matrix_transposed, ".trans")
LOAD_MATRICES_2(load_matrices_2, "")
LOAD_MATRICES_2(load_matrices_2_transposed, ".trans")
LOAD_MATRICES_4(load_matrices_4, "")
LOAD_MATRICES_4(load_matrices_4_transposed, ".trans")

#endif

/* Products: of all lanes together, so that the compiler may move none into a branch. */

#define MMA_K8(name, type)                                                                                                         \
    DEVICE void name(float *sum, const unsigned *left, const unsigned *right) {                                                    \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                                                         \
                     ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                                    \
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                      \
                     : "r"(left[0]), "r"(left[1]), "r"(right[0]));                                                                 \
    }
#define MMA_K16(name, type)                                                                                                        \
    DEVICE void name(float *sum, const unsigned *left, const unsigned *right) {                                                    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                                        \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                        \
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                      \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));                      \
    }

#if __CUDA_ARCH__ >= 750
MMA_K8(mma_k8_half, "f16")
#endif
#if __CUDA_ARCH__ >= 800
MMA_K8(mma_k8_bfloat, "bf16")
MMA_K16(mma_k16_half, "f16")
MMA_K16(mma_k16_bfloat, "bf16")
#elif __CUDA_ARCH__ >= 750
DEVICE void mma_k16_half(float *sum, const unsigned *left, const unsigned *right) {
    mma_k8_half(sum, left, right);
    mma_k8_half(sum, left + 2, right + 1);
}
#endif

#else

#include "host.h"

#endif

/* By STORAGE */

#if STORAGE == 1

typedef unsigned short Storage;
DEVICE float from_storage(Storage x) { return half_to_float(x); }
DEVICE Storage to_storage(float x) { return float_to_half(x); }
DEVICE unsigned pack(float low, float high) { return pack_halves(low, high); }
DEVICE float low_of(unsigned word) { return half_to_float((unsigned short)word); }
DEVICE float high_of(unsigned word) { return half_to_float((unsigned short)(word >> 16)); }
#define mma(sum, left, right) mma_k16_half(sum, left, right)

#elif STORAGE == 2

typedef unsigned short Storage;
DEVICE float from_storage(Storage x) { return bfloat_to_float(x); }
DEVICE Storage to_storage(float x) { return float_to_bfloat(x); }
DEVICE unsigned pack(float low, float high) { return pack_bfloats(low, high); }
DEVICE float low_of(unsigned word) { return bfloat_to_float((unsigned short)word); }
DEVICE float high_of(unsigned word) { return bfloat_to_float((unsigned short)(word >> 16)); }
#define mma(sum, left, right) mma_k16_bfloat(sum, left, right)

#else

typedef float Storage;
DEVICE float from_storage(Storage x) { return x; }
DEVICE Storage to_storage(float x) { return x; }

#endif

#endif
