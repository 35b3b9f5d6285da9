/* A copy whose stores go around the caches, 32 bytes at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX2 void stream_avx2(size_t n_bytes, char *restrict dst, const char *restrict src) {
    size_t head = (size_t)(-(uintptr_t)dst & 63);
    if (head > n_bytes) head = n_bytes;
    memcpy(dst, src, head);
    size_t i = head;
    for (; i + 64 <= n_bytes; i += 64) {
        __m256i low_u8x32 = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i high_u8x32 = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), low_u8x32);
        _mm256_stream_si256((__m256i *)(dst + i + 32), high_u8x32);
    }
    memcpy(dst + i, src + i, n_bytes - i);
    /* Streaming stores may pass later ones, even the unlock that tells the caller we are done. */
    _mm_sfence();
}
#endif
