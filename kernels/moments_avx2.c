/* The small moments, 8 elements at a time.  See [Note: small moments] in kernels.h.  Magnitudes are
 * below 2^31, so comparing them as signed integers is right. */
#include "moments.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

TARGET_AVX2 static inline __m256i all8(uint32_t value) {
    return _mm256_set1_epi32((int)value);
}

/* hash_of, for 8 pairs from `pair` on. */
TARGET_AVX2 static inline __m256i hash8(uint64_t key, uint32_t pair) {
    __m256i lanes_u32x8 = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    uint32_t first = pair * NOISE_FACTOR_1 + (uint32_t)(key & 0xFFFFFFFFu);
    __m256i x = _mm256_mullo_epi32(lanes_u32x8, all8(NOISE_FACTOR_1));
    x = _mm256_add_epi32(x, all8(first));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_xor_si256(x, all8((uint32_t)(key >> 32)));
    x = _mm256_mullo_epi32(x, all8(NOISE_FACTOR_2));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

/* a0, b0, a1, b1, ... */
TARGET_AVX2 static inline void store_in_turn16(uint32_t *address, __m256i a, __m256i b) {
    __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
    _mm256_storeu_si256((__m256i *)address, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i *)(address + 8), _mm256_permute2x128_si256(low, high, 0x31));
}

TARGET_AVX2 void noise_avx2(size_t n, uint64_t key, uint64_t first, int width,
                            uint32_t *restrict m, uint32_t *restrict v) {
    size_t i = n < first % 2 ? n : first % 2;
    noise_scalar(i, key, first, width, m, v);
    for (; i + 16 <= n; i += 16) {
        __m256i hash = hash8(key, (uint32_t)((first + i) / 2));
        __m256i low = _mm256_and_si256(hash, all8((1u << width) - 1));
        __m256i high = _mm256_srli_epi32(hash, 32 - width);
        store_in_turn16(m + i, low, high);
        store_in_turn16(v + i, high, low);
    }
    noise_scalar(n - i, key, first + i, width, m + i, v + i);
}

TARGET_AVX2 static inline __m256i load8(const uint32_t *address) {
    return _mm256_loadu_si256((const __m256i *)address);
}

/* The bits of 8 fp32, NaNs made one. */
TARGET_AVX2 static inline __m256i bits8(const float *address) {
    return _mm256_castps_si256(canonical8(_mm256_loadu_ps(address)));
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
                                     const float *restrict v_f32,
                                     const struct noises *restrict noises, uint16_t *restrict m,
                                     uint16_t *restrict v) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i m_u16x8 = bf16_noisily8(bits8(m_f32 + i), load8(noises->m + i));
        __m128i v_u16x8 = bf16_noisily8(bits8(v_f32 + i), load8(noises->v + i));
        _mm_storeu_si128((__m128i *)(m + i), m_u16x8);
        _mm_storeu_si128((__m128i *)(v + i), v_u16x8);
    }
    narrow_moments_tail(i, n, m_f32, v_f32, noises, m, v);
}

TARGET_AVX2 static inline __m256i load_codes8(const uint8_t *address) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)address));
}

/* base + (c << shift), and 0 for c = 0. */
TARGET_AVX2 INLINED __m256i points8(__m256i c, uint32_t base, int shift) {
    __m256i is_zero = _mm256_cmpeq_epi32(c, _mm256_setzero_si256());
    __m256i point = _mm256_add_epi32(all8(base), _mm256_slli_epi32(c, shift));
    return _mm256_andnot_si256(is_zero, point);
}

TARGET_AVX2 INLINED void dequantize_by(size_t n, const uint8_t *m, const uint8_t *v,
                                       const float *scale, float *m_f32, float *v_f32,
                                       struct coding by) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1), by);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i m_u32x8 = load_codes8(m + i), c = _mm256_and_si256(m_u32x8, all8(by.m_codes));
        __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(m_u32x8, 7), 31);
        __m256i size = points8(c, grids.m_base, by.m_shift);
        _mm256_storeu_si256((__m256i *)(m_f32 + i), _mm256_or_si256(sign, size));
        size = points8(load_codes8(v + i), grids.v_base, by.v_shift);
        _mm256_storeu_si256((__m256i *)(v_f32 + i), size);
    }
    dequantize_tail(i, n, m, v, grids, m_f32, v_f32, by);
}

TARGET_AVX2 static inline uint32_t largest_lane(__m256i u32x8) {
    uint32_t lanes[8], largest = 0;
    _mm256_storeu_si256((__m256i *)lanes, u32x8);
    for (int i = 0; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

/* rounded_size */
TARGET_AVX2 INLINED __m256i rounded8(__m256i size, __m256i noise, int shift) {
    __m256i below = _mm256_cmpgt_epi32(all8(INFINITY_U32 - (1u << shift)), size);
    noise = _mm256_slli_epi32(noise, shift - CODE_NOISE);
    return _mm256_add_epi32(size, _mm256_and_si256(below, noise));
}

TARGET_AVX2 INLINED struct largest largest8(size_t n, const float *m_f32, const float *v_f32,
                                            const struct noises *noises, struct coding by) {
    __m256i m_u32x8 = _mm256_setzero_si256(), v_u32x8 = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i m_noise = load8(noises->m + i), v_noise = load8(noises->v + i);
        __m256i m_rounded = rounded8(sizes8(bits8(m_f32 + i)), m_noise, by.m_shift);
        __m256i v_rounded = rounded8(sizes8(bits8(v_f32 + i)), v_noise, by.v_shift);
        m_u32x8 = _mm256_max_epi32(m_u32x8, m_rounded);
        v_u32x8 = _mm256_max_epi32(v_u32x8, v_rounded);
    }
    struct largest found = {largest_lane(m_u32x8), largest_lane(v_u32x8)};
    return largest_tail(i, n, m_f32, v_f32, noises, found, by);
}

/* Grid steps from base to the rounded size: at most 1 for a size below the smallest code. */
TARGET_AVX2 INLINED __m256i steps8(__m256i rounded, uint32_t base, int shift) {
    return _mm256_srai_epi32(_mm256_sub_epi32(rounded, all8(base)), shift);
}

/* Stores the low bytes of 8 lanes, each at most 0xFF. */
TARGET_AVX2 static inline void store_codes8(uint8_t *address, __m256i codes) {
    __m128i u16x8 = pack8(codes);
    _mm_storel_epi64((__m128i *)address, _mm_packus_epi16(u16x8, u16x8));
}

TARGET_AVX2 INLINED __m256i m_codes8(__m256i bits, uint32_t base, __m256i noise, int shift) {
    __m256i size = sizes8(bits);
    uint32_t smallest = base + (1u << shift);
    __m256i is_small = _mm256_cmpgt_epi32(all8(smallest), size);
    __m256 rest = _mm256_cvtepi32_ps(_mm256_sub_epi32(all8(1u << CODE_NOISE), noise));
    __m256 threshold = _mm256_mul_ps(rest, _mm256_set1_ps(f32_of(smallest) * 0x1p-20f));
    __m256i stays = _mm256_cmpgt_epi32(_mm256_castps_si256(threshold), size);
    __m256i small_code = _mm256_andnot_si256(stays, all8(1));
    __m256i steps = steps8(rounded8(size, noise, shift), base, shift);
    __m256i code = _mm256_blendv_epi8(steps, small_code, is_small);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), all8(0x80));
    return _mm256_or_si256(sign, code);
}

TARGET_AVX2 INLINED __m256i v_codes8(__m256i bits, uint32_t base, __m256i noise, int shift) {
    __m256i rounded = rounded8(sizes8(bits), noise, shift);
    __m256i is_zero = _mm256_cmpgt_epi32(all8(1u << shift), rounded);
    return _mm256_andnot_si256(is_zero, _mm256_max_epi32(steps8(rounded, base, shift), all8(1)));
}

TARGET_AVX2 INLINED void quantize_by(size_t n, const float *m_f32, const float *v_f32,
                                     const struct noises *noises, uint8_t *m, uint8_t *v,
                                     float *scale, struct coding by) {
    struct largest largest = largest8(n, m_f32, v_f32, noises, by);
    struct grids grids = store_scales(scale, largest.m, largest.v, by);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i m_noise = load8(noises->m + i), v_noise = load8(noises->v + i);
        store_codes8(m + i, m_codes8(bits8(m_f32 + i), grids.m_base, m_noise, by.m_shift));
        store_codes8(v + i, v_codes8(bits8(v_f32 + i), grids.v_base, v_noise, by.v_shift));
    }
    quantize_tail(i, n, m_f32, v_f32, noises, m, v, grids, by);
}

CODES_FUNCTIONS(TARGET_AVX2, avx2)
#endif
