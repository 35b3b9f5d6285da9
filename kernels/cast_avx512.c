/* Conversions between the stored forms, 16 or 32 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

TARGET_AVX512 void split_avx512(size_t n, const float *restrict f32, uint16_t *restrict hi,
                                int16_t *restrict lo) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) split16(_mm512_loadu_ps(f32 + i), hi + i, lo + i);
    split_scalar(n - i, f32 + i, hi + i, lo + i);
}

TARGET_AVX512 void join_avx512(size_t n, const uint16_t *restrict hi, const int16_t *restrict lo,
                               float *restrict f32) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(f32 + i, join16(hi + i, lo + i));
    join_scalar(n - i, hi + i, lo + i, f32 + i);
}

TARGET_AVX512 void widen_avx512(size_t n, const uint16_t *restrict bf16, float *restrict f32) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(f32 + i, widen16(bf16 + i));
    widen_scalar(n - i, bf16 + i, f32 + i);
}

TARGET_AVX512 void narrow_avx512(size_t n, const float *restrict f32, uint16_t *restrict bf16) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(bf16 + i), narrow16(_mm512_loadu_ps(f32 + i)));
    narrow_scalar(n - i, f32 + i, bf16 + i);
}

TARGET_AVX512 void accumulate_bf16_avx512(size_t n, float *restrict acc,
                                          const uint16_t *restrict grad) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 sum_f32x16 = _mm512_add_ps(_mm512_loadu_ps(acc + i), widen16(grad + i));
        _mm512_storeu_ps(acc + i, canonical16(sum_f32x16));
    }
    accumulate_bf16_scalar(n - i, acc + i, grad + i);
}

TARGET_AVX512 void accumulate_f32_avx512(size_t n, float *restrict acc,
                                         const float *restrict grad) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 sum_f32x16 = _mm512_add_ps(_mm512_loadu_ps(acc + i), _mm512_loadu_ps(grad + i));
        _mm512_storeu_ps(acc + i, canonical16(sum_f32x16));
    }
    accumulate_f32_scalar(n - i, acc + i, grad + i);
}

TARGET_AVX512 void rewrite_avx512(size_t n, const uint16_t *restrict new_hi, uint16_t *restrict hi,
                                  int16_t *restrict lo) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i new_u16x32 = _mm512_loadu_si512(new_hi + i);
        __m512i old_u16x32 = _mm512_loadu_si512(hi + i);
        __mmask32 edited = _mm512_cmpneq_epi16_mask(new_u16x32, old_u16x32);
        /* Edits are rare or local: what is unchanged is not written, so it costs no write traffic.
         */
        if (edited == 0) continue;
        _mm512_storeu_si512(hi + i, new_u16x32);
        _mm512_mask_storeu_epi16(lo + i, edited, _mm512_setzero_si512());
    }
    rewrite_scalar(n - i, new_hi + i, hi + i, lo + i);
}
#endif
