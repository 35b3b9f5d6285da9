/* [Note: other recipes], one element at a time: the reference for the vector versions, and their
 * tail. */
#include <math.h>

#include "internal.h"

#define TARGET
#define LANES_FUNCTION static inline __attribute__((always_inline))
#define KERNEL(name) name##_scalar
#define LEFT_OVER(...) (void)i /* nothing is */
#define REST LEFT_OVER

typedef float f32s;
#define LANES ((size_t)1)

LANES_FUNCTION f32s all(float value) {
    return value;
}

LANES_FUNCTION f32s load_f32s(const float *address) {
    return f32_of(load_u32(address));
}

LANES_FUNCTION f32s load_bf16s(const uint16_t *address) {
    return f32_of((uint32_t)load_u16(address) << 16);
}

LANES_FUNCTION f32s load_f16s(const uint16_t *address) {
    uint32_t half = load_u16(address), sign = (half & 0x8000u) << 16, size = (half & 0x7FFFu) << 13;
    if (size >= 0x7C00u << 13) return f32_of(sign | (size + 0x70000000u)); /* infinity, NaN */
    if (size >= 0x0400u << 13) return f32_of(sign | (size + 0x38000000u));
    /* A denormal: as the mantissa of 2^-14, without that. */
    return f32_of(sign | bits_of(f32_of(size + 0x38800000u) - 0x1p-14f));
}

LANES_FUNCTION f32s load_split(const uint16_t *hi, const int16_t *lo) {
    return f32_of(join_bits(load_u16(hi), load_u16(lo)));
}

LANES_FUNCTION void store_f32s(float *address, f32s values) {
    store_u32(address, canonical_bits(values));
}

/* To nearest, ties to even. */
LANES_FUNCTION void store_f16s(uint16_t *address, f32s values) {
    uint32_t bits = canonical_bits(values), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u)
        store_u16(address, 0x7E00);
    else if (size >= 0x47800000u) /* 2^16 */
        store_u16(address, sign | 0x7C00);
    else if (size < 0x38800000u) /* 2^-14: 2^-24 is the last place of 0.5 */
        store_u16(address, sign | (bits_of(f32_of(size) + 0.5f) - bits_of(0.5f)));
    else
        store_u16(address, sign | (size + 0xFFF + (size >> 13 & 1) - 0x38000000u) >> 13);
}

/* One element at a time fills no line: no address is streamed to. */
LANES_FUNCTION bool streams_to(const uint16_t *address) {
    (void)address;
    return false;
}

LANES_FUNCTION void stream_f16s(uint16_t *address, f32s values) {
    store_f16s(address, values);
}

LANES_FUNCTION void end_streams(void) {}

LANES_FUNCTION void store_split(uint16_t *hi, int16_t *lo, f32s values) {
    uint32_t bits = canonical_bits(values);
    store_u16(hi, (bits + 0x8000u) >> 16);
    store_u16(lo, bits);
}

/* a * b + c, rounded once. */
LANES_FUNCTION f32s fused(f32s a, f32s b, f32s c) {
    return fmaf(a, b, c);
}

LANES_FUNCTION f32s roots(f32s values) {
    return sqrtf(values);
}

LANES_FUNCTION f32s signs(f32s values) {
    return (values > 0 ? 1.0f : 0.0f) - (values < 0 ? 1.0f : 0.0f);
}

#include "recipes.h"
