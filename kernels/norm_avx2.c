/* The sum of squares of one block, 32 elements at a time in 8 registers of 4 lanes. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

/* Adds the squares of 8 elements to the 8 lanes held in sum_f64x4[0] and [1]. */
TARGET_AVX2 static inline void add_squares8(__m256d *sum_f64x4, __m256 grad_f32x8) {
    __m256d low_f64x4 = _mm256_cvtps_pd(_mm256_castps256_ps128(grad_f32x8));
    __m256d high_f64x4 = _mm256_cvtps_pd(_mm256_extractf128_ps(grad_f32x8, 1));
    sum_f64x4[0] = _mm256_add_pd(sum_f64x4[0], _mm256_mul_pd(low_f64x4, low_f64x4));
    sum_f64x4[1] = _mm256_add_pd(sum_f64x4[1], _mm256_mul_pd(high_f64x4, high_f64x4));
}

TARGET_AVX2 static inline double sum_registers(const __m256d *sum_f64x4) {
    double lanes[SUM_LANES];
    for (size_t k = 0; k < 8; k++) _mm256_storeu_pd(lanes + 4 * k, sum_f64x4[k]);
    return sum_lanes(lanes);
}

TARGET_AVX2 double sum_squares_bf16_avx2(size_t n, const uint16_t *grad) {
    __m256d sum_f64x4[8];
    for (size_t k = 0; k < 8; k++) sum_f64x4[k] = _mm256_setzero_pd();
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++) add_squares8(sum_f64x4 + 2 * k, widen8(grad + i + 8 * k));
    }
    /* The tail is padded with zeros: adding +0 to a sum of squares changes no bit. */
    uint16_t tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    for (size_t k = 0; k < 4; k++) add_squares8(sum_f64x4 + 2 * k, widen8(tail + 8 * k));
    return sum_registers(sum_f64x4);
}

TARGET_AVX2 double sum_squares_f32_avx2(size_t n, const float *grad) {
    __m256d sum_f64x4[8];
    for (size_t k = 0; k < 8; k++) sum_f64x4[k] = _mm256_setzero_pd();
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++)
            add_squares8(sum_f64x4 + 2 * k, _mm256_loadu_ps(grad + i + 8 * k));
    }
    float tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    for (size_t k = 0; k < 4; k++) add_squares8(sum_f64x4 + 2 * k, _mm256_loadu_ps(tail + 8 * k));
    return sum_registers(sum_f64x4);
}
#endif
