/* The steps on small moments: each piece is widened into the caches, updated by its optimizer's step, and
 * rounded back.  If an instruction set has a kernel for the whole step, it gets the whole blocks.
 * See [Note: small moments] in kernels.h. */
#include "moments.h"

_Static_assert(BLOCK_NUMEL % STATE_BLOCK == 0 && STRETCH_NUMEL % STATE_BLOCK == 0,
               "the pool must not cut a block whose elements share a scale");

/* One call's arguments. */
struct small_args {
    const struct isa *isa;
    const struct infinity_small *what;
    const void *grad;
    int32_t type; /* of the gradient */
    uint64_t key, first;
    uintptr_t ahead;
};

static size_t piece_at(size_t i, size_t end) {
    return end - i < STATE_BLOCK ? end - i : STATE_BLOCK;
}

/* The optimizer's step on elements [i, i + n), whose split masters and moments are given. */
static void step_on_split(const struct small_args *a, size_t i, size_t n, uint16_t *hi, int16_t *lo,
                          float *m, float *v) {
    const void *grad = grad_at(a->grad, i, a->type), *s = a->what->scalars;
    switch (a->what->recipe) {
        case INFINITY_ADAMW: a->isa->adamw_small(n, hi, lo, m, v, grad, a->type, s); break;
        case INFINITY_ADAM: a->isa->adam(n, hi, lo, m, v, grad, a->type, s); break;
        case INFINITY_SGD: a->isa->sgd(n, hi, lo, m, grad, a->type, s); break;
        case INFINITY_ADAGRAD: a->isa->adagrad(n, hi, lo, v, grad, a->type, s); break;
        default: a->isa->lion(n, hi, lo, m, grad, a->type, s);
    }
}

/* The same on masters of any form: what is not split is split in the caches, which loses no bit. */
static void step_on(const struct small_args *a, size_t i, size_t n, float *m, float *v) {
    const struct infinity_small *what = a->what;
    if (what->weights == INFINITY_SPLIT) {
        step_on_split(a, i, n, (uint16_t *)what->weight + i, (int16_t *)what->master + i, m, v);
        return;
    }
    _Alignas(64) uint16_t hi[STATE_BLOCK];
    _Alignas(64) int16_t lo[STATE_BLOCK];
    float *master = (float *)(what->weights == INFINITY_HALF ? what->master : what->weight) + i;
    a->isa->split(n, master, hi, lo);
    step_on_split(a, i, n, hi, lo, m, v);
    a->isa->join(n, hi, lo, master);
    if (what->weights == INFINITY_HALF)
        a->isa->narrow_half(n, master, (uint16_t *)what->weight + i);
}

/* How many of the n elements from i on go to a kernel for the whole step: whole blocks, if no pair
 * ([Note: the noise]) is cut. */
static size_t whole_blocks(const struct small_args *a, bool exists, size_t i, size_t n) {
    const struct infinity_small *what = a->what;
    bool fits = exists && what->recipe == INFINITY_ADAMW && what->weights == INFINITY_SPLIT &&
                a->type != INFINITY_F16 && (a->first + i) % 2 == 0;
    return fits ? n - n % STATE_BLOCK : 0;
}

/* A moment that the optimizer does not keep is one of zeros, which stay zeros. */
static void small16_block(const void *args, size_t first, size_t count) {
    const struct small_args *a = args;
    const struct infinity_small *what = a->what;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    _Alignas(64) uint16_t none[STATE_BLOCK] = {0};
    struct noises noises;
    size_t i = first, whole = whole_blocks(a, a->isa->adamw16 != NULL, first, count);
    if (whole != 0)
        a->isa->adamw16(whole, (uint16_t *)what->weight + i, (int16_t *)what->master + i,
                        (uint16_t *)what->m + i, (uint16_t *)what->v + i,
                        grad_at(a->grad, i, a->type), a->type, what->scalars, a->key, a->first + i,
                        a->ahead);
    for (i += whole; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        uint16_t *m = what->m == NULL ? none : (uint16_t *)what->m + i;
        uint16_t *v = what->v == NULL ? none : (uint16_t *)what->v + i;
        a->isa->widen(n, m, m_f32);
        a->isa->widen(n, v, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, 16, noises.m, noises.v);
        a->isa->narrow_moments(n, m_f32, v_f32, &noises, m, v);
    }
}

static void small8_block(const void *args, size_t first, size_t count) {
    const struct small_args *a = args;
    const struct infinity_small *what = a->what;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    _Alignas(64) uint8_t none[STATE_BLOCK] = {0};
    struct noises noises;
    size_t i = first, whole = whole_blocks(a, a->isa->adamw8 != NULL, first, count);
    if (whole != 0)
        a->isa->adamw8(whole, (uint16_t *)what->weight + i, (int16_t *)what->master + i,
                       (uint8_t *)what->m + i, (uint8_t *)what->v + i,
                       what->scale + i / STATE_BLOCK * 2, grad_at(a->grad, i, a->type), a->type,
                       what->scalars, a->key, a->first + i, a->ahead);
    for (i += whole; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        float *scale = what->scale + i / STATE_BLOCK * 2;
        uint8_t *m = what->m == NULL ? none : (uint8_t *)what->m + i;
        uint8_t *v = what->v == NULL ? none : (uint8_t *)what->v + i;
        a->isa->dequantize(n, m, v, scale, m_f32, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, CODE_NOISE, noises.m, noises.v);
        a->isa->quantize(n, m_f32, v_f32, &noises, m, v, scale);
    }
}

static void small4_block(const void *args, size_t first, size_t count) {
    const struct small_args *a = args;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    struct noises noises;
    for (size_t i = first; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        uint8_t *packed = (uint8_t *)a->what->m + i;
        float *scale = a->what->scale + i / STATE_BLOCK * 2;
        a->isa->dequantize4(n, packed, scale, m_f32, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, CODE_NOISE, noises.m, noises.v);
        a->isa->quantize4(n, m_f32, v_f32, &noises, packed, scale);
    }
}

void infinity_small_step(size_t n, const struct infinity_small *what, const void *grad,
                         int32_t grad_type, uint64_t key, uint64_t first, size_t n_fields,
                         struct infinity_field *fields) {
    struct small_args args = {current_isa(), what, grad, grad_type, key, first, ahead_of(n_fields)};
    block_function run = what->bits == 16  ? small16_block
                         : what->bits == 8 ? small8_block
                                           : small4_block;
    run_summed(run, &args, n, n_fields, fields);
}

struct quantize_args {
    const struct isa *isa;
    const float *m_f32, *v_f32;
    uint8_t *m, *v; /* v: NULL for 4 bits */
    float *scale;
};

static void quantize_block(const void *args, size_t first, size_t count) {
    const struct quantize_args *a = args;
    struct noises nearest;
    for (size_t i = 0; i < STATE_BLOCK; i++) nearest.m[i] = nearest.v[i] = HALF_STEP;
    for (size_t i = first; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        float *scale = a->scale + i / STATE_BLOCK * 2;
        if (a->v == NULL)
            a->isa->quantize4(n, a->m_f32 + i, a->v_f32 + i, &nearest, a->m + i, scale);
        else
            a->isa->quantize(n, a->m_f32 + i, a->v_f32 + i, &nearest, a->m + i, a->v + i, scale);
    }
}

void infinity_quantize(size_t n, const float *m_f32, const float *v_f32, uint8_t *m, uint8_t *v,
                       float *scale) {
    struct quantize_args args = {current_isa(), m_f32, v_f32, m, v, scale};
    run_blocks(quantize_block, &args, n, BLOCK_NUMEL);
}

void infinity_quantize4(size_t n, const float *m_f32, const float *v_f32, uint8_t *packed,
                        float *scale) {
    struct quantize_args args = {current_isa(), m_f32, v_f32, packed, NULL, scale};
    run_blocks(quantize_block, &args, n, BLOCK_NUMEL);
}

struct dequantize_args {
    const struct isa *isa;
    const uint8_t *m, *v; /* v: NULL for 4 bits */
    const float *scale;
    float *m_f32, *v_f32;
};

static void dequantize_block(const void *args, size_t first, size_t count) {
    const struct dequantize_args *a = args;
    for (size_t i = first; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        const float *scale = a->scale + i / STATE_BLOCK * 2;
        if (a->v == NULL)
            a->isa->dequantize4(n, a->m + i, scale, a->m_f32 + i, a->v_f32 + i);
        else
            a->isa->dequantize(n, a->m + i, a->v + i, scale, a->m_f32 + i, a->v_f32 + i);
    }
}

void infinity_dequantize(size_t n, const uint8_t *m, const uint8_t *v, const float *scale,
                         float *m_f32, float *v_f32) {
    struct dequantize_args args = {current_isa(), m, v, scale, m_f32, v_f32};
    run_blocks(dequantize_block, &args, n, BLOCK_NUMEL);
}

void infinity_dequantize4(size_t n, const uint8_t *packed, const float *scale, float *m_f32,
                          float *v_f32) {
    struct dequantize_args args = {current_isa(), packed, NULL, scale, m_f32, v_f32};
    run_blocks(dequantize_block, &args, n, BLOCK_NUMEL);
}

struct rounded_pairs {
    const struct isa *isa;
    int32_t bits;
    const float *m_f32, *v_f32;
    void *m, *v;
    float *scale;
    uint64_t key, first;
};

static void round_pairs_block(const void *args, size_t first, size_t count) {
    const struct rounded_pairs *a = args;
    struct noises noises;
    for (size_t i = first; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        const float *m_f32 = a->m_f32 + i, *v_f32 = a->v_f32 + i;
        uint8_t *m = (uint8_t *)a->m + i;
        a->isa->noise(n, a->key, a->first + i, a->bits == 16 ? 16 : CODE_NOISE, noises.m, noises.v);
        if (a->bits == 16)
            a->isa->narrow_moments(n, m_f32, v_f32, &noises, (uint16_t *)a->m + i,
                                   (uint16_t *)a->v + i);
        else if (a->bits == 8)
            a->isa->quantize(n, m_f32, v_f32, &noises, m, (uint8_t *)a->v + i,
                             a->scale + i / STATE_BLOCK * 2);
        else
            a->isa->quantize4(n, m_f32, v_f32, &noises, m, a->scale + i / STATE_BLOCK * 2);
    }
}

void infinity_round_moments(size_t n, int32_t bits, const float *m_f32, const float *v_f32, void *m,
                            void *v, float *scale, uint64_t key, uint64_t first) {
    struct rounded_pairs args = {current_isa(), bits, m_f32, v_f32, m, v, scale, key, first};
    run_blocks(round_pairs_block, &args, n, BLOCK_NUMEL);
}
