/* Checksums of fields, computed on the pool, alone or around a kernel's work on each block. */
#include "checksum.h"

const uint8_t xxh3_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

const uint64_t xxh3_lanes[8] = {
    0xC2B2AE3Du,         0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
    0x85EBCA77C2B2AE63u, 0x85EBCA77u,         0x27D4EB2F165667C5u, 0x9E3779B1u,
};

/* Stretches that a thread copies and sums at once. */
#define TAKEN_STRETCHES ((size_t)16)

__extension__ typedef unsigned __int128 wide;

/* Folds both halves of a product into one. */
static uint64_t fold(uint64_t a, uint64_t b) {
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t xxh3_merged(const uint64_t *lanes, size_t n_bytes) {
    uint64_t sum = n_bytes * PRIME64_1;
    for (size_t i = 0; i < 8; i += 2) {
        const uint8_t *secret = xxh3_secret + MERGE_SECRET + 8 * i;
        sum += fold(lanes[i] ^ load_u64(secret), lanes[i + 1] ^ load_u64(secret + 8));
    }
    return avalanche(sum);
}

/* [Note: sums on the way]
 * A block is processed stretch by stretch: its fields are summed, updated and summed again while they
 * are in the cache; meanwhile the kernel prefetches the lines of the next stretch.  So memory is read
 * once, and its latency is hidden behind the work (measured, 128 Ki elements of a record in memory:
 * adamw 137 us, with sums before and after it 215 us, in separate passes 318 us). */
struct summed {
    block_function run; /* NULL: none */
    const void *args;
    size_t n;
    size_t n_fields;
    struct infinity_field *fields;
    uint64_t (*xxh3)(size_t n_bytes, const void *bytes);
    bool before, after;
};

/* Adds one stretch of a field to a sum shared by many threads. */
static void add_stretch(uint64_t (*xxh3)(size_t n_bytes, const void *bytes),
                        const struct infinity_field *field, size_t number, uint64_t *sum) {
    size_t start = number * field->stretch;
    if (start >= field->bytes) return;
    size_t n_bytes = field->bytes - start < field->stretch ? field->bytes - start : field->stretch;
    uint64_t found = xxh3(n_bytes, (const char *)field->address + start);
    uint64_t mixed = avalanche(found ^ (number + 1) * PRIME64_1);
    __atomic_fetch_add(sum, mixed, __ATOMIC_RELAXED);
}

static void summed_block(const void *args, size_t first, size_t count) {
    const struct summed *s = args;
    for (size_t i = first; i < first + count; i += STRETCH_NUMEL) {
        size_t number = i / STRETCH_NUMEL;
        for (size_t f = 0; s->before && f < s->n_fields; f++)
            if (s->fields[f].asks_before)
                add_stretch(s->xxh3, &s->fields[f], number, &s->fields[f].before);
        if (i < s->n) s->run(s->args, i, s->n - i < STRETCH_NUMEL ? s->n - i : STRETCH_NUMEL);
        for (size_t f = 0; s->after && f < s->n_fields; f++)
            if (s->fields[f].asks_after)
                add_stretch(s->xxh3, &s->fields[f], number, &s->fields[f].after);
    }
}

static size_t stretches_of(const struct infinity_field *field) {
    return (field->bytes + field->stretch - 1) / field->stretch;
}

static void run_summing(struct summed *summed) {
    size_t span = summed->n;
    for (size_t f = 0; f < summed->n_fields; f++) {
        size_t stretches = stretches_of(&summed->fields[f]);
        if (stretches * STRETCH_NUMEL > span) span = stretches * STRETCH_NUMEL;
    }
    summed->xxh3 = current_isa()->xxh3;
    run_blocks(summed_block, summed, span, BLOCK_NUMEL);
}

void run_summed(block_function run, const void *args, size_t n, size_t n_fields,
                struct infinity_field *fields) {
    struct summed summed = {run, args, n, n_fields, fields, NULL, true, true};
    if (n_fields == 0)
        run_blocks(run, args, n, BLOCK_NUMEL);
    else
        run_summing(&summed);
}

void infinity_checksum(size_t n_fields, struct infinity_field *fields, int32_t after) {
    struct summed summed = {NULL, NULL, 0, n_fields, fields, NULL, !after, after};
    run_summing(&summed);
}

/* Fields one behind the other, and where their bytes come from. */
struct taken {
    const char *source;
    size_t n_fields;
    struct infinity_field *fields;
    uint64_t (*xxh3)(size_t n_bytes, const void *bytes);
};

/* Stretches are numbered over all fields here. */
static void take_block(const void *args, size_t first, size_t count) {
    const struct taken *t = args;
    const char *source = t->source;
    size_t base = 0; /* the first stretch of field f */
    for (size_t f = 0; f < t->n_fields && base < first + count; f++) {
        struct infinity_field *field = &t->fields[f];
        size_t stretches = stretches_of(field);
        size_t from = first > base ? first - base : 0;
        for (size_t i = from; i < stretches && base + i < first + count; i++) {
            size_t start = i * field->stretch;
            size_t n_bytes = field->bytes - start < field->stretch ? field->bytes - start : field->stretch;
            memcpy((char *)(uintptr_t)field->address + start, source + start, n_bytes);
            if (field->asks_before) add_stretch(t->xxh3, field, i, &field->before);
        }
        base += stretches;
        source += field->bytes;
    }
}

void infinity_take(size_t n_fields, struct infinity_field *fields, const void *source) {
    struct taken taken = {source, n_fields, fields, current_isa()->xxh3};
    size_t stretches = 0;
    for (size_t f = 0; f < n_fields; f++) stretches += stretches_of(&fields[f]);
    run_blocks(take_block, &taken, stretches, TAKEN_STRETCHES);
}
