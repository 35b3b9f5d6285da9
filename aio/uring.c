/* The io_uring backend: one thread owns the ring, keeps up to `depth` pieces in it, and sleeps in
 * the kernel when there is nothing to do.
 *
 * A read of the eventfd is always pending in the ring, so that one wait covers both completions
 * and new requests. */
#ifdef HAVE_LIBURING
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Makes a NOP complete with a chosen result (on new kernels).  liburing 2.3 does not define it yet. */
#define NOP_INJECT_RESULT 1u

enum {
    MAX_REFUSALS = 1000,    /* of io_uring_enter in a row, 1 ms apart */
    SUBMIT_NBYTES = 2 << 20 /* a batch for submission ends with the piece that reaches this */
};

struct ring {
    struct aio_engine *engine;
    struct io_uring uring;
    uint32_t depth;
    uint32_t refusals;
    uint32_t n_free;
    uint32_t n_delayed;
    struct piece **free_pieces; /* a stack */
    struct piece **delayed;     /* to be retried, not before their ready_ns */
    struct piece *pieces;       /* [depth] */
    uint64_t wake_count;        /* destination of the eventfd's read */
    uint64_t registered;        /* address of the memory whose pages the ring holds */
    uint64_t registered_nbytes; /* 0: none is registered */
    bool wake_armed;
};

/* ---- opening -------------------------------------------------------------------------------- */

static int allocate_pieces(struct ring *ring) {
    ring->pieces = calloc(ring->depth, sizeof *ring->pieces);
    ring->free_pieces = calloc(ring->depth, sizeof(struct piece *));
    ring->delayed = calloc(ring->depth, sizeof(struct piece *));
    if (!ring->pieces || !ring->free_pieces || !ring->delayed) return ENOMEM;
    for (uint32_t i = 0; i < ring->depth; i++) ring->free_pieces[ring->n_free++] = &ring->pieces[i];
    return 0;
}

static void free_ring(struct ring *ring) {
    free(ring->pieces);
    free(ring->free_pieces);
    free(ring->delayed);
    free(ring);
}

/* Creates the requested ring, or the first kind that the kernel supports. */
static int make_uring(struct ring *ring) {
    static const unsigned flags[] = {
        [AIO_RING_DEFER] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        [AIO_RING_COOP] = IORING_SETUP_COOP_TASKRUN,
        [AIO_RING_PLAIN] = 0};
    uint32_t *used = &ring->engine->options.ring, asked = *used;
    int rc = -EINVAL;
    for (uint32_t i = asked ? asked : AIO_RING_DEFER; i <= AIO_RING_PLAIN && rc == -EINVAL; i++) {
        *used = i;
        rc = io_uring_queue_init(ring->depth + 1, &ring->uring, flags[i]);
        if (asked) break;
    }
    if (rc < 0) return rc == -EINVAL ? ENOTSUP : -rc;
    /* Without NODROP a full completion queue would lose results, and a buffer would never be released.
     * Without EXT_ARG (Linux 5.11) a wait with a timeout would add completions of its own. */
    unsigned needed = IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    if ((ring->uring.features & needed) != needed) {
        io_uring_queue_exit(&ring->uring);
        return ENOTSUP;
    }
    /* A forked child that uses the ring by mistake must crash instead of submitting to ours. */
    io_uring_ring_dontfork(&ring->uring);
    return 0;
}

static int open_ring(struct ring *ring) {
    int error = allocate_pieces(ring);
    return error ? error : make_uring(ring);
}

/* Needs the lock.  Before RSRC_TAGS (5.13) the kernel would first wait for all requests, which is for
 * ever, as the eventfd's read is pending. */
static void register_asked(struct ring *ring) {
    struct memory *memory = &ring->engine->memory;
    struct iovec all = {(void *)(uintptr_t)memory->address, memory->nbytes};
    bool can = ring->uring.features & IORING_FEAT_RSRC_TAGS;
    memory->error = can ? -io_uring_register_buffers(&ring->uring, &all, 1) : ENOTSUP;
    memory->asked = false;
    if (!memory->error) {
        ring->registered = memory->address;
        ring->registered_nbytes = memory->nbytes;
    }
    pthread_cond_broadcast(&ring->engine->finished);
}

/* ---- submission ----------------------------------------------------------------------------- */

static void delay(struct ring *ring, struct piece *piece) {
    ring->delayed[ring->n_delayed++] = piece;
}

static bool is_registered(const struct ring *ring, const struct piece *piece) {
    uint64_t at = piece->address - ring->registered; /* wraps to a huge offset if it lies before */
    return at < ring->registered_nbytes && piece->nbytes <= ring->registered_nbytes - at;
}

static void prepare_transfer(const struct piece *piece, struct io_uring_sqe *sqe) {
    void *address = (void *)(uintptr_t)piece->address;
    unsigned nbytes = (unsigned)piece->attempt_nbytes;
    int fd = piece->request->fd;
    bool writes = piece->request->flags & AIO_WRITE;
    if (piece->registered && writes)
        io_uring_prep_write_fixed(sqe, fd, address, nbytes, piece->offset, 0);
    else if (piece->registered)
        io_uring_prep_read_fixed(sqe, fd, address, nbytes, piece->offset, 0);
    else if (writes)
        io_uring_prep_write(sqe, fd, address, nbytes, piece->offset);
    else
        io_uring_prep_read(sqe, fd, address, nbytes, piece->offset);
}

static void prepare(struct ring *ring, struct piece *piece) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    if (!sqe) { /* the queue is full: the kernel took fewer entries than were submitted */
        piece->ready_ns = 0;
        delay(ring, piece);
        return;
    }
    piece_begin(ring->engine, piece);
    piece->registered = is_registered(ring, piece);
    if (piece->attempt_nbytes == 0) {
        io_uring_prep_nop(sqe);
        sqe->rw_flags = NOP_INJECT_RESULT;
        sqe->len = (unsigned)piece->injected_result;
    } else {
        prepare_transfer(piece, sqe);
    }
    io_uring_sqe_set_data(sqe, piece);
}

static void arm_wake(struct ring *ring) {
    if (ring->wake_armed) return;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    if (!sqe) return;
    io_uring_prep_read(sqe, ring->engine->wake_fd, &ring->wake_count, sizeof ring->wake_count, 0);
    io_uring_sqe_set_data(sqe, NULL);
    ring->wake_armed = true;
}

/* Prepares the pieces taken since `first` were free, and submits them in batches of SUBMIT_NBYTES; the
 * last, incomplete batch is submitted by enter.  The drive gets a batch only when the kernel has
 * processed all of it, and a full depth in one batch would also complete as one, leaving the drive idle
 * until the next. */
static void prepare_taken(struct ring *ring, uint32_t first) {
    uint64_t nbytes = 0;
    for (uint32_t i = first; i > ring->n_free; i--) {
        struct piece *piece = ring->free_pieces[i - 1];
        nbytes += piece->nbytes;
        prepare(ring, piece);
        if (nbytes < SUBMIT_NBYTES) continue;
        nbytes = 0;
        io_uring_submit(&ring->uring); /* refused entries stay in the queue for enter */
    }
}

/* Takes pieces while the ring has capacity; false when it is time to end. */
static bool take(struct ring *ring) {
    struct aio_engine *engine = ring->engine;
    uint32_t first = ring->n_free;
    pthread_mutex_lock(&engine->lock);
    if (engine->memory.asked) register_asked(ring);
    while (ring->n_free && front_take(engine, ring->free_pieces[ring->n_free - 1])) ring->n_free--;
    bool end = engine->stopping && front_is_drained(engine);
    /* With the ring full a new request can wait: the next completion leads here anyway. */
    engine->sleeping = ring->n_free > 0;
    pthread_mutex_unlock(&engine->lock);
    prepare_taken(ring, first);
    return !end;
}

/* Prepares the delayed pieces that are due; returns the time until the next one, 0 without one. */
static uint64_t retry_delayed(struct ring *ring) {
    uint64_t now = ring->n_delayed ? monotonic_ns() : 0, next_ns = UINT64_MAX;
    uint32_t n = ring->n_delayed;
    ring->n_delayed = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct piece *piece = ring->delayed[i];
        if (piece->ready_ns <= now) {
            prepare(ring, piece);
        } else {
            delay(ring, piece);
            if (piece->ready_ns < next_ns) next_ns = piece->ready_ns;
        }
    }
    return next_ns == UINT64_MAX ? 0 : next_ns - now;
}

static void pause_ns(uint64_t ns) {
    struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u),
                            .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&time, NULL);
}

/* Submits and sleeps until a completion or the timeout; returns an errno if the ring has failed. */
static int enter(struct ring *ring, uint64_t timeout_ns) {
    int rc;
    if (timeout_ns == 0) {
        rc = io_uring_submit_and_wait(&ring->uring, 1);
    } else {
        struct io_uring_cqe *cqe;
        struct __kernel_timespec time = {.tv_nsec = (long long)timeout_ns};
        rc = io_uring_submit_and_wait_timeout(&ring->uring, &cqe, 1, &time, NULL);
    }
    if (rc >= 0 || rc == -ETIME || rc == -EINTR) {
        ring->refusals = 0;
        return 0;
    }
    /* EAGAIN: no memory for the request at the moment.  EBUSY: completions must be reaped first. */
    if (rc != -EAGAIN && rc != -EBUSY) return -rc;
    if (++ring->refusals > MAX_REFUSALS) return -rc;
    pause_ns(1000000);
    return 0;
}

/* ---- completion ----------------------------------------------------------------------------- */

/* Handles one result; true when the piece has ended. */
static bool settle(struct ring *ring, struct piece *piece, int result) {
    switch (piece_advance(piece, piece_result(piece, result))) {
    case STEP_AGAIN:
        piece->ready_ns = 0;
        /* fall through */
    case STEP_LATER:
        delay(ring, piece);
        return false;
    case STEP_DONE:
    case STEP_FAILED:
        break;
    }
    return true;
}

static void reap(struct ring *ring) {
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    uint32_t first = ring->n_free;
    io_uring_for_each_cqe(&ring->uring, head, cqe) {
        struct piece *piece = io_uring_cqe_get_data(cqe);
        if (!piece)
            ring->wake_armed = false;
        else if (settle(ring, piece, cqe->res))
            ring->free_pieces[ring->n_free++] = piece;
        n++;
    }
    io_uring_cq_advance(&ring->uring, n);
    if (ring->n_free == first) return;
    pthread_mutex_lock(&ring->engine->lock);
    for (uint32_t i = first; i < ring->n_free; i++)
        front_finish(ring->engine, ring->free_pieces[i]);
    pthread_mutex_unlock(&ring->engine->lock);
}

static int serve(struct ring *ring) {
    while (take(ring)) {
        uint64_t timeout_ns = retry_delayed(ring);
        arm_wake(ring);
        int error = enter(ring, timeout_ns);
        if (error) return error;
        reap(ring);
    }
    return 0;
}

/* Completes the pending read of the eventfd, before its buffer is freed. */
static int disarm_wake(struct ring *ring) {
    uint64_t one = 1;
    if (ring->wake_armed && write(ring->engine->wake_fd, &one, sizeof one) < 0) return errno;
    int error = 0;
    while (ring->wake_armed && !error) {
        error = enter(ring, 0);
        if (!error) reap(ring);
    }
    return error;
}

/* Opens the ring and reports the outcome to aio_open. */
static struct ring *begin(struct aio_engine *engine) {
    struct ring *ring = calloc(1, sizeof *ring);
    int error = ENOMEM;
    if (ring) {
        ring->engine = engine;
        ring->depth = engine->options.depth;
        error = open_ring(ring);
    }
    if (error && ring) {
        free_ring(ring);
        ring = NULL;
    }
    pthread_mutex_lock(&engine->lock);
    engine->started = true;
    engine->start_error = error;
    pthread_cond_broadcast(&engine->finished);
    pthread_mutex_unlock(&engine->lock);
    return ring;
}

/* After a failure the ring's memory is never freed: the kernel may still use it. */
static int end(struct ring *ring, int failure) {
    if (!failure) failure = disarm_wake(ring);
    io_uring_queue_exit(&ring->uring);
    if (!failure) free_ring(ring);
    return failure;
}

void *uring_main(void *argument) {
    struct aio_engine *engine = argument;
    pthread_setname_np(pthread_self(), "aio-ring");
    struct ring *ring = begin(engine);
    int failure = ring ? end(ring, serve(ring)) : 0;
    pthread_mutex_lock(&engine->lock);
    if (failure) front_break(engine, failure);
    engine->sleeping = false;
    engine->running--;
    pthread_cond_broadcast(&engine->finished);
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}
#endif
