/* The functions of kernels.h: each cuts its range into blocks for the pool and passes every block to
 * the kernel of the instruction set in use. */
#include <math.h>
#include <stdatomic.h>

#include "internal.h"

/* Bytes per block of a copy. */
#define COPY_BYTES ((size_t)1 << 18)
/* Blocks whose sums are kept at a time: 64 Mi elements. */
#define SUM_BLOCKS ((size_t)4096)

#define KERNELS(isa, adamw16, adamw8) \
    {#isa, \
     adamw_bf16_##isa, \
     adamw_f32_##isa, \
     sum_squares_bf16_##isa, \
     sum_squares_f32_##isa, \
     split_##isa, \
     join_##isa, \
     widen_##isa, \
     accumulate_bf16_##isa, \
     accumulate_f32_##isa, \
     rewrite_##isa, \
     stream_##isa, \
     narrow_##isa, \
     noise_##isa, \
     narrow_moments_##isa, \
     dequantize_##isa, \
     quantize_##isa, \
     dequantize4_##isa, \
     quantize4_##isa, \
     adamw_half_##isa, \
     adamw_full_##isa, \
     adam_##isa, \
     sgd_##isa, \
     adagrad_##isa, \
     lion_##isa, \
     xxh3_##isa, \
     adamw_small_##isa, \
     widen_half_##isa, \
     widen_e4m3_##isa, \
     widen_i8_##isa, \
     narrow_i8_##isa, \
     widen_4bit_##isa, \
     narrow_half_##isa, \
     accumulate_half_##isa, \
     recover_##isa, \
     adamw_told_##isa, \
     adamw16, \
     adamw8}

/* Best first. */
static const struct isa kernels[] = {
#ifdef INFINITY_X86
    KERNELS(avx512, adamw16_avx512, adamw8_avx512),
    KERNELS(avx2, NULL, NULL),
#endif
    KERNELS(scalar, NULL, NULL),
};
#define N_ISAS (sizeof kernels / sizeof kernels[0])

/* The last one runs anywhere. */
static const struct isa *_Atomic isa_in_use = &kernels[N_ISAS - 1];

static bool is_supported(const char *name) {
#ifdef INFINITY_X86
    __builtin_cpu_init();
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("fma");
#endif
    return strcmp(name, "scalar") == 0;
}

int infinity_set_isa(const char *name) {
    for (size_t i = 0; i < N_ISAS; i++) {
        bool matches =
            name == NULL ? is_supported(kernels[i].name) : strcmp(kernels[i].name, name) == 0;
        if (!matches) continue;
        if (!is_supported(kernels[i].name)) return -2;
        atomic_store(&isa_in_use, &kernels[i]);
        return 0;
    }
    bool is_elsewhere = strcmp(name, "avx2") == 0 || strcmp(name, "avx512") == 0;
    return is_elsewhere ? -2 : -1;
}

const struct isa *current_isa(void) {
    return atomic_load(&isa_in_use);
}

const char *infinity_isa(void) {
    return current_isa()->name;
}

/* The arguments of each operation. */
struct adamw_args {
    const struct isa *isa;
    uint16_t *hi;
    int16_t *lo;
    float *m, *v;
    const void *grad;
    const struct infinity_adamw *scalars;
    uintptr_t ahead;
};

struct sum_args {
    const struct isa *isa;
    const void *grad;
    double *sums; /* one per block */
};

struct cast_args {
    const struct isa *isa;
    float *f32;
    uint16_t *hi;
    int16_t *lo;
    const void *source;
};

static void adamw_bf16_block(const void *args, size_t i, size_t count) {
    const struct adamw_args *a = args;
    const uint16_t *grad = a->grad;
    a->isa->adamw_bf16(count, a->hi + i, a->lo + i, a->m + i, a->v + i, grad + i, a->scalars,
                       a->ahead);
}

static void adamw_f32_block(const void *args, size_t i, size_t count) {
    const struct adamw_args *a = args;
    const float *grad = a->grad;
    a->isa->adamw_f32(count, a->hi + i, a->lo + i, a->m + i, a->v + i, grad + i, a->scalars,
                       a->ahead);
}

void infinity_adamw_bf16(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                         const uint16_t *grad, const struct infinity_adamw *scalars,
                         size_t n_fields, struct infinity_field *fields) {
    uintptr_t ahead = ahead_of(n_fields);
    struct adamw_args args = {atomic_load(&isa_in_use), hi, lo, m, v, grad, scalars, ahead};
    run_summed(adamw_bf16_block, &args, n, n_fields, fields);
}

void infinity_adamw_f32(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v, const float *grad,
                        const struct infinity_adamw *scalars, size_t n_fields,
                        struct infinity_field *fields) {
    uintptr_t ahead = ahead_of(n_fields);
    struct adamw_args args = {atomic_load(&isa_in_use), hi, lo, m, v, grad, scalars, ahead};
    run_summed(adamw_f32_block, &args, n, n_fields, fields);
}

static void sum_squares_bf16_block(const void *args, size_t i, size_t count) {
    const struct sum_args *a = args;
    a->sums[i / BLOCK_NUMEL] = a->isa->sum_squares_bf16(count, (const uint16_t *)a->grad + i);
}

static void sum_squares_f32_block(const void *args, size_t i, size_t count) {
    const struct sum_args *a = args;
    a->sums[i / BLOCK_NUMEL] = a->isa->sum_squares_f32(count, (const float *)a->grad + i);
}

static void sum_squares_f16_block(const void *args, size_t i, size_t count) {
    const struct sum_args *a = args;
    float f32[BLOCK_NUMEL];
    a->isa->widen_half(count, (const uint16_t *)a->grad + i, f32);
    a->sums[i / BLOCK_NUMEL] = a->isa->sum_squares_f32(count, f32);
}

static struct infinity_sum sum_squares(block_function block, size_t n, const void *grad,
                                       size_t element) {
    double sums[SUM_BLOCKS];
    struct infinity_sum total = {0.0, 1};
    for (size_t start = 0; start < n; start += SUM_BLOCKS * BLOCK_NUMEL) {
        size_t left = n - start;
        size_t count = left < SUM_BLOCKS * BLOCK_NUMEL ? left : SUM_BLOCKS * BLOCK_NUMEL;
        struct sum_args args = {atomic_load(&isa_in_use), (const char *)grad + start * element,
                                sums};
        run_blocks(block, &args, count, BLOCK_NUMEL);
        size_t n_blocks = (count + BLOCK_NUMEL - 1) / BLOCK_NUMEL;
        for (size_t b = 0; b < n_blocks; b++) total.sum = total.sum + sums[b];
    }
    total.finite = isfinite(total.sum) ? 1 : 0;
    if (isnan(total.sum)) total.sum = (double)NAN;
    return total;
}

struct infinity_sum infinity_sum_squares_bf16(size_t n, const uint16_t *grad) {
    return sum_squares(sum_squares_bf16_block, n, grad, sizeof *grad);
}

struct infinity_sum infinity_sum_squares_f32(size_t n, const float *grad) {
    return sum_squares(sum_squares_f32_block, n, grad, sizeof *grad);
}

struct infinity_sum infinity_sum_squares_f16(size_t n, const uint16_t *grad) {
    return sum_squares(sum_squares_f16_block, n, grad, sizeof *grad);
}

static void split_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->split(count, (const float *)a->source + i, a->hi + i, a->lo + i);
}

void infinity_split(size_t n, const float *f32, uint16_t *hi, int16_t *lo) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = f32, .hi = hi, .lo = lo};
    run_blocks(split_block, &args, n, BLOCK_NUMEL);
}

static void join_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->join(count, (const uint16_t *)a->source + i, a->lo + i, a->f32 + i);
}

void infinity_join(size_t n, const uint16_t *hi, const int16_t *lo, float *f32) {
    /* lo loses its const only to share the struct with split; join reads it. */
    struct cast_args args = {
        .isa = atomic_load(&isa_in_use), .f32 = f32, .source = hi, .lo = (int16_t *)(uintptr_t)lo};
    run_blocks(join_block, &args, n, BLOCK_NUMEL);
}

static void widen_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->widen(count, (const uint16_t *)a->source + i, a->f32 + i);
}

void infinity_widen(size_t n, const uint16_t *bf16, float *f32) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = bf16, .f32 = f32};
    run_blocks(widen_block, &args, n, BLOCK_NUMEL);
}

static void narrow_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->narrow(count, (const float *)a->source + i, a->hi + i);
}

void infinity_narrow(size_t n, const float *f32, uint16_t *bf16) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = f32, .hi = bf16};
    run_blocks(narrow_block, &args, n, BLOCK_NUMEL);
}

static void accumulate_bf16_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->accumulate_bf16(count, a->f32 + i, (const uint16_t *)a->source + i);
}

void infinity_accumulate_bf16(size_t n, float *acc, const uint16_t *grad) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = grad, .f32 = acc};
    run_blocks(accumulate_bf16_block, &args, n, BLOCK_NUMEL);
}

static void accumulate_f32_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->accumulate_f32(count, a->f32 + i, (const float *)a->source + i);
}

void infinity_accumulate_f32(size_t n, float *acc, const float *grad) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = grad, .f32 = acc};
    run_blocks(accumulate_f32_block, &args, n, BLOCK_NUMEL);
}

static void rewrite_block(const void *args, size_t i, size_t count) {
    const struct cast_args *a = args;
    a->isa->rewrite(count, (const uint16_t *)a->source + i, a->hi + i, a->lo + i);
}

void infinity_rewrite(size_t n, const uint16_t *new_hi, uint16_t *hi, int16_t *lo) {
    struct cast_args args = {.isa = atomic_load(&isa_in_use), .source = new_hi, .hi = hi, .lo = lo};
    run_blocks(rewrite_block, &args, n, BLOCK_NUMEL);
}

struct copy_args {
    const struct isa *isa;
    char *dst;
    const char *src;
};

static void copy_block(const void *args, size_t i, size_t count) {
    const struct copy_args *a = args;
    memcpy(a->dst + i, a->src + i, count);
}

static void stream_block(const void *args, size_t i, size_t count) {
    const struct copy_args *a = args;
    a->isa->stream(count, a->dst + i, a->src + i);
}

void infinity_copy(size_t n_bytes, void *dst, const void *src) {
    struct copy_args args = {atomic_load(&isa_in_use), dst, src};
    bool fits_caches = n_bytes < STREAM_BYTES;
    run_blocks(fits_caches ? copy_block : stream_block, &args, n_bytes, COPY_BYTES);
}
