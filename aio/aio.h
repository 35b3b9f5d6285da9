/* Files <-> aligned memory, asynchronously: the interface between Python and C.
 *
 * gcc compiles this header and cffi parses it (without the lines that start with '#'), so every
 * signature exists once.  Sizes and offsets are in bytes.  Functions that can fail return 0 or a
 * positive value on success and -errno on failure.
 *
 * [Note: who owns a request]
 * The caller allocates a struct aio_request and keeps it, and the memory that it names, untouched
 * until its state is AIO_DONE.  The engine allocates nothing per request.  Setting AIO_DONE is the
 * engine's last access to a request. */
#ifndef INFINITY_AIO_H
#define INFINITY_AIO_H
#include <stdint.h>
#pragma GCC visibility push(default)

enum {
    AIO_ABI = 7,            /* changes with this header; see aio_abi */
    AIO_BLOCK = 4096,       /* alignment of address, offset and nbytes on O_DIRECT files */
    AIO_SLICE_MS = 100,     /* no call from Python waits longer, so that Python can handle signals */
    AIO_END_OF_FILE = 4096, /* an error that is not an errno (those are at most 4095) */
    AIO_BEHIND_SHARE = 4,   /* one piece in so many is from AIO_BEHIND requests, if both kinds wait */
    AIO_REGISTERED_NBYTES = 1 << 30, /* the largest buffer that the kernel registers */
    AIO_MAX_INJECTIONS = 64
};

/* Kinds of engine. */
enum { AIO_IO_URING = 1, AIO_THREADS = 2 };

/* Kinds of rings, by how they learn of completions, the cheapest first.  DEFER (Linux 6.1): when the
 * ring's thread asks.  COOP (5.19): when its thread enters the kernel for any reason.  PLAIN: its
 * thread is interrupted. */
enum { AIO_RING_BEST = 0, AIO_RING_DEFER = 1, AIO_RING_COOP = 2, AIO_RING_PLAIN = 3 };

/* Flags of a request. */
enum {
    AIO_WRITE = 1,
    AIO_URGENT = 2,  /* goes before every request that is not */
    AIO_ALIGNED = 4, /* O_DIRECT: a short transfer is continued from a whole block */
    AIO_BEHIND = 8   /* goes after all others, except for one piece in AIO_BEHIND_SHARE */
};

/* States of a request. */
enum { AIO_IDLE = 0, AIO_IN_FLIGHT = 1, AIO_DONE = 2 };

struct aio_request {
    /* The caller fills these in before it submits the request; the others are zero then. */
    uint64_t address;
    uint64_t offset; /* in the file */
    uint64_t nbytes;
    int32_t fd;
    uint32_t flags;
    struct aio_request *next;
    uint64_t cut_nbytes;   /* handed to the backend in pieces, so far */
    uint64_t error_offset; /* in the file: the first place that failed */
    uint64_t began_ns;     /* CLOCK_MONOTONIC: accepted by the engine; 0 if refused */
    uint64_t ended_ns;     /* CLOCK_MONOTONIC: just before it was done */
    uint32_t pieces_in_flight;
    uint32_t awaited; /* threads in aio_wait for this request */
    int32_t error;    /* 0, a positive errno or AIO_END_OF_FILE */
    uint32_t state;   /* read it through aio_done */
};

struct aio_options {
    uint32_t kind;
    uint32_t depth;   /* io_uring: pieces in flight at once */
    uint32_t threads; /* threads: pieces in flight at once */
    uint32_t piece_nbytes;
    uint32_t ring; /* io_uring: AIO_RING_BEST is the first that the kernel supports */
};

struct aio_statistics {
    uint64_t requests; /* submitted */
    uint64_t finished; /* of these, done, with or without an error */
    uint64_t failed;
    uint64_t pieces;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t retries;   /* EINTR, EAGAIN, or less than one block moved */
    uint64_t continued; /* short transfers */
    uint64_t in_flight; /* requests */
    uint64_t pieces_in_flight;
    uint64_t high_water; /* most pieces in flight at once */
    uint64_t registered; /* pieces that lay in registered memory */
};

struct aio_engine;

uint32_t aio_abi(void);

/* Starts an engine.  aio_stop asks it to finish its requests and end; aio_join joins its threads once
 * aio_stopped returns 1 (joining earlier blocks).  aio_free frees the memory, and comes last. */
int32_t aio_open(const struct aio_options *options, struct aio_engine **engine);
/* The kind of ring, or AIO_RING_BEST without one. */
int32_t aio_ring(const struct aio_engine *engine);
void aio_stop(struct aio_engine *engine);
int32_t aio_stopped(struct aio_engine *engine, uint32_t timeout_ms);
int32_t aio_join(struct aio_engine *engine);
void aio_free(struct aio_engine *engine);

/* Registers memory with the ring, which then keeps its pages pinned: transfers need not pin them, which
 * is some 40 % of their cost.  Call it once, before the first request; the memory must stay mapped until
 * the engine has ended.  Memory beyond AIO_REGISTERED_NBYTES is not registered.  Fails without a ring
 * or before Linux 5.13 (ENOTSUP), and beyond RLIMIT_MEMLOCK (ENOMEM). */
int32_t aio_register(struct aio_engine *engine, uint64_t address, uint64_t nbytes);

/* Submits those of `count` requests that are AIO_IDLE, in their order, and wakes the backend once.  Others
 * were submitted before, and stay as they are: a call that may or may not have happened can be repeated, by
 * any thread.  -errno: those that were idle are refused, and done with that error. */
int32_t aio_submit(struct aio_engine *engine, struct aio_request *const *requests, uint32_t count);
int32_t aio_done(const struct aio_request *request);

/* 1: done.  0: not within timeout_ms.  -errno: the engine failed, and the kernel may use the buffer
 * for ever. */
int32_t aio_wait(struct aio_engine *engine, struct aio_request *request, uint32_t timeout_ms);
int32_t aio_wait_idle(struct aio_engine *engine, uint32_t timeout_ms);
/* Waits until the number of finished requests is no longer `seen`; returns that number. */
uint64_t aio_wait_change(struct aio_engine *engine, uint64_t seen, uint32_t timeout_ms);

void aio_statistics(struct aio_engine *engine, struct aio_statistics *statistics);

int32_t aio_allocate(int32_t fd, uint64_t offset, uint64_t nbytes);

/* Faults for aio_inject beside the kernel's results: a disk that loses data, or does not respond. */
enum {
    AIO_FAULT_TORN = -10001,  /* half of the blocks are moved, all are reported */
    AIO_FAULT_LOST = -10002,  /* nothing is moved, all is reported */
    AIO_FAULT_FLIP = -10003,  /* one bit of a read is wrong; a write is not changed */
    AIO_FAULT_DELAY = -10004, /* moved only after 20 ms, so that others overtake it */
    AIO_FAULT_HANG = -10005   /* not moved within an hour */
};

/* Injects a fault, for tests.  The nth attempt from now (1: the next) to move a piece returns `result`:
 * -errno, 0, a short count, whose bytes are moved, or AIO_FAULT_x. */
int32_t aio_inject(struct aio_engine *engine, uint64_t nth, int32_t result);
/* While held, requests are accepted but no piece is started. */
void aio_hold(struct aio_engine *engine, int32_t held);

#pragma GCC visibility pop
#endif
