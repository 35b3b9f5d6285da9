/* The front of both engines: the queue of requests, their completion, and waiting for it.
 *
 * [Note: when a request is done]
 * A request is cut into pieces as the backend has capacity for them.  Only the head of a queue is cut,
 * so a partly cut request is the head of its queue.  After an error the rest of the request is not
 * cut any more, but the request is done only when its last piece has returned: until then the kernel
 * may still write to its memory. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

uint32_t aio_abi(void) {
    return AIO_ABI * 100000u + (uint32_t)sizeof(struct aio_request) * 100u +
           (uint32_t)sizeof(struct aio_statistics);
}

/* ---- the queue ------------------------------------------------------------------------------ */

static struct queue *queue_of(struct aio_engine *engine, const struct aio_request *request) {
    if (request->flags & AIO_URGENT) return &engine->urgent;
    return request->flags & AIO_BEHIND ? &engine->behind : &engine->normal;
}

/* The next queue to serve.  Requests behind get their share: otherwise a steady stream of prefetches
 * would delay the writes for whose memory it waits, and a drive that can read and write at the same
 * time would do one after the other. */
static struct queue *next_queue(struct aio_engine *engine) {
    if (engine->urgent.head) return &engine->urgent;
    if (!engine->behind.head) return &engine->normal;
    if (engine->normal.head && ++engine->preferred < AIO_BEHIND_SHARE) return &engine->normal;
    engine->preferred = 0;
    return &engine->behind;
}

static void push(struct queue *queue, struct aio_request *request) {
    request->next = NULL;
    if (queue->tail)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
}

static void pop(struct queue *queue) {
    queue->head = queue->head->next;
    if (!queue->head) queue->tail = NULL;
}

bool front_take(struct aio_engine *engine, struct piece *piece) {
    if (engine->held) return false;
    struct queue *queue = next_queue(engine);
    struct aio_request *request = queue->head;
    if (!request) return false;
    uint64_t nbytes = request->nbytes - request->cut_nbytes;
    if (nbytes > engine->options.piece_nbytes) nbytes = engine->options.piece_nbytes;
    *piece = (struct piece){.request = request,
                            .address = request->address + request->cut_nbytes,
                            .offset = request->offset + request->cut_nbytes,
                            .nbytes = nbytes};
    request->cut_nbytes += nbytes;
    request->pieces_in_flight++;
    if (request->cut_nbytes == request->nbytes) pop(queue);
    struct aio_statistics *statistics = &engine->statistics;
    statistics->pieces++;
    if (++statistics->pieces_in_flight > statistics->high_water)
        statistics->high_water = statistics->pieces_in_flight;
    return true;
}

/* ---- completion ----------------------------------------------------------------------------- */

static void complete(struct aio_engine *engine, struct aio_request *request) {
    struct aio_statistics *statistics = &engine->statistics;
    statistics->in_flight--;
    statistics->finished++;
    if (request->error) statistics->failed++;
    request->ended_ns = monotonic_ns();
    /* Wake only threads that wait for this: a wake-up per request would cost more than small requests. */
    bool wake = request->awaited || engine->change_waiters ||
                (engine->idle_waiters && statistics->in_flight == 0);
    __atomic_store_n(&request->state, AIO_DONE, __ATOMIC_RELEASE);
    if (wake) pthread_cond_broadcast(&engine->finished);
}

void front_finish(struct aio_engine *engine, const struct piece *piece) {
    struct aio_request *request = piece->request;
    struct aio_statistics *statistics = &engine->statistics;
    statistics->pieces_in_flight--;
    statistics->retries += piece->retries;
    statistics->continued += piece->continued;
    statistics->registered += piece->registered;
    if (request->flags & AIO_WRITE)
        statistics->bytes_written += piece->moved_nbytes;
    else
        statistics->bytes_read += piece->moved_nbytes;
    request->pieces_in_flight--;
    /* Of several failures report the first one in the file, in whatever order they returned. */
    if (piece->error && (!request->error || piece->offset < request->error_offset)) {
        request->error = piece->error;
        request->error_offset = piece->offset;
        if (request->cut_nbytes < request->nbytes) pop(queue_of(engine, request));
        request->cut_nbytes = request->nbytes;
    }
    if (request->pieces_in_flight == 0 && request->cut_nbytes == request->nbytes)
        complete(engine, request);
}

/* The backend cannot continue.  Requests not started fail; those in the kernel stay in flight. */
void front_break(struct aio_engine *engine, int error) {
    engine->failure = error;
    struct queue *queues[] = {&engine->urgent, &engine->normal, &engine->behind};
    for (int i = 0; i < 3; i++) {
        while (queues[i]->head) {
            struct aio_request *request = queues[i]->head;
            pop(queues[i]);
            request->error = error;
            request->error_offset = request->offset + request->cut_nbytes;
            request->cut_nbytes = request->nbytes;
            if (request->pieces_in_flight == 0) complete(engine, request);
        }
    }
    pthread_cond_broadcast(&engine->finished);
}

bool front_is_drained(const struct aio_engine *engine) {
    return !engine->urgent.head && !engine->normal.head && !engine->behind.head &&
           engine->statistics.pieces_in_flight == 0;
}

/* ---- submission ----------------------------------------------------------------------------- */

/* Needs the lock, so that wake_fd is still open: the backend cannot end without the lock. */
static void wake_backend(struct aio_engine *engine, bool everyone) {
    if (engine->sleeping) {
        uint64_t one = 1;
        engine->sleeping = false;
        ssize_t written = write(engine->wake_fd, &one, sizeof one);
        (void)written; /* fails only when the counter is at its maximum: then it wakes anyway */
    }
    if (engine->idle_workers == 0) return;
    if (everyone)
        pthread_cond_broadcast(&engine->work);
    else
        pthread_cond_signal(&engine->work);
}

int32_t aio_register(struct aio_engine *engine, uint64_t address, uint64_t nbytes) {
    if (engine->options.kind != AIO_IO_URING) return -ENOTSUP;
    struct memory *memory = &engine->memory;
    pthread_mutex_lock(&engine->lock);
    int error = engine->failure ? engine->failure : engine->stopping ? ESHUTDOWN : 0;
    if (!error && memory->nbytes) error = EBUSY;
    if (!error) {
        if (nbytes > AIO_REGISTERED_NBYTES) nbytes = AIO_REGISTERED_NBYTES;
        *memory = (struct memory){.address = address, .nbytes = nbytes, .asked = true};
        wake_backend(engine, true);
        while (memory->asked && !engine->failure)
            pthread_cond_wait(&engine->finished, &engine->lock);
        error = engine->failure ? engine->failure : memory->error;
    }
    pthread_mutex_unlock(&engine->lock);
    return -error;
}

/* `state` and `awaited` are not reset: other threads may read, or wait for, a request as soon as its
 * memory is zeroed. */
int32_t aio_submit(struct aio_engine *engine, struct aio_request *const *requests, uint32_t count) {
    pthread_mutex_lock(&engine->lock);
    int32_t error = engine->failure ? engine->failure : engine->stopping ? ESHUTDOWN : 0, rc = 0;
    uint64_t began_ns = monotonic_ns();
    uint32_t workers = 0; /* that may be needed, from two on all */
    for (uint32_t i = 0; i < count; i++) {
        struct aio_request *request = requests[i];
        if (__atomic_load_n(&request->state, __ATOMIC_RELAXED) != AIO_IDLE) continue;
        if (error) {
            rc = -error;
            request->error = error;
            __atomic_store_n(&request->state, AIO_DONE, __ATOMIC_RELEASE);
            continue;
        }
        request->began_ns = began_ns;
        __atomic_store_n(&request->state, AIO_IN_FLIGHT, __ATOMIC_RELAXED);
        engine->statistics.requests++;
        engine->statistics.in_flight++;
        if (request->nbytes == 0) {
            complete(engine, request);
        } else {
            push(queue_of(engine, request), request);
            workers += request->nbytes > engine->options.piece_nbytes ? 2 : 1;
        }
    }
    if (workers) wake_backend(engine, workers > 1);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

int32_t aio_done(const struct aio_request *request) {
    return __atomic_load_n(&request->state, __ATOMIC_ACQUIRE) == AIO_DONE;
}

/* ---- waiting -------------------------------------------------------------------------------- */

int32_t aio_wait(struct aio_engine *engine, struct aio_request *request, uint32_t timeout_ms) {
    if (aio_done(request)) return 1;
    struct timespec deadline = deadline_after(timeout_ms);
    int rc = 0;
    pthread_mutex_lock(&engine->lock);
    request->awaited++;
    while (!aio_done(request) && !engine->failure && rc == 0)
        rc = pthread_cond_timedwait(&engine->finished, &engine->lock, &deadline);
    request->awaited--;
    int failure = engine->failure;
    pthread_mutex_unlock(&engine->lock);
    return aio_done(request) ? 1 : -failure;
}

int32_t aio_wait_idle(struct aio_engine *engine, uint32_t timeout_ms) {
    struct timespec deadline = deadline_after(timeout_ms);
    int rc = 0;
    pthread_mutex_lock(&engine->lock);
    engine->idle_waiters++;
    while (engine->statistics.in_flight && !engine->failure && rc == 0)
        rc = pthread_cond_timedwait(&engine->finished, &engine->lock, &deadline);
    engine->idle_waiters--;
    int32_t result = engine->statistics.in_flight == 0 ? 1 : -engine->failure;
    pthread_mutex_unlock(&engine->lock);
    return result;
}

uint64_t aio_wait_change(struct aio_engine *engine, uint64_t seen, uint32_t timeout_ms) {
    struct timespec deadline = deadline_after(timeout_ms);
    int rc = 0;
    pthread_mutex_lock(&engine->lock);
    engine->change_waiters++;
    while (engine->statistics.finished == seen && !engine->failure && rc == 0)
        rc = pthread_cond_timedwait(&engine->finished, &engine->lock, &deadline);
    engine->change_waiters--;
    uint64_t finished = engine->statistics.finished;
    pthread_mutex_unlock(&engine->lock);
    return finished;
}

void aio_statistics(struct aio_engine *engine, struct aio_statistics *statistics) {
    pthread_mutex_lock(&engine->lock);
    *statistics = engine->statistics;
    pthread_mutex_unlock(&engine->lock);
}

/* ---- faults --------------------------------------------------------------------------------- */

int32_t aio_inject(struct aio_engine *engine, uint64_t nth, int32_t result) {
    pthread_mutex_lock(&engine->lock);
    uint32_t n = engine->n_injections;
    bool room = n < AIO_MAX_INJECTIONS;
    if (room) {
        engine->injections[n] = (struct injection){engine->attempts + nth, result};
        __atomic_store_n(&engine->n_injections, n + 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&engine->lock);
    return room ? 0 : -ENOSPC;
}

void aio_hold(struct aio_engine *engine, int32_t held) {
    pthread_mutex_lock(&engine->lock);
    engine->held = held != 0 && !engine->stopping;
    if (!engine->held) wake_backend(engine, true);
    pthread_mutex_unlock(&engine->lock);
}

/* ---- files ---------------------------------------------------------------------------------- */

int32_t aio_allocate(int32_t fd, uint64_t offset, uint64_t nbytes) {
    return fallocate(fd, 0, (off_t)offset, (off_t)nbytes) == 0 ? 0 : -errno;
}
