/* Gradients from the moments around a step, and the step that notes which these do not tell, 16 elements at a
 * time.  See [Note: told gradients] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx512.h"

/* The scalars, one register each. */
struct teller {
    __m512 inverse_weight, inverse_clip, noise;
};

TARGET_AVX512 static inline struct teller teller(const struct infinity_told *s) {
    return (struct teller){_mm512_set1_ps(s->inverse_weight), _mm512_set1_ps(s->inverse_clip),
                           _mm512_set1_ps(s->noise)};
}

/* The gradients before they are rounded to bf16. */
TARGET_AVX512 static inline __m512 recover16(__m512 before_f32x16, __m512 behind_f32x16,
                                             const struct teller *t) {
    __m512 change_f32x16 = _mm512_sub_ps(behind_f32x16, before_f32x16);
    __m512 g_f32x16 =
        _mm512_add_ps(before_f32x16, _mm512_mul_ps(change_f32x16, t->inverse_weight));
    __m512 least_f32x16 = _mm512_mul_ps(_mm512_abs_ps(before_f32x16), t->noise);
    __mmask16 is_noise = _mm512_cmp_ps_mask(_mm512_abs_ps(g_f32x16), least_f32x16, _CMP_LT_OQ);
    g_f32x16 = _mm512_mask_mov_ps(g_f32x16, is_noise, _mm512_setzero_ps());
    return _mm512_mul_ps(g_f32x16, t->inverse_clip);
}

/* Which of 16 values are less than half a step of bf16 away from a gradient, and no NaNs: these round to it. */
TARGET_AVX512 static inline __mmask16 near16(__m512 found_f32x16, __m512 grad_f32x16) {
    __mmask16 is_ordered = _mm512_cmp_ps_mask(found_f32x16, found_f32x16, _CMP_ORD_Q);
    __m512i off_i32x16 =
        _mm512_sub_epi32(_mm512_castps_si512(found_f32x16), _mm512_castps_si512(grad_f32x16));
    return _mm512_mask_cmplt_epu32_mask(is_ordered, _mm512_abs_epi32(off_i32x16),
                                        _mm512_set1_epi32(0x8000));
}

TARGET_AVX512 static inline void told16(uint16_t *hi, int16_t *lo, float *m, float *v,
                                        const uint16_t *grad, const struct broadcast *b,
                                        const struct teller *t, struct infinity_told *told,
                                        uint64_t first) {
    __m512 grad_f32x16 = widen16(grad), before_f32x16 = _mm512_loadu_ps(m);
    __m512 behind_f32x16 = step16(hi, lo, m, v, grad_f32x16, b);
    __m512 found_f32x16 = recover16(before_f32x16, behind_f32x16, t);
    if (near16(found_f32x16, grad_f32x16) == 0xFFFF) return;
    __m256i grad_u16x16 = _mm256_loadu_si256((const __m256i *)grad);
    __mmask16 differs = _mm256_cmpneq_epi16_mask(narrow16(found_f32x16), grad_u16x16);
    note_exceptions(told, first, grad, differs);
}

TARGET_AVX512 void adamw_told_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                     float *restrict m, float *restrict v,
                                     const uint16_t *restrict grad,
                                     const struct infinity_adamw *s, struct infinity_told *told,
                                     uint64_t first, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    const struct teller t = teller(told);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 16)
            told16(hi + j, lo + j, m + j, v + j, grad + j, &b, &t, told, first + j);
    }
    for (; i + 16 <= n; i += 16)
        told16(hi + i, lo + i, m + i, v + i, grad + i, &b, &t, told, first + i);
    adamw_told_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, told, first + i, ahead);
}

TARGET_AVX512 void recover_avx512(size_t n, const float *restrict before,
                                  const float *restrict behind, const struct infinity_told *s,
                                  uint16_t *restrict grad) {
    const struct teller t = teller(s);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 g_f32x16 = recover16(_mm512_loadu_ps(before + i), _mm512_loadu_ps(behind + i), &t);
        _mm256_storeu_si256((__m256i *)(grad + i), narrow16(g_f32x16));
    }
    recover_scalar(n - i, before + i, behind + i, s, grad + i);
}
#endif
