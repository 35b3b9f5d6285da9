/* The steps on small moments, whole blocks at a time: the same bits as widening, adamw and rounding
 * one after the other (moments.c), in registers.
 *
 * [Note: even and odd]
 * 32 elements of 16 bits are two registers of fp32: the even ones, x << 16, and the odd ones, the
 * upper halves.  That takes no shuffle, which has one port of its own, and going back is a shift
 * and a blend.  The hash of 16 pairs of elements is the noise of both.
 *
 * [Note: in the divider's shadow]
 * A root and a division keep the divider busy for 23 cycles per 16 elements, and what waits for
 * them fills the scheduler, so that nothing behind can start.  So each turn of a loop first asks
 * for the divisions of the 32 elements whose roots the turn before has begun, then does all that
 * the next 32 need up to their roots, and only then takes the quotients. */
#include "moments.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx512.h"
#include "cast_avx512.h"
#include "moments_avx512.h"

/* Once for each type of gradient. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

#define ODD_WORDS ((__mmask32)0xAAAAAAAAu)

struct pair {
    __m512i even, odd; /* bits of fp32 */
};

/* What is left of a step once m and v are new. */
struct begun {
    __m512 p_even, p_odd, root_even, root_odd, change_even, change_odd;
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

TARGET_AVX512 static inline struct pair sum32(struct pair a, struct pair b) {
    return (struct pair){_mm512_add_epi32(a.even, b.even), _mm512_add_epi32(a.odd, b.odd)};
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
    struct pair half = {all16(0x8000), all16(0x8000)};
    _mm512_storeu_si512(hi, upper32(sum32(p, half)));
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

TARGET_AVX512 static inline struct pair canonical32(struct pair bits) {
    return (struct pair){
        _mm512_castps_si512(canonical16(_mm512_castsi512_ps(bits.even))),
        _mm512_castps_si512(canonical16(_mm512_castsi512_ps(bits.odd)))};
}

/* Makes m and v new, and begins their roots.  p, the masters, come along: read later, at the place
 * in their pages where m and v have just been written, they would wait for that to be over. */
TARGET_AVX512 static inline struct begun begin32(struct pair p, struct pair *m, struct pair *v,
                                                 struct pair grad, const struct broadcast *b) {
    __m512 m_even = _mm512_castsi512_ps(m->even), m_odd = _mm512_castsi512_ps(m->odd);
    __m512 v_even = _mm512_castsi512_ps(v->even), v_odd = _mm512_castsi512_ps(v->odd);
    move_moments16(&m_even, &v_even, _mm512_castsi512_ps(grad.even), b);
    move_moments16(&m_odd, &v_odd, _mm512_castsi512_ps(grad.odd), b);
    *m = (struct pair){_mm512_castps_si512(m_even), _mm512_castps_si512(m_odd)};
    *v = (struct pair){_mm512_castps_si512(v_even), _mm512_castps_si512(v_odd)};
    return (struct begun){_mm512_mul_ps(_mm512_castsi512_ps(p.even), b->decay),
                          _mm512_mul_ps(_mm512_castsi512_ps(p.odd), b->decay),
                          _mm512_sqrt_ps(v_even),
                          _mm512_sqrt_ps(v_odd),
                          _mm512_mul_ps(b->step_factor, m_even),
                          _mm512_mul_ps(b->step_factor, m_odd)};
}

/* What the weights are moved by. */
struct moves {
    __m512 p_even, p_odd, even, odd;
};

TARGET_AVX512 static inline struct moves divide32(struct begun begun, const struct broadcast *b) {
    __m512 even = quotient16(begun.change_even, begun.root_even, b);
    __m512 odd = quotient16(begun.change_odd, begun.root_odd, b);
    /* The compiler would move the divisions to where they are used. */
    __asm__ volatile("" : "+v"(even), "+v"(odd));
    return (struct moves){begun.p_even, begun.p_odd, even, odd};
}

TARGET_AVX512 static inline void finish32(uint16_t *hi, int16_t *lo, struct moves moves) {
    __m512 even = _mm512_add_ps(moves.p_even, moves.even);
    __m512 odd = _mm512_add_ps(moves.p_odd, moves.odd);
    struct pair p = {_mm512_castps_si512(even), _mm512_castps_si512(odd)};
    if (__builtin_expect(_mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q) != 0, 0)) p = canonical32(p);
    split32(p, hi, lo);
}

/* Of the hash of 16 pairs, the lowest and the highest `width` bits. */
struct noise {
    struct pair m, v;
};

TARGET_AVX512 static inline struct noise noise32(uint64_t key, uint64_t element, int width) {
    __m512i hash = hash16(key, (uint32_t)(element / 2));
    __m512i low = _mm512_and_si512(hash, all16((1u << width) - 1));
    __m512i high = _mm512_srli_epi32(hash, (unsigned)(32 - width));
    return (struct noise){{low, high}, {high, low}};
}

/* Whether one of 64 magnitudes may be as large as limit.  Ors are larger than what they are made
 * of, so that now and then (1.5 or 3) they look large where nothing is. */
TARGET_AVX512 static inline __m512i any_of64(__m512i so_far, struct pair bits) {
    return _mm512_ternarylogic_epi32(so_far, bits.even, bits.odd, 0xFE);
}

/* Lanes whose magnitude is below limit, as floats: no NaN is. */
TARGET_AVX512 static inline __mmask16 below16(__m512i bits, uint32_t limit) {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(sizes16(bits)),
                              _mm512_castsi512_ps(all16(limit)), _CMP_LT_OQ);
}

/* Noise where there may be some: [Note: bf16 moments]. */
TARGET_AVX512 static inline struct pair rounded_any32(struct pair bits, struct pair noise) {
    bits = canonical32(bits);
    return (struct pair){
        _mm512_mask_add_epi32(bits.even, below16(bits.even, BF16_MAX), bits.even, noise.even),
        _mm512_mask_add_epi32(bits.odd, below16(bits.odd, BF16_MAX), bits.odd, noise.odd)};
}

TARGET_AVX512 static inline struct begun begin16(struct pair p, uint16_t *m, uint16_t *v,
                                                 struct pair grad,
                                                 const struct broadcast *b, uint64_t key,
                                                 uint64_t element) {
    struct pair m_bits = widen32(_mm512_loadu_si512(m)), v_bits = widen32(_mm512_loadu_si512(v));
    struct begun begun = begin32(p, &m_bits, &v_bits, grad, b);
    struct noise noise = noise32(key, element, 16);
    __m512i any = _mm512_ternarylogic_epi32(m_bits.even, m_bits.odd, all16(SIZE_MASK), 0xA8);
    any = any_of64(any, v_bits);
    if (__builtin_expect(_mm512_cmpge_epu32_mask(any, all16(BF16_MAX)) != 0, 0)) {
        m_bits = rounded_any32(m_bits, noise.m);
        v_bits = rounded_any32(v_bits, noise.v);
    } else {
        m_bits = sum32(m_bits, noise.m);
        v_bits = sum32(v_bits, noise.v);
    }
    _mm512_storeu_si512(m, upper32(m_bits));
    _mm512_storeu_si512(v, upper32(v_bits));
    return begun;
}

TARGET_AVX512 static ALWAYS_INLINE void step16(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                        uint16_t *restrict m, uint16_t *restrict v,
                                        const void *restrict grad, bool is_f32,
                                        const struct infinity_adamw *s, uint64_t key,
                                        uint64_t first) {
    const struct broadcast b = broadcast(s);
    struct begun begun = {0};
    for (size_t i = 0; i < n; i += 32) {
        fetch_ahead(hi + i, sizeof *hi);
        fetch_ahead(lo + i, sizeof *lo);
        fetch_ahead(m + i, sizeof *m);
        fetch_ahead(v + i, sizeof *v);
        struct moves moves = divide32(begun, &b);
        struct pair p = join32(hi + i, lo + i);
        begun = begin16(p, m + i, v + i, load_grad32(grad, i, is_f32), &b, key, first + i);
        if (i != 0) finish32(hi + i - 32, lo + i - 32, moves);
    }
    finish32(hi + n - 32, lo + n - 32, divide32(begun, &b));
}

/* base + c * GRID_STEP for 32 codes: the lower half of a grid point is 0, so words do. */
TARGET_AVX512 static inline struct pair m_bits32(const uint8_t *codes, uint32_t base) {
    /* The sign goes to all bits above the code's seven. */
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __mmask32 is_some = _mm512_test_epi16_mask(c, all_words(M_CODES));
    __m512i signed_c = _mm512_and_si512(_mm512_slli_epi16(c, 4), all_words(0x87F0));
    return widen32(_mm512_mask_add_epi16(signed_c, is_some, signed_c, all_words(base >> 16)));
}

TARGET_AVX512 static inline struct pair v_bits32(const uint8_t *codes, uint32_t base) {
    __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    return widen32(_mm512_maskz_add_epi16(_mm512_test_epi16_mask(c, c), _mm512_slli_epi16(c, 4),
                                          all_words(base >> 16)));
}

/* One block's new moments: as bits, and the upper words of them and their noise, which hold the
 * grid point and, below it, four bits without meaning.  The largest of those, and any bit set. */
struct block {
    struct pair m[STATE_BLOCK / 32], v[STATE_BLOCK / 32];
    __m512i m_words[STATE_BLOCK / 32], v_words[STATE_BLOCK / 32];
    __m512i m_most, v_most, m_any, v_any;
};

TARGET_AVX512 static inline void keep32(struct block *block, size_t at, struct pair m,
                                        struct pair v, struct noise noise) {
    __m512i m_words = upper32(sum32(m, noise.m)), v_words = upper32(sum32(v, noise.v));
    block->m[at] = m;
    block->v[at] = v;
    block->m_words[at] = m_words;
    block->v_words[at] = v_words;
    block->m_any = any_of64(block->m_any, m);
    block->v_any = any_of64(block->v_any, v);
    __m512i m_sizes = _mm512_and_si512(m_words, all_words(0x7FFF));
    block->m_most = _mm512_max_epu16(block->m_most, m_sizes);
    block->v_most = _mm512_max_epu16(block->v_most, v_words);
}

TARGET_AVX512 static inline uint32_t largest_word(__m512i words) {
    __m512i even = _mm512_and_si512(words, all16(0xFFFF)), odd = _mm512_srli_epi32(words, 16);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd));
}

TARGET_AVX512 static inline void store_in_order32(float *f32, struct pair bits) {
    __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i high = _mm512_add_epi32(low, all16(8));
    _mm512_storeu_si512(f32, _mm512_permutex2var_epi32(bits.even, low, bits.odd));
    _mm512_storeu_si512(f32 + 16, _mm512_permutex2var_epi32(bits.even, high, bits.odd));
}

/* The codes of any block, through memory. */
TARGET_AVX512 static void quantize_any(const struct block *block, uint8_t *m, uint8_t *v,
                                       float *scale, uint64_t key, uint64_t first) {
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    struct noises noises;
    for (size_t i = 0; i < STATE_BLOCK; i += 32) {
        store_in_order32(m_f32 + i, block->m[i / 32]);
        store_in_order32(v_f32 + i, block->v[i / 32]);
    }
    noise_avx512(STATE_BLOCK, key, first, GRID_SHIFT, noises.m, noises.v);
    quantize_avx512(STATE_BLOCK, m_f32, v_f32, &noises, m, v, scale);
}

/* Two times 32 words of at most 255 become 64 bytes. */
TARGET_AVX512 static inline void store_codes64(uint8_t *codes, __m512i low, __m512i high) {
    __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    _mm512_storeu_si512(codes,
                        _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high)));
}

/* Codes of words; *least: the smallest distance from code 0 so far. */
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

/* The codes of a block without infinities and NaNs; false where one moment stays below the smallest
 * code: other rules hold for it.  (One that is rounded up to that code gets it by those rules, too:
 * what it lacks is at most noise / 2^23 of it, and noise / 2^20 is allowed.) */
TARGET_AVX512 static inline bool quantize_plain(const struct block *block, struct grids grids,
                                                uint8_t *m, uint8_t *v) {
    __m512i least = all_words(0x7FFF);
    for (size_t i = 0; i < STATE_BLOCK; i += 64) {
        const __m512i *m_words = block->m_words + i / 32, *v_words = block->v_words + i / 32;
        store_codes64(m + i, m_codes32(m_words[0], grids.m_base, &least),
                      m_codes32(m_words[1], grids.m_base, &least));
        store_codes64(v + i, v_codes32(v_words[0], grids.v_base, &least),
                      v_codes32(v_words[1], grids.v_base, &least));
    }
    return _mm512_cmplt_epi16_mask(least, all_words(GRID_STEP >> 16)) == 0;
}

TARGET_AVX512 static inline void quantize_block(const struct block *block, uint8_t *m, uint8_t *v,
                                                float *scale, uint64_t key, uint64_t first) {
    __m512i any = _mm512_or_si512(sizes16(block->m_any), block->v_any);
    if (_mm512_cmpge_epu32_mask(any, all16(GRID_MAX)) == 0) {
        struct grids grids = store_scales(scale, largest_word(block->m_most) << 16,
                                          largest_word(block->v_most) << 16);
        if (quantize_plain(block, grids, m, v)) return;
    }
    quantize_any(block, m, v, scale, key, first);
}

/* Begins 32 elements of a block: their codes are read, their new moments kept. */
TARGET_AVX512 static inline struct begun begin8(struct pair p, const uint8_t *m, const uint8_t *v,
                                                struct grids grids, struct pair grad,
                                                const struct broadcast *b, struct noise noise,
                                                struct block *block, size_t at) {
    struct pair m_bits = m_bits32(m, grids.m_base), v_bits = v_bits32(v, grids.v_base);
    struct begun begun = begin32(p, &m_bits, &v_bits, grad, b);
    keep32(block, at, m_bits, v_bits, noise);
    return begun;
}

TARGET_AVX512 static ALWAYS_INLINE void step8(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                       uint8_t *restrict m, uint8_t *restrict v,
                                       float *restrict scale, const void *restrict grad,
                                       bool is_f32, const struct infinity_adamw *s, uint64_t key,
                                       uint64_t first) {
    const struct broadcast b = broadcast(s);
    struct begun begun = {0};
    for (size_t start = 0; start < n; start += STATE_BLOCK, scale += 2) {
        struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
        struct block block;
        block.m_most = block.v_most = block.m_any = block.v_any = _mm512_setzero_si512();
        for (size_t at = 0; at < STATE_BLOCK / 32; at++) {
            size_t i = start + 32 * at;
            fetch_ahead(hi + i, sizeof *hi);
            fetch_ahead(lo + i, sizeof *lo);
            /* A line of codes is two of weights; the two fields take turns. */
            fetch_ahead(at % 2 == 0 ? m + i : v + i, sizeof *m);
            struct moves moves = divide32(begun, &b);
            struct pair p = join32(hi + i, lo + i);
            begun = begin8(p, m + i, v + i, grids, load_grad32(grad, i, is_f32), &b,
                           noise32(key, first + i, GRID_SHIFT), &block, at);
            if (i != 0) finish32(hi + i - 32, lo + i - 32, moves);
        }
        quantize_block(&block, m + start, v + start, scale, key, first + start);
    }
    finish32(hi + n - 32, lo + n - 32, divide32(begun, &b));
}

TARGET_AVX512 void adamw16_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                  uint16_t *restrict m, uint16_t *restrict v,
                                  const void *restrict grad, bool is_f32,
                                  const struct infinity_adamw *s, uint64_t key, uint64_t first) {
    if (is_f32)
        step16(n, hi, lo, m, v, grad, true, s, key, first);
    else
        step16(n, hi, lo, m, v, grad, false, s, key, first);
}

TARGET_AVX512 void adamw8_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                 uint8_t *restrict m, uint8_t *restrict v, float *restrict scale,
                                 const void *restrict grad, bool is_f32,
                                 const struct infinity_adamw *s, uint64_t key, uint64_t first) {
    if (is_f32)
        step8(n, hi, lo, m, v, scale, grad, true, s, key, first);
    else
        step8(n, hi, lo, m, v, scale, grad, false, s, key, first);
}
#endif
