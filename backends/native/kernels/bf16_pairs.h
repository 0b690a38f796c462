/* Pairs of bf16 in the place of floats, and their dot products.
 *
 *     bit 31                    16 15                       0
 *       | odd member, bf16       | even member, bf16        |  = one "float" of Vector_pairs
 *
 *     make_pairs: two vectors of fp32 -> one of pairs          add_pair_products: fp32 sum + a.even x.even + a.odd x.odd
 */
#if defined(__AVX512BF16__)

/* sum + a.even * x.even + a.odd * x.odd, lane by lane. */
static inline Vector_pairs add_pair_products(Vector_pairs sum, float a, Vector_pairs x) {
    return (Vector_pairs)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)x);
}

static inline Vector_pairs make_pairs(Vector_pairs even, Vector_pairs odd) {
    const Lanes_pairs one_of_each = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                     0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (Vector_pairs)_mm512_permutexvar_epi16((__m512i)one_of_each, halves);
}

#else /* the same in other instructions: slow, for machines that test without these */

static inline Vector_pairs add_pair_products(Vector_pairs sum, float a, Vector_pairs x) {
    float even = from_bits(to_bits(a) << 16), odd = from_bits(to_bits(a) & 0xffff0000);
    return sum + even * (Vector_pairs)((Lanes_pairs)x << 16) + odd * (Vector_pairs)((Lanes_pairs)x & (int32_t)0xffff0000);
}

static inline Vector_pairs make_pairs(Vector_pairs even, Vector_pairs odd) {
    Vector_pairs pairs;
    for (int i = 0; i < LANES_pairs; i++)
        pairs[i] = from_bits((uint32_t)float_to_bfloat(odd[i]) << 16 | float_to_bfloat(even[i]));
    return pairs;
}

#endif
