/* [Note: other recipes], 8 elements at a time.  Every processor with AVX2 has F16C, and,
 * but for one of VIA's, FMA: is_supported asks for both. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

#define TARGET __attribute__((target("avx2,f16c,fma")))
#define LANES_FUNCTION TARGET static inline __attribute__((always_inline))
#define KERNEL(name) name##_avx2
#define LEFT_OVER(name, ...) name##_scalar(n - i, __VA_ARGS__, type, s)
#define REST(name, ...) name##_scalar(n - i, __VA_ARGS__)

typedef __m256 f32s;
#define LANES ((size_t)8)

LANES_FUNCTION f32s all(float value) {
    return _mm256_set1_ps(value);
}

LANES_FUNCTION f32s load_f32s(const float *address) {
    return _mm256_loadu_ps(address);
}

LANES_FUNCTION f32s load_bf16s(const uint16_t *address) {
    return widen8(address);
}

LANES_FUNCTION f32s load_f16s(const uint16_t *address) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)address));
}

LANES_FUNCTION f32s load_split(const uint16_t *hi, const int16_t *lo) {
    return join8(hi, lo);
}

LANES_FUNCTION void store_f32s(float *address, f32s values) {
    _mm256_storeu_ps(address, canonical8(values));
}

LANES_FUNCTION void store_f16s(uint16_t *address, f32s values) {
    __m128i f16x8 = _mm256_cvtps_ph(canonical8(values), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)address, f16x8);
}

/* Whether stream_f16s may begin at an address. */
LANES_FUNCTION bool streams_to(const uint16_t *address) {
    return ((uintptr_t)address & 15) == 0;
}

/* store_f16s, around the caches. */
LANES_FUNCTION void stream_f16s(uint16_t *address, f32s values) {
    __m128i f16x8 = _mm256_cvtps_ph(canonical8(values), _MM_FROUND_TO_NEAREST_INT);
    _mm_stream_si128((__m128i *)address, f16x8);
}

/* Later stores may not pass those around the caches. */
LANES_FUNCTION void end_streams(void) {
    _mm_sfence();
}

LANES_FUNCTION void store_split(uint16_t *hi, int16_t *lo, f32s values) {
    split8(values, hi, lo);
}

/* a * b + c, rounded once. */
LANES_FUNCTION f32s fused(f32s a, f32s b, f32s c) {
    return _mm256_fmadd_ps(a, b, c);
}

LANES_FUNCTION f32s roots(f32s values) {
    return _mm256_sqrt_ps(values);
}

LANES_FUNCTION f32s signs(f32s values) {
    __m256 above = _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_GT_OQ);
    __m256 below = _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_LT_OQ);
    return _mm256_and_ps(above, all(1.0f)) - _mm256_and_ps(below, all(1.0f));
}

#include "recipes.h"
#endif
