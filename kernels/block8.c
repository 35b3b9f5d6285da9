/* 8-bit floats with a scale for each block of a matrix -> fp32.  See [Note: block scales] in
 * kernels.h.  The values of the 256 codes come from a table, so that no denormal is ever computed;
 * a load a value keeps up with any drive. */
#include "internal.h"

struct block8_args {
    size_t first;
    const struct infinity_blocks *blocks;
    const float *table;
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
        size_t grid_col = col / b->block_cols;
        size_t stop = (grid_col + 1) * b->block_cols < b->cols ? (grid_col + 1) * b->block_cols
                                                                : b->cols;
        size_t run = stop - col < count ? stop - col : count;
        float scale = f32_of(
            load_u32(a->scales + (row / b->block_rows - grid_row) * grid_cols + grid_col));
        for (size_t k = 0; k < run; k++)
            store_u32(a->f32 + i + k, canonical_bits(a->table[a->codes[i + k]] * scale));
        i += run;
        count -= run;
    }
}

void infinity_widen_e4m3(size_t first, size_t n, const struct infinity_blocks *blocks,
                         const float *table, const uint8_t *codes, const float *scales, float *f32) {
    struct block8_args args = {.first = first, .blocks = blocks, .table = table, .codes = codes,
                               .scales = scales, .f32 = f32};
    run_blocks(widen_e4m3_block, &args, n, BLOCK_NUMEL);
}
