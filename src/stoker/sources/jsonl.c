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

/* Nonzero if any of eight bytes is a quote, a backslash, a control character or not ASCII. */
static uint64_t special(uint64_t word) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');
    return (((quote - ones) & ~quote) | ((slash - ones) & ~slash) | (word - ones * 0x20) | word) & tops;
}

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

/* After a backslash: one escape. Returns 0 for what is no escape or half a surrogate pair. */
static int take_escape(Cursor *c) {
    static const unsigned char meaning[128] = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', ['b'] = '\b',
                                               ['f'] = '\f', ['n'] = '\n', ['r'] = '\r', ['t'] = '\t'};
    if (c->at >= c->end) return 0;
    unsigned char letter = *c->at++;
    if (letter < 128 && meaning[letter]) {
        if (c->out) *c->out++ = meaning[letter];
        return 1;
    }
    unsigned code, low;
    if (letter != 'u' || c->end - c->at < 4 || !hex4(c->at, &code)) return 0;
    c->at += 4;
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

/* After the opening quote: the rest of a string, through its closing quote. */
static int take_string(Cursor *c) {
    for (;;) {
        while (c->end - c->at >= 8) {
            uint64_t word, found;
            memcpy(&word, c->at, 8);
            found = special(word);
            int plain = found ? __builtin_ctzll(found) / 8 : 8; /* the lowest mark is always a true one */
            if (c->out) { memcpy(c->out, &word, 8); c->out += plain; }
            c->at += plain;
            if (found) break;
        }
        if (c->at >= c->end) return 0;
        unsigned char byte = *c->at;
        if (byte == '"') { c->at++; return 1; }
        if (byte == '\\') { c->at++; if (!take_escape(c)) return 0; }
        else if (byte >= 0x80) { if (!take_wide(c)) return 0; }
        else if (byte < 0x20) return 0;
        else { if (c->out) *c->out++ = byte; c->at++; }
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

static PyMethodDef methods[] = {{"extract", extract, METH_VARARGS, "See the top of jsonl.c."}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jsonl", NULL, -1, methods};

PyMODINIT_FUNC PyInit__jsonl(void) { return PyModule_Create(&module); }
