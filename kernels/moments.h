#ifndef INFINITY_MOMENTS_H
#define INFINITY_MOMENTS_H
/* The noise and the grid of [Note: small moments], for one element and for one block's scale. */
#include "internal.h"

#define INFINITY_U32 0x7F800000u
#define SIZE_MASK 0x7FFFFFFFu

#define NOISE_FACTOR_1 0x7FEB352Du
#define NOISE_FACTOR_2 0x846CA68Bu

/* Bits of the largest finite bf16. */
#define BF16_MAX 0x7F7F0000u

/* The grid of the 8-bit moments: floats whose bits are multiples of GRID_STEP. */
#define GRID_SHIFT 20
#define GRID_STEP (1u << GRID_SHIFT)
#define GRID_MAX 0x7F700000u /* the largest finite one */
#define M_CODES 127u
#define V_CODES 255u
/* 2^-90: every code of m, divided by 2^20, is then a normal number, on which arithmetic is fast. */
#define SCALE_MIN 0x12800000u
/* The noise with which rounding at random becomes rounding to nearest. */
#define HALF_STEP (GRID_STEP / 2)

/* The 32 random bits of a pair of elements: [Note: the noise]. */
static inline uint32_t hash_of(uint64_t key, uint32_t pair) {
    uint32_t x = pair * NOISE_FACTOR_1 + (uint32_t)(key & 0xFFFFFFFFu);
    x ^= x >> 15 ^ (uint32_t)(key >> 32);
    x *= NOISE_FACTOR_2;
    return x ^ x >> 16;
}

/* One block's codes: code c, not 0, is the float whose bits are base + c * GRID_STEP. */
struct grids {
    uint32_t m_base, v_base;
};

static inline struct grids grids_of(uint32_t m_scale, uint32_t v_scale) {
    return (struct grids){m_scale - M_CODES * GRID_STEP, v_scale - V_CODES * GRID_STEP};
}

/* The bits of the grid point to which a magnitude is rounded, with meaningless bits below them. */
static inline uint32_t rounded_size(uint32_t size, uint32_t noise) {
    return size < GRID_MAX ? size + noise : size;
}

/* The bits of the scale of a block whose largest rounded magnitude has the bits `largest`. */
static inline uint32_t scale_of(uint32_t largest) {
    if (largest > INFINITY_U32) return NAN_U32;
    uint32_t point = largest & ~(GRID_STEP - 1);
    return point < SCALE_MIN ? SCALE_MIN : point;
}

/* The bits of a block's largest rounded magnitudes. */
struct largest {
    uint32_t m, v;
};

/* Stores both scales of a block, 0 for a block of zeros, and returns its grids. */
static inline struct grids store_scales(float *scale, uint32_t m_largest, uint32_t v_largest) {
    uint32_t m_scale = scale_of(m_largest), v_scale = scale_of(v_largest);
    store_u32(scale, m_largest < GRID_STEP ? 0 : m_scale);
    store_u32(scale + 1, v_largest < GRID_STEP ? 0 : v_scale);
    return grids_of(m_scale, v_scale);
}

/* The code of the bits of an m.  Below the smallest code's float s it becomes s if it is at least
 * s (1 - noise / 2^20), else 0; the product is exact. */
static inline uint8_t m_code(uint32_t bits, uint32_t base, uint32_t noise) {
    uint32_t size = bits & SIZE_MASK, smallest = base + GRID_STEP, code;
    if (size < smallest) {
        float threshold = (float)(GRID_STEP - noise) * (f32_of(smallest) * 0x1p-20f);
        code = size >= bits_of(threshold) ? 1 : 0;
    } else {
        code = (rounded_size(size, noise) - base) >> GRID_SHIFT;
    }
    return (uint8_t)((bits >> 24 & 0x80u) | code);
}

static inline uint8_t v_code(uint32_t bits, uint32_t base, uint32_t noise) {
    uint32_t rounded = rounded_size(bits & SIZE_MASK, noise);
    if (rounded < GRID_STEP) return 0;
    return (uint8_t)(rounded < base + 2 * GRID_STEP ? 1 : (rounded - base) >> GRID_SHIFT);
}

static inline uint32_t m_bits(uint8_t code, uint32_t base) {
    uint32_t c = code & M_CODES, sign = (uint32_t)(code >> 7) << 31;
    return sign | (c == 0 ? 0 : base + c * GRID_STEP);
}

static inline uint32_t v_bits(uint8_t code, uint32_t base) {
    return code == 0 ? 0 : base + code * GRID_STEP;
}

/* (u + r) >> 16 of [Note: bf16 moments]. */
static inline uint32_t bf16_noisily(uint32_t bits, uint32_t noise) {
    return ((bits & SIZE_MASK) < BF16_MAX ? bits + noise : bits) >> 16;
}

/* Elements [i, n) of a block, one by one: the rest that does not fill a register. */
static inline void narrow_moments_tail(size_t i, size_t n, const float *m_f32, const float *v_f32,
                                       const struct noises *noises, uint16_t *m, uint16_t *v) {
    for (; i < n; i++) {
        store_u16(m + i, bf16_noisily(load_u32(m_f32 + i), noises->m[i]));
        store_u16(v + i, bf16_noisily(load_u32(v_f32 + i), noises->v[i]));
    }
}

static inline struct largest largest_tail(size_t i, size_t n, const float *m_f32,
                                          const float *v_f32, const struct noises *noises,
                                          struct largest so_far) {
    for (; i < n; i++) {
        uint32_t m = canonical_bits(f32_of(load_u32(m_f32 + i))) & SIZE_MASK;
        uint32_t v = canonical_bits(f32_of(load_u32(v_f32 + i))) & SIZE_MASK;
        m = rounded_size(m, noises->m[i]);
        v = rounded_size(v, noises->v[i]);
        so_far.m = m > so_far.m ? m : so_far.m;
        so_far.v = v > so_far.v ? v : so_far.v;
    }
    return so_far;
}

static inline void quantize_tail(size_t i, size_t n, const float *m_f32, const float *v_f32,
                                 const struct noises *noises, uint8_t *m, uint8_t *v,
                                 struct grids grids) {
    for (; i < n; i++) {
        m[i] = m_code(canonical_bits(f32_of(load_u32(m_f32 + i))), grids.m_base, noises->m[i]);
        v[i] = v_code(canonical_bits(f32_of(load_u32(v_f32 + i))), grids.v_base, noises->v[i]);
    }
}
#endif
