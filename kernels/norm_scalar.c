/* The sum of squares of one block, one element at a time.  See kernels.h for the order of the sum.
 */
#include "internal.h"

static inline void add_square(double *lane, float grad) {
    *lane = *lane + (double)grad * (double)grad;
}

double sum_squares_bf16_scalar(size_t n, const uint16_t *grad) {
    double lanes[SUM_LANES] = {0};
    for (size_t i = 0; i < n; i++)
        add_square(&lanes[i % SUM_LANES], f32_of((uint32_t)load_u16(grad + i) << 16));
    return sum_lanes(lanes);
}

double sum_squares_f32_scalar(size_t n, const float *grad) {
    double lanes[SUM_LANES] = {0};
    for (size_t i = 0; i < n; i++) add_square(&lanes[i % SUM_LANES], f32_of(load_u32(grad + i)));
    return sum_lanes(lanes);
}
