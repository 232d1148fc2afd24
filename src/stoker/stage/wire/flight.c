/* Small files over several connections at once, without a turn of the interpreter for each.

   `ask` sends a request on every connection, `hear` reads the answers; who has answered is asked for the next
   file. Between the two others may be asked too: so a long way is waited for once. An answer is taken only if it is as plain as can be: 200, the length that is expected, not in
   chunks. Whatever else comes (a redirect, a refusal, another version, a closed connection) is left to Python,
   which asks again and knows what it means: the twin is `BatchTransfer._bring` in batch.py. With both on two
   cores, and the server too, a file of 64 KiB took 150 to 250 us through Python's lock, see
   docs/design/2026-11-15-stage.md.

   TLS is Python's: it connects and checks certificates, and lends its OpenSSL and the connection's SSL (see
   secure.py), so that a record of 16 KiB costs no turn of the interpreter. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
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
    void *ssl;        /* NULL: plain */
} Line;

/* OpenSSL as Python has loaded it; see ssl.h for the numbers. */
enum { WANT_READ = 2, SYSCALL = 5, ZERO_RETURN = 6 };
#define UNEXPECTED_EOF 294 /* the reason of an error: closed without a farewell */
static struct {
    int (*read)(void *, void *, int);
    int (*write)(void *, const void *, int);
    int (*error)(const void *, int);
    void (*clear)(void);
    unsigned long (*peek)(void);
    int (*pending)(const void *);
} tls;

static int64_t send_some(Line *line, const char *data, Py_ssize_t bytes)
{
    if (!line->ssl)
        return send(line->socket, data, (size_t)bytes, MSG_NOSIGNAL);
    tls.clear();
    return tls.write(line->ssl, data, bytes > INT32_MAX ? INT32_MAX : (int)bytes);
}

static int send_all(Line *line, const char *data, Py_ssize_t bytes)
{
    while (bytes > 0) {
        int64_t sent = send_some(line, data, bytes);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return 0;
        data += sent, bytes -= sent;
    }
    return 1;
}

/* Some bytes, 0 at the end, or why not. */
static int64_t receive_tls(void *ssl, char *to, int64_t bytes)
{
    for (;;) {
        tls.clear();
        errno = 0;
        int got = tls.read(ssl, to, bytes > INT32_MAX ? INT32_MAX : (int)bytes);
        if (got > 0)
            return got;
        int why = tls.error(ssl, got);
        if (why == WANT_READ && errno == EINTR)
            continue;
        if (why == WANT_READ)
            return LATE;
        int ended = why == ZERO_RETURN || (why == SYSCALL && !errno) || (tls.peek() & 0x7fffff) == UNEXPECTED_EOF;
        tls.clear();
        return ended ? 0 : FAILED;
    }
}

/* Some bytes, or why not. Acknowledged at once: see Connection._hurry in http.py. */
static int64_t receive(const Line *line, char *to, int64_t bytes, int flags)
{
    int yes = 1;
    setsockopt(line->socket, IPPROTO_TCP, TCP_QUICKACK, &yes, sizeof yes);
    if (line->ssl) {
        int64_t got = receive_tls(line->ssl, to, bytes);
        return got ? got : FAILED;
    }
    for (;;) {
        ssize_t got = recv(line->socket, to, (size_t)bytes, flags);
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
        } else if (value_of(at, stop, "transfer-encoding", &bytes) || value_of(at, stop, "content-encoding", &bytes))
            return 0;
        else if ((value = value_of(at, stop, "connection", &bytes))) /* it may say close */
            line->open = bytes == 10 && !strncasecmp(value, "keep-alive", 10);
        else if (ask->etag_bytes && (value = value_of(at, stop, "etag", &bytes)) &&
                 (bytes != ask->etag_bytes || memcmp(value, ask->etag, (size_t)bytes)))
            return 0;
    }
    return has_length;
}

static double seconds_since(const struct timespec *began)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - began->tv_sec) + (double)(now.tv_nsec - began->tv_nsec) / 1e9;
}

/* How long the socket would wait for a byte. */
static double patience(int socket)
{
    struct timeval window = {0, 0};
    socklen_t size = sizeof window;
    if (getsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &window, &size))
        return 0;
    return (double)window.tv_sec + (double)window.tv_usec / 1e6;
}

/* Whether less than LOW_SPEED came over that time: see http.py. */
static int is_slow(int socket, const struct timespec *began, int64_t got)
{
    double took = seconds_since(began), limit = patience(socket);
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
        int64_t more = got < HEAD ? receive(line, head + got, HEAD + ask->bytes - got, 0) : ODD;
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
        int64_t more = receive(line, head + got, whole - got, MSG_WAITALL);
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
static int is_quiet(const Line *line)
{
    char byte;
    if (line->ssl && tls.pending(line->ssl))
        return 0;
    return recv(line->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

static void ask_for(Line *line, Ask *ask)
{
    line->open = 0; /* until its answer was read */
    ask->place = send_all(line, ask->request, ask->request_bytes) ? FAILED : UNASKED;
}

/* How long nothing came; 0 if something was there already. */
static double wait_for(const Line *line)
{
    struct pollfd waiting = {line->socket, POLLIN, 0};
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    if (poll(&waiting, 1, 0))
        return 0;
    while (poll(&waiting, 1, (int)(1e3 * patience(line->socket))) < 0 && errno == EINTR)
        continue;
    return seconds_since(&began);
}

/* Ask i travels on line i % lines; the first of each line was sent. After an odd answer, or when nothing comes, no
   more is asked. Returns how long the first answer was waited for. */
static double hear_all(Line *lines, int line_count, Ask *asks, int count, char *memory)
{
    int odd = 0, late = 0;
    double waited = count ? wait_for(&lines[0]) : 0;
    for (int next = line_count; next < count + line_count; next++) {
        Line *line = &lines[next % line_count];
        Ask *due = &asks[next - line_count];
        if (next - line_count < count && due->place != UNASKED && !late) {
            due->place = hear(line, due, memory);
            odd |= due->place == ODD;
            late |= due->place == LATE;
        }
        if (next < count && !odd && !late && line->open && is_quiet(line))
            ask_for(line, &asks[next]);
    }
    return waited;
}

static int parse(PyObject *sockets, PyObject *list, Line *lines, Ask *asks, int64_t room)
{
    int64_t slot = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(sockets); i++) {
        unsigned long long ssl;
        if (!PyArg_ParseTuple(PyList_GetItem(sockets, i), "iK", &lines[i].socket, &ssl))
            return 0;
        lines[i].open = 0; /* until an answer was read to its end */
        lines[i].ssl = tls.read ? (void *)(uintptr_t)ssl : NULL;
        if (ssl && !tls.read) {
            PyErr_SetString(PyExc_ValueError, "no TLS was lent");
            return 0;
        }
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

/* What both calls take: connections, requests, and for `hear` the memory. */
typedef struct {
    Line *lines;
    Ask *asks;
    int line_count, count;
} Flight;

static int begin(Flight *flight, PyObject *sockets, PyObject *list, int64_t room)
{
    Py_ssize_t line_count = PyList_Size(sockets), count = PyList_Size(list);
    *flight = (Flight){NULL, NULL, (int)line_count, (int)count};
    if (line_count < 1 || count < line_count || count > INT32_MAX / 2) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there must be a connection, and a file for each");
        return 0;
    }
    flight->lines = calloc((size_t)line_count, sizeof(Line));
    flight->asks = calloc((size_t)count, sizeof(Ask));
    if (flight->lines && flight->asks)
        return parse(sockets, list, flight->lines, flight->asks, room);
    PyErr_NoMemory();
    return 0;
}

static void end(Flight *flight)
{
    free(flight->lines);
    free(flight->asks);
}

static PyObject *py_ask(PyObject *self, PyObject *args)
{
    PyObject *sockets, *list, *result = NULL;
    Flight flight;
    if (!PyArg_ParseTuple(args, "OO", &sockets, &list))
        return NULL;
    if (begin(&flight, sockets, list, INT64_MAX)) {
        Py_BEGIN_ALLOW_THREADS
        for (int i = 0; i < flight.line_count; i++) /* TLS has words of its own to say after its beginning */
            if (flight.lines[i].ssl || is_quiet(&flight.lines[i]))
                ask_for(&flight.lines[i], &flight.asks[i]);
        Py_END_ALLOW_THREADS
        result = numbers(flight.asks, sizeof(Ask), flight.count, 0);
    }
    end(&flight);
    return result;
}

static PyObject *py_hear(PyObject *self, PyObject *args)
{
    PyObject *sockets, *list, *asked, *result = NULL;
    unsigned long long memory;
    long long room;
    double waited;
    Flight flight;
    if (!PyArg_ParseTuple(args, "OOOKL", &sockets, &list, &asked, &memory, &room))
        return NULL;
    if (begin(&flight, sockets, list, room)) {
        for (int i = 0; i < flight.count && i < PyList_Size(asked); i++)
            flight.asks[i].place = PyLong_AsLongLong(PyList_GetItem(asked, i));
        Py_BEGIN_ALLOW_THREADS
        waited = hear_all(flight.lines, flight.line_count, flight.asks, flight.count, (char *)(uintptr_t)memory);
        Py_END_ALLOW_THREADS
        PyObject *places = numbers(flight.asks, sizeof(Ask), flight.count, 0);
        PyObject *open = places ? numbers(flight.lines, sizeof(Line), flight.line_count, 1) : NULL;
        PyObject *wait = open ? PyFloat_FromDouble(waited) : NULL;
        result = wait ? PyTuple_Pack(3, places, open, wait) : NULL;
        Py_XDECREF(places);
        Py_XDECREF(open);
        Py_XDECREF(wait);
    }
    end(&flight);
    return result;
}

/* As recv with MSG_WAITALL: until all is there, or the socket's patience has ended. */
static int64_t fill(const Line *line, char *to, int64_t bytes, int all)
{
    int64_t got = 0;
    double limit = patience(line->socket);
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    while (got < bytes) {
        int64_t more = receive_tls(line->ssl, to + got, bytes - got);
        if (more <= 0)
            return got ? got : more;
        got += more;
        if (!all || (limit > 0 && seconds_since(&began) > limit))
            break;
    }
    return got;
}

static PyObject *py_read(PyObject *self, PyObject *args)
{
    Line line = {0, 0, NULL};
    unsigned long long ssl, memory;
    long long bytes;
    int all;
    if (!PyArg_ParseTuple(args, "iKKLp", &line.socket, &ssl, &memory, &bytes, &all))
        return NULL;
    if (!tls.read || !ssl) {
        PyErr_SetString(PyExc_ValueError, "no TLS was lent");
        return NULL;
    }
    line.ssl = (void *)(uintptr_t)ssl;
    Py_BEGIN_ALLOW_THREADS
    bytes = fill(&line, (char *)(uintptr_t)memory, bytes, all);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(bytes);
}

static PyObject *py_lend(PyObject *self, PyObject *args)
{
    unsigned long long at[6];
    if (!PyArg_ParseTuple(args, "KKKKKK", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5]))
        return NULL;
    *(void **)&tls.write = (void *)(uintptr_t)at[1];
    *(void **)&tls.error = (void *)(uintptr_t)at[2];
    *(void **)&tls.clear = (void *)(uintptr_t)at[3];
    *(void **)&tls.peek = (void *)(uintptr_t)at[4];
    *(void **)&tls.pending = (void *)(uintptr_t)at[5];
    *(void **)&tls.read = (void *)(uintptr_t)at[0];
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"ask", py_ask, METH_VARARGS,
     "ask([(socket, ssl), ...], [(request, bytes, etag), ...]): send the first request of each connection; what "
     "became of each (-1 unasked, -2 not heard yet)"},
    {"hear", py_hear, METH_VARARGS,
     "hear(connections, requests, asked, address, room): where each body lies in the memory or why not (-1 unasked, "
     "-2 failed, -3 late, -4 odd), which connections can be used again, seconds until the first byte came"},
    {"read", py_read, METH_VARARGS,
     "read(socket, ssl, address, bytes, all): so many bytes came over TLS, 0 at its end, -2 failed, -3 late"},
    {"lend", py_lend, METH_VARARGS,
     "lend(SSL_read, SSL_write, SSL_get_error, ERR_clear_error, ERR_peek_error, SSL_pending): where OpenSSL has these"},
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
