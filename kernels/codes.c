/* fp32, bf16 or fp16 -> codes of 8 or 4 bits with a scale for each block: the walk over blocks, and one
 * element at a time, the reference for the vector versions and their tail.  See [Note: coded blocks] in
 * kernels.h; back to fp32 it is block8.c and block4.c that lead. */
#include "codes.h"

float narrow_i8_scalar(size_t n, const float *restrict f32, float most, int8_t *restrict codes) {
    float scale = code_scale(largest_size(0, n, f32, 0), most);
    narrow_i8_tail(0, n, f32, scale, codes);
    return scale;
}

struct encode_args {
    const struct isa *isa;
    const void *values;
    int32_t type;
    bool in_4_bits;
    uint8_t *codes;
    float *scales;
};

static void pack_4bit(size_t n, const int8_t *codes, uint8_t *packed) {
    for (size_t i = 0; i + 1 < n; i += 2)
        packed[i / 2] = (uint8_t)((codes[i] & 0xF) | (codes[i + 1] & 0xF) << 4);
    if (n % 2 != 0) packed[n / 2] = (uint8_t)(codes[n - 1] & 0xF);
}

static void encode_block(const void *args, size_t first, size_t count) {
    const struct encode_args *a = args;
    _Alignas(64) float widened[CODE_BLOCK];
    int8_t wide[CODE_BLOCK];
    for (size_t i = first; i < first + count; i += CODE_BLOCK) {
        size_t n = first + count - i < CODE_BLOCK ? first + count - i : CODE_BLOCK;
        const void *values = grad_at(a->values, i, a->type);
        if (a->type == INFINITY_BF16) a->isa->widen(n, values, widened);
        if (a->type == INFINITY_F16) a->isa->widen_half(n, values, widened);
        const float *f32 = a->type == INFINITY_F32 ? values : widened;
        int8_t *codes = a->in_4_bits ? wide : (int8_t *)a->codes + i;
        float scale = a->isa->narrow_i8(n, f32, a->in_4_bits ? 7.0f : 127.0f, codes);
        store_u32(a->scales + i / CODE_BLOCK, bits_of(scale));
        if (a->in_4_bits) pack_4bit(n, wide, a->codes + i / 2);
    }
}

void infinity_encode(size_t n, const void *values, int32_t type, int32_t bits, uint8_t *codes,
                     float *scales) {
    struct encode_args args = {.isa = current_isa(), .values = values, .type = type,
                               .in_4_bits = bits == 4, .codes = codes, .scales = scales};
    run_blocks(encode_block, &args, n, BLOCK_NUMEL);
}
