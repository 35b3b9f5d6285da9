/* The step on 8-bit moments, whole blocks at a time. */
#include <math.h>

#include "moments.h"

#ifdef INFINITY_X86
#include "small_avx512.h"

/* More constants, as in struct broadcast. */
struct masks {
    __m512i m_codes, signed_codes, sizes, signs, order;
};

TARGET_AVX512 static inline struct masks masks(void) {
    return (struct masks){kept(all_words(M_CODES)), kept(all_words(0x87F0)),
                          kept(all_words(0x7FFF)), kept(_mm512_set1_epi8(-128)),
                          kept(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0))};
}

/* base + c * GRID_STEP for 32 codes: the lower half of a grid point is 0, so words do. */
TARGET_AVX512 static inline struct pair m_bits32(const uint8_t *codes, __m512i base,
                                                 const struct broadcast *b,
                                                 const struct masks *masks) {
    /* The sign goes to all bits above the code's seven. */
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __mmask32 is_some = _mm512_test_epi16_mask(c, masks->m_codes);
    __m512i signed_c = _mm512_and_si512(_mm512_slli_epi16(c, 4), masks->signed_codes);
    return widen32(_mm512_mask_add_epi16(signed_c, is_some, signed_c, base), b);
}

TARGET_AVX512 static inline struct pair v_bits32(const uint8_t *codes, __m512i base,
                                                 const struct broadcast *b) {
    __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __mmask32 is_some = _mm512_test_epi16_mask(c, c);
    return widen32(_mm512_maskz_add_epi16(is_some, _mm512_slli_epi16(c, 4), base), b);
}

/* One block's new moments: the upper words of them and their noise, which hold the grid point and,
 * below it, four bits without meaning, and the same of m's magnitudes.  And its old codes, to begin
 * again from where a plain block was expected and is not. */
struct block {
    uint8_t m_old[STATE_BLOCK], v_old[STATE_BLOCK];
    float old_scale[2];
    __m512i m_words[STATE_BLOCK / 32], m_sizes[STATE_BLOCK / 32], v_words[STATE_BLOCK / 32];
};

/* The largest of those. */
struct most {
    __m512i m, v;
};

TARGET_AVX512 static inline void keep32(struct block *block, size_t at, struct most *most,
                                        struct pair m, struct pair v, struct noise noise,
                                        const struct broadcast *b, const struct masks *masks) {
    __m512i m_words = upper32(sum32(m, noise.m), b), v_words = upper32(sum32(v, noise.v), b);
    __m512i m_sizes = _mm512_and_si512(m_words, masks->sizes);
    block->m_words[at] = m_words;
    block->m_sizes[at] = m_sizes;
    block->v_words[at] = v_words;
    most->m = _mm512_max_epu16(most->m, m_sizes);
    most->v = _mm512_max_epu16(most->v, v_words);
}

TARGET_AVX512 static inline uint32_t largest_word(__m512i words) {
    __m256i of16 = _mm256_max_epu16(_mm512_castsi512_si256(words),
                                    _mm512_extracti64x4_epi64(words, 1));
    __m128i of8 = _mm_max_epu16(_mm256_castsi256_si128(of16), _mm256_extracti128_si256(of16, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(of8, _mm_set1_epi16(-1)));
    return (uint32_t)_mm_extract_epi16(least, 0) ^ 0xFFFF;
}

/* Above so many, all of a block's codes are made anew at once. */
#define MOST_SINGLY 32

/* What a step on 8-bit moments reads and writes, from some block on. */
struct codes {
    uint8_t *m, *v;
    float *scale;
    const void *grad;
    int32_t type;
    const struct infinity_adamw_small *scalars;
    uint64_t key, first;
};

/* The codes of any block, through memory: its new moments once more, from its old codes. */
TARGET_AVX512 static void quantize_any(const struct block *block, const struct codes *c) {
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    uint16_t hi[STATE_BLOCK] = {0}; /* of no weight */
    int16_t lo[STATE_BLOCK] = {0};
    struct noises noises;
    dequantize_avx512(STATE_BLOCK, block->m_old, block->v_old, block->old_scale, m_f32, v_f32);
    adamw_small_avx512(STATE_BLOCK, hi, lo, m_f32, v_f32, c->grad, c->type, c->scalars);
    noise_avx512(STATE_BLOCK, c->key, c->first, GRID_SHIFT, noises.m, noises.v);
    quantize_avx512(STATE_BLOCK, m_f32, v_f32, &noises, c->m, c->v, c->scale);
}

/* The codes of element i alone, once more from the old ones. */
static void quantize_one(const struct block *block, const struct codes *c, struct grids grids,
                         size_t i) {
    const struct infinity_adamw_small *s = c->scalars;
    struct grids old = grids_of(load_u32(block->old_scale), load_u32(block->old_scale + 1));
    float m = f32_of(m_bits(block->m_old[i], old.m_base));
    float v = f32_of(v_bits(block->v_old[i], old.v_base));
    const void *grad = grad_at(c->grad, i, c->type);
    float g = f32_of(c->type == INFINITY_F32 ? load_u32(grad) : (uint32_t)load_u16(grad) << 16);
    float t = g * s->root_weight;
    m = fmaf(m, s->beta1, g * s->grad_weight);
    v = fmaf(t, t, v * s->beta2);
    uint32_t m_noise, v_noise;
    noise_scalar(1, c->key, c->first + i, GRID_SHIFT, &m_noise, &v_noise);
    c->m[i] = m_code(bits_of(m), grids.m_base, m_noise);
    c->v[i] = v_code(bits_of(v), grids.v_base, v_noise);
}

/* The codes of a block, some of which stay below the smallest one: they are the ones that are 0 so
 * far.  Of values normally distributed, one block in a hundred has such an m. */
TARGET_AVX512 static void quantize_smallest(const struct block *block, const struct codes *c,
                                            struct grids grids) {
    uint64_t smallest[STATE_BLOCK / 64];
    int count = 0;
    for (size_t i = 0; i < STATE_BLOCK; i += 64) {
        __m512i m = _mm512_loadu_si512(c->m + i), v = _mm512_loadu_si512(c->v + i);
        smallest[i / 64] = _mm512_testn_epi8_mask(m, _mm512_set1_epi8(M_CODES)) |
                           _mm512_testn_epi8_mask(v, v);
        count += __builtin_popcountll(smallest[i / 64]);
    }
    if (count > MOST_SINGLY) {
        quantize_any(block, c);
        return;
    }
    for (size_t i = 0; i < STATE_BLOCK; i += 64)
        for (uint64_t left = smallest[i / 64]; left != 0; left &= left - 1)
            quantize_one(block, c, grids, i + (size_t)__builtin_ctzll(left));
}

/* Grid steps from base on, of 64 words: 64 bytes, in the order in which words are packed.  What is
 * below base becomes 0. */
TARGET_AVX512 static inline __m512i steps64(const __m512i *words, __m512i base) {
    return _mm512_packus_epi16(_mm512_srai_epi16(_mm512_sub_epi16(words[0], base), 4),
                               _mm512_srai_epi16(_mm512_sub_epi16(words[1], base), 4));
}

/* A block whose codes are made while the next one is begun: [Note: one block behind]. */
struct ending {
    const struct block *block;
    struct codes codes;
    struct grids grids;
    __m512i m_base, v_base; /* all words, of the upper halves */
    bool is_plain;
    __m512i least; /* of its codes so far */
};

/* Stores the scales of a block that is plain: without infinities, and NaNs that an infinity made or
 * an old code was.  (Noise may carry the bits of other NaNs beyond 0x7FFFFFFF; those come of a
 * gradient, and make a weight one, too: see step8.) */
TARGET_AVX512 static ALWAYS_INLINE void begin_ending(struct ending *e, const struct most *most) {
    uint32_t m_most = largest_word(most->m), v_most = largest_word(most->v);
    e->is_plain = m_most < GRID_MAX >> 16 && v_most < GRID_MAX >> 16;
    e->least = _mm512_set1_epi8(-1);
    if (!e->is_plain) return;
    e->grids = store_scales(e->codes.scale, m_most << 16, v_most << 16);
    e->m_base = all_words(e->grids.m_base >> 16);
    e->v_base = all_words(e->grids.v_base >> 16);
}

TARGET_AVX512 static ALWAYS_INLINE void end_m64(struct ending *e, size_t at,
                                                const struct masks *masks) {
    __m512i codes = steps64(e->block->m_sizes + at, e->m_base);
    e->least = _mm512_min_epu8(e->least, codes);
    /* Packed as signed numbers, words keep their signs. */
    const __m512i *words = e->block->m_words + at;
    __m512i signs = _mm512_packs_epi16(words[0], words[1]);
    codes = _mm512_ternarylogic_epi32(codes, signs, masks->signs, 0xF8);
    _mm512_storeu_si512(e->codes.m + 32 * at, _mm512_permutexvar_epi64(masks->order, codes));
}

TARGET_AVX512 static ALWAYS_INLINE void end_v64(struct ending *e, size_t at,
                                                const struct masks *masks) {
    __m512i codes = steps64(e->block->v_words + at, e->v_base);
    e->least = _mm512_min_epu8(e->least, codes);
    _mm512_storeu_si512(e->codes.v + 32 * at, _mm512_permutexvar_epi64(masks->order, codes));
}

/* What is left of a block: other rules hold for a moment that stays below the smallest code and has
 * got 0.  (One that is rounded up to that code gets it by those rules, too: what it lacks is at most
 * noise / 2^23 of it, and noise / 2^20 is allowed.) */
TARGET_AVX512 static ALWAYS_INLINE void end_block(const struct ending *e) {
    if (!e->is_plain)
        quantize_any(e->block, &e->codes);
    else if (_mm512_testn_epi8_mask(e->least, e->least) != 0)
        quantize_smallest(e->block, &e->codes, e->grids);
}

TARGET_AVX512 static ALWAYS_INLINE void step8(size_t n, uint16_t *restrict hi,
                                              int16_t *restrict lo, uint8_t *restrict m,
                                              uint8_t *restrict v, float *restrict scale,
                                              const void *restrict grad, int32_t type,
                                              const struct infinity_adamw_small *s, uint64_t key,
                                              uint64_t first, uintptr_t ahead) {
    const struct broadcast b = broadcast(s, GRID_SHIFT);
    const struct masks k = masks();
    struct begun begun = {0};
    struct pairs16 pairs = pairs16(key, (uint32_t)(first / 2));
    struct block blocks[2];
    struct ending ending = {.is_plain = false};
    __mmask16 all_ordered = 0xFFFF;
    for (size_t start = 0; start < n; start += STATE_BLOCK, scale += 2) {
        struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
        __m512i m_base = all_words(grids.m_base >> 16), v_base = all_words(grids.v_base >> 16);
        struct block *block = &blocks[start / STATE_BLOCK % 2];
        memcpy(block->m_old, m + start, STATE_BLOCK);
        memcpy(block->v_old, v + start, STATE_BLOCK);
        memcpy(block->old_scale, scale, sizeof block->old_scale);
        struct most most = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        __mmask16 ordered = 0xFFFF;
        for (size_t at = 0; at < STATE_BLOCK / 32; at++) {
            size_t i = start + 32 * at;
            fetch(hi + i, sizeof *hi, ahead);
            fetch(lo + i, sizeof *lo, ahead);
            /* A line of codes is two of weights; the two fields take turns. */
            fetch(at % 2 == 0 ? m + i : v + i, sizeof *m, ahead);
            struct moves moves = divide32(begun, &b);
            struct pair p = join32(hi + i, lo + i, &b);
            struct pair m_bits = m_bits32(m + i, m_base, &b, &k);
            struct pair v_bits = v_bits32(v + i, v_base, &b);
            begun = begin32(p, &m_bits, &v_bits, load_grad32(grad, i, type, &b, ahead), &b);
            keep32(block, at, &most, m_bits, v_bits, noise32(&pairs, GRID_SHIFT, &b), &b, &k);
            if (ending.is_plain && at % 2 == 0) end_v64(&ending, at, &k);
            if (ending.is_plain && at % 2 != 0) end_m64(&ending, at - 1, &k);
            if (i != 0) finish32(hi + i - 32, lo + i - 32, moves, &b, &ordered);
        }
        /* A NaN among the last 256 weights, of which 32 are of the block before. */
        bool is_ordered = ordered == 0xFFFF;
        all_ordered &= ordered;
        ending.is_plain = ending.is_plain && is_ordered;
        if (start != 0) end_block(&ending);
        ending.block = block;
        ending.codes = (struct codes){m + start, v + start, scale, grad_at(grad, start, type),
                                      type,      s,         key,   first + start};
        begin_ending(&ending, &most);
        ending.is_plain = ending.is_plain && is_ordered;
    }
    for (size_t at = 0; ending.is_plain && at < STATE_BLOCK / 32; at += 2) {
        end_v64(&ending, at, &k);
        end_m64(&ending, at, &k);
    }
    __mmask16 ordered = 0xFFFF;
    finish32(hi + n - 32, lo + n - 32, divide32(begun, &b), &b, &ordered);
    ending.is_plain = ending.is_plain && ordered == 0xFFFF;
    end_block(&ending);
    if ((all_ordered & ordered) != 0xFFFF) canonical_weights(n, hi, lo, &b);
}

TARGET_AVX512 void adamw8_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                 uint8_t *restrict m, uint8_t *restrict v, float *restrict scale,
                                 const void *restrict grad, int32_t type,
                                 const struct infinity_adamw_small *s, uint64_t key,
                                 uint64_t first, uintptr_t ahead) {
    if (type == INFINITY_F32)
        step8(n, hi, lo, m, v, scale, grad, INFINITY_F32, s, key, first, ahead);
    else
        step8(n, hi, lo, m, v, scale, grad, INFINITY_BF16, s, key, first, ahead);
}
#endif
