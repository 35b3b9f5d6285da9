/* The lower part of a 24-bit master, in 8 bits: [Note: 24-bit masters] in kernels.h. */
#include "moments.h"

struct lo_args {
    const void *from;
    void *to;
    uint64_t key, first;
    bool nearest;
};

static void widen_lo(const void *args, size_t first, size_t count) {
    const struct lo_args *a = args;
    const int8_t *from = (const int8_t *)a->from + first;
    uint16_t *to = (uint16_t *)a->to + first;
    for (size_t i = 0; i < count; i++) store_u16(to + i, (uint32_t)(from[i] * 256));
}

static void round_lo(const void *args, size_t first, size_t count) {
    const struct lo_args *a = args;
    const uint16_t *from = (const uint16_t *)a->from + first;
    int8_t *to = (int8_t *)a->to + first;
    for (size_t i = 0; i < count; i++) {
        uint64_t element = a->first + first + i;
        uint32_t hash = a->nearest ? 0x80808080u : hash_of(a->key, (uint32_t)(element / 4));
        int32_t noise = (int32_t)(hash >> element % 4 * 8 & 0xFFu);
        int32_t rounded = ((int16_t)load_u16(from + i) + noise) >> 8;
        to[i] = (int8_t)(rounded > INT8_MAX ? INT8_MAX : rounded);
    }
}

void infinity_widen_lo(size_t n, const int8_t *lo8, int16_t *lo) {
    struct lo_args args = {.from = lo8, .to = lo};
    run_blocks(widen_lo, &args, n, BLOCK_NUMEL);
}

void infinity_round_lo(size_t n, const int16_t *lo, int32_t nearest, uint64_t key, uint64_t first,
                       int8_t *lo8) {
    struct lo_args args = {.from = lo, .to = lo8, .key = key, .first = first, .nearest = nearest != 0};
    run_blocks(round_lo, &args, n, BLOCK_NUMEL);
}
