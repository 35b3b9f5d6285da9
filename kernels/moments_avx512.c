/* The small moments, 16 elements at a time.  See [Note: small moments] in kernels.h. */
#include "moments.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"
#include "moments_avx512.h"

/* The bits of 16 fp32, NaNs made one. */
TARGET_AVX512 static inline __m512i bits16(const float *address) {
    return _mm512_castps_si512(canonical16(_mm512_loadu_ps(address)));
}

/* a0, b0, a1, b1, ... */
TARGET_AVX512 static inline void store_in_turn32(uint32_t *address, __m512i a, __m512i b) {
    __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i high = _mm512_add_epi32(low, all16(8));
    _mm512_storeu_si512(address, _mm512_permutex2var_epi32(a, low, b));
    _mm512_storeu_si512(address + 16, _mm512_permutex2var_epi32(a, high, b));
}

TARGET_AVX512 void noise_avx512(size_t n, uint64_t key, uint64_t first, int width,
                                uint32_t *restrict m, uint32_t *restrict v) {
    size_t i = n < first % 2 ? n : first % 2;
    noise_scalar(i, key, first, width, m, v);
    struct pairs16 pairs = pairs16(key, (uint32_t)((first + i) / 2));
    for (; i + 32 <= n; i += 32) {
        __m512i hash = hash16(&pairs);
        __m512i low = _mm512_and_si512(hash, all16((1u << width) - 1));
        __m512i high = _mm512_srli_epi32(hash, (unsigned)(32 - width));
        store_in_turn32(m + i, low, high);
        store_in_turn32(v + i, high, low);
    }
    noise_scalar(n - i, key, first + i, width, m + i, v + i);
}

TARGET_AVX512 static inline __m256i bf16_noisily16(__m512i bits, __m512i noise) {
    __mmask16 below = _mm512_cmplt_epu32_mask(sizes16(bits), all16(BF16_MAX));
    __m512i moved = _mm512_mask_add_epi32(bits, below, bits, noise);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(moved, 16));
}

TARGET_AVX512 void narrow_moments_avx512(size_t n, const float *restrict m_f32,
                                         const float *restrict v_f32,
                                         const struct noises *restrict noises,
                                         uint16_t *restrict m, uint16_t *restrict v) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i m_noise = _mm512_loadu_si512(noises->m + i);
        __m512i v_noise = _mm512_loadu_si512(noises->v + i);
        _mm256_storeu_si256((__m256i *)(m + i), bf16_noisily16(bits16(m_f32 + i), m_noise));
        _mm256_storeu_si256((__m256i *)(v + i), bf16_noisily16(bits16(v_f32 + i), v_noise));
    }
    narrow_moments_tail(i, n, m_f32, v_f32, noises, m, v);
}

/* base + (c << shift), and 0 for c = 0. */
TARGET_AVX512 INLINED __m512i points16(__m512i c, uint32_t base, int shift) {
    __m512i above = _mm512_slli_epi32(c, (unsigned)shift);
    return _mm512_maskz_add_epi32(_mm512_test_epi32_mask(c, c), all16(base), above);
}

TARGET_AVX512 INLINED void dequantize_by(size_t n, const uint8_t *m, const uint8_t *v,
                                         const float *scale, float *m_f32, float *v_f32,
                                         struct coding by) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1), by);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i m_u32x16 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(m + i)));
        __m512i v_u32x16 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(v + i)));
        __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(m_u32x16, 7), 31);
        __m512i c = _mm512_and_si512(m_u32x16, all16(by.m_codes));
        __m512i size = points16(c, grids.m_base, by.m_shift);
        _mm512_storeu_si512(m_f32 + i, _mm512_or_si512(sign, size));
        _mm512_storeu_si512(v_f32 + i, points16(v_u32x16, grids.v_base, by.v_shift));
    }
    dequantize_tail(i, n, m, v, grids, m_f32, v_f32, by);
}

/* rounded_size */
TARGET_AVX512 INLINED __m512i rounded16(__m512i size, __m512i noise, int shift) {
    __mmask16 below = _mm512_cmplt_epu32_mask(size, all16(INFINITY_U32 - (1u << shift)));
    noise = _mm512_slli_epi32(noise, (unsigned)(shift - CODE_NOISE));
    return _mm512_mask_add_epi32(size, below, size, noise);
}

TARGET_AVX512 INLINED struct largest largest16(size_t n, const float *m_f32, const float *v_f32,
                                               const struct noises *noises, struct coding by) {
    __m512i m_u32x16 = _mm512_setzero_si512(), v_u32x16 = _mm512_setzero_si512();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i m_noise = _mm512_loadu_si512(noises->m + i);
        __m512i v_noise = _mm512_loadu_si512(noises->v + i);
        __m512i m_rounded = rounded16(sizes16(bits16(m_f32 + i)), m_noise, by.m_shift);
        __m512i v_rounded = rounded16(sizes16(bits16(v_f32 + i)), v_noise, by.v_shift);
        m_u32x16 = _mm512_max_epu32(m_u32x16, m_rounded);
        v_u32x16 = _mm512_max_epu32(v_u32x16, v_rounded);
    }
    struct largest found = {_mm512_reduce_max_epu32(m_u32x16), _mm512_reduce_max_epu32(v_u32x16)};
    return largest_tail(i, n, m_f32, v_f32, noises, found, by);
}

/* Grid steps from base to the rounded size: at most 1 for a size below the smallest code. */
TARGET_AVX512 INLINED __m512i steps16(__m512i rounded, uint32_t base, int shift) {
    return _mm512_srai_epi32(_mm512_sub_epi32(rounded, all16(base)), (unsigned)shift);
}

TARGET_AVX512 INLINED __m128i m_codes16(__m512i bits, uint32_t base, __m512i noise, int shift) {
    __m512i size = sizes16(bits);
    uint32_t smallest = base + (1u << shift);
    __mmask16 is_small = _mm512_cmplt_epu32_mask(size, all16(smallest));
    __m512 rest = _mm512_cvtepi32_ps(_mm512_sub_epi32(all16(1u << CODE_NOISE), noise));
    __m512 threshold = _mm512_mul_ps(rest, _mm512_set1_ps(f32_of(smallest) * 0x1p-20f));
    __mmask16 up = _mm512_mask_cmpge_epu32_mask(is_small, size, _mm512_castps_si512(threshold));
    __m512i steps = steps16(rounded16(size, noise, shift), base, shift);
    __m512i code = _mm512_mask_mov_epi32(steps, is_small, all16(0));
    code = _mm512_mask_mov_epi32(code, up, all16(1));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), all16(0x80));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(sign, code));
}

TARGET_AVX512 INLINED __m128i v_codes16(__m512i bits, uint32_t base, __m512i noise, int shift) {
    __m512i rounded = rounded16(sizes16(bits), noise, shift);
    __mmask16 is_some = _mm512_cmpge_epu32_mask(rounded, all16(1u << shift));
    return _mm512_cvtepi32_epi8(
        _mm512_maskz_max_epi32(is_some, steps16(rounded, base, shift), all16(1)));
}

TARGET_AVX512 INLINED void codes_by(size_t n, const float *m_f32, const float *v_f32,
                                    const struct noises *noises, uint8_t *m, uint8_t *v,
                                    struct grids grids, struct coding by) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i m_noise = _mm512_loadu_si512(noises->m + i);
        __m512i v_noise = _mm512_loadu_si512(noises->v + i);
        __m128i m_u8x16 = m_codes16(bits16(m_f32 + i), grids.m_base, m_noise, by.m_shift);
        __m128i v_u8x16 = v_codes16(bits16(v_f32 + i), grids.v_base, v_noise, by.v_shift);
        _mm_storeu_si128((__m128i *)(m + i), m_u8x16);
        _mm_storeu_si128((__m128i *)(v + i), v_u8x16);
    }
    quantize_tail(i, n, m_f32, v_f32, noises, m, v, grids, by);
}

TARGET_AVX512 void codes_avx512(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                                const struct noises *restrict noises, uint8_t *restrict m,
                                uint8_t *restrict v, struct grids grids) {
    codes_by(n, m_f32, v_f32, noises, m, v, grids, IN_8_BITS);
}

TARGET_AVX512 INLINED void quantize_by(size_t n, const float *m_f32, const float *v_f32,
                                       const struct noises *noises, uint8_t *m, uint8_t *v,
                                       float *scale, struct coding by) {
    struct largest largest = largest16(n, m_f32, v_f32, noises, by);
    struct grids grids = store_scales(scale, largest.m, largest.v, by);
    codes_by(n, m_f32, v_f32, noises, m, v, grids, by);
}

CODES_FUNCTIONS(TARGET_AVX512, avx512)
#endif
