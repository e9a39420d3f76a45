/* A thread pool for the CPU kernels, used instead of OpenMP's. A parallel region never waits for a
 * worker that has not joined it yet: running threads take the next unit of work, and a worker that
 * arrives late finds the region closed. */
#pragma once
#include <stdint.h>

/* The units of a region that no thread has taken yet. */
typedef struct {
    int64_t next, count;
} units;

/* Takes the next unit to compute; returns its index, or -1 once all are taken. */
static inline int64_t take_unit(units *u) {
    int64_t taken = __atomic_fetch_add(&u->next, 1, __ATOMIC_RELAXED);
    return taken < u->count ? taken : -1;
}

/* The body of a region, run by each of its threads: takes units until there are none. Returns 1 if it
 * has no memory, before it takes a unit; 0 otherwise. */
typedef int region(void *context, units *u);

/* Runs a region of `count` units on up to `threads` threads, the caller included, and returns when all
 * units are computed; 1 if a body returned 1, 0 otherwise. If several threads call it at the same time,
 * one of them gets the pool and the others run their region alone. */
int run_region(region *body, void *context, int64_t count, int threads);

/* Lets idle threads prefetch until the next call: `size` bytes from each of `places` addresses, the first `at`,
 * `apart` bytes apart. */
void read_next(const void *at, int64_t apart, int places, int64_t size);

/* Units of work per thread: a thread that is delayed takes fewer. */
#define PARTS 4
