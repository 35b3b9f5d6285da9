/* An adamw step that notes which gradients its moments do not tell, and gradients from those moments.  See
 * [Note: told gradients] in kernels.h. */
#include "internal.h"

struct told_args {
    const struct isa *isa;
    uint16_t *hi;
    int16_t *lo;
    float *m, *v;
    const uint16_t *grad;
    const struct infinity_adamw *scalars;
    struct infinity_told *told;
    uint64_t first;
    uintptr_t ahead;
};

void note_exceptions(struct infinity_told *told, uint64_t first, const uint16_t *grad,
                     uint32_t differs) {
    uint64_t more = (uint64_t)__builtin_popcount(differs);
    uint64_t at = __atomic_fetch_add(&told->count, more, __ATOMIC_RELAXED);
    for (; differs != 0 && at < told->limit; differs &= differs - 1, at++) {
        uint32_t i = (uint32_t)__builtin_ctz(differs);
        told->index[at] = (uint32_t)(first + i);
        told->bits[at] = load_u16(grad + i);
    }
}

static void told_block(const void *args, size_t i, size_t count) {
    const struct told_args *a = args;
    a->isa->adamw_told(count, a->hi + i, a->lo + i, a->m + i, a->v + i, a->grad + i, a->scalars,
                       a->told, a->first + i, a->ahead);
}

void infinity_adamw_told(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                         const uint16_t *grad, const struct infinity_adamw *scalars,
                         struct infinity_told *told, uint64_t first, size_t n_fields,
                         struct infinity_field *fields) {
    struct told_args args = {current_isa(), hi, lo, m, v, grad, scalars, told, first,
                             ahead_of(n_fields)};
    run_summed(told_block, &args, n, n_fields, fields);
}

struct recover_args {
    const struct isa *isa;
    const float *before, *behind;
    const struct infinity_told *told;
    uint16_t *grad;
};

static void recover_block(const void *args, size_t i, size_t count) {
    const struct recover_args *a = args;
    a->isa->recover(count, a->before + i, a->behind + i, a->told, a->grad + i);
}

void infinity_recover(size_t n, const float *before, const float *behind,
                      const struct infinity_told *told, uint64_t first, uint16_t *grad) {
    struct recover_args args = {current_isa(), before, behind, told, grad};
    run_blocks(recover_block, &args, n, BLOCK_NUMEL);
    uint64_t n_kept = told->count < told->limit ? told->count : told->limit;
    for (uint64_t i = 0; i < n_kept; i++) {
        uint64_t element = told->index[i];
        if (element >= first && element < first + n) store_u16(grad + (element - first), told->bits[i]);
    }
}
