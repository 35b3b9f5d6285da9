/* 4-bit codes with a scale for each run of elements -> fp32, and what their own scales are packed in.
 * See [Note: packed blocks] in kernels.h. */
#include "internal.h"

static inline uint32_t code4(const uint8_t *codes, size_t i, bool high_first) {
    return ((i & 1) != 0) == high_first ? codes[i / 2] & 0xFu : codes[i / 2] >> 4;
}

void widen_4bit_scalar(size_t n, size_t block, bool high_first, const float *restrict table,
                       const uint8_t *restrict codes, const float *restrict scales,
                       float *restrict f32) {
    for (size_t i = 0; i < n; i++) {
        float scale = f32_of(load_u32(scales + i / block));
        uint32_t value = load_u32(table + code4(codes, i, high_first));
        store_u32(f32 + i, canonical_bits(f32_of(value) * scale));
    }
}

struct block4_args {
    const struct isa *isa;
    size_t first, block;
    bool high_first;
    const float *table;
    const uint8_t *codes;
    const float *scales;
    float *f32;
};

static void widen_4bit_block(const void *args, size_t i, size_t count) {
    const struct block4_args *a = args;
    size_t begun = a->first / a->block, byte = a->first / 2;
    while (count > 0) {
        size_t at = a->first + i, within = at % a->block;
        const float *scales = a->scales + (at / a->block - begun);
        /* Whole runs at once; what is before the first of them, and an odd first element, by itself. */
        size_t n = within == 0 ? count : a->block - within < count ? a->block - within : count;
        if (at % 2 != 0) {
            float value = f32_of(load_u32(a->table + code4(a->codes + (at / 2 - byte), 1, a->high_first)));
            store_u32(a->f32 + i, canonical_bits(value * f32_of(load_u32(scales))));
            n = 1;
        } else if (within == 0) {
            a->isa->widen_4bit(n, a->block, a->high_first, a->table, a->codes + (at / 2 - byte),
                               scales, a->f32 + i);
        } else {
            a->isa->widen_4bit(n, n, a->high_first, a->table, a->codes + (at / 2 - byte), scales,
                               a->f32 + i);
        }
        i += n;
        count -= n;
    }
}

void infinity_widen_4bit(size_t first, size_t n, size_t block, int32_t high_first,
                         const float *table, const uint8_t *codes, const float *scales,
                         float *f32) {
    struct block4_args args = {.isa = current_isa(), .first = first, .block = block,
                               .high_first = high_first != 0, .table = table, .codes = codes,
                               .scales = scales, .f32 = f32};
    run_blocks(widen_4bit_block, &args, n, BLOCK_NUMEL);
}

/* One element in 32 or 64 is a scale: these stay scalar. */
void infinity_widen_scales(size_t first, size_t n, size_t block, const float *table,
                           const uint8_t *codes, const float *scales, float offset, float *f32) {
    size_t begun = first / block;
    for (size_t i = 0; i < n; i++) {
        float scale = f32_of(load_u32(scales + ((first + i) / block - begun)));
        float product = f32_of(load_u32(table + codes[i])) * scale;
        store_u32(f32 + i, canonical_bits(product + offset));
    }
}

void infinity_widen_e8m0(size_t n, const uint8_t *codes, float *f32) {
    for (size_t i = 0; i < n; i++) {
        uint32_t code = codes[i]; /* 2^(code - 128): a denormal of fp32 for codes below 2 */
        store_u32(f32 + i, code < 2 ? 0x200000u << code : (code - 1u) << 23);
    }
}

struct transpose_args {
    size_t rows, cols;
    int32_t width;
    const char *source;
    size_t source_nbytes; /* from one row of the source to the next */
    char *target;
    size_t target_nbytes;
};

#define TRANSPOSE(type) \
    for (size_t row = 0; row < a->rows; row++) { \
        type value; \
        memcpy(&value, a->source + row * a->source_nbytes + col * sizeof value, sizeof value); \
        memcpy(to + row * sizeof value, &value, sizeof value); \
    }

static void transpose_block(const void *args, size_t first, size_t count) {
    const struct transpose_args *a = args;
    for (size_t col = first; col < first + count; col++) {
        char *to = a->target + col * a->target_nbytes;
        if (a->width == 2) {
            TRANSPOSE(uint16_t)
        } else {
            TRANSPOSE(uint32_t)
        }
    }
}

void infinity_transpose(size_t rows, size_t cols, int32_t width, const void *source,
                        size_t source_nbytes, void *target, size_t target_nbytes) {
    struct transpose_args args = {.rows = rows, .cols = cols, .width = width, .source = source,
                                  .source_nbytes = source_nbytes, .target = target,
                                  .target_nbytes = target_nbytes};
    run_blocks(transpose_block, &args, cols, 256);
}
