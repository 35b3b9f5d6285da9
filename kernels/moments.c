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

/* The codes of eight elements of a moment that is kept alone, as the bytes of both have them, in four bytes:
 * two in each.  shift: 4 for v's. */
static inline uint32_t packed_alone(const uint8_t *both, int shift) {
    uint64_t codes;
    memcpy(&codes, both, 8);
    codes = codes >> shift & OF_EACH(0x0F);
    codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFu;
    codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFu;
    return (uint32_t)(codes | codes >> 16);
}

static inline void unpacked_alone(uint32_t packed, int shift, uint8_t *both) {
    uint64_t codes = packed;
    codes = (codes | codes << 16) & 0x0000FFFF0000FFFFu;
    codes = (codes | codes << 8) & 0x00FF00FF00FF00FFu;
    codes = (codes | codes << 4) & OF_EACH(0x0F);
    codes <<= shift;
    memcpy(both, &codes, 8);
}

/* Those of n elements.  Beyond n, the bytes of both are zeros, and there is room for eight. */
static void pack_alone(size_t n, const uint8_t *both, int shift, uint8_t *alone) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_u32(alone + i / 2, packed_alone(both + i, shift));
    uint32_t rest = packed_alone(both + i, shift);
    memcpy(alone + i / 2, &rest, (n - i + 1) / 2);
}

static void unpack_alone(size_t n, const uint8_t *alone, int shift, uint8_t *both) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) unpacked_alone(load_u32(alone + i / 2), shift, both + i);
    uint32_t rest = 0;
    memcpy(&rest, alone + i / 2, (n - i + 1) / 2);
    unpacked_alone(rest, shift, both + i);
}

/* A moment that the optimizer does not keep is one of zeros, which stay zeros. */
static const uint16_t zeros[STATE_BLOCK];

/* The moments of elements [i, i + n), a block, to fp32. */
static void widen_block(const struct small_args *a, size_t i, size_t n, float *m_f32,
                        float *v_f32) {
    const struct infinity_small *what = a->what;
    const float *scale = what->scale + i / STATE_BLOCK * 2;
    const void *m = what->m, *v = what->v;
    if (what->bits == 16) {
        a->isa->widen(n, m == NULL ? zeros : (const uint16_t *)m + i, m_f32);
        a->isa->widen(n, v == NULL ? zeros : (const uint16_t *)v + i, v_f32);
    } else if (what->bits == 8) {
        const uint8_t *none = (const uint8_t *)zeros;
        a->isa->dequantize(n, m == NULL ? none : (const uint8_t *)m + i,
                           v == NULL ? none : (const uint8_t *)v + i, scale, m_f32, v_f32);
    } else if (what->mv != NULL) {
        a->isa->dequantize4(n, (const uint8_t *)what->mv + i, scale, m_f32, v_f32);
    } else {
        _Alignas(64) uint8_t both[STATE_BLOCK + 8];
        unpack_alone(n, (const uint8_t *)(m == NULL ? v : m) + i / 2, m == NULL ? 4 : 0, both);
        a->isa->dequantize4(n, both, scale, m_f32, v_f32);
    }
}

/* These moments rounded, by their noise, and stored. */
static void round_block(const struct small_args *a, size_t i, size_t n, const float *m_f32,
                        const float *v_f32, const struct noises *noises) {
    const struct infinity_small *what = a->what;
    float *scale = what->scale + i / STATE_BLOCK * 2;
    void *m = what->m, *v = what->v;
    _Alignas(64) uint16_t dropped[STATE_BLOCK];
    if (what->bits == 16) {
        a->isa->narrow_moments(n, m_f32, v_f32, noises, m == NULL ? dropped : (uint16_t *)m + i,
                               v == NULL ? dropped : (uint16_t *)v + i);
    } else if (what->bits == 8) {
        uint8_t *none = (uint8_t *)dropped;
        a->isa->quantize(n, m_f32, v_f32, noises, m == NULL ? none : (uint8_t *)m + i,
                         v == NULL ? none : (uint8_t *)v + i, scale);
    } else if (what->mv != NULL) {
        a->isa->quantize4(n, m_f32, v_f32, noises, (uint8_t *)what->mv + i, scale);
    } else {
        _Alignas(64) uint8_t both[STATE_BLOCK + 8] = {0};
        a->isa->quantize4(n, m_f32, v_f32, noises, both, scale);
        pack_alone(n, both, m == NULL ? 4 : 0, (uint8_t *)(m == NULL ? v : m) + i / 2);
    }
}

/* How many of the n elements from i on a kernel for the whole step has taken: whole blocks, if no pair
 * ([Note: the noise]) is cut. */
static size_t whole_blocks(const struct small_args *a, size_t i, size_t n) {
    const struct infinity_small *what = a->what;
    bool exists = what->bits == 16  ? a->isa->adamw16 != NULL
                  : what->bits == 8 ? a->isa->adamw8 != NULL
                                    : false;
    if (!exists || what->recipe != INFINITY_ADAMW || what->weights != INFINITY_SPLIT ||
        a->type == INFINITY_F16 || (a->first + i) % 2 != 0 || n < STATE_BLOCK)
        return 0;
    uint16_t *hi = (uint16_t *)what->weight + i;
    int16_t *lo = (int16_t *)what->master + i;
    const void *grad = grad_at(a->grad, i, a->type);
    n -= n % STATE_BLOCK;
    if (what->bits == 16)
        a->isa->adamw16(n, hi, lo, (uint16_t *)what->m + i, (uint16_t *)what->v + i, grad, a->type,
                        what->scalars, a->key, a->first + i, a->ahead);
    else
        a->isa->adamw8(n, hi, lo, (uint8_t *)what->m + i, (uint8_t *)what->v + i,
                       what->scale + i / STATE_BLOCK * 2, grad, a->type, what->scalars, a->key,
                       a->first + i, a->ahead);
    return n;
}

static int noise_width(const struct infinity_small *what) {
    return what->bits == 16 ? 16 : CODE_NOISE;
}

static void small_block(const void *args, size_t first, size_t count) {
    const struct small_args *a = args;
    _Alignas(64) float m_f32[STATE_BLOCK], v_f32[STATE_BLOCK];
    struct noises noises;
    for (size_t i = first + whole_blocks(a, first, count); i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        widen_block(a, i, n, m_f32, v_f32);
        step_on(a, i, n, m_f32, v_f32);
        a->isa->noise(n, a->key, a->first + i, noise_width(a->what), noises.m, noises.v);
        round_block(a, i, n, m_f32, v_f32, &noises);
    }
}

void infinity_small_step(size_t n, const struct infinity_small *what, const void *grad,
                         int32_t grad_type, uint64_t key, uint64_t first, size_t n_fields,
                         struct infinity_field *fields) {
    struct small_args args = {current_isa(), what, grad, grad_type, key, first, ahead_of(n_fields)};
    run_summed(small_block, &args, n, n_fields, fields);
}

/* Moments in fp32, and where they are stored.  One that is NULL is of zeros. */
struct moment_args {
    struct small_args small;
    float *m_f32, *v_f32;
    bool nearest;
};

static void widen_moment_block(const void *args, size_t first, size_t count) {
    const struct moment_args *a = args;
    _Alignas(64) float none[STATE_BLOCK];
    for (size_t i = first; i < first + count; i += STATE_BLOCK)
        widen_block(&a->small, i, piece_at(i, first + count), a->m_f32 == NULL ? none : a->m_f32 + i,
                    a->v_f32 == NULL ? none : a->v_f32 + i);
}

static void round_moments_block(const void *args, size_t first, size_t count) {
    const struct moment_args *a = args;
    static const float none[STATE_BLOCK];
    int width = noise_width(a->small.what);
    struct noises noises;
    for (size_t i = 0; i < STATE_BLOCK; i++) noises.m[i] = noises.v[i] = 1u << (width - 1);
    for (size_t i = first; i < first + count; i += STATE_BLOCK) {
        size_t n = piece_at(i, first + count);
        if (!a->nearest)
            a->small.isa->noise(n, a->small.key, a->small.first + i, width, noises.m, noises.v);
        round_block(&a->small, i, n, a->m_f32 == NULL ? none : a->m_f32 + i,
                    a->v_f32 == NULL ? none : a->v_f32 + i, &noises);
    }
}

void infinity_widen_moment(size_t n, const struct infinity_small *what, float *f32) {
    bool is_v = what->m == NULL;
    struct moment_args args = {
        {current_isa(), what, NULL, 0, 0, 0, 0}, is_v ? NULL : f32, is_v ? f32 : NULL, false};
    run_blocks(widen_moment_block, &args, n, BLOCK_NUMEL);
}

void infinity_round_moments(size_t n, const struct infinity_small *what, float *m_f32, float *v_f32,
                            uint64_t key, uint64_t first, int32_t nearest) {
    struct moment_args args = {
        {current_isa(), what, NULL, 0, key, first, 0}, m_f32, v_f32, nearest != 0};
    run_blocks(round_moments_block, &args, n, BLOCK_NUMEL);
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
