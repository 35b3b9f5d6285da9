/* 4-bit codes -> fp32, 16 elements at a time: the table of values is one register. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

TARGET_AVX512 void widen_4bit_avx512(size_t n, size_t block, bool high_first,
                                     const float *restrict table, const uint8_t *restrict codes,
                                     const float *restrict scales, float *restrict f32) {
    const __m512 table_f32x16 = _mm512_loadu_ps(table);
    const __m128i mask = _mm_set1_epi8(0xF);
    for (size_t run = 0; run * block < n; run++) {
        size_t i = run * block, stop = n - i < block ? n : i + block;
        const __m512 scale_f32x16 = _mm512_set1_ps(f32_of(load_u32(scales + run)));
        for (; i + 16 <= stop && i % 2 == 0; i += 16) {
            __m128i u8x8 = _mm_loadl_epi64((const __m128i *)(codes + i / 2));
            __m128i low = _mm_and_si128(u8x8, mask);
            __m128i high = _mm_and_si128(_mm_srli_epi16(u8x8, 4), mask);
            __m128i u8x16 = high_first ? _mm_unpacklo_epi8(high, low) : _mm_unpacklo_epi8(low, high);
            __m512 f32x16 = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(u8x16), table_f32x16);
            _mm512_storeu_ps(f32 + i, canonical16(_mm512_mul_ps(f32x16, scale_f32x16)));
        }
        if (i < stop)
            widen_4bit_scalar(stop - i, stop - i, high_first, table, codes + i / 2, scales + run,
                              f32 + i);
    }
}
#endif
