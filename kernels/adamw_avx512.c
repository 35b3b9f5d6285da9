/* The adamw step, 16 elements at a time.  See [Note: the adamw step] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

/* The scalars, one register each. */
struct broadcast {
    __m512 clip, decay, lerp_weight, beta2, grad_weight, denom_divisor, eps, step_factor;
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
    b.eps = _mm512_set1_ps(s->eps);
    b.step_factor = _mm512_set1_ps(s->step_factor);
    b.lerp_from_grad = (__mmask16)(s->lerp_from_grad ? 0xFFFF : 0);
    return b;
}

TARGET_AVX512 static inline void step16(uint16_t *hi, int16_t *lo, float *m, float *v,
                                        __m512 grad_f32x16, const struct broadcast *b) {
    __m512 p_f32x16 = join16(hi, lo);
    __m512 m_f32x16 = _mm512_loadu_ps(m);
    __m512 v_f32x16 = _mm512_loadu_ps(v);
    __m512 g_f32x16 = _mm512_mul_ps(grad_f32x16, b->clip);
    p_f32x16 = _mm512_mul_ps(p_f32x16, b->decay);
    __m512 start_f32x16 = _mm512_mask_mov_ps(m_f32x16, b->lerp_from_grad, g_f32x16);
    __m512 change_f32x16 = _mm512_mul_ps(_mm512_sub_ps(g_f32x16, m_f32x16), b->lerp_weight);
    m_f32x16 = _mm512_add_ps(start_f32x16, change_f32x16);
    v_f32x16 = _mm512_mul_ps(v_f32x16, b->beta2);
    v_f32x16 =
        _mm512_add_ps(v_f32x16, _mm512_mul_ps(_mm512_mul_ps(b->grad_weight, g_f32x16), g_f32x16));
    __m512 denom_f32x16 =
        _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v_f32x16), b->denom_divisor), b->eps);
    p_f32x16 = _mm512_add_ps(p_f32x16,
                             _mm512_div_ps(_mm512_mul_ps(b->step_factor, m_f32x16), denom_f32x16));
    split16(p_f32x16, hi, lo);
    _mm512_storeu_ps(m, canonical16(m_f32x16));
    _mm512_storeu_ps(v, canonical16(v_f32x16));
}

TARGET_AVX512 void adamw_bf16_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                     float *restrict m, float *restrict v,
                                     const uint16_t *restrict grad,
                                     const struct infinity_adamw *s) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) step16(hi + i, lo + i, m + i, v + i, widen16(grad + i), &b);
    adamw_bf16_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s);
}

TARGET_AVX512 void adamw_f32_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                    float *restrict m, float *restrict v,
                                    const float *restrict grad, const struct infinity_adamw *s) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        step16(hi + i, lo + i, m + i, v + i, _mm512_loadu_ps(grad + i), &b);
    adamw_f32_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s);
}
#endif
