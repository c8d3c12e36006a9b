/*
The team of threads behind CMHA_PARALLEL. The compiler cuts a block marked `omp parallel` out into a function and passes
it to its OpenMP library: gcc to GOMP_parallel, clang to __kmpc_fork_call. Those entries are defined here, seen by this
module alone, so the block runs on this team; neither libgomp nor libomp is linked or loaded.

Why not libgomp: its region ends only when every thread has been there. On a machine with other work a thread may be off
its core for milliseconds, and every region of a training step waits for it (measured: 15 to 60 times slower with two
threads than with one, beside one busy program). Here a region is a number of parts, and whoever is free claims the next
one; the caller claims too, so it never waits for a thread that has not begun. Parts are whole outputs, numbered by
thread_number(), so who computes a part changes no bit; there may be more of them than threads.

The same on macOS. A second copy of libomp beside PyTorch's crashes, but there is none: Apple's clang takes the pragma
with -Xclang -fopenmp and has no library to offer. dispatch_apply_f would bring another pool with other rules: after a
fork without exec the child may not use it (it crashes, and multiprocessing's "fork" is a promise here), and it decides
alone how many threads come. Plain pthreads keep one team, and one set of tests, for all POSIX systems.

    caller   writes the job, opens it by one store, wakes sleepers, works on parts, waits for those still being worked on
    worker   spins a while for a part (a step has many regions), then sleeps until it is woken
    second caller at the same time: works on all its parts alone
    fork     the child has no workers and starts with an empty team
*/
#include "parallel.h"

#ifdef CMHA_OWN_TEAM
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define SPINS 50000         /* pauses, a millisecond or two: a worker stays awake through a step's serial parts */
#define MAX_WORKERS 1023    /* set_num_threads takes up to 1024 */
#define WORKER_STACK (2 << 20)

_Thread_local cmha_part_of cmha_part = {0, 1, 0};

static struct {
    _Atomic uint64_t job; /* number of the job << 32 | parts << 16 | next part; claimed by adding 1 */
    _Atomic int done;     /* parts that workers have finished */
    _Atomic int sleeping;
    atomic_flag taken; /* a caller owns the team */
    void (*body)(void *);
    void *data;
    _Atomic int members;  /* threads that may work on the job: the caller, and workers below this number */
    _Atomic int limit;    /* the most that may ever */
    int workers, fork_watched;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} team = {.limit = 1, .taken = ATOMIC_FLAG_INIT, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int parts_of(uint64_t job) { return (int)(job >> 16 & 0xffff); }
static int next_of(uint64_t job) { return (int)(job & 0xffff); }

/* A part of the open job that nobody has begun, or -1. body and data are those of the job until the part is done. */
static int claim(int member, int *parts) {
    uint64_t job = atomic_load_explicit(&team.job, memory_order_acquire);
    while (next_of(job) < parts_of(job) && member < atomic_load_explicit(&team.members, memory_order_relaxed))
        if (atomic_compare_exchange_weak_explicit(&team.job, &job, job + 1, memory_order_acq_rel, memory_order_acquire)) {
            *parts = parts_of(job);
            return next_of(job);
        }
    return -1;
}

static void run(void (*body)(void *), void *data, int part, int parts, int member) {
    const cmha_part_of before = cmha_part;
    cmha_part = (cmha_part_of){part, parts, member};
    body(data);
    cmha_part = before;
}

static void sleep_until_work(int member) {
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleeping, 1); /* before the look at the job: a caller opens it before it looks for sleepers */
    for (;;) {
        const uint64_t job = atomic_load(&team.job);
        if (next_of(job) < parts_of(job) && member < atomic_load_explicit(&team.members, memory_order_relaxed)) break;
        pthread_cond_wait(&team.wake, &team.lock);
    }
    atomic_fetch_sub(&team.sleeping, 1);
    pthread_mutex_unlock(&team.lock);
}

static void *work(void *number) {
    const int member = (int)(intptr_t)number;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            int parts, part = claim(member, &parts);
            if (part < 0) {
                PAUSE();
                continue;
            }
            run(team.body, team.data, part, parts, member);
            atomic_fetch_add_explicit(&team.done, 1, memory_order_release);
            spin = 0;
        }
        sleep_until_work(member);
    }
    return NULL;
}

static void forget_workers(void) {
    atomic_store(&team.job, 0);
    atomic_store(&team.sleeping, 0);
    atomic_flag_clear(&team.taken);
    team.workers = 0;
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.wake, NULL);
}

/* At least `wanted` workers, or as many as the system allows; signals stay with Python's threads. */
static void hire(int wanted) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (team.workers >= wanted) return;
    if (!team.fork_watched) team.fork_watched = !pthread_atfork(NULL, NULL, forget_workers);
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before)) return;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    while (team.workers < wanted && team.workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)(team.workers + 1))) break;
        team.workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wait_for(int done) {
    for (int spin = 0; atomic_load_explicit(&team.done, memory_order_acquire) < done; spin++) {
        if (spin < SPINS) PAUSE();
        else nanosleep(&(struct timespec){0, 20000}, NULL); /* off the core, so that the other may come onto it */
    }
}

void cmha_team_limit(int threads) { atomic_store_explicit(&team.limit, threads, memory_order_relaxed); }

/* body(data) once for each part; on the way out all parts are done. */
static void region(void (*body)(void *), void *data, int parts) {
    const int limit = atomic_load_explicit(&team.limit, memory_order_relaxed), members = parts < limit ? parts : limit;
    int own = 1, part, unused;
    if (atomic_flag_test_and_set_explicit(&team.taken, memory_order_acquire)) {
        for (part = 0; part < parts; part++) run(body, data, part, parts, 0);
        return;
    }
    hire(members - 1);
    team.body = body, team.data = data;
    atomic_store_explicit(&team.members, members, memory_order_relaxed);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    const uint64_t number = (atomic_load_explicit(&team.job, memory_order_relaxed) >> 32) + 1;
    atomic_store(&team.job, number << 32 | (uint64_t)parts << 16 | 1); /* open; part 0 is the caller's */
    if (atomic_load(&team.sleeping) > 0) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.lock);
    }
    run(body, data, 0, parts, 0);
    for (; (part = claim(0, &unused)) >= 0; own++) run(body, data, part, parts, 0);
    wait_for(parts - own);
    atomic_flag_clear_explicit(&team.taken, memory_order_release);
}

/* ------------------------------------------------------------------------- what the compilers call for the pragma */

#ifndef __clang__ /* gcc: the variables of the block are in one struct */
HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned parts, unsigned flags);
HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned parts, unsigned flags) {
    (void)flags;
    region(body, data, (int)parts);
}

#else /* clang: the number of parts in a call of its own before; the variables are arguments, pointers or of their size */
#define MOST_VARIABLES 16
#define EACH_VARIABLE(x) \
    x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7), x(8), x(9), x(10), x(11), x(12), x(13), x(14), x(15)
#define TYPE(i) void *
#define VALUE(i) b->variable[i]
typedef void block_function(int *global_number, int *bound_number, EACH_VARIABLE(TYPE));
typedef struct { block_function *function; void *variable[MOST_VARIABLES]; } block;

static _Thread_local int parts_pushed = 1;

/* Always all 16, however few the function has: in every calling convention with POSIX below it the caller clears its
   arguments away, and the called function looks at its own alone. */
static void run_block(void *data) {
    const block *b = data;
    int number = 0; /* what OpenMP would call the thread; blocks ask thread_number() */
    b->function(&number, &number, EACH_VARIABLE(VALUE));
}

HIDDEN int __kmpc_global_thread_num(void *place);
HIDDEN int __kmpc_global_thread_num(void *place) {
    (void)place;
    return 0;
}

HIDDEN void __kmpc_push_num_threads(void *place, int number, int parts);
HIDDEN void __kmpc_push_num_threads(void *place, int number, int parts) {
    (void)place, (void)number;
    parts_pushed = parts;
}

HIDDEN void __kmpc_fork_call(void *place, int count, block_function *function, ...);
HIDDEN void __kmpc_fork_call(void *place, int count, block_function *function, ...) {
    block b = {.function = function};
    va_list variables;
    (void)place;
    if (count > MOST_VARIABLES) abort(); /* a block of this source that no test has ever run: raise the number above */
    va_start(variables, function);
    for (int i = 0; i < count; i++) b.variable[i] = va_arg(variables, void *);
    va_end(variables);
    region(run_block, &b, parts_pushed);
}
#endif
#endif
