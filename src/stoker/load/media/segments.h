/* What the segments of a JPEG say, for those who look at them before anything is decoded. */

#ifndef STOKER_SEGMENTS_H
#define STOKER_SEGMENTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static unsigned big16(const uint8_t *at)
{
    return (unsigned)at[0] << 8 | at[1];
}

static unsigned of_tiff(const uint8_t *at, int bytes, int is_little)
{
    unsigned value = 0;
    for (int n = 0; n < bytes; n++)
        value |= (unsigned)at[n] << 8 * (is_little ? n : bytes - 1 - n);
    return value;
}

/* How an image is to be turned, from 1 to 8, as the first directory of its EXIF says; 1 where that says nothing. */
static int orientation_in(const uint8_t *exif, size_t bytes)
{
    if (bytes < 14 || memcmp(exif, "Exif\0\0", 6))
        return 1;
    const uint8_t *tiff = exif + 6;
    size_t size = bytes - 6;
    int is_little = !memcmp(tiff, "II*\0", 4);
    if (!is_little && memcmp(tiff, "MM\0*", 4))
        return 1;
    size_t at = of_tiff(tiff + 4, 4, is_little);
    if (at > size || size - at < 2)
        return 1;
    unsigned entries = of_tiff(tiff + at, 2, is_little);
    for (at += 2; entries && size - at >= 12; entries--, at += 12)
        if (of_tiff(tiff + at, 2, is_little) == 0x0112 && of_tiff(tiff + at + 2, 2, is_little) == 3 &&
            of_tiff(tiff + at + 4, 4, is_little) == 1) {
            unsigned found = of_tiff(tiff + at + 8, 2, is_little);
            return found >= 1 && found <= 8 ? (int)found : 1;
        }
    return 1;
}

#endif
