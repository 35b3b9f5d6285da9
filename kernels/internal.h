#ifndef INFINITY_INTERNAL_H
#define INFINITY_INTERNAL_H
/* Declarations shared by the kernel sources; Python sees kernels.h only. */
#include <stdbool.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#define INFINITY_X86 1
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#endif

/* A field of this size that is only written, such as a copy, leaves the caches before it is read again.
 * Storing around the caches then saves reading the overwritten lines (measured: 55 GB/s, not 41). */
#define STREAM_BYTES ((size_t)16 << 20)

/* Kinds of a struct infinity_stream. */
#define INFINITY_READ 0
#define INFINITY_UPDATE 1
#define INFINITY_WRITE 2

/* Types of a gradient. */
#define INFINITY_BF16 0
#define INFINITY_F32 1
#define INFINITY_F16 2

/* Forms of weights of a struct infinity_small: hi beside lo; fp16 beside an fp32 master; fp32. */
#define INFINITY_SPLIT 0
#define INFINITY_HALF 1
#define INFINITY_FULL 2

/* Its optimizers. */
#define INFINITY_ADAMW 0
#define INFINITY_ADAM 1
#define INFINITY_SGD 2
#define INFINITY_ADAGRAD 3
#define INFINITY_LION 4

/* Elements per block: the unit of a kernel call, and part of sum_squares' definition. */
#define BLOCK_NUMEL ((size_t)16384)
/* Elements per checksummed stretch: [Note: sums on the way]. */
#define STRETCH_NUMEL ((size_t)8192)
/* Partial sums per block. */
#define SUM_LANES 32
#define NAN_U32 0x7FC00000u

/* Elements that share a scale: [Note: 8-bit moments]. */
#define STATE_BLOCK ((size_t)256)

/* The noise of a block's elements. */
struct noises {
    _Alignas(64) uint32_t m[STATE_BLOCK], v[STATE_BLOCK];
};

/* One instruction set's kernels over one block.  Any n, any alignment; single-threaded. */
struct isa {
    const char *name;
    /* ahead: elements, see [Note: fetching ahead]. */
    void (*adamw_bf16)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                       float *restrict v, const uint16_t *restrict grad,
                       const struct infinity_adamw *s, uintptr_t ahead);
    void (*adamw_f32)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                      float *restrict v, const float *restrict grad,
                      const struct infinity_adamw *s, uintptr_t ahead);
    double (*sum_squares_bf16)(size_t n, const uint16_t *grad);
    double (*sum_squares_f32)(size_t n, const float *grad);
    void (*split)(size_t n, const float *restrict f32, uint16_t *restrict hi, int16_t *restrict lo);
    void (*join)(size_t n, const uint16_t *restrict hi, const int16_t *restrict lo,
                 float *restrict f32);
    void (*widen)(size_t n, const uint16_t *restrict bf16, float *restrict f32);
    void (*accumulate_bf16)(size_t n, float *restrict acc, const uint16_t *restrict grad);
    void (*accumulate_f32)(size_t n, float *restrict acc, const float *restrict grad);
    void (*rewrite)(size_t n, const uint16_t *restrict new_hi, uint16_t *restrict hi,
                    int16_t *restrict lo);
    void (*stream)(size_t n_bytes, char *restrict dst, const char *restrict src);
    void (*narrow)(size_t n, const float *restrict f32, uint16_t *restrict bf16);
    /* The random bits of elements first, first + 1, ... of a parameter: `width` for each moment. */
    void (*noise)(size_t n, uint64_t key, uint64_t first, int width, uint32_t *restrict m,
                  uint32_t *restrict v);
    /* At most STATE_BLOCK elements, by their noise. */
    void (*narrow_moments)(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                           const struct noises *restrict noises, uint16_t *restrict m,
                           uint16_t *restrict v);
    /* One block of at most STATE_BLOCK elements and its two scales. */
    void (*dequantize)(size_t n, const uint8_t *restrict m, const uint8_t *restrict v,
                       const float *restrict scale, float *restrict m_f32, float *restrict v_f32);
    void (*quantize)(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                     const struct noises *restrict noises, uint8_t *restrict m,
                     uint8_t *restrict v, float *restrict scale);
    /* [Note: 4-bit moments] */
    void (*dequantize4)(size_t n, const uint8_t *restrict packed, const float *restrict scale,
                        float *restrict m_f32, float *restrict v_f32);
    void (*quantize4)(size_t n, const float *restrict m_f32, const float *restrict v_f32,
                      const struct noises *restrict noises, uint8_t *restrict packed,
                      float *restrict scale);
    /* [Note: other recipes]; type: of the gradient; around: weights around the caches, where their
     * address allows it. */
    void (*adamw_half)(size_t n, uint16_t *restrict weight, float *restrict master, float
                       *restrict m, float *restrict v, const void *restrict grad, int32_t type,
                       const struct infinity_adamw *s, bool around);
    void (*adamw_full)(size_t n, float *restrict weight, float *restrict m, float *restrict v,
                       const void *restrict grad, int32_t type, const struct infinity_adamw *s);
    void (*adam)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float
                 *restrict v, const void *restrict grad, int32_t type, const struct infinity_adamw
                 *s);
    void (*sgd)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, const
                void *restrict grad, int32_t type, const struct infinity_sgd *s);
    void (*adagrad)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict v,
                    const void *restrict grad, int32_t type, const struct infinity_adagrad *s);
    void (*lion)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, const
                 void *restrict grad, int32_t type, const struct infinity_lion *s);
    /* XXH3_64bits of more than 240 bytes. */
    uint64_t (*xxh3)(size_t n_bytes, const void *bytes);
    /* [Note: the small step] */
    void (*adamw_small)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                        float *restrict v, const void *restrict grad, int32_t type,
                        const struct infinity_adamw_small *s);
    void (*widen_half)(size_t n, const uint16_t *restrict f16, float *restrict f32);
    void (*widen_e4m3)(size_t n, const uint8_t *restrict codes, float scale, float *restrict f32);
    void (*widen_i8)(size_t n, const int8_t *restrict codes, float scale, float factor,
                     float *restrict f32);
    /* A block of [Note: coded blocks], with codes up to `most`; returns its scale. */
    float (*narrow_i8)(size_t n, const float *restrict f32, float most, int8_t *restrict codes);
    /* From the start of a block on. */
    void (*widen_4bit)(size_t n, size_t block, bool high_first, const float *restrict table,
                       const uint8_t *restrict codes, const float *restrict scales,
                       float *restrict f32);
    void (*narrow_half)(size_t n, const float *restrict f32, uint16_t *restrict f16);
    void (*accumulate_half)(size_t n, float *restrict acc, const uint16_t *restrict grad);
    /* [Note: told gradients], exceptions apart. */
    void (*recover)(size_t n, const float *restrict before, const float *restrict behind,
                    const struct infinity_told *s, uint16_t *restrict grad);
    /* The step, which notes exceptions; first: the number of the first element. */
    void (*adamw_told)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                       float *restrict v, const uint16_t *restrict grad,
                       const struct infinity_adamw *s, struct infinity_told *told, uint64_t first,
                       uintptr_t ahead);
    /* The whole step on one or more whole blocks of STATE_BLOCK elements; NULL if it is composed of
     * the functions above.  grad: fp32 or bf16; first: even. */
    void (*adamw16)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, uint16_t *restrict m,
                    uint16_t *restrict v, const void *restrict grad, int32_t type,
                    const struct infinity_adamw_small *s, uint64_t key, uint64_t first,
                    uintptr_t ahead);
    void (*adamw8)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, uint8_t *restrict m,
                   uint8_t *restrict v, float *restrict scale, const void *restrict grad,
                   int32_t type, const struct infinity_adamw_small *s, uint64_t key,
                   uint64_t first, uintptr_t ahead);
};

/* The instruction set in use. */
const struct isa *current_isa(void);

/* Defined by adamw_*.c, norm_*.c, cast_*.c, copy_*.c and moments_*.c, one each per instruction
 * set. */
#define DECLARE_KERNELS(isa) \
    void adamw_bf16_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, \
                          float *restrict m, float *restrict v, const uint16_t *restrict grad, \
                          const struct infinity_adamw *s, uintptr_t ahead); \
    void adamw_f32_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, \
                         float *restrict v, const float *restrict grad, \
                         const struct infinity_adamw *s, uintptr_t ahead); \
    double sum_squares_bf16_##isa(size_t n, const uint16_t *grad); \
    double sum_squares_f32_##isa(size_t n, const float *grad); \
    void split_##isa(size_t n, const float *restrict f32, uint16_t *restrict hi, \
                     int16_t *restrict lo); \
    void join_##isa(size_t n, const uint16_t *restrict hi, const int16_t *restrict lo, \
                    float *restrict f32); \
    void widen_##isa(size_t n, const uint16_t *restrict bf16, float *restrict f32); \
    void accumulate_bf16_##isa(size_t n, float *restrict acc, const uint16_t *restrict grad); \
    void accumulate_f32_##isa(size_t n, float *restrict acc, const float *restrict grad); \
    void rewrite_##isa(size_t n, const uint16_t *restrict new_hi, uint16_t *restrict hi, \
                       int16_t *restrict lo); \
    void stream_##isa(size_t n_bytes, char *restrict dst, const char *restrict src); \
    void narrow_##isa(size_t n, const float *restrict f32, uint16_t *restrict bf16); \
    void noise_##isa(size_t n, uint64_t key, uint64_t first, int width, uint32_t *restrict m, \
                     uint32_t *restrict v); \
    void narrow_moments_##isa(size_t n, const float *restrict m_f32, const float *restrict v_f32, \
                              const struct noises *restrict noises, uint16_t *restrict m, \
                              uint16_t *restrict v); \
    void dequantize_##isa(size_t n, const uint8_t *restrict m, const uint8_t *restrict v, \
                          const float *restrict scale, float *restrict m_f32, \
                          float *restrict v_f32); \
    void quantize_##isa(size_t n, const float *restrict m_f32, const float *restrict v_f32, \
                        const struct noises *restrict noises, uint8_t *restrict m, \
                        uint8_t *restrict v, float *restrict scale); \
    void dequantize4_##isa(size_t n, const uint8_t *restrict packed, \
                           const float *restrict scale, float *restrict m_f32, \
                           float *restrict v_f32); \
    void quantize4_##isa(size_t n, const float *restrict m_f32, const float *restrict v_f32, \
                         const struct noises *restrict noises, uint8_t *restrict packed, \
                         float *restrict scale); \
    void adamw_half_##isa(size_t n, uint16_t *restrict weight, float *restrict master, float \
                          *restrict m, float *restrict v, const void *restrict grad, int32_t \
                          type, const struct infinity_adamw *s, bool around); \
    void adamw_full_##isa(size_t n, float *restrict weight, float *restrict m, float *restrict \
                          v, const void *restrict grad, int32_t type, const struct \
                          infinity_adamw *s); \
    void adam_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, \
                    float *restrict v, const void *restrict grad, int32_t type, const struct \
                    infinity_adamw *s); \
    void sgd_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, \
                   const void *restrict grad, int32_t type, const struct infinity_sgd *s); \
    void adagrad_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict v, \
                       const void *restrict grad, int32_t type, const struct infinity_adagrad *s); \
    void lion_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, \
                    const void *restrict grad, int32_t type, const struct infinity_lion *s); \
    uint64_t xxh3_##isa(size_t n_bytes, const void *bytes); \
    void adamw_small_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, \
                           float *restrict m, float *restrict v, const void *restrict grad, \
                           int32_t type, const struct infinity_adamw_small *s); \
    void widen_half_##isa(size_t n, const uint16_t *restrict f16, float *restrict f32); \
    void widen_e4m3_##isa(size_t n, const uint8_t *restrict codes, float scale, \
                          float *restrict f32); \
    void widen_i8_##isa(size_t n, const int8_t *restrict codes, float scale, float factor, \
                        float *restrict f32); \
    float narrow_i8_##isa(size_t n, const float *restrict f32, float most, \
                          int8_t *restrict codes); \
    void widen_4bit_##isa(size_t n, size_t block, bool high_first, const float *restrict table, \
                          const uint8_t *restrict codes, const float *restrict scales, \
                          float *restrict f32); \
    void narrow_half_##isa(size_t n, const float *restrict f32, uint16_t *restrict f16); \
    void accumulate_half_##isa(size_t n, float *restrict acc, const uint16_t *restrict grad); \
    void recover_##isa(size_t n, const float *restrict before, const float *restrict behind, \
                       const struct infinity_told *s, uint16_t *restrict grad); \
    void adamw_told_##isa(size_t n, uint16_t *restrict hi, int16_t *restrict lo, \
                          float *restrict m, float *restrict v, const uint16_t *restrict grad, \
                          const struct infinity_adamw *s, struct infinity_told *told, \
                          uint64_t first, uintptr_t ahead);

DECLARE_KERNELS(scalar)
#ifdef INFINITY_X86
DECLARE_KERNELS(avx2)
DECLARE_KERNELS(avx512)
void adamw16_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo, uint16_t *restrict m,
                    uint16_t *restrict v, const void *restrict grad, int32_t type,
                    const struct infinity_adamw_small *s, uint64_t key, uint64_t first,
                    uintptr_t ahead);
void adamw8_avx512(size_t n, uint16_t *restrict hi, int16_t *restrict lo, uint8_t *restrict m,
                   uint8_t *restrict v, float *restrict scale, const void *restrict grad,
                   int32_t type, const struct infinity_adamw_small *s, uint64_t key,
                   uint64_t first, uintptr_t ahead);
#endif

/* pool.c: calls run(args, first, count) for consecutive pieces of block that cover [0, n), on any
 * threads in any order, and returns when all are done. */
typedef void (*block_function)(const void *args, size_t first, size_t count);
void run_blocks(block_function run, const void *args, size_t n, size_t block);

/* told.c: notes as exceptions the elements of `grad` whose bits in `differs` are set; first: the number of the
 * first one. */
void note_exceptions(struct infinity_told *told, uint64_t first, const uint16_t *grad,
                     uint32_t differs);

/* checksum.c: run_blocks with blocks of BLOCK_NUMEL; takes the fields' checksums around each block. */
void run_summed(block_function run, const void *args, size_t n, size_t n_fields,
                struct infinity_field *fields);

/* [Note: fetching ahead]
 * Five streams are more than the hardware prefetcher follows well, and steps with roots and divisions
 * fill the out-of-order window in which the CPU would find the next misses by itself.  So the kernels
 * of a step prefetch the lines that they need FETCH_NUMEL elements later, at most 28 KB of a record:
 * 17 % faster on records larger than the caches (see README.md).  They prefetch into the second-level
 * cache, which can have more misses pending than the first level, and from which the rest of the way
 * is short.  Prefetching beyond the end is harmless, as a prefetch never faults.  Stores around the
 * caches would lose 25 % here, because the written lines have just been read. */
#define FETCH_NUMEL ((uintptr_t)1024)
/* Elements of 2 bytes in a line. */
#define LINE_NUMEL ((size_t)32)

/* The lines of LINE_NUMEL elements of `width` bytes. */
static inline void fetch(const void *field, size_t width, uintptr_t numel) {
    const char *line = (const char *)((uintptr_t)field + numel * width);
    __builtin_prefetch(line, 0, 2);
    if (width > 2) __builtin_prefetch((const char *)((uintptr_t)line + 64), 0, 2);
}

/* How far ahead a kernel prefetches: with checksums, the next stretch. */
static inline uintptr_t ahead_of(size_t n_fields) {
    return n_fields == 0 ? FETCH_NUMEL : STRETCH_NUMEL;
}

/* Element i of a gradient: INFINITY_BF16, _F16 or _F32. */
static inline const void *grad_at(const void *grad, size_t i, int32_t type) {
    return (const char *)grad + i * (type == INFINITY_F32 ? sizeof(float) : sizeof(uint16_t));
}

static inline void fetch_record(const uint16_t *hi, const int16_t *lo, const float *m,
                                const float *v, uintptr_t numel) {
    fetch(hi, sizeof *hi, numel);
    fetch(lo, sizeof *lo, numel);
    fetch(m, sizeof *m, numel);
    fetch(v, sizeof *v, numel);
}

/* memcpy, since a caller's address may be odd; it compiles to one plain load or store. */
static inline float f32_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t load_u16(const void *address) {
    uint16_t value;
    memcpy(&value, address, sizeof value);
    return value;
}

static inline uint32_t load_u32(const void *address) {
    uint32_t value;
    memcpy(&value, address, sizeof value);
    return value;
}

static inline void store_u16(void *address, uint32_t value) {
    uint16_t low = (uint16_t)(value & 0xFFFFu);
    memcpy(address, &low, sizeof low);
}

static inline void store_u32(void *address, uint32_t value) {
    memcpy(address, &value, sizeof value);
}

/* The bits of a computed fp32, with all NaNs replaced by one ([Note: one result]). */
static inline uint32_t canonical_bits(float value) {
    return value != value ? NAN_U32 : bits_of(value);
}

static inline uint32_t join_bits(uint16_t hi, uint16_t lo) {
    /* Sign-extends lo without leaving unsigned arithmetic: 0xFFFF8000 + x wraps as two's complement
     * does. */
    uint32_t lo_extended = ((uint32_t)lo ^ 0x8000u) - 0x8000u;
    return ((uint32_t)hi << 16) + lo_extended;
}

/* Sums SUM_LANES partial sums as a binary tree: 16 + 16, 8 + 8, ... */
static inline double sum_lanes(double *lanes) {
    for (size_t half = SUM_LANES / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}
#endif
