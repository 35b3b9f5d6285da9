/* The codes of a block, 16 elements at a time. */
#include "codes.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX512 static inline uint32_t largest_size16(size_t n, const float *f32) {
    const __m512i size_bits = _mm512_set1_epi32((int)SIZE_BITS);
    __m512i most_u32x16 = _mm512_setzero_si512();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i u32x16 = _mm512_loadu_si512(f32 + i);
        most_u32x16 = _mm512_max_epu32(most_u32x16, _mm512_and_si512(u32x16, size_bits));
    }
    return largest_size(i, n, f32, _mm512_reduce_max_epu32(most_u32x16));
}

TARGET_AVX512 float narrow_i8_avx512(size_t n, const float *restrict f32, float most,
                                     int8_t *restrict codes) {
    float scale = code_scale(largest_size16(n, f32), most);
    const __m512 scale_f32x16 = _mm512_set1_ps(scale);
    size_t i = 0;
    for (; is_finite_scale(scale) && i + 16 <= n; i += 16) {
        __m512 quotient_f32x16 = _mm512_div_ps(_mm512_loadu_ps(f32 + i), scale_f32x16);
        __m512i i32x16 = _mm512_cvtps_epi32(quotient_f32x16);
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(i32x16));
    }
    narrow_i8_tail(i, n, f32, scale, codes);
    return scale;
}
#endif
