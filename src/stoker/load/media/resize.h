/* A box of pixels, resized with an antialiasing triangle filter, as torchvision and Pillow do: down first, then
   across, in whole numbers. Pixels are of four bytes, so that registers hold whole ones; the fourth is dropped. */

#ifndef STOKER_RESIZE_H
#define STOKER_RESIZE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WHOLE 32767 /* what weights sum to */
#define TILE 32     /* bytes of a row that are summed at once: rows are padded to so many */
#define FEW 16      /* rows whose products may each be cut off: a mean of a 256th of a level is lost for each */
#define SHIFT 22    /* a byte times 128 from the first pass, times WHOLE from the second */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

struct taps {
    int *first, *count; /* of each output pixel */
    int16_t *weights;   /* `most` of each */
    int16_t *pairs;     /* the same for four channels: two weights at a time, of two pixels at a time */
    int most, reach;    /* places for each, and how many of them the widest stretch takes: both even */
};

static void free_taps(struct taps *taps)
{
    free(taps->first);
    free(taps->count);
    free(taps->weights);
    free(taps->pairs);
}

/* Where the weights of a pixel lie among pairs, and those of its next two places behind. */
static inline size_t pairs_of(const struct taps *taps, int pixel)
{
    return (size_t)(pixel / 2) * taps->most * 8 + (pixel & 1) * 8;
}

#define NEXT_PAIR 16

/* The weights of `size` pixels that the stretch [from, to) becomes, the last one first where they are mirrored.
   Nothing outside of [low, high) is looked at. */
static int make_taps(struct taps *taps, double from, double to, int low, int high, int size, int mirrored)
{
    double scale = (to - from) / size, wide = scale > 1 ? scale : 1, inverse = 1 / wide;
    taps->most = (int)ceil(wide) * 2 + 2;
    taps->first = malloc(size * sizeof(int));
    taps->count = malloc(size * sizeof(int));
    taps->weights = calloc((size_t)size * taps->most, sizeof(int16_t));
    taps->pairs = calloc((size_t)(size + 1) * taps->most, 4 * sizeof(int16_t));
    if (!taps->first || !taps->count || !taps->weights || !taps->pairs)
        return -1;
    for (int i = 0; i < size; i++) {
        double centre = from + ((mirrored ? size - 1 - i : i) + 0.5) * scale, sum = 0;
        int first = (int)floor(centre - wide + 0.5), stop = (int)floor(centre + wide + 0.5);
        first = first < low ? low : first > high - 1 ? high - 1 : first;
        stop = stop > high ? high : stop <= first ? first + 1 : stop;
        int count = stop - first < taps->most ? stop - first : taps->most;
        int16_t *weights = taps->weights + (size_t)i * taps->most, *pairs = taps->pairs + pairs_of(taps, i);
        for (int k = 0; k < count; k++) {
            double far = fabs(first + k + 0.5 - centre) * inverse;
            sum += far < 1 ? 1 - far : 0;
        }
        double each = sum > 0 ? WHOLE / sum : 0, until = 0.5;
        int given = 0;
        for (int k = 0; k < count; k++) { /* they sum to one however many they are: a plain surface stays what it is */
            double far = fabs(first + k + 0.5 - centre) * inverse;
            until += far < 1 ? (1 - far) * each : 0;
            weights[k] = (int16_t)((int)until - given);
            given += weights[k];
        }
        weights[sum > 0 ? count - 1 : 0] += (int16_t)(WHOLE - given); /* what floats left over: none or one */
        for (int k = 0; k < count; k++)
            for (int channel = 0; channel < 4; channel++)
                pairs[k / 2 * NEXT_PAIR + channel * 2 + (k & 1)] = weights[k];
        taps->reach = count > taps->reach ? (count + 1) / 2 * 2 : taps->reach;
        taps->first[i] = first;
        taps->count[i] = count;
    }
    return 0;
}

/* ---- down ----------------------------------------------------------------------------------------------- */

/* One row of the output's height, of the width the region has: bytes times 128. */
static void sum_many_rows(const uint8_t *rows, size_t stride, const int16_t *weights, int count, int16_t *out)
{
    for (size_t at = 0; at < stride; at += TILE) {
        uint32_t sums[TILE] = {0};
        for (int k = 0; k < count; k++)
            for (int x = 0; x < TILE; x++)
                sums[x] += (uint32_t)rows[k * stride + at + x] * (uint32_t)weights[k];
        for (int x = 0; x < TILE; x++)
            out[at + x] = (int16_t)(sums[x] >> 8);
    }
}

/* The same of a few, faster. What the products lose is made up for beforehand. */
static void sum_rows(const uint8_t *rows, size_t stride, const int16_t *weights, int count, int16_t *out)
{
    for (size_t at = 0; at < stride; at += TILE) {
        uint16_t sums[TILE];
        for (int x = 0; x < TILE; x++)
            sums[x] = (uint16_t)(count / 2);
        for (int k = 0; k < count; k++) {
            const uint8_t *row = rows + k * stride + at;
            uint32_t weight = (uint32_t)weights[k];
            for (int x = 0; x < TILE; x++) /* the upper half of a product of 16 bits: one instruction for many */
                sums[x] = (uint16_t)(sums[x] + ((uint32_t)(uint16_t)(row[x] << 8) * weight >> 16));
        }
        for (int x = 0; x < TILE; x++)
            out[at + x] = (int16_t)sums[x];
    }
}

#ifdef AVX2
/* The same; for a few rows, which is usual, `count` is known to the compiler and weights stay in registers. */
AVX2 static inline __attribute__((always_inline)) void sum_wide(const uint8_t *rows, size_t stride,
                                                                const int16_t *weights, int count, int16_t *out)
{
    const __m256i zero = _mm256_setzero_si256(), begin = _mm256_set1_epi16((int16_t)(count / 2));
    for (size_t at = 0; at < stride; at += TILE) {
        __m256i low = begin, high = begin;
        for (int k = 0; k < count; k++) {
            __m256i row = _mm256_loadu_si256((const __m256i *)(rows + k * stride + at));
            __m256i weight = _mm256_set1_epi16(weights[k]);
            low = _mm256_add_epi16(low, _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, row), weight));
            high = _mm256_add_epi16(high, _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, row), weight));
        }
        _mm256_storeu_si256((__m256i *)(out + at), _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256((__m256i *)(out + at + 16), _mm256_permute2x128_si256(low, high, 0x31));
    }
}

AVX2 static void sum_rows_avx2(const uint8_t *rows, size_t stride, const int16_t *weights, int count, int16_t *out)
{
    switch (count) {
    case 1: sum_wide(rows, stride, weights, 1, out); break;
    case 2: sum_wide(rows, stride, weights, 2, out); break;
    case 3: sum_wide(rows, stride, weights, 3, out); break;
    case 4: sum_wide(rows, stride, weights, 4, out); break;
    default: sum_wide(rows, stride, weights, count, out);
    }
}
#endif

/* ---- across --------------------------------------------------------------------------------------------- */

/* Pixels of the output from `begin` on. All take as many places as the widest stretch has: what is too many has no
   weight, and no branch is guessed wrong. */
static void sum_pixels(const int16_t *row, const struct taps *taps, int left, uint8_t *out, int begin, int size)
{
    for (int n = begin; n < size; n++) {
        const int16_t *at = row + (ptrdiff_t)(taps->first[n] - left) * 4, *pairs = taps->pairs + pairs_of(taps, n);
        for (int channel = 0; channel < 3; channel++) {
            int32_t sum = 1 << (SHIFT - 1);
            for (int k = 0; k < taps->reach; k++)
                sum += at[k * 4 + channel] * pairs[k / 2 * NEXT_PAIR + channel * 2 + (k & 1)];
            sum >>= SHIFT;
            out[n * 3 + channel] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
        }
    }
}

#ifdef AVX2
/* The same, two places of two pixels at a time; how many places is known to the compiler where they are few. */
AVX2 static inline __attribute__((always_inline)) int sum_two_by_two(const int16_t *row, const struct taps *taps,
                                                                     int left, uint8_t *out, int size, int reach)
{
    const __m256i in_pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m128i of_three = _mm_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const int16_t *weights = taps->pairs;
    const int *first = taps->first;
    int n = 0;
    for (; n + 3 <= size; n += 2, weights += (size_t)taps->most * 8) {
        const int16_t *one = row + (ptrdiff_t)(first[n] - left) * 4, *other = row + (ptrdiff_t)(first[n + 1] - left) * 4;
        __m256i sums = _mm256_set1_epi32(1 << (SHIFT - 1));
        for (int k = 0; k < reach / 2; k++) {
            __m256i places = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(one + k * 8))),
                _mm_loadu_si128((const __m128i *)(other + k * 8)), 1);
            __m256i weight = _mm256_loadu_si256((const __m256i *)(weights + k * NEXT_PAIR));
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(places, in_pairs), weight));
        }
        sums = _mm256_srai_epi32(sums, SHIFT);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        __m128i bytes = _mm_shuffle_epi8(_mm_packus_epi16(words, words), of_three);
        _mm_storel_epi64((__m128i *)(out + n * 3), bytes); /* the next one is laid over the last two */
    }
    return n;
}

AVX2 static void sum_pixels_avx2(const int16_t *row, const struct taps *taps, int left, uint8_t *out, int size)
{
    int done;
    switch (taps->reach) {
    case 2: done = sum_two_by_two(row, taps, left, out, size, 2); break;
    case 4: done = sum_two_by_two(row, taps, left, out, size, 4); break;
    case 6: done = sum_two_by_two(row, taps, left, out, size, 6); break;
    default: done = sum_two_by_two(row, taps, left, out, size, taps->reach);
    }
    sum_pixels(row, taps, left, out, done, size);
}
#endif

/* ---- both ----------------------------------------------------------------------------------------------- */

/* `pixels` are rows of the region from down's first one on; `row` has room for one and what reaches beyond it. */
static void resize(const uint8_t *pixels, size_t stride, const struct taps *down, const struct taps *across, int left,
                   int16_t *row, uint8_t *out, int width, int height)
{
#ifdef AVX2
    int is_wide = __builtin_cpu_supports("avx2");
#endif
    for (int y = 0; y < height; y++, out += (size_t)width * 3) {
        const uint8_t *rows = pixels + stride * (down->first[y] - down->first[0]);
        const int16_t *weights = down->weights + (size_t)y * down->most;
        int count = down->count[y];
#ifdef AVX2
        if (is_wide) {
            (count > FEW ? sum_many_rows : sum_rows_avx2)(rows, stride, weights, count, row);
            sum_pixels_avx2(row, across, left, out, width);
            continue;
        }
#endif
        (count > FEW ? sum_many_rows : sum_rows)(rows, stride, weights, count, row);
        sum_pixels(row, across, left, out, 0, width);
    }
}

#endif
