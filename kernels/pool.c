/* A persistent pool of threads that share one job's blocks.
 *
 * [Note: the pool]
 * There is one job at a time: its caller holds `submit`.  A second caller does not wait but runs its
 * job inline: with every core busy already, waiting could only lose time.  Threads take the next
 * blocks from a counter, so the thread that computes a block is random, but the result is not.  The
 * caller works too, and at the end waits only for workers that have begun: a late worker (its core
 * is busy with I/O) finds no job and sleeps on.  Workers are started by the first job that is large
 * enough.  After a fork the child has none: its handler initialises all locks again, and its first
 * job starts workers of its own.
 */
#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

/* Fewer blocks than this are finished before a sleeping worker would wake up. */
#define INLINE_BLOCKS 4
/* Threads that alternate in small pieces slow each other down: two threads reach 113 GB/s on separate
 * halves, but adamw reached 76 with pieces of 1 block, 107 with 4, 111 with 16.  Each thread gets
 * several pieces, so that the others need not wait for one whose core has other work. */
#define STRETCHES_PER_THREAD 4
#define MAX_STRETCH_BLOCKS 16
#define MAX_THREADS 1024

struct job {
    block_function run;
    const void *args;
    size_t n;
    size_t block;       /* elements per call of run */
    size_t stretch;     /* elements that a thread takes at once: whole blocks */
    atomic_size_t next; /* the first element not taken yet */
};

static pthread_mutex_t submit = PTHREAD_MUTEX_INITIALIZER;

/* Guarded by shared.mutex. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t posted;
    pthread_cond_t idle;
    struct job *job;   /* NULL: none */
    uint64_t n_posted; /* distinguishes jobs, which lie on stacks, at the same addresses */
    size_t n_busy;     /* workers inside the job */
    bool stopping;
} shared = {.mutex = PTHREAD_MUTEX_INITIALIZER,
            .posted = PTHREAD_COND_INITIALIZER,
            .idle = PTHREAD_COND_INITIALIZER};

/* Guarded by submit; n_threads may be read without it. */
static pthread_t workers[MAX_THREADS - 1];
static size_t n_workers;
static atomic_size_t n_threads = 1;
static cpu_set_t cpus; /* CPUs for workers; empty: any */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void take_blocks(struct job *job) {
    /* Kernels rely on the default floating-point environment, whatever the caller has set, such as by
     * torch.set_flush_denormal. */
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    for (;;) {
        size_t first = atomic_fetch_add_explicit(&job->next, job->stretch, memory_order_relaxed);
        if (first >= job->n) break;
        size_t end = job->n - first < job->stretch ? job->n : first + job->stretch;
        for (size_t i = first; i < end; i += job->block)
            job->run(job->args, i, end - i < job->block ? end - i : job->block);
    }
    fesetenv(&callers);
}

static void *work(void *unused) {
    pthread_mutex_lock(&shared.mutex);
    uint64_t n_seen = 0;
    for (;;) {
        while (!shared.stopping && (shared.job == NULL || shared.n_posted == n_seen))
            pthread_cond_wait(&shared.posted, &shared.mutex);
        if (shared.stopping) break;
        struct job *job = shared.job;
        n_seen = shared.n_posted;
        shared.n_busy++;
        pthread_mutex_unlock(&shared.mutex);
        take_blocks(job);
        pthread_mutex_lock(&shared.mutex);
        if (--shared.n_busy == 0) pthread_cond_signal(&shared.idle);
    }
    pthread_mutex_unlock(&shared.mutex);
    return unused;
}

/* In a forked child there are no workers, and any lock may have been held by a thread that does not
 * exist there.  The locks are initialised again instead of being taken before the fork, so that fork
 * never waits for a kernel. */
static void forget_workers(void) {
    pthread_mutex_init(&submit, NULL);
    pthread_mutex_init(&shared.mutex, NULL);
    pthread_cond_init(&shared.posted, NULL);
    pthread_cond_init(&shared.idle, NULL);
    shared.job = NULL;
    shared.n_busy = 0;
    shared.stopping = false;
    n_workers = 0;
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_workers);
}

/* A worker may run on any of the CPUs instead of one of its own, so that other work on a core does
 * not delay it. */
static int start_worker(pthread_t *worker) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return -1;
    int code = 0;
    if (CPU_COUNT(&cpus) > 0)
        code = pthread_attr_setaffinity_np(&attributes, sizeof cpus, &cpus);
    if (code == 0) code = pthread_create(worker, &attributes, work, NULL);
    pthread_attr_destroy(&attributes);
    return code;
}

/* If a thread cannot be started, the job runs on those that exist. */
static void start_workers(void) {
    pthread_once(&fork_once, watch_forks);
    /* Block all signals: Python's handlers, and a debugger, expect them in the program's own threads. */
    sigset_t all, callers;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers);
    while (n_workers + 1 < atomic_load(&n_threads)) {
        if (start_worker(&workers[n_workers]) != 0) break;
        n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &callers, NULL);
}

static void stop_workers(void) {
    pthread_mutex_lock(&shared.mutex);
    shared.stopping = true;
    pthread_cond_broadcast(&shared.posted);
    pthread_mutex_unlock(&shared.mutex);
    for (; n_workers > 0; n_workers--) pthread_join(workers[n_workers - 1], NULL);
    shared.stopping = false;
}

void run_blocks(block_function run, const void *args, size_t n, size_t block) {
    size_t sharing = atomic_load(&n_threads);
    size_t stretch_blocks = n / block / (sharing * STRETCHES_PER_THREAD);
    if (stretch_blocks > MAX_STRETCH_BLOCKS) stretch_blocks = MAX_STRETCH_BLOCKS;
    if (stretch_blocks < 1) stretch_blocks = 1;
    struct job job = {
        .run = run, .args = args, .n = n, .block = block, .stretch = stretch_blocks * block};
    atomic_init(&job.next, 0);
    if (sharing == 1 || n / block < INLINE_BLOCKS || pthread_mutex_trylock(&submit) != 0) {
        take_blocks(&job);
        return;
    }
    start_workers();
    pthread_mutex_lock(&shared.mutex);
    shared.job = &job;
    shared.n_posted++;
    pthread_cond_broadcast(&shared.posted);
    pthread_mutex_unlock(&shared.mutex);

    take_blocks(&job);

    pthread_mutex_lock(&shared.mutex);
    shared.job = NULL;
    while (shared.n_busy > 0) pthread_cond_wait(&shared.idle, &shared.mutex);
    pthread_mutex_unlock(&shared.mutex);
    pthread_mutex_unlock(&submit);
}

void infinity_set_threads(size_t wanted) {
    pthread_mutex_lock(&submit);
    stop_workers();
    atomic_store(&n_threads, wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted);
    pthread_mutex_unlock(&submit);
}

size_t infinity_threads(void) {
    return atomic_load(&n_threads);
}

int infinity_bind_threads(size_t n, const int32_t *wanted) {
    cpu_set_t chosen;
    CPU_ZERO(&chosen);
    for (size_t i = 0; i < n; i++) {
        if (wanted[i] < 0 || wanted[i] >= CPU_SETSIZE) return -1;
        CPU_SET((size_t)wanted[i], &chosen);
    }
    pthread_mutex_lock(&submit);
    stop_workers();
    cpus = chosen;
    pthread_mutex_unlock(&submit);
    return 0;
}
