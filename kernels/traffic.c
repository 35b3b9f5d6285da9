/* Memory traffic with almost no arithmetic: the benchmark's limit. */
#include "internal.h"

#ifdef INFINITY_X86
#include <immintrin.h>
#endif

/* 64 bytes in any instruction set: the compiler lowers it. */
typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));

struct traffic_args {
    size_t n, n_streams;
    const struct infinity_stream *streams;
};

/* Stores around the caches, as copies do, so that written lines need not be read first. */
static inline void write_line(char *line, words value, bool around) {
#ifdef INFINITY_X86
    if (around && ((uintptr_t)line & 15) == 0) {
        __m128i parts[4];
        memcpy(parts, &value, sizeof value);
        for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)line + i, parts[i]);
        return;
    }
#else
    (void)around;
#endif
    *(words *)line = value;
}

/* One stream's part of STATE_BLOCK elements. */
static inline void touch(char *part, size_t bytes, int32_t kind, bool around, words *sum,
                         words nothing) {
    const size_t blocks_ahead = FETCH_NUMEL / STATE_BLOCK;
    size_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        char *line = part + i;
        /* As far ahead as the kernels look: [Note: fetching ahead]. */
        if (kind != INFINITY_WRITE)
            __builtin_prefetch((const char *)((uintptr_t)line + blocks_ahead * bytes), 0, 2);
        if (kind == INFINITY_READ)
            *sum += *(const words *)line;
        else if (kind == INFINITY_UPDATE)
            *(words *)line += nothing;
        else
            write_line(line, nothing, around);
    }
    for (; i < bytes; i++)
        if (kind == INFINITY_READ)
            (*sum)[0] += (uint64_t)(unsigned char)part[i];
        else if (kind == INFINITY_UPDATE)
            part[i] = (char)(part[i] + (char)nothing[0]);
        else
            part[i] = (char)nothing[0];
}

static void traffic_block(const void *args, size_t first, size_t count) {
    const struct traffic_args *a = args;
    words sum = {0}, nothing = {0};
    /* Hides from the compiler that the value is 0. */
    __asm__ volatile("" : "+m"(nothing));
    for (size_t i = first; i + STATE_BLOCK <= first + count; i += STATE_BLOCK)
        for (size_t s = 0; s < a->n_streams; s++) {
            const struct infinity_stream *stream = &a->streams[s];
            char *part = (char *)stream->address + i / STATE_BLOCK * stream->bytes;
            bool around = a->n / STATE_BLOCK * stream->bytes >= STREAM_BYTES;
            touch(part, stream->bytes, stream->kind, around, &sum, nothing);
        }
#ifdef INFINITY_X86
    _mm_sfence();
#endif
    /* Uses the values read, so that the compiler keeps the loads. */
    __asm__ volatile("" ::"m"(sum));
}

void infinity_traffic(size_t n, size_t n_streams, const struct infinity_stream *streams) {
    struct traffic_args args = {n, n_streams, streams};
    run_blocks(traffic_block, &args, n, BLOCK_NUMEL);
}
