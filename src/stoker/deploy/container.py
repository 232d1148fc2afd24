"""The image that every container of a deployment runs. Pure."""

from __future__ import annotations

from stoker import __version__

_TEXT = """\
# docker build -t IMAGE --build-arg BASE=... . ; podman build takes the same file.
# Any image with torch and CUDA will do as the base; one per site keeps driver and NCCL in step.
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
FROM ${{BASE}}
# gpu: without it doctor and watch see no card
RUN pip install --no-cache-dir 'stoker[tokens,arrow,object-store,gpu,deploy]=={version}'
WORKDIR /workspace
COPY . /workspace
# no ENTRYPOINT: pods name their commands in full, and signals then reach them directly
"""


def containerfile() -> str:
    return _TEXT.format(version=__version__)
