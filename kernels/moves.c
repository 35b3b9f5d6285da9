/* How far bf16 weights have moved.  See [Note: moves] in kernels.h. */
#include "internal.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define MOST_MOVE 127
#define ESCAPE 0x80u

/* Encodes element i; returns how many escapes there are now. */
static inline size_t encode_one(size_t i, const uint16_t *before, const uint16_t *behind, size_t n,
                                size_t n_escapes, size_t most, uint8_t *codes) {
    uint16_t new = load_u16(behind + i), moved = (uint16_t)(new - load_u16(before + i));
    bool fits = (uint16_t)(moved + MOST_MOVE) <= 2 * MOST_MOVE;
    codes[i] = (uint8_t)(fits ? moved : ESCAPE);
    if (fits) return n_escapes;
    if (n + 2 * (n_escapes + 1) <= most) memcpy(codes + n + 2 * n_escapes, &new, sizeof new);
    return n_escapes + 1;
}

size_t infinity_encode_moves(size_t n, const uint16_t *before, const uint16_t *behind, size_t most,
                             uint8_t *codes) {
    size_t i = 0, n_escapes = 0;
    if (n > most) return 0;
#if defined(__SSE2__)
    __m128i top = _mm_set1_epi16(MOST_MOVE), bottom = _mm_set1_epi16(-MOST_MOVE);
    for (; i + 16 <= n; i += 16) {
        __m128i moved[2], far = _mm_setzero_si128();
        for (size_t j = 0; j < 2; j++) {
            moved[j] = _mm_sub_epi16(_mm_loadu_si128((const __m128i *)(behind + i + 8 * j)),
                                     _mm_loadu_si128((const __m128i *)(before + i + 8 * j)));
            far = _mm_or_si128(far, _mm_or_si128(_mm_cmpgt_epi16(moved[j], top),
                                                 _mm_cmplt_epi16(moved[j], bottom)));
        }
        if (_mm_movemask_epi8(far) == 0) {
            _mm_storeu_si128((__m128i *)(codes + i), _mm_packs_epi16(moved[0], moved[1]));
            continue;
        }
        for (size_t j = i; j < i + 16; j++)
            n_escapes = encode_one(j, before, behind, n, n_escapes, most, codes);
    }
#endif
    for (; i < n; i++) n_escapes = encode_one(i, before, behind, n, n_escapes, most, codes);
    return n + 2 * n_escapes <= most ? n + 2 * n_escapes : 0;
}

static inline size_t move_one(size_t i, size_t n, size_t n_escapes, const uint8_t *codes,
                              uint16_t *weights) {
    if (codes[i] == ESCAPE) {
        memcpy(weights + i, codes + n + 2 * n_escapes, sizeof *weights);
        return n_escapes + 1;
    }
    uint16_t moved = (uint16_t)((codes[i] ^ ESCAPE) - ESCAPE); /* with its sign */
    store_u16(weights + i, (uint16_t)(load_u16(weights + i) + moved));
    return n_escapes;
}

void infinity_move(size_t n, const uint8_t *codes, uint16_t *weights) {
    size_t i = 0, n_escapes = 0;
#if defined(__SSE2__)
    __m128i escape = _mm_set1_epi8((char)ESCAPE), zero = _mm_setzero_si128();
    for (; i + 16 <= n; i += 16) {
        __m128i code = _mm_loadu_si128((const __m128i *)(codes + i));
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(code, escape)) != 0) {
            for (size_t j = i; j < i + 16; j++) n_escapes = move_one(j, n, n_escapes, codes, weights);
            continue;
        }
        __m128i sign = _mm_cmplt_epi8(code, zero);
        __m128i *at = (__m128i *)(weights + i);
        _mm_storeu_si128(at, _mm_add_epi16(_mm_loadu_si128(at), _mm_unpacklo_epi8(code, sign)));
        _mm_storeu_si128(at + 1, _mm_add_epi16(_mm_loadu_si128(at + 1), _mm_unpackhi_epi8(code, sign)));
    }
#endif
    for (; i < n; i++) n_escapes = move_one(i, n, n_escapes, codes, weights);
}
