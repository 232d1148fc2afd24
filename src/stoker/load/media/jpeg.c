/* A part of a JPEG, resized: the MCUs around a box are decoded, scaled down in the DCT where that is enough, and
   the box is resized with an antialiasing triangle filter, as torchvision and Pillow do. The interpreter is let go
   of meanwhile. `library.py` does the same more slowly.

   libjpeg-turbo is opened when it is asked for, so that the module needs its headers to be built and nothing to be
   imported. Bytes are anybody's: an error leaves by longjmp, a warning that says the picture is not whole is an
   error, and so is a progressive one of more scans than anybody writes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "segments.h"

#ifndef LIBJPEG_TURBO_VERSION
#error "these are not libjpeg-turbo's headers"
#endif

#define MARGIN 16       /* pixels around the box: what upsampling makes of an edge has no neighbour there */
#define MOST_SCANS 100  /* of a progressive file; encoders write about ten */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define CLONED __attribute__((target_clones("bmi2", "default")))
#else
#define CLONED
#endif

#include "huffman.h"
#include "resize.h"

static struct {
    void *library;
    struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
    void (*create)(j_decompress_ptr, int, size_t);
    void (*destroy)(j_decompress_ptr);
    void (*mem_src)(j_decompress_ptr, const unsigned char *, unsigned long);
    int (*read_header)(j_decompress_ptr, boolean);
    boolean (*start)(j_decompress_ptr);
    void (*crop)(j_decompress_ptr, JDIMENSION *, JDIMENSION *);
    JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
    JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *); /* of a baseline scan; NULL if it must not be replaced */
} jpeg;

/* ---- what libjpeg says ---------------------------------------------------------------------------------- */

struct trouble {
    struct jpeg_error_mgr base;
    jmp_buf out;
    char said[JMSG_LENGTH_MAX];
};

static void leave(j_common_ptr cinfo)
{
    struct trouble *trouble = (struct trouble *)cinfo->err;
    if (!trouble->said[0])
        trouble->base.format_message(cinfo, trouble->said);
    longjmp(trouble->out, 1);
}

static void heed(j_common_ptr cinfo, int level)
{
    char said[JMSG_LENGTH_MAX];
    if (level >= 0)
        return;  /* a trace */
    cinfo->err->format_message(cinfo, said);
    /* bytes that are in nobody's way: cameras and editors leave them, and no pixel is another for it */
    if (strstr(said, "extraneous bytes") || strstr(said, "Adobe color") || strstr(said, "JFIF") ||
        strstr(said, "Invalid SOS parameters")) /* of a baseline scan, where they say nothing */
        return;
    struct trouble *trouble = (struct trouble *)cinfo->err;
    memcpy(trouble->said, said, sizeof said);
    leave(cinfo);
}

static void mute(j_common_ptr cinfo)
{
    (void)cinfo;
}

static void count_scans(j_common_ptr cinfo)
{
    if (((j_decompress_ptr)cinfo)->input_scan_number <= MOST_SCANS)
        return;
    struct trouble *trouble = (struct trouble *)cinfo->err;
    snprintf(trouble->said, sizeof trouble->said, "more than %d scans", MOST_SCANS);
    leave(cinfo);
}

/* ---- decoding ------------------------------------------------------------------------------------------- */

struct wanted {
    const uint8_t *data;
    unsigned long bytes;
    int width, height;         /* as was read off the header when the box was drawn */
    double box[4];             /* left, top, right, bottom, in pixels of the file */
    int clip[4];               /* what may be looked at */
    int denominator;           /* 1, 2, 4 or 8: how far the DCT scales down */
    int mirrored, out_width, out_height;
    uint8_t *out;
};

struct work { /* in one place, so that a longjmp leaves nothing behind */
    struct jpeg_decompress_struct cinfo;
    struct jpeg_progress_mgr progress;
    struct trouble trouble;
    struct scan scan;
    struct taps across, down;
    uint8_t *pixels;
    int16_t *row;
    int is_created;
    int is_theirs; /* libjpeg-turbo's Huffman decoding is taken */
    int gave_up;   /* ours is not for these bytes */
};

static int scaled_low(double at, int denominator, int least)
{
    int found = (int)floor(at / denominator);
    return found < least ? least : found;
}

static int scaled_high(double at, int denominator, int most)
{
    int found = (int)ceil(at / denominator);
    return found > most ? most : found;
}

static void say(struct work *work, const char *what)
{
    snprintf(work->trouble.said, sizeof work->trouble.said, "%s", what);
}

/* What begins behind `cinfo->entropy`: not of the interface, and so since libjpeg 6b. `find_decode_mcu` makes sure. */
struct entropy {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

static boolean next_mcu(j_decompress_ptr cinfo, JBLOCKROW *blocks)
{
    struct work *work = (struct work *)cinfo;
    if (decode_mcu(&work->scan, blocks))
        return TRUE;
    work->gave_up = 1;
    longjmp(work->trouble.out, 1);
}

static void decode_box(struct work *work, const struct wanted *wanted)
{
    j_decompress_ptr cinfo = &work->cinfo;
    cinfo->err = jpeg.std_error(&work->trouble.base);
    work->trouble.base.error_exit = leave;
    work->trouble.base.emit_message = heed;
    work->trouble.base.output_message = mute;
    if (setjmp(work->trouble.out))
        return;
    jpeg.create(cinfo, JPEG_LIB_VERSION, sizeof(struct jpeg_decompress_struct));
    work->is_created = 1;
    work->progress.progress_monitor = count_scans;
    cinfo->progress = &work->progress;
    jpeg.mem_src(cinfo, wanted->data, wanted->bytes);
    jpeg.read_header(cinfo, TRUE);
    if ((int)cinfo->image_width != wanted->width || (int)cinfo->image_height != wanted->height) {
        say(work, "its headers do not agree about its size");
        return;
    }
    int by = wanted->denominator;
    cinfo->scale_num = 1;
    cinfo->scale_denom = by;
    cinfo->out_color_space = JCS_EXT_RGBX;
    jpeg.start(cinfo);
    int width = (int)cinfo->output_width, height = (int)cinfo->output_height;

    /* the box in what is decoded, and what may be looked at of it */
    double box[4];
    for (int n = 0; n < 4; n++)
        box[n] = wanted->box[n] / by;
    int left = scaled_low(wanted->clip[0], by, 0), right = scaled_high(wanted->clip[2], by, width);
    int top = scaled_low(wanted->clip[1], by, 0), bottom = scaled_high(wanted->clip[3], by, height);
    if (left >= right || top >= bottom ||
        make_taps(&work->across, box[0], box[2], left, right, wanted->out_width, wanted->mirrored) ||
        make_taps(&work->down, box[1], box[3], top, bottom, wanted->out_height, 0)) {
        say(work, "there is no memory for it");
        return;
    }
    int leftmost = wanted->mirrored ? wanted->out_width - 1 : 0, rightmost = wanted->out_width - 1 - leftmost;
    int down = wanted->out_height - 1;
    left = work->across.first[leftmost];
    right = work->across.first[rightmost] + work->across.count[rightmost];
    top = work->down.first[0];
    bottom = work->down.first[down] + work->down.count[down];

    JDIMENSION first = left > MARGIN ? left - MARGIN : 0, wide;
    wide = (right + MARGIN < width ? right + MARGIN : width) - first;
    if (first || (int)wide < width)
        jpeg.crop(cinfo, &first, &wide);
    struct entropy *entropy = (struct entropy *)cinfo->entropy;
    if (!work->is_theirs && entropy->decode_mcu == jpeg.decode_mcu &&
        begin_scan(&work->scan, cinfo, (int)first, (int)wide))
        entropy->decode_mcu = next_mcu;
    size_t stride = ((size_t)wide * 4 + TILE - 1) / TILE * TILE;
    work->pixels = malloc((bottom - top) * stride);
    work->row = calloc(stride + (size_t)work->across.reach * 4, sizeof(int16_t));
    if (!work->pixels || !work->row) {
        say(work, "there is no memory for it");
        return;
    }
    int skipped = top > MARGIN ? top - MARGIN : 0;
    if (skipped)
        jpeg.skip(cinfo, skipped);
    while ((int)cinfo->output_scanline < bottom) {
        int at = (int)cinfo->output_scanline - top;
        JSAMPROW row = work->pixels + stride * (at < 0 ? 0 : at); /* the margin is written over */
        if (!jpeg.read(cinfo, &row, 1)) {
            say(work, "it ends too early");
            return;
        }
    }
    resize(work->pixels, stride, &work->down, &work->across, (int)first, work->row, wanted->out, wanted->out_width,
           wanted->out_height);
}

static void end(struct work *work)
{
    if (work->is_created)
        jpeg.destroy(&work->cinfo);
    free_taps(&work->across);
    free_taps(&work->down);
    free(work->pixels);
    free(work->row);
}

/* A box of an image; what our Huffman decoding does not like is read by libjpeg-turbo's, which says what is wrong. */
static void decode_any(struct work *work, const struct wanted *wanted)
{
    decode_box(work, wanted);
    if (work->gave_up) {
        end(work);
        memset(work, 0, sizeof *work);
        work->is_theirs = 1;
        decode_box(work, wanted);
    }
}

/* ---- headers -------------------------------------------------------------------------------------------- */

/* header(data) -> (width, height, channels, bits, marker, orientation), or None where it is no JPEG with a frame */
static PyObject *header(PyObject *self, PyObject *args)
{
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    const uint8_t *bytes = data.buf;
    size_t size = data.len, at = 2;
    int orientation = 1, seen = 0;
    PyObject *found = NULL;
    if (size >= 4 && bytes[0] == 0xFF && bytes[1] == 0xD8) {
        while (at + 4 <= size) {
            if (bytes[at] != 0xFF) {
                at++; /* what lies between segments is jumped over, as libjpeg does */
                continue;
            }
            uint8_t marker = bytes[at + 1];
            if (marker == 0xFF || marker == 0 || marker == 1 || (marker >= 0xD0 && marker <= 0xD8)) {
                at += marker == 0xFF ? 1 : 2;
                continue;
            }
            if (marker == 0xDA || marker == 0xD9)
                break;
            size_t length = big16(bytes + at + 2);
            if (length < 2 || at + 2 + length > size)
                break;
            if (marker == 0xE1 && !seen && length > 2 && length - 2 >= 6 && !memcmp(bytes + at + 4, "Exif\0\0", 6)) {
                orientation = orientation_in(bytes + at + 4, length - 2);
                seen = 1;
            }
            if (marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
                if (length >= 8)
                    found = Py_BuildValue("(iiiiii)", big16(bytes + at + 7), big16(bytes + at + 5), bytes[at + 9],
                                          bytes[at + 4], marker, orientation);
                break;
            }
            at += 2 + length;
        }
    }
    PyBuffer_Release(&data);
    if (found || PyErr_Occurred())
        return found;
    Py_RETURN_NONE;
}

/* ---- for Python ----------------------------------------------------------------------------------------- */

/* decode(data, size, box, clip, denominator, mirrored, out, size of out) -> None, or what is wrong with the image */
static PyObject *decode(PyObject *self, PyObject *args)
{
    Py_buffer data, out;
    struct wanted wanted;
    (void)self;
    memset(&wanted, 0, sizeof wanted);
    if (!PyArg_ParseTuple(args, "y*(ii)(dddd)(iiii)iiw*(ii)", &data, &wanted.width, &wanted.height, wanted.box,
                          wanted.box + 1, wanted.box + 2, wanted.box + 3, wanted.clip, wanted.clip + 1,
                          wanted.clip + 2, wanted.clip + 3, &wanted.denominator, &wanted.mirrored, &out,
                          &wanted.out_width, &wanted.out_height))
        return NULL;
    const double *box = wanted.box;
    const int *clip = wanted.clip;
    int by = wanted.denominator;
    PyObject *answer = NULL;
    if (!jpeg.library)
        PyErr_SetString(PyExc_RuntimeError, "no libjpeg-turbo was opened");
    else if (wanted.out_width < 1 || wanted.out_height < 1 || wanted.out_width > 65535 ||
             wanted.out_height > 65535 || out.len != (Py_ssize_t)wanted.out_width * wanted.out_height * 3)
        PyErr_SetString(PyExc_ValueError, "the output is of another size");
    else if (!(by == 1 || by == 2 || by == 4 || by == 8) || !(box[0] < box[2] && box[1] < box[3]) ||
             !(clip[0] < clip[2] && clip[1] < clip[3]) || clip[0] < 0 || clip[1] < 0 || clip[2] > wanted.width ||
             clip[3] > wanted.height || !(box[0] >= clip[0] && box[1] >= clip[1]) ||
             !(box[2] <= clip[2] && box[3] <= clip[3]))
        PyErr_SetString(PyExc_ValueError, "the box does not lie in the image");
    else {
        struct work *work = calloc(1, sizeof *work);
        if (!work) {
            PyErr_NoMemory();
        } else {
            wanted.data = data.buf;
            wanted.bytes = (unsigned long)data.len;
            wanted.out = out.buf;
            Py_BEGIN_ALLOW_THREADS
            decode_any(work, &wanted);
            end(work);
            Py_END_ALLOW_THREADS
            answer = work->trouble.said[0] ? PyUnicode_DecodeLatin1(work->trouble.said, strlen(work->trouble.said), NULL)
                                           : Py_NewRef(Py_None);
            free(work);
        }
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return answer;
}

/* 16 x 16 pixels, grey, baseline */
static const uint8_t SAMPLE[] = {
    255, 216, 255, 219, 0, 67, 0, 20, 14, 15, 18, 15, 13, 20, 18, 16, 18, 23, 21, 20, 24, 30, 50, 33, 30, 28, 28, 30,
    61, 44, 46, 36, 50, 73, 64, 76, 75, 71, 64, 70, 69, 80, 90, 115, 98, 80, 85, 109, 86, 69, 70, 100, 136, 101, 109,
    119, 123, 129, 130, 129, 78, 96, 141, 151, 140, 125, 150, 115, 126, 129, 124, 255, 192, 0, 11, 8, 0, 16, 0, 16, 1,
    1, 17, 0, 255, 196, 0, 21, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3, 255, 196, 0, 31, 16, 0, 2, 2,
    2, 2, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3, 1, 4, 0, 33, 5, 49, 17, 18, 34, 50, 255, 218, 0, 8, 1, 1, 0, 0, 63,
    0, 23, 229, 38, 85, 61, 216, 235, 71, 173, 14, 163, 46, 248, 112, 114, 73, 245, 4, 213, 15, 29, 150, 231, 15, 34,
    77, 8, 169, 13, 122, 171, 14, 190, 67, 188, 46, 21, 23, 42, 153, 82, 27, 96, 188, 126, 153, 214, 127, 255, 217,
};

static int lies_in(const void *library, void *call)
{
    Dl_info info;
    return dladdr(call, &info) && info.dli_fbase == library;
}

/* Where libjpeg-turbo keeps its Huffman decoding of baseline scans. What is there is taken for that if it is code of
   the library, and if with ours in its place an image is the same. */
static void find_decode_mcu(struct work *work)
{
    uint8_t pixels[2][16 * 16 * 3];
    struct wanted wanted = {.data = SAMPLE, .bytes = sizeof SAMPLE, .width = 16, .height = 16, .box = {0, 0, 16, 16},
                            .clip = {0, 0, 16, 16}, .denominator = 1, .out_width = 16, .out_height = 16};
    Dl_info library;
    boolean (*found)(j_decompress_ptr, JBLOCKROW *) = NULL;
    jpeg.decode_mcu = NULL;
    for (int n = 0; n < 2; n++) {
        memset(work, 0, sizeof *work);
        work->is_theirs = !n;
        wanted.out = pixels[n];
        decode_box(work, &wanted);
        int is_fine = !work->trouble.said[0] && !work->gave_up;
        if (!n && is_fine && dladdr((void *)jpeg.read, &library)) {
            struct entropy *entropy = (struct entropy *)work->cinfo.entropy;
            if (lies_in(library.dli_fbase, (void *)entropy->start_pass) &&
                lies_in(library.dli_fbase, (void *)entropy->decode_mcu))
                found = entropy->decode_mcu;
        }
        int is_read = work->scan.at > work->scan.plain; /* by ours: it lies where the library looks for it */
        if (n && !(is_fine && is_read && !memcmp(pixels[0], pixels[1], sizeof pixels[0])))
            found = NULL;
        end(work);
        jpeg.decode_mcu = found;
    }
}

/* use(path) -> whether the library there is one that this was built for */
static PyObject *use(PyObject *self, PyObject *args)
{
    const char *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    if (jpeg.library)
        Py_RETURN_TRUE;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        Py_RETURN_FALSE;
    const struct {
        void *slot;
        const char *name;
    } calls[] = {
        {&jpeg.std_error, "jpeg_std_error"},   {&jpeg.create, "jpeg_CreateDecompress"},
        {&jpeg.destroy, "jpeg_destroy_decompress"}, {&jpeg.mem_src, "jpeg_mem_src"},
        {&jpeg.read_header, "jpeg_read_header"}, {&jpeg.start, "jpeg_start_decompress"},
        {&jpeg.crop, "jpeg_crop_scanline"},     {&jpeg.skip, "jpeg_skip_scanlines"},
        {&jpeg.read, "jpeg_read_scanlines"},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (!(*(void **)calls[i].slot = dlsym(library, calls[i].name))) {
            dlclose(library);
            Py_RETURN_FALSE;
        }
    /* of another version of the interface it refuses to be made */
    struct work *work = calloc(1, sizeof *work);
    if (!work) {
        dlclose(library);
        return PyErr_NoMemory();
    }
    work->cinfo.err = jpeg.std_error(&work->trouble.base);
    work->trouble.base.error_exit = leave;
    work->trouble.base.output_message = mute;
    volatile int fits = 0;
    if (!setjmp(work->trouble.out)) {
        jpeg.create(&work->cinfo, JPEG_LIB_VERSION, sizeof(struct jpeg_decompress_struct));
        jpeg.destroy(&work->cinfo);
        fits = 1;
    }
    if (fits)
        find_decode_mcu(work);
    free(work);
    if (!fits) {
        dlclose(library);
        Py_RETURN_FALSE;
    }
    jpeg.library = library;
    Py_RETURN_TRUE;
}

/* has_own_huffman() -> whether baseline scans are decoded here, and not by the library that was opened */
static PyObject *has_own_huffman(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyBool_FromLong(jpeg.decode_mcu != NULL);
}

static PyMethodDef methods[] = {
    {"header", header, METH_VARARGS, "Size, channels, bits, kind and orientation of a JPEG, or None."},
    {"decode", decode, METH_VARARGS, "A box of a JPEG, resized into an array; what is wrong, or None."},
    {"use", use, METH_VARARGS, "Open libjpeg-turbo; False if it is not there or another."},
    {"has_own_huffman", has_own_huffman, METH_NOARGS, "Whether baseline scans are decoded by the module's own code."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_jpeg", .m_doc = "Boxes of JPEGs, on libjpeg-turbo.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return PyModuleDef_Init(&definition);
}
