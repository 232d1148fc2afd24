"""The one optional C module: without a compiler stoker installs all the same and uses its Python twin."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "stoker.sources._jsonl",
            ["src/stoker/sources/jsonl.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
