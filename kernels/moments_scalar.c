/* The small moments, one element at a time: the reference for the vector versions, and their tail.
 * See [Note: small moments] in kernels.h. */
#include "moments.h"

void noise_scalar(size_t n, uint64_t key, uint64_t first, int width, uint32_t *restrict m,
                  uint32_t *restrict v) {
    for (size_t i = 0; i < n; i++) {
        uint32_t hash = hash_of(key, (uint32_t)((first + i) / 2));
        uint32_t low = hash & ((1u << width) - 1), high = hash >> (32 - width);
        bool is_odd = (first + i) % 2 != 0;
        m[i] = is_odd ? high : low;
        v[i] = is_odd ? low : high;
    }
}

void narrow_moments_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                           const struct noises *restrict noises, uint16_t *restrict m,
                           uint16_t *restrict v) {
    narrow_moments_tail(0, n, m_f32, v_f32, noises, m, v);
}

void dequantize_scalar(size_t n, const uint8_t *restrict m, const uint8_t *restrict v,
                       const float *restrict scale, float *restrict m_f32, float *restrict v_f32) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
    for (size_t i = 0; i < n; i++) {
        store_u32(m_f32 + i, m_bits(m[i], grids.m_base));
        store_u32(v_f32 + i, v_bits(v[i], grids.v_base));
    }
}

void quantize_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                     const struct noises *restrict noises, uint8_t *restrict m,
                     uint8_t *restrict v, float *restrict scale) {
    struct largest largest = largest_tail(0, n, m_f32, v_f32, noises, (struct largest){0, 0});
    struct grids grids = store_scales(scale, largest.m, largest.v);
    quantize_tail(0, n, m_f32, v_f32, noises, m, v, grids);
}
