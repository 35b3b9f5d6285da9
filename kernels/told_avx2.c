/* Gradients from the moments around a step, and the step that notes which these do not tell, 8 elements at a
 * time.  See [Note: told gradients] in kernels.h. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

#include "adamw_avx2.h"

/* The scalars, one register each. */
struct teller {
    __m256 inverse_weight, inverse_clip, noise;
};

TARGET_AVX2 static inline struct teller teller(const struct infinity_told *s) {
    return (struct teller){_mm256_set1_ps(s->inverse_weight), _mm256_set1_ps(s->inverse_clip),
                           _mm256_set1_ps(s->noise)};
}

/* The gradients before they are rounded to bf16. */
TARGET_AVX2 static inline __m256 recover8(__m256 before_f32x8, __m256 behind_f32x8,
                                          const struct teller *t) {
    __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    __m256 change_f32x8 = _mm256_sub_ps(behind_f32x8, before_f32x8);
    __m256 g_f32x8 = _mm256_add_ps(before_f32x8, _mm256_mul_ps(change_f32x8, t->inverse_weight));
    __m256 least_f32x8 = _mm256_mul_ps(_mm256_and_ps(before_f32x8, magnitude), t->noise);
    __m256 is_noise = _mm256_cmp_ps(_mm256_and_ps(g_f32x8, magnitude), least_f32x8, _CMP_LT_OQ);
    return _mm256_mul_ps(_mm256_andnot_ps(is_noise, g_f32x8), t->inverse_clip);
}

/* Whether 8 values are less than half a step of bf16 away from a gradient, and no NaNs: these round to it. */
TARGET_AVX2 static inline bool are_near8(__m256 found_f32x8, __m256 grad_f32x8) {
    __m256 is_ordered = _mm256_cmp_ps(found_f32x8, found_f32x8, _CMP_ORD_Q);
    __m256i off_i32x8 =
        _mm256_sub_epi32(_mm256_castps_si256(found_f32x8), _mm256_castps_si256(grad_f32x8));
    __m256i size_u32x8 = _mm256_abs_epi32(off_i32x8);
    __m256i least_u32x8 = _mm256_min_epu32(size_u32x8, _mm256_set1_epi32(0x7FFF));
    __m256 is_near = _mm256_castsi256_ps(_mm256_cmpeq_epi32(size_u32x8, least_u32x8));
    return _mm256_movemask_ps(_mm256_and_ps(is_ordered, is_near)) == 0xFF;
}

TARGET_AVX2 static inline void told8(uint16_t *hi, int16_t *lo, float *m, float *v,
                                     const uint16_t *grad, const struct broadcast *b,
                                     const struct teller *t, struct infinity_told *told,
                                     uint64_t first) {
    __m256 grad_f32x8 = widen8(grad), before_f32x8 = _mm256_loadu_ps(m);
    __m256 behind_f32x8 = step8(hi, lo, m, v, grad_f32x8, b);
    __m256 found_f32x8 = recover8(before_f32x8, behind_f32x8, t);
    if (are_near8(found_f32x8, grad_f32x8)) return;
    __m128i grad_u16x8 = _mm_loadu_si128((const __m128i *)grad);
    __m128i is_told = _mm_cmpeq_epi16(narrow8(found_f32x8), grad_u16x8);
    int told_lanes = _mm_movemask_epi8(_mm_packs_epi16(is_told, _mm_setzero_si128()));
    note_exceptions(told, first, grad, ~(uint32_t)told_lanes & 0xFF);
}

TARGET_AVX2 void adamw_told_avx2(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                 float *restrict m, float *restrict v,
                                 const uint16_t *restrict grad, const struct infinity_adamw *s,
                                 struct infinity_told *told, uint64_t first, uintptr_t ahead) {
    const struct broadcast b = broadcast(s);
    const struct teller t = teller(told);
    size_t i = 0;
    for (; i + LINE_NUMEL <= n; i += LINE_NUMEL) {
        fetch_record(hi + i, lo + i, m + i, v + i, ahead);
        fetch(grad + i, sizeof *grad, ahead);
        for (size_t j = i; j < i + LINE_NUMEL; j += 8)
            told8(hi + j, lo + j, m + j, v + j, grad + j, &b, &t, told, first + j);
    }
    for (; i + 8 <= n; i += 8)
        told8(hi + i, lo + i, m + i, v + i, grad + i, &b, &t, told, first + i);
    adamw_told_scalar(n - i, hi + i, lo + i, m + i, v + i, grad + i, s, told, first + i, ahead);
}

TARGET_AVX2 void recover_avx2(size_t n, const float *restrict before, const float *restrict behind,
                              const struct infinity_told *s, uint16_t *restrict grad) {
    const struct teller t = teller(s);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g_f32x8 = recover8(_mm256_loadu_ps(before + i), _mm256_loadu_ps(behind + i), &t);
        _mm_storeu_si128((__m128i *)(grad + i), narrow8(g_f32x8));
    }
    recover_scalar(n - i, before + i, behind + i, s, grad + i);
}
#endif
