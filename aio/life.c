/* Start and end of an engine.
 *
 * [Note: stop, join, free]
 * There are three steps because three different things must end: the requests (stop), the backend's
 * threads (join) and calls of other Python threads that may still be inside aio_wait (free, which
 * Python calls when the last reference to the engine is gone). */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static int check(const struct aio_options *options) {
    bool known = options->kind == AIO_IO_URING || options->kind == AIO_THREADS;
    if (!known || options->depth == 0 || options->threads == 0) return EINVAL;
    /* One system call moves at most 2 GiB minus a page. */
    uint32_t piece_nbytes = options->piece_nbytes;
    if (piece_nbytes == 0 || piece_nbytes % AIO_BLOCK || piece_nbytes > 1u << 30) return EINVAL;
    if (options->ring > AIO_RING_PLAIN) return EINVAL;
#ifndef HAVE_LIBURING
    if (options->kind == AIO_IO_URING) return ENOTSUP;
#endif
    return 0;
}

static void init_conditions(struct aio_engine *engine) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->work, &monotonic);
    pthread_cond_init(&engine->finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* With all signals blocked: they are for Python's main thread, which a Ctrl-C taken here would not wake. */
static int start_threads(struct aio_engine *engine, void *(*body)(void *)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < engine->options.threads && !error; i++) {
        error = pthread_create(&engine->threads[i], NULL, body, engine);
        if (!error) {
            engine->n_threads++;
            engine->running++;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Waits for the ring, which is created by the thread that uses it (SINGLE_ISSUER). */
static int ring_outcome(struct aio_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    while (!engine->started) pthread_cond_wait(&engine->finished, &engine->lock);
    int error = engine->start_error;
    pthread_mutex_unlock(&engine->lock);
    return error;
}

static int start(struct aio_engine *engine) {
    engine->threads = calloc(engine->options.threads, sizeof *engine->threads);
    if (!engine->threads) return ENOMEM;
    if (engine->options.kind == AIO_THREADS) return start_threads(engine, threads_main);
#ifdef HAVE_LIBURING
    engine->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (engine->wake_fd < 0) return errno;
    int error = start_threads(engine, uring_main);
    return error ? error : ring_outcome(engine);
#else
    (void)ring_outcome;
    return ENOTSUP;
#endif
}

int32_t aio_open(const struct aio_options *options, struct aio_engine **opened) {
    int error = check(options);
    if (error) return -error;
    struct aio_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return -ENOMEM;
    engine->options = *options;
    engine->wake_fd = -1;
    if (options->kind == AIO_IO_URING)
        engine->options.threads = 1;
    else
        engine->options.ring = AIO_RING_BEST;
    init_conditions(engine);
    error = start(engine);
    if (error) {
        aio_stop(engine);
        aio_join(engine);
        aio_free(engine);
        return -error;
    }
    *opened = engine;
    return 0;
}

int32_t aio_ring(const struct aio_engine *engine) {
    return (int32_t)engine->options.ring;
}

void aio_stop(struct aio_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->stopping = true;
    pthread_mutex_unlock(&engine->lock);
    aio_hold(engine, 0); /* also wakes the backend */
}

int32_t aio_stopped(struct aio_engine *engine, uint32_t timeout_ms) {
    struct timespec deadline = deadline_after(timeout_ms);
    int rc = 0;
    pthread_mutex_lock(&engine->lock);
    while (engine->running && rc == 0)
        rc = pthread_cond_timedwait(&engine->finished, &engine->lock, &deadline);
    int32_t stopped = engine->running == 0;
    pthread_mutex_unlock(&engine->lock);
    return stopped;
}

int32_t aio_join(struct aio_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    uint32_t n_threads = engine->n_threads;
    engine->n_threads = 0; /* a second call has nothing to do */
    pthread_mutex_unlock(&engine->lock);
    for (uint32_t i = 0; i < n_threads; i++) pthread_join(engine->threads[i], NULL);
    pthread_mutex_lock(&engine->lock);
    if (engine->running == 0 && engine->wake_fd >= 0) {
        close(engine->wake_fd);
        engine->wake_fd = -1;
    }
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* Frees memory only, and none if threads are not joined: a living thread still needs it.  (In a forked
 * child threads never look joined, and neither lock, ring nor threads may be used.) */
void aio_free(struct aio_engine *engine) {
    if (engine->n_threads) return;
    free(engine->threads);
    free(engine);
}
