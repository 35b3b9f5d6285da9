#ifndef INFINITY_SMALL_AVX512_H
#define INFINITY_SMALL_AVX512_H
/* The small step on 32 elements in registers, for steps on small moments, whole blocks at a time:
 * the same bits as widening, the small step and rounding one after the other (moments.c).
 *
 * [Note: even and odd]
 * 32 elements of 16 bits become two registers of fp32: the even ones, x << 16, and the odd ones, the
 * upper halves.  The way back, and to and from hi and lo, is one shuffle of bytes within 32 bits,
 * merged into the other register by its mask.  This is one operation, where a shift and a blend would
 * be two, and it does not use the port of the divider and the shifts.  The hash of 16 pairs of
 * elements is the noise of both registers.
 *
 * [Note: in the divider's shadow]
 * A root and a division keep the divider busy for 23 cycles per 16 elements, and operations that wait
 * for them fill the scheduler, so that no later operation can start.  Therefore each iteration first
 * issues the divisions for the 32 elements whose roots the previous iteration has issued, then does
 * the work for the next 32 up to their roots, and only then uses the quotients. */
#include <immintrin.h>

#include "cast_avx512.h"
#include "moments_avx512.h"

/* For functions that are compiled once for each type of gradient. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* The bytes of words with an even number. */
#define EVEN_WORDS ((__mmask64)0x3333333333333333u)

struct pair {
    __m512i even, odd; /* bits of fp32 */
};

/* The operands of the rest of a step, after m and v are updated. */
struct begun {
    __m512 p_even, p_odd, root_even, root_odd, change_even, change_odd;
};

/* The scalars and the constants, one register each. */
struct broadcast {
    __m512 decay, beta1, beta2, grad_weight, root_weight, eps, step_factor;
    __m512i down, up, upper, half, noise;
    __mmask64 even_words, odd_words;
};

TARGET_AVX512 static inline __mmask64 kept_mask(__mmask64 mask) {
    __asm__("" : "+k"(mask));
    return mask;
}

TARGET_AVX512 static inline struct broadcast broadcast(const struct infinity_adamw_small *s,
                                                      int width) {
    __m512i down = _mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302);
    __m512i up = _mm512_set4_epi32(0x0D0C0D0C, 0x09080908, 0x05040504, 0x01000100);
    return (struct broadcast){_mm512_set1_ps(s->decay),
                              _mm512_set1_ps(s->beta1),
                              _mm512_set1_ps(s->beta2),
                              _mm512_set1_ps(s->grad_weight),
                              _mm512_set1_ps(s->root_weight),
                              _mm512_set1_ps(s->eps),
                              _mm512_set1_ps(s->step_factor),
                              kept(down),
                              kept(up),
                              kept(all16(0xFFFF0000u)),
                              kept(all16(0x8000)),
                              kept(all16((1u << width) - 1)),
                              kept_mask(EVEN_WORDS),
                              kept_mask(~EVEN_WORDS)};
}

TARGET_AVX512 static inline __m512i all_words(uint32_t value) {
    return _mm512_set1_epi16((short)value);
}

/* Widens words to 32 bits, as upper halves over zeros. */
TARGET_AVX512 static inline struct pair widen32(__m512i words, const struct broadcast *b) {
    return (struct pair){_mm512_slli_epi32(words, 16), _mm512_and_si512(words, b->upper)};
}

/* into, with its even words replaced by the odd ones of from. */
TARGET_AVX512 static inline __m512i with_upper(__m512i into, __m512i from,
                                               const struct broadcast *b) {
    return _mm512_mask_shuffle_epi8(into, b->even_words, from, b->down);
}

/* into, with its odd words replaced by the even ones of from. */
TARGET_AVX512 static inline __m512i with_lower(__m512i into, __m512i from,
                                               const struct broadcast *b) {
    return _mm512_mask_shuffle_epi8(into, b->odd_words, from, b->up);
}

/* The upper halves. */
TARGET_AVX512 static inline __m512i upper32(struct pair bits, const struct broadcast *b) {
    return with_upper(bits.odd, bits.even, b);
}

TARGET_AVX512 static inline struct pair sum32(struct pair a, struct pair b) {
    return (struct pair){_mm512_add_epi32(a.even, b.even), _mm512_add_epi32(a.odd, b.odd)};
}

TARGET_AVX512 static inline struct pair join32(const uint16_t *hi, const int16_t *lo,
                                               const struct broadcast *b) {
    __m512i lo_i16x32 = kept(_mm512_loadu_si512(lo));
    /* lo is signed: if it is negative, the upper half is one less. */
    __m512i hi_u16x32 =
        _mm512_add_epi16(_mm512_loadu_si512(hi), _mm512_srai_epi16(lo_i16x32, 15));
    return (struct pair){with_lower(lo_i16x32, hi_u16x32, b), with_upper(hi_u16x32, lo_i16x32, b)};
}

TARGET_AVX512 static inline void split32(struct pair p, uint16_t *hi, int16_t *lo,
                                         const struct broadcast *b) {
    struct pair half = {b->half, b->half};
    _mm512_storeu_si512(hi, upper32(sum32(p, half), b));
    _mm512_storeu_si512(lo, with_lower(p.even, p.odd, b));
}

TARGET_AVX512 static inline struct pair load_grad32(const void *grad, size_t i, int32_t type,
                                                    const struct broadcast *b, uintptr_t ahead) {
    if (type == INFINITY_BF16) {
        const uint16_t *bf16 = (const uint16_t *)grad + i;
        fetch(bf16, sizeof *bf16, ahead);
        return widen32(kept(_mm512_loadu_si512(bf16)), b);
    }
    const float *f32 = (const float *)grad + i;
    fetch(f32, sizeof *f32, ahead);
    __m512i low = kept(_mm512_loadu_si512(f32)), high = kept(_mm512_loadu_si512(f32 + 16));
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

/* Replaces m and v by those of the next step; NaNs as the hardware makes them. */
TARGET_AVX512 static inline void move_moments16(__m512 *m, __m512 *v, __m512 grad_f32x16,
                                                const struct broadcast *b) {
    __m512 t_f32x16 = _mm512_mul_ps(grad_f32x16, b->root_weight);
    __m512 part_f32x16 = _mm512_mul_ps(grad_f32x16, b->grad_weight);
    *m = _mm512_fmadd_ps(*m, b->beta1, part_f32x16);
    *v = _mm512_fmadd_ps(t_f32x16, t_f32x16, _mm512_mul_ps(*v, b->beta2));
}

/* Updates m and v, and begins the roots.  The masters p are read before: a later load, at the same page
 * offset as the stores to m and v, would wait for these stores. */
TARGET_AVX512 static inline struct begun begin32(struct pair p, struct pair *m, struct pair *v,
                                                 struct pair grad, const struct broadcast *b) {
    __m512 m_even = _mm512_castsi512_ps(m->even), m_odd = _mm512_castsi512_ps(m->odd);
    __m512 v_even = _mm512_castsi512_ps(v->even), v_odd = _mm512_castsi512_ps(v->odd);
    move_moments16(&m_even, &v_even, _mm512_castsi512_ps(grad.even), b);
    move_moments16(&m_odd, &v_odd, _mm512_castsi512_ps(grad.odd), b);
    *m = (struct pair){_mm512_castps_si512(m_even), _mm512_castps_si512(m_odd)};
    *v = (struct pair){_mm512_castps_si512(v_even), _mm512_castps_si512(v_odd)};
    return (struct begun){_mm512_castsi512_ps(p.even),
                          _mm512_castsi512_ps(p.odd),
                          _mm512_sqrt_ps(v_even),
                          _mm512_sqrt_ps(v_odd),
                          _mm512_mul_ps(b->step_factor, m_even),
                          _mm512_mul_ps(b->step_factor, m_odd)};
}

/* The weights and what is added to them. */
struct moves {
    __m512 p_even, p_odd, even, odd;
};

TARGET_AVX512 static inline struct moves divide32(struct begun begun, const struct broadcast *b) {
    __m512 even = _mm512_div_ps(begun.change_even, _mm512_add_ps(begun.root_even, b->eps));
    __m512 odd = _mm512_div_ps(begun.change_odd, _mm512_add_ps(begun.root_odd, b->eps));
    /* Otherwise the compiler would move the divisions to their uses. */
    __asm__ volatile("" : "+v"(even), "+v"(odd));
    return (struct moves){begun.p_even, begun.p_odd, even, odd};
}

/* Moves 32 weights, and clears the lanes of `ordered` that hold a NaN, whose bits are undefined. */
TARGET_AVX512 static inline void finish32(uint16_t *hi, int16_t *lo, struct moves moves,
                                          const struct broadcast *b, __mmask16 *ordered) {
    __m512 even = _mm512_fmadd_ps(moves.p_even, b->decay, moves.even);
    __m512 odd = _mm512_fmadd_ps(moves.p_odd, b->decay, moves.odd);
    *ordered = _mm512_mask_cmp_ps_mask(*ordered, even, odd, _CMP_ORD_Q);
    split32((struct pair){_mm512_castps_si512(even), _mm512_castps_si512(odd)}, hi, lo, b);
}

/* Replaces all NaNs among n weights by the canonical one. */
TARGET_AVX512 static void canonical_weights(size_t n, uint16_t *hi, int16_t *lo,
                                            const struct broadcast *b) {
    for (size_t i = 0; i < n; i += 32)
        split32(canonical32(join32(hi + i, lo + i, b)), hi + i, lo + i, b);
}

/* The lowest and the highest `width` bits of the hash of 16 pairs. */
struct noise {
    struct pair m, v;
};

TARGET_AVX512 static inline struct noise noise32(struct pairs16 *pairs, int width,
                                                  const struct broadcast *b) {
    __m512i hash = hash16(pairs);
    __m512i low = _mm512_and_si512(hash, b->noise);
    __m512i high = _mm512_srli_epi32(hash, (unsigned)(32 - width));
    return (struct noise){{low, high}, {high, low}};
}

/* Combines magnitudes by or, to test whether any may reach a limit.  An or is at least as large as its
 * operands, so the test is sometimes positive (1.5 or 3) although no operand reaches the limit. */
TARGET_AVX512 static inline __m512i any_of64(__m512i so_far, struct pair bits) {
    return _mm512_ternarylogic_epi32(so_far, bits.even, bits.odd, 0xFE);
}
#endif
