/* Instructions of Hopper, sm_90a: barriers that count arrivals, products of a warpgroup, and its registers. CUDA alone.

   Warpgroup   four warps whose threads begin at a multiple of 128
   Barriers    in shared memory, of a number of arrivals a phase; a thread waits for a phase by its parity, first 0, then 1
               barrier_init(barrier, count), barrier_arrive(barrier), barrier_wait(barrier, parity)
               barrier_ended(barrier, parity): whether that phase has ended, without a wait
               synchronize_threads(number, threads): so many threads have come to the barrier `number`, 1 to 15, which those that
               only arrive_threads(number, threads) do not wait for
   Registers   give_registers(n), take_registers(n): of each thread of a warpgroup, a multiple of 8
   Proxies     show_to_products(): what this thread has written to shared memory is there for products that start after a barrier
   Panels      (rows, 64) of elements of 2 bytes in shared memory, at a multiple of 1024: a row is eight chunks of 16 bytes, and
               chunk c of row r is at chunk c ^ r % 8 of it ("128 byte swizzle")

                   8 rows = 1024 bytes     | 0 1 2 3 4 5 6 7 |  row 0        panels of the same rows, 64 elements further each,
                                           | 1 0 3 2 5 4 7 6 |  row 1        follow one another
                                           |   ...           |
                                           | 7 6 5 4 3 2 1 0 |  row 7

   Products    sum (64 x n, fp32, registers) += left (64 x 16) right (16 x n), started one after the other
               products_begin()      registers of sums and left sides are ready; before the first, and after they were written
               products_commit()     products since the last one are a group
               products_wait(n)      until at most n groups are under way: until then nobody touches their registers or panels
               along_rows(panel)     a factor of 64 or n rows, of which a product takes 16 elements: 32 bytes further the next
               across_rows(panel, rows)   a right factor of 16 rows, of which it takes n elements, of panels of `rows` rows: 16 rows
                                          further the next
               multiply_panels_128(sum, left, right, add)    both along rows; n = 128; without `add`, sum = left right
               multiply_weights_64, multiply_weights_128(sum, left, right)     left: registers; right across rows; n = 64 or 128
               Warp w of the warpgroup has rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4 * 2 a lane has, of each 8
               elements of a row of sums, (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1), and of a left side
               (g, t..), (g + 8, t..), then (g, t + 8..), (g + 8, t + 8..): those of `mma`. */
#ifndef DILKIT_HOPPER
#define DILKIT_HOPPER

#include "intrinsics.cuh"

#if !defined(__CUDACC__) || STORAGE == 0
#error "for tensor cores of sm_90a, which host.h does not have"
#endif

/* Barriers */

typedef unsigned long long Barrier;

DEVICE void barrier_init(Barrier *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEVICE void barrier_arrive(Barrier *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_wait(Barrier *barrier, int parity) {
    int ended;
    do
        asm volatile("{\n"
                     ".reg .pred ended;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, ended;\n"
                     "}"
                     : "=r"(ended)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!ended);
}

DEVICE int barrier_ended(Barrier *barrier, int parity) {
    int ended;
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, ended;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return ended;
}

DEVICE void synchronize_threads(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

DEVICE void arrive_threads(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Registers: the number is part of the instruction. */

#define give_registers(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define take_registers(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))

DEVICE void show_to_products(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Products */

DEVICE void products_begin(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define products_wait(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/* No use of these registers moves across it: the compiler takes sums for ready once their products are issued. */
#define KEEP_IN_ORDER(registers, count) \
    _Pragma("unroll") for (int i = 0; i < (count); i++) asm volatile("" : "+f"((registers)[i])::"memory")

/* The descriptor of a factor: bits 0-13 its address, 16-29 from a panel to the next, 32-45 from 8 rows to the next, in units of 16
   bytes; 62-63 the swizzle of 128 bytes. */
typedef unsigned long long Factor;

#define PANEL_ROW 128
#define SWIZZLE_128 (1ull << 62)

DEVICE Factor factor_of(const void *panel, unsigned from_panel_to_panel) {
    Factor address = (shared_address(panel) & 0x3ffff) >> 4;
    return address | (Factor)(from_panel_to_panel >> 4) << 16 | (Factor)(8 * PANEL_ROW >> 4) << 32 | SWIZZLE_128;
}

DEVICE Factor along_rows(const void *panel) { return factor_of(panel, 16); }
DEVICE Factor across_rows(const void *panel, int rows) { return factor_of(panel, rows * PANEL_ROW); }

/* The factor `bytes` further. */
DEVICE Factor further(Factor factor, int bytes) { return factor + (bytes >> 4); }

#if STORAGE == 1
#define PRODUCT_TYPES ".f32.f16.f16"
#else
#define PRODUCT_TYPES ".f32.bf16.bf16"
#endif

/* The registers of sums in an instruction: where they stand in it, and what they are. */
#define PLACES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64 \
    PLACES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32 SUMS_16(0), SUMS_16(16)
#define SUMS_64 SUMS_32, SUMS_16(32), SUMS_16(48)

DEVICE void multiply_panels_128(float *sum, Factor left, Factor right, int add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16" PRODUCT_TYPES " {" PLACES_64 "}, %64, %65, add, 1, 1, 0, 0;\n"
                 "}"
                 : SUMS_64
                 : "l"(left), "l"(right), "r"(add));
}

DEVICE void multiply_weights_64(float *sum, const unsigned *left, Factor right) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16" PRODUCT_TYPES " {" PLACES_32 "}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n"
                 "}"
                 : SUMS_32
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

DEVICE void multiply_weights_128(float *sum, const unsigned *left, Factor right) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16" PRODUCT_TYPES " {" PLACES_64 "}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 1;\n"
                 "}"
                 : SUMS_64
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

#endif
