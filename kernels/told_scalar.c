/* Gradients from the moments around a step, one element at a time: the reference for the vector versions, and
 * their tail.  See [Note: told gradients] in kernels.h. */
#include "internal.h"

/* The value without its sign. */
static inline float magnitude(float value) {
    return f32_of(bits_of(value) & 0x7FFFFFFFu);
}

void recover_scalar(size_t n, const float *restrict before, const float *restrict behind,
                    const struct infinity_told *s, uint16_t *restrict grad) {
    for (size_t i = 0; i < n; i++) {
        float m = f32_of(load_u32(before + i));
        float g = m + (f32_of(load_u32(behind + i)) - m) * s->inverse_weight;
        if (magnitude(g) < magnitude(m) * s->noise) g = 0.0f;
        uint32_t bits = canonical_bits(g * s->inverse_clip);
        store_u16(grad + i, (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
}
