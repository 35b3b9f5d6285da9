/* The small moments, one element at a time: the reference for the vector versions, and their tail.
 * See [Note: small moments] in kernels.h. */
#include "moments.h"

void narrow_moments_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                           uint16_t *restrict m, uint16_t *restrict v, uint64_t key,
                           uint32_t counter) {
    for (size_t i = 0; i < n; i++) {
        uint32_t noise = noise_of(key, counter + (uint32_t)i);
        store_u16(m + i, bf16_noisily(load_u32(m_f32 + i), noise & 0xFFFFu));
        store_u16(v + i, bf16_noisily(load_u32(v_f32 + i), noise >> 16));
    }
}

void dequantize_scalar(size_t n, const uint8_t *restrict m, const uint8_t *restrict v,
                       const float *restrict scale, float *restrict m_f32, float *restrict v_f32) {
    struct grids grids = grids_of(load_u32(scale), load_u32(scale + 1));
    for (size_t i = 0; i < n; i++) {
        store_u32(m_f32 + i, m_bits(m[i], grids.m_base));
        store_u32(v_f32 + i, v_bits(v[i], grids.v_base));
    }
}

void encode_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                   uint8_t *restrict m, uint8_t *restrict v, struct grids grids) {
    for (size_t i = 0; i < n; i++) {
        m[i] = m_code(canonical_bits(f32_of(load_u32(m_f32 + i))), grids.m_base, HALF_STEP);
        v[i] = v_code(canonical_bits(f32_of(load_u32(v_f32 + i))), grids.v_base, HALF_STEP);
    }
}

void encode_noisily_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                           uint8_t *restrict m, uint8_t *restrict v, struct grids grids,
                           uint64_t key, uint32_t counter) {
    for (size_t i = 0; i < n; i++) {
        uint32_t noise = noise_of(key, counter + (uint32_t)i);
        m[i] = m_code(load_u32(m_f32 + i), grids.m_base, m_noise(noise));
        v[i] = v_code(load_u32(v_f32 + i), grids.v_base, v_noise(noise));
    }
}

void quantize_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                     uint8_t *restrict m, uint8_t *restrict v, float *restrict scale) {
    struct grids grids = store_scales(scale, largest_of(n, m_f32, v_f32, (struct largest){0, 0}));
    encode_scalar(n, m_f32, v_f32, m, v, grids);
}

void quantize_noisily_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                             uint8_t *restrict m, uint8_t *restrict v, float *restrict scale,
                             uint64_t key, uint32_t counter) {
    struct grids grids = store_scales(scale, largest_of(n, m_f32, v_f32, (struct largest){0, 0}));
    encode_noisily_scalar(n, m_f32, v_f32, m, v, grids, key, counter);
}
