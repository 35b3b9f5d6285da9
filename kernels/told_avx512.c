/* Gradients from the moments around a step, 16 elements at a time.  See [Note: told gradients] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

TARGET_AVX512 void recover_avx512(size_t n, const float *restrict before,
                                  const float *restrict behind, const struct infinity_told *s,
                                  uint16_t *restrict grad) {
    __m512 inverse_weight = _mm512_set1_ps(s->inverse_weight);
    __m512 inverse_clip = _mm512_set1_ps(s->inverse_clip), noise = _mm512_set1_ps(s->noise);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 m_f32x16 = _mm512_loadu_ps(before + i);
        __m512 change_f32x16 = _mm512_sub_ps(_mm512_loadu_ps(behind + i), m_f32x16);
        __m512 g_f32x16 = _mm512_add_ps(m_f32x16, _mm512_mul_ps(change_f32x16, inverse_weight));
        __m512 least_f32x16 = _mm512_mul_ps(_mm512_abs_ps(m_f32x16), noise);
        __mmask16 is_noise =
            _mm512_cmp_ps_mask(_mm512_abs_ps(g_f32x16), least_f32x16, _CMP_LT_OQ);
        g_f32x16 = _mm512_mask_mov_ps(g_f32x16, is_noise, _mm512_setzero_ps());
        __m512i u32x16 =
            _mm512_castps_si512(canonical16(_mm512_mul_ps(g_f32x16, inverse_clip)));
        __m512i odd_u32x16 =
            _mm512_and_si512(_mm512_srli_epi32(u32x16, 16), _mm512_set1_epi32(1));
        u32x16 = _mm512_add_epi32(u32x16, _mm512_add_epi32(odd_u32x16, _mm512_set1_epi32(0x7FFF)));
        _mm256_storeu_si256((__m256i *)(grad + i),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(u32x16, 16)));
    }
    recover_scalar(n - i, before + i, behind + i, s, grad + i);
}
#endif
