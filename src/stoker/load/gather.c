/* Rows of tokens out of one stretch of memory, widened on the way; Python's lock is not held meanwhile.

   numpy gathers rows into an array of its own first and widens that: two passes, one of them through memory
   that is touched for nothing else. Here each token is read once and written once. The caller keeps the
   memory alive; addresses are passed as integers because the limited API of Python 3.10 has no buffers. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "stream.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

#define LINE 64   /* bytes of a cache line */
#define BLOCK 256 /* written at once, in whole lines */

/* Rows of 2049 tokens begin anywhere in a line, and a store across two lines costs twice. The lines of the row
   after this one are asked for as this one's are read: the processor's own prefetching stops at each page, and a
   whole row asked for at once is more than it takes. */
#define WIDEN(name, narrow, wide)                                                                            \
    FOR_EACH_CPU static void name(void *restrict target, const void *restrict source, Py_ssize_t count,     \
                                  const char *next)                                                          \
    {                                                                                                        \
        enum { EACH = BLOCK / sizeof(wide), READ = EACH * sizeof(narrow) };                                  \
        wide *out = target;                                                                                  \
        const narrow *in = source;                                                                           \
        for (; count && (uintptr_t)out % LINE; count--)                                                      \
            *out++ = *in++;                                                                                  \
        for (; count >= EACH; count -= EACH, out += EACH, in += EACH, next += READ) {                        \
            wide *lines = __builtin_assume_aligned(out, LINE);                                               \
            for (int at = 0; at < READ; at += LINE)                                                          \
                __builtin_prefetch(next + at);                                                               \
            for (int i = 0; i < EACH; i++)                                                                   \
                lines[i] = in[i];                                                                            \
        }                                                                                                    \
        for (; count; count--)                                                                               \
            *out++ = *in++;                                                                                  \
    }

WIDEN(u16_to_i64, uint16_t, int64_t)
WIDEN(u16_to_i32, uint16_t, int32_t)
WIDEN(i32_to_i64, int32_t, int64_t)
WIDEN(u32_to_i64, uint32_t, int64_t)

/* Copies ask for the beginning of the next row only (5.6 -> 6.9 GB/s out of memory that no cache holds; more than
   this brought no more). */
static void copy(void *target, const void *source, Py_ssize_t bytes, const char *next)
{
    for (Py_ssize_t at = 0; at < bytes && at < 2048; at += LINE)
        __builtin_prefetch(next + at);
    stream(target, source, bytes);
}

static void copy_16(void *to, const void *from, Py_ssize_t n, const char *next) { copy(to, from, n * 2, next); }
static void copy_32(void *to, const void *from, Py_ssize_t n, const char *next) { copy(to, from, n * 4, next); }
static void copy_64(void *to, const void *from, Py_ssize_t n, const char *next) { copy(to, from, n * 8, next); }

typedef struct {
    const char *name;
    int narrow, wide; /* bytes a token */
    void (*row)(void *, const void *, Py_ssize_t, const char *next);
} Way;

static const Way ways[] = {
    {"uint16 int64", 2, 8, u16_to_i64}, {"uint16 int32", 2, 4, u16_to_i32}, {"int32 int64", 4, 8, i32_to_i64},
    {"uint32 int64", 4, 8, u32_to_i64}, {"uint16 uint16", 2, 2, copy_16},   {"int32 int32", 4, 4, copy_32},
    {"uint32 uint32", 4, 4, copy_32},   {"int64 int64", 8, 8, copy_64},
};

static PyObject *py_way(PyObject *self, PyObject *args)
{
    const char *narrow, *wide;
    if (!PyArg_ParseTuple(args, "ss", &narrow, &wide))
        return NULL;
    size_t length = strlen(narrow);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if (!strncmp(ways[i].name, narrow, length) && ways[i].name[length] == ' ' &&
            !strcmp(ways[i].name + length + 1, wide))
            return PyLong_FromSize_t(i);
    Py_RETURN_NONE;
}

static PyObject *py_gather(PyObject *self, PyObject *args)
{
    int way;
    unsigned long long source, places, target;
    Py_ssize_t tokens, rows, length, bad = -1;
    if (!PyArg_ParseTuple(args, "iKnKnnK", &way, &source, &tokens, &places, &rows, &length, &target))
        return NULL;
    if (way < 0 || way >= (int)(sizeof ways / sizeof *ways)) {
        PyErr_SetString(PyExc_ValueError, "no such way");
        return NULL;
    }
    const Way *how = &ways[way];
    const char *in = (const char *)(uintptr_t)source;
    const int64_t *place = (const int64_t *)(uintptr_t)places;
    char *out = (char *)(uintptr_t)target;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++) {
        if (place[row] < 0 || place[row] > tokens - length) {
            bad = row;
            break;
        }
        const char *next = in + place[row + (row + 1 < rows)] * how->narrow; /* to ask for: any will do */
        how->row(out + row * length * how->wide, in + place[row] * how->narrow, length, next);
    }
    Py_END_ALLOW_THREADS
    if (bad >= 0) {
        PyErr_Format(PyExc_IndexError, "row %zd lies outside of the memory", bad);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"way", py_way, METH_VARARGS, "way(narrow, wide): how tokens of one type become another, or None"},
    {"gather", py_gather, METH_VARARGS,
     "gather(way, source, tokens, places, rows, length, target): copy `length` tokens from each place"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gather", "Rows of tokens, gathered and widened.",
                                    -1, methods};

PyMODINIT_FUNC PyInit__gather(void) { return PyModule_Create(&module); }
