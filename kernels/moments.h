#ifndef INFINITY_MOMENTS_H
#define INFINITY_MOMENTS_H
/* The noise and the grid of [Note: small moments], for one element and for one block's scale. */
#include "internal.h"

#define INFINITY_U32 0x7F800000u
#define SIZE_MASK 0x7FFFFFFFu

#define NOISE_FACTOR_1 0x85EBCA6Bu
#define NOISE_FACTOR_2 0xC2B2AE35u

/* Bits of the largest finite bf16. */
#define BF16_MAX 0x7F7F0000u

/* The grid of the 8-bit moments: floats whose bits are multiples of GRID_STEP. */
#define GRID_SHIFT 20
#define GRID_STEP (1u << GRID_SHIFT)
#define GRID_MAX 0x7F700000u /* the largest finite one */
#define M_CODES 127u
#define V_CODES 255u
/* 2^-90: every code of m, divided by 2^20, is then a normal number, and arithmetic on it quick. */
#define SCALE_MIN 0x12800000u
/* The noise that makes rounding to nearest of it. */
#define HALF_STEP (GRID_STEP / 2)

/* 32 random bits: [Note: the noise]. */
static inline uint32_t noise_of(uint64_t key, uint32_t counter) {
    uint32_t x = counter + (uint32_t)(key & 0xFFFFFFFFu);
    x ^= x >> 16;
    x *= NOISE_FACTOR_1;
    x ^= x >> 13;
    x += (uint32_t)(key >> 32);
    x *= NOISE_FACTOR_2;
    return x ^ x >> 16;
}

/* Either half of the noise, as a part of a grid step: never 0, never a whole one. */
static inline uint32_t m_noise(uint32_t noise) {
    return (noise & 0xFFFFu) << 4 | 8u;
}

static inline uint32_t v_noise(uint32_t noise) {
    return noise >> 16 << 4 | 8u;
}

/* One block's codes: code c, not 0, is the float whose bits are base + c * GRID_STEP. */
struct grids {
    uint32_t m_base, v_base;
};

static inline struct grids grids_of(uint32_t m_scale, uint32_t v_scale) {
    return (struct grids){m_scale - M_CODES * GRID_STEP, v_scale - V_CODES * GRID_STEP};
}

/* The bits of the scale of a block whose largest magnitude has the bits `largest`. */
static inline uint32_t scale_of(uint32_t largest) {
    if (largest > INFINITY_U32) return NAN_U32;
    uint32_t up = largest < GRID_MAX ? largest + (GRID_STEP - 1) : largest;
    up &= ~(GRID_STEP - 1);
    return up < SCALE_MIN ? SCALE_MIN : up;
}

/* The bits of a block's largest magnitudes. */
struct largest {
    uint32_t m, v;
};

/* The larger of `so_far` and those of n elements. */
static inline struct largest largest_of(size_t n, const float *m_f32, const float *v_f32,
                                        struct largest so_far) {
    for (size_t i = 0; i < n; i++) {
        uint32_t m = load_u32(m_f32 + i) & SIZE_MASK, v = load_u32(v_f32 + i) & SIZE_MASK;
        so_far.m = m > so_far.m ? m : so_far.m;
        so_far.v = v > so_far.v ? v : so_far.v;
    }
    return so_far;
}

/* Stores both scales of a block, 0 for a block of zeros, and returns its grids. */
static inline struct grids store_scales(float *scale, struct largest largest) {
    uint32_t m_scale = scale_of(largest.m), v_scale = scale_of(largest.v);
    store_u32(scale, largest.m == 0 ? 0 : m_scale);
    store_u32(scale + 1, largest.v == 0 ? 0 : v_scale);
    return grids_of(m_scale, v_scale);
}

/* The code of the bits of an m.  Below the smallest code it goes up to that where it is at least the
 * part of it that the noise leaves; the product is exact. */
static inline uint8_t m_code(uint32_t bits, uint32_t base, uint32_t noise) {
    uint32_t size = bits & SIZE_MASK, smallest = base + GRID_STEP, code;
    if (size < smallest) {
        float threshold = (float)(GRID_STEP - noise) * (f32_of(smallest) * 0x1p-20f);
        code = size >= bits_of(threshold) ? 1 : 0;
    } else {
        code = ((size < GRID_MAX ? size + noise : size) - base) >> GRID_SHIFT;
    }
    return (uint8_t)((bits >> 24 & 0x80u) | code);
}

static inline uint8_t v_code(uint32_t bits, uint32_t base, uint32_t noise) {
    uint32_t size = bits & SIZE_MASK;
    if (size == 0) return 0;
    if (size < base + GRID_STEP) return 1;
    return (uint8_t)(((size < GRID_MAX ? size + noise : size) - base) >> GRID_SHIFT);
}

static inline uint32_t m_bits(uint8_t code, uint32_t base) {
    uint32_t c = code & M_CODES, sign = (uint32_t)(code >> 7) << 31;
    return sign | (c == 0 ? 0 : base + c * GRID_STEP);
}

static inline uint32_t v_bits(uint8_t code, uint32_t base) {
    return code == 0 ? 0 : base + code * GRID_STEP;
}

/* The codes of n elements whose block's grids are known; a vector version's tail. */
void encode_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                   uint8_t *restrict m, uint8_t *restrict v, struct grids grids);
void encode_noisily_scalar(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                           uint8_t *restrict m, uint8_t *restrict v, struct grids grids,
                           uint64_t key, uint32_t counter);

/* (u + r) >> 16 of [Note: bf16 moments]. */
static inline uint32_t bf16_noisily(uint32_t bits, uint32_t noise) {
    return ((bits & SIZE_MASK) < BF16_MAX ? bits + noise : bits) >> 16;
}
#endif
