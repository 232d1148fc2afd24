/* Files to a CUDA device through a ring of pinned stages, without holding Python's lock.

   Python threads doing the same reached 0.79 of the copy ceiling of an H200, this 0.96 (see
   docs/design/2026-11-15-load.md). The twin in Python is `TorchRing` in pump.py.

   Only the driver library is used, and it is looked for when a ring is made: this compiles and imports
   where there is no CUDA. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE 4096           /* what O_DIRECT wants offsets and lengths to be multiples of */
#define DISABLE_TIMING 2    /* CU_EVENT_DISABLE_TIMING: such events cost less */

typedef int (*call_t)();
static struct {
    call_t retain, set_context, event_create, event_destroy, event_record, event_wait;
    int (*copy)(uint64_t target, const void *source, size_t bytes, void *stream);
} cuda;

typedef struct {
    void *context;
    char *memory;
    size_t step;
    int count, next;
    struct {
        void *event;
        int in_flight;
    } stages[];
} Ring;

static const char *load_driver(void)
{
    static const char *names[] = {"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuEventCreate",
                                  "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
                                  "cuMemcpyHtoDAsync_v2"};
    void *found[7];
    if (cuda.copy)
        return NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return dlerror();
    for (int i = 0; i < 7; i++)
        if (!(found[i] = dlsym(library, names[i])))
            return names[i];
    cuda.retain = (call_t)found[0];
    cuda.set_context = (call_t)found[1];
    cuda.event_create = (call_t)found[2];
    cuda.event_destroy = (call_t)found[3];
    cuda.event_record = (call_t)found[4];
    cuda.event_wait = (call_t)found[5];
    cuda.copy = (int (*)(uint64_t, const void *, size_t, void *))found[6];
    return NULL;
}

/* The next stage, once its last copy is done. */
static int take(Ring *ring)
{
    int stage = ring->next;
    ring->next = (stage + 1) % ring->count;
    if (ring->stages[stage].in_flight && cuda.event_wait(ring->stages[stage].event))
        return -1;
    ring->stages[stage].in_flight = 0;
    return stage;
}

static int push(Ring *ring, int stage, size_t start, size_t bytes, uint64_t target, void *stream)
{
    if (cuda.copy(target, ring->memory + stage * ring->step + start, bytes, stream))
        return -1;
    ring->stages[stage].in_flight = 1;
    return cuda.event_record(ring->stages[stage].event, stream) ? -1 : 0;
}

/* Fill [0, wanted) of a stage; more may come when the read is rounded up. 0, or what went wrong. */
static int fill(int file, char *stage, size_t wanted, size_t asked, int64_t offset)
{
    size_t got = 0;
    while (got < wanted) {
        ssize_t more = pread(file, stage + got, asked - got, offset + (int64_t)got);
        if (more < 0 && errno != EINTR)
            return errno;
        if (more == 0)
            return -1;
        got += more > 0 ? (size_t)more : 0;
    }
    return 0;
}

enum { FINE, CUDA_FAILED = -2, FILE_ENDED = -1 };

/* Read steps that end on multiples of the step, so that neighbours read the same pages once. */
static int pump(Ring *ring, int file, int64_t offset, size_t bytes, uint64_t target, void *stream)
{
    if (cuda.set_context(ring->context))
        return CUDA_FAILED;
    while (bytes) {
        size_t lead = offset % PAGE, step = ring->step - (size_t)(offset % (int64_t)ring->step);
        size_t here = step < bytes ? step : bytes;
        size_t asked = (lead + here + PAGE - 1) / PAGE * PAGE;
        int stage = take(ring);
        if (stage < 0)
            return CUDA_FAILED;
        int problem = fill(file, ring->memory + stage * ring->step, lead + here, asked, offset - (int64_t)lead);
        if (problem)
            return problem;
        if (push(ring, stage, lead, here, target, stream))
            return CUDA_FAILED;
        offset += (int64_t)here, target += here, bytes -= here;
    }
    return FINE;
}

static void free_ring(PyObject *capsule)
{
    Ring *ring = PyCapsule_GetPointer(capsule, "ring");
    Py_BEGIN_ALLOW_THREADS
    cuda.set_context(ring->context);
    for (int i = 0; i < ring->count; i++) {
        if (ring->stages[i].in_flight)
            cuda.event_wait(ring->stages[i].event);
        cuda.event_destroy(ring->stages[i].event);
    }
    Py_END_ALLOW_THREADS
    free(ring);
}

static PyObject *failed(int problem)
{
    if (problem == FILE_ENDED)
        PyErr_SetNone(PyExc_EOFError);
    else if (problem == CUDA_FAILED)
        PyErr_SetString(PyExc_RuntimeError, "the CUDA driver refused a copy");
    else {
        errno = problem;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}

static PyObject *py_make_ring(PyObject *self, PyObject *args)
{
    int device, count;
    unsigned long long memory;
    Py_ssize_t step;
    if (!PyArg_ParseTuple(args, "iKni", &device, &memory, &step, &count))
        return NULL;
    const char *missing = load_driver();
    if (missing) {
        PyErr_SetString(PyExc_OSError, missing);
        return NULL;
    }
    if (count < 1 || step < PAGE || step % PAGE) {
        PyErr_SetString(PyExc_ValueError, "a ring has stages of whole pages");
        return NULL;
    }
    Ring *ring = calloc(1, sizeof(Ring) + count * sizeof(ring->stages[0]));
    if (!ring)
        return PyErr_NoMemory();
    ring->memory = (char *)(uintptr_t)memory;
    ring->step = step;
    ring->count = count;
    int bad = cuda.retain(&ring->context, device) || cuda.set_context(ring->context);
    for (int i = 0; i < count && !bad; i++)
        bad = cuda.event_create(&ring->stages[i].event, DISABLE_TIMING);
    if (bad) {
        free(ring);
        return failed(CUDA_FAILED);
    }
    return PyCapsule_New(ring, "ring", free_ring);
}

static PyObject *py_take(PyObject *self, PyObject *capsule)
{
    int stage;
    Ring *ring = PyCapsule_GetPointer(capsule, "ring");
    if (!ring)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    stage = cuda.set_context(ring->context) ? -1 : take(ring);
    Py_END_ALLOW_THREADS
    return stage < 0 ? failed(CUDA_FAILED) : PyLong_FromLong(stage);
}

static PyObject *py_push(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    int stage, problem;
    Py_ssize_t start, bytes;
    unsigned long long target, stream;
    if (!PyArg_ParseTuple(args, "OinnKK", &capsule, &stage, &start, &bytes, &target, &stream))
        return NULL;
    Ring *ring = PyCapsule_GetPointer(capsule, "ring");
    if (!ring)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    problem = push(ring, stage, start, bytes, target, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    if (problem)
        return failed(CUDA_FAILED);
    Py_RETURN_NONE;
}

static PyObject *py_pump(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    int file, problem;
    long long offset;
    Py_ssize_t bytes;
    unsigned long long target, stream;
    if (!PyArg_ParseTuple(args, "OiLnKK", &capsule, &file, &offset, &bytes, &target, &stream))
        return NULL;
    Ring *ring = PyCapsule_GetPointer(capsule, "ring");
    if (!ring)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    problem = pump(ring, file, offset, bytes, target, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    if (problem)
        return failed(problem);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"make_ring", py_make_ring, METH_VARARGS,
     "make_ring(device, memory, step, count): stages of `step` bytes in pinned memory at address `memory`"},
    {"take", py_take, METH_O, "take(ring): the number of a stage that may be filled"},
    {"push", py_push, METH_VARARGS,
     "push(ring, stage, start, bytes, target, stream): copy part of a filled stage to the device"},
    {"pump", py_pump, METH_VARARGS,
     "pump(ring, file, offset, bytes, target, stream): read a stretch of a file to the device"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pump",
                                    "Files to a CUDA device, without holding Python's lock.", -1, methods};

PyMODINIT_FUNC PyInit__pump(void) { return PyModule_Create(&module); }
