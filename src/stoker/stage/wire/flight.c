/* Small files over several connections at once, without a turn of the interpreter for each.

   A request goes out on every connection before the first answer is read; who has answered is asked for the
   next file. An answer is taken only if it is as plain as can be: 200, the length that is expected, not in
   chunks. Whatever else comes (a redirect, a refusal, another version, a closed connection) is left to Python,
   which asks again and knows what it means: the twin is `BatchTransfer._bring` in batch.py. With both on two
   cores, and the server too, a file of 64 KiB took 150 to 250 us through Python's lock, see
   docs/design/2026-11-15-stage.md. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>

#define LOW_SPEED 1024.0 /* bytes a second */
#define HEAD 4096 /* room for a head before each body; a longer one is for Python */

/* Instead of a place: nobody asked, the connection failed, nothing came for too long, it is for Python. */
enum { UNASKED = -1, FAILED = -2, LATE = -3, ODD = -4 };

typedef struct {
    const char *request, *etag; /* the answer must carry this ETag, if it carries one */
    Py_ssize_t request_bytes, etag_bytes;
    int64_t bytes, slot, place; /* slot: where head and body are received; place: of the body, or why not */
} Ask;

typedef struct {
    int socket, open; /* open: another request may be sent */
} Line;

static int send_all(int socket, const char *data, Py_ssize_t bytes)
{
    while (bytes > 0) {
        ssize_t sent = send(socket, data, (size_t)bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return 0;
        data += sent, bytes -= sent;
    }
    return 1;
}

/* Some bytes, or why not. Acknowledged at once: see Connection._hurry in http.py. */
static int64_t receive(int socket, char *to, int64_t bytes, int flags)
{
    int yes = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_QUICKACK, &yes, sizeof yes);
    for (;;) {
        ssize_t got = recv(socket, to, (size_t)bytes, flags);
        if (got > 0)
            return got;
        if (got < 0 && errno == EINTR)
            continue;
        return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? LATE : FAILED;
    }
}

/* The value of a header line, if it has this name (in lower case). */
static const char *value_of(const char *line, const char *end, const char *name, Py_ssize_t *bytes)
{
    size_t length = strlen(name);
    if ((size_t)(end - line) <= length || strncasecmp(line, name, length) || line[length] != ':')
        return NULL;
    for (line += length + 1; line < end && (*line == ' ' || *line == '\t');)
        line++;
    while (end > line && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *bytes = end - line;
    return line;
}

/* Whether a header line has a name and nothing odd about it: others might read odd ones in another way. */
static int is_field(const char *line, const char *end)
{
    const char *colon = memchr(line, ':', (size_t)(end - line));
    if (!colon || colon == line || memchr(line, '\n', (size_t)(end - line)))
        return 0;
    for (; line < colon; line++)
        if (*line == ' ' || *line == '\t')
            return 0;
    return 1;
}

static int is_number(const char *text, Py_ssize_t bytes, int64_t number)
{
    char said[24];
    int length = snprintf(said, sizeof said, "%lld", (long long)number);
    return bytes == length && !memcmp(text, said, (size_t)length);
}

/* Whether the head (up to its empty line) is that of a plain answer with this file. */
static int is_plain(const char *head, const char *end, const Ask *ask, Line *line)
{
    int has_length = 0;
    if (end - head < 13 || memcmp(head, "HTTP/1.1 200", 12) || (head[12] != ' ' && head[12] != '\r'))
        return 0;
    for (const char *at = head, *stop; at < end; at = stop + 2) {
        const char *value;
        Py_ssize_t bytes;
        if (!(stop = memmem(at, (size_t)(end - at), "\r\n", 2)))
            stop = end;
        if (at > head && !is_field(at, stop))
            return 0;
        if ((value = value_of(at, stop, "content-length", &bytes))) {
            if (has_length++ || !is_number(value, bytes, ask->bytes))
                return 0;
        } else if (value_of(at, stop, "transfer-encoding", &bytes))
            return 0;
        else if ((value = value_of(at, stop, "connection", &bytes))) /* it may say close */
            line->open = bytes == 10 && !strncasecmp(value, "keep-alive", 10);
        else if (ask->etag_bytes && (value = value_of(at, stop, "etag", &bytes)) &&
                 (bytes != ask->etag_bytes || memcmp(value, ask->etag, (size_t)bytes)))
            return 0;
    }
    return has_length;
}

/* Whether less than LOW_SPEED came over the time that the socket would wait for a byte: see http.py. */
static int is_slow(int socket, const struct timespec *began, int64_t got)
{
    struct timespec now;
    struct timeval window = {0, 0};
    socklen_t size = sizeof window;
    if (getsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &window, &size))
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double took = (double)(now.tv_sec - began->tv_sec) + (double)(now.tv_nsec - began->tv_nsec) / 1e9;
    double limit = (double)window.tv_sec + (double)window.tv_usec / 1e6;
    return limit > 0 && took > limit && (double)got < LOW_SPEED * took;
}

/* Read one answer; where its body lies, or why not. The line stays open if the next request may follow. */
static int64_t hear(Line *line, const Ask *ask, char *memory)
{
    char *head = memory + ask->slot, *end = NULL;
    int64_t got = 0, whole;
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    line->open = 1;
    while (!end) {
        int64_t more = got < HEAD ? receive(line->socket, head + got, HEAD + ask->bytes - got, 0) : ODD;
        if (more >= 0 && is_slow(line->socket, &began, got += more))
            more = LATE;
        if (more < 0) {
            line->open = 0;
            return more;
        }
        end = memmem(head, (size_t)(got < HEAD ? got : HEAD), "\r\n\r\n", 4);
    }
    whole = end + 4 - head + ask->bytes;
    if (!is_plain(head, end, ask, line) || got > whole) {
        line->open = 0;
        return ODD;
    }
    while (got < whole) {
        int64_t more = receive(line->socket, head + got, whole - got, MSG_WAITALL);
        if (more >= 0 && is_slow(line->socket, &began, got += more))
            more = LATE;
        if (more < 0) {
            line->open = 0;
            return more;
        }
    }
    return end + 4 - memory;
}

/* Whether nothing came that nobody asked for, which would be taken for the next answer. */
static int is_quiet(int socket)
{
    char byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

/* Ask i travels on line i % lines. After an odd answer, or when nothing comes, no more is asked. */
static void fly(Line *lines, int line_count, Ask *asks, int count, char *memory)
{
    int odd = 0, late = 0;
    for (int next = 0; next < count + line_count; next++) {
        Line *line = &lines[next % line_count];
        Ask *due = next >= line_count ? &asks[next - line_count] : NULL;
        if (due && due->place != UNASKED && !late) {
            due->place = hear(line, due, memory);
            odd |= due->place == ODD;
            late |= due->place == LATE;
        }
        if (next >= count || odd || late || !line->open || !is_quiet(line->socket))
            continue;
        line->open = 0; /* until its answer was read */
        asks[next].place = send_all(line->socket, asks[next].request, asks[next].request_bytes) ? FAILED : UNASKED;
    }
}

static int parse(PyObject *sockets, PyObject *list, Line *lines, Ask *asks, int64_t room)
{
    int64_t slot = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(sockets); i++) {
        lines[i].socket = (int)PyLong_AsLong(PyList_GetItem(sockets, i));
        lines[i].open = 1;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        Ask *ask = &asks[i];
        long long bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "y#Ly#", &ask->request, &ask->request_bytes, &bytes,
                              &ask->etag, &ask->etag_bytes))
            return 0;
        ask->bytes = bytes, ask->slot = slot, ask->place = UNASKED;
        if (bytes < 0 || bytes > room - HEAD - slot) {
            PyErr_SetString(PyExc_ValueError, "the files do not fit the memory");
            return 0;
        }
        slot += HEAD + bytes;
    }
    return !PyErr_Occurred();
}

static PyObject *numbers(const void *first, size_t stride, Py_ssize_t count, int is_line)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        const char *at = (const char *)first + (size_t)i * stride;
        long long number = is_line ? ((const Line *)at)->open : ((const Ask *)at)->place;
        if (PyList_SetItem(list, i, PyLong_FromLongLong(number))) {
            Py_DecRef(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *py_fly(PyObject *self, PyObject *args)
{
    PyObject *sockets, *list, *result = NULL;
    unsigned long long memory;
    long long room;
    if (!PyArg_ParseTuple(args, "OOKL", &sockets, &list, &memory, &room))
        return NULL;
    Py_ssize_t line_count = PyList_Size(sockets), count = PyList_Size(list);
    if (line_count < 1 || count < 0 || count > INT32_MAX / 2 || line_count > INT32_MAX / 2) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there must be a connection");
        return NULL;
    }
    Line *lines = calloc((size_t)line_count, sizeof(Line));
    Ask *asks = calloc((size_t)count + 1, sizeof(Ask));
    if (!lines || !asks)
        PyErr_NoMemory();
    else if (parse(sockets, list, lines, asks, room)) {
        Py_BEGIN_ALLOW_THREADS
        fly(lines, (int)line_count, asks, (int)count, (char *)(uintptr_t)memory);
        Py_END_ALLOW_THREADS
        PyObject *places = numbers(asks, sizeof(Ask), count, 0);
        PyObject *open = places ? numbers(lines, sizeof(Line), line_count, 1) : NULL;
        result = open ? PyTuple_Pack(2, places, open) : NULL;
        Py_XDECREF(places);
        Py_XDECREF(open);
    }
    free(lines);
    free(asks);
    return result;
}

static PyMethodDef methods[] = {
    {"fly", py_fly, METH_VARARGS,
     "fly(sockets, [(request, bytes, etag), ...], address, room): where each body lies in the memory or why not "
     "(-1 unasked, -2 failed, -3 late, -4 odd), and which sockets can be used again"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_flight",
                                    "Small files over several connections at once.", -1, methods};

PyMODINIT_FUNC PyInit__flight(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "HEAD", HEAD)) {
        Py_DecRef(made);
        return NULL;
    }
    return made;
}
