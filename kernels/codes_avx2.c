/* The codes of a block, 8 elements at a time. */
#include "codes.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX2 static inline uint32_t largest_size8(size_t n, const float *f32) {
    const __m256i size_bits = _mm256_set1_epi32((int)SIZE_BITS);
    __m256i most_u32x8 = _mm256_setzero_si256(); /* below 2^31: compared as signed integers */
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i u32x8 = _mm256_loadu_si256((const __m256i *)(f32 + i));
        most_u32x8 = _mm256_max_epi32(most_u32x8, _mm256_and_si256(u32x8, size_bits));
    }
    uint32_t lanes[8], largest = 0;
    _mm256_storeu_si256((__m256i *)lanes, most_u32x8);
    for (int k = 0; k < 8; k++) largest = lanes[k] > largest ? lanes[k] : largest;
    return largest_size(i, n, f32, largest);
}

TARGET_AVX2 float narrow_i8_avx2(size_t n, const float *restrict f32, float most,
                                 int8_t *restrict codes) {
    float scale = code_scale(largest_size8(n, f32), most);
    const __m256 scale_f32x8 = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; is_finite_scale(scale) && i + 8 <= n; i += 8) {
        __m256i i32x8 = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(f32 + i), scale_f32x8));
        __m128i i16x8 = _mm_packs_epi32(_mm256_castsi256_si128(i32x8),
                                        _mm256_extracti128_si256(i32x8, 1));
        _mm_storel_epi64((__m128i *)(codes + i), _mm_packs_epi16(i16x8, i16x8));
    }
    narrow_i8_tail(i, n, f32, scale, codes);
    return scale;
}
#endif
