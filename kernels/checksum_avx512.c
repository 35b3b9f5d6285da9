/* xxh3, all eight lanes in one register.  See checksum.h. */
#include "checksum.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX512 static inline void accumulate(__m512i *lanes, const uint8_t *stripe,
                                            const uint8_t *secret) {
    __m512i data = _mm512_loadu_si512(stripe);
    __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    __m512i neighbours = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
    *lanes = _mm512_add_epi64(*lanes, _mm512_add_epi64(product, neighbours));
}

TARGET_AVX512 static inline void scramble(__m512i *lanes, const uint8_t *secret) {
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    __m512i shifted = _mm512_xor_si512(*lanes, _mm512_srli_epi64(*lanes, 47));
    __m512i keyed = _mm512_xor_si512(shifted, _mm512_loadu_si512(secret));
    __m512i low = _mm512_mul_epu32(keyed, prime);
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), prime);
    *lanes = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

TARGET_AVX512 uint64_t xxh3_avx512(size_t n_bytes, const void *bytes) {
    __m512i lanes = _mm512_loadu_si512(xxh3_lanes);
    XXH3_STRIPES(&lanes, n_bytes, bytes);
    uint64_t found[8];
    _mm512_storeu_si512(found, lanes);
    return xxh3_merged(found, n_bytes);
}
#endif
