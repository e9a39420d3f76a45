/* The thread pool of team.h. Workers start when a region first needs them and live as long as the process.
 *
 * Workers between two regions, and the caller at the end of one, spin for up to SPIN_NS and then sleep.
 * Spinning is cheapest while the other side runs; on a busy machine a spinning thread occupies the core that
 * the other thread needs.
 *
 * Two counter-measures on a busy machine. Threads that sleep alternately look idle to the OS, which may keep
 * the caller and a worker on one CPU: the worker then moves to another. A worker that was preempted with a unit
 * delays the caller, which then gives it its own CPU. With one busy process on two cores a decode step of E2B
 * in Q4_0 took 124 ms without both and takes 85 with them (62 on an idle machine). */
#include "team.h"
#include "system.h"

#include <string.h>

/* Spin time: longer than most gaps between two matmuls of a decode step. Measured: 60 us cost up to a tenth of
 * the speed on an idle machine, 2 ms as much on a busy one. */
#define SPIN_NS 150000
#define MOST_WORKERS 255
#define ROUNDS_PER_LOOK 32
/* Bytes that a waiting thread prefetches between two polls of the gate. */
#define READ_TOGETHER 1024
/* MOMENT_NS: window over which the caller samples the workers' CPU time (less than half of it on a CPU: preempted).
 * LOOK_NS: interval between two samplings. */
#define MOMENT_NS 20000
#define LOOK_NS 500000
#define NOBODY -1

/* The gate, all state in one atomic word: bits 0 to 15 count the workers that joined the region, bits 16 to 31 those
 * that finished, bit 32 is set while the region is open, the bits above are its number. The caller sleeps on the low
 * half, workers on the high half. */
#define FINISHED ((uint64_t)1 << 16)
#define OPEN ((uint64_t)1 << 32)
#define REGION ((uint64_t)1 << 33)

static struct {
    uint64_t gate __attribute__((aligned(64)));
    uint32_t asleep;  /* workers that sleep until a region opens */
    uint32_t waiting; /* whether the caller sleeps until the last worker has finished */
    /* the open region */
    region *body __attribute__((aligned(64)));
    void *context;
    units *left;
    int wanted, failed;
    int caller, cpu; /* thread id, and its current CPU */
    /* whether a caller has locked the pool; threads started so far */
    int taken, workers;
} team;

/* Per worker: thread id, CPU-time clock, and the number of the region whose units it computes, or 0. */
static struct {
    int thread;
    run_clock ran;
    uint64_t inside;
} workers[MOST_WORKERS];
/* OS id of this thread, cached; 0: not read yet. */
static __thread int own_thread;

/* Relaxed atomics for fields that may be read during a concurrent write; a value read then is not used, or harmless. */
#define STORE(field, value) __atomic_store_n(&(field), value, __ATOMIC_RELAXED)
#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)

static uint64_t gate_now(void) { return __atomic_load_n(&team.gate, __ATOMIC_SEQ_CST); }
static uint32_t joined(uint64_t gate) { return gate & 0xffff; }
static uint32_t finished(uint64_t gate) { return gate >> 16 & 0xffff; }
static uint32_t *low_half(void) { return (uint32_t *)&team.gate; }
static uint32_t *high_half(void) { return (uint32_t *)&team.gate + 1; }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Start of the data that the next region reads, for prefetching. A torn read only causes a useless prefetch. */
static struct {
    const char *at __attribute__((aligned(64)));
    int64_t apart, size;
    int places;
    uint32_t number;
} next = {.places = 1};
/* Bytes that this thread has prefetched from each address, and for which call of read_next. */
static __thread int64_t read_of_next;
static __thread uint32_t number_read;

void read_next(const void *at, int64_t apart, int places, int64_t size) {
    STORE(next.at, (const char *)at);
    STORE(next.apart, apart);
    STORE(next.places, places);
    STORE(next.size, size);
    __atomic_add_fetch(&next.number, 1, __ATOMIC_RELEASE);
}

/* One spin iteration: prefetches a little. */
static inline void pass_time(void) {
    uint32_t number = __atomic_load_n(&next.number, __ATOMIC_ACQUIRE);
    if (number != number_read) number_read = number, read_of_next = 0;
    if (read_of_next >= LOAD(next.size)) return relax();
    const char *p = LOAD(next.at) + read_of_next;
    int64_t apart = LOAD(next.apart);
    int places = LOAD(next.places);
    int64_t each = READ_TOGETHER / places;
    for (int place = 0; place < places; place++)
        for (int64_t i = 0; i < each; i += 64) __builtin_prefetch(p + place * apart + i, 0, 2);
    read_of_next += each;
}

/* Spins until `ready(gate, since)`, at most SPIN_NS; returns the last value of the gate. */
static uint64_t spin(int (*ready)(uint64_t gate, uint64_t since), uint64_t since) {
    uint64_t gate = gate_now();
    if (ready(gate, since)) return gate;
    for (int64_t end = now_ns() + SPIN_NS; now_ns() < end;)
        for (int i = 0; i < ROUNDS_PER_LOOK; i++) {
            pass_time();
            if (ready(gate = gate_now(), since)) return gate;
        }
    return gate;
}

static int opened(uint64_t gate, uint64_t since) { return gate & OPEN && gate / REGION != since; }
static int all_finished(uint64_t gate, uint64_t since) { return joined(gate) == finished(gate); }

/* With `there`, pins a thread to one CPU; else allows it the caller's other CPUs. */
static void place(int thread, int cpu, int there) {
    place_thread(thread, cpu, there, LOAD(team.caller));
}

static int caller_cpu(void) { return LOAD(team.cpu); }
static int is_in_its_place(void) { return PLACES_THREADS && this_cpu() == caller_cpu(); }

/* Joins the region and computes units of it, unless it has closed or has enough threads. Returns whether the caller
 * is waiting for this CPU. */
static int join(int worker, uint64_t gate) {
    uint64_t number = gate / REGION;
    /* moves off the caller's CPU before the caller waits for this worker */
    if (is_in_its_place()) place(0, caller_cpu(), 0), gate = gate_now();
    do {
        if (!(gate & OPEN) || gate / REGION != number || (int)joined(gate) >= LOAD(team.wanted)) return 0;
    } while (!__atomic_compare_exchange_n(&team.gate, &gate, gate + 1, 0, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST));
    __atomic_store_n(&workers[worker].inside, number, __ATOMIC_RELEASE);
    if (team.body(team.context, team.left)) STORE(team.failed, 1);
    int in_its_place = is_in_its_place();
    __atomic_store_n(&workers[worker].inside, 0, __ATOMIC_RELEASE);
    gate = __atomic_add_fetch(&team.gate, FINISHED, __ATOMIC_SEQ_CST);
    if (joined(gate) != finished(gate) || !__atomic_load_n(&team.waiting, __ATOMIC_SEQ_CST)) return 0;
    wake(low_half(), 1);
    return in_its_place;
}

THREAD_BODY work(void *number) {
    uint64_t last = 0;
    int worker = (intptr_t)number, awaited = 0;
    workers[worker].thread = this_thread();
    workers[worker].ran = own_run_clock();
    for (;;) {
        uint64_t gate = awaited ? gate_now() : spin(opened, last);
        while (!opened(gate, last)) {
            __atomic_add_fetch(&team.asleep, 1, __ATOMIC_SEQ_CST);
            if (!opened(gate = gate_now(), last)) sleep_on(high_half(), gate >> 32, 0);
            __atomic_sub_fetch(&team.asleep, 1, __ATOMIC_SEQ_CST);
            gate = gate_now();
        }
        last = gate / REGION;
        awaited = join(worker, gate);
    }
    return 0;
}

/* After fork() the child has no workers. */
static void reset(void) {
    team.gate = 0;
    team.asleep = team.waiting = 0;
    team.taken = team.workers = 0;
    own_thread = 0;
    memset(workers, 0, sizeof workers);
}

/* Starts workers up to `count`, or as many as the system allows. */
static void start_workers(int count) {
    static int known;
    if (!known) known = 1, after_fork(reset);
    while (team.workers < count && start_thread(work, (void *)(intptr_t)team.workers)) team.workers++;
}

static int is_inside(int worker, uint64_t number) {
    return __atomic_load_n(&workers[worker].inside, __ATOMIC_ACQUIRE) == number;
}

/* Returns a worker that was preempted with a unit of the region, or NOBODY. All workers' CPU clocks are read
 * before and after one interval, which ends early with the region. */
static int preempted(uint64_t number) {
    if (!PLACES_THREADS) return NOBODY;
    int64_t before[MOST_WORKERS];
    int inside[MOST_WORKERS], count = 0;
    for (int i = 0; i < team.workers; i++)
        if (is_inside(i, number)) inside[count++] = i, before[i] = ran_ns(workers[i].ran);
    int64_t end = now_ns() + MOMENT_NS;
    while (now_ns() < end) {
        if (all_finished(gate_now(), 0)) return NOBODY;
        pass_time();
    }
    for (int i = 0; i < count; i++) {
        int worker = inside[i];
        if (is_inside(worker, number) && ran_ns(workers[worker].ran) - before[worker] < MOMENT_NS / 2)
            return worker;
    }
    return NOBODY;
}

/* Returns once all workers that joined the region have finished. */
static void wait_for_workers(uint64_t number) {
    uint64_t gate = spin(all_finished, 0);
    int guest = NOBODY, cpu = NOBODY;
    while (!all_finished(gate, 0)) {
        if (guest == NOBODY && (guest = preempted(number)) != NOBODY)
            place(workers[guest].thread, cpu = this_cpu(), 1);
        __atomic_store_n(&team.waiting, 1, __ATOMIC_SEQ_CST);
        if (!all_finished(gate = gate_now(), 0)) sleep_on(low_half(), (uint32_t)gate, LOOK_NS);
        __atomic_store_n(&team.waiting, 0, __ATOMIC_SEQ_CST);
        gate = gate_now();
        if (guest == NOBODY || is_inside(guest, number)) continue;
        place(workers[guest].thread, cpu, 0);
        guest = NOBODY;
    }
}

int run_region(region *body, void *context, int64_t count, int threads) {
    units left = {0, count};
    int wanted = threads - 1 < count - 1 ? threads - 1 : (int)(count - 1);
    if (wanted > MOST_WORKERS) wanted = MOST_WORKERS;
    if (wanted < 1 || __atomic_exchange_n(&team.taken, 1, __ATOMIC_ACQUIRE))
        return body(context, &left);
    if (!own_thread) own_thread = this_thread();
    if (team.workers < wanted) start_workers(wanted);
    team.body = body, team.context = context, team.left = &left;
    STORE(team.wanted, wanted);
    STORE(team.failed, 0);
    STORE(team.caller, own_thread);
    STORE(team.cpu, this_cpu());
    uint64_t number = gate_now() / REGION + 1;
    __atomic_store_n(&team.gate, number * REGION | OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.asleep, __ATOMIC_SEQ_CST)) wake(high_half(), wanted);
    int failed = body(context, &left);
    __atomic_and_fetch(&team.gate, ~OPEN, __ATOMIC_SEQ_CST);
    wait_for_workers(number);
    failed |= LOAD(team.failed);
    __atomic_store_n(&team.taken, 0, __ATOMIC_RELEASE);
    return failed;
}
