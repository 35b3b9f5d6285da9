/* The sum of squares of one block, 32 elements at a time in 4 registers of 8 lanes. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx512.h"

/* Adds the squares of 16 elements to the 16 lanes held in sum_f64x8[0] and [1]. */
TARGET_AVX512 static inline void add_squares16(__m512d *sum_f64x8, __m512 grad_f32x16) {
    __m512d low_f64x8 = _mm512_cvtps_pd(_mm512_castps512_ps256(grad_f32x16));
    __m512d high_f64x8 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(grad_f32x16, 1));
    sum_f64x8[0] = _mm512_add_pd(sum_f64x8[0], _mm512_mul_pd(low_f64x8, low_f64x8));
    sum_f64x8[1] = _mm512_add_pd(sum_f64x8[1], _mm512_mul_pd(high_f64x8, high_f64x8));
}

TARGET_AVX512 static inline double sum_registers(const __m512d *sum_f64x8) {
    double lanes[SUM_LANES];
    for (size_t k = 0; k < 4; k++) _mm512_storeu_pd(lanes + 8 * k, sum_f64x8[k]);
    return sum_lanes(lanes);
}

TARGET_AVX512 double sum_squares_bf16_avx512(size_t n, const uint16_t *grad) {
    __m512d sum_f64x8[4];
    for (size_t k = 0; k < 4; k++) sum_f64x8[k] = _mm512_setzero_pd();
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
        add_squares16(sum_f64x8, widen16(grad + i));
        add_squares16(sum_f64x8 + 2, widen16(grad + i + 16));
    }
    /* The tail is padded with zeros: adding +0 to a sum of squares changes no bit. */
    uint16_t tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    add_squares16(sum_f64x8, widen16(tail));
    add_squares16(sum_f64x8 + 2, widen16(tail + 16));
    return sum_registers(sum_f64x8);
}

TARGET_AVX512 double sum_squares_f32_avx512(size_t n, const float *grad) {
    __m512d sum_f64x8[4];
    for (size_t k = 0; k < 4; k++) sum_f64x8[k] = _mm512_setzero_pd();
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
        add_squares16(sum_f64x8, _mm512_loadu_ps(grad + i));
        add_squares16(sum_f64x8 + 2, _mm512_loadu_ps(grad + i + 16));
    }
    float tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    add_squares16(sum_f64x8, _mm512_loadu_ps(tail));
    add_squares16(sum_f64x8 + 2, _mm512_loadu_ps(tail + 16));
    return sum_registers(sum_f64x8);
}
#endif
