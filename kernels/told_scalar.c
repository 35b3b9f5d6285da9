/* Gradients from the moments around a step, and the step that notes which these do not tell, one element at a
 * time: the reference for the vector versions, and their tail.  See [Note: told gradients] in kernels.h. */
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

void adamw_told_scalar(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                       float *restrict v, const uint16_t *restrict grad,
                       const struct infinity_adamw *s, struct infinity_told *told, uint64_t first,
                       uintptr_t ahead) {
    for (size_t i = 0; i < n; i++) {
        float before = f32_of(load_u32(m + i));
        uint16_t found;
        adamw_bf16_scalar(1, hi + i, lo + i, m + i, v + i, grad + i, s, ahead);
        recover_scalar(1, &before, m + i, told, &found);
        if (found != load_u16(grad + i)) note_exceptions(told, first + i, grad + i, 1);
    }
}
