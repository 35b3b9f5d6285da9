#ifndef INFINITY_ADAMW_AVX2_H
#define INFINITY_ADAMW_AVX2_H
/* An adamw step on 8 elements.  See [Note: the adamw step] in kernels.h. */
#include <immintrin.h>

#include "cast_avx2.h"

/* The scalars, one register each. */
struct broadcast {
    __m256 clip, decay, lerp_weight, beta2, grad_weight, denom_divisor, eps, step_factor,
        lerp_from_grad;
};

TARGET_AVX2 static inline struct broadcast broadcast(const struct infinity_adamw *s) {
    struct broadcast b;
    b.clip = _mm256_set1_ps(s->clip);
    b.decay = _mm256_set1_ps(s->decay);
    b.lerp_weight = _mm256_set1_ps(s->lerp_weight);
    b.beta2 = _mm256_set1_ps(s->beta2);
    b.grad_weight = _mm256_set1_ps(s->grad_weight);
    b.denom_divisor = _mm256_set1_ps(s->denom_divisor);
    b.eps = _mm256_set1_ps(s->eps);
    b.step_factor = _mm256_set1_ps(s->step_factor);
    b.lerp_from_grad = _mm256_castsi256_ps(_mm256_set1_epi32(s->lerp_from_grad ? -1 : 0));
    return b;
}

/* Makes the step of 8 elements in memory; returns the new m. */
TARGET_AVX2 static inline __m256 step8(uint16_t *hi, int16_t *lo, float *m, float *v,
                                       __m256 grad_f32x8, const struct broadcast *b) {
    __m256 p_f32x8 = join8(hi, lo);
    __m256 m_f32x8 = _mm256_loadu_ps(m);
    __m256 v_f32x8 = _mm256_loadu_ps(v);
    __m256 g_f32x8 = _mm256_mul_ps(grad_f32x8, b->clip);
    p_f32x8 = _mm256_mul_ps(p_f32x8, b->decay);
    __m256 start_f32x8 = _mm256_blendv_ps(m_f32x8, g_f32x8, b->lerp_from_grad);
    __m256 change_f32x8 = _mm256_mul_ps(_mm256_sub_ps(g_f32x8, m_f32x8), b->lerp_weight);
    m_f32x8 = _mm256_add_ps(start_f32x8, change_f32x8);
    v_f32x8 = _mm256_mul_ps(v_f32x8, b->beta2);
    v_f32x8 =
        _mm256_add_ps(v_f32x8, _mm256_mul_ps(_mm256_mul_ps(b->grad_weight, g_f32x8), g_f32x8));
    __m256 denom_f32x8 =
        _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v_f32x8), b->denom_divisor), b->eps);
    p_f32x8 =
        _mm256_add_ps(p_f32x8, _mm256_div_ps(_mm256_mul_ps(b->step_factor, m_f32x8), denom_f32x8));
    split8(p_f32x8, hi, lo);
    m_f32x8 = canonical8(m_f32x8);
    _mm256_storeu_ps(m, m_f32x8);
    _mm256_storeu_ps(v, canonical8(v_f32x8));
    return m_f32x8;
}
#endif
