/* OpenMP's threads, where others need their cores.
 *
 * [Note: threads that spin]
 * GNU's libgomp, which torch computes with, has its threads look for more work 300,000 times after each
 * operation, which takes milliseconds, before they sleep; but 100 times where there are more OpenMP threads
 * than CPUs.  What streams weights while torch computes needs these cores.  So libgomp is told of one thread
 * more: a team of two, which has nothing to do, of a thread that sleeps until it is to end, and its team
 * with it.  Where torch has fewer threads than there are CPUs nothing changes: some cores are left. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include "internal.h"

typedef void (*parallel)(void (*run)(void *), void *argument, unsigned n_threads, unsigned flags);

static pthread_mutex_t changes = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
/* Guarded by changes. */
static size_t n_wanted;
static bool runs;
static pthread_t sleeper;

/* Guarded by asleep. */
static pthread_mutex_t asleep = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t awake = PTHREAD_COND_INITIALIZER;
static bool ends;

static void nothing(void *unused) {
    (void)unused;
}

static void *sleep_in_team(void *found) {
    parallel run;
    memcpy(&run, &found, sizeof run);
    run(nothing, NULL, 2, 0);
    pthread_mutex_lock(&asleep);
    while (!ends) pthread_cond_wait(&awake, &asleep);
    pthread_mutex_unlock(&asleep);
    return NULL;
}

/* A forked child has no such thread. */
static void forget_sleeper(void) {
    pthread_mutex_init(&changes, NULL);
    pthread_mutex_init(&asleep, NULL);
    pthread_cond_init(&awake, NULL);
    n_wanted = 0;
    runs = false;
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_sleeper);
}

static void start(void) {
    void *library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, "GOMP_parallel") : NULL;
    if (found == NULL) return;
    pthread_once(&fork_once, watch_forks);
    ends = false;
    sigset_t all, callers; /* see pool.c */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers);
    runs = pthread_create(&sleeper, NULL, sleep_in_team, found) == 0;
    pthread_sigmask(SIG_SETMASK, &callers, NULL);
}

static void stop(void) {
    pthread_mutex_lock(&asleep);
    ends = true;
    pthread_cond_signal(&awake);
    pthread_mutex_unlock(&asleep);
    pthread_join(sleeper, NULL);
    runs = false;
}

int32_t infinity_let_sleep(int32_t more) {
    pthread_mutex_lock(&changes);
    if (more > 0)
        n_wanted++;
    else if (more < 0 && n_wanted > 0)
        n_wanted--;
    if (n_wanted > 0 && !runs) start();
    if (n_wanted == 0 && runs) stop();
    int32_t sleeps = runs;
    pthread_mutex_unlock(&changes);
    return sleeps;
}
