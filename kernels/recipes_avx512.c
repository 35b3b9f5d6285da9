/* [Note: other recipes], 16 elements at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

#define TARGET TARGET_AVX512
#define LANES_FUNCTION TARGET static inline __attribute__((always_inline))
#define KERNEL(name) name##_avx512
#define LEFT_OVER(name, ...) name##_scalar(n - i, __VA_ARGS__, type, s)
#define REST(name, ...) name##_scalar(n - i, __VA_ARGS__)

typedef __m512 f32s;
#define LANES ((size_t)16)

LANES_FUNCTION f32s all(float value) {
    return _mm512_set1_ps(value);
}

LANES_FUNCTION f32s load_f32s(const float *address) {
    return _mm512_loadu_ps(address);
}

LANES_FUNCTION f32s load_bf16s(const uint16_t *address) {
    return widen16(address);
}

LANES_FUNCTION f32s load_f16s(const uint16_t *address) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)address));
}

LANES_FUNCTION f32s load_split(const uint16_t *hi, const int16_t *lo) {
    return join16(hi, lo);
}

LANES_FUNCTION void store_f32s(float *address, f32s values) {
    _mm512_storeu_ps(address, canonical16(values));
}

LANES_FUNCTION void store_f16s(uint16_t *address, f32s values) {
    __m256i f16x16 = _mm512_cvtps_ph(canonical16(values), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256((__m256i *)address, f16x16);
}

/* Whether stream_f16s may begin at an address. */
LANES_FUNCTION bool streams_to(const uint16_t *address) {
    return ((uintptr_t)address & 31) == 0;
}

/* store_f16s, around the caches. */
LANES_FUNCTION void stream_f16s(uint16_t *address, f32s values) {
    __m256i f16x16 = _mm512_cvtps_ph(canonical16(values), _MM_FROUND_TO_NEAREST_INT);
    _mm256_stream_si256((__m256i *)address, f16x16);
}

/* Later stores may not pass those around the caches. */
LANES_FUNCTION void end_streams(void) {
    _mm_sfence();
}

LANES_FUNCTION void store_split(uint16_t *hi, int16_t *lo, f32s values) {
    split16(values, hi, lo);
}

/* a * b + c, rounded once. */
LANES_FUNCTION f32s fused(f32s a, f32s b, f32s c) {
    return _mm512_fmadd_ps(a, b, c);
}

LANES_FUNCTION f32s roots(f32s values) {
    return _mm512_sqrt_ps(values);
}

LANES_FUNCTION f32s signs(f32s values) {
    __mmask16 above = _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_GT_OQ);
    __mmask16 below = _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps(above, all(1.0f)) - _mm512_maskz_mov_ps(below, all(1.0f));
}

#include "recipes.h"
#endif
