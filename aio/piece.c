/* The attempts of a piece: what one attempt asks for, and what its result means. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <time.h>

enum {
    MAX_RETRIES = 20,   /* of EINTR and EAGAIN without progress: 0.1 s with the pauses below */
    MAX_STALLS = 3,     /* of transfers shorter than a block, as at a file's end inside a block */
    PROMPT_RETRIES = 2, /* the first ones, without a pause */
    FIRST_PAUSE_NS = 50000,
    MAX_PAUSE_NS = 10000000,
    FAULT_DELAY_NS = 20000000
};
static const uint64_t FAULT_HANG_NS = 3600u * (uint64_t)1000000000u;

uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* No wait exceeds a slice, whatever the timeout: Python handles Ctrl-C only between calls. */
struct timespec deadline_after(uint32_t timeout_ms) {
    if (timeout_ms > AIO_SLICE_MS) timeout_ms = AIO_SLICE_MS;
    uint64_t ns = monotonic_ns() + (uint64_t)timeout_ms * 1000000u;
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                             .tv_nsec = (long)(ns % 1000000000u)};
}

static uint64_t block_of(const struct piece *piece) {
    return piece->request->flags & AIO_ALIGNED ? AIO_BLOCK : 1;
}

/* Finds and removes the fault for this attempt, if there is one. */
static bool take_injection(struct aio_engine *engine, int32_t *result) {
    bool found = false;
    pthread_mutex_lock(&engine->lock);
    engine->attempts++;
    uint32_t n = engine->n_injections;
    for (uint32_t i = 0; i < n && !found; i++) {
        if (engine->injections[i].attempt == engine->attempts) {
            *result = engine->injections[i].result;
            engine->injections[i] = engine->injections[n - 1];
            __atomic_store_n(&engine->n_injections, n - 1, __ATOMIC_RELAXED);
            found = true;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

/* Decides how many bytes the next attempt asks for. */
void piece_begin(struct aio_engine *engine, struct piece *piece) {
    piece->attempt_nbytes = piece->nbytes;
    piece->injected = false;
    if (__atomic_load_n(&engine->n_injections, __ATOMIC_RELAXED) == 0) return;
    piece->injected = take_injection(engine, &piece->injected_result);
    if (!piece->injected || piece->injected_result == AIO_FAULT_FLIP) return;
    uint64_t wanted = piece->injected_result > 0 ? (uint64_t)piece->injected_result : 0;
    if (piece->injected_result == AIO_FAULT_TORN) wanted = piece->nbytes / 2;
    /* O_DIRECT moves whole blocks only, so a count inside a block is rounded up to its end.  The rest
     * of that block is then moved twice, as it would be after such a count from the kernel. */
    wanted = (wanted + block_of(piece) - 1) / block_of(piece) * block_of(piece);
    if (wanted < piece->nbytes) piece->attempt_nbytes = wanted;
}

/* The result to act on: the kernel's, or the fault's if the kernel reports nothing worse. */
int64_t piece_result(const struct piece *piece, int64_t result) {
    if (!piece->injected) return result;
    if (piece->injected_result == AIO_FAULT_FLIP) {
        if (result > 0 && !(piece->request->flags & AIO_WRITE))
            *(unsigned char *)(uintptr_t)(piece->address + (uint64_t)result / 2) ^= 4;
        return result;
    }
    if (piece->injected_result == AIO_FAULT_TORN || piece->injected_result == AIO_FAULT_LOST)
        return (int64_t)piece->nbytes;
    if (piece->injected_result > 0 && result < piece->injected_result) return result;
    return piece->injected_result;
}

/* Allows one more attempt without progress, after a pause that doubles, or fails with `error`. */
static enum step retry(struct piece *piece, int error, uint32_t limit) {
    uint32_t n = ++piece->attempts_without_progress;
    if (n > limit) {
        piece->error = error;
        return STEP_FAILED;
    }
    piece->retries++;
    if (n <= PROMPT_RETRIES) return STEP_AGAIN;
    uint64_t pause_ns = (uint64_t)FIRST_PAUSE_NS << (n - PROMPT_RETRIES - 1);
    piece->ready_ns = monotonic_ns() + (pause_ns < MAX_PAUSE_NS ? pause_ns : MAX_PAUSE_NS);
    return STEP_LATER;
}

enum step piece_advance(struct piece *piece, int64_t result) {
    if (piece->injected && (result == AIO_FAULT_DELAY || result == AIO_FAULT_HANG)) {
        piece->ready_ns =
            monotonic_ns() + (result == AIO_FAULT_HANG ? FAULT_HANG_NS : FAULT_DELAY_NS);
        return STEP_LATER;
    }
    if (result == -EINTR || result == -EAGAIN) return retry(piece, (int)-result, MAX_RETRIES);
    if (result < 0) {
        piece->error = (int)-result;
        return STEP_FAILED;
    }
    /* No bytes and no error: a read reached the end of the file.  A write must never do this. */
    int nothing = piece->request->flags & AIO_WRITE ? EIO : AIO_END_OF_FILE;
    if (result == 0) {
        piece->error = nothing;
        return STEP_FAILED;
    }
    uint64_t moved = (uint64_t)result;
    if (moved >= piece->nbytes) {
        moved = piece->nbytes;
    } else {
        /* A short transfer is not an error: continue where the kernel stopped, or for O_DIRECT at the
         * start of the block in which it stopped. */
        moved -= moved % block_of(piece);
        if (moved == 0) return retry(piece, nothing, MAX_STALLS);
        piece->continued++;
    }
    piece->attempts_without_progress = 0;
    piece->address += moved;
    piece->offset += moved;
    piece->nbytes -= moved;
    piece->moved_nbytes += moved;
    return piece->nbytes == 0 ? STEP_DONE : STEP_AGAIN;
}
