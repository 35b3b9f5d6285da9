/* The sum of squares of one block, 32 elements at a time in 4 registers of 8 lanes. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "cast_avx2.h"

/* Adds the squares of 8 elements to 8 lanes.  A square of an fp32 is exact in fp64, so the FMA has the bits of a
 * product and a sum. */
TARGET_AVX512 static inline __m512d add_squares8(__m512d sum_f64x8, __m256 grad_f32x8) {
    __m512d grad_f64x8 = _mm512_cvtps_pd(grad_f32x8);
    return _mm512_fmadd_pd(grad_f64x8, grad_f64x8, sum_f64x8);
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
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++)
            sum_f64x8[k] = add_squares8(sum_f64x8[k], widen8(grad + i + 8 * k));
    }
    /* The tail is padded with zeros: adding +0 to a sum of squares changes no bit. */
    uint16_t tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    for (size_t k = 0; k < 4; k++) sum_f64x8[k] = add_squares8(sum_f64x8[k], widen8(tail + 8 * k));
    return sum_registers(sum_f64x8);
}

TARGET_AVX512 double sum_squares_f32_avx512(size_t n, const float *grad) {
    __m512d sum_f64x8[4];
    for (size_t k = 0; k < 4; k++) sum_f64x8[k] = _mm512_setzero_pd();
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++)
            sum_f64x8[k] = add_squares8(sum_f64x8[k], _mm256_loadu_ps(grad + i + 8 * k));
    }
    float tail[SUM_LANES] = {0};
    memcpy(tail, grad + i, (n - i) * sizeof *grad);
    for (size_t k = 0; k < 4; k++)
        sum_f64x8[k] = add_squares8(sum_f64x8[k], _mm256_loadu_ps(tail + 8 * k));
    return sum_registers(sum_f64x8);
}
#endif
