/* Files to memory, of the host or of a CUDA device: a pool of threads that never touch Python.

   To a device each thread reads the page cache into its own two pinned stages in turn and asks for the copy of one
   while it fills the other; a disk into one of them. With Python threads doing the same, their turns with Python's
   lock kept an H200 at 0.79 of its copy ceiling even without any other work in the process; this reaches 0.96
   (docs/design/2026-11-15-load.md).
   The twins in Python are `TorchRing` in pump.py and `ShardReader` in reading/reader.py.

   Blocks that nobody has verified yet are read whole and hashed in the stage before they go on, by the very
   code that Python's xxhash module is made of: with Python threads a verifying pass came to 9 GB/s where this
   disk and the page cache behind it give more.

   Only the driver library is used, and it is looked for when a pool for a device is made: this compiles and
   works where there is no CUDA. */

#define _GNU_SOURCE /* O_DIRECT */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stream.h"

#define PAGE 4096        /* what O_DIRECT wants offsets and lengths to be multiples of */
#define DISABLE_TIMING 2 /* CU_EVENT_DISABLE_TIMING: such events cost less */
#define ONLY_READ 8      /* CU_MEMHOSTREGISTER_READ_ONLY */
#define STAGES 2

enum { FINE, FILE_ENDED = -1, CUDA_FAILED = -2, CANCELLED = -3, DIGEST_DIFFERS = -4 };

static struct {
    int (*retain)(void **context, int device);
    int (*set_context)(void *context);
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*copy)(uint64_t target, const void *source, size_t bytes, void *stream);
    int (*pin)(void *memory, size_t bytes, unsigned flags);
    int (*unpin)(void *memory);
} cuda;

static const char *load_driver(void)
{
    struct {
        const char *name;
        void *slot;
    } calls[] = {{"cuDevicePrimaryCtxRetain", &cuda.retain}, {"cuCtxSetCurrent", &cuda.set_context},
                 {"cuEventCreate", &cuda.create},            {"cuEventDestroy_v2", &cuda.destroy},
                 {"cuEventRecord", &cuda.record},            {"cuEventSynchronize", &cuda.synchronize},
                 {"cuStreamWaitEvent", &cuda.wait},          {"cuMemcpyHtoDAsync_v2", &cuda.copy},
                 {"cuMemHostRegister_v2", &cuda.pin},        {"cuMemHostUnregister", &cuda.unpin}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return dlerror();
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (!(*(void **)calls[i].slot = dlsym(library, calls[i].name)))
            return calls[i].name;
    return NULL;
}

static uint64_t (*hash)(const void *data, size_t bytes); /* XXH3_64bits */

typedef struct {
    int file;
    int64_t offset;
    size_t bytes;
    uint64_t target;
    const uint64_t *digests;  /* of each block of the file */
    int64_t block, size;      /* bytes of a block and of the file */
    int64_t doubted, trusted; /* where blocks to verify begin, and where they end */
    const char *memory;       /* that the driver knows: nothing has to be read */
} Piece;

typedef struct Pool Pool;

/* What one call of `submit` asks for. Held by the pool until it is done and by Python until it is dropped. */
typedef struct Job {
    struct Job *next;
    Pool *pool;
    void *after, *ready; /* events: not before the one; the other once all has been copied */
    int state, done, holders;
    int begun, running; /* steps: whether one was taken, and how many are being done */
    int at, count;      /* the piece that the next step is cut from, of how many */
    Piece pieces[];
} Job;

struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t asked, done;
    Job *first, *last;
    void *context, *stream; /* of the device; none: to memory of the host */
    size_t step, stage;     /* bytes read at once, and room for them with the blocks that they lie in */
    pid_t process;          /* a forked child has none of the threads, and may find the lock held for ever */
    int closing, threads, holders;
    int active, running;    /* `active` threads at most work at once */
    int waiting, waking;    /* threads that sleep; whether one is being woken */
    pthread_t ids[];
};

typedef struct {
    char *memory;
    void *copied[STAGES];
    int in_flight[STAGES], next;
} Ring;

/* In huge pages, of which a read or a copy has to look up few (H200: O_DIRECT reads to the card went from 0.76 to
   0.92 of the disk). Never shared with a forked child, so that they stay where the device knows them to be. */
static int map_stages(Ring *ring, size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return errno;
    madvise(memory, bytes, MADV_HUGEPAGE);
    madvise(memory, bytes, MADV_DONTFORK);
    ring->memory = memory;
    return FINE;
}

static size_t stages_bytes(const Pool *pool) { return pool->stage * (pool->context ? STAGES : 1); }

static int make_ring(Pool *pool, Ring *ring)
{
    int problem = map_stages(ring, stages_bytes(pool));
    if (problem || !pool->context)
        return problem;
    if (cuda.set_context(pool->context) || cuda.pin(ring->memory, stages_bytes(pool), 0))
        return CUDA_FAILED;
    for (int i = 0; i < STAGES; i++)
        if (cuda.create(&ring->copied[i], DISABLE_TIMING))
            return CUDA_FAILED;
    return FINE;
}

static void free_ring(Pool *pool, Ring *ring)
{
    for (int i = 0; i < STAGES; i++) {
        if (ring->in_flight[i])
            cuda.synchronize(ring->copied[i]);
        if (ring->copied[i])
            cuda.destroy(ring->copied[i]);
    }
    if (ring->memory && pool->context)
        cuda.unpin(ring->memory);
    if (ring->memory)
        munmap(ring->memory, stages_bytes(pool));
}

/* Fill [0, wanted) of a stage; more may come when the read is rounded up. */
static int fill(int file, char *stage, size_t wanted, size_t asked, int64_t offset)
{
    size_t got = 0;
    while (got < wanted) {
        ssize_t more = pread(file, stage + got, asked - got, offset + (int64_t)got);
        if (more < 0 && errno != EINTR)
            return errno;
        if (more == 0)
            return FILE_ENDED;
        got += more > 0 ? (size_t)more : 0;
    }
    return FINE;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t down(int64_t offset, int64_t unit) { return offset / unit * unit; }
static int64_t up(int64_t offset, int64_t unit) { return down(offset + unit - 1, unit); }

/* What is read whole around an offset: its block, if that is to be verified, or its page. */
static int64_t unit_at(const Piece *piece, int64_t offset)
{
    return offset >= piece->doubted && offset < piece->trusted ? piece->block : PAGE;
}

/* Cut the next step off a job, with the lock held. Steps of a piece are of one size, so that none is a small one that
   takes a disk as long as a large one, and end where a block or page does, so that neighbours read each once. */
static Piece cut_step(Pool *pool, Job *job)
{
    Piece *piece = &job->pieces[job->at], step = *piece;
    int64_t whole = (int64_t)piece->bytes, count = up(whole, (int64_t)pool->step) / (int64_t)pool->step;
    int64_t unit = piece->doubted < piece->trusted ? piece->block : PAGE;
    int64_t bytes = smaller(whole, up(piece->offset + whole / count, unit) - piece->offset);
    if (piece->memory)
        bytes = whole;
    step.bytes = (size_t)bytes;
    piece->offset += bytes, piece->target += (uint64_t)bytes, piece->bytes -= (size_t)bytes;
    while (job->at < job->count && !job->pieces[job->at].bytes)
        job->at++;
    return step;
}

/* Read the pages or blocks that a step lies in, from `begin` on, and verify blocks. */
static int read_step(const Piece *step, char *stage, int64_t begin)
{
    int64_t end = step->offset + (int64_t)step->bytes;
    if (end > step->doubted && end <= step->trusted)
        end = larger(end, smaller(up(end, step->block), step->size));
    int problem = fill(step->file, stage, (size_t)(end - begin), (size_t)up(end - begin, PAGE), begin);
    int64_t trusted = smaller(step->trusted, smaller(end, step->size));
    for (int64_t at = larger(step->doubted, begin); at < trusted && !problem; at += step->block)
        if (step->digests[at / step->block] !=
            hash(stage + (at - begin), (size_t)smaller(step->block, step->size - at)))
            problem = DIGEST_DIFFERS;
    return problem;
}

static int is_direct(int file) { return (fcntl(file, F_GETFL) & O_DIRECT) != 0; }

/* The page cache gives just the bytes that are asked for. What is read past it, or to be verified, goes through a
   stage that stays in the caches of processor and machine, and on past those: read in place, the disk of a
   virtual machine gave 3.5 GB/s instead of 4.4. */
static int to_host(Ring *ring, const Piece *step, int64_t begin)
{
    int is_doubted = step->doubted < step->trusted;
    if (!is_doubted && !is_direct(step->file))
        return fill(step->file, (char *)(uintptr_t)step->target, step->bytes, step->bytes, step->offset);
    int problem = read_step(step, ring->memory, begin);
    if (!problem)
        stream((char *)(uintptr_t)step->target, ring->memory + (step->offset - begin), step->bytes);
    return problem;
}

/* A disk is slow beside a copy: one stage, which is waited for but stays in the caches of processor and machine, serves
   it better than two (H200: 0.77 -> 0.87 of the disk in turns, without the reads around it 0.83 -> 0.94). */
static int to_device(Pool *pool, Ring *ring, const Piece *step, int64_t begin)
{
    int now = ring->next, problem;
    char *stage = ring->memory + now * pool->stage;
    if (!is_direct(step->file))
        ring->next = (now + 1) % STAGES;
    if (ring->in_flight[now] && cuda.synchronize(ring->copied[now])) /* its copy may still be running */
        return CUDA_FAILED;
    ring->in_flight[now] = 0;
    if ((problem = read_step(step, stage, begin)))
        return problem;
    if (cuda.copy(step->target, stage + (step->offset - begin), step->bytes, pool->stream) ||
        cuda.record(ring->copied[now], pool->stream))
        return CUDA_FAILED;
    ring->in_flight[now] = 1;
    return FINE;
}

static int pump(Pool *pool, Ring *ring, const Piece *step)
{
    if (step->memory)
        return cuda.copy(step->target, step->memory, step->bytes, pool->stream) ? CUDA_FAILED : FINE;
    int64_t begin = down(step->offset, unit_at(step, step->offset));
    return pool->context ? to_device(pool, ring, step, begin) : to_host(ring, step, begin);
}

static void drop_pool(Pool *pool) /* with its lock held, which it gives back */
{
    int last = --pool->holders == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last)
        free(pool);
}

static void destroy_event(Job *job)
{
    if (job->ready)
        cuda.destroy(job->ready);
}

static void finish(Job *job) /* with the lock held */
{
    if (!job->state && job->ready && cuda.record(job->ready, job->pool->stream))
        job->state = CUDA_FAILED;
    __atomic_store_n(&job->done, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&job->pool->done);
    if (--job->holders == 0) {
        destroy_event(job);
        job->pool->holders--;
        free(job);
    }
}

static void leave_queue(Pool *pool) /* with the lock held */
{
    if (!(pool->first = pool->first->next))
        pool->last = NULL;
}

/* Whether there is work for one more thread, with the lock held. To wake one takes as long as to read a chunk from memory
   (two cores of a virtual machine: 60 us), so each that is woken wakes the next, and nobody those that come anyway. */
static int is_to_wake(Pool *pool)
{
    if (!pool->first || pool->running >= pool->active || !pool->waiting || pool->waking)
        return 0;
    return pool->waking = 1;
}

static void unlock_and_wake(Pool *pool, int wake)
{
    pthread_mutex_unlock(&pool->lock); /* first: who is woken takes it */
    if (wake)
        pthread_cond_signal(&pool->asked);
}

/* Do a step of the first job, with the lock held. A job leaves the queue with its last step: all threads work
   on what is needed first. The stream takes copies in the order in which they are asked for, so the event to
   wait for is put before the first of a job, and its own event behind the last. */
static void do_step(Pool *pool, Ring *ring, int problem)
{
    Job *job = pool->first;
    job->running++;
    pool->running++;
    if (!problem && !job->begun && job->after && cuda.wait(pool->stream, job->after, 0))
        problem = CUDA_FAILED;
    job->begun = 1;
    if (!problem && job->at < job->count) {
        Piece step = cut_step(pool, job);
        if (job->at == job->count)
            leave_queue(pool);
        unlock_and_wake(pool, is_to_wake(pool));
        problem = pump(pool, ring, &step);
        pthread_mutex_lock(&pool->lock);
    }
    job->running--;
    pool->running--;
    if (problem && !job->state)
        job->state = problem;
    if (job == pool->first && (job->state || job->at == job->count))
        leave_queue(pool);
    if (job != pool->first && !job->running)
        finish(job);
}

/* With the lock held: whoever comes, also unasked, is the one that was being woken. */
static void sleep_until_asked(Pool *pool)
{
    pool->waiting++;
    pthread_cond_wait(&pool->asked, &pool->lock);
    pool->waiting--;
    pool->waking = 0;
}

static void *work(void *argument)
{
    Pool *pool = argument;
    Ring ring = {0};
    int broken = make_ring(pool, &ring);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while ((!pool->first || pool->running >= pool->active) && !pool->closing)
            sleep_until_asked(pool);
        if (!pool->first)
            break;
        do_step(pool, &ring, pool->closing ? CANCELLED : broken);
    }
    pthread_mutex_unlock(&pool->lock);
    free_ring(pool, &ring);
    return NULL;
}

static int is_forked(const Pool *pool) { return pool->process != getpid(); }

static void close_pool(Pool *pool)
{
    if (is_forked(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    int was_closing = pool->closing;
    pool->closing = 1;
    pthread_cond_broadcast(&pool->asked);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->threads && !was_closing; i++)
        pthread_join(pool->ids[i], NULL);
}

static void free_pool(PyObject *capsule)
{
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    if (is_forked(pool))
        return;
    Py_BEGIN_ALLOW_THREADS
    close_pool(pool);
    pthread_mutex_lock(&pool->lock);
    drop_pool(pool);
    Py_END_ALLOW_THREADS
}

static void free_job(PyObject *capsule)
{
    Job *job = PyCapsule_GetPointer(capsule, "job");
    Pool *pool = job->pool;
    if (is_forked(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    if (--job->holders == 0) {
        if (pool->context)
            cuda.set_context(pool->context);
        destroy_event(job);
        free(job);
        drop_pool(pool);
    } else
        pthread_mutex_unlock(&pool->lock);
}

static PyObject *failed(int problem)
{
    if (problem == FILE_ENDED)
        PyErr_SetNone(PyExc_EOFError);
    else if (problem == CUDA_FAILED)
        PyErr_SetString(PyExc_RuntimeError, "the CUDA driver refused to copy");
    else if (problem == DIGEST_DIFFERS)
        PyErr_SetString(PyExc_ValueError, "a block differs from its digest");
    else if (problem == CANCELLED)
        PyErr_SetString(PyExc_RuntimeError, "the pool was closed");
    else {
        errno = problem;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}

static PyObject *py_open(PyObject *self, PyObject *args)
{
    int device, threads;
    Py_ssize_t step, block;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "iinnK", &device, &threads, &step, &block, &stream))
        return NULL;
    const char *missing = device < 0 ? NULL : load_driver();
    if (missing) {
        PyErr_SetString(PyExc_OSError, missing);
        return NULL;
    }
    if (threads < 1 || block < PAGE || block % PAGE || step < block || step % PAGE) {
        PyErr_SetString(PyExc_ValueError, "a pool has threads, and reads whole pages");
        return NULL;
    }
    Pool *pool = calloc(1, sizeof(Pool) + threads * sizeof(pthread_t));
    if (!pool)
        return PyErr_NoMemory();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->asked, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->stream = (void *)(uintptr_t)stream;
    pool->step = step;
    pool->stage = step + 3 * block; /* a step begins and ends inside of blocks, and takes a small rest along */
    pool->holders = 1;
    pool->process = getpid();
    if (device >= 0 && cuda.retain(&pool->context, device)) {
        free(pool);
        return failed(CUDA_FAILED);
    }
    pool->active = threads;
    while (pool->threads < threads && !pthread_create(&pool->ids[pool->threads], NULL, work, pool))
        pool->threads++;
    return PyCapsule_New(pool, "pool", free_pool);
}

static PyObject *py_close(PyObject *self, PyObject *capsule)
{
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    if (!pool)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    close_pool(pool);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_resize(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    int active;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &active))
        return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    if (!pool)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    pool->active = active > 1 ? active : 1;
    pthread_cond_broadcast(&pool->asked);
    pthread_mutex_unlock(&pool->lock);
    Py_RETURN_NONE;
}

static int can_verify(const Pool *pool, const Piece *piece)
{
    int64_t block = piece->block, fits = (int64_t)(pool->stage - pool->step) / 3;
    return hash && block >= PAGE && block % PAGE == 0 && block <= fits && piece->doubted % block == 0;
}

static int parse_pieces(PyObject *list, Job *job)
{
    for (int i = 0; i < job->count; i++) {
        Piece *piece = &job->pieces[i];
        long long offset, block, size, doubted, trusted;
        Py_ssize_t bytes;
        unsigned long long target, digests, memory;
        PyObject *one = PyList_GetItem(list, i);
        if (!one || !PyArg_ParseTuple(one, "iLnKKLLLLK", &piece->file, &offset, &bytes, &target, &digests,
                                      &block, &size, &doubted, &trusted, &memory))
            return -1;
        piece->offset = offset, piece->bytes = bytes, piece->target = target;
        piece->digests = (const uint64_t *)(uintptr_t)digests, piece->block = block, piece->size = size;
        piece->doubted = doubted, piece->trusted = trusted;
        piece->memory = job->pool->context ? (const char *)(uintptr_t)memory : NULL;
        if (!bytes && job->at == i)
            job->at++;
        if (doubted < trusted && !can_verify(job->pool, piece)) {
            PyErr_SetString(PyExc_ValueError, "blocks to verify are whole pages that fit a stage");
            return -1;
        }
    }
    return 0;
}

static PyObject *py_hash_with(PyObject *self, PyObject *args)
{
    const char *path, *symbol;
    if (!PyArg_ParseTuple(args, "ss", &path, &symbol))
        return NULL;
    void *library = dlopen(path, RTLD_NOW);
    void *found = library ? dlsym(library, symbol) : NULL;
    if (found)
        *(void **)&hash = found;
    return PyBool_FromLong(found != NULL);
}

static int is_in_memory(const Job *job)
{
    int all = job->at < job->count;
    for (int i = job->at; i < job->count; i++)
        all = all && job->pieces[i].memory;
    return all;
}

/* See to a job that was put in the queue, with the lock held; gives whether to wake a thread. Of what lies in memory
   nothing has to be read: if it is its turn, its copies are asked for here and now. */
static int begin(Pool *pool, const Job *job)
{
    if (pool->first == job && is_in_memory(job))
        while (pool->first == job)
            do_step(pool, NULL, FINE);
    return is_to_wake(pool);
}

static PyObject *py_submit(PyObject *self, PyObject *args)
{
    PyObject *capsule, *list;
    unsigned long long after;
    if (!PyArg_ParseTuple(args, "OOK", &capsule, &list, &after))
        return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    Py_ssize_t count = pool ? PyList_Size(list) : -1;
    if (count < 0)
        return NULL;
    Job *job = calloc(1, sizeof(Job) + count * sizeof(Piece));
    if (!job)
        return PyErr_NoMemory();
    job->count = (int)count;
    job->after = (void *)(uintptr_t)after;
    job->pool = pool;
    job->holders = 2;
    if (parse_pieces(list, job)) {
        free(job);
        return NULL;
    }
    if (pool->context &&
        (cuda.set_context(pool->context) || cuda.create(&job->ready, DISABLE_TIMING))) {
        free(job);
        return failed(CUDA_FAILED);
    }
    pthread_mutex_lock(&pool->lock);
    pool->holders++;
    if (pool->closing) {
        job->state = CANCELLED;
        finish(job);
    } else if (pool->last)
        pool->last = pool->last->next = job;
    else
        pool->first = pool->last = job;
    unlock_and_wake(pool, begin(pool, job));
    return PyCapsule_New(job, "job", free_job);
}

static PyObject *py_pin(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "OKn", &capsule, &address, &bytes))
        return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    if (!pool)
        return NULL;
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = cuda.set_context(pool->context);
    if (!refused)
        refused = cuda.pin((void *)(uintptr_t)address, bytes, ONLY_READ);
    Py_END_ALLOW_THREADS
    if (refused)
        return PyErr_Format(PyExc_OSError, "the CUDA driver does not take the page cache: error %d", refused);
    Py_RETURN_NONE;
}

static PyObject *py_unpin(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &address))
        return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, "pool");
    if (!pool)
        return NULL;
    if (!cuda.set_context(pool->context))
        cuda.unpin((void *)(uintptr_t)address);
    Py_RETURN_NONE;
}

static PyObject *py_finish(PyObject *self, PyObject *capsule)
{
    Job *job = PyCapsule_GetPointer(capsule, "job");
    if (!job)
        return NULL;
    int state;
    if (__atomic_load_n(&job->done, __ATOMIC_ACQUIRE)) { /* as most are: other Python threads need not be let in */
        if (job->state)
            return failed(job->state);
        Py_RETURN_NONE;
    }
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&job->pool->lock);
    while (!job->done)
        pthread_cond_wait(&job->pool->done, &job->pool->lock);
    state = job->state;
    pthread_mutex_unlock(&job->pool->lock);
    Py_END_ALLOW_THREADS
    if (state)
        return failed(state);
    Py_RETURN_NONE;
}

static PyObject *py_wait(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &stream))
        return NULL;
    Job *job = PyCapsule_GetPointer(capsule, "job");
    if (!job)
        return NULL;
    if (cuda.wait((void *)(uintptr_t)stream, job->ready, 0))
        return failed(CUDA_FAILED);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", py_open, METH_VARARGS,
     "open(device, threads, step, block, stream): a pool whose threads read `step` bytes at once, and verify "
     "blocks of up to `block` bytes; device -1 is the host"},
    {"resize", py_resize, METH_VARARGS, "resize(pool, threads): how many of them work at once"},
    {"close", py_close, METH_O, "close(pool): end its threads; what has not begun is cancelled; safe twice"},
    {"hash_with", py_hash_with, METH_VARARGS,
     "hash_with(path, symbol): take xxh3 from this library; whether there is one"},
    {"submit", py_submit, METH_VARARGS,
     "submit(pool, [(file, offset, bytes, target, digests, block, size, doubted, trusted, memory), ...], after): a "
     "job, begun once event `after` is done; blocks from `doubted` to `trusted` are verified, and nothing is read "
     "that lies in `memory`"},
    {"pin", py_pin, METH_VARARGS, "pin(pool, address, bytes): let the device copy from memory that is only read"},
    {"unpin", py_unpin, METH_VARARGS, "unpin(pool, address): take that back"},
    {"finish", py_finish, METH_O, "finish(job): wait until its copies have been asked for, or raise why not"},
    {"wait", py_wait, METH_VARARGS, "wait(job, stream): let a stream wait for the copies of a finished job"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pump",
                                    "Files to memory, by threads that never touch Python.", -1, methods};

PyMODINIT_FUNC PyInit__pump(void) { return PyModule_Create(&module); }
