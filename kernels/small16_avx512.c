/* The step on bf16 moments, whole blocks at a time. */
#include "moments.h"

#ifdef INFINITY_X86
#include "small_avx512.h"

/* A mask of lanes whose magnitude is below limit, compared as floats, so that no NaN is. */
TARGET_AVX512 static inline __mmask16 below16(__m512i bits, uint32_t limit) {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(sizes16(bits)),
                              _mm512_castsi512_ps(all16(limit)), _CMP_LT_OQ);
}

/* Adds noise to lanes that may get some: [Note: bf16 moments]. */
TARGET_AVX512 static inline struct pair rounded_any32(struct pair bits, struct pair noise) {
    bits = canonical32(bits);
    return (struct pair){
        _mm512_mask_add_epi32(bits.even, below16(bits.even, BF16_MAX), bits.even, noise.even),
        _mm512_mask_add_epi32(bits.odd, below16(bits.odd, BF16_MAX), bits.odd, noise.odd)};
}

TARGET_AVX512 static inline struct begun begin16(struct pair p, uint16_t *m, uint16_t *v,
                                                 struct pair grad,
                                                 const struct broadcast *b,
                                                 struct pairs16 *pairs) {
    struct pair m_bits = widen32(_mm512_loadu_si512(m), b);
    struct pair v_bits = widen32(_mm512_loadu_si512(v), b);
    struct begun begun = begin32(p, &m_bits, &v_bits, grad, b);
    struct noise noise = noise32(pairs, 16, b);
    __m512i any = _mm512_ternarylogic_epi32(m_bits.even, m_bits.odd, all16(SIZE_MASK), 0xA8);
    any = any_of64(any, v_bits);
    if (__builtin_expect(_mm512_cmpge_epu32_mask(any, all16(BF16_MAX)) != 0, 0)) {
        m_bits = rounded_any32(m_bits, noise.m);
        v_bits = rounded_any32(v_bits, noise.v);
    } else {
        m_bits = sum32(m_bits, noise.m);
        v_bits = sum32(v_bits, noise.v);
    }
    _mm512_storeu_si512(m, upper32(m_bits, b));
    _mm512_storeu_si512(v, upper32(v_bits, b));
    return begun;
}

TARGET_AVX512 static ALWAYS_INLINE void step16(size_t n, uint16_t *restrict hi,
                                               int16_t *restrict lo, uint16_t *restrict m,
                                               uint16_t *restrict v, const void *restrict grad,
                                               int32_t type, const struct infinity_adamw_small *s,
                                               uint64_t key, uint64_t first, uintptr_t ahead) {
    const struct broadcast b = broadcast(s, 16);
    struct begun begun = {0};
    __mmask16 ordered = 0xFFFF;
    struct pairs16 pairs = pairs16(key, (uint32_t)(first / 2));
    for (size_t i = 0; i < n; i += 32) {
        fetch(hi + i, sizeof *hi, ahead);
        fetch(lo + i, sizeof *lo, ahead);
        fetch(m + i, sizeof *m, ahead);
        fetch(v + i, sizeof *v, ahead);
        struct moves moves = divide32(begun, &b);
        struct pair p = join32(hi + i, lo + i, &b);
        begun = begin16(p, m + i, v + i, load_grad32(grad, i, type, &b, ahead), &b, &pairs);
        if (i != 0) finish32(hi + i - 32, lo + i - 32, moves, &b, &ordered);
    }
    finish32(hi + n - 32, lo + n - 32, divide32(begun, &b), &b, &ordered);
    if (ordered != 0xFFFF) canonical_weights(n, hi, lo, &b);
}

TARGET_AVX512 void adamw16_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                  uint16_t *restrict m, uint16_t *restrict v,
                                  const void *restrict grad, int32_t type,
                                  const struct infinity_adamw_small *s, uint64_t key,
                                  uint64_t first, uintptr_t ahead) {
    if (type == INFINITY_F32)
        step16(n, hi, lo, m, v, grad, INFINITY_F32, s, key, first, ahead);
    else
        step16(n, hi, lo, m, v, grad, INFINITY_BF16, s, key, first, ahead);
}
#endif
