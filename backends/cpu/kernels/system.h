/* OS layer for Linux, macOS and Windows: cache-line aligned memory, threads, futex-style waits, clocks, and on
 * Linux only thread affinity and CPU time. No other file depends on the OS. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Bytes of a cache line. */
#define LINE 64

#ifdef _WIN32
#include <malloc.h>

/* Declared here: windows.h makes macros of words such as `near`. */
#define IMPORTED(TYPE) __declspec(dllimport) TYPE __stdcall
IMPORTED(int) WaitOnAddress(volatile void *word, void *value, size_t size, uint32_t most_ms);
IMPORTED(void) WakeByAddressSingle(void *word);
IMPORTED(void) WakeByAddressAll(void *word);
IMPORTED(int) QueryPerformanceCounter(int64_t *ticks);
IMPORTED(int) QueryPerformanceFrequency(int64_t *ticks_a_second);
IMPORTED(void *) CreateThread(void *security, size_t stack, uint32_t (__stdcall *body)(void *), void *context,
                              uint32_t flags, uint32_t *id);
IMPORTED(int) CloseHandle(void *handle);

/* Allocates cache-line aligned memory, to be freed by free_lines; NULL if out of memory. */
static inline void *take_lines(size_t bytes) { return _aligned_malloc(bytes, LINE); }
static inline void free_lines(void *at) { _aligned_free(at); }

/* Sleeps while `*word` is `value`, at most `most_ns` nanoseconds (0: no timeout). Spurious wake-ups are possible. */
static inline void sleep_on(uint32_t *word, uint32_t value, int64_t most_ns) {
    WaitOnAddress(word, &value, sizeof value, most_ns ? (uint32_t)((most_ns + 999999) / 1000000) : UINT32_MAX);
}
/* Wakes `count` threads that sleep on a word, or all of them. */
static inline void wake(uint32_t *word, int count) {
    count == 1 ? WakeByAddressSingle(word) : WakeByAddressAll(word);
}

static inline int64_t now_ns(void) {
    int64_t ticks, each_second;
    QueryPerformanceCounter(&ticks), QueryPerformanceFrequency(&each_second);
    return ticks / each_second * 1000000000 + ticks % each_second * 1000000000 / each_second;
}

/* Starts a detached thread, with signals blocked where the system has them; returns whether it succeeded. */
typedef uint32_t thread_result;
#define THREAD_BODY static thread_result __stdcall
static inline int start_thread(uint32_t (__stdcall *body)(void *), void *context) {
    void *thread = CreateThread(NULL, 0, body, context, 0, NULL);
    return thread && CloseHandle(thread);
}
/* Registers a handler to run in the child of fork(); Windows has none. */
static inline void after_fork(void (*reset)(void)) {}
#else
#include <pthread.h>
#include <signal.h>
#include <time.h>

static inline int64_t read_ns(clockid_t clock) {
    struct timespec t = {0};
    clock_gettime(clock, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}
static inline int64_t now_ns(void) { return read_ns(CLOCK_MONOTONIC); }

typedef void *thread_result;
#define THREAD_BODY static thread_result
static inline int start_thread(void *(*body)(void *), void *context) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, body, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !failed && !pthread_detach(thread);
}
static inline void after_fork(void (*reset)(void)) { pthread_atfork(NULL, NULL, reset); }
#endif

#ifdef __APPLE__
/* The calls that libc++ uses: public headers have an equivalent only from macOS 14.4 on. */
int __ulock_wait(uint32_t operation, void *word, uint64_t value, uint32_t most_us);
int __ulock_wake(uint32_t operation, void *word, uint64_t unused);
enum { COMPARE_AND_WAIT = 1, WAKE_ALL = 0x100 };

static inline void *take_lines(size_t bytes) {
    void *at;
    return posix_memalign(&at, LINE, bytes) ? NULL : at;
}
static inline void free_lines(void *at) { free(at); }
static inline void sleep_on(uint32_t *word, uint32_t value, int64_t most_ns) {
    __ulock_wait(COMPARE_AND_WAIT, word, value, (uint32_t)((most_ns + 999) / 1000));
}
static inline void wake(uint32_t *word, int count) {
    __ulock_wake(COMPARE_AND_WAIT | (count == 1 ? 0 : WAKE_ALL), word, 0);
}
#endif

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void *take_lines(size_t bytes) { return aligned_alloc(LINE, bytes); }
static inline void free_lines(void *at) { free(at); }
static inline void sleep_on(uint32_t *word, uint32_t value, int64_t most_ns) {
    struct timespec most = {most_ns / 1000000000, most_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, most_ns ? &most : NULL, NULL, 0);
}
static inline void wake(uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Whether thread affinity and per-thread CPU time are available. */
enum { PLACES_THREADS = 1 };
typedef clockid_t run_clock;
static inline int this_thread(void) { return syscall(SYS_gettid); }
static inline int this_cpu(void) { return sched_getcpu(); }
static inline run_clock own_run_clock(void) {
    clockid_t clock = 0;
    pthread_getcpuclockid(pthread_self(), &clock);
    return clock;
}
static inline int64_t ran_ns(run_clock clock) { return read_ns(clock); }

/* With `there`, pins a thread to the CPU; else allows it the CPUs of the thread `like`, without that one if there are
 * others. */
static inline void place_thread(int thread, int cpu, int there, int like) {
    cpu_set_t set;
    if (sched_getaffinity(like, sizeof set, &set)) return;
    if (there) {
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
    } else if (CPU_COUNT(&set) > 1) {
        CPU_CLR(cpu, &set);
    }
    sched_setaffinity(thread, sizeof set, &set);
}
#else
enum { PLACES_THREADS = 0 };
typedef int run_clock;
static inline int this_thread(void) { return 0; }
static inline int this_cpu(void) { return 0; }
static inline run_clock own_run_clock(void) { return 0; }
static inline int64_t ran_ns(run_clock clock) { return 0; }
static inline void place_thread(int thread, int cpu, int there, int like) {}
#endif
