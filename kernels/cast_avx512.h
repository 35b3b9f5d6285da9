#ifndef INFINITY_CAST_AVX512_H
#define INFINITY_CAST_AVX512_H
/* Sixteen elements between their stored and their computing form; any alignment. */
#include <immintrin.h>

#include "internal.h"

TARGET_AVX512 static inline __m512 widen16(const uint16_t *bf16) {
    __m512i u32x16 = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bf16));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u32x16, 16));
}

TARGET_AVX512 static inline __m512 join16(const uint16_t *hi, const int16_t *lo) {
    __m512i hi_i32x16 = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)hi));
    __m512i lo_i32x16 = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)lo));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(hi_i32x16, 16), lo_i32x16));
}

TARGET_AVX512 static inline __m512 canonical16(__m512 f32x16) {
    __mmask16 is_nan = _mm512_cmp_ps_mask(f32x16, f32x16, _CMP_UNORD_Q);
    __m512i nan_i32x16 = _mm512_set1_epi32((int)NAN_U32);
    return _mm512_castsi512_ps(
        _mm512_mask_mov_epi32(_mm512_castps_si512(f32x16), is_nan, nan_i32x16));
}

TARGET_AVX512 static inline void split16(__m512 f32x16, uint16_t *hi, int16_t *lo) {
    __m512i u32x16 = _mm512_castps_si512(canonical16(f32x16));
    __m512i hi_u32x16 = _mm512_srli_epi32(_mm512_add_epi32(u32x16, _mm512_set1_epi32(0x8000)), 16);
    _mm256_storeu_si256((__m256i *)hi, _mm512_cvtepi32_epi16(hi_u32x16));
    _mm256_storeu_si256((__m256i *)lo, _mm512_cvtepi32_epi16(u32x16));
}

/* bf16, to nearest, ties to even. */
TARGET_AVX512 static inline __m256i narrow16(__m512 f32x16) {
    __m512i u32x16 = _mm512_castps_si512(canonical16(f32x16));
    __m512i odd_u32x16 = _mm512_and_si512(_mm512_srli_epi32(u32x16, 16), _mm512_set1_epi32(1));
    u32x16 = _mm512_add_epi32(u32x16, _mm512_add_epi32(odd_u32x16, _mm512_set1_epi32(0x7FFF)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(u32x16, 16));
}
#endif
