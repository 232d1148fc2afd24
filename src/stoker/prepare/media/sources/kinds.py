"""Media types: what a name's end and the first bytes of a file say that it is."""

from __future__ import annotations

from pathlib import PurePosixPath

IMAGES = {
    "jpg": "jpg", "jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "png": "png", "webp": "webp", "gif": "gif",
    "bmp": "bmp", "tif": "tiff", "tiff": "tiff", "avif": "avif", "jp2": "jp2", "ppm": "ppm", "pgm": "ppm",
    "pbm": "ppm",
}  # fmt: skip
AUDIO = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "aiff")
VIDEO = ("mp4", "m4v", "mkv", "webm", "avi", "mov", "mpg", "mpeg")
_KINDS = {**dict.fromkeys(IMAGES, "image"), **dict.fromkeys(AUDIO, "audio"), **dict.fromkeys(VIDEO, "video")}
CAPTION_NAMES = ("text", "caption", "txt", "captions", "prompt", "sentence")  # of columns and fields
CAPTIONS = ("txt", "json", "caption")

# The first bytes, where they are, and the suffix they stand for.
_MAGIC = (
    (0, b"\xff\xd8\xff", "jpg"), (0, b"\x89PNG\r\n\x1a\n", "png"), (0, b"GIF8", "gif"), (8, b"WEBP", "webp"),
    (0, b"BM", "bmp"), (0, b"II*\0", "tiff"), (0, b"MM\0*", "tiff"), (4, b"ftypavif", "avif"),
    (4, b"jP  ", "jp2"), (8, b"WAVE", "wav"), (0, b"fLaC", "flac"), (0, b"OggS", "ogg"), (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"), (8, b"AVI ", "avi"), (0, b"\x1aE\xdf\xa3", "webm"), (4, b"ftypM4A", "m4a"),
    (4, b"ftypqt", "mov"), (4, b"ftyp", "mp4"),
)  # fmt: skip
MAGIC_BYTES = 16


def suffix_of(path: str) -> str:
    """`jpg` of `cats/A.b.JPG`: what follows the last dot of a name, in one spelling."""
    suffix = PurePosixPath(path).suffix[1:].lower()
    return IMAGES.get(suffix, suffix)


def kind_of(suffix: str) -> str:
    """`image`, `audio` or `video` of a member's suffix, which may have dots in it; else nothing."""
    return _KINDS.get(suffix.rpartition(".")[2].lower(), "")


def sniffed(start: bytes) -> str:
    """The suffix that the first bytes of a file stand for; empty where they are unknown."""
    return next((suffix for at, magic, suffix in _MAGIC if start[at : at + len(magic)] == magic), "")
