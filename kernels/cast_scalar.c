/* Conversions between the stored forms, one element at a time: the reference for the vector
 * versions, and their tail.  See [Note: the split master] in kernels.h. */
#include "internal.h"

void split_scalar(size_t n, const float *restrict f32, uint16_t *restrict hi,
                  int16_t *restrict lo) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = canonical_bits(f32_of(load_u32(f32 + i)));
        store_u16(hi + i, (bits + 0x8000u) >> 16);
        store_u16(lo + i, bits);
    }
}

void join_scalar(size_t n, const uint16_t *restrict hi, const int16_t *restrict lo,
                 float *restrict f32) {
    for (size_t i = 0; i < n; i++)
        store_u32(f32 + i, join_bits(load_u16(hi + i), load_u16(lo + i)));
}

void widen_scalar(size_t n, const uint16_t *restrict bf16, float *restrict f32) {
    for (size_t i = 0; i < n; i++) store_u32(f32 + i, (uint32_t)load_u16(bf16 + i) << 16);
}

void narrow_scalar(size_t n, const float *restrict f32, uint16_t *restrict bf16) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = canonical_bits(f32_of(load_u32(f32 + i)));
        store_u16(bf16 + i, (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
}

void accumulate_bf16_scalar(size_t n, float *restrict acc, const uint16_t *restrict grad) {
    for (size_t i = 0; i < n; i++) {
        float sum = f32_of(load_u32(acc + i)) + f32_of((uint32_t)load_u16(grad + i) << 16);
        store_u32(acc + i, canonical_bits(sum));
    }
}

void accumulate_f32_scalar(size_t n, float *restrict acc, const float *restrict grad) {
    for (size_t i = 0; i < n; i++)
        store_u32(acc + i, canonical_bits(f32_of(load_u32(acc + i)) + f32_of(load_u32(grad + i))));
}

void rewrite_scalar(size_t n, const uint16_t *restrict new_hi, uint16_t *restrict hi,
                    int16_t *restrict lo) {
    for (size_t i = 0; i < n; i++) {
        uint16_t value = load_u16(new_hi + i);
        if (value != load_u16(hi + i)) {
            store_u16(hi + i, value);
            store_u16(lo + i, 0);
        }
    }
}
