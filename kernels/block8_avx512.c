/* 8-bit codes -> fp32, 16 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

TARGET_AVX512 void widen_e4m3_avx512(size_t n, const uint8_t *restrict codes, float scale,
                                     float *restrict f32) {
    const __m512 small_f32x16 =
        _mm512_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f, 0, 0, 0, 0,
                       0, 0, 0, 0); /* the denormals of e4m3 */
    const __m512 scale_f32x16 = _mm512_set1_ps(scale);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i u32x16 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m512i size_u32x16 = _mm512_and_si512(u32x16, _mm512_set1_epi32(0x7F));
        __m512i sign_u32x16 = _mm512_slli_epi32(_mm512_sub_epi32(u32x16, size_u32x16), 24);
        __m512i bits_u32x16 =
            _mm512_add_epi32(_mm512_slli_epi32(size_u32x16, 20), _mm512_set1_epi32(120 << 23));
        __mmask16 is_small = _mm512_cmplt_epi32_mask(size_u32x16, _mm512_set1_epi32(8));
        __mmask16 is_nan = _mm512_cmpeq_epi32_mask(size_u32x16, _mm512_set1_epi32(0x7F));
        bits_u32x16 = _mm512_mask_mov_epi32(
            bits_u32x16, is_small,
            _mm512_castps_si512(_mm512_permutexvar_ps(size_u32x16, small_f32x16)));
        bits_u32x16 = _mm512_mask_mov_epi32(bits_u32x16, is_nan, _mm512_set1_epi32((int)NAN_U32));
        __m512 f32x16 = _mm512_castsi512_ps(_mm512_or_si512(bits_u32x16, sign_u32x16));
        _mm512_storeu_ps(f32 + i, canonical16(_mm512_mul_ps(f32x16, scale_f32x16)));
    }
    widen_e4m3_scalar(n - i, codes + i, scale, f32 + i);
}

TARGET_AVX512 void widen_i8_avx512(size_t n, const int8_t *restrict codes, float scale,
                                   float factor, float *restrict f32) {
    const __m512 scale_f32x16 = _mm512_set1_ps(scale), factor_f32x16 = _mm512_set1_ps(factor);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i i32x16 = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m512 f32x16 = _mm512_mul_ps(_mm512_cvtepi32_ps(i32x16), scale_f32x16);
        _mm512_storeu_ps(f32 + i, canonical16(_mm512_mul_ps(f32x16, factor_f32x16)));
    }
    widen_i8_scalar(n - i, codes + i, scale, factor, f32 + i);
}
#endif
