/* Whether a JPEG is whole, before a card decodes it: a card says nothing of broken bytes and makes a picture of
   them. Each code of its scan is read, and nothing is made of it, at a few times the speed of decoding.

   What is found whole here is what libjpeg-turbo decodes without a word: one scan of baseline codes, in colours that
   no two decoders understand differently. All else is left to those who decode on the processor, and to what they
   say of it. Python's lock is not held; addresses are passed as integers, as in gather.c. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "segments.h"

#define MOST_SIDE 65500 /* pixels: libjpeg's limit, a little below the format's */
#define ENDED 128 /* how far the end of a block leads: beyond what runs of zeros reach, from wherever it is */
#define FAST 13 /* bits that are looked up at once, as many codes as end in them; longer ones are rare */

struct step {
    uint8_t bits;    /* that one code and its number take; 0: it is longer than what was looked at */
    uint8_t length;  /* of those, the code's */
    uint8_t forward; /* how far it leads in its block */
};

struct steps {
    uint8_t bits;    /* that up to three take */
    uint8_t before;  /* how far all but the last lead: the last is not another block's */
    uint8_t forward; /* how far all lead */
};

struct codes {
    struct step one[1 << FAST];
    struct steps some[1 << FAST];
    int32_t first[18], last[18]; /* of each length, from the first code to the one behind the last */
    int32_t at[18];              /* where the values of a length begin */
    uint8_t counts[16], values[256];           /* as the picture has them */
    uint8_t made_counts[16], made_values[256]; /* what all of the above was made of */
    int is_there, is_made;
};

struct picture {
    unsigned width, height, channels, restart;
    unsigned ids[3], across[3], down[3], tables[3];
    int has_sizes[4]; /* of quantisation */
    int is_jfif, adobe, orientation, has_exif; /* adobe: -1 where it says nothing */
};

struct tables {
    struct codes dc[4], ac[4]; /* kept from picture to picture: most have the same */
};

struct bits {
    const uint8_t *at, *stop;
    uint64_t held; /* the next bits, from the top */
    int count;     /* below 0: more were taken than there are */
};

/* ---- tables --------------------------------------------------------------------------------------------- */

/* What a code takes and where it leads: `value` is a run of zeros and the bits of a number. */
static struct step step_of(int length, unsigned value, int is_dc)
{
    unsigned run = value >> 4, size = value & 15, forward = run + 1;
    if (is_dc) {
        size = value;
        forward = 1;
    } else if (!size)
        forward = run == 15 ? 16 : ENDED; /* all others end their block */
    return (struct step){(uint8_t)(length + size), (uint8_t)length, (uint8_t)forward};
}

/* All codes that end within the bits of each place. */
static void make_steps(struct codes *codes)
{
    for (unsigned place = 0; place < 1 << FAST; place++) {
        struct steps some = {0, 0, 0};
        unsigned used = 0, forward = 0;
        for (int n = 0; n < 3; n++) {
            if (used >= FAST || forward >= 64)
                break;
            struct step one = codes->one[place << used & ((1 << FAST) - 1)];
            if (!one.bits || used + one.length > FAST)
                break;
            some.before = (uint8_t)forward;
            used += one.bits;
            forward += one.forward;
        }
        some.bits = (uint8_t)used;
        some.forward = (uint8_t)forward;
        codes->some[place] = some;
    }
}

/* Look-ups for what the picture has; they are there already if the one before had the same. */
static int make_codes(struct codes *codes, int is_dc)
{
    unsigned total = 0;
    for (int n = 0; n < 16; n++)
        total += codes->counts[n];
    if (codes->is_made && !memcmp(codes->made_counts, codes->counts, 16) &&
        !memcmp(codes->made_values, codes->values, total))
        return 0;
    int32_t code = 0;
    unsigned at = 0;
    codes->is_made = 0;
    memset(codes->one, 0, sizeof codes->one);
    for (int length = 1; length <= 16; length++) {
        codes->first[length] = code;
        codes->at[length] = (int32_t)at;
        for (int n = 0; n < codes->counts[length - 1]; n++, code++, at++) {
            unsigned value = codes->values[at];
            if ((is_dc && value > 15) || code >= (1 << length) - 1) /* none is all ones */
                return -1;
            if (length <= FAST)
                for (int k = 0; k < 1 << (FAST - length); k++)
                    codes->one[(code << (FAST - length)) + k] = step_of(length, value, is_dc);
        }
        codes->last[length] = code;
        code <<= 1;
    }
    if (!is_dc)
        make_steps(codes);
    memcpy(codes->made_counts, codes->counts, 16);
    memcpy(codes->made_values, codes->values, total);
    codes->is_made = 1;
    return 0;
}

/* Only noted: a picture may have many more than its scan takes. */
static int read_tables(struct tables *tables, const uint8_t *at, size_t size)
{
    while (size) {
        if (size < 17)
            return -1;
        unsigned which = at[0] & 15, kind = at[0] >> 4, total = 0;
        for (int n = 0; n < 16; n++)
            total += at[1 + n];
        if (which > 3 || kind > 1 || total > 256 || size - 17 < total)
            return -1;
        struct codes *codes = kind ? &tables->ac[which] : &tables->dc[which];
        memcpy(codes->counts, at + 1, 16);
        memcpy(codes->values, at + 17, total);
        codes->is_there = 1;
        at += 17 + total;
        size -= 17 + total;
    }
    return 0;
}

static int read_sizes(struct picture *picture, const uint8_t *at, size_t size)
{
    for (; size >= 65; at += 65, size -= 65) {
        if (at[0] > 3) /* of 16 bits, or none that there is */
            return -1;
        picture->has_sizes[at[0]] = 1;
    }
    return size ? -1 : 0;
}

/* ---- codes ---------------------------------------------------------------------------------------------- */

static inline void fill(struct bits *bits)
{
    while (bits->count <= 56) {
        if (bits->stop - bits->at >= 8) { /* as many whole bytes as there is room for, if none of them is 0xFF */
            uint64_t next;
            memcpy(&next, bits->at, 8);
            if (!((next & ~(next + 0x0101010101010101u)) & 0x8080808080808080u)) {
                int bytes = (64 - bits->count) >> 3;
                bits->held |= __builtin_bswap64(next) >> bits->count;
                bits->at += bytes;
                bits->count += bytes << 3;
                if (bits->count < 64) /* what did not fit is asked for again */
                    bits->held &= ~(uint64_t)0 << (64 - bits->count);
                return;
            }
        }
        if (bits->stop - bits->at < 1)
            return;
        uint8_t byte = *bits->at;
        if (byte == 0xFF) {
            if (bits->stop - bits->at < 2 || bits->at[1] != 0)
                return; /* a marker */
            bits->at++;
        }
        bits->at++;
        bits->held |= (uint64_t)byte << (56 - bits->count);
        bits->count += 8;
    }
}

static inline void drop(struct bits *bits, int count)
{
    bits->held <<= count;
    bits->count -= count;
}

/* A code that is longer than what is looked up at once; of no bits where there is none. */
static struct step long_step(const struct bits *bits, const struct codes *codes, int is_dc)
{
    for (int length = FAST + 1; length <= 16; length++) {
        int32_t code = (int32_t)(bits->held >> (64 - length));
        if (code < codes->last[length] && code >= codes->first[length])
            return step_of(length, codes->values[codes->at[length] + code - codes->first[length]], is_dc);
    }
    return (struct step){0, 0, 0};
}

static inline int take_one(struct bits *bits, const struct codes *codes, int is_dc)
{
    struct step one = codes->one[bits->held >> (64 - FAST)];
    if (!one.bits)
        one = long_step(bits, codes, is_dc);
    drop(bits, one.bits);
    return one.bits ? one.forward : -1;
}

static inline int read_block(struct bits *bits, const struct codes *dc, const struct codes *ac)
{
    if (bits->count < 32)
        fill(bits);
    if (take_one(bits, dc, 1) < 0)
        return -1;
    int at = 1;
    while (at < 64) {
        if (bits->count < 32) {
            if (bits->count < 0)
                return -1;
            fill(bits);
        }
        struct steps some = ac->some[bits->held >> (64 - FAST)];
        if (some.bits && at + some.before < 64) {
            drop(bits, some.bits);
            at += some.forward;
            continue;
        }
        int forward = take_one(bits, ac, 0);
        if (forward < 0)
            return -1;
        at += forward;
    }
    return bits->count < 0 || (at > 64 && at < ENDED) ? -1 : 0; /* a run beyond the block: decoders differ there */
}

/* All codes of the scan, up to the end of the picture. */
static int read_scan(const struct picture *picture, const struct tables *tables, const uint8_t *at,
                     const uint8_t *stop)
{
    struct bits bits = {at, stop, 0, 0};
    unsigned across = 1, down = 1, many = picture->channels == 3;
    if (many) {
        across = picture->across[0];
        down = picture->down[0];
    }
    uint64_t units = (uint64_t)((picture->width + 8 * across - 1) / (8 * across)) *
                     ((picture->height + 8 * down - 1) / (8 * down));
    const struct codes *dc[3], *ac[3];
    unsigned blocks[3];
    for (unsigned n = 0; n < picture->channels; n++) {
        dc[n] = &tables->dc[picture->tables[n] >> 4];
        ac[n] = &tables->ac[picture->tables[n] & 15];
        blocks[n] = many ? picture->across[n] * picture->down[n] : 1;
    }
    unsigned expected = 0;
    for (uint64_t unit = 0; unit < units; unit++) {
        if (picture->restart && unit && unit % picture->restart == 0) {
            if (bits.count >= 8) /* whole bytes that nobody asked for */
                return -1;
            if (bits.stop - bits.at < 2 || bits.at[0] != 0xFF || bits.at[1] != 0xD0 + expected)
                return -1;
            bits.at += 2;
            bits.held = 0;
            bits.count = 0;
            expected = (expected + 1) & 7;
        }
        for (unsigned n = 0; n < picture->channels; n++)
            for (unsigned block = 0; block < blocks[n]; block++)
                if (read_block(&bits, dc[n], ac[n]))
                    return -1;
    }
    if (bits.count >= 8)
        return -1;
    return bits.stop - bits.at >= 2 && bits.at[0] == 0xFF && bits.at[1] == 0xD9 ? 0 : -1;
}

/* ---- segments ------------------------------------------------------------------------------------------- */

static int read_frame(struct picture *picture, const uint8_t *at, size_t size)
{
    if (picture->width || size < 6 || at[0] != 8)
        return -1;
    picture->height = big16(at + 1);
    picture->width = big16(at + 3);
    picture->channels = at[5];
    if (!picture->width || !picture->height || picture->width > MOST_SIDE || picture->height > MOST_SIDE ||
        (picture->channels != 1 && picture->channels != 3) ||
        size != 6 + 3 * (size_t)picture->channels)
        return -1;
    for (unsigned n = 0; n < picture->channels; n++) {
        const uint8_t *one = at + 6 + 3 * n;
        picture->ids[n] = one[0];
        picture->across[n] = one[1] >> 4;
        picture->down[n] = one[1] & 15;
        unsigned most = n || picture->channels == 1 ? 1 : 2; /* chroma of one to a unit: what cards decode */
        if (picture->across[n] < 1 || picture->across[n] > most || picture->down[n] < 1 || picture->down[n] > most)
            return -1;
        if (one[2] > 3 || !picture->has_sizes[one[2]])
            return -1;
    }
    return 0;
}

static int read_start(struct picture *picture, struct tables *tables, const uint8_t *at, size_t size)
{
    if (!picture->width || size != 4 + 2 * (size_t)picture->channels || at[0] != picture->channels)
        return -1;
    for (unsigned n = 0; n < picture->channels; n++) {
        unsigned dc = at[2 + 2 * n] >> 4, ac = at[2 + 2 * n] & 15;
        if (at[1 + 2 * n] != picture->ids[n] || dc > 3 || ac > 3 || !tables->dc[dc].is_there ||
            !tables->ac[ac].is_there || make_codes(&tables->dc[dc], 1) || make_codes(&tables->ac[ac], 0))
            return -1;
        picture->tables[n] = at[2 + 2 * n];
    }
    const uint8_t *rest = at + 1 + 2 * picture->channels;
    return rest[0] == 0 && rest[1] == 63 && rest[2] == 0 ? 0 : -1;
}

/* Whether three channels are a brightness and two colours, for all who look at them. */
static int is_usual(const struct picture *picture)
{
    if (picture->channels == 1)
        return 1;
    if (picture->ids[0] == picture->ids[1] || picture->ids[1] == picture->ids[2] ||
        picture->ids[0] == picture->ids[2])
        return 0;
    if (picture->adobe >= 0)
        return picture->adobe == 1;
    return picture->is_jfif || (picture->ids[0] == 1 && picture->ids[1] == 2 && picture->ids[2] == 3);
}

/* `is_known`: its codes have been read before, and are not read again. */
static int read_picture(struct picture *picture, struct tables *tables, const uint8_t *bytes, size_t size, int is_known)
{
    size_t at = 2;
    memset(picture, 0, sizeof *picture);
    for (int n = 0; n < 4; n++)
        tables->dc[n].is_there = tables->ac[n].is_there = 0;
    if (size < 4 || bytes[0] != 0xFF || bytes[1] != 0xD8)
        return -1;
    picture->adobe = -1;
    picture->orientation = 1;
    while (at + 4 <= size) {
        if (bytes[at] != 0xFF)
            return -1;
        uint8_t marker = bytes[at + 1];
        if (marker == 0xFF) { /* filled up */
            at++;
            continue;
        }
        size_t length = big16(bytes + at + 2);
        const uint8_t *inside = bytes + at + 4;
        if (length < 2 || at + 2 + length > size)
            return -1;
        length -= 2;
        int wrong = 0;
        if (marker == 0xC4)
            wrong = is_known ? 0 : read_tables(tables, inside, length);
        else if (marker == 0xDB)
            wrong = read_sizes(picture, inside, length);
        else if (marker == 0xC0)
            wrong = read_frame(picture, inside, length);
        else if (marker == 0xDD) {
            wrong = length != 2;
            picture->restart = wrong ? 0 : big16(inside);
        } else if (marker == 0xDA) {
            if (is_known)
                return picture->width ? 0 : -1;
            if (read_start(picture, tables, inside, length) || !is_usual(picture))
                return -1;
            return read_scan(picture, tables, inside + length, bytes + size);
        } else if (marker == 0xE0) {
            picture->is_jfif |= length >= 14 && !memcmp(inside, "JFIF", 5);
        } else if (marker == 0xE1) {
            if (!picture->has_exif && length >= 6 && !memcmp(inside, "Exif\0\0", 6)) {
                if (picture->width) /* behind the frame, where some look for it and others do not */
                    return -1;
                picture->orientation = orientation_in(inside, length);
                picture->has_exif = 1;
            }
        } else if (marker == 0xEE) {
            if (length >= 12 && !memcmp(inside, "Adobe", 5))
                picture->adobe = inside[11];
        } else
            wrong = !(marker > 0xE0 && marker < 0xF0) && marker != 0xFE; /* what applications say, and comments */
        if (wrong)
            return -1;
        at += 4 + length;
    }
    return -1;
}

/* ---- for Python ----------------------------------------------------------------------------------------- */

/* survey(count, addresses, sizes, known, found): of as many JPEGs, whose addresses, sizes (64 bits each) and whether
   they were found whole before (a byte each) lie at these addresses; width, height and orientation (32 bits each) go to
   `found`, and a width of 0 where it is left to the processor */
static PyObject *survey(PyObject *self, PyObject *args)
{
    Py_ssize_t count;
    unsigned long long given[4];
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKK", &count, &given[0], &given[1], &given[2], &given[3]))
        return NULL;
    const int64_t *addresses = (const int64_t *)(uintptr_t)given[0], *sizes = (const int64_t *)(uintptr_t)given[1];
    const uint8_t *known = (const uint8_t *)(uintptr_t)given[2];
    int32_t *found = (int32_t *)(uintptr_t)given[3];
    struct tables *tables = PyMem_Calloc(1, sizeof *tables);
    if (!tables)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0; n < count; n++, found += 3) {
        struct picture picture;
        const uint8_t *bytes = (const uint8_t *)(uintptr_t)addresses[n];
        int wrong = read_picture(&picture, tables, bytes, sizes[n] < 0 ? 0 : (size_t)sizes[n], known[n]);
        found[0] = wrong ? 0 : (int32_t)picture.width;
        found[1] = wrong ? 0 : (int32_t)picture.height;
        found[2] = picture.orientation;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(tables);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"survey", survey, METH_VARARGS, "Size and orientation of JPEGs that are whole and of the usual kind."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_survey", .m_doc = "Whether JPEGs are whole.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__survey(void)
{
    return PyModuleDef_Init(&definition);
}
