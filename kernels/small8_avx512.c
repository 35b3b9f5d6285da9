/* The step on 8-bit moments, whole blocks at a time. */
#include <math.h>

#include "moments.h"

#ifdef INFINITY_X86
#include "small_avx512.h"

/* More constants, as in struct broadcast. */
struct masks {
    __m512i m_codes, signed_codes, sizes, signs, code_sizes, order;
};

TARGET_AVX512 static inline struct masks masks(void) {
    return (struct masks){kept(all_words(M_CODES)), kept(all_words(0x87F0)),
                          kept(all_words(0x7FFF)), kept(_mm512_set1_epi8(-128)),
                          kept(_mm512_set1_epi8(M_CODES)),
                          kept(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0))};
}

/* base + c * GRID_STEP for 32 codes: the lower half of a grid point is 0, so words suffice. */
TARGET_AVX512 static inline struct pair m_bits32(const uint8_t *codes, __m512i base,
                                                 const struct broadcast *b,
                                                 const struct masks *masks) {
    /* The sign is copied to all bits above the code's seven. */
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

/* One block's new moments: the upper words of moment plus noise, which hold the grid point and, below
 * it, four meaningless bits. */
struct block {
    __m512i m_words[STATE_BLOCK / 32], v_words[STATE_BLOCK / 32];
};

/* The largest of these words, m's without their signs. */
struct most {
    __m512i m, v;
};

TARGET_AVX512 static inline void keep32(struct block *block, size_t at, struct most *most,
                                        struct pair m, struct pair v, struct noise noise,
                                        const struct broadcast *b, const struct masks *masks) {
    __m512i m_words = upper32(sum32(m, noise.m), b), v_words = upper32(sum32(v, noise.v), b);
    block->m_words[at] = m_words;
    block->v_words[at] = v_words;
    most->m = _mm512_max_epu16(most->m, _mm512_and_si512(m_words, masks->sizes));
    most->v = _mm512_max_epu16(most->v, v_words);
}

TARGET_AVX512 static inline uint32_t largest_word(__m512i words) {
    __m256i of16 = _mm256_max_epu16(_mm512_castsi512_si256(words),
                                    _mm512_extracti64x4_epi64(words, 1));
    __m128i of8 = _mm_max_epu16(_mm256_castsi256_si128(of16), _mm256_extracti128_si256(of16, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(of8, _mm_set1_epi16(-1)));
    return (uint32_t)_mm_extract_epi16(least, 0) ^ 0xFFFF;
}

/* The fields of a step on 8-bit moments, from some block on.  Codes and scales are the old ones until
 * new ones are stored. */
struct codes {
    uint8_t *m, *v;
    float *scale;
    float old_scale[2];
    const void *grad;
    int32_t type;
    const struct infinity_adamw_small *scalars;
    uint64_t key, first;
};

/* Computes the new moments of n elements of a block and their noise again, from their old codes. */
struct again {
    float m[STATE_BLOCK], v[STATE_BLOCK];
    struct noises noises;
};

static void step_again(struct again *again, const struct codes *c, size_t i, size_t n) {
    uint16_t hi[STATE_BLOCK] = {0}; /* dummy weights */
    int16_t lo[STATE_BLOCK] = {0};
    dequantize_avx512(n, c->m + i, c->v + i, c->old_scale, again->m, again->v);
    adamw_small_avx512(n, hi, lo, again->m, again->v, grad_at(c->grad, i, c->type), c->type,
                       c->scalars);
    noise_avx512(n, c->key, c->first + i, GRID_SHIFT, again->noises.m, again->noises.v);
}

/* Stores the codes of any block, through memory. */
static void quantize_any(const struct codes *c) {
    struct again again;
    step_again(&again, c, 0, STATE_BLOCK);
    quantize_avx512(STATE_BLOCK, again.m, again.v, &again.noises, c->m, c->v, c->scale);
}

/* The grid steps of 64 words above base, as 64 bytes in the order in which words are packed; 0 for
 * words below base. */
TARGET_AVX512 static inline __m512i steps64(const __m512i *words, __m512i base) {
    return _mm512_packus_epi16(_mm512_srai_epi16(_mm512_sub_epi16(words[0], base), 4),
                               _mm512_srai_epi16(_mm512_sub_epi16(words[1], base), 4));
}

/* [Note: one block behind]
 * A block's codes are computed while the next block is begun: during its divisions, and without
 * waiting for the block's maximum.  Until then its old codes stay in place, for elements that must be
 * computed again from them. */
struct ending {
    const struct block *block;
    struct codes codes;
    struct grids grids;
    __m512i m_base, v_base; /* the upper half of the base, in all words */
    bool is_plain;          /* without infinities and NaNs */
    uint32_t left;          /* bits at and at + 1: end_m64 and end_v64 left these to end_rest */
};

/* Stores the scales of a block that seems plain.  (NaNs made by an infinity, or from an old code, show
 * in the largest word.  Noise may carry the bits of other NaNs beyond 0x7FFFFFFF; those come from a
 * gradient, and make the weight a NaN too, which is_ordered detects.) */
TARGET_AVX512 static ALWAYS_INLINE void begin_ending(struct ending *e, const struct most *most,
                                                     bool is_ordered) {
    uint32_t m_most = largest_word(most->m), v_most = largest_word(most->v);
    e->is_plain = is_ordered && m_most < GRID_MAX >> 16 && v_most < GRID_MAX >> 16;
    if (!e->is_plain) return;
    e->grids = store_scales(e->codes.scale, m_most << 16, v_most << 16, IN_8_BITS);
    e->m_base = all_words(e->grids.m_base >> 16);
    e->v_base = all_words(e->grids.v_base >> 16);
}

/* The codes of 64 m, and of 64 v, in the order of the elements. */
TARGET_AVX512 static ALWAYS_INLINE __m512i m_codes64(const struct ending *e, size_t at,
                                                     const struct masks *masks) {
    __m512i words[] = {e->block->m_words[at], e->block->m_words[at + 1]};
    __m512i sizes[] = {_mm512_and_si512(words[0], masks->sizes),
                       _mm512_and_si512(words[1], masks->sizes)};
    /* Words are packed as signed numbers, which keeps their signs. */
    __m512i signs = _mm512_packs_epi16(words[0], words[1]);
    __m512i codes =
        _mm512_ternarylogic_epi32(steps64(sizes, e->m_base), signs, masks->signs, 0xF8);
    return _mm512_permutexvar_epi64(masks->order, codes);
}

TARGET_AVX512 static ALWAYS_INLINE __m512i v_codes64(const struct ending *e, size_t at,
                                                     const struct masks *masks) {
    return _mm512_permutexvar_epi64(masks->order, steps64(e->block->v_words + at, e->v_base));
}

TARGET_AVX512 static ALWAYS_INLINE void end_m64(struct ending *e, size_t at,
                                                const struct masks *masks) {
    __m512i codes = m_codes64(e, at, masks);
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, masks->code_sizes) != 0, 0))
        e->left |= 1u << at;
    else
        _mm512_storeu_si512(e->codes.m + 32 * at, codes);
}

TARGET_AVX512 static ALWAYS_INLINE void end_v64(struct ending *e, size_t at,
                                                const struct masks *masks) {
    __m512i codes = v_codes64(e, at, masks);
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, codes) != 0, 0))
        e->left |= 2u << at;
    else
        _mm512_storeu_si512(e->codes.v + 32 * at, codes);
}

/* A mask of those of 64 moments that got code 0 (apart from the sign) and need the rules for moments
 * below the smallest code, because they are neither 0 nor certain to become 0.  (A moment that is rounded
 * up to the smallest code gets it here as by those rules: it lacks at most noise / 2^23 of it, and
 * noise / 2^20 is allowed.) */
TARGET_AVX512 static inline uint64_t small64(__m512i code_sizes, const __m512i *words,
                                             const struct masks *masks) {
    __m512i sizes[] = {_mm512_and_si512(words[0], masks->sizes),
                       _mm512_and_si512(words[1], masks->sizes)};
    __m512i points = steps64(sizes, _mm512_setzero_si512());
    points = _mm512_permutexvar_epi64(masks->order, points);
    return _mm512_testn_epi8_mask(code_sizes, code_sizes) & _mm512_test_epi8_mask(points, points);
}

/* If more than so many of 64 remain, all codes are computed again at once. */
#define MOST_SINGLY 16

/* Computes the codes of 64 elements that end_m64 or end_v64 left.  With normally distributed values one
 * block in a hundred has such an m. */
TARGET_AVX512 static void end_rest64(const struct ending *e, size_t at,
                                     const struct masks *masks) {
    const struct codes *c = &e->codes;
    size_t start = 32 * at;
    bool is_m_left = e->left >> at & 1, is_v_left = e->left >> at & 2;
    __m512i m = m_codes64(e, at, masks), v = v_codes64(e, at, masks);
    __m512i m_sizes = _mm512_and_si512(m, masks->code_sizes);
    uint64_t m_small = is_m_left ? small64(m_sizes, e->block->m_words + at, masks) : 0;
    uint64_t v_small = is_v_left ? small64(v, e->block->v_words + at, masks) : 0;
    uint8_t m_new[64], v_new[64];
    _mm512_storeu_si512(m_new, m);
    _mm512_storeu_si512(v_new, v);
    struct again again;
    if (__builtin_popcountll(m_small | v_small) > MOST_SINGLY) {
        step_again(&again, c, start, 64);
        codes_avx512(64, again.m, again.v, &again.noises, m_new, v_new, e->grids);
    } else {
        for (uint64_t left = m_small | v_small; left != 0; left &= left - 1) {
            size_t i = (size_t)__builtin_ctzll(left);
            step_again(&again, c, start + i, 1);
            uint32_t m_bits = bits_of(again.m[0]), v_bits = bits_of(again.v[0]);
            if (m_small >> i & 1) m_new[i] = m_code(m_bits, e->grids.m_base, again.noises.m[0], GRID_SHIFT);
            if (v_small >> i & 1) v_new[i] = v_code(v_bits, e->grids.v_base, again.noises.v[0], GRID_SHIFT);
        }
    }
    if (is_m_left) memcpy(c->m + start, m_new, sizeof m_new);
    if (is_v_left) memcpy(c->v + start, v_new, sizeof v_new);
}

static __attribute__((noinline, cold)) void end_rest(struct ending *e, const struct masks *masks) {
    for (size_t at = 0; at < STATE_BLOCK / 32; at += 2)
        if (e->left >> at & 3) end_rest64(e, at, masks);
    e->left = 0;
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
    struct ending ending = {.is_plain = false, .left = 0};
    /* Lanes without a NaN: among all weights, and among those since the block's first 32. */
    __mmask16 all_ordered = 0xFFFF, ordered = 0xFFFF;
    for (size_t start = 0; start < n; start += STATE_BLOCK, scale += 2) {
        struct codes codes = {m + start, v + start, scale, {scale[0], scale[1]},
                              grad_at(grad, start, type), type, s, key, first + start};
        struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1), IN_8_BITS);
        __m512i m_base = all_words(grids.m_base >> 16), v_base = all_words(grids.v_base >> 16);
        struct block *block = &blocks[start / STATE_BLOCK % 2];
        struct most most = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        /* Unrolled, the iterations of a block need no tests and addresses of their own. */
#pragma GCC unroll 8
        for (size_t at = 0; at < STATE_BLOCK / 32; at++) {
            size_t i = start + 32 * at;
            fetch(hi + i, sizeof *hi, ahead);
            fetch(lo + i, sizeof *lo, ahead);
            /* A line of codes covers two of weights; the two fields alternate. */
            fetch(at % 2 == 0 ? m + i : v + i, sizeof *m, ahead);
            struct moves moves = divide32(begun, &b);
            struct pair p = join32(hi + i, lo + i, &b);
            struct pair m_bits = m_bits32(m + i, m_base, &b, &k);
            struct pair v_bits = v_bits32(v + i, v_base, &b);
            begun = begin32(p, &m_bits, &v_bits, load_grad32(grad, i, type, &b, ahead), &b);
            keep32(block, at, &most, m_bits, v_bits, noise32(&pairs, GRID_SHIFT, &b), &b, &k);
            if (ending.is_plain && at % 2 != 0) end_m64(&ending, at - 1, &k);
            if (ending.is_plain && at % 2 == 0 && at != 0) end_v64(&ending, at, &k);
            if (i != 0) finish32(hi + i - 32, lo + i - 32, moves, &b, &ordered);
            if (i == 0 || at != 0) continue;
            /* Now all weights of the previous block are known, and whether it is plain. */
            all_ordered &= ordered;
            ending.is_plain = ending.is_plain && ordered == 0xFFFF;
            ordered = 0xFFFF;
            if (ending.is_plain)
                end_v64(&ending, 0, &k);
            else
                quantize_any(&ending.codes);
        }
        if (ending.left != 0) end_rest(&ending, &k);
        ending.block = block;
        ending.codes = codes;
        begin_ending(&ending, &most, ordered == 0xFFFF);
    }
    finish32(hi + n - 32, lo + n - 32, divide32(begun, &b), &b, &ordered);
    ending.is_plain = ending.is_plain && ordered == 0xFFFF;
    for (size_t at = 0; ending.is_plain && at < STATE_BLOCK / 32; at += 2) {
        end_v64(&ending, at, &k);
        end_m64(&ending, at, &k);
    }
    if (ending.left != 0) end_rest(&ending, &k);
    if (!ending.is_plain) quantize_any(&ending.codes);
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
