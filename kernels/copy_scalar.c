/* A copy where no instruction set offers stores around the caches: memcpy. */
#include "internal.h"

void stream_scalar(size_t n_bytes, char *restrict dst, const char *restrict src) {
    memcpy(dst, src, n_bytes);
}
