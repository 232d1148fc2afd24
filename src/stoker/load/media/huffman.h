/* Huffman decoding of a baseline scan, in the place of libjpeg-turbo's: that is two thirds of the time of a large
   JPEG, and this takes half of its time.

   One table look-up says how many bits a code and the value behind it take, so that the next look-up waits for
   nothing else; bytes are unstuffed beforehand, so that 56 bits are taken at once; and blocks that nobody will see
   are stepped over without their values. What is not as it should be (a code that is none, a block that is too
   long, a marker in the midst) is left to libjpeg-turbo, from the beginning: it alone says what is wrong. */

#ifndef STOKER_HUFFMAN_H
#define STOKER_HUFFMAN_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#define LOOK 12        /* bits of a look-up: longer codes are of rare values */
#define PIECE 32768    /* bytes that are unstuffed at once */
#define LARGEST 2304   /* bytes of an MCU at most: 10 blocks of a DC of 27 bits and 63 AC of 26 */
#define MOST_DC 11     /* bits of a value, of 8 bits a sample */
#define MOST_AC 10
#define LAST 63        /* of a block; also how far the end of a block steps */

/* of a symbol: bits of code and value (6), bits of the value (4), steps in the block (6); 0 if there is none */
typedef uint16_t symbol_t;

struct codes {
    symbol_t look[1 << LOOK];
    symbol_t symbols[256];
    int32_t past[17], offset[17]; /* of each length: the first code that is none, and where symbols begin */
};

struct scan {
    const uint8_t *next, *stop; /* stuffed bytes that are to come */
    int is_over;                /* before a marker, or the end */
    uint8_t *filled;            /* of what is unstuffed */
    const uint8_t *at;
    uint64_t held; /* the next bits, the first one uppermost */
    int count;     /* of them that are sure */
    unsigned restart_interval, restart_in, restart;
    int column, columns, first, last; /* MCUs of a row; which ones are wanted */
    int blocks, component[D_MAX_BLOCKS_IN_MCU];
    uint32_t dc[MAX_COMPS_IN_SCAN];
    const struct codes *of_dc[MAX_COMPS_IN_SCAN], *of_ac[MAX_COMPS_IN_SCAN];
    struct codes codes[4];
    uint8_t plain[PIECE + LARGEST];
};

/* Where coefficients lie; the end of a block steps beyond, and writes its zero on the last one. */
static const uint8_t NATURAL[2 * LAST + 2] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
    13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45,
    38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

/* ---- tables --------------------------------------------------------------------------------------------- */

/* False where a table is missing, or has values that 8 bits a sample do not have. */
static int make_codes(struct codes *codes, const JHUFF_TBL *table, int is_ac)
{
    int at = 0;
    int32_t code = 0;
    if (!table)
        return 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        codes->offset[length] = at - code;
        for (int n = table->bits[length]; n > 0; n--, at++, code++) {
            if (at > 255 || code >> length)
                return 0;
            int value = table->huffval[at], steps = is_ac ? (value >> 4) + 1 : 0;
            value = is_ac ? value & 15 : value;
            if (value > (is_ac ? MOST_AC : MOST_DC))
                return 0;
            if (is_ac && !value && steps < 16)
                steps = LAST;
            symbol_t symbol = (symbol_t)((length + value) | value << 6 | steps << 10);
            codes->symbols[at] = symbol;
            for (int k = 0; length <= LOOK && k < 1 << (LOOK - length); k++)
                codes->look[(code << (LOOK - length)) + k] = symbol;
        }
        codes->past[length] = code;
    }
    return 1;
}

/* A code that is longer than a look-up; 0 if it is none. */
static symbol_t longer(const struct codes *codes, uint64_t held)
{
    for (int length = LOOK + 1; length <= 16; length++) {
        int32_t code = (int32_t)(held >> (64 - length));
        if (code < codes->past[length])
            return codes->symbols[(codes->offset[length] + code) & 255];
    }
    return 0;
}

/* ---- bytes ---------------------------------------------------------------------------------------------- */

/* At least an MCU's bytes, or all there are and zeros behind them. */
static void unstuff(struct scan *scan)
{
    size_t left = scan->filled - scan->at;
    memmove(scan->plain, scan->at, left);
    scan->at = scan->plain;
    uint8_t *out = scan->plain + left, *full = scan->plain + PIECE;
    while (out < full && !scan->is_over) {
        size_t room = full - out, some = scan->stop - scan->next;
        some = some < room ? some : room;
        const uint8_t *found = some ? memchr(scan->next, 0xFF, some) : NULL;
        some = found ? (size_t)(found - scan->next) : some;
        memcpy(out, scan->next, some);
        out += some;
        scan->next += some;
        if (found && scan->stop - found >= 2 && !found[1]) {
            *out++ = 0xFF;
            scan->next += 2;
        } else if (found || scan->next == scan->stop) {
            scan->is_over = 1;
        }
    }
    scan->filled = out;
    if (scan->is_over)
        memset(out, 0, scan->plain + sizeof scan->plain - out);
}

static void begin_stretch(struct scan *scan)
{
    scan->at = scan->filled = scan->plain;
    scan->held = 0;
    scan->count = scan->is_over = 0;
    memset(scan->dc, 0, sizeof scan->dc);
    scan->restart_in = scan->restart_interval;
}

/* Beyond the marker that is due. False where something else is there. */
static int restart(struct scan *scan)
{
    if (!scan->is_over)
        unstuff(scan); /* a stretch that ended where a piece did */
    long left = (scan->filled - scan->at) + scan->count / 8;
    if (!scan->is_over || left > 0 || scan->stop - scan->next < 2 || scan->next[1] != 0xD0 + scan->restart)
        return 0;
    scan->next += 2;
    scan->restart = (scan->restart + 1) & 7;
    begin_stretch(scan);
    return 1;
}

static inline uint64_t load_bits(const uint8_t *at)
{
    uint64_t bits;
    memcpy(&bits, at, sizeof bits);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    return bits;
}

/* ---- blocks --------------------------------------------------------------------------------------------- */

#define ALWAYS static inline __attribute__((always_inline))

struct bits {
    const uint8_t *at;
    uint64_t held;
    int count;
};

/* 56 bits at least: of two AC or a DC. */
ALWAYS void refill(struct bits *bits)
{
    bits->held |= load_bits(bits->at) >> bits->count;
    bits->at += (63 - bits->count) >> 3;
    bits->count |= 56;
}

ALWAYS unsigned look_up(const struct codes *codes, const struct bits *bits)
{
    unsigned symbol = codes->look[bits->held >> (64 - LOOK)];
    return __builtin_expect(symbol != 0, 1) ? symbol : longer(codes, bits->held);
}

/* The value behind a code; the bits of both are dropped. */
ALWAYS int take(struct bits *bits, unsigned symbol)
{
    unsigned both = symbol & 63, size = symbol >> 6 & 15;
    uint64_t value = bits->held << (both - size), below = (uint64_t)((int64_t)~value >> 63);
    bits->held <<= both;
    bits->count -= (int)both;
    return (int)(value >> 1 >> (63 - size)) - (int)(below & ((1u << size) - 1));
}

ALWAYS int decode_block(struct bits *bits, const struct codes *dc, const struct codes *ac, uint32_t *level,
                        JCOEF *block)
{
    refill(bits);
    unsigned symbol = look_up(dc, bits), k = 0;
    if (!symbol)
        return 0;
    *level += (uint32_t)take(bits, symbol);
    if (block)
        block[0] = (JCOEF)*level;
    for (;;) {
        refill(bits);
        for (int n = 0; n < 2; n++) {
            symbol = look_up(ac, bits);
            if (!symbol)
                return 0;
            k += symbol >> 10;
            int value = take(bits, symbol);
            if (block)
                block[NATURAL[k]] = (JCOEF)value;
            if (k >= LAST)
                return k == LAST || symbol >> 10 == LAST;
        }
    }
}

/* The next MCU; False if it is not as it should be. Blocks are zero before, or NULL. */
CLONED static int decode_mcu(struct scan *scan, JBLOCKROW *blocks)
{
    if (scan->restart_interval && scan->restart_in-- == 0) {
        if (!restart(scan))
            return 0;
        scan->restart_in--;
    }
    if (!scan->is_over && scan->filled - scan->at < LARGEST)
        unstuff(scan);
    int is_seen = blocks && scan->column >= scan->first && scan->column <= scan->last;
    scan->column = scan->column + 1 < scan->columns ? scan->column + 1 : 0;
    struct bits bits = {scan->at, scan->held, scan->count};
    for (int n = 0; n < scan->blocks; n++) {
        int of = scan->component[n];
        if (!(is_seen ? decode_block(&bits, scan->of_dc[of], scan->of_ac[of], scan->dc + of, *blocks[n])
                      : decode_block(&bits, scan->of_dc[of], scan->of_ac[of], scan->dc + of, NULL)))
            return 0;
    }
    scan->at = bits.at;
    scan->held = bits.held;
    scan->count = bits.count;
    return (bits.at - scan->filled) * 8 <= bits.count;
}

/* Whether the scan that libjpeg-turbo is about to read is one for this. Of `width` pixels from `left` on it needs
   the MCUs. */
static int begin_scan(struct scan *scan, j_decompress_ptr cinfo, int left, int width)
{
    int parts = cinfo->comps_in_scan, wide = cinfo->min_DCT_scaled_size * cinfo->max_h_samp_factor;
    if (cinfo->progressive_mode || cinfo->arith_code || cinfo->data_precision != 8 || parts != cinfo->num_components ||
        cinfo->blocks_in_MCU > D_MAX_BLOCKS_IN_MCU || (parts == 1 && cinfo->max_h_samp_factor > 1))
        return 0;
    int made[2][NUM_HUFF_TBLS] = {{0}}, count = 0;
    for (int n = 0; n < parts; n++) {
        for (int is_ac = 0; is_ac < 2; is_ac++) {
            const jpeg_component_info *info = cinfo->cur_comp_info[n];
            int number = is_ac ? info->ac_tbl_no : info->dc_tbl_no;
            if (number < 0 || number >= NUM_HUFF_TBLS)
                return 0;
            int *which = &made[is_ac][number];
            if (!*which) {
                const JHUFF_TBL *table = (is_ac ? cinfo->ac_huff_tbl_ptrs : cinfo->dc_huff_tbl_ptrs)[number];
                if (count == 4 || !make_codes(&scan->codes[count], table, is_ac))
                    return 0;
                *which = ++count;
            }
            (is_ac ? scan->of_ac : scan->of_dc)[n] = &scan->codes[*which - 1];
        }
    }
    scan->next = cinfo->src->next_input_byte;
    scan->stop = scan->next + cinfo->src->bytes_in_buffer;
    scan->restart_interval = cinfo->restart_interval;
    scan->restart = 0;
    scan->columns = (int)cinfo->MCUs_per_row;
    scan->column = 0;
    scan->first = left / wide;
    scan->last = (left + width - 1) / wide;
    scan->blocks = cinfo->blocks_in_MCU;
    for (int n = 0; n < scan->blocks; n++)
        scan->component[n] = cinfo->MCU_membership[n];
    begin_stretch(scan);
    return 1;
}

#endif
