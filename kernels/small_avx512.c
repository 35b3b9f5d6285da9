/* The steps on small moments, STATE_BLOCK elements at a time: the same bits as widening, adamw and
 * rounding one after the other (moments.c), in registers.
 *
 * [Note: even and odd]
 * 32 elements of 16 bits are two registers of fp32: the even ones, x << 16, and the odd ones, the
 * upper halves.  That takes no shuffle, which has one port of its own, and going back is a shift
 * and a blend. */
#include "moments.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx512.h"
#include "cast_avx512.h"
#include "moments_avx512.h"

#define ODD_WORDS ((__mmask32)0xAAAAAAAAu)

struct pair {
    __m512i even, odd; /* bits of fp32 */
};

TARGET_AVX512 static inline __m512i all_words(uint32_t value) {
    return _mm512_set1_epi16((short)value);
}

/* Words become upper halves over zeros. */
TARGET_AVX512 static inline struct pair widen32(__m512i words) {
    return (struct pair){_mm512_slli_epi32(words, 16),
                         _mm512_and_si512(words, all16(0xFFFF0000u))};
}

/* The upper halves. */
TARGET_AVX512 static inline __m512i upper32(struct pair bits) {
    return _mm512_mask_blend_epi16(ODD_WORDS, _mm512_srli_epi32(bits.even, 16), bits.odd);
}

TARGET_AVX512 static inline struct pair join32(const uint16_t *hi, const int16_t *lo) {
    __m512i lo_i16x32 = _mm512_loadu_si512(lo);
    /* lo is signed: where it is negative, one less above it. */
    __m512i hi_u16x32 =
        _mm512_add_epi16(_mm512_loadu_si512(hi), _mm512_srai_epi16(lo_i16x32, 15));
    return (struct pair){
        _mm512_mask_blend_epi16(ODD_WORDS, lo_i16x32, _mm512_slli_epi32(hi_u16x32, 16)),
        _mm512_mask_blend_epi16(ODD_WORDS, _mm512_srli_epi32(lo_i16x32, 16), hi_u16x32)};
}

TARGET_AVX512 static inline void split32(struct pair p, uint16_t *hi, int16_t *lo) {
    struct pair rounded = {_mm512_add_epi32(p.even, all16(0x8000)),
                           _mm512_add_epi32(p.odd, all16(0x8000))};
    _mm512_storeu_si512(hi, upper32(rounded));
    _mm512_storeu_si512(
        lo, _mm512_mask_blend_epi16(ODD_WORDS, p.even, _mm512_slli_epi32(p.odd, 16)));
}

TARGET_AVX512 static inline struct pair load_grad32(const void *grad, size_t i, bool is_f32) {
    if (!is_f32) {
        const uint16_t *bf16 = (const uint16_t *)grad + i;
        fetch_ahead(bf16, sizeof *bf16);
        return widen32(_mm512_loadu_si512(bf16));
    }
    const float *f32 = (const float *)grad + i;
    fetch_ahead(f32, sizeof *f32);
    __m512i low = _mm512_loadu_si512(f32), high = _mm512_loadu_si512(f32 + 16);
    __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i odds = _mm512_or_si512(evens, all16(1));
    return (struct pair){_mm512_permutex2var_epi32(low, evens, high),
                         _mm512_permutex2var_epi32(low, odds, high)};
}

/* hi and lo of 32 elements, and m and v in registers, go one step on. */
TARGET_AVX512 static inline void update32(uint16_t *hi, int16_t *lo, struct pair *m,
                                          struct pair *v, struct pair grad,
                                          const struct broadcast *b) {
    struct pair p = join32(hi, lo);
    __m512 p_even = _mm512_castsi512_ps(p.even), p_odd = _mm512_castsi512_ps(p.odd);
    __m512 m_even = _mm512_castsi512_ps(m->even), m_odd = _mm512_castsi512_ps(m->odd);
    __m512 v_even = _mm512_castsi512_ps(v->even), v_odd = _mm512_castsi512_ps(v->odd);
    update16(&p_even, &m_even, &v_even, _mm512_castsi512_ps(grad.even), b);
    update16(&p_odd, &m_odd, &v_odd, _mm512_castsi512_ps(grad.odd), b);
    p = (struct pair){_mm512_castps_si512(canonical16(p_even)),
                      _mm512_castps_si512(canonical16(p_odd))};
    split32(p, hi, lo);
    *m = (struct pair){_mm512_castps_si512(m_even), _mm512_castps_si512(m_odd)};
    *v = (struct pair){_mm512_castps_si512(v_even), _mm512_castps_si512(v_odd)};
}

TARGET_AVX512 static inline __m512i canonical_bits16(__m512i bits) {
    return _mm512_castps_si512(canonical16(_mm512_castsi512_ps(bits)));
}

/* Lanes whose magnitude is below limit, as floats: no NaN is. */
TARGET_AVX512 static inline __mmask16 below16(__m512i bits, uint32_t limit) {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(sizes16(bits)),
                              _mm512_castsi512_ps(all16(limit)), _CMP_LT_OQ);
}

TARGET_AVX512 static inline __m512i round32(struct pair bits, struct pair noise) {
    __mmask16 even = below16(bits.even, BF16_MAX), odd = below16(bits.odd, BF16_MAX);
    if (__builtin_expect((even & odd) == 0xFFFF, 1)) {
        bits.even = _mm512_add_epi32(bits.even, noise.even);
        bits.odd = _mm512_add_epi32(bits.odd, noise.odd);
    } else {
        bits.even = _mm512_mask_add_epi32(canonical_bits16(bits.even), even, bits.even, noise.even);
        bits.odd = _mm512_mask_add_epi32(canonical_bits16(bits.odd), odd, bits.odd, noise.odd);
    }
    return upper32(bits);
}

TARGET_AVX512 static inline struct pair noise32(uint64_t key, uint32_t counter) {
    __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return (struct pair){noise_at16(key, counter, evens),
                         noise_at16(key, counter + 1, evens)};
}

TARGET_AVX512 static inline void step16(uint16_t *restrict hi, int16_t *restrict lo,
                                        uint16_t *restrict m, uint16_t *restrict v,
                                        const void *restrict grad, bool is_f32,
                                        const struct infinity_adamw *s, uint64_t key,
                                        uint32_t counter) {
    const struct broadcast b = broadcast(s);
    for (size_t i = 0; i < STATE_BLOCK; i += 32) {
        fetch_ahead(hi + i, sizeof *hi);
        fetch_ahead(lo + i, sizeof *lo);
        fetch_ahead(m + i, sizeof *m);
        fetch_ahead(v + i, sizeof *v);
        struct pair m_bits = widen32(_mm512_loadu_si512(m + i));
        struct pair v_bits = widen32(_mm512_loadu_si512(v + i));
        update32(hi + i, lo + i, &m_bits, &v_bits, load_grad32(grad, i, is_f32), &b);
        struct pair noise = noise32(key, counter + (uint32_t)i);
        struct pair m_noise = {_mm512_and_si512(noise.even, all16(0xFFFF)),
                               _mm512_and_si512(noise.odd, all16(0xFFFF))};
        struct pair v_noise = {_mm512_srli_epi32(noise.even, 16), _mm512_srli_epi32(noise.odd, 16)};
        _mm512_storeu_si512(m + i, round32(m_bits, m_noise));
        _mm512_storeu_si512(v + i, round32(v_bits, v_noise));
    }
}

/* base + c * GRID_STEP for 32 codes: the lower half of a grid point is 0, so words do. */
TARGET_AVX512 static inline __m512i points32(__m512i c, uint32_t base) {
    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(c, c), _mm512_slli_epi16(c, 4),
                                  all_words(base >> 16));
}

TARGET_AVX512 static inline __m512i load_codes32(const uint8_t *codes) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
}

TARGET_AVX512 static inline struct pair m_bits32(const uint8_t *codes, uint32_t base) {
    __m512i c = load_codes32(codes);
    __m512i size = points32(_mm512_and_si512(c, all_words(M_CODES)), base);
    /* size, and the code's bit 7 in bit 15 */
    return widen32(_mm512_ternarylogic_epi32(size, _mm512_slli_epi16(c, 8), all_words(0x8000),
                                             0xF8));
}

/* Two times 32 words of at most 255 become 64 bytes. */
TARGET_AVX512 static inline void store_codes64(uint8_t *codes, __m512i low, __m512i high) {
    __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    _mm512_storeu_si512(codes,
                        _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high)));
}

/* bits + (the low or the high half of the noise << 4 | 8): the grid point is in the upper words. */
TARGET_AVX512 static inline __m512i m_rounded32(struct pair bits, struct pair noise) {
    return upper32((struct pair){_mm512_add_epi32(bits.even, m_noise16(noise.even)),
                                 _mm512_add_epi32(bits.odd, m_noise16(noise.odd))});
}

TARGET_AVX512 static inline __m512i v_rounded32(struct pair bits, struct pair noise) {
    return upper32((struct pair){_mm512_add_epi32(bits.even, v_noise16(noise.even)),
                                 _mm512_add_epi32(bits.odd, v_noise16(noise.odd))});
}

/* Codes of rounded magnitudes' upper words; *least: the smallest distance from code 0 so far. */
TARGET_AVX512 static inline __m512i m_codes32(__m512i words, uint32_t base, __m512i *least) {
    __m512i size = _mm512_and_si512(words, all_words(0x7FFF));
    __m512i d = _mm512_sub_epi16(size, all_words(base >> 16));
    *least = _mm512_min_epi16(*least, d);
    __m512i c = _mm512_srli_epi16(d, 4);
    /* c, and the sign in bit 7 */
    return _mm512_ternarylogic_epi32(c, _mm512_srli_epi16(words, 8), all_words(0x80), 0xF8);
}

TARGET_AVX512 static inline __m512i v_codes32(__m512i words, uint32_t base, __m512i *least) {
    __m512i d = _mm512_sub_epi16(words, all_words(base >> 16));
    *least = _mm512_min_epi16(*least, d);
    return _mm512_srli_epi16(d, 4);
}

/* One block's new moments, 32 at a time, and the largest of them. */
struct block {
    struct pair m[STATE_BLOCK / 32], v[STATE_BLOCK / 32];
    struct largest largest;
};

TARGET_AVX512 static inline void store_in_order32(float *f32, struct pair bits) {
    __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i high = _mm512_add_epi32(low, all16(8));
    __m512i even = canonical_bits16(bits.even), odd = canonical_bits16(bits.odd);
    _mm512_storeu_si512(f32, _mm512_permutex2var_epi32(even, low, odd));
    _mm512_storeu_si512(f32 + 16, _mm512_permutex2var_epi32(even, high, odd));
}

/* The codes of any block, through memory. */
TARGET_AVX512 static void quantize_any(const struct block *block, uint8_t *m, uint8_t *v,
                                       float *scale, uint64_t key, uint32_t counter) {
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    for (size_t i = 0; i < STATE_BLOCK; i += 32) {
        store_in_order32(m_f32 + i, block->m[i / 32]);
        store_in_order32(v_f32 + i, block->v[i / 32]);
    }
    quantize_noisily_avx512(STATE_BLOCK, m_f32, v_f32, m, v, scale, key, counter);
}

/* The codes of a block without infinities and NaNs; false where one moment stays below the smallest
 * code: other rules hold for it.  (One that is rounded up to that code gets it by those rules, too:
 * what it lacks is at most noise / 2^23 of it, and noise / 2^20 is allowed.) */
TARGET_AVX512 static inline bool quantize_plain(const struct block *block, struct grids grids,
                                                uint8_t *m, uint8_t *v, uint64_t key,
                                                uint32_t counter) {
    __m512i least = all_words(0x7FFF);
    for (size_t i = 0; i < STATE_BLOCK; i += 64) {
        __m512i m_codes[2], v_codes[2];
        for (size_t half = 0; half < 2; half++) {
            struct pair noise = noise32(key, counter + (uint32_t)(i + 32 * half));
            __m512i m_words = m_rounded32(block->m[i / 32 + half], noise);
            __m512i v_words = v_rounded32(block->v[i / 32 + half], noise);
            m_codes[half] = m_codes32(m_words, grids.m_base, &least);
            v_codes[half] = v_codes32(v_words, grids.v_base, &least);
        }
        store_codes64(m + i, m_codes[0], m_codes[1]);
        store_codes64(v + i, v_codes[0], v_codes[1]);
    }
    return _mm512_cmplt_epi16_mask(least, all_words(GRID_STEP >> 16)) == 0;
}

TARGET_AVX512 static inline void quantize_block(const struct block *block, uint8_t *m, uint8_t *v,
                                                float *scale, uint64_t key, uint32_t counter) {
    if (block->largest.m < GRID_MAX && block->largest.v < GRID_MAX) {
        struct grids grids = store_scales(scale, block->largest);
        if (quantize_plain(block, grids, m, v, key, counter)) return;
    }
    quantize_any(block, m, v, scale, key, counter);
}

/* One block on: hi, lo, codes and scales. */
TARGET_AVX512 static inline void step8(uint16_t *restrict hi, int16_t *restrict lo,
                                       uint8_t *restrict m, uint8_t *restrict v,
                                       float *restrict scale, const void *restrict grad,
                                       bool is_f32, const struct infinity_adamw *s, uint64_t key,
                                       uint32_t counter) {
    const struct broadcast b = broadcast(s);
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
    struct block block;
    __m512i m_most = _mm512_setzero_si512(), v_most = m_most;
    for (size_t i = 0; i < STATE_BLOCK; i += 32) {
        fetch_ahead(hi + i, sizeof *hi);
        fetch_ahead(lo + i, sizeof *lo);
        /* A line of codes is two of weights; the two fields take turns. */
        fetch_ahead(i % 64 == 0 ? m + i : v + i, sizeof *m);
        struct pair m_bits = m_bits32(m + i, grids.m_base);
        struct pair v_bits = widen32(points32(load_codes32(v + i), grids.v_base));
        update32(hi + i, lo + i, &m_bits, &v_bits, load_grad32(grad, i, is_f32), &b);
        block.m[i / 32] = m_bits;
        block.v[i / 32] = v_bits;
        __m512i even = sizes16(m_bits.even), odd = sizes16(m_bits.odd);
        m_most = _mm512_max_epu32(m_most, _mm512_max_epu32(even, odd));
        v_most = _mm512_max_epu32(v_most, _mm512_max_epu32(v_bits.even, v_bits.odd));
    }
    block.largest =
        (struct largest){_mm512_reduce_max_epu32(m_most), _mm512_reduce_max_epu32(v_most)};
    quantize_block(&block, m, v, scale, key, counter);
}

TARGET_AVX512 void adamw16_avx512(uint16_t *restrict hi, int16_t *restrict lo,
                                  uint16_t *restrict m, uint16_t *restrict v,
                                  const void *restrict grad, bool is_f32,
                                  const struct infinity_adamw *s, uint64_t key, uint32_t counter) {
    if (is_f32)
        step16(hi, lo, m, v, grad, true, s, key, counter);
    else
        step16(hi, lo, m, v, grad, false, s, key, counter);
}

TARGET_AVX512 void adamw8_avx512(uint16_t *restrict hi, int16_t *restrict lo, uint8_t *restrict m,
                                 uint8_t *restrict v, float *restrict scale,
                                 const void *restrict grad, bool is_f32,
                                 const struct infinity_adamw *s, uint64_t key, uint32_t counter) {
    if (is_f32)
        step8(hi, lo, m, v, scale, grad, true, s, key, counter);
    else
        step8(hi, lo, m, v, scale, grad, false, s, key, counter);
}
#endif
