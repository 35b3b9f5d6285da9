#ifndef INFINITY_ADAMW_AVX512_H
#define INFINITY_ADAMW_AVX512_H
/* An adamw step on 16 elements.  See [Note: the adamw step] in kernels.h. */
#include <immintrin.h>

#include "cast_avx512.h"

/* The scalars, one register each. */
struct broadcast {
    __m512 clip, decay, lerp_weight, beta2, grad_weight, denom_divisor, divisor_inverse, eps,
        step_factor;
    __mmask16 lerp_from_grad;
};

TARGET_AVX512 static inline struct broadcast broadcast(const struct infinity_adamw *s) {
    struct broadcast b;
    b.clip = _mm512_set1_ps(s->clip);
    b.decay = _mm512_set1_ps(s->decay);
    b.lerp_weight = _mm512_set1_ps(s->lerp_weight);
    b.beta2 = _mm512_set1_ps(s->beta2);
    b.grad_weight = _mm512_set1_ps(s->grad_weight);
    b.denom_divisor = _mm512_set1_ps(s->denom_divisor);
    b.divisor_inverse = _mm512_set1_ps(1.0f / s->denom_divisor);
    b.eps = _mm512_set1_ps(s->eps);
    b.step_factor = _mm512_set1_ps(s->step_factor);
    b.lerp_from_grad = (__mmask16)(s->lerp_from_grad ? 0xFFFF : 0);
    return b;
}

/* [Note: division by a constant]
 * root / denom_divisor, with the bits of a division, by a multiplication and two FMAs, because the root
 * and the other division keep the divider busy.  q approximates the quotient, the first FMA computes its
 * remainder exactly, and q + rest * inverse is rounded once.  That is correctly rounded (Markstein, 1990;
 * Brisebarre, Muller and Raina, 2004) as long as all values are normal numbers: a root is at least
 * 2^-75, and a divisor between 2^-27 and 1. */
TARGET_AVX512 static inline __m512 divided16(__m512 root_f32x16, const struct broadcast *b) {
    __m512 q_f32x16 = _mm512_mul_ps(root_f32x16, b->divisor_inverse);
    __m512 rest_f32x16 = _mm512_fnmadd_ps(q_f32x16, b->denom_divisor, root_f32x16);
    /* For an infinity the remainder is a NaN, and q is already right. */
    __mmask16 is_finite =
        _mm512_cmp_ps_mask(q_f32x16, _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
    return _mm512_mask3_fmadd_ps(rest_f32x16, b->divisor_inverse, q_f32x16, is_finite);
}

/* Replaces m and v by those of the next step; NaNs as the hardware makes them. */
TARGET_AVX512 static inline void move_moments16(__m512 *m, __m512 *v, __m512 grad_f32x16,
                                                const struct broadcast *b) {
    __m512 g_f32x16 = _mm512_mul_ps(grad_f32x16, b->clip);
    __m512 start_f32x16 = _mm512_mask_mov_ps(*m, b->lerp_from_grad, g_f32x16);
    __m512 change_f32x16 = _mm512_mul_ps(_mm512_sub_ps(g_f32x16, *m), b->lerp_weight);
    __m512 grown_f32x16 = _mm512_mul_ps(_mm512_mul_ps(b->grad_weight, g_f32x16), g_f32x16);
    *m = _mm512_add_ps(start_f32x16, change_f32x16);
    *v = _mm512_add_ps(_mm512_mul_ps(*v, b->beta2), grown_f32x16);
}

/* What is added to the weight: `change`, the moment times the step's factor, divided by the denominator. */
TARGET_AVX512 static inline __m512 quotient16(__m512 change_f32x16, __m512 root_f32x16,
                                              const struct broadcast *b) {
    __m512 denom_f32x16 = _mm512_add_ps(divided16(root_f32x16, b), b->eps);
    return _mm512_div_ps(change_f32x16, denom_f32x16);
}

/* Replaces p, m and v by those of the next step; NaNs as the hardware makes them. */
TARGET_AVX512 static inline void update16(__m512 *p, __m512 *m, __m512 *v, __m512 grad_f32x16,
                                          const struct broadcast *b) {
    move_moments16(m, v, grad_f32x16, b);
    __m512 change_f32x16 = _mm512_mul_ps(b->step_factor, *m);
    __m512 moved_f32x16 = quotient16(change_f32x16, _mm512_sqrt_ps(*v), b);
    *p = _mm512_add_ps(_mm512_mul_ps(*p, b->decay), moved_f32x16);
}

/* Makes the step of 16 elements in memory; returns the new m. */
TARGET_AVX512 static inline __m512 step16(uint16_t *hi, int16_t *lo, float *m, float *v,
                                          __m512 grad_f32x16, const struct broadcast *b) {
    __m512 p_f32x16 = join16(hi, lo), m_f32x16 = _mm512_loadu_ps(m), v_f32x16 = _mm512_loadu_ps(v);
    update16(&p_f32x16, &m_f32x16, &v_f32x16, grad_f32x16, b);
    split16(p_f32x16, hi, lo);
    m_f32x16 = canonical16(m_f32x16);
    _mm512_storeu_ps(m, m_f32x16);
    _mm512_storeu_ps(v, canonical16(v_f32x16));
    return m_f32x16;
}
#endif
