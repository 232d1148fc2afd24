"""Media plans: options checked for what they can mean, and the plan of what was found."""

from __future__ import annotations

from stoker.errors import UsageError, require
from stoker.formats.zstd import zstd_module
from stoker.manifest import TokenizerRecord
from stoker.prepare.curate.recipe import Curation
from stoker.prepare.media.images import engine
from stoker.prepare.media.recipe import Media, near_bits
from stoker.prepare.media.sources.discover import Found
from stoker.prepare.media.sources.kinds import suffix_of
from stoker.prepare.neardup import choose_sketch
from stoker.prepare.plan import Options, Plan, make_plan
from stoker.prepare.sources.documents import Reading
from stoker.prepare.tokens import Tokenizer
from stoker.storage import open_store

_FIRST_CAPTIONS = 64


def check_media(options: Options) -> None:
    """What is about text does nothing here; packages that only tasks import are missed now."""
    near_bits(options.near_dedup)
    is_of_text = options.curation != Curation() or options.reading != Reading()
    if is_of_text or options.shares or options.holdout:
        raise UsageError(
            "these sources hold media, and options for text (--curate, --field, --source, --holdout, ...) "
            "were given",
            hint="leave them out, or read the text that lies there with --kind text",
        )
    if options.near_dedup and options.media.check == "header":
        raise UsageError(
            "--near-dedup looks at pixels, and --check header leaves them undecoded",
            hint="give one of the two",
        )
    require("PIL", extra="media")
    if options.tokenizer:
        require("orjson", extra="media")
    if options.zstd:
        zstd_module()


def check_text(options: Options) -> None:
    """What is about media does nothing for text, which has to be tokenised."""
    if not options.tokenizer:
        raise UsageError(
            f"{', '.join(options.sources)} hold text, which needs a tokenizer",
            hint="name one with --tokenizer; media needs none (--kind media, if that is what lies there)",
        )
    if options.media.asks_for_something or options.on_error == "keep":
        raise UsageError(
            "these sources hold text, and options for images were given",
            hint="leave them out, or say --kind media if the sources hold media too",
        )
    if options.near_dedup:
        choose_sketch(options.near_dedup)


def captions_of(found: Found) -> list[str]:
    """The first captions, to try a tokenizer's engine on."""
    texts = []
    for listing in found.listings.values():
        store = open_store(listing.base)
        files = (file for one in listing.samples for file in one.files if suffix_of(file.path) == "txt")
        for file, _ in zip(files, range(_FIRST_CAPTIONS), strict=False):
            texts.append(store.read(file.path).decode(errors="replace")[:4096])
    return texts or ["a photo of a cat", "une photo d’un chat", "猫の写真"]


def media_plan(
    options: Options, found: Found, record: TokenizerRecord | None, tokenizer: Tokenizer | None
) -> Plan:
    """The plan of what was found."""
    media = Media(
        options=options.media,
        engine=engine(),
        classes=found.classes,
        near_bits=near_bits(options.near_dedup),
    )
    return make_plan(options, found.sources, record, tokenizer.family if tokenizer else "", media)
