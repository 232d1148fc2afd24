/* Rows of documents: where each document goes, and the tokens, labels, positions and document numbers of the rows
   it is put into; Python's lock is not held meanwhile.

   numpy needs an index of 8 bytes for each token that it moves to a place of its own, and a pass for each column of
   a batch: 140 ns a token in all. Here a token is read once and everything about it written at once. The caller
   keeps the memory alive and has checked that every document lies inside of its chunk. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define IGNORED (-100)

enum { NO_LABELS, NEXT, SAME };

/* A stretch of one row: `length` tokens of it, of which the source has `known`. `labels` and the rest may be NULL. */
typedef struct {
    void *ids;
    int64_t *labels, *documents, *positions, *mask;
} Cells;

#define PUT(name, narrow, wide)                                                                              \
    static void name(const void *source, Py_ssize_t length, Py_ssize_t known, Cells to, int mode)            \
    {                                                                                                        \
        const narrow *in = source;                                                                           \
        wide *ids = to.ids;                                                                                  \
        for (Py_ssize_t i = 0; i < length; i++)                                                              \
            ids[i] = (wide)in[i];                                                                            \
        if (mode == NEXT) {                                                                                  \
            Py_ssize_t some = known - 1 < length ? known - 1 : length;                                       \
            for (Py_ssize_t i = 0; i < some; i++)                                                            \
                to.labels[i] = (int64_t)in[i + 1];                                                           \
            for (Py_ssize_t i = some > 0 ? some : 0; i < length; i++)                                        \
                to.labels[i] = IGNORED;                                                                      \
        }                                                                                                    \
        if (mode == SAME)                                                                                    \
            for (Py_ssize_t i = 0; i < length; i++)                                                          \
                to.labels[i] = (int64_t)in[i];                                                               \
    }

PUT(u16_i64, uint16_t, int64_t)
PUT(u16_i32, uint16_t, int32_t)
PUT(u16_u16, uint16_t, uint16_t)
PUT(i32_i64, int32_t, int64_t)
PUT(i32_i32, int32_t, int32_t)
PUT(u32_i64, uint32_t, int64_t)
PUT(u32_u32, uint32_t, uint32_t)
PUT(i64_i64, int64_t, int64_t)

typedef struct {
    const char *name;
    int wide; /* bytes a token */
    void (*put)(const void *, Py_ssize_t, Py_ssize_t, Cells, int);
} Way;

static const Way ways[] = {
    {"uint16 int64", 8, u16_i64}, {"uint16 int32", 4, u16_i32},   {"uint16 uint16", 2, u16_u16},
    {"int32 int64", 8, i32_i64},  {"int32 int32", 4, i32_i32},    {"uint32 int64", 8, u32_i64},
    {"uint32 uint32", 4, u32_u32}, {"int64 int64", 8, i64_i64},
};
enum { WAYS = sizeof ways / sizeof *ways };

static PyObject *py_way(PyObject *self, PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    for (int i = 0; i < WAYS; i++)
        if (!strcmp(ways[i].name, name))
            return PyLong_FromLong(i);
    Py_RETURN_NONE;
}

static Cells at(Cells cells, Py_ssize_t place, int wide)
{
    Cells moved = cells;
    moved.ids = (char *)cells.ids + place * wide;
    if (cells.labels)
        moved.labels += place;
    if (cells.documents)
        moved.documents += place, moved.positions += place;
    if (cells.mask)
        moved.mask += place;
    return moved;
}

static void put_padding(Cells to, Py_ssize_t count, int wide, int64_t pad)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (wide == 8)
            ((int64_t *)to.ids)[i] = pad;
        else if (wide == 4)
            ((int32_t *)to.ids)[i] = (int32_t)pad;
        else
            ((int16_t *)to.ids)[i] = (int16_t)pad;
    }
    if (to.labels)
        for (Py_ssize_t i = 0; i < count; i++)
            to.labels[i] = IGNORED;
    if (to.mask)
        memset(to.mask, 0, count * sizeof *to.mask);
}

static void number(Cells to, Py_ssize_t count, int64_t document)
{
    for (Py_ssize_t i = 0; to.documents && i < count; i++) {
        to.documents[i] = document;
        to.positions[i] = i;
    }
}

/* Parts come sorted by row and column, each row without gaps from its first column on; address 0: damaged. */
static PyObject *py_put(PyObject *self, PyObject *args)
{
    int way, mode, apart;
    long long pad;
    Py_ssize_t parts, rows, width;
    unsigned long long a, l, k, r, ids, labels, documents, positions, mask;
    if (!PyArg_ParseTuple(args, "iiiLnKKKKnnKKKKK", &way, &mode, &apart, &pad, &parts, &a, &l, &k, &r, &rows, &width,
                          &ids, &labels, &documents, &positions, &mask))
        return NULL;
    if (way < 0 || way >= WAYS || (mode != NO_LABELS && !labels)) {
        PyErr_SetString(PyExc_ValueError, "no such way");
        return NULL;
    }
    const int64_t *address = (int64_t *)(uintptr_t)a, *length = (int64_t *)(uintptr_t)l;
    const int64_t *known = (int64_t *)(uintptr_t)k, *row = (int64_t *)(uintptr_t)r;
    Cells all = {(void *)(uintptr_t)ids, (int64_t *)(uintptr_t)labels, (int64_t *)(uintptr_t)documents,
                 (int64_t *)(uintptr_t)positions, (int64_t *)(uintptr_t)mask};
    int wide = ways[way].wide;
    Py_ssize_t bad = -1, part = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t here = 0; here < rows && bad < 0; here++) {
        Py_ssize_t column = 0;
        int64_t document = 0;
        for (; part < parts && row[part] == here; part++) {
            if (length[part] < 0 || length[part] > width - column) {
                bad = part;
                break;
            }
            Cells to = at(all, here * width + column, wide);
            if (address[part])
                ways[way].put((void *)(uintptr_t)address[part], length[part], known[part], to, mode);
            else
                put_padding(to, length[part], wide, pad);
            if (mode == SAME && apart && length[part])
                to.labels[0] = IGNORED; /* a model that shifts would have the document before predict it */
            if (to.mask)
                for (Py_ssize_t i = 0; i < length[part]; i++)
                    to.mask[i] = address[part] != 0;
            number(to, length[part], document);
            column += length[part];
            document += length[part] > 0;
        }
        Cells to = at(all, here * width + column, wide);
        put_padding(to, width - column, wide, pad);
        number(to, width - column, document);
    }
    Py_END_ALLOW_THREADS
    if (bad >= 0 || part < parts) {
        PyErr_Format(PyExc_IndexError, "part %zd does not fit into its row", bad < 0 ? part : bad);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Best fit, decreasing: rows that have the same room left form a queue; a bit says which queues have any. */
typedef struct {
    int64_t *first, *last; /* of each queue; -1: none */
    int64_t *next;         /* of each row */
    uint64_t *some;
} Queues;

static void push(Queues q, int64_t room, int64_t row)
{
    if (!room)
        return;
    q.next[row] = -1;
    if (q.first[room] < 0)
        q.first[room] = row;
    else
        q.next[q.last[room]] = row;
    q.last[room] = row;
    q.some[room / 64] |= 1ull << room % 64;
}

static int64_t fullest(Queues q, int64_t room, int64_t words)
{
    int64_t word = room / 64;
    uint64_t bits = q.some[word] & (~0ull << room % 64);
    while (!bits && ++word < words)
        bits = q.some[word];
    return bits ? word * 64 + __builtin_ctzll(bits) : -1;
}

static int64_t pop(Queues q, int64_t room)
{
    int64_t row = q.first[room];
    q.first[room] = q.next[row];
    if (q.first[room] < 0)
        q.some[room / 64] &= ~(1ull << room % 64);
    return row;
}

static PyObject *py_best_fit(PyObject *self, PyObject *args)
{
    Py_ssize_t count, room;
    unsigned long long l, r, c;
    if (!PyArg_ParseTuple(args, "nnKKK", &count, &room, &l, &r, &c))
        return NULL;
    const int64_t *length = (int64_t *)(uintptr_t)l; /* descending, all from 1 to room */
    int64_t *row = (int64_t *)(uintptr_t)r, *column = (int64_t *)(uintptr_t)c;
    int64_t words = room / 64 + 1, rows = 0;
    Queues q = {malloc((room + 1) * 8), malloc((room + 1) * 8), malloc((count + 1) * 8), calloc(words, 8)};
    int is_bad = 0;
    if (q.first && q.last && q.next && q.some) {
        Py_BEGIN_ALLOW_THREADS
        memset(q.first, 0xff, (room + 1) * 8);
        for (Py_ssize_t i = 0; i < count; i++) {
            if (length[i] < 1 || length[i] > room) {
                is_bad = 1;
                break;
            }
            int64_t left = fullest(q, length[i], words);
            row[i] = left < 0 ? rows++ : pop(q, left);
            left = left < 0 ? room : left;
            column[i] = room - left;
            push(q, left - length[i], row[i]);
        }
        Py_END_ALLOW_THREADS
    } else
        is_bad = 2;
    free(q.first), free(q.last), free(q.next), free(q.some);
    if (is_bad == 2)
        return PyErr_NoMemory();
    if (is_bad) {
        PyErr_SetString(PyExc_ValueError, "a part is empty or longer than a row");
        return NULL;
    }
    return PyLong_FromLongLong(rows);
}

/* Datasets of a blend, slot by slot: of those that may come, the one that is due first. `belong` is [datasets,
   slots + 1]: how often each is to have come before a slot. */
static PyObject *py_earliest(PyObject *self, PyObject *args)
{
    Py_ssize_t datasets, slots;
    unsigned long long b, c, u, f, e, o;
    if (!PyArg_ParseTuple(args, "nnKKKKKK", &datasets, &slots, &b, &c, &u, &f, &e, &o))
        return NULL;
    const double *belong = (double *)(uintptr_t)b;
    int64_t *counts = (int64_t *)(uintptr_t)c, *out = (int64_t *)(uintptr_t)o;
    const int64_t *due = (int64_t *)(uintptr_t)u, *ends = (int64_t *)(uintptr_t)e;
    int64_t *next = (int64_t *)(uintptr_t)f; /* in `due`, of each dataset */
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t slot = 0; slot < slots; slot++) {
        Py_ssize_t chosen = -1, any = 0;
        for (Py_ssize_t i = 0; i < datasets; i++) {
            if (belong[i * (slots + 1) + slot + 1] > (double)counts[i] && (chosen < 0 || due[next[i]] < due[next[chosen]]))
                chosen = i;
            if (due[next[i]] < due[next[any]])
                any = i;
        }
        chosen = chosen < 0 ? any : chosen;
        counts[chosen]++;
        next[chosen] += next[chosen] + 1 < ends[chosen];
        out[slot] = chosen;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"earliest", py_earliest, METH_VARARGS, "earliest(datasets, slots, ...): the dataset of a blend at each slot"},
    {"way", py_way, METH_VARARGS, "way('narrow wide'): how tokens of one type become another, or None"},
    {"put", py_put, METH_VARARGS, "put(way, mode, apart, pad, parts, ...): fill rows with parts of documents"},
    {"best_fit", py_best_fit, METH_VARARGS, "best_fit(count, room, lengths, rows, columns): how many rows it takes"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pack", "Rows of documents.", -1, methods};

PyMODINIT_FUNC PyInit__pack(void) { return PyModule_Create(&module); }
