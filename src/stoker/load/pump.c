/* Files to memory, of the host or of a CUDA device: a pool of threads that never touch Python.

   To a device each thread reads into its own two pinned stages in turn and asks for the copy of one while it
   fills the other. With Python threads doing the same, their turns with Python's lock kept an H200 at 0.79 of
   its copy ceiling even without any other work in the process; this reaches 0.96
   (docs/design/2026-11-15-load.md).
   To the host whole pages are read where they belong, and what is left of a chunk at its ends through a stage.
   The twins in Python are `TorchRing` in pump.py and `ShardReader` in reading/reader.py.

   Blocks that nobody has verified yet are read whole and hashed in the stage before they go on, by the very
   code that Python's xxhash module is made of: with Python threads a verifying pass came to 9 GB/s where this
   disk and the page cache behind it give more.

   Only the driver library is used, and it is looked for when a pool for a device is made: this compiles and
   works where there is no CUDA. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096        /* what O_DIRECT wants offsets and lengths to be multiples of */
#define DISABLE_TIMING 2 /* CU_EVENT_DISABLE_TIMING: such events cost less */
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
    const uint64_t *digests; /* of each block of the file; none where there is nothing to verify */
    int64_t block, size;     /* bytes of a block and of the file */
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
    size_t step;
    pid_t process; /* a forked child has none of the threads, and may find the lock held for ever */
    int closing, threads, holders;
    int active, running; /* `active` threads at most work at once */
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

static int make_ring(Pool *pool, Ring *ring)
{
    if (!pool->context)
        return posix_memalign((void **)&ring->memory, PAGE, pool->step);
    int problem = map_stages(ring, pool->step * STAGES);
    if (problem)
        return problem;
    if (cuda.set_context(pool->context) || cuda.pin(ring->memory, pool->step * STAGES, 0))
        return CUDA_FAILED;
    for (int i = 0; i < STAGES; i++)
        if (cuda.create(&ring->copied[i], DISABLE_TIMING))
            return CUDA_FAILED;
    return FINE;
}

static void free_ring(Pool *pool, Ring *ring)
{
    if (!pool->context) {
        free(ring->memory);
        return;
    }
    for (int i = 0; i < STAGES; i++) {
        if (ring->in_flight[i])
            cuda.synchronize(ring->copied[i]);
        if (ring->copied[i])
            cuda.destroy(ring->copied[i]);
    }
    if (ring->memory) {
        cuda.unpin(ring->memory);
        munmap(ring->memory, pool->step * STAGES);
    }
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

/* What a step begins and ends on where it can: whole blocks to verify, or whole pages. */
static int64_t unit_of(const Piece *piece) { return piece->digests ? piece->block : PAGE; }

/* Cut the next step off a job, with the lock held: as much as a stage takes. Steps end on multiples of that, so
   that neighbours read each page and each block once. On the host the ends of a piece are steps of their own
   and all between them can be read in place; one that lies askew is read in small steps, through little
   memory. */
static Piece cut_step(Pool *pool, Job *job)
{
    Piece *piece = &job->pieces[job->at], step = *piece;
    int64_t unit = unit_of(piece), room = (int64_t)pool->step / unit * unit;
    int64_t bytes = smaller((int64_t)piece->bytes, room - piece->offset % room);
    if (!pool->context && (piece->offset % unit || piece->target % PAGE))
        bytes = smaller(bytes, unit - piece->offset % unit);
    else if (!pool->context && bytes > unit)
        bytes = bytes / unit * unit;
    step.bytes = (size_t)bytes;
    piece->offset += bytes, piece->target += (uint64_t)bytes, piece->bytes -= (size_t)bytes;
    while (job->at < job->count && !job->pieces[job->at].bytes)
        job->at++;
    return step;
}

static int are_good(const char *stage, Piece step, int64_t begin, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += step.block)
        if (step.digests[(begin + at) / step.block] !=
            hash(stage + at, (size_t)smaller(step.block, bytes - at)))
            return 0;
    return 1;
}

/* Read the pages or blocks that a step lies in, and verify blocks. */
static int read_step(Piece step, char *stage, int64_t begin, int64_t wanted)
{
    int problem = fill(step.file, stage, (size_t)wanted, (size_t)(wanted + PAGE - 1) / PAGE * PAGE, begin);
    return problem || !step.digests || are_good(stage, step, begin, wanted) ? problem : DIGEST_DIFFERS;
}

static int to_host(Ring *ring, Piece step, int64_t begin, int64_t wanted)
{
    char *target = (char *)(uintptr_t)step.target;
    if ((int64_t)step.bytes == wanted && step.bytes % PAGE == 0 && step.target % PAGE == 0)
        return read_step(step, target, begin, wanted);
    int problem = read_step(step, ring->memory, begin, wanted);
    if (!problem)
        memcpy(target, ring->memory + (step.offset - begin), step.bytes);
    return problem;
}

static int to_device(Pool *pool, Ring *ring, Piece step, int64_t begin, int64_t wanted)
{
    int now = ring->next, problem;
    char *stage = ring->memory + now * pool->step;
    ring->next = (now + 1) % STAGES;
    if (ring->in_flight[now] && cuda.synchronize(ring->copied[now])) /* its copy may still be running */
        return CUDA_FAILED;
    ring->in_flight[now] = 0;
    if ((problem = read_step(step, stage, begin, wanted)))
        return problem;
    if (cuda.copy(step.target, stage + (step.offset - begin), step.bytes, pool->stream) ||
        cuda.record(ring->copied[now], pool->stream))
        return CUDA_FAILED;
    ring->in_flight[now] = 1;
    return FINE;
}

static int pump(Pool *pool, Ring *ring, Piece step)
{
    int64_t unit = unit_of(&step), begin = step.offset / unit * unit;
    int64_t wanted = step.offset - begin + (int64_t)step.bytes;
    if (step.digests && wanted > step.size - begin)
        return FILE_ENDED;
    if (step.digests)
        wanted = smaller((wanted + unit - 1) / unit * unit, step.size - begin);
    return pool->context ? to_device(pool, ring, step, begin, wanted) : to_host(ring, step, begin, wanted);
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
    job->done = 1;
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
        pthread_mutex_unlock(&pool->lock);
        problem = pump(pool, ring, step);
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

static void *work(void *argument)
{
    Pool *pool = argument;
    Ring ring = {0};
    int broken = make_ring(pool, &ring);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while ((!pool->first || pool->running >= pool->active) && !pool->closing)
            pthread_cond_wait(&pool->asked, &pool->lock);
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
    Py_ssize_t step;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "iinK", &device, &threads, &step, &stream))
        return NULL;
    const char *missing = device < 0 ? NULL : load_driver();
    if (missing) {
        PyErr_SetString(PyExc_OSError, missing);
        return NULL;
    }
    if (threads < 1 || step < PAGE || step % PAGE) {
        PyErr_SetString(PyExc_ValueError, "a pool has threads, and stages of whole pages");
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

static int parse_pieces(PyObject *list, Job *job)
{
    for (int i = 0; i < job->count; i++) {
        Piece *piece = &job->pieces[i];
        long long offset, block, size;
        Py_ssize_t bytes;
        unsigned long long target, digests;
        PyObject *one = PyList_GetItem(list, i);
        if (!one || !PyArg_ParseTuple(one, "iLnKKLL", &piece->file, &offset, &bytes, &target, &digests, &block,
                                      &size))
            return -1;
        piece->offset = offset, piece->bytes = bytes, piece->target = target;
        piece->digests = (const uint64_t *)(uintptr_t)digests, piece->block = block, piece->size = size;
        if (!bytes && job->at == i)
            job->at++;
        if (digests && (!hash || block < PAGE || block % PAGE || block > (long long)job->pool->step)) {
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
    pthread_cond_broadcast(&pool->asked);
    pthread_mutex_unlock(&pool->lock);
    return PyCapsule_New(job, "job", free_job);
}

static PyObject *py_finish(PyObject *self, PyObject *capsule)
{
    Job *job = PyCapsule_GetPointer(capsule, "job");
    if (!job)
        return NULL;
    int state;
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
     "open(device, threads, step, stream): a pool whose threads have stages of `step` bytes; device -1 is the "
     "host"},
    {"resize", py_resize, METH_VARARGS, "resize(pool, threads): how many of them work at once"},
    {"close", py_close, METH_O, "close(pool): end its threads; what has not begun is cancelled; safe twice"},
    {"hash_with", py_hash_with, METH_VARARGS,
     "hash_with(path, symbol): take xxh3 from this library; whether there is one"},
    {"submit", py_submit, METH_VARARGS,
     "submit(pool, [(file, offset, bytes, target, digests, block, size), ...], after): a job, begun once event "
     "`after` is done"},
    {"finish", py_finish, METH_O, "finish(job): wait until its copies have been asked for, or raise why not"},
    {"wait", py_wait, METH_VARARGS, "wait(job, stream): let a stream wait for the copies of a finished job"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pump",
                                    "Files to memory, by threads that never touch Python.", -1, methods};

PyMODINIT_FUNC PyInit__pump(void) { return PyModule_Create(&module); }
