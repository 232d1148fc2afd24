"""Which kinds of media a loader decodes, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.load.assembly.transform import Transform
from stoker.load.media.av.audio import Audio
from stoker.load.media.av.sounds import ClipReport, Sounds
from stoker.load.media.av.video import Video
from stoker.load.media.av.videos import Videos
from stoker.load.media.image import Image
from stoker.load.media.images import Card, ImageReport, Images
from stoker.load.media.kinds import Kind
from stoker.load.media.members import Members


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What decodes the members of a loader's samples."""

    members: Members | None = None  # none: nothing is decoded
    images: Images | None = None
    sounds: Sounds | None = None
    videos: Videos | None = None

    @property
    def of_images(self) -> ImageReport | None:
        return self.images.report() if self.images else None

    @property
    def of_sounds(self) -> ClipReport | None:
        return self.sounds.report() if self.sounds else None

    @property
    def of_videos(self) -> ClipReport | None:
        return self.videos.report() if self.videos else None


NO_MEDIA = Media()


def choose_media(
    images: dict[str, Image],
    *,
    audio: Audio | None,
    video: Video | None,
    seed: int,
    on_corrupt: str,
    threads: int,
    transform: Transform | None,
    card: Card | None = None,
) -> Media:
    """What the options ask for."""
    pictures = Images(images, seed=seed, on_corrupt=on_corrupt, card=card) if images else None
    sounds = Sounds(audio, seed=seed, on_corrupt=on_corrupt) if audio else None
    videos = Videos(video, seed=seed, on_corrupt=on_corrupt) if video else None
    kinds: list[Kind] = [kind for kind in (pictures, sounds, videos) if kind]
    members = Members(kinds, threads=threads, transform=transform) if kinds else None
    return Media(members=members, images=pictures, sounds=sounds, videos=videos)
