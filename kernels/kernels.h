#ifndef INFINITY_KERNELS_H
#define INFINITY_KERNELS_H
/* The CPU kernels of Infinity.  This header is read by the C compiler and by cffi, which drops the
 * lines that start with '#'; so no macro or conditional may change the meaning of a declaration.
 *
 * [Note: the split master]
 * The fp32 master of a weight is stored as two 16-bit fields.  With u the bits of the master:
 *   hi = (u + 0x8000) >> 16    a bf16: the master rounded to nearest, ties away from zero
 *   lo = low 16 bits of u, signed, so that  u = (hi << 16) + lo  gives back every bit
 * (ties to even would round some values up whose lo then does not fit 16 bits).
 * NaN: hi = 0x7FC0, lo = 0.  A finite master of at least 0x7F7F8000 rounds to infinity: hi = 0x7F80
 * is what computes, lo is negative, and join gives the finite master back.
 *
 * [Note: one result]
 * Scalar, AVX2 and AVX-512 give the same bits for every n, alignment and number of threads:
 * every operation is rounded by itself to nearest-even, there are FMAs only where the notes say fma,
 * and denormals are never flushed (the caller's floating-point environment is saved during a call and
 * restored after it).
 * NaN: the hardware's payloads depend on the order of operands, so every NaN that is *computed* is
 * stored as 0x7FC00000; split, join, widen, rewrite and copy move bits and keep a payload, except for
 * split's NaN rule above.
 *
 * [Note: the adamw step]
 * In this order, on fp32, each operation rounded by itself (reference/recipe.py has the same lines):
 *   g     = f32(grad) * clip
 *   p     = p * decay                            decay = 1 - lr * weight_decay
 *   m     = m + (g - m) * (1 - beta1)            where 1 - beta1 < 0.5, else
 *   m     = g - (g - m) * beta1                  (torch.lerp's two branches)
 *   v     = v * beta2
 *   v     = v + ((1 - beta2) * g) * g
 *   denom = sqrt(v) / sqrt(1 - beta2^step) + eps
 *   p     = p + (-(lr / (1 - beta1^step)) * m) / denom
 * Every scalar is computed in fp64 and rounded to fp32 once; clip is an fp32 already.
 *
 * [Note: the small step]
 * The same step with its constants combined, for small moments, whose own rounding is far coarser than
 * the few last places by which this differs:
 *   t     = f32(grad) * (clip * sqrt(1 - beta2))
 *   m     = fma(m, beta1, f32(grad) * (clip * (1 - beta1)))
 *   v     = fma(t, t, v * beta2)
 *   p     = fma(p, decay, (-(lr / (1 - beta1^step) * c) * m) / (sqrt(v) + eps * c))
 *           with c = sqrt(1 - beta2^step), and fma(a, b, c) = a * b + c, rounded once
 * It has 8 operations beside the root and the division instead of 15, and shorter chains of them.
 *
 * [Note: small moments]
 * infinity_small_step has m and v stored in 16, 8 or 4 bits.  It widens them to fp32, makes the step (adamw:
 * the small one; the others' as they are), and only then rounds the new m and v; the weight is updated with
 * the unrounded ones.  Masters that are not split are split for it, in the caches, which loses no bit.  Rounding is
 * stochastic: up or down with the odds that keep the mean.  v changes by 0.1 % a step (beta2 = 0.999),
 * far less than half the distance of two codes, so rounding to nearest would never change v.
 *
 * [Note: the noise]
 * Elements 2 j and 2 j + 1 share 32 random bits, a hash of a 64-bit key and of j's low 32 bits.
 * So the bits depend neither on threads nor on order nor on how a range was cut.
 *   x = j * 0x7FEB352D + (key mod 2^32);  x ^= x >> 15;
 *   x ^= key div 2^32;                    x *= 0x846CA68B;  x ^= x >> 16
 * (Wellons' lowbias32 without its first shift, which a counter does not need.  The key's upper half,
 * between its two rounds, keeps the bits of two keys from being shifts of each other.)  The even
 * element's m and the odd one's v use the lowest 16 or 20 of the bits, the odd one's m and the even
 * one's v the highest.  So m and v of one element, which together determine its step, are rounded
 * independently.  That m of one and v of the other are rounded with the same bits changes no mean.
 * (With 20 bits, 8 are shared by both ends, as the lowest of one and the highest of the other, which
 * correlates them by 2^-12.)
 *
 * [Note: bf16 moments]
 * With u the bits of the fp32 and r 16 random bits: (u + r) >> 16.  A value that is exactly a bf16
 * does not change, including zeros, infinities and NaNs.  A finite value beyond the largest finite
 * bf16 becomes that: rounding never makes an infinity.
 *
 * [Note: 8-bit moments]
 * Blocks of 256 elements have a scale each for m and for v, as in Dettmers et al., 8-bit Optimizers
 * via Block-wise Quantization (arXiv 2110.02861).  The codes differ: theirs index a table of values
 * times the block's maximum, found by search; ours count points on the grid of all floats with 3
 * bits of mantissa, which are 2^20 apart in their bits:
 *   scale   the block's largest magnitude, rounded to the grid; at least 2^-90; 0 if all are 0
 *   m       a sign (bit 7) and 7 bits c:  the float of bits(scale) - ((127 - c) << 20);  c = 0: 0
 *   v       8 bits c:                     the float of bits(scale) - ((255 - c) << 20);  c = 0: 0
 * So a code becomes its float by a shift and an addition; c spans 15.75 powers of two for m and 31.75
 * for v, twice as many, since v is of the size of m squared.  And the grid does not move with the
 * scale: an unchanged value is stored again exactly, whatever the rest of its block did.
 * With r the 20 random bits, on the magnitude's bits u: (u + r) >> 20 is the grid point.
 * Below the smallest code s = c 1's float:  m becomes 0 or s, with the odds that keep its mean (s
 * where |m| >= s (1 - r / 2^20));  a v whose grid point is not 0 becomes s, never 0: too large a v
 * makes a step too small, but v = 0 with a nonzero m would make a step of m / eps.  The two ranges
 * match, so |m| / sqrt(v) stays within a small factor of that of exact moments.  Infinities and NaNs
 * are on the grid and do not change; finite values beyond the largest finite grid point, 1.875 *
 * 2^127, become that.  In a block with an infinity or a NaN the scale is one too, and the other
 * elements' v become huge, so their weights stop moving.
 *
 * [Note: 4-bit moments]
 * As with 8 bits, in one byte for both, on coarser grids:
 *   m       a sign (bit 3) and 3 bits c (0 to 2):  floats with 1 bit of mantissa, 2^22 apart in their bits
 *   v       4 bits c (4 to 7):                     powers of two, 2^23 apart
 * so that m spans 3 powers of two and v 14.  The 20 random bits are the highest of those below a grid
 * step.  The powers of two have no NaN: a v that is NaN becomes infinite; its m stays NaN.
 * A moment that is kept alone has two elements to a byte, 2 j in the low half: the same codes.
 *
 * [Note: other recipes]
 * On fp32, in this order, each operation rounded by itself; a line with a condition is skipped where
 * that does not hold.  p is a split master, except for:
 *   adamw_half   an fp32 master; the weight is its fp16, to nearest, ties to even, an infinity from
 *                65520 on; NaN: 0x7E00.  The step is that of adamw.
 *   adamw_full   an fp32 weight, its own master.  The step is that of adamw.
 *   all          g = f32(grad) * clip
 *   adam         g = g + l2 * p                                 where l2 is not 0
 *                then adamw without its decay
 *   sgd          g = g + l2 * p                                 where l2 is not 0
 *                m = g                                          in the first step, else
 *                m = m * momentum + (1 - dampening) * g
 *                p = p + -lr * m                                or, with Nesterov's momentum:
 *                p = p + -lr * (g + momentum * m)
 *   adagrad      g = g + l2 * p                                 where l2 is not 0
 *                v = v + g * g
 *                p = p + (-(lr / (1 + (step - 1) * lr_decay)) * g) / (sqrt(v) + eps)
 *   lion         p = p * decay                                  decay = 1 - lr * weight_decay
 *                d = m * beta1 + (1 - beta1) * g
 *                p = p + -lr * sign(d)                          sign(0) = sign(NaN) = 0
 *                m = m * beta2 + (1 - beta2) * g
 * (Lion: Chen et al., arXiv 2302.06675; the others as torch.optim has them, whose additions with a
 * factor are FMAs.)
 *
 * [Note: checksums]
 * A field's checksum is the sum, mod 2^64, over its stretches of what
 *   h = xxh3(stretch) ^ (number + 1) * 0x9E3779B185EBCA87;  h ^= h >> 37;
 *   h *= 0x165667919E3779F9;                                h ^= h >> 32
 * gives for each: xxh3 is XXH3_64bits of xxhash (Yann Collet, BSD 2-Clause) of the stretch, and
 * stretches are numbered from 0.  Each line is invertible, so a change of one stretch that changes its
 * xxh3 changes the sum.  Stretches can be summed in any order, by many threads, each while a kernel
 * that works on it has it in the cache.
 *
 * [Note: told gradients]
 * A step of adamw moves m by (1 - beta1) of what g differs from it, so that m before and behind the step tells
 * g, and with it a bf16 gradient, whose 8 bits of mantissa are far fewer than the 24 that m has:
 *   g    = m_before + (m_behind - m_before) * (1 / (1 - beta1))
 *   g    = 0                                        where |g| < |m_before| * noise
 *   grad = bf16(g * (1 / clip))                     to nearest, ties to even; every NaN becomes 0x7FC0
 * Each operation is rounded by itself, and denormals are not flushed, so the bits are always the same.  noise is a
 * little more than what the roundings of a step with a gradient of zero leave: 2^-24 (1 / (1 - beta1) + 6).
 * What that does not give the bits of, -0, NaNs of other bits, and values that are tiny beside m, is an
 * exception: infinity_adamw_told, which makes the step, finds these by making the comparison.
 */
#include <stddef.h>
#include <stdint.h>
#pragma GCC visibility push(default)

/* The scalars of [Note: the adamw step], each already rounded to fp32. */
struct infinity_adamw {
    float clip;
    float decay;       /* 1 - lr * weight_decay */
    float lerp_weight; /* 1 - beta1, or -beta1 where lerp_from_grad */
    float beta2;
    float grad_weight;   /* 1 - beta2 */
    float denom_divisor; /* sqrt(1 - beta2^step) */
    float eps;
    float step_factor;      /* -(lr / (1 - beta1^step)) */
    int32_t lerp_from_grad; /* 1 - beta1 >= 0.5: the branch that starts from g */
    float l2;               /* adam's weight decay; unused by adamw */
};

/* The scalars of [Note: the small step], each already rounded to fp32. */
struct infinity_adamw_small {
    float decay; /* 1 - lr * weight_decay */
    float beta1;
    float beta2;
    float grad_weight; /* clip * (1 - beta1) */
    float root_weight; /* clip * sqrt(1 - beta2) */
    float eps;         /* eps * sqrt(1 - beta2^step) */
    float step_factor; /* -(lr / (1 - beta1^step) * sqrt(1 - beta2^step)) */
};

/* The scalars of the other steps: [Note: other recipes]. */
struct infinity_sgd {
    float clip;
    float l2;
    float momentum;
    float grad_weight; /* 1 - dampening */
    float step_factor; /* -lr */
    int32_t is_first;
    int32_t is_nesterov;
};

struct infinity_adagrad {
    float clip;
    float l2;
    float eps;
    float step_factor; /* -(lr / (1 + (step - 1) * lr_decay)) */
};

struct infinity_lion {
    float clip;
    float decay; /* 1 - lr * weight_decay */
    float beta1;
    float grad_weight1; /* 1 - beta1 */
    float beta2;
    float grad_weight2; /* 1 - beta2 */
    float step_factor;  /* -lr */
};

/* A sum of squares.  The fp64 sum of fp32 squares cannot overflow, so it is finite exactly when every
 * element is. */
struct infinity_sum {
    double sum;
    int32_t finite;
};

/* A field whose checksums are taken: [Note: checksums].  stretch: bytes of 8192 of its elements, at
 * least 256; bytes: of the field, with at least 256 in the last stretch.  before, after: the checksums
 * before and after a kernel's work are added to these, if the flags ask for them. */
struct infinity_field {
    const void *address;
    size_t bytes;
    size_t stretch;
    int32_t asks_before;
    int32_t asks_after;
    uint64_t before;
    uint64_t after;
};

/* Takes the checksums to be taken before a kernel's work, or those after it. */
void infinity_checksum(size_t n_fields, struct infinity_field *fields, int32_t after);

/* Copies what lies at source to the fields, which are filled one after the other, and takes their checksums
 * before other work: each stretch is summed while the copy has it in the cache. */
void infinity_take(size_t n_fields, struct infinity_field *fields, const void *source);

/* One AdamW step over n elements, in place.  hi, lo: the split master; m, v: fp32.  fields: checksums to
 * take during the step, of fields that begin with the first of the n elements, or that the step does
 * not use; 0 and NULL: none. */
void infinity_adamw_bf16(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                         const uint16_t *grad, const struct infinity_adamw *scalars, size_t n_fields,
                         struct infinity_field *fields);
void infinity_adamw_f32(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v, const float *grad,
                        const struct infinity_adamw *scalars, size_t n_fields,
                        struct infinity_field *fields);

/* [Note: told gradients] The scalars, each rounded to fp32, and the elements that are exceptions, with the bits
 * of their gradients, in any order: at most limit of the count that there are. */
struct infinity_told {
    float inverse_weight; /* 1 / (1 - beta1) */
    float inverse_clip;   /* 1 / clip */
    float noise;
    uint64_t limit;
    uint64_t count;
    uint32_t *index;
    uint16_t *bits;
};

/* infinity_adamw_bf16, which adds exceptions to told.  first: the number of the first element. */
void infinity_adamw_told(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                         const uint16_t *grad, const struct infinity_adamw *scalars,
                         struct infinity_told *told, uint64_t first, size_t n_fields,
                         struct infinity_field *fields);

/* The gradients of n elements from m before and behind that step. */
void infinity_recover(size_t n, const float *before, const float *behind,
                      const struct infinity_told *told, uint64_t first, uint16_t *grad);

/* What a step on small moments works on: [Note: small moments].  weights: 0: hi, with lo as the master;
 * 1: fp16, with fp32 masters; 2: fp32, their own masters (NULL).  bits: of each moment, 16, 8 or 4.  m and
 * v: a moment that the optimizer does not keep is NULL; both of 4 bits are in the bytes of mv.
 * Block b of 8- and 4-bit moments covers elements [256 b, 256 (b + 1)) of the range; scale[2 b] is its m's,
 * scale[2 b + 1] its v's.  recipe: 0 adamw (the small step), 1 adam, 2 sgd, 3 adagrad, 4 lion ([Note:
 * other recipes]), with its scalars. */
struct infinity_small {
    void *weight, *master, *m, *v, *mv;
    float *scale;
    const void *scalars;
    int32_t weights, bits, recipe;
};

/* One step over n elements, in place.  Element i of the range has the noise of element first + i.
 * grad_type: 0 for bf16, 1 for fp32, 2 for fp16.  fields: as above. */
void infinity_small_step(size_t n, const struct infinity_small *what, const void *grad,
                         int32_t grad_type, uint64_t key, uint64_t first, size_t n_fields,
                         struct infinity_field *fields);

/* One moment, alone in its blocks (m or v of what, of which weights, scalars and recipe do not count), to fp32;
 * and one, or both, from fp32, rounded by the noise of the element, as a step does, or to nearest, ties away
 * from zero.  NULL: a moment that what has no place for, or that is of zeros. */
void infinity_widen_moment(size_t n, const struct infinity_small *what, float *f32);
void infinity_round_moments(size_t n, const struct infinity_small *what, float *m_f32, float *v_f32,
                            uint64_t key, uint64_t first, int32_t nearest);

/* [Note: other recipes], in place.  grad_type: 0 for bf16, 1 for fp32, 2 for fp16.  fields: as
 * above. */
void infinity_adamw_half(size_t n, uint16_t *weight, float *master, float *m, float *v,
                         const void *grad, int32_t grad_type, const struct infinity_adamw *scalars,
                         size_t n_fields, struct infinity_field *fields);
void infinity_adamw_full(size_t n, float *weight, float *m, float *v, const void *grad,
                         int32_t grad_type, const struct infinity_adamw *scalars, size_t n_fields,
                         struct infinity_field *fields);
void infinity_adam(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v, const void *grad,
                   int32_t grad_type, const struct infinity_adamw *scalars, size_t n_fields,
                   struct infinity_field *fields);
void infinity_sgd(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                  int32_t grad_type, const struct infinity_sgd *scalars, size_t n_fields,
                  struct infinity_field *fields);
void infinity_adagrad(size_t n, uint16_t *hi, int16_t *lo, float *v, const void *grad,
                      int32_t grad_type, const struct infinity_adagrad *scalars, size_t n_fields,
                      struct infinity_field *fields);
void infinity_lion(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                   int32_t grad_type, const struct infinity_lion *scalars, size_t n_fields,
                   struct infinity_field *fields);

/* fp32 -> bf16, to nearest, ties to even; every NaN becomes 0x7FC0. */
void infinity_narrow(size_t n, const float *f32, uint16_t *bf16);

/* fp32 moments <-> 8-bit ones, to the nearest code (ties away from zero).  v's sign is dropped. */
void infinity_quantize(size_t n, const float *m_f32, const float *v_f32, uint8_t *m, uint8_t *v,
                       float *scale);
void infinity_dequantize(size_t n, const uint8_t *m, const uint8_t *v, const float *scale,
                         float *m_f32, float *v_f32);

/* The same with 4-bit codes, of both in a byte: [Note: 4-bit moments]. */
void infinity_quantize4(size_t n, const float *m_f32, const float *v_f32, uint8_t *packed,
                        float *scale);
void infinity_dequantize4(size_t n, const uint8_t *packed, const float *scale, float *m_f32,
                          float *v_f32);

/* The fp64 sum of the fp64 squares of n gradients.  Block b covers elements [16384 b, 16384 (b +
 * 1)); in it, lane j mod 32 sums element j in rising order; the 32 lanes are added as a binary
 * tree, the blocks in rising order. */
struct infinity_sum infinity_sum_squares_bf16(size_t n, const uint16_t *grad);
struct infinity_sum infinity_sum_squares_f32(size_t n, const float *grad);
struct infinity_sum infinity_sum_squares_f16(size_t n, const uint16_t *grad);

/* fp32 master <-> hi, lo. */
void infinity_split(size_t n, const float *f32, uint16_t *hi, int16_t *lo);
void infinity_join(size_t n, const uint16_t *hi, const int16_t *lo, float *f32);

/* [Note: 24-bit masters] lo in 8 bits: its value divided by 256, rounded, at most 127.  widen multiplies by 256 again.
 * Rounding adds 8 random bits before it drops the lowest 8: of element e byte e mod 4 (the lowest is 0) of the
 * hash of [Note: the noise] of key and (e div 4); nearest: 128 instead.  Element i of the range is first + i. */
void infinity_widen_lo(size_t n, const int8_t *lo8, int16_t *lo);
void infinity_round_lo(size_t n, const int16_t *lo, int32_t nearest, uint64_t key, uint64_t first,
                       int8_t *lo8);

/* bf16 -> fp32, exactly. */
void infinity_widen(size_t n, const uint16_t *bf16, float *f32);

/* fp16 -> fp32, exactly; fp32 -> fp16, to nearest, ties to even: an infinity from 65520 on, and every
 * NaN 0x7E00. */
void infinity_widen_f16(size_t n, const uint16_t *f16, float *f32);
void infinity_narrow_f16(size_t n, const float *f32, uint16_t *f16);

/* [Note: block scales] A matrix of `cols` columns has one scale for each block of block_rows x
 * block_cols; the blocks at the right and the lower edge may be smaller.  A code is an
 * e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa; denormals, no infinities, NaN where all
 * 7 bits are ones.  Element e, in rows, is its value times the scale, rounded once, to fp32; a NaN is
 * 0x7FC00000.  Converts elements [first, first + n); `codes` and `f32` begin with element `first`,
 * `scales` with the row of scales that it is in. */
struct infinity_blocks {
    size_t cols, block_rows, block_cols;
};
void infinity_widen_e4m3(size_t first, size_t n, const struct infinity_blocks *blocks,
                         const uint8_t *codes, const float *scales, float *f32);

/* An int8 code times the scale of its row, then times `factor`, each product rounded once, to fp32. The
 * matrix has `cols` columns; `codes` and `f32` begin with element `first`, `scales` with its row's. */
void infinity_widen_i8(size_t first, size_t n, size_t cols, float factor, const int8_t *codes,
                       const float *scales, float *f32);

/* [Note: packed blocks] Two codes of 4 bits lie in a byte, that of the even element in the high half if
 * high_first, else in the low one.  Element e is the code's value in `table`, of 16, times the scale of
 * its block of `block` (even) consecutive elements, rounded once, to fp32; a NaN is 0x7FC00000.  Converts
 * elements [first, first + n); `codes` begins with the byte of element `first`, `scales` with the scale of
 * its block.
 *
 * Scales themselves may be packed: in 8 bits, whose value in a `table` of 256 times a scale of their own
 * for each `block`, plus `offset`, is rounded twice; or as e8m0, an exponent alone: 2^(code - 128), half
 * of its value, since the largest would be infinite where the product is not. Tables of values are
 * given twice as large then. */
void infinity_widen_4bit(size_t first, size_t n, size_t block, int32_t high_first,
                         const float *table, const uint8_t *codes, const float *scales, float *f32);
void infinity_widen_scales(size_t first, size_t n, size_t block, const float *table,
                           const uint8_t *codes, const float *scales, float offset, float *f32);
void infinity_widen_e8m0(size_t n, const uint8_t *codes, float *f32);

/* [Note: coded blocks] What ranks send in few bits. Blocks of 256 consecutive elements, the last one shorter,
 * have an fp32 scale each: the largest magnitude divided by the largest code, 127 (8 bits) or 7 (4 bits), at
 * least 2^-100, so that a denormal fp32 is never computed with.  A code is the element divided by the scale,
 * rounded to an integer, ties to even: 8 bits in two's complement; or 4, two in a byte, that of the even
 * element in the low half, the last byte's high half 0 where the count is odd.  A block with an infinity has
 * an infinite scale, one with a NaN 0x7FC00000, and all of its codes are 1: nothing of it looks finite
 * afterwards.  infinity_widen_i8, of 256 columns, with factor 1, and infinity_widen_4bit, of blocks of 256,
 * lead back.  What they give, rounded to bf16 or fp16 and encoded again, gives the same values.
 * type: of the values, 0 for bf16, 1 for fp32, 2 for fp16. */
void infinity_encode(size_t n, const void *values, int32_t type, int32_t bits, uint8_t *codes,
                     float *scales);

/* Element [row][col] of a source with `rows` x `cols` elements of `width` (2 or 4) bytes becomes
 * [col][row] of the target; in both, rows are so many bytes apart. */
void infinity_transpose(size_t rows, size_t cols, int32_t width, const void *source,
                        size_t source_nbytes, void *target, size_t target_nbytes);

/* acc = acc + grad, in fp32. */
void infinity_accumulate_bf16(size_t n, float *acc, const uint16_t *grad);
void infinity_accumulate_f32(size_t n, float *acc, const float *grad);
void infinity_accumulate_f16(size_t n, float *acc, const uint16_t *grad);

/* total[i][j] = total[i][j] + the sum over l < k of left[l][i] right[l][j], for i < m and j < n.
 * Strides are the elements from one row to the next; left_step from one element to the next, and it or
 * left's stride is 1.  Up to 512 products are summed in fp32 before they are added to the total;
 * denormals count as zeros.  The bits are the same on any number of threads, and on any CPU that has
 * the instructions.  Returns 0; -1 if the CPU lacks them or avx512 is not in use (see
 * infinity_multiplies_bf16); -2 without memory.  Runs on n_threads of the process's OpenMP, or else
 * on the pool. */
int infinity_multiplies_bf16(void);
int infinity_add_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left,
                              size_t left_stride, size_t left_step, const uint16_t *right,
                              size_t right_stride, float *total, size_t total_stride,
                              size_t n_threads);

/* result[i][j] = the same sum alone, of at most 512 products (-1 for more), in fp32, rounded to the
 * nearest bf16. */
int infinity_product_bf16(size_t k, size_t m, size_t n, const uint16_t *left, size_t left_stride,
                          size_t left_step, const uint16_t *right, size_t right_stride,
                          uint16_t *result, size_t result_stride, size_t n_threads);

/* Applies a user's edit of the 16-bit weights: where new_hi differs from hi, hi = new_hi and lo = 0.
 */
void infinity_rewrite(size_t n, const uint16_t *new_hi, uint16_t *hi, int16_t *lo);

/* [Note: moves] By how much the bits of n 16-bit weights have grown, as an int8 each; -128 stands for more than
 * 127, up or down, and the weights of which that is so follow behind the n codes, in their order.  Returns the
 * bytes, or 0 if they are more than most; then nothing is to be made of the codes.  The second undoes it: weights
 * that are as before become those behind.  On the calling thread alone. */
size_t infinity_encode_moves(size_t n, const uint16_t *before, const uint16_t *behind, size_t most,
                             uint8_t *codes);
void infinity_move(size_t n, const uint8_t *codes, uint16_t *weights);

/* memcpy of n_bytes over the pool; the ranges must not overlap. */
void infinity_copy(size_t n_bytes, void *dst, const void *src);

/* For the benchmark only: `bytes` of each 256 elements of a field that are read (kind 0), read and
 * written (1) or only written (2). */
struct infinity_stream {
    void *address;
    size_t bytes;
    int32_t kind;
};

/* For the benchmark only: the memory traffic of a kernel on n elements (whole blocks of 256) with almost
 * no arithmetic, as the limit of the kernel's speed.  Updated fields keep their values, written ones
 * become 0. */
void infinity_traffic(size_t n, size_t n_streams, const struct infinity_stream *streams);

/* Has OpenMP's threads sleep while they wait, as long as it was called more often with more > 0 than with
 * more < 0: see openmp.c.  Returns whether they do. */
int32_t infinity_let_sleep(int32_t more);

/* The pool: n_threads includes the calling thread, so 1 means inline.  set waits for a running call.
 */
void infinity_set_threads(size_t n_threads);
size_t infinity_threads(void);

/* Binds the pool's threads, except the calling one, to this set of CPUs; n = 0: they run wherever the
 * thread that starts them may run.  Returns 0, or -1 for a CPU number out of range.
 * Waits for a running call. */
int infinity_bind_threads(size_t n, const int32_t *cpus);

/* The instruction set in use: "scalar", "avx2" or "avx512".  set returns 0, -1 for an unknown name, -2
 * for one that this machine or build lacks; NULL takes the best available. */
int infinity_set_isa(const char *name);
const char *infinity_isa(void);

#pragma GCC visibility pop
#endif
