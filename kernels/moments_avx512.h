#ifndef INFINITY_MOMENTS_AVX512_H
#define INFINITY_MOMENTS_AVX512_H
/* The noise, 16 elements at a time. */
#include <immintrin.h>

#include "moments.h"

TARGET_AVX512 static inline __m512i all16(uint32_t value) {
    return _mm512_set1_epi32((int)value);
}

/* Keeps a value in a register.  Otherwise the compiler loads a value twice that is used twice and, in
 * a loop with few free registers, recomputes constants by two operations on a saturated port. */
TARGET_AVX512 static inline __m512i kept(__m512i value) {
    __asm__("" : "+v"(value));
    return value;
}

/* The state of hash_of for 16 consecutive pairs; each call moves on by 16. */
struct pairs16 {
    __m512i begun, upper, step, factor;
};

TARGET_AVX512 static inline struct pairs16 pairs16(uint64_t key, uint32_t pair) {
    __m512i lanes_u32x16 = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    uint32_t first = pair * NOISE_FACTOR_1 + (uint32_t)(key & 0xFFFFFFFFu);
    __m512i x = _mm512_mullo_epi32(lanes_u32x16, all16(NOISE_FACTOR_1)); /* a constant */
    return (struct pairs16){_mm512_add_epi32(x, all16(first)), kept(all16((uint32_t)(key >> 32))),
                            kept(all16(16 * NOISE_FACTOR_1)), kept(all16(NOISE_FACTOR_2))};
}

/* hash_of of these pairs; advances to the next 16. */
TARGET_AVX512 static inline __m512i hash16(struct pairs16 *pairs) {
    __m512i x = pairs->begun;
    pairs->begun = _mm512_add_epi32(x, pairs->step);
    /* exclusive ors */
    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), pairs->upper, 0x96);
    x = _mm512_mullo_epi32(x, pairs->factor);
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

/* The codes of at most STATE_BLOCK elements on given grids; their scales are stored already. */
void codes_avx512(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                  const struct noises *restrict noises, uint8_t *restrict m, uint8_t *restrict v,
                  struct grids grids);

TARGET_AVX512 static inline __m512i sizes16(__m512i bits) {
    return _mm512_and_si512(bits, all16(SIZE_MASK));
}
#endif
