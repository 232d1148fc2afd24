"""Columns that media make, in the options of a loader."""

from __future__ import annotations

import pytest

from stoker import Audio, Image, Video
from stoker.errors import UsageError
from stoker.load.options import LoaderOptions


@pytest.mark.parametrize(("kind", "made"), [("audio", Audio(seconds=1)), ("video", Video(frames=2, size=8))])
def test_images_may_have_any_name_but_that_of_sound_or_video_beside_them(kind, made):
    image = Image(size=8)
    with pytest.raises(UsageError, match=f"both make a column '{kind}'"):
        LoaderOptions("d", batch_size=1, image={kind: image}, **{kind: made})
    assert LoaderOptions("d", batch_size=1, image={kind: image}).images == {kind: image}
    assert LoaderOptions("d", batch_size=1, image={"picture": image}, **{kind: made}).images == {
        "picture": image
    }
