/* The adamw step, one element at a time: the reference for the vector versions, and their tail.
 * See [Note: the adamw step] in kernels.h. */
#include <float.h>
#include <math.h>

#include "internal.h"

_Static_assert(FLT_EVAL_METHOD == 0, "float operations must round to float, one by one");

static inline void step(void *hi, void *lo, void *m_address, void *v_address, float grad,
                        const struct infinity_adamw *s) {
    float p = f32_of(join_bits(load_u16(hi), load_u16(lo)));
    float m = f32_of(load_u32(m_address));
    float v = f32_of(load_u32(v_address));
    float g = grad * s->clip;
    p = p * s->decay;
    m = (s->lerp_from_grad ? g : m) + (g - m) * s->lerp_weight;
    v = v * s->beta2;
    v = v + (s->grad_weight * g) * g;
    float denom = sqrtf(v) / s->denom_divisor + s->eps;
    p = p + (s->step_factor * m) / denom;
    uint32_t p_bits = canonical_bits(p);
    store_u16(hi, (p_bits + 0x8000u) >> 16);
    store_u16(lo, p_bits);
    store_u32(m_address, canonical_bits(m));
    store_u32(v_address, canonical_bits(v));
}

void adamw_bf16_scalar(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                       float *restrict v, const uint16_t *restrict grad,
                       const struct infinity_adamw *s, uintptr_t ahead) {
    (void)ahead; /* the compiler sees no prefetch in it */
    for (size_t i = 0; i < n; i++)
        step(hi + i, lo + i, m + i, v + i, f32_of((uint32_t)load_u16(grad + i) << 16), s);
}

void adamw_f32_scalar(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                      float *restrict v, const float *restrict grad,
                      const struct infinity_adamw *s, uintptr_t ahead) {
    (void)ahead; /* the compiler sees no prefetch in it */
    for (size_t i = 0; i < n; i++)
        step(hi + i, lo + i, m + i, v + i, f32_of(load_u32(grad + i)), s);
}
