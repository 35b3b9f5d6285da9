/* The adamw step, 8 elements at a time.  See [Note: the adamw step] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx2.h"

TARGET_AVX2 void adamw_bf16_avx2(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                 float *restrict m, float *restrict v,
                                 const uint16_t *restrict grad, const struct infinity_adamw *s, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 8)
            step8(hi + j, lo + j, m + j, v + j, widen8(grad + j), &b);
    }
    for (; i + 8 <= n; i += 8) step8(hi + i, lo + i, m + i, v + i, widen8(grad + i), &b);
    adamw_bf16_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, ahead);
}

TARGET_AVX2 void adamw_f32_avx2(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                float *restrict m, float *restrict v, const float *restrict grad,
                                const struct infinity_adamw *s, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 8)
            step8(hi + j, lo + j, m + j, v + j, _mm256_loadu_ps(grad + j), &b);
    }
    for (; i + 8 <= n; i += 8) step8(hi + i, lo + i, m + i, v + i, _mm256_loadu_ps(grad + i), &b);
    adamw_f32_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, ahead);
}
#endif
