"""Video from tars: which frames, which part of them, and how many are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from clips import FRAMES, TO_MP4, as_wav, grey_frames, number_of, ramp, raw
from pictures import encoded, make_pictures, photograph

import stoker
from stoker.errors import BadShardError, UsageError
from stoker.load.media.av.clips import frames_of
from stoker.load.media.av.codec import VideoStream
from stoker.load.media.av.containers import frame_sizes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 8
FOUR = stoker.Video(frames=4, stride=3, size=16, flip=True)

pytestmark = pytest.mark.usefixtures("codec")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, encode: Callable[..., bytes]) -> Path:
    """Noise, so that every crop of every frame differs."""
    noise = np.concatenate([photograph(32, 48, seed=n)[None] for n in range(30)]).tobytes()
    data = encode("mp4", *TO_MP4, given=noise, before=raw(width=48, height=32))
    samples = [[("mp4", data), ("cls", b"%d" % n)] for n in range(COUNT)]
    return make_pictures(tmp_path_factory.mktemp("videos"), samples)


def loader(folder: Path, *, rank: int = 0, size: int = 1, **options) -> stoker.Loader:
    options = {"batch_size": 2, "video": FOUR, "output": "numpy", "seed": 7, "lanes": 4, **options}
    return stoker.Loader(folder, world=stoker.World(rank=rank, size=size), **options)


def seen(*loaders: stoker.Loader) -> dict[int, bytes]:
    found = {}
    for one in loaders:
        with one:
            for batch in one:
                for label, frames in zip(batch["cls"], batch["video"], strict=True):
                    found[int(label)] = frames.tobytes()
    return found


def one_of(tmp_path: Path, data: bytes, member: str = "mp4", **options) -> dict:
    folder = make_pictures(tmp_path / "one", [[(member, data)]] * 2, shards=1)
    with loader(folder, shuffle="off", **options) as one:
        return next(iter(one))


def test_a_batch_has_frames_of_one_size(videos: Path) -> None:
    with loader(videos) as one:
        batch = next(iter(one))
    assert batch["video"].shape == (2, 4, 16, 16, 3)
    assert batch["video"].dtype == np.uint8
    assert batch["video_length"].tolist() == [4, 4]
    assert "mp4" not in batch


def test_all_samples_and_epochs_are_cut_apart(videos: Path) -> None:
    with loader(videos) as one:
        first, second = ({b["video"][n].tobytes() for b in one for n in range(2)} for _ in range(2))
    assert len(first | second) == 2 * COUNT


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_number_of_ranks_sees_the_same(videos: Path, ranks: int) -> None:
    alone = seen(loader(videos, lanes=6))
    together = seen(*(loader(videos, rank=rank, size=ranks, lanes=6, tail="pad") for rank in range(ranks)))
    assert len(alone) == COUNT
    assert together == alone


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"workers": "inline"}], ids=str)
def test_every_way_to_read_sees_the_same(videos: Path, options: dict) -> None:
    assert seen(loader(videos, **options)) == seen(loader(videos))


@pytest.mark.integration
def test_worker_processes_see_and_hear_the_same(tmp_path: Path, video: bytes) -> None:
    folder = make_pictures(tmp_path, [[("mp4", video), ("cls", b"%d" % n)] for n in range(4)])
    floats = stoker.Video(frames=4, size=16, normalize="imagenet", dtype="bf16")
    options = {"video": floats, "audio": stoker.Audio(seconds=0.5), "output": "torch"}
    with (
        loader(folder, **options) as here,
        loader(folder, workers="process", processes=1, **options) as there,
    ):
        for one, other in zip(here, there, strict=True):
            assert str(one["video"].dtype) == "torch.bfloat16"
            assert (one["video"] == other["video"]).all()
            assert (one["audio"] == other["audio"]).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_resume_in_mid_epoch_the_same_is_seen(videos: Path, ranks: int) -> None:
    whole = seen(loader(videos))
    with loader(videos) as first:
        batches = iter(first)
        begun = {int(label) for _ in range(2) for label in next(batches)["cls"]}
        state = first.state_dict()
        batches.close()
    rest = [loader(videos, rank=rank, size=ranks) for rank in range(ranks)]
    for one in rest:
        one.load_state_dict(state)
    found = seen(*rest)
    assert found.keys() == whole.keys() - begun
    assert all(whole[label] == frames for label, frames in found.items())


@pytest.mark.parametrize(("clip", "first"), [("start", 0), ("center", (FRAMES - 10) // 2)])
def test_frames_are_those_that_were_asked_for(
    tmp_path: Path, silent_video: bytes, clip: str, first: int
) -> None:
    video = stoker.Video(frames=4, stride=3, size=16, clip=clip, crop="center")
    batch = one_of(tmp_path, silent_video, video=video)
    assert [number_of(frame) for frame in batch["video"][0]] == [first, first + 3, first + 6, first + 9]


def test_random_frames_are_neighbours_by_their_stride(tmp_path: Path, silent_video: bytes) -> None:
    batch = one_of(tmp_path, silent_video)
    for frames in batch["video"]:
        numbers = [number_of(frame) for frame in frames]
        assert np.diff(numbers).tolist() == [3, 3, 3]


@pytest.mark.parametrize("count", [1, 5, 9, 10, 11, 100])
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_frames_that_are_taken_lie_in_the_video(count: int, number: float) -> None:
    frames = frames_of(FOUR, count, number)
    assert len(frames) == min(4, -(-count // 3))
    assert 0 <= frames[0] <= frames[-1] < count


def test_of_a_shorter_video_the_last_frame_is_repeated(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    data = encode("mp4", *TO_MP4, given=grey_frames(5), before=raw())
    batch = one_of(tmp_path, data)
    assert batch["video_length"].tolist() == [2, 2]
    assert [number_of(frame) for frame in batch["video"][0]] == [0, 3, 3, 3]


@pytest.mark.parametrize("kind", ["webm", "mkv", "mov", "avi", "mpg"])
def test_what_ffmpeg_encodes_is_decoded(tmp_path: Path, encode: Callable[..., bytes], kind: str) -> None:
    codec = ("-c:v", "libvpx", "-crf", "4", "-b:v", "4M") if kind == "webm" else ("-q:v", "2")
    rate = ("-r", "25") if kind == "mpg" else ()
    data = encode(kind, *codec, *rate, given=grey_frames(), before=raw())
    batch = one_of(tmp_path, data, kind, video=stoker.Video(frames=2, size=16, clip="start", crop="center"))
    assert batch["video_length"].tolist() == [2, 2]
    assert number_of(batch["video"][0, 0]) == 0


B_FRAMES = ("-bf", "2", "-g", "10", "-q:v", "1")


@pytest.mark.parametrize(
    ("kind", "coder"),
    [
        ("avi", ("-c:v", "mpeg4")),
        ("avi", TO_MP4[:2]),
        ("mpg", ("-c:v", "mpeg2video", "-r", "25")),
        ("ts", TO_MP4[:2]),
        ("mkv", ("-c:v", "mpeg4")),
        ("mp4", TO_MP4[:2]),
    ],
    ids=str,
)
def test_frames_that_are_stored_in_another_order_are_found_by_their_number(
    encode: Callable[..., bytes], kind: str, coder: tuple[str, ...]
) -> None:
    before = (*raw()[:-1], "25")
    data = encode(kind, *coder, *B_FRAMES, "-pix_fmt", "yuv420p", given=grey_frames(), before=before)
    bytes_of_it = np.frombuffer(data, np.uint8)
    for first in (0, 1, 5, 17, 22, FRAMES - 3):
        stream = VideoStream(bytes_of_it, max_pixels=1 << 20)
        assert stream.frames == FRAMES
        assert [number_of(stream.frame(first + n)) for n in (0, 2)] == [first, first + 2]


def test_a_video_that_is_to_be_turned_is_turned(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    half = np.zeros((4, 32, 64, 3), np.uint8)
    half[:, :, 32:] = 255  # light on the right
    plain = encode("mp4", *TO_MP4, given=half.tobytes(), before=raw(width=64, height=32))
    folder = tmp_path / "plain.mp4"
    folder.write_bytes(plain)
    turned = encode("mp4", "-i", str(folder), "-c", "copy", "-metadata:s:v", "rotate=90")
    video = stoker.Video(frames=1, crop="whole", clip="start")
    batch = one_of(tmp_path, turned, video=video)
    frame = np.asarray(batch["video"][0][0], int)
    assert frame.shape == (64, 32, 3)
    assert abs(frame[:28].mean() - frame[36:].mean()) > 200  # light above or below


def test_frames_are_normalised_where_they_are_used(videos: Path) -> None:
    import torch

    plain = stoker.Video(frames=2, size=16)
    floats = stoker.Video(frames=2, size=16, normalize="imagenet")
    with (
        loader(videos, video=plain, output="torch") as one,
        loader(videos, video=floats, output="torch") as two,
    ):
        as_bytes, as_floats = next(iter(one))["video"], next(iter(two))["video"]
    assert as_bytes.shape == as_floats.shape == (2, 2, 3, 16, 16)
    assert (as_bytes.dtype, as_floats.dtype) == (torch.uint8, torch.float32)
    mean, std = (torch.tensor(some).view(3, 1, 1) for some in floats.image.mean_and_std)
    assert torch.allclose((as_bytes / 255 - mean) / std, as_floats, atol=1e-6)
    with loader(videos, video=floats) as three:
        in_numpy = next(iter(three))["video"]
    assert np.allclose(np.moveaxis(in_numpy, -1, -3), as_floats.numpy(), atol=1e-6)


def test_sound_and_frames_of_one_video_come_together(tmp_path: Path, video: bytes) -> None:
    batch = one_of(tmp_path, video, audio=stoker.Audio(seconds=0.5))
    assert batch["audio"].shape == (2, 1, 8_000)
    assert batch["video"].shape == (2, 4, 16, 16, 3)
    assert "mp4" not in batch


def test_image_sound_and_video_of_a_sample_come_together(tmp_path: Path, silent_video: bytes) -> None:
    members = [("jpg", encoded(photograph(40, 40))), ("wav", as_wav(ramp(1)))]
    members += [("mp4", silent_video), ("txt", b"words")]
    folder = make_pictures(tmp_path, [members] * 2, shards=1)
    with loader(folder, image=stoker.Image(size=8), audio=stoker.Audio(crop="whole")) as one:
        batch = next(iter(one))
    shapes = {name: batch[name].shape for name in ("image", "audio", "video")}
    assert shapes == {"image": (2, 8, 8, 3), "audio": (2, 1, 16_000), "video": (2, 4, 16, 16, 3)}
    assert batch["txt"] == [b"words"] * 2


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"<!doctype html>", as_wav(ramp(0.1)))):
        with pytest.raises(BadShardError, match=r"video of sample 's00000\d' in t0000\.tar cannot be"):
            one_of(tmp_path / str(number), data)


def test_a_video_cut_short_is_named(tmp_path: Path, silent_video: bytes) -> None:
    with pytest.raises(BadShardError, match="it is cut short"):
        one_of(tmp_path, silent_video[: len(silent_video) // 2])


@pytest.mark.parametrize("begin", ["0.1", "1.5"])
def test_a_video_cut_out_of_another_without_encoding_is_whole(
    tmp_path: Path, encode: Callable[..., bytes], video: bytes, begin: str
) -> None:
    """Its header counts the frames that its edit list leaves out, too."""
    long = tmp_path / "long.mp4"
    long.write_bytes(video)
    header_first = ("-movflags", "+faststart")
    data = encode("mp4", "-ss", begin, "-i", str(long), "-c", "copy", *header_first)
    options = stoker.Video(frames=3, stride=5, size=16, clip="start", crop="center")
    batch = one_of(tmp_path, data, video=options, audio=stoker.Audio(seconds=0.5, crop="start"))
    first = round(10 * float(begin))
    assert [number_of(frame) for frame in batch["video"][0]] == [first, first + 5, first + 10]
    assert batch["audio_length"].tolist() == [8_000, 8_000]
    with pytest.raises(BadShardError, match="it is cut short"):
        one_of(tmp_path / "cut", data[: len(data) * 2 // 3], video=options)


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_frames_that_are_too_large_are_refused_by_the_header(
    tmp_path: Path, encode: Callable[..., bytes], kind: str
) -> None:
    large = ("-f", "lavfi", "-i", "color=black:size=2048x1024:rate=1:duration=1")
    data = encode(kind, *large, "-c:v", "mpeg4")
    assert frame_sizes(data) == [(2048, 1024)]
    with pytest.raises(BadShardError, match=r"2,048 x 1,024 pixels are more than max_pixels=1,000,000"):
        one_of(tmp_path, data, kind, video=stoker.Video(max_pixels=1_000_000))


def test_headers_of_any_bytes_are_read_without_harm(silent_video: bytes) -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        data = bytearray(silent_video[:2_000])
        for at in rng.integers(0, len(data), 20):
            data[at] = rng.integers(256)
        frame_sizes(bytes(data[: rng.integers(len(data))]))
    nested = b"".join((80_000 - 8 * n).to_bytes(4, "big") + b"moov" for n in range(10_000))
    assert frame_sizes(nested) == []


def test_skipped_or_replaced_it_is_counted(tmp_path: Path, silent_video: bytes) -> None:
    samples = [[("mp4", silent_video if n != 3 else b"none"), ("cls", b"%d" % n)] for n in range(6)]
    folder = make_pictures(tmp_path, samples)
    with loader(folder, on_corrupt="skip", workers="inline") as one:  # a thread runs ahead, and counts more
        assert {int(label) for batch in one for label in batch["cls"]} == set(range(6)) - {3}
        report = one.report()
    assert report.video is not None
    assert (report.video.corrupt, report.video.decoded, report.skipped_samples) == (1, 5, 1)
    with loader(folder, video=stoker.Video(frames=2, size=8, on_corrupt="replace")) as one:
        rows = [(int(b["cls"][n]), bool(b["video_ok"][n])) for b in one for n in range(2)]
    assert dict(rows) == {n: n != 3 for n in range(6)}


@pytest.mark.parametrize(
    "wrong", [{"frames": 0}, {"stride": 1.5}, {"size": 0}, {"clip": "end"}, {"normalize": "clip"}], ids=str
)
def test_options_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError) as raised:
        stoker.Video(**wrong)
    assert "Image(" not in str(raised.value)


def test_a_column_of_images_called_video_is_refused(videos: Path) -> None:
    with pytest.raises(UsageError, match="both make a column 'video'"):
        loader(videos, image={"video": stoker.Image()})


def test_tokens_hold_no_video(small_corpus: Path) -> None:
    with pytest.raises(UsageError, match="video= decodes members of WebDataset tars"):
        loader(small_corpus, seq_len=8)
