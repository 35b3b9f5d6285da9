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

/* Random bits of a rounding to a code. */
#define CODE_NOISE 20

/* How moments are coded: c codes beside 0, for the largest c of the floats whose bits are multiples of
 * 2^shift.  Always a constant, and what takes one is inlined. */
struct coding {
    int m_shift, v_shift;
    uint32_t m_codes, v_codes;
};

/* The grid of the 8-bit moments: floats whose bits are multiples of GRID_STEP. */
#define GRID_SHIFT 20
#define GRID_STEP (1u << GRID_SHIFT)
#define GRID_MAX 0x7F700000u /* the largest finite one */
#define M_CODES 127u
#define V_CODES 255u
#define IN_8_BITS ((struct coding){GRID_SHIFT, GRID_SHIFT, M_CODES, V_CODES})
/* [Note: 4-bit moments] */
#define IN_4_BITS ((struct coding){M_SHIFT_4, V_SHIFT_4, 7u, 15u})
#define M_SHIFT_4 22
#define V_SHIFT_4 23
/* 2^-90: every code of m, divided by 2^23, is then a normal number, on which arithmetic is fast. */
#define SCALE_MIN 0x12800000u
/* The noise with which rounding at random becomes rounding to nearest. */
#define HALF_STEP (1u << (CODE_NOISE - 1))

#define INLINED static inline __attribute__((always_inline))

/* The 32 random bits of a pair of elements: [Note: the noise]. */
static inline uint32_t hash_of(uint64_t key, uint32_t pair) {
    uint32_t x = pair * NOISE_FACTOR_1 + (uint32_t)(key & 0xFFFFFFFFu);
    x ^= x >> 15 ^ (uint32_t)(key >> 32);
    x *= NOISE_FACTOR_2;
    return x ^ x >> 16;
}

/* One block's codes: code c, not 0, is the float whose bits are base + (c << shift). */
struct grids {
    uint32_t m_base, v_base;
};

INLINED struct grids grids_of(uint32_t m_scale, uint32_t v_scale, struct coding by) {
    return (struct grids){m_scale - (by.m_codes << by.m_shift), v_scale - (by.v_codes << by.v_shift)};
}

/* The bits of the grid point to which a magnitude is rounded, with meaningless bits below them. */
INLINED uint32_t rounded_size(uint32_t size, uint32_t noise, int shift) {
    return size < INFINITY_U32 - (1u << shift) ? size + (noise << (shift - CODE_NOISE)) : size;
}

/* The bits of the scale of a block whose largest rounded magnitude has the bits `largest`. */
INLINED uint32_t scale_of(uint32_t largest, int shift) {
    if (largest > INFINITY_U32) return NAN_U32 >> shift << shift;
    uint32_t point = largest >> shift << shift;
    return point < SCALE_MIN ? SCALE_MIN : point;
}

/* The bits of a block's largest rounded magnitudes. */
struct largest {
    uint32_t m, v;
};

/* Stores both scales of a block, 0 for a block of zeros, and returns its grids. */
INLINED struct grids store_scales(float *scale, uint32_t m_largest, uint32_t v_largest,
                                  struct coding by) {
    uint32_t m_scale = scale_of(m_largest, by.m_shift), v_scale = scale_of(v_largest, by.v_shift);
    store_u32(scale, m_largest >> by.m_shift == 0 ? 0 : m_scale);
    store_u32(scale + 1, v_largest >> by.v_shift == 0 ? 0 : v_scale);
    return grids_of(m_scale, v_scale, by);
}

/* The code of the bits of an m.  Below the smallest code's float s it becomes s if it is at least
 * s (1 - noise / 2^20), else 0; the product is exact. */
INLINED uint8_t m_code(uint32_t bits, uint32_t base, uint32_t noise, int shift) {
    uint32_t size = bits & SIZE_MASK, smallest = base + (1u << shift), code;
    if (size < smallest) {
        float threshold = (float)((1u << CODE_NOISE) - noise) * (f32_of(smallest) * 0x1p-20f);
        code = size >= bits_of(threshold) ? 1 : 0;
    } else {
        code = (rounded_size(size, noise, shift) - base) >> shift;
    }
    return (uint8_t)((bits >> 24 & 0x80u) | code);
}

INLINED uint8_t v_code(uint32_t bits, uint32_t base, uint32_t noise, int shift) {
    uint32_t rounded = rounded_size(bits & SIZE_MASK, noise, shift);
    if (rounded >> shift == 0) return 0;
    return (uint8_t)(rounded < base + (2u << shift) ? 1 : (rounded - base) >> shift);
}

INLINED uint32_t m_bits(uint8_t code, uint32_t base, struct coding by) {
    uint32_t c = code & by.m_codes, sign = (uint32_t)(code >> 7) << 31;
    return sign | (c == 0 ? 0 : base + (c << by.m_shift));
}

INLINED uint32_t v_bits(uint8_t code, uint32_t base, struct coding by) {
    return code == 0 ? 0 : base + ((uint32_t)code << by.v_shift);
}

/* (u + r) >> 16 of [Note: bf16 moments]. */
static inline uint32_t bf16_noisily(uint32_t bits, uint32_t noise) {
    return ((bits & SIZE_MASK) < BF16_MAX ? bits + noise : bits) >> 16;
}

/* Elements [i, n) of a block, one by one: the rest that does not fill a register. */
static inline void narrow_moments_tail(size_t i, size_t n, const float *m_f32, const float *v_f32,
                                       const struct noises *noises, uint16_t *m, uint16_t *v) {
    for (; i < n; i++) {
        uint32_t m_u32 = canonical_bits(f32_of(load_u32(m_f32 + i)));
        uint32_t v_u32 = canonical_bits(f32_of(load_u32(v_f32 + i)));
        store_u16(m + i, bf16_noisily(m_u32, noises->m[i]));
        store_u16(v + i, bf16_noisily(v_u32, noises->v[i]));
    }
}

INLINED struct largest largest_tail(size_t i, size_t n, const float *m_f32, const float *v_f32,
                                    const struct noises *noises, struct largest so_far,
                                    struct coding by) {
    for (; i < n; i++) {
        uint32_t m = canonical_bits(f32_of(load_u32(m_f32 + i))) & SIZE_MASK;
        uint32_t v = canonical_bits(f32_of(load_u32(v_f32 + i))) & SIZE_MASK;
        m = rounded_size(m, noises->m[i], by.m_shift);
        v = rounded_size(v, noises->v[i], by.v_shift);
        so_far.m = m > so_far.m ? m : so_far.m;
        so_far.v = v > so_far.v ? v : so_far.v;
    }
    return so_far;
}

INLINED void quantize_tail(size_t i, size_t n, const float *m_f32, const float *v_f32,
                           const struct noises *noises, uint8_t *m, uint8_t *v, struct grids grids,
                           struct coding by) {
    for (; i < n; i++) {
        uint32_t m_u32 = canonical_bits(f32_of(load_u32(m_f32 + i)));
        uint32_t v_u32 = canonical_bits(f32_of(load_u32(v_f32 + i)));
        m[i] = m_code(m_u32, grids.m_base, noises->m[i], by.m_shift);
        v[i] = v_code(v_u32, grids.v_base, noises->v[i], by.v_shift);
    }
}

INLINED void dequantize_tail(size_t i, size_t n, const uint8_t *m, const uint8_t *v,
                             struct grids grids, float *m_f32, float *v_f32, struct coding by) {
    for (; i < n; i++) {
        store_u32(m_f32 + i, m_bits(m[i], grids.m_base, by));
        store_u32(v_f32 + i, v_bits(v[i], grids.v_base, by));
    }
}

/* 4-bit codes in one byte: v's in the high half, m's in the low one, its sign in bit 3.  As
 * quantize_tail has them, m's sign is bit 7.  Eight at a time; beyond n, the words may hold anything. */
#define OF_EACH(byte) (0x0101010101010101u * (uint64_t)(byte))

static inline void pack_codes(size_t n, const uint8_t *m, const uint8_t *v, uint8_t *packed) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t m_u8x8, v_u8x8, both;
        memcpy(&m_u8x8, m + i, 8);
        memcpy(&v_u8x8, v + i, 8);
        both = (m_u8x8 & OF_EACH(0x07)) | (m_u8x8 >> 4 & OF_EACH(0x08)) | (v_u8x8 & OF_EACH(0x0F)) << 4;
        memcpy(packed + i, &both, n - i < 8 ? n - i : 8);
    }
}

static inline void unpack_codes(size_t n, const uint8_t *packed, uint8_t *m, uint8_t *v) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t both = 0, m_u8x8, v_u8x8;
        memcpy(&both, packed + i, n - i < 8 ? n - i : 8);
        m_u8x8 = (both & OF_EACH(0x07)) | (both & OF_EACH(0x08)) << 4;
        v_u8x8 = both >> 4 & OF_EACH(0x0F);
        memcpy(m + i, &m_u8x8, 8);
        memcpy(v + i, &v_u8x8, 8);
    }
}

/* quantize, dequantize and those of 4 bits, from an instruction set's inlined *_by. */
#define CODES_FUNCTIONS(TARGET, isa) \
    TARGET void dequantize_##isa(size_t n, const uint8_t *restrict m, const uint8_t *restrict v, \
                                 const float *restrict scale, float *restrict m_f32, \
                                 float *restrict v_f32) { \
        dequantize_by(n, m, v, scale, m_f32, v_f32, IN_8_BITS); \
    } \
    TARGET void quantize_##isa(size_t n, const float *restrict m_f32, const float *restrict v_f32, \
                               const struct noises *restrict noises, uint8_t *restrict m, \
                               uint8_t *restrict v, float *restrict scale) { \
        quantize_by(n, m_f32, v_f32, noises, m, v, scale, IN_8_BITS); \
    } \
    TARGET void dequantize4_##isa(size_t n, const uint8_t *restrict packed, \
                                  const float *restrict scale, float *restrict m_f32, \
                                  float *restrict v_f32) { \
        _Alignas(64) uint8_t m[STATE_BLOCK], v[STATE_BLOCK]; \
        unpack_codes(n, packed, m, v); \
        dequantize_by(n, m, v, scale, m_f32, v_f32, IN_4_BITS); \
    } \
    TARGET void quantize4_##isa(size_t n, const float *restrict m_f32, \
                                const float *restrict v_f32, \
                                const struct noises *restrict noises, uint8_t *restrict packed, \
                                float *restrict scale) { \
        _Alignas(64) uint8_t m[STATE_BLOCK] = {0}, v[STATE_BLOCK] = {0}; \
        quantize_by(n, m_f32, v_f32, noises, m, v, scale, IN_4_BITS); \
        pack_codes(n, m, v, packed); \
    }
#endif
