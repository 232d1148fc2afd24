/* extract(block, field, text, ends, places, odd) -> (documents, odd lines)

   The text field of each line of a JSONL block, unescaped, back to back into `text`. For document i,
   ends[i] is where its text ends there and places[i] where its line starts in the block. A line this
   code does not fully understand is left out and its start put into `odd`: the caller parses those
   with a complete JSON parser. So what is accepted here must be what that parser would give, and
   anything unusual may be refused: escapes in keys, a repeated field, very long numbers, deep nesting,
   lone surrogates, bytes that are not UTF-8.

   `text` must be as large as the block (unescaping never grows), and `ends`, `places` and `odd` hold
   a number per line. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef const unsigned char *Bytes;
enum { DEEPEST = 32, LONGEST_NUMBER = 40, LONGEST_EXPONENT = 2 }; /* such a number is never infinite */

typedef struct {
    Bytes at, end;      /* what is left of the line */
    unsigned char *out; /* where unescaped text goes, or NULL to only check */
} Cursor;

static void skip_space(Cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\r')) c->at++;
}

static int take(Cursor *c, char wanted) {
    skip_space(c);
    if (c->at >= c->end || *c->at != (unsigned char)wanted) return 0;
    c->at++;
    return 1;
}

/* Copies STEP bytes to `out`, if there is one, and counts those before the first that is a quote, a
   backslash, a control character or not ASCII. */
#ifdef __SSE2__
enum { STEP = 16 };
static int plain_bytes(Bytes at, unsigned char *out) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    if (out) _mm_storeu_si128((__m128i *)out, bytes);
    __m128i quote = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')), slash = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
    __m128i other = _mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20)); /* signed: what is not ASCII is negative */
    int marks = _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(quote, slash), other));
    return marks ? __builtin_ctz(marks) : STEP;
}
#else
enum { STEP = 8 };
static int plain_bytes(Bytes at, unsigned char *out) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t word;
    memcpy(&word, at, STEP);
    if (out) memcpy(out, &word, STEP);
    uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');
    uint64_t marks = (((quote - ones) & ~quote) | ((slash - ones) & ~slash) | (word - ones * 0x20) | word) & tops;
    return marks ? __builtin_ctzll(marks) / 8 : STEP; /* the lowest mark is always a true one */
}
#endif

static int hex4(Bytes p, unsigned *value) {
    *value = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char d = p[i];
        unsigned v = d >= '0' && d <= '9' ? d - '0' : (d | 32) >= 'a' && (d | 32) <= 'f' ? (d | 32) - 'a' + 10 : 99;
        if (v == 99) return 0;
        *value = *value * 16 + v;
    }
    return 1;
}

static unsigned char *put_utf8(unsigned char *out, unsigned code) {
    if (code < 0x80) *out++ = code;
    else if (code < 0x800) { *out++ = 0xC0 | code >> 6; *out++ = 0x80 | (code & 63); }
    else if (code < 0x10000) {
        *out++ = 0xE0 | code >> 12; *out++ = 0x80 | (code >> 6 & 63); *out++ = 0x80 | (code & 63);
    } else {
        *out++ = 0xF0 | code >> 18; *out++ = 0x80 | (code >> 12 & 63);
        *out++ = 0x80 | (code >> 6 & 63); *out++ = 0x80 | (code & 63);
    }
    return out;
}

static const unsigned char simple_escape[128] = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', ['b'] = '\b',
                                                 ['f'] = '\f', ['n'] = '\n', ['r'] = '\r', ['t'] = '\t'};

/* A four-digit \\u escape, or two of them that are a surrogate pair. Returns 0 for anything else. */
static int take_unicode_escape(Cursor *c) {
    unsigned code, low;
    if (c->end - c->at < 6 || c->at[1] != 'u' || !hex4(c->at + 2, &code)) return 0;
    c->at += 6;
    if (code >= 0xD800 && code < 0xE000) {
        if (code >= 0xDC00 || c->end - c->at < 6 || c->at[0] != '\\' || c->at[1] != 'u') return 0;
        if (!hex4(c->at + 2, &low) || low < 0xDC00 || low >= 0xE000) return 0;
        c->at += 6;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (c->out) c->out = put_utf8(c->out, code);
    return 1;
}

/* One character of two to four bytes, strictly UTF-8. */
static int take_wide(Cursor *c) {
    Bytes p = c->at;
    unsigned lead = p[0];
    int size = lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
    if (!size || c->end - p < size) return 0;
    for (int i = 1; i < size; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((lead == 0xE0 && p[1] < 0xA0) || (lead == 0xED && p[1] > 0x9F)) return 0; /* overlong, surrogate */
    if ((lead == 0xF0 && p[1] < 0x90) || (lead == 0xF4 && p[1] > 0x8F)) return 0; /* overlong, too large */
    if (c->out) { memcpy(c->out, p, size); c->out += size; }
    c->at += size;
    return 1;
}

/* After the opening quote: the rest of a string, through its closing quote. The cursor is kept in locals
   on the way: a store through `out` might alias it, and the compiler would load it again each time. */
static int take_string(Cursor *c) {
    Bytes at = c->at, end = c->end;
    unsigned char *out = c->out;
    for (;;) {
        int plain = STEP;
        while (plain == STEP && end - at >= STEP) {
            plain = plain_bytes(at, out);
            at += plain;
            if (out) out += plain;
        }
        if (at >= end) return 0;
        unsigned char byte = *at;
        if (byte == '\\' && end - at >= 2 && at[1] < 128 && simple_escape[at[1]]) {
            if (out) *out++ = simple_escape[at[1]];
            at += 2;
        } else if (byte == '"') {
            c->at = at + 1;
            c->out = out;
            return 1;
        } else if (byte == '\\' || byte >= 0x80) {
            c->at = at;
            c->out = out;
            if (!(byte == '\\' ? take_unicode_escape(c) : take_wide(c))) return 0;
            at = c->at;
            out = c->out;
        } else if (byte < 0x20) {
            return 0;
        } else {
            if (out) *out++ = byte;
            at++;
        }
    }
}

static int take_digits(Cursor *c) {
    Bytes start = c->at;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') c->at++;
    return c->at > start;
}

static int take_number(Cursor *c) {
    Bytes start = c->at;
    if (*c->at == '-') c->at++;
    Bytes first = c->at;
    if (!take_digits(c) || (*first == '0' && c->at - first > 1)) return 0;
    if (c->at < c->end && *c->at == '.') { c->at++; if (!take_digits(c)) return 0; }
    if (c->at - start > LONGEST_NUMBER) return 0;
    if (c->at >= c->end || (*c->at | 32) != 'e') return 1;
    c->at++;
    if (c->at < c->end && (*c->at == '+' || *c->at == '-')) c->at++;
    Bytes exponent = c->at;
    return take_digits(c) && c->at - exponent <= LONGEST_EXPONENT;
}

static int take_word(Cursor *c, const char *word, int size) {
    if (c->end - c->at < size || memcmp(c->at, word, size)) return 0;
    c->at += size;
    return 1;
}

static int skip_value(Cursor *c, int depth);

static int skip_members(Cursor *c, int depth, int object) {
    char close = object ? '}' : ']';
    if (take(c, close)) return 1;
    do {
        if (object && !(take(c, '"') && take_string(c) && take(c, ':'))) return 0;
        if (!skip_value(c, depth + 1)) return 0;
    } while (take(c, ','));
    return take(c, close);
}

static int skip_value(Cursor *c, int depth) {
    skip_space(c);
    if (c->at >= c->end || depth > DEEPEST) return 0;
    switch (*c->at) {
    case '"': c->at++; return take_string(c);
    case '{': c->at++; return skip_members(c, depth, 1);
    case '[': c->at++; return skip_members(c, depth, 0);
    case 't': return take_word(c, "true", 4);
    case 'f': return take_word(c, "false", 5);
    case 'n': return take_word(c, "null", 4);
    default: return take_number(c);
    }
}

/* One line: its field into *out. Returns 0, with *out unchanged, for a line not fully understood. */
static int take_line(Bytes at, Bytes end, Bytes field, Py_ssize_t size, unsigned char **out) {
    Cursor c = {at, end, NULL};
    unsigned char *written = NULL;
    if (!take(&c, '{')) return 0;
    do {
        if (!take(&c, '"')) return 0;
        Bytes key = c.at;
        if (!take_string(&c)) return 0;
        Py_ssize_t key_size = c.at - 1 - key;
        if (memchr(key, '\\', key_size) || !take(&c, ':')) return 0;
        if (key_size == size && !memcmp(key, field, size)) {
            if (written || !take(&c, '"')) return 0;
            c.out = *out;
            if (!take_string(&c)) return 0;
            written = c.out;
            c.out = NULL;
        } else if (!skip_value(&c, 0)) return 0;
    } while (take(&c, ','));
    if (!written || !take(&c, '}')) return 0;
    skip_space(&c);
    if (c.at != c.end) return 0;
    *out = written;
    return 1;
}

static int is_blank(Bytes at, Bytes end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r')) at++;
    return at == end;
}

static PyObject *extract(PyObject *self, PyObject *args) {
    Py_buffer block, field, text, ends, places, odd;
    if (!PyArg_ParseTuple(args, "y*y*w*w*w*w*", &block, &field, &text, &ends, &places, &odd)) return NULL;
    Py_ssize_t documents = 0, odd_lines = 0;
    const Py_ssize_t most = ends.len / 8;
    int fits = text.len >= block.len && places.len >= ends.len && odd.len >= ends.len;
    Py_BEGIN_ALLOW_THREADS
    Bytes start = block.buf, at = start, stop = start + block.len;
    unsigned char *out = text.buf;
    while (fits && at < stop) {
        Bytes newline = memchr(at, '\n', stop - at), end = newline ? newline : stop;
        if (!is_blank(at, end)) {
            if (documents + odd_lines >= most) { fits = 0; break; }
            if (take_line(at, end, field.buf, field.len, &out)) {
                ((int64_t *)ends.buf)[documents] = out - (unsigned char *)text.buf;
                ((int64_t *)places.buf)[documents++] = at - start;
            } else {
                ((int64_t *)odd.buf)[odd_lines++] = at - start;
            }
        }
        at = end + 1;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&block); PyBuffer_Release(&field); PyBuffer_Release(&text);
    PyBuffer_Release(&ends); PyBuffer_Release(&places); PyBuffer_Release(&odd);
    if (!fits) { PyErr_SetString(PyExc_ValueError, "a buffer is too small for the block"); return NULL; }
    return Py_BuildValue("nn", documents, odd_lines);
}

/* lines(block) -> how many lines it has, the last one with or without its newline */
static PyObject *lines(PyObject *self, PyObject *args) {
    Py_buffer block;
    if (!PyArg_ParseTuple(args, "y*", &block)) return NULL;
    Py_ssize_t count = 1;
    Bytes at = block.buf, stop = at + block.len;
    while (at < stop && (at = memchr(at, '\n', stop - at))) { at++; count++; }
    PyBuffer_Release(&block);
    return PyLong_FromSsize_t(count);
}

static PyMethodDef methods[] = {{"extract", extract, METH_VARARGS, "See the top of jsonl.c."},
                                {"lines", lines, METH_VARARGS, "How many lines a block has."},
                                {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jsonl", NULL, -1, methods};

PyMODINIT_FUNC PyInit__jsonl(void) { return PyModule_Create(&module); }
