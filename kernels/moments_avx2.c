/* The small moments, 8 elements at a time.  See [Note: small moments] in kernels.h.  Magnitudes are
 * below 2^31, so comparing them as signed integers is right. */
#include "moments.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

TARGET_AVX2 static inline __m256i all8(uint32_t value) {
    return _mm256_set1_epi32((int)value);
}

/* noise_of, for counter, counter + 1, ... */
TARGET_AVX2 static inline __m256i noise8(uint64_t key, uint32_t counter) {
    __m256i lanes_u32x8 = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    __m256i x = _mm256_add_epi32(lanes_u32x8, all8(counter + (uint32_t)(key & 0xFFFFFFFFu)));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, all8(NOISE_FACTOR_1));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 13));
    x = _mm256_add_epi32(x, all8((uint32_t)(key >> 32)));
    x = _mm256_mullo_epi32(x, all8(NOISE_FACTOR_2));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

TARGET_AVX2 static inline __m256i m_noise8(__m256i noise) {
    return _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(noise, all8(0xFFFF)), 4), all8(8));
}

TARGET_AVX2 static inline __m256i v_noise8(__m256i noise) {
    return _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(noise, 16), 4), all8(8));
}

/* The bits of 8 fp32, NaNs made one. */
TARGET_AVX2 static inline __m256i bits8(const float *address) {
    return _mm256_castps_si256(canonical8(_mm256_loadu_ps(address)));
}

/* The same of what adamw has stored: NaNs are one already. */
TARGET_AVX2 static inline __m256i stored8(const float *address) {
    return _mm256_loadu_si256((const __m256i *)address);
}

TARGET_AVX2 static inline __m256i sizes8(__m256i bits) {
    return _mm256_and_si256(bits, all8(SIZE_MASK));
}

TARGET_AVX2 static inline __m128i bf16_noisily8(__m256i bits, __m256i noise) {
    __m256i below = _mm256_cmpgt_epi32(all8(BF16_MAX), sizes8(bits));
    __m256i moved = _mm256_add_epi32(bits, _mm256_and_si256(below, noise));
    return pack8(_mm256_srli_epi32(moved, 16));
}

TARGET_AVX2 void narrow_moments_avx2(size_t n, const float *restrict m_f32,
                                     const float *restrict v_f32, uint16_t *restrict m,
                                     uint16_t *restrict v, uint64_t key, uint32_t counter) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i noise = noise8(key, counter + (uint32_t)i);
        __m256i m_noise = _mm256_and_si256(noise, all8(0xFFFF));
        __m256i v_noise = _mm256_srli_epi32(noise, 16);
        _mm_storeu_si128((__m128i *)(m + i), bf16_noisily8(stored8(m_f32 + i), m_noise));
        _mm_storeu_si128((__m128i *)(v + i), bf16_noisily8(stored8(v_f32 + i), v_noise));
    }
    narrow_moments_scalar(n - i, m_f32 + i, v_f32 + i, m + i, v + i, key, counter + (uint32_t)i);
}

TARGET_AVX2 static inline __m256i load_codes8(const uint8_t *address) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)address));
}

/* base + c * GRID_STEP, and 0 for c = 0. */
TARGET_AVX2 static inline __m256i points8(__m256i c, uint32_t base) {
    __m256i is_zero = _mm256_cmpeq_epi32(c, _mm256_setzero_si256());
    __m256i point = _mm256_add_epi32(all8(base), _mm256_slli_epi32(c, GRID_SHIFT));
    return _mm256_andnot_si256(is_zero, point);
}

TARGET_AVX2 void dequantize_avx2(size_t n, const uint8_t *restrict m, const uint8_t *restrict v,
                                 const float *restrict scale, float *restrict m_f32,
                                 float *restrict v_f32) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i m_u32x8 = load_codes8(m + i);
        __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(m_u32x8, 7), 31);
        __m256i size = points8(_mm256_and_si256(m_u32x8, all8(M_CODES)), grids.m_base);
        _mm256_storeu_si256((__m256i *)(m_f32 + i), _mm256_or_si256(sign, size));
        _mm256_storeu_si256((__m256i *)(v_f32 + i), points8(load_codes8(v + i), grids.v_base));
    }
    dequantize_scalar(n - i, m + i, v + i, scale, m_f32 + i, v_f32 + i);
}

TARGET_AVX2 static inline uint32_t largest_lane(__m256i u32x8) {
    uint32_t lanes[8], largest = 0;
    _mm256_storeu_si256((__m256i *)lanes, u32x8);
    for (int i = 0; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

TARGET_AVX2 static inline struct largest largest8(size_t n, const float *m_f32,
                                                  const float *v_f32) {
    __m256i m_u32x8 = _mm256_setzero_si256(), v_u32x8 = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        m_u32x8 = _mm256_max_epi32(m_u32x8, sizes8(stored8(m_f32 + i)));
        v_u32x8 = _mm256_max_epi32(v_u32x8, sizes8(stored8(v_f32 + i)));
    }
    struct largest found = {largest_lane(m_u32x8), largest_lane(v_u32x8)};
    return largest_of(n - i, m_f32 + i, v_f32 + i, found);
}

/* Grid steps from base to the rounded size: at most 1 for a size below the smallest code. */
TARGET_AVX2 static inline __m256i steps8(__m256i size, uint32_t base, __m256i noise) {
    __m256i below = _mm256_cmpgt_epi32(all8(GRID_MAX), size);
    __m256i moved = _mm256_add_epi32(size, _mm256_and_si256(below, noise));
    return _mm256_srai_epi32(_mm256_sub_epi32(moved, all8(base)), GRID_SHIFT);
}

/* Stores the low bytes of 8 lanes, each at most 0xFF. */
TARGET_AVX2 static inline void store_codes8(uint8_t *address, __m256i codes) {
    __m128i u16x8 = pack8(codes);
    _mm_storel_epi64((__m128i *)address, _mm_packus_epi16(u16x8, u16x8));
}

TARGET_AVX2 static inline __m256i m_codes8(__m256i bits, uint32_t base, __m256i noise) {
    __m256i size = sizes8(bits);
    uint32_t smallest = base + GRID_STEP;
    __m256i is_small = _mm256_cmpgt_epi32(all8(smallest), size);
    __m256 rest = _mm256_cvtepi32_ps(_mm256_sub_epi32(all8(GRID_STEP), noise));
    __m256 threshold = _mm256_mul_ps(rest, _mm256_set1_ps(f32_of(smallest) * 0x1p-20f));
    __m256i stays = _mm256_cmpgt_epi32(_mm256_castps_si256(threshold), size);
    __m256i small_code = _mm256_andnot_si256(stays, all8(1));
    __m256i code = _mm256_blendv_epi8(steps8(size, base, noise), small_code, is_small);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), all8(0x80));
    return _mm256_or_si256(sign, code);
}

TARGET_AVX2 static inline __m256i v_codes8(__m256i bits, uint32_t base, __m256i noise) {
    __m256i size = sizes8(bits);
    __m256i is_zero = _mm256_cmpeq_epi32(size, _mm256_setzero_si256());
    return _mm256_andnot_si256(is_zero, _mm256_max_epi32(steps8(size, base, noise), all8(1)));
}

TARGET_AVX2 void quantize_avx2(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                               uint8_t *restrict m, uint8_t *restrict v, float *restrict scale) {
    struct grids grids = store_scales(scale, largest8(n, m_f32, v_f32));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        store_codes8(m + i, m_codes8(bits8(m_f32 + i), grids.m_base, all8(HALF_STEP)));
        store_codes8(v + i, v_codes8(bits8(v_f32 + i), grids.v_base, all8(HALF_STEP)));
    }
    encode_scalar(n - i, m_f32 + i, v_f32 + i, m + i, v + i, grids);
}

TARGET_AVX2 void quantize_noisily_avx2(size_t n, const float *restrict m_f32,
                                       const float *restrict v_f32, uint8_t *restrict m,
                                       uint8_t *restrict v, float *restrict scale, uint64_t key,
                                       uint32_t counter) {
    struct grids grids = store_scales(scale, largest8(n, m_f32, v_f32));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i noise = noise8(key, counter + (uint32_t)i);
        store_codes8(m + i, m_codes8(stored8(m_f32 + i), grids.m_base, m_noise8(noise)));
        store_codes8(v + i, v_codes8(stored8(v_f32 + i), grids.v_base, v_noise8(noise)));
    }
    encode_noisily_scalar(n - i, m_f32 + i, v_f32 + i, m + i, v + i, grids, key,
                          counter + (uint32_t)i);
}
#endif
