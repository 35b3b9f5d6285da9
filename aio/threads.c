/* The backend that works everywhere: threads that each move one piece at a time. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

static int64_t transfer(const struct piece *piece) {
    if (piece->attempt_nbytes == 0) return 0;
    const struct aio_request *request = piece->request;
    void *address = (void *)(uintptr_t)piece->address;
    ssize_t moved = request->flags & AIO_WRITE
                        ? pwrite(request->fd, address, piece->attempt_nbytes, (off_t)piece->offset)
                        : pread(request->fd, address, piece->attempt_nbytes, (off_t)piece->offset);
    return moved < 0 ? -errno : moved;
}

static void sleep_until(uint64_t ready_ns) {
    struct timespec time = {.tv_sec = (time_t)(ready_ns / 1000000000u),
                            .tv_nsec = (long)(ready_ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static void run(struct aio_engine *engine, struct piece *piece) {
    for (;;) {
        piece_begin(engine, piece);
        enum step step = piece_advance(piece, piece_result(piece, transfer(piece)));
        if (step == STEP_DONE || step == STEP_FAILED) return;
        if (step == STEP_LATER) sleep_until(piece->ready_ns);
    }
}

/* Waits for a piece; false once the engine is stopping and none is left. */
static bool next(struct aio_engine *engine, struct piece *piece) {
    while (!front_take(engine, piece)) {
        if (engine->stopping && !engine->held) return false;
        engine->idle_workers++;
        pthread_cond_wait(&engine->work, &engine->lock);
        engine->idle_workers--;
    }
    return true;
}

void *threads_main(void *argument) {
    struct aio_engine *engine = argument;
    struct piece piece;
    pthread_setname_np(pthread_self(), "aio-thread");
    pthread_mutex_lock(&engine->lock);
    while (next(engine, &piece)) {
        pthread_mutex_unlock(&engine->lock);
        run(engine, &piece);
        pthread_mutex_lock(&engine->lock);
        front_finish(engine, &piece);
    }
    engine->running--;
    pthread_cond_broadcast(&engine->finished);
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}
