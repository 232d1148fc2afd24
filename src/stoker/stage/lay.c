/* Many small files written and moved in one turn: a turn of the interpreter for each of their system calls
   cost more than the calls did, with other threads waiting for theirs. The twin in Python is in lay.py. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PIECE (256 << 10) /* written at a time: see _WRITE_BYTES in part.py */

typedef struct {
    const char *from, *to; /* paths; a file to be written has the second only */
    const char *data;
    long long bytes;
    int folder; /* that the second path is seen from */
} Work;

static int write_file(const Work *work)
{
    int problem = 0, file = open(work->to, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0)
        return errno;
    for (long long at = 0; at < work->bytes && !problem;) {
        long long left = work->bytes - at;
        ssize_t wrote = write(file, work->data + at, (size_t)(left < PIECE ? left : PIECE));
        if (wrote < 0 && errno != EINTR)
            problem = errno;
        at += wrote > 0 ? wrote : 0;
    }
    if (close(file) && !problem && errno != EINTR) /* a network filesystem may say only now that it is full */
        problem = errno;
    return problem;
}

static int move_file(const Work *work)
{
    return renameat(AT_FDCWD, work->from, work->folder, work->to) ? errno : 0;
}

static int parse_file(PyObject *one, Work *work)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(one, "yKL", &work->to, &address, &work->bytes))
        return 0;
    work->data = (const char *)(uintptr_t)address;
    return 1;
}

static int parse_move(PyObject *one, Work *work) { return PyArg_ParseTuple(one, "yy", &work->from, &work->to); }

static void fail(int problem, const Work *work)
{
    PyObject *from = work->from ? PyUnicode_DecodeFSDefault(work->from) : NULL;
    PyObject *to = PyUnicode_DecodeFSDefault(work->to);
    errno = problem;
    PyErr_SetFromErrnoWithFilenameObjects(PyExc_OSError, from ? from : to, from ? to : NULL);
    Py_XDECREF(from);
    Py_XDECREF(to);
}

static PyObject *each(PyObject *list, int folder, int (*parse)(PyObject *, Work *), int (*act)(const Work *))
{
    Py_ssize_t count = PyList_Size(list), at = 0;
    Work *works = count < 0 ? NULL : calloc((size_t)count + 1, sizeof(Work));
    int problem = 0;
    if (!works)
        return count < 0 ? NULL : PyErr_NoMemory();
    while (at < count && parse(PyList_GetItem(list, at), &works[at]))
        at++;
    if (at == count) {
        Py_BEGIN_ALLOW_THREADS
        for (at = 0; at < count && !problem; at++) {
            works[at].folder = folder;
            problem = act(&works[at]);
        }
        Py_END_ALLOW_THREADS
        if (problem)
            fail(problem, &works[at - 1]);
    }
    free(works);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_write(PyObject *self, PyObject *list) { return each(list, AT_FDCWD, parse_file, write_file); }

static PyObject *py_move(PyObject *self, PyObject *args)
{
    int folder;
    PyObject *list;
    return PyArg_ParseTuple(args, "iO", &folder, &list) ? each(list, folder, parse_move, move_file) : NULL;
}

static PyMethodDef methods[] = {
    {"write", py_write, METH_O, "write([(path, address, bytes), ...]): each becomes a file of its own"},
    {"move", py_move, METH_VARARGS, "move(folder, [(path, name), ...]): each into an open folder, in this order"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lay", "Many small files in one turn.", -1, methods};

PyMODINIT_FUNC PyInit__lay(void) { return PyModule_Create(&module); }
