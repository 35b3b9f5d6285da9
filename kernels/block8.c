/* 8-bit codes with a scale for each block, or row, of a matrix -> fp32: the walk over these, and one
 * element at a time, the reference for the vector versions and their tail.  See [Note: block scales]
 * in kernels.h. */
#include "internal.h"

/* A denormal of e4m3 is its mantissa times 2^-9, which fp32 has as a normal number: no denormal of
 * fp32 is ever computed with. */
void widen_e4m3_scalar(size_t n, const uint8_t *restrict codes, float scale, float *restrict f32) {
    for (size_t i = 0; i < n; i++) {
        uint32_t code = codes[i], size = code & 0x7Fu;
        uint32_t bits = size << 20;
        bits = size < 8 ? canonical_bits((float)size * 0x1p-9f) : bits + (120u << 23);
        bits = size == 0x7F ? NAN_U32 : bits | (code & 0x80u) << 24;
        store_u32(f32 + i, canonical_bits(f32_of(bits) * scale));
    }
}

struct block8_args {
    const struct isa *isa;
    size_t first;
    const struct infinity_blocks *blocks;
    const uint8_t *codes;
    const float *scales;
    float *f32;
};

static void widen_e4m3_block(const void *args, size_t i, size_t count) {
    const struct block8_args *a = args;
    const struct infinity_blocks *b = a->blocks;
    size_t grid_cols = (b->cols + b->block_cols - 1) / b->block_cols;
    size_t grid_row = a->first / b->cols / b->block_rows; /* of the first scale */
    while (count > 0) {
        size_t row = (a->first + i) / b->cols, col = (a->first + i) % b->cols;
        size_t grid_col = col / b->block_cols, stop = (grid_col + 1) * b->block_cols;
        if (stop > b->cols) stop = b->cols;
        size_t run = stop - col < count ? stop - col : count;
        size_t at = (row / b->block_rows - grid_row) * grid_cols + grid_col;
        a->isa->widen_e4m3(run, a->codes + i, f32_of(load_u32(a->scales + at)), a->f32 + i);
        i += run;
        count -= run;
    }
}

void infinity_widen_e4m3(size_t first, size_t n, const struct infinity_blocks *blocks,
                         const uint8_t *codes, const float *scales, float *f32) {
    struct block8_args args = {.isa = current_isa(), .first = first, .blocks = blocks,
                               .codes = codes, .scales = scales, .f32 = f32};
    run_blocks(widen_e4m3_block, &args, n, BLOCK_NUMEL);
}

void widen_i8_scalar(size_t n, const int8_t *restrict codes, float scale, float factor,
                     float *restrict f32) {
    for (size_t i = 0; i < n; i++)
        store_u32(f32 + i, canonical_bits((float)codes[i] * scale * factor));
}

struct rows8_args {
    const struct isa *isa;
    size_t first, cols;
    float factor;
    const int8_t *codes;
    const float *scales;
    float *f32;
};

static void widen_i8_block(const void *args, size_t i, size_t count) {
    const struct rows8_args *a = args;
    while (count > 0) {
        size_t row = (a->first + i) / a->cols, left = a->cols - (a->first + i) % a->cols;
        size_t run = left < count ? left : count;
        float scale = f32_of(load_u32(a->scales + (row - a->first / a->cols)));
        a->isa->widen_i8(run, a->codes + i, scale, a->factor, a->f32 + i);
        i += run;
        count -= run;
    }
}

void infinity_widen_i8(size_t first, size_t n, size_t cols, float factor, const int8_t *codes,
                       const float *scales, float *f32) {
    struct rows8_args args = {.isa = current_isa(), .first = first, .cols = cols, .factor = factor,
                              .codes = codes, .scales = scales, .f32 = f32};
    run_blocks(widen_i8_block, &args, n, BLOCK_NUMEL);
}
