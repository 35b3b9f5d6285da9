/* What front.c, piece.c and the two backends share.  Python never sees this. */
#ifndef INFINITY_AIO_INTERNAL_H
#define INFINITY_AIO_INTERNAL_H
#include "aio.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

/* A part of a request, at most piece_nbytes long: what one system call moves. */
struct piece {
    struct aio_request *request;
    uint64_t address;
    uint64_t offset;
    uint64_t nbytes; /* what is left to move */
    uint64_t moved_nbytes;
    uint64_t attempt_nbytes; /* asked of the kernel this time; 0: nothing, a fault stands in */
    uint64_t ready_ns;       /* monotonic: not to be retried before */
    uint32_t attempts_without_progress;
    uint32_t retries;
    uint32_t continued;
    int32_t error;
    int32_t injected_result;
    bool injected;
    bool registered; /* lies in registered memory */
};

enum step {
    STEP_DONE,  /* nothing is left */
    STEP_AGAIN, /* submit what is left, now */
    STEP_LATER, /* submit what is left, not before ready_ns */
    STEP_FAILED /* piece->error says why */
};

struct queue {
    struct aio_request *head;
    struct aio_request *tail;
};

/* Memory that the ring's thread registers, as nobody else may (SINGLE_ISSUER). */
struct memory {
    uint64_t address;
    uint64_t nbytes;
    bool asked; /* and not yet answered */
    int error;  /* errno: the answer */
};

struct injection {
    uint64_t attempt;
    int32_t result;
};

struct aio_engine {
    struct aio_options options;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t work;  /* threads: something to take, or time to end */
    pthread_cond_t finished;
    struct queue urgent;
    struct queue normal;
    struct queue behind;
    uint32_t preferred; /* pieces of normal taken in a row while others waited behind */
    struct aio_statistics statistics;
    uint32_t change_waiters; /* threads in aio_wait_change */
    uint32_t idle_waiters;   /* threads in aio_wait_idle, aio_stopped and aio_open */
    uint32_t idle_workers;   /* threads: those with nothing to do */
    uint32_t running;        /* backend threads alive */
    bool sleeping;           /* io_uring: the ring's thread wants a wake-up when work comes */
    bool unannounced;        /* there may be requests that the backend was not woken for: AIO_MORE */
    bool stopping;
    bool held;
    bool started;    /* io_uring: the ring is up, or start_error says why not */
    int start_error; /* errno */
    int failure;     /* errno: the backend is of no use any more */
    int wake_fd;     /* io_uring: an eventfd; else -1 */
    struct memory memory;
    uint32_t n_threads;
    pthread_t *threads;
    uint32_t n_injections; /* atomic: read without the lock */
    uint64_t attempts;     /* counted only while a fault is injected */
    struct injection injections[AIO_MAX_INJECTIONS];
};

/* front.c: call these with the lock held. */
bool front_take(struct aio_engine *engine, struct piece *piece);
void front_finish(struct aio_engine *engine, const struct piece *piece);
void front_break(struct aio_engine *engine, int error);
bool front_is_drained(const struct aio_engine *engine);

/* piece.c: call these without. */
void piece_begin(struct aio_engine *engine, struct piece *piece);
int64_t piece_result(const struct piece *piece, int64_t result);
enum step piece_advance(struct piece *piece, int64_t result);
uint64_t monotonic_ns(void);
struct timespec deadline_after(uint32_t timeout_ms);

/* The backends' thread bodies. */
void *threads_main(void *engine);
void *uring_main(void *engine);

#endif
