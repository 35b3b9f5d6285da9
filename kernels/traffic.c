/* The memory traffic of an adamw step with next to no arithmetic: what the benchmark divides by. */
#include "internal.h"

/* 64 bytes in any instruction set: the compiler lowers it. */
typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));

struct traffic_args {
    char *hi, *lo, *m, *v;
    const char *grad;
};

static void touch_block(const void *args, size_t i, size_t count) {
    const struct traffic_args *a = args;
    for (size_t j = i; j + 32 <= i + count; j += 32) {
        words grad = *(const words *)(a->grad + 2 * j);
        *(words *)(a->hi + 2 * j) += grad;
        *(words *)(a->lo + 2 * j) += grad;
        *(words *)(a->m + 4 * j) += grad;
        *(words *)(a->m + 4 * j + 64) += grad;
        *(words *)(a->v + 4 * j) += grad;
        *(words *)(a->v + 4 * j + 64) += grad;
    }
}

void infinity_traffic(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                      const uint16_t *grad) {
    struct traffic_args args = {(char *)hi, (char *)lo, (char *)m, (char *)v, (const char *)grad};
    run_blocks(touch_block, &args, n, BLOCK_NUMEL);
}
