/* The steps on small moments: each piece is widened into the caches, updated by the small step, and
 * rounded back.  If an instruction set has a kernel for the whole step, it gets the whole blocks.
 * See [Note: small moments] in kernels.h. */
#include "moments.h"

_Static_assert(BLOCK_NUMEL % STATE_BLOCK == 0 && STRETCH_NUMEL % STATE_BLOCK == 0,
               "the pool must not cut a block whose elements share a scale");

/* One call's arguments. */
struct step_args {
    const struct isa *isa;
    uint16_t *hi;
    int16_t *lo;
    void *m, *v;
    float *scale;
    const void *grad;
    int32_t type; /* of the gradient: INFINITY_BF16 or _F32 */
    const struct infinity_adamw_small *scalars;
    uint64_t key, first;
    uintptr_t ahead;
};

/* The step on elements [i, i + n), whose moments stand in m and v. */
static void step_on(const struct step_args *a, size_t i, size_t n, float *m, float *v) {
    a->isa->adamw_small(n, a->hi + i, a->lo + i, m, v, grad_at(a->grad, i, a->type), a->type,
                        a->scalars);
}

static size_t piece_at(size_t i, size_t end) {
    return end - i < STATE_BLOCK ? end - i : STATE_BLOCK;
}

/* How many of the n elements from i on go to a kernel for the whole step: whole blocks, if no pair
 * ([Note: the noise]) is cut. */
static size_t whole_blocks(const struct step_args *a, bool exists, size_t i, size_t n) {
    return exists && (a->first + i) % 2 == 0 ? n - n % STATE_BLOCK : 0;
}

static void adamw16_block(const void *args, size_t first, size_t count) {
    const struct step_args *a = args;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    struct noises noises;
    uint16_t *m = a->m, *v = a->v;
    size_t i = first, whole = whole_blocks(a, a->isa->adamw16 != NULL, first, count);
    if (whole != 0)
        a->isa->adamw16(whole, a->hi + i, a->lo + i, m + i, v + i, grad_at(a->grad, i, a->type),
                        a->type, a->scalars, a->key, a->first + i, a->ahead);
    for (i += whole; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        a->isa->widen(n, m + i, m_f32);
        a->isa->widen(n, v + i, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, 16, noises.m, noises.v);
        a->isa->narrow_moments(n, m_f32, v_f32, &noises, m + i, v + i);
    }
}

static void adamw8_block(const void *args, size_t first, size_t count) {
    const struct step_args *a = args;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    struct noises noises;
    uint8_t *m = a->m, *v = a->v;
    size_t i = first, whole = whole_blocks(a, a->isa->adamw8 != NULL, first, count);
    if (whole != 0)
        a->isa->adamw8(whole, a->hi + i, a->lo + i, m + i, v + i, a->scale + i / STATE_BLOCK * 2,
                       grad_at(a->grad, i, a->type), a->type, a->scalars, a->key,
                       a->first + i, a->ahead);
    for (i += whole; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        float *scale = a->scale + i / STATE_BLOCK * 2;
        a->isa->dequantize(n, m + i, v + i, scale, m_f32, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, GRID_SHIFT, noises.m, noises.v);
        a->isa->quantize(n, m_f32, v_f32, &noises, m + i, v + i, scale);
    }
}

void infinity_adamw16_bf16(size_t n, uint16_t *hi, int16_t *lo, uint16_t *m, uint16_t *v,
                           const uint16_t *grad, const struct infinity_adamw_small *scalars,
                           uint64_t key, uint64_t first, size_t n_fields,
                           struct infinity_field *fields) {
    struct step_args args = {
        current_isa(), hi, lo, m, v, NULL, grad, INFINITY_BF16, scalars, key, first,
        ahead_of(n_fields)};
    run_summed(adamw16_block, &args, n, n_fields, fields);
}

void infinity_adamw16_f32(size_t n, uint16_t *hi, int16_t *lo, uint16_t *m, uint16_t *v,
                          const float *grad, const struct infinity_adamw_small *scalars,
                          uint64_t key, uint64_t first, size_t n_fields,
                           struct infinity_field *fields) {
    struct step_args args = {
        current_isa(), hi, lo, m, v, NULL, grad, INFINITY_F32, scalars, key, first,
        ahead_of(n_fields)};
    run_summed(adamw16_block, &args, n, n_fields, fields);
}

void infinity_adamw8_bf16(size_t n, uint16_t *hi, int16_t *lo, uint8_t *m, uint8_t *v, float *scale,
                          const uint16_t *grad, const struct infinity_adamw_small *scalars,
                          uint64_t key, uint64_t first, size_t n_fields,
                           struct infinity_field *fields) {
    struct step_args args = {
        current_isa(), hi, lo, m, v, scale, grad, INFINITY_BF16, scalars, key, first,
        ahead_of(n_fields)};
    run_summed(adamw8_block, &args, n, n_fields, fields);
}

void infinity_adamw8_f32(size_t n, uint16_t *hi, int16_t *lo, uint8_t *m, uint8_t *v, float *scale,
                         const float *grad, const struct infinity_adamw_small *scalars,
                         uint64_t key, uint64_t first, size_t n_fields,
                           struct infinity_field *fields) {
    struct step_args args = {
        current_isa(), hi, lo, m, v, scale, grad, INFINITY_F32, scalars, key, first,
        ahead_of(n_fields)};
    run_summed(adamw8_block, &args, n, n_fields, fields);
}

struct quantize_args {
    const struct isa *isa;
    const float *m_f32, *v_f32;
    uint8_t *m, *v;
    float *scale;
};

static void quantize_block(const void *args, size_t first, size_t count) {
    const struct quantize_args *a = args;
    struct noises nearest;
    for (size_t i = 0; i < STATE_BLOCK; i++) nearest.m[i] = nearest.v[i] = HALF_STEP;
    for (size_t i = first; i < first + count; i += STATE_BLOCK)
        a->isa->quantize(piece_at(i, first + count), a->m_f32 + i, a->v_f32 + i, &nearest,
                         a->m + i, a->v + i, a->scale + i / STATE_BLOCK * 2);
}

void infinity_quantize(size_t n, const float *m_f32, const float *v_f32, uint8_t *m, uint8_t *v,
                       float *scale) {
    struct quantize_args args = {current_isa(), m_f32, v_f32, m, v, scale};
    run_blocks(quantize_block, &args, n, BLOCK_NUMEL);
}

struct dequantize_args {
    const struct isa *isa;
    const uint8_t *m, *v;
    const float *scale;
    float *m_f32, *v_f32;
};

static void dequantize_block(const void *args, size_t first, size_t count) {
    const struct dequantize_args *a = args;
    for (size_t i = first; i < first + count; i += STATE_BLOCK)
        a->isa->dequantize(piece_at(i, first + count), a->m + i, a->v + i,
                           a->scale + i / STATE_BLOCK * 2, a->m_f32 + i, a->v_f32 + i);
}

void infinity_dequantize(size_t n, const uint8_t *m, const uint8_t *v, const float *scale,
                         float *m_f32, float *v_f32) {
    struct dequantize_args args = {current_isa(), m, v, scale, m_f32, v_f32};
    run_blocks(dequantize_block, &args, n, BLOCK_NUMEL);
}
