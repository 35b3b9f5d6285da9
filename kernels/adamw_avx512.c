/* The adamw step, 16 elements at a time.  See [Note: the adamw step] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx512.h"

TARGET_AVX512 void adamw_bf16_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                     float *restrict m, float *restrict v,
                                     const uint16_t *restrict grad,
                                     const struct infinity_adamw *s, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 16)
            step16(hi + j, lo + j, m + j, v + j, widen16(grad + j), &b);
    }
    for (; i + 16 <= n; i += 16) step16(hi + i, lo + i, m + i, v + i, widen16(grad + i), &b);
    adamw_bf16_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, ahead);
}

TARGET_AVX512 void adamw_f32_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                    float *restrict m, float *restrict v,
                                    const float *restrict grad, const struct infinity_adamw *s, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 16)
            step16(hi + j, lo + j, m + j, v + j, _mm512_loadu_ps(grad + j), &b);
    }
    for (; i + 16 <= n; i += 16)
        step16(hi + i, lo + i, m + i, v + i, _mm512_loadu_ps(grad + i), &b);
    adamw_f32_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, ahead);
}
#endif
