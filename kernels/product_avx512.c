/* Products of bf16 matrices, added to an fp32 sum where it lies.
 *
 * [Note: products]
 * The sum runs over the rows of the right factor, as over the tokens of a linear layer's inputs, and
 * over the rows or columns of the left factor.  An instruction multiplies pairs of elements and adds
 * both products, so two rows are packed side by side.  First, panels of 32 columns of the right factor
 * are packed.  Then each thread takes panels of 12 columns of the left factor, packs one, and
 * multiplies it with every panel of the right one.  The 24 registers of sums are added to the total
 * once per 512 rows, or rounded.
 *
 * [Note: whose threads]
 * This runs between torch's operations, whose OpenMP threads spin for milliseconds after each
 * operation.  The pool's threads would share the cores with them (measured: 18.6 ms instead of 12.3).
 * So the product runs on the OpenMP threads if the process has GNU's libgomp, through the entry point
 * that GCC's own code calls, and otherwise on the pool.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

/* Compilers that support the instructions. */
#if defined(INFINITY_X86) && (defined(__clang__) || __GNUC__ >= 11)
#include <immintrin.h>

#define TARGET_BF16 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define ROWS 512     /* packed at a time: a panel of the right factor is 32 KiB */
#define COLUMNS 1024 /* of the right factor, packed at a time: 1 MiB */
#define WIDE 32   /* columns of a panel of the right factor */
#define TALL 12   /* of the left one */
#define BLOCKS_PER_THREAD 16 /* enough that the pool wakes all of its threads */

/* Part of a product, small enough to be packed. */
struct part {
    size_t rows, m, n, threads;
    const uint16_t *left, *right;
    size_t left_stride, left_step, right_stride, stride;
    float *total;     /* the matrix to add to, or */
    uint16_t *result; /* the matrix to write; `stride` is that of either */
    uint32_t *packed; /* the right factor */
    atomic_size_t next;
};

/* Interleaves the elements of two rows. */
TARGET_BF16 static inline __m512i pairs_of(const uint16_t *even, const uint16_t *odd,
                                           __mmask16 columns) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, even));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Packs a panel of the right factor, of at most WIDE columns; an odd last row is paired with zeros. */
TARGET_BF16 static void pack_wide(size_t rows, const uint16_t *from, size_t stride, size_t columns,
                                  uint32_t *to) {
    uint32_t some = (uint32_t)(((uint64_t)1 << columns) - 1);
    __mmask16 first = (__mmask16)some, second = (__mmask16)(some >> 16);
    for (size_t k = 0; k + 2 <= rows; k += 2, from += 2 * stride, to += WIDE) {
        _mm512_storeu_si512(to, pairs_of(from, from + stride, first));
        _mm512_storeu_si512(to + 16, pairs_of(from + 16, from + stride + 16, second));
    }
    if (rows % 2 == 0) return;
    for (size_t j = 0; j < WIDE; j++) to[j] = j < columns ? from[j] : 0;
}

/* Packs a panel of the left factor, of at most TALL columns. */
TARGET_BF16 static void pack_tall(size_t rows, const uint16_t *from, size_t stride, size_t columns,
                                  uint32_t *to) {
    __mmask16 some = (__mmask16)((1u << columns) - 1), all = (1u << TALL) - 1;
    for (size_t k = 0; k + 2 <= rows; k += 2, from += 2 * stride, to += TALL)
        _mm512_mask_storeu_epi32(to, all, pairs_of(from, from + stride, some));
    if (rows % 2 == 0) return;
    for (size_t i = 0; i < TALL; i++) to[i] = i < columns ? from[i] : 0;
}

static inline uint32_t pair_at(const uint16_t *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

/* The same for a left factor whose columns are contiguous, so that pairs are adjacent already. */
static void pack_turned(size_t rows, const uint16_t *from, size_t step, size_t columns,
                        uint32_t *to) {
    for (size_t k = 0; k + 2 <= rows; k += 2, to += TALL)
        for (size_t i = 0; i < TALL; i++)
            to[i] = i < columns ? pair_at(from + i * step + k) : 0;
    if (rows % 2 == 0) return;
    for (size_t i = 0; i < TALL; i++) to[i] = i < columns ? from[i * step + rows - 1] : 0;
}

typedef __m512 tile[TALL][2];

/* sums[i][j] = the sum over pairs of left's column i times right's column j. */
TARGET_BF16 static inline __attribute__((always_inline)) void
sum_pairs(size_t pairs, const uint32_t *left, const uint32_t *right, tile sums) {
#pragma GCC unroll 12
    for (size_t i = 0; i < TALL; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (size_t k = 0; k < pairs; k++, left += TALL, right += WIDE) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(right);
        __m512bh second = (__m512bh)_mm512_loadu_si512(right + WIDE / 2);
#pragma GCC unroll 12
        for (size_t i = 0; i < TALL; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)left[i]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], first, both);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], second, both);
        }
    }
}

static inline __mmask16 columns_of(size_t wide, size_t half) {
    return (__mmask16)((((uint64_t)1 << wide) - 1) >> (half * WIDE / 2));
}

/* Adds sums to `tall` rows and `wide` columns of a total. */
TARGET_BF16 static void add_tile(size_t pairs, const uint32_t *left, const uint32_t *right,
                                 float *total, size_t stride, size_t tall, size_t wide) {
    tile sums;
    for (size_t i = 0; i < tall; i++) {
        _mm_prefetch((const char *)(total + i * stride), _MM_HINT_T0);
        _mm_prefetch((const char *)(total + i * stride + WIDE / 2), _MM_HINT_T0);
    }
    sum_pairs(pairs, left, right, sums);
#pragma GCC unroll 12
    for (size_t i = 0; i < TALL; i++) {
        if (i >= tall) break;
        for (size_t half = 0; half < 2; half++) {
            float *at = total + i * stride + half * WIDE / 2;
            __mmask16 these = columns_of(wide, half);
            __m512 old = _mm512_maskz_loadu_ps(these, at);
            _mm512_mask_storeu_ps(at, these, _mm512_add_ps(old, sums[i][half]));
        }
    }
}

/* Rounds sums into `tall` rows and `wide` columns of a result. */
TARGET_BF16 static void round_tile(size_t pairs, const uint32_t *left, const uint32_t *right,
                                   uint16_t *result, size_t stride, size_t tall, size_t wide) {
    tile sums;
    sum_pairs(pairs, left, right, sums);
#pragma GCC unroll 12
    for (size_t i = 0; i < TALL; i++) {
        if (i >= tall) break;
        for (size_t half = 0; half < 2; half++)
            _mm256_mask_storeu_epi16(result + i * stride + half * WIDE / 2, columns_of(wide, half),
                                     (__m256i)_mm512_cvtneps_pbh(sums[i][half]));
    }
}

/* The two phases; each takes pieces of a part until none is left. */
static void pack_right(void *argument) {
    struct part *p = argument;
    size_t panels = (p->n + WIDE - 1) / WIDE, panel, pairs = (p->rows + 1) / 2;
    while ((panel = atomic_fetch_add(&p->next, 1)) < panels) {
        size_t at = panel * WIDE, columns = p->n - at < WIDE ? p->n - at : WIDE;
        pack_wide(p->rows, p->right + at, p->right_stride, columns, p->packed + at * pairs);
    }
}

/* Multiplies one panel of the left factor with the right one's panels from a column on. */
TARGET_BF16 static void multiply_panel(const struct part *p, size_t panel, size_t from, size_t to) {
    _Alignas(64) uint32_t packed[ROWS / 2 * TALL];
    size_t at = panel * TALL, tall = p->m - at < TALL ? p->m - at : TALL;
    size_t pairs = (p->rows + 1) / 2;
    if (p->left_step == 1)
        pack_tall(p->rows, p->left + at, p->left_stride, tall, packed);
    else
        pack_turned(p->rows, p->left + at * p->left_step, p->left_step, tall, packed);
    for (size_t j = from; j < to; j += WIDE) {
        size_t wide = p->n - j < WIDE ? p->n - j : WIDE, there = at * p->stride + j;
        const uint32_t *right = p->packed + j * pairs;
        if (p->total)
            add_tile(pairs, packed, right, p->total + there, p->stride, tall, wide);
        else
            round_tile(pairs, packed, right, p->result + there, p->stride, tall, wide);
    }
}

/* The panels left over after each thread has had equally many are divided by columns. */
static void multiply_left(void *argument) {
    struct part *p = argument;
    size_t panels = (p->m + TALL - 1) / TALL, even = panels - panels % p->threads, piece;
    size_t share = ((p->n + WIDE - 1) / WIDE + p->threads - 1) / p->threads * WIDE;
    while ((piece = atomic_fetch_add(&p->next, 1)) < even + panels % p->threads * p->threads) {
        if (piece < even) {
            multiply_panel(p, piece, 0, p->n);
            continue;
        }
        size_t from = (piece - even) % p->threads * share, to = from + share;
        multiply_panel(p, even + (piece - even) / p->threads, from, to < p->n ? to : p->n);
    }
}

/* [Note: whose threads] */
typedef void (*parallel)(void (*run)(void *), void *argument, unsigned n_threads, unsigned flags);
static parallel openmp;
static pthread_once_t openmp_once = PTHREAD_ONCE_INIT;

static void find_openmp(void) {
    void *library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library) *(void **)&openmp = dlsym(library, "GOMP_parallel");
}

struct whole {
    void (*run)(void *);
    void *argument;
};

static void run_whole(const void *args, size_t first, size_t count) {
    const struct whole *whole = args;
    (void)first, (void)count;
    whole->run(whole->argument); /* on any thread: pieces are taken from a counter */
}

static void on_threads(void (*run)(void *), struct part *part) {
    atomic_store(&part->next, 0);
    if (openmp) {
        openmp(run, part, (unsigned)part->threads, 0);
        return;
    }
    struct whole whole = {run, part};
    run_blocks(run_whole, &whole, BLOCKS_PER_THREAD * infinity_threads(), 1);
}

int infinity_multiplies_bf16(void) {
    __builtin_cpu_init();
    return strcmp(current_isa()->name, "avx512") == 0 && __builtin_cpu_supports("avx512bf16");
}

/* Memory for the right factor of one part.  It is kept for the next product: malloc would map new pages
 * each time (measured: a MiB more per call, and 0.3 of 5.6 ms). */
static _Atomic(uint32_t *) spare;

static uint32_t *take_room(void) {
    uint32_t *found = atomic_exchange(&spare, NULL);
    return found ? found : aligned_alloc(64, ROWS / 2 * COLUMNS * sizeof *found);
}

static void keep_room(uint32_t *room) {
    free(atomic_exchange(&spare, room));
}

/* Runs a product part by part. */
static int run_parts(const struct part *whole) {
    uint32_t *packed = take_room();
    if (packed == NULL) return -2;
    pthread_once(&openmp_once, find_openmp);
    for (size_t at = 0; at < whole->rows; at += ROWS)
        for (size_t from = 0; from < whole->n; from += COLUMNS) {
            struct part part = *whole;
            part.rows = whole->rows - at < ROWS ? whole->rows - at : ROWS;
            part.n = whole->n - from < COLUMNS ? whole->n - from : COLUMNS;
            part.left += at * whole->left_stride;
            part.right += at * whole->right_stride + from;
            if (whole->total) part.total += from;
            if (whole->result) part.result += from;
            part.packed = packed;
            on_threads(pack_right, &part);
            on_threads(multiply_left, &part);
        }
    keep_room(packed);
    return 0;
}

int infinity_add_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left,
                              size_t left_stride, size_t left_step, const uint16_t *right,
                              size_t right_stride, float *total, size_t total_stride,
                              size_t n_threads) {
    if (!infinity_multiplies_bf16()) return -1;
    struct part whole = {
        .rows = k, .m = m, .n = n, .threads = n_threads ? n_threads : 1,
        .left = left, .right = right, .total = total,
        .left_stride = left_stride, .left_step = left_step,
        .right_stride = right_stride, .stride = total_stride,
    };
    return run_parts(&whole);
}

int infinity_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left, size_t left_stride,
                          size_t left_step, const uint16_t *right, size_t right_stride,
                          uint16_t *result, size_t result_stride, size_t n_threads) {
    if (!infinity_multiplies_bf16() || k > ROWS) return -1;
    struct part whole = {
        .rows = k, .m = m, .n = n, .threads = n_threads ? n_threads : 1,
        .left = left, .right = right, .result = result,
        .left_stride = left_stride, .left_step = left_step,
        .right_stride = right_stride, .stride = result_stride,
    };
    return run_parts(&whole);
}
#else
int infinity_multiplies_bf16(void) {
    return 0;
}

int infinity_add_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left,
                              size_t left_stride, size_t left_step, const uint16_t *right,
                              size_t right_stride, float *total, size_t total_stride,
                              size_t n_threads) {
    (void)k, (void)m, (void)n, (void)left, (void)left_stride, (void)left_step, (void)right;
    (void)right_stride, (void)total, (void)total_stride, (void)n_threads;
    return -1;
}

int infinity_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left, size_t left_stride,
                          size_t left_step, const uint16_t *right, size_t right_stride,
                          uint16_t *result, size_t result_stride, size_t n_threads) {
    (void)k, (void)m, (void)n, (void)left, (void)left_stride, (void)left_step, (void)right;
    (void)right_stride, (void)result, (void)result_stride, (void)n_threads;
    return -1;
}
#endif
