/* A storage workload, as fio and gdsio run one: threads that read or write blocks of a file, each call timed.

   In C because a call of Python's takes two microseconds, a block of 4 KiB out of the page cache one. Its twin is
   `drive.py`. Every thread has a region of the file of its own, goes through it from its beginning, or through its
   blocks in a drawn order in which each comes once, and begins anew at its end if it is told to. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif

enum { SYNC, MAPPED, RING };
enum { BUCKETS = 3072, FINE = 64 }; /* 64 buckets for each power of two: a percentile is off by 1.6% at most */

/* Buffers of a gigabyte take longer to fill than a trial: its clock begins when every thread has filled its own. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int ready;
    bool open;
    uint64_t lasts, begun, cpu, deadline; /* nanoseconds */
} Gate;

typedef struct {
    Gate *gate;
    int fd, engine, writes, random, repeats, depth, failed; /* failed: an errno */
    uint64_t first, blocks, block, deadline, seed;
    const char *mapped;
    uint64_t calls, ended;
    uint32_t *latencies;
} Job;

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t now(void) { return nanoseconds(CLOCK_MONOTONIC); }

/* A thread waits here with its buffers filled, or without any; the gate says until when it works. */
static uint64_t await_gate(Gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->ready++;
    pthread_cond_broadcast(&gate->moved);
    while (!gate->open)
        pthread_cond_wait(&gate->moved, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
    return gate->deadline;
}

static void open_gate(Gate *gate, int threads)
{
    pthread_mutex_lock(&gate->lock);
    while (gate->ready < threads)
        pthread_cond_wait(&gate->moved, &gate->lock);
    gate->cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
    gate->begun = now();
    gate->deadline = gate->begun + gate->lasts;
    gate->open = true;
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->lock);
}

static int bucket(uint64_t ns)
{
    if (ns < FINE)
        return (int)ns;
    int shift = 63 - __builtin_clzll(ns) - 6;
    int at = shift * FINE + (int)(ns >> shift);
    return at < BUCKETS ? at : BUCKETS - 1;
}

static void done(Job *job, uint64_t begun, uint64_t ended)
{
    job->latencies[bucket(ended - begun)]++;
    job->calls++;
    job->ended = ended;
}

/* The next block of a region: in turn, or by a linear congruence that meets each number below a power of two once
   (Hull and Dobell), without those beyond the region. */
typedef struct {
    uint64_t at, given, mask;
} Walk;

static int next_block(const Job *job, Walk *walk, uint64_t *block)
{
    if (walk->given == job->blocks) {
        if (!job->repeats)
            return 0;
        walk->given = 0;
    }
    if (!job->random) {
        *block = walk->given++;
        return 1;
    }
    do
        walk->at = (walk->at * 6364136223846793005u + 1442695040888963407u) & walk->mask;
    while (walk->at >= job->blocks);
    walk->given++;
    *block = walk->at;
    return 1;
}

static Walk walk_of(const Job *job)
{
    uint64_t mask = 1;
    while (mask < job->blocks)
        mask <<= 1;
    return (Walk){.at = job->seed & (mask - 1), .mask = mask - 1};
}

static void run_sync(Job *job, char *buffer)
{
    Walk walk = walk_of(job);
    uint64_t block;
    /* one call at least: a thread that a busy machine woke late has measured something, too */
    for (uint64_t begun = now(); (!job->calls || begun < job->deadline) && next_block(job, &walk, &block);) {
        off_t place = (off_t)(job->first + block * job->block);
        ssize_t moved;
        if (job->engine == MAPPED) {
            memcpy(buffer, job->mapped + place, job->block);
            moved = (ssize_t)job->block;
        } else
            moved = job->writes ? pwrite(job->fd, buffer, job->block, place)
                                : pread(job->fd, buffer, job->block, place);
        if (moved != (ssize_t)job->block) {
            job->failed = moved < 0 ? errno : (job->writes ? ENOSPC : EIO);
            return;
        }
        uint64_t ended = now();
        done(job, begun, ended);
        begun = ended;
    }
}

#ifdef __NR_io_uring_setup
typedef struct {
    int fd;
    struct io_uring_params params;
    char *sq, *cq;
    struct io_uring_sqe *entries;
    size_t sq_bytes, cq_bytes, entry_bytes;
    uint64_t *begun;
} Ring;

/* Completions wait until we ask for them, in one go and without interrupting the thread: as fio sets its rings up.
   Without it a busy virtual disk gave three quarters of fio's rate. Since Linux 6.1; headers may be older. */
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1u << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1u << 13)
#endif

#define OF(base, offset) ((_Atomic unsigned *)((base) + (offset)))

static int open_ring(Ring *ring, unsigned depth)
{
    memset(ring, 0, sizeof *ring);
    ring->params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    ring->fd = (int)syscall(__NR_io_uring_setup, depth, &ring->params);
    if (ring->fd < 0 && errno == EINVAL) { /* an older kernel */
        memset(&ring->params, 0, sizeof ring->params);
        ring->fd = (int)syscall(__NR_io_uring_setup, depth, &ring->params);
    }
    if (ring->fd < 0)
        return errno;
    struct io_uring_params *p = &ring->params;
    ring->sq_bytes = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    ring->cq_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->entry_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    int way = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_POPULATE;
    ring->sq = mmap(NULL, ring->sq_bytes, way, kind, ring->fd, IORING_OFF_SQ_RING);
    ring->cq = mmap(NULL, ring->cq_bytes, way, kind, ring->fd, IORING_OFF_CQ_RING);
    ring->entries = mmap(NULL, ring->entry_bytes, way, kind, ring->fd, IORING_OFF_SQES);
    ring->begun = calloc(depth, sizeof *ring->begun);
    if (ring->sq == MAP_FAILED || ring->cq == MAP_FAILED || (void *)ring->entries == MAP_FAILED || !ring->begun)
        return ENOMEM;
    return 0;
}

static void close_ring(Ring *ring)
{
    if (ring->fd < 0)
        return;
    if (ring->sq && ring->sq != MAP_FAILED)
        munmap(ring->sq, ring->sq_bytes);
    if (ring->cq && ring->cq != MAP_FAILED)
        munmap(ring->cq, ring->cq_bytes);
    if (ring->entries && (void *)ring->entries != MAP_FAILED)
        munmap(ring->entries, ring->entry_bytes);
    free(ring->begun);
    close(ring->fd);
}

/* `slot` says whose buffer and whose time it is: there are as many as calls may be on their way. */
static void put(Job *job, Ring *ring, char *buffers, unsigned slot, uint64_t block)
{
    unsigned tail = atomic_load_explicit(OF(ring->sq, ring->params.sq_off.tail), memory_order_relaxed);
    unsigned mask = *(unsigned *)(ring->sq + ring->params.sq_off.ring_mask), at = tail & mask;
    struct io_uring_sqe *entry = &ring->entries[at];
    memset(entry, 0, sizeof *entry);
    entry->opcode = job->writes ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = job->fd;
    entry->addr = (uint64_t)(uintptr_t)(buffers + slot * job->block);
    entry->len = (unsigned)job->block;
    entry->off = job->first + block * job->block;
    entry->user_data = slot;
    ((unsigned *)(ring->sq + ring->params.sq_off.array))[at] = at;
    ring->begun[slot] = now();
    atomic_store_explicit(OF(ring->sq, ring->params.sq_off.tail), tail + 1, memory_order_release);
}

/* One that has ended: its slot, or -1 where none has. */
static int taken(Job *job, Ring *ring)
{
    _Atomic unsigned *head = OF(ring->cq, ring->params.cq_off.head);
    unsigned at = atomic_load_explicit(head, memory_order_relaxed);
    if (at == atomic_load_explicit(OF(ring->cq, ring->params.cq_off.tail), memory_order_acquire))
        return -1;
    unsigned mask = *(unsigned *)(ring->cq + ring->params.cq_off.ring_mask);
    struct io_uring_cqe *answer = (struct io_uring_cqe *)(ring->cq + ring->params.cq_off.cqes) + (at & mask);
    int slot = (int)answer->user_data, moved = answer->res;
    atomic_store_explicit(head, at + 1, memory_order_release);
    if (moved == (int)job->block)
        done(job, ring->begun[slot], now());
    else if (!job->failed)
        job->failed = moved < 0 ? -moved : (job->writes ? ENOSPC : EIO);
    return slot;
}

/* Hands a call to the kernel at once: in batches a disk stands still while a batch is gathered, which cost a quarter
   of fio's rate at 4 KiB and depth 32. Also waits for `least` that have ended. */
static int enter(Job *job, Ring *ring, unsigned new, unsigned least)
{
    long taken_in;
    do
        taken_in = syscall(__NR_io_uring_enter, ring->fd, new, least, least ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
    while (taken_in < 0 && errno == EINTR);
    if (taken_in >= 0 && (unsigned)taken_in == new)
        return 0;
    if (!job->failed)
        job->failed = taken_in < 0 ? errno : EAGAIN;
    return -1;
}

static void run_ring(Job *job, char *buffers)
{
    Ring ring;
    Walk walk = walk_of(job);
    uint64_t block;
    int flying = 0;
    job->failed = open_ring(&ring, (unsigned)job->depth);
    for (; !job->failed && flying < job->depth && next_block(job, &walk, &block); flying++) {
        put(job, &ring, buffers, (unsigned)flying, block);
        if (enter(job, &ring, 1, 0))
            break;
    }
    while (flying) { /* also after a failure: what flies writes into our buffers */
        int slot = taken(job, &ring);
        if (slot < 0) {
            if (enter(job, &ring, 0, 1))
                break; /* the kernel does not let us wait: nothing more can be known */
            continue;
        }
        flying--;
        if (!job->failed && now() < job->deadline && next_block(job, &walk, &block)) {
            put(job, &ring, buffers, (unsigned)slot, block);
            flying += !enter(job, &ring, 1, 0);
        }
    }
    close_ring(&ring);
}
#else
static void run_ring(Job *job, char *buffers) { (void)buffers, job->failed = ENOSYS; }
#endif

static void *run(void *given)
{
    Job *job = given;
    size_t bytes = job->block * (size_t)job->depth;
    void *buffers = NULL;
    job->failed = posix_memalign(&buffers, 4096, bytes);
    if (!job->failed) {
        for (size_t at = 0; at < bytes; at += 8) { /* a disk that compresses must not find zeros */
            job->seed = job->seed * 6364136223846793005u + 1442695040888963407u;
            memcpy((char *)buffers + at, &job->seed, 8);
        }
    }
    job->deadline = await_gate(job->gate);
    if (!job->failed) {
        if (job->engine == RING)
            run_ring(job, buffers);
        else
            run_sync(job, buffers);
    }
    free(buffers);
    return NULL;
}

static int run_jobs(Job *jobs, int count, Gate *gate)
{
    pthread_t *threads = calloc((size_t)count, sizeof *threads);
    int started = 0, failed = threads ? 0 : ENOMEM;
    for (; !failed && started < count; started++)
        if ((failed = pthread_create(&threads[started], NULL, run, &jobs[started])))
            break;
    if (failed)
        gate->lasts = 0; /* those that were started have nothing to do */
    open_gate(gate, started);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    gate->cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - gate->cpu;
    free(threads);
    for (int i = 0; i < count && !failed; i++)
        failed = jobs[i].failed;
    return failed;
}

static PyObject *told(Job *jobs, int count, const Gate *gate)
{
    uint64_t calls = 0, ended = gate->begun;
    PyObject *latencies = PyDict_New();
    for (int at = 0; latencies && at < BUCKETS; at++) {
        uint64_t sum = 0;
        for (int i = 0; i < count; i++)
            sum += jobs[i].latencies[at];
        if (!sum)
            continue;
        PyObject *key = PyLong_FromLong(at), *value = PyLong_FromUnsignedLongLong(sum);
        if (!key || !value || PyDict_SetItem(latencies, key, value) < 0)
            Py_CLEAR(latencies);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    if (!latencies)
        return NULL;
    for (int i = 0; i < count; i++) {
        calls += jobs[i].calls;
        ended = jobs[i].ended > ended ? jobs[i].ended : ended;
    }
    return Py_BuildValue("KKKN", (unsigned long long)calls, (unsigned long long)(ended - gate->begun),
                         (unsigned long long)gate->cpu, latencies);
}

PyDoc_STRVAR(drive_doc, "drive(fd, engine, writes, random, repeats, file_bytes, block, jobs, depth, seconds, seed)\n"
                        "-> (calls, nanoseconds, nanoseconds of CPU, {bucket of latency: calls})");

static PyObject *py_drive(PyObject *self, PyObject *args)
{
    int fd, engine, writes, random, repeats, jobs_wanted, depth;
    unsigned long long bytes, block, seed;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "iippp" "KKiidK", &fd, &engine, &writes, &random, &repeats, &bytes, &block, &jobs_wanted,
                          &depth, &seconds, &seed))
        return NULL;
    if (engine < SYNC || engine > RING || jobs_wanted < 1 || jobs_wanted > 1024 || depth < 1 || depth > 1024 ||
        block < 8 || block % 8 || block > (1u << 30) || bytes / block < (unsigned)jobs_wanted) {
        PyErr_SetString(PyExc_ValueError, "the file has no block for each thread, or a number is out of range");
        return NULL;
    }
    Job *jobs = calloc((size_t)jobs_wanted, sizeof *jobs);
    uint32_t *latencies = calloc((size_t)jobs_wanted * BUCKETS, sizeof *latencies);
    char *mapped = engine == MAPPED ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    int failed = !jobs || !latencies || mapped == MAP_FAILED ? ENOMEM : 0;
    PyObject *answer = NULL;
    if (!failed) {
        uint64_t each = bytes / block / (unsigned)jobs_wanted;
        Gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER,
                     .moved = PTHREAD_COND_INITIALIZER,
                     .lasts = (uint64_t)(seconds * 1e9)};
        for (int i = 0; i < jobs_wanted; i++)
            jobs[i] = (Job){.gate = &gate, .fd = fd, .engine = engine, .writes = writes, .random = random, .repeats = repeats,
                            .depth = engine == RING ? depth : 1, .first = (uint64_t)i * each * block, .blocks = each,
                            .block = block, .seed = seed + (uint64_t)i * 7919, .mapped = mapped,
                            .latencies = latencies + (size_t)i * BUCKETS};
        Py_BEGIN_ALLOW_THREADS
        failed = run_jobs(jobs, jobs_wanted, &gate);
        Py_END_ALLOW_THREADS
        if (!failed)
            answer = told(jobs, jobs_wanted, &gate);
    }
    if (mapped && mapped != MAP_FAILED)
        munmap(mapped, bytes);
    free(jobs);
    free(latencies);
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return answer;
}

static PyMethodDef methods[] = {{"drive", py_drive, METH_VARARGS, drive_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_drive", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__drive(void) { return PyModule_Create(&module); }
