"""Stoker keeps GPUs fed: prepare, stage, load, checkpoint, watch.

Importing this package loads nothing heavy: a public name brings its module with it when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.checkpoint.checkpointer import Checkpointer
    from stoker.errors import StokerError
    from stoker.feeder import Feeder, feed
    from stoker.findings import Finding
    from stoker.load.loader import Loader
    from stoker.load.media.av.audio import Audio
    from stoker.load.media.av.video import Video
    from stoker.load.media.image import Image
    from stoker.load.ordering.schedule import Mixture
    from stoker.manifest import Manifest, read_manifest
    from stoker.stage.cache import Cache
    from stoker.stage.leases.first import first_rank
    from stoker.stage.run import fetch
    from stoker.storage import open_store
    from stoker.watch.inside.knobs import apply
    from stoker.watch.inside.loaders import attach
    from stoker.watch.runs import read_recording
    from stoker.world import World

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "Cache",
    "Checkpointer",
    "Feeder",
    "Finding",
    "Image",
    "Loader",
    "Manifest",
    "Mixture",
    "StokerError",
    "Video",
    "World",
    "__version__",
    "apply",
    "attach",
    "feed",
    "fetch",
    "first_rank",
    "open_store",
    "read_manifest",
    "read_recording",
]

_HOMES = {
    "Audio": "stoker.load.media.av.audio",
    "Cache": "stoker.stage.cache",
    "Checkpointer": "stoker.checkpoint.checkpointer",
    "Feeder": "stoker.feeder",
    "Finding": "stoker.findings",
    "Image": "stoker.load.media.image",
    "Loader": "stoker.load.loader",
    "Manifest": "stoker.manifest",
    "Mixture": "stoker.load.ordering.schedule",
    "StokerError": "stoker.errors",
    "Video": "stoker.load.media.av.video",
    "World": "stoker.world",
    "apply": "stoker.watch.inside.knobs",
    "attach": "stoker.watch.inside.loaders",
    "feed": "stoker.feeder",
    "fetch": "stoker.stage.run",
    "first_rank": "stoker.stage.leases.first",
    "open_store": "stoker.storage",
    "read_manifest": "stoker.manifest",
    "read_recording": "stoker.watch.runs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    if name == "Checkpointer":  # its home imports torch at its top
        import_module("stoker.errors").require("torch", extra="torch")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
