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

INLINED void dequantize_by(size_t n, const uint8_t *m, const uint8_t *v, const float *scale,
                           float *m_f32, float *v_f32, struct coding by) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1), by);
    dequantize_tail(0, n, m, v, grids, m_f32, v_f32, by);
}

INLINED void quantize_by(size_t n, const float *m_f32, const float *v_f32,
                         const struct noises *noises, uint8_t *m, uint8_t *v, float *scale,
                         struct coding by) {
    struct largest none = {0, 0}, largest = largest_tail(0, n, m_f32, v_f32, noises, none, by);
    struct grids grids = store_scales(scale, largest.m, largest.v, by);
    quantize_tail(0, n, m_f32, v_f32, noises, m, v, grids, by);
}

CODES_FUNCTIONS(, scalar)
