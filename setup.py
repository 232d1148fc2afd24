"""The optional C modules: without a compiler stoker installs all the same and uses their Python twins."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "stoker.prepare.sources._jsonl",
            ["src/stoker/prepare/sources/jsonl.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "stoker.bench._drive",
            ["src/stoker/bench/drive.c"],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.load._gather",
            ["src/stoker/load/gather.c"],
            depends=["src/stoker/load/stream.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.load._pack",
            ["src/stoker/load/pack.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.load._pump",
            ["src/stoker/load/pump.c"],
            depends=["src/stoker/load/stream.h"],
            libraries=["dl"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.load.media._jpeg",
            ["src/stoker/load/media/jpeg.c"],
            depends=[f"src/stoker/load/media/{name}.h" for name in ("huffman", "resize", "segments")],
            extra_compile_args=["-O3"],
            libraries=["dl", "m"],
            optional=True,  # without libjpeg-turbo's headers too
        ),
        Extension(
            "stoker.load.media._survey",
            ["src/stoker/load/media/survey.c"],
            depends=["src/stoker/load/media/segments.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.stage._lay",
            ["src/stoker/stage/lay.c"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "stoker.stage.wire._flight",
            ["src/stoker/stage/wire/flight.c"],
            py_limited_api=True,
            optional=True,
        ),
    ]
)
