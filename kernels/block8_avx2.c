/* 8-bit codes -> fp32, 8 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

TARGET_AVX2 void widen_e4m3_avx2(size_t n, const uint8_t *restrict codes, float scale,
                                 float *restrict f32) {
    const __m256 small_f32x8 = _mm256_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f,
                                              0x6p-9f, 0x7p-9f); /* the denormals of e4m3 */
    const __m256 scale_f32x8 = _mm256_set1_ps(scale);
    const __m256 nan_f32x8 = _mm256_castsi256_ps(_mm256_set1_epi32((int)NAN_U32));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i u32x8 = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256i size_u32x8 = _mm256_and_si256(u32x8, _mm256_set1_epi32(0x7F));
        __m256i sign_u32x8 = _mm256_slli_epi32(_mm256_sub_epi32(u32x8, size_u32x8), 24);
        __m256 f32x8 = _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_slli_epi32(size_u32x8, 20), _mm256_set1_epi32(120 << 23)));
        __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), size_u32x8);
        f32x8 = _mm256_blendv_ps(f32x8, _mm256_permutevar8x32_ps(small_f32x8, size_u32x8),
                                 _mm256_castsi256_ps(is_small));
        __m256i is_nan = _mm256_cmpeq_epi32(size_u32x8, _mm256_set1_epi32(0x7F));
        f32x8 = _mm256_blendv_ps(f32x8, nan_f32x8, _mm256_castsi256_ps(is_nan));
        f32x8 = _mm256_or_ps(f32x8, _mm256_castsi256_ps(sign_u32x8));
        _mm256_storeu_ps(f32 + i, canonical8(_mm256_mul_ps(f32x8, scale_f32x8)));
    }
    widen_e4m3_scalar(n - i, codes + i, scale, f32 + i);
}

TARGET_AVX2 void widen_i8_avx2(size_t n, const int8_t *restrict codes, float scale, float factor,
                               float *restrict f32) {
    const __m256 scale_f32x8 = _mm256_set1_ps(scale), factor_f32x8 = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i i32x8 = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256 f32x8 = _mm256_mul_ps(_mm256_cvtepi32_ps(i32x8), scale_f32x8);
        _mm256_storeu_ps(f32 + i, canonical8(_mm256_mul_ps(f32x8, factor_f32x8)));
    }
    widen_i8_scalar(n - i, codes + i, scale, factor, f32 + i);
}
#endif
