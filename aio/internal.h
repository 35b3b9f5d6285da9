/* Declarations shared by front.c, piece.c, life.c and the two backends; not visible to Python. */
#ifndef INFINITY_AIO_INTERNAL_H
#define INFINITY_AIO_INTERNAL_H
#include "aio.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

/* A part of a request, at most piece_nbytes long, moved by one system call. */
struct piece {
    struct aio_request *request;
    uint64_t address;
    uint64_t offset;
    uint64_t nbytes; /* left to move */
    uint64_t moved_nbytes;
    uint64_t attempt_nbytes; /* of this attempt's system call; 0: none, a fault replaces it */
    uint64_t ready_ns;       /* monotonic: the earliest time of a retry */
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
    STEP_AGAIN, /* submit the rest now */
    STEP_LATER, /* submit the rest, not before ready_ns */
    STEP_FAILED /* piece->error says why */
};

struct queue {
    struct aio_request *head;
    struct aio_request *tail;
};

/* Memory to register; only the ring's thread may do so (SINGLE_ISSUER). */
struct memory {
    uint64_t address;
    uint64_t nbytes;
    bool asked; /* a request to register it is pending */
    int error;  /* errno: the outcome */
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
    uint32_t preferred; /* pieces of normal taken in a row while requests behind waited */
    struct aio_statistics statistics;
    uint32_t change_waiters; /* threads in aio_wait_change */
    uint32_t idle_waiters;   /* threads in aio_wait_idle, aio_stopped and aio_open */
    uint32_t idle_workers;   /* threads: workers that wait for a piece */
    uint32_t running;        /* backend threads alive */
    bool sleeping;           /* io_uring: the ring's thread must be woken for new work */
    bool stopping;
    bool held;
    bool started;    /* io_uring: the ring is up, or start_error says why not */
    int start_error; /* errno */
    int failure;     /* errno: the backend has failed for good */
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

/* piece.c: call these without the lock. */
void piece_begin(struct aio_engine *engine, struct piece *piece);
int64_t piece_result(const struct piece *piece, int64_t result);
enum step piece_advance(struct piece *piece, int64_t result);
uint64_t monotonic_ns(void);
struct timespec deadline_after(uint32_t timeout_ms);

/* The backends' thread bodies. */
void *threads_main(void *engine);
void *uring_main(void *engine);

#endif
