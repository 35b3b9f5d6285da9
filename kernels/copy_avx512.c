/* A copy whose stores go around the caches, 64 bytes at a time. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>

TARGET_AVX512 void stream_avx512(size_t n_bytes, char *restrict dst, const char *restrict src) {
    size_t head = (size_t)(-(uintptr_t)dst & 63);
    if (head > n_bytes) head = n_bytes;
    memcpy(dst, src, head);
    size_t i = head;
    for (; i + 64 <= n_bytes; i += 64)
        _mm512_stream_si512((__m512i *)(dst + i), _mm512_loadu_si512(src + i));
    memcpy(dst + i, src + i, n_bytes - i);
    /* Streaming stores may pass later ones, even the unlock that tells the caller we are done. */
    _mm_sfence();
}
#endif
