#ifndef INFINITY_CODES_H
#define INFINITY_CODES_H
/* The scale and the codes of [Note: coded blocks], for one block of at most CODE_BLOCK elements. */
#include "internal.h"

/* Elements that share a scale. */
#define CODE_BLOCK ((size_t)256)
_Static_assert(BLOCK_NUMEL % 256 == 0, "the pool must not cut a block whose elements share a scale");

#define SIZE_BITS 0x7FFFFFFFu
#define INFINITE_BITS 0x7F800000u
/* Added to a number below 2^22, this leaves it, rounded to an integer, ties to even, in the last bits. */
#define ROUNDING 0x1.8p23f
#define ROUNDING_BITS 0x4B400000u

/* The bits of the largest magnitude, of elements [i, n) and of those before; a NaN is the largest. */
static inline uint32_t largest_size(size_t i, size_t n, const float *f32, uint32_t largest) {
    for (; i < n; i++) {
        uint32_t size = load_u32(f32 + i) & SIZE_BITS;
        largest = size > largest ? size : largest;
    }
    return largest;
}

static inline float code_scale(uint32_t largest, float most) {
    if (largest >= INFINITE_BITS) return f32_of(largest > INFINITE_BITS ? NAN_U32 : INFINITE_BITS);
    float scale = f32_of(largest) / most;
    return scale < 0x1p-100f ? 0x1p-100f : scale;
}

static inline bool is_finite_scale(float scale) {
    return bits_of(scale) < INFINITE_BITS;
}

/* Elements [i, n) of a block. */
static inline void narrow_i8_tail(size_t i, size_t n, const float *f32, float scale,
                                  int8_t *codes) {
    if (!is_finite_scale(scale)) {
        memset(codes + i, 1, n - i);
        return;
    }
    for (; i < n; i++) {
        float quotient = f32_of(load_u32(f32 + i)) / scale;
        codes[i] = (int8_t)(int32_t)(bits_of(quotient + ROUNDING) - ROUNDING_BITS);
    }
}
#endif
