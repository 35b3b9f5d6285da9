#ifndef INFINITY_CAST_AVX2_H
#define INFINITY_CAST_AVX2_H
/* Eight elements between their stored and their computing form; any alignment. */
#include <immintrin.h>

#include "internal.h"

TARGET_AVX2 static inline __m256 widen8(const uint16_t *bf16) {
    __m256i u32x8 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)bf16));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u32x8, 16));
}

TARGET_AVX2 static inline __m256 join8(const uint16_t *hi, const int16_t *lo) {
    __m256i hi_i32x8 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)hi));
    __m256i lo_i32x8 = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)lo));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(hi_i32x8, 16), lo_i32x8));
}

TARGET_AVX2 static inline __m256 canonical8(__m256 f32x8) {
    __m256 nan_f32x8 = _mm256_castsi256_ps(_mm256_set1_epi32((int)NAN_U32));
    return _mm256_blendv_ps(f32x8, nan_f32x8, _mm256_cmp_ps(f32x8, f32x8, _CMP_UNORD_Q));
}

/* Packs the low halves of 8 lanes, each at most 0xFFFF. */
TARGET_AVX2 static inline __m128i pack8(__m256i u32x8) {
    return _mm_packus_epi32(_mm256_castsi256_si128(u32x8), _mm256_extracti128_si256(u32x8, 1));
}

TARGET_AVX2 static inline void split8(__m256 f32x8, uint16_t *hi, int16_t *lo) {
    __m256i u32x8 = _mm256_castps_si256(canonical8(f32x8));
    __m256i hi_u32x8 = _mm256_srli_epi32(_mm256_add_epi32(u32x8, _mm256_set1_epi32(0x8000)), 16);
    __m256i lo_u32x8 = _mm256_and_si256(u32x8, _mm256_set1_epi32(0xFFFF));
    _mm_storeu_si128((__m128i *)hi, pack8(hi_u32x8));
    _mm_storeu_si128((__m128i *)lo, pack8(lo_u32x8));
}

/* bf16, to nearest, ties to even. */
TARGET_AVX2 static inline __m128i narrow8(__m256 f32x8) {
    __m256i u32x8 = _mm256_castps_si256(canonical8(f32x8));
    __m256i odd_u32x8 = _mm256_and_si256(_mm256_srli_epi32(u32x8, 16), _mm256_set1_epi32(1));
    u32x8 = _mm256_add_epi32(u32x8, _mm256_add_epi32(odd_u32x8, _mm256_set1_epi32(0x7FFF)));
    return pack8(_mm256_srli_epi32(u32x8, 16));
}
#endif
