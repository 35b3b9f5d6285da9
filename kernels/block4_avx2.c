/* 4-bit codes -> fp32, 16 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

/* The codes of 16 elements, one in each byte. */
TARGET_AVX2 static inline __m128i codes16(const uint8_t *codes, bool high_first) {
    __m128i u8x8 = _mm_loadl_epi64((const __m128i *)codes), mask = _mm_set1_epi8(0xF);
    __m128i low = _mm_and_si128(u8x8, mask), high = _mm_and_si128(_mm_srli_epi16(u8x8, 4), mask);
    return high_first ? _mm_unpacklo_epi8(high, low) : _mm_unpacklo_epi8(low, high);
}

TARGET_AVX2 static inline __m256 values8(__m128i codes, __m256 small_f32x8, __m256 large_f32x8) {
    __m256i u32x8 = _mm256_cvtepu8_epi32(codes);
    __m256 is_large = _mm256_castsi256_ps(_mm256_slli_epi32(u32x8, 28)); /* bit 3 of the code */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(small_f32x8, u32x8),
                            _mm256_permutevar8x32_ps(large_f32x8, u32x8), is_large);
}

TARGET_AVX2 void widen_4bit_avx2(size_t n, size_t block, bool high_first,
                                 const float *restrict table, const uint8_t *restrict codes,
                                 const float *restrict scales, float *restrict f32) {
    const __m256 small_f32x8 = _mm256_loadu_ps(table), large_f32x8 = _mm256_loadu_ps(table + 8);
    for (size_t run = 0; run * block < n; run++) {
        size_t i = run * block, stop = n - i < block ? n : i + block;
        const __m256 scale_f32x8 = _mm256_set1_ps(f32_of(load_u32(scales + run)));
        for (; i + 16 <= stop && i % 2 == 0; i += 16) {
            __m128i u8x16 = codes16(codes + i / 2, high_first);
            __m256 f32x8 = values8(u8x16, small_f32x8, large_f32x8);
            _mm256_storeu_ps(f32 + i, canonical8(_mm256_mul_ps(f32x8, scale_f32x8)));
            f32x8 = values8(_mm_srli_si128(u8x16, 8), small_f32x8, large_f32x8);
            _mm256_storeu_ps(f32 + i + 8, canonical8(_mm256_mul_ps(f32x8, scale_f32x8)));
        }
        if (i < stop)
            widen_4bit_scalar(stop - i, stop - i, high_first, table, codes + i / 2, scales + run,
                              f32 + i);
    }
}
#endif
