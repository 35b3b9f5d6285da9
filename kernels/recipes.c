/* The functions of [Note: other recipes], and the casts of fp16: each cuts its range into blocks for
 * the pool. */
#include "internal.h"

/* One call's arguments; a field that a recipe does not have is NULL. */
struct recipe_args {
    const struct isa *isa;
    uint16_t *half; /* hi, or the fp16 weight */
    int16_t *lo;
    float *master, *m, *v;
    const void *grad;
    int32_t type;
    const void *scalars;
    bool around; /* the weights */
};

static void adamw_half_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->adamw_half(count, a->half + i, a->master + i, a->m + i, a->v + i, grad_at(a->grad, i,
                       a->type), a->type, a->scalars, a->around);
}

void infinity_adamw_half(size_t n, uint16_t *weight, float *master, float *m, float *v,
                         const void *grad, int32_t grad_type, const struct infinity_adamw *scalars,
                         size_t n_fields, struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .half = weight, .master = master, .m = m, .v =
                               v, .grad = grad, .type = grad_type, .scalars = scalars,
                               .around = n_fields == 0 && n * sizeof *weight >= STREAM_BYTES};
    run_summed(adamw_half_block, &args, n, n_fields, fields);
}

static void adamw_full_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->adamw_full(count, a->master + i, a->m + i, a->v + i, grad_at(a->grad, i, a->type),
                       a->type, a->scalars);
}

void infinity_adamw_full(size_t n, float *weight, float *m, float *v, const void *grad,
                         int32_t grad_type, const struct infinity_adamw *scalars, size_t n_fields,
                         struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .master = weight, .m = m, .v = v, .grad = grad,
                               .type = grad_type, .scalars = scalars};
    run_summed(adamw_full_block, &args, n, n_fields, fields);
}

static void adam_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->adam(count, a->half + i, a->lo + i, a->m + i, a->v + i, grad_at(a->grad, i, a->type),
                 a->type, a->scalars);
}

void infinity_adam(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v, const void *grad,
                   int32_t grad_type, const struct infinity_adamw *scalars, size_t n_fields,
                   struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .half = hi, .lo = lo, .m = m, .v = v, .grad =
                               grad, .type = grad_type, .scalars = scalars};
    run_summed(adam_block, &args, n, n_fields, fields);
}

static void sgd_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->sgd(count, a->half + i, a->lo + i, a->m + i, grad_at(a->grad, i, a->type), a->type,
                a->scalars);
}

void infinity_sgd(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                  int32_t grad_type, const struct infinity_sgd *scalars, size_t n_fields,
                  struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .half = hi, .lo = lo, .m = m, .grad = grad,
                               .type = grad_type, .scalars = scalars};
    run_summed(sgd_block, &args, n, n_fields, fields);
}

static void adagrad_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->adagrad(count, a->half + i, a->lo + i, a->v + i, grad_at(a->grad, i, a->type), a->type,
                    a->scalars);
}

void infinity_adagrad(size_t n, uint16_t *hi, int16_t *lo, float *v, const void *grad,
                      int32_t grad_type, const struct infinity_adagrad *scalars, size_t n_fields,
                      struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .half = hi, .lo = lo, .v = v, .grad = grad,
                               .type = grad_type, .scalars = scalars};
    run_summed(adagrad_block, &args, n, n_fields, fields);
}

static void lion_block(const void *args, size_t i, size_t count) {
    const struct recipe_args *a = args;
    a->isa->lion(count, a->half + i, a->lo + i, a->m + i, grad_at(a->grad, i, a->type), a->type,
                 a->scalars);
}

void infinity_lion(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                   int32_t grad_type, const struct infinity_lion *scalars, size_t n_fields,
                   struct infinity_field *fields) {
    struct recipe_args args = {.isa = current_isa(), .half = hi, .lo = lo, .m = m, .grad = grad,
                               .type = grad_type, .scalars = scalars};
    run_summed(lion_block, &args, n, n_fields, fields);
}

struct half_args {
    const struct isa *isa;
    float *f32;
    uint16_t *f16;
    const void *source;
};

static void widen_half_block(const void *args, size_t i, size_t count) {
    const struct half_args *a = args;
    a->isa->widen_half(count, (const uint16_t *)a->source + i, a->f32 + i);
}

void infinity_widen_f16(size_t n, const uint16_t *f16, float *f32) {
    struct half_args args = {.isa = current_isa(), .source = f16, .f32 = f32};
    run_blocks(widen_half_block, &args, n, BLOCK_NUMEL);
}

static void narrow_half_block(const void *args, size_t i, size_t count) {
    const struct half_args *a = args;
    a->isa->narrow_half(count, (const float *)a->source + i, a->f16 + i);
}

void infinity_narrow_f16(size_t n, const float *f32, uint16_t *f16) {
    struct half_args args = {.isa = current_isa(), .source = f32, .f16 = f16};
    run_blocks(narrow_half_block, &args, n, BLOCK_NUMEL);
}

static void accumulate_half_block(const void *args, size_t i, size_t count) {
    const struct half_args *a = args;
    a->isa->accumulate_half(count, a->f32 + i, (const uint16_t *)a->source + i);
}

void infinity_accumulate_f16(size_t n, float *acc, const uint16_t *grad) {
    struct half_args args = {.isa = current_isa(), .source = grad, .f32 = acc};
    run_blocks(accumulate_half_block, &args, n, BLOCK_NUMEL);
}
