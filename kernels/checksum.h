#ifndef INFINITY_CHECKSUM_H
#define INFINITY_CHECKSUM_H
/* XXH3_64bits of xxhash, version 0.8, seed 0, for more than 240 bytes; see its specification,
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.  Eight lanes of 64 bits accumulate
 * stripes of 64 bytes, each with the secret advanced by 8 bytes; 16 stripes are a block, and after each
 * block the lanes are scrambled; the last 64 bytes are one more stripe.  Each instruction set defines
 * `accumulate` and `scramble`, the effects of a stripe and of scrambling on the lanes. */
#include "internal.h"

#define STRIPE_BYTES ((size_t)64)
#define BLOCK_STRIPES ((size_t)16)
#define BLOCK_BYTES (STRIPE_BYTES * BLOCK_STRIPES)
#define SECRET_STEP ((size_t)8)
#define SCRAMBLE_SECRET ((size_t)128)
#define LAST_SECRET ((size_t)121)
#define MERGE_SECRET ((size_t)11)
#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u

extern const uint8_t xxh3_secret[192];
extern const uint64_t xxh3_lanes[8];

/* Mixes the bits of a value; the mapping is invertible. */
static inline uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9u;
    return h ^ h >> 32;
}

static inline uint64_t load_u64(const void *address) {
    uint64_t value;
    memcpy(&value, address, sizeof value);
    return value;
}

/* Merges the lanes into the hash. */
uint64_t xxh3_merged(const uint64_t *lanes, size_t n_bytes);

/* The loop over all stripes, for an instruction set that defines `lanes_type`, accumulate(lanes,
 * stripe, secret) and scramble(lanes, secret). */
#define XXH3_STRIPES(lanes, n_bytes, bytes) \
    do { \
        const uint8_t *at = (bytes), *end = at + (n_bytes); \
        for (; (size_t)(end - at) > BLOCK_BYTES; at += BLOCK_BYTES) { \
            for (size_t i = 0; i < BLOCK_STRIPES; i++) \
                accumulate((lanes), at + i * STRIPE_BYTES, xxh3_secret + i * SECRET_STEP); \
            scramble((lanes), xxh3_secret + SCRAMBLE_SECRET); \
        } \
        const uint8_t *secret = xxh3_secret; \
        for (; (size_t)(end - at) > STRIPE_BYTES; at += STRIPE_BYTES, secret += SECRET_STEP) \
            accumulate((lanes), at, secret); \
        accumulate((lanes), end - STRIPE_BYTES, xxh3_secret + LAST_SECRET); \
    } while (0)
#endif
