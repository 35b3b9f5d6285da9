/* Conversions between the stored forms, 8 or 16 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

TARGET_AVX2 void split_avx2(size_t n, const float *restrict f32, uint16_t *restrict hi,
                            int16_t *restrict lo) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) split8(_mm256_loadu_ps(f32 + i), hi + i, lo + i);
    split_scalar(n - i, f32 + i, hi + i, lo + i);
}

TARGET_AVX2 void join_avx2(size_t n, const uint16_t *restrict hi, const int16_t *restrict lo,
                           float *restrict f32) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(f32 + i, join8(hi + i, lo + i));
    join_scalar(n - i, hi + i, lo + i, f32 + i);
}

TARGET_AVX2 void widen_avx2(size_t n, const uint16_t *restrict bf16, float *restrict f32) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(f32 + i, widen8(bf16 + i));
    widen_scalar(n - i, bf16 + i, f32 + i);
}

TARGET_AVX2 void narrow_avx2(size_t n, const float *restrict f32, uint16_t *restrict bf16) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(bf16 + i), narrow8(_mm256_loadu_ps(f32 + i)));
    narrow_scalar(n - i, f32 + i, bf16 + i);
}

TARGET_AVX2 void accumulate_bf16_avx2(size_t n, float *restrict acc,
                                      const uint16_t *restrict grad) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 sum_f32x8 = _mm256_add_ps(_mm256_loadu_ps(acc + i), widen8(grad + i));
        _mm256_storeu_ps(acc + i, canonical8(sum_f32x8));
    }
    accumulate_bf16_scalar(n - i, acc + i, grad + i);
}

TARGET_AVX2 void accumulate_f32_avx2(size_t n, float *restrict acc, const float *restrict grad) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 sum_f32x8 = _mm256_add_ps(_mm256_loadu_ps(acc + i), _mm256_loadu_ps(grad + i));
        _mm256_storeu_ps(acc + i, canonical8(sum_f32x8));
    }
    accumulate_f32_scalar(n - i, acc + i, grad + i);
}

TARGET_AVX2 void rewrite_avx2(size_t n, const uint16_t *restrict new_hi, uint16_t *restrict hi,
                              int16_t *restrict lo) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i new_u16x16 = _mm256_loadu_si256((const __m256i *)(new_hi + i));
        __m256i old_u16x16 = _mm256_loadu_si256((const __m256i *)(hi + i));
        __m256i same_u16x16 = _mm256_cmpeq_epi16(new_u16x16, old_u16x16);
        /* Edits are rare or local: what is unchanged is not written, so it costs no write traffic.
         */
        if (_mm256_movemask_epi8(same_u16x16) == -1) continue;
        __m256i lo_i16x16 = _mm256_loadu_si256((const __m256i *)(lo + i));
        _mm256_storeu_si256((__m256i *)(hi + i), new_u16x16);
        _mm256_storeu_si256((__m256i *)(lo + i), _mm256_and_si256(lo_i16x16, same_u16x16));
    }
    rewrite_scalar(n - i, new_hi + i, hi + i, lo + i);
}
#endif
