/* xxh3, lane by lane.  See checksum.h. */
#include "checksum.h"

static inline void accumulate(uint64_t *lanes, const uint8_t *stripe, const uint8_t *secret) {
    for (size_t i = 0; i < 8; i++) {
        uint64_t data = load_u64(stripe + 8 * i), keyed = data ^ load_u64(secret + 8 * i);
        lanes[i ^ 1] += data;
        lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t *lanes, const uint8_t *secret) {
    for (size_t i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ load_u64(secret + 8 * i)) * PRIME32_1;
}

uint64_t xxh3_scalar(size_t n_bytes, const void *bytes) {
    uint64_t lanes[8];
    memcpy(lanes, xxh3_lanes, sizeof lanes);
    XXH3_STRIPES(lanes, n_bytes, bytes);
    return xxh3_merged(lanes, n_bytes);
}
