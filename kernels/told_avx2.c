/* Gradients from the moments around a step, 8 elements at a time.  See [Note: told gradients] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

TARGET_AVX2 void recover_avx2(size_t n, const float *restrict before, const float *restrict behind,
                              const struct infinity_told *s, uint16_t *restrict grad) {
    __m256 inverse_weight = _mm256_set1_ps(s->inverse_weight);
    __m256 inverse_clip = _mm256_set1_ps(s->inverse_clip), noise = _mm256_set1_ps(s->noise);
    __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 m_f32x8 = _mm256_loadu_ps(before + i);
        __m256 change_f32x8 = _mm256_sub_ps(_mm256_loadu_ps(behind + i), m_f32x8);
        __m256 g_f32x8 = _mm256_add_ps(m_f32x8, _mm256_mul_ps(change_f32x8, inverse_weight));
        __m256 least_f32x8 = _mm256_mul_ps(_mm256_and_ps(m_f32x8, magnitude), noise);
        __m256 is_noise = _mm256_cmp_ps(_mm256_and_ps(g_f32x8, magnitude), least_f32x8, _CMP_LT_OQ);
        g_f32x8 = _mm256_mul_ps(_mm256_andnot_ps(is_noise, g_f32x8), inverse_clip);
        __m256i u32x8 = _mm256_castps_si256(canonical8(g_f32x8));
        __m256i odd_u32x8 = _mm256_and_si256(_mm256_srli_epi32(u32x8, 16), _mm256_set1_epi32(1));
        u32x8 = _mm256_add_epi32(u32x8, _mm256_add_epi32(odd_u32x8, _mm256_set1_epi32(0x7FFF)));
        _mm_storeu_si128((__m128i *)(grad + i), pack8(_mm256_srli_epi32(u32x8, 16)));
    }
    recover_scalar(n - i, before + i, behind + i, s, grad + i);
}
#endif
