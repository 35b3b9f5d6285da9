/* xxh3, four lanes in each of two registers.  See checksum.h. */
#include "checksum.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX2 static inline __m256i load(const uint8_t *address) {
    return _mm256_loadu_si256((const __m256i *)address);
}

TARGET_AVX2 static inline void accumulate(__m256i *lanes, const uint8_t *stripe,
                                          const uint8_t *secret) {
    for (size_t i = 0; i < 2; i++) {
        __m256i data = load(stripe + 32 * i);
        __m256i keyed = _mm256_xor_si256(data, load(secret + 32 * i));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        lanes[i] = _mm256_add_epi64(lanes[i], _mm256_add_epi64(product, neighbours));
    }
}

TARGET_AVX2 static inline void scramble(__m256i *lanes, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    for (size_t i = 0; i < 2; i++) {
        __m256i shifted = _mm256_xor_si256(lanes[i], _mm256_srli_epi64(lanes[i], 47));
        __m256i keyed = _mm256_xor_si256(shifted, load(secret + 32 * i));
        __m256i low = _mm256_mul_epu32(keyed, prime);
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
        lanes[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
}

TARGET_AVX2 uint64_t xxh3_avx2(size_t n_bytes, const void *bytes) {
    __m256i lanes[2] = {load((const uint8_t *)xxh3_lanes), load((const uint8_t *)(xxh3_lanes + 4))};
    XXH3_STRIPES(lanes, n_bytes, bytes);
    uint64_t found[8];
    for (size_t i = 0; i < 2; i++) _mm256_storeu_si256((__m256i *)(found + 4 * i), lanes[i]);
    return xxh3_merged(found, n_bytes);
}
#endif
