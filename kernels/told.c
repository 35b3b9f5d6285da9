/* An adamw step that notes which gradients its moments do not tell, and gradients from those moments.  See
 * [Note: told gradients] in kernels.h. */
#include "internal.h"

/* Elements that make the step, and are looked at, while all of them are in the first-level cache. */
#define PART_NUMEL ((size_t)2048)

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

static void except(struct infinity_told *told, uint64_t element, uint16_t bits) {
    uint64_t at = __atomic_fetch_add(&told->count, 1, __ATOMIC_RELAXED);
    if (at >= told->limit) return;
    told->index[at] = (uint32_t)element;
    told->bits[at] = bits;
}

/* Notes the elements of `grad` that differ from `found`; `first` is the first one's number. */
static void compare(size_t n, const uint16_t *found, const uint16_t *grad, uint64_t first,
                    struct infinity_told *told) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        if (memcmp(found + i, grad + i, 8) != 0)
            for (size_t j = i; j < i + 4; j++)
                if (found[j] != load_u16(grad + j)) except(told, first + j, load_u16(grad + j));
    for (; i < n; i++)
        if (found[i] != load_u16(grad + i)) except(told, first + i, load_u16(grad + i));
}

static void told_block(const void *args, size_t first, size_t count) {
    const struct told_args *a = args;
    float before[PART_NUMEL];
    uint16_t found[PART_NUMEL];
    for (size_t i = first; i < first + count; i += PART_NUMEL) {
        size_t left = first + count - i, n = left < PART_NUMEL ? left : PART_NUMEL;
        memcpy(before, a->m + i, n * sizeof *before);
        a->isa->adamw_bf16(n, a->hi + i, a->lo + i, a->m + i, a->v + i, a->grad + i, a->scalars,
                           a->ahead);
        a->isa->recover(n, before, a->m + i, a->told, found);
        compare(n, found, a->grad + i, a->first + i, a->told);
    }
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
