"""Sound from tars: which seconds, at which rate, in how many channels, and how much of them is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from clips import as_wav, ramp
from pictures import make_pictures

import stoker
from stoker.errors import BadShardError, UsageError
from stoker.load.media.av.codec import sound as decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 12
HALF = stoker.Audio(seconds=0.5)

pytestmark = pytest.mark.usefixtures("codec")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [[("wav", as_wav(ramp(2, first=n))), ("cls", b"%d" % n)] for n in range(COUNT)]
    return make_pictures(tmp_path_factory.mktemp("sounds"), samples)


def loader(folder: Path, *, rank: int = 0, size: int = 1, **options) -> stoker.Loader:
    options = {"batch_size": 2, "audio": HALF, "output": "numpy", "seed": 7, "lanes": 6, **options}
    return stoker.Loader(folder, world=stoker.World(rank=rank, size=size), **options)


def heard(*loaders: stoker.Loader) -> dict[int, bytes]:
    found = {}
    for one in loaders:
        with one:
            for batch in one:
                for label, wave in zip(batch["cls"], batch["audio"], strict=True):
                    found[int(label)] = wave.tobytes()
    return found


def one_of(tmp_path: Path, member: str, data: bytes, **options) -> dict:
    folder = make_pictures(tmp_path / "one", [[(member, data)]] * 2, shards=1)
    with loader(folder, shuffle="off", **options) as one:
        return next(iter(one))


def test_a_batch_has_rows_of_one_length_and_says_how_much_is_their_own(sounds: Path) -> None:
    with loader(sounds) as one:
        batch = next(iter(one))
    assert batch["audio"].shape == (2, 1, 8_000)
    assert batch["audio"].dtype == np.float32
    assert batch["audio_length"].tolist() == [8_000, 8_000]
    assert "wav" not in batch


def test_what_comes_out_is_a_stretch_of_what_went_in(sounds: Path) -> None:
    starts = set()
    with loader(sounds) as one:
        for batch in one:
            for label, wave in zip(batch["cls"], batch["audio"], strict=True):
                samples = np.rint(wave[0] * 32_768).astype(int)
                start = samples[0] - label
                starts.add(start)
                assert (samples == ramp(2, first=label)[start : start + 8_000]).all()
    assert len(starts) == COUNT


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_number_of_ranks_hears_the_same(sounds: Path, ranks: int) -> None:
    alone = heard(loader(sounds))
    assert len(alone) == COUNT
    assert heard(*(loader(sounds, rank=rank, size=ranks) for rank in range(ranks))) == alone


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 5}, {"workers": "inline"}], ids=str)
def test_every_way_to_read_hears_the_same(sounds: Path, options: dict) -> None:
    assert heard(loader(sounds, **options)) == heard(loader(sounds))


@pytest.mark.parametrize("ranks", [1, 3])
def test_after_a_resume_in_mid_epoch_the_same_is_heard(sounds: Path, ranks: int) -> None:
    whole = heard(loader(sounds))
    with loader(sounds) as first:
        batches = iter(first)
        begun = {int(label) for _ in range(3) for label in next(batches)["cls"]}
        state = first.state_dict()
        batches.close()
    rest = [loader(sounds, rank=rank, size=ranks) for rank in range(ranks)]
    for one in rest:
        one.load_state_dict(state)
    found = heard(*rest)
    assert found.keys() == whole.keys() - begun
    assert all(whole[label] == wave for label, wave in found.items())


def test_another_epoch_takes_other_seconds(sounds: Path) -> None:
    with loader(sounds) as one:
        first, second = ({int(b["cls"][0]): b["audio"][0].tobytes() for b in one} for _ in range(2))
    assert all(second[label] != wave for label, wave in first.items() if label in second)


@pytest.mark.parametrize(("crop", "first"), [("start", 0), ("center", 12_000)])
def test_the_middle_and_the_start_are_where_they_should_be(sounds: Path, crop: str, first: int) -> None:
    with loader(sounds, audio=stoker.Audio(seconds=0.5, crop=crop), shuffle="off") as one:
        batch = next(iter(one))
    assert np.rint(batch["audio"][0, 0, 0] * 32_768) == first


def test_shorter_sound_is_filled_up_with_zeros(tmp_path: Path) -> None:
    batch = one_of(tmp_path, "wav", as_wav(ramp(0.2) + 5))
    assert batch["audio_length"].tolist() == [3_200, 3_200]
    assert batch["audio"][0, 0, :3_200].all()
    assert not batch["audio"][0, 0, 3_200:].any()


def test_whole_sounds_are_filled_up_to_the_longest_of_their_batch(tmp_path: Path) -> None:
    samples = [[("wav", as_wav(ramp(seconds) + 5))] for seconds in (0.1, 0.3)]
    folder = make_pictures(tmp_path, samples, shards=1)
    with loader(folder, audio=stoker.Audio(crop="whole"), shuffle="off") as one:
        batch = next(iter(one))
    assert batch["audio"].shape == (2, 1, 4_800)
    assert batch["audio_length"].tolist() == [1_600, 4_800]
    assert not batch["audio"][0, 0, 1_600:].any()


def test_sound_of_another_rate_is_resampled(tmp_path: Path) -> None:
    tone = 12_000 * np.sin(np.arange(44_100) * 2 * np.pi * 441 / 44_100)
    batch = one_of(tmp_path, "wav", as_wav(tone, rate=44_100))
    spectrum = np.abs(np.fft.rfft(batch["audio"][0, 0]))
    assert abs(int(spectrum.argmax()) * 16_000 / 8_000 - 441) < 2
    assert batch["audio_length"][0] == 8_000


def test_stereo_is_kept_or_mixed_down(tmp_path: Path) -> None:
    sides = np.stack([np.full(16_000, 8_000), np.full(16_000, -4_000)], 1)
    stereo = one_of(tmp_path, "wav", as_wav(sides), audio=stoker.Audio(seconds=0.5, channels=2))
    assert stereo["audio"].shape == (2, 2, 8_000)
    assert np.allclose(stereo["audio"][0, :, 100] * 32_768, [8_000, -4_000], atol=1)
    mono = one_of(tmp_path / "mono", "wav", as_wav(sides))
    assert np.allclose(mono["audio"][0, 0, 100] * 32_768, 2_000, atol=2)  # FFmpeg's own mix is 2,828


def test_mono_becomes_stereo_of_twice_the_same(tmp_path: Path) -> None:
    audio = stoker.Audio(seconds=0.5, channels=2, crop="start")
    batch = one_of(tmp_path, "wav", as_wav(ramp(1)), audio=audio)
    assert (np.rint(batch["audio"][0] * 32_768) == ramp(0.5)).all()


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg", "opus", "m4a", "aac", "mkv"])
def test_what_ffmpeg_encodes_is_decoded(tmp_path: Path, encode: Callable[..., bytes], kind: str) -> None:
    data = encode(kind, "-f", "lavfi", "-i", "sine=440:duration=3", "-ar", "48000")
    batch = one_of(tmp_path, kind, data)
    assert batch["audio_length"].tolist() == [8_000, 8_000]
    spectrum = np.abs(np.fft.rfft(batch["audio"][0, 0]))
    assert abs(int(spectrum.argmax()) * 2 - 440) < 4


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg", "m4a"])
def test_a_sound_that_is_long_enough_is_never_short(encode: Callable[..., bytes], kind: str) -> None:
    """Wherever its seconds begin: an MP3 of a second says that it has a twelfth more."""
    data = np.frombuffer(encode(kind, given=as_wav(ramp(1))), np.uint8)
    audio = stoker.Audio(seconds=0.5)

    def at(share: float) -> Callable[[int], int]:
        return lambda count: int(share * max(0, count - audio.samples))

    lengths = [decode(data, audio, at(share)).shape[1] for share in np.linspace(0, 1, 30)]
    assert set(lengths) == {audio.samples}


LATE = ("-c:a", "aac", "-output_ts_offset", "3")


@pytest.mark.parametrize(
    ("kind", "coder"),
    [
        ("mkv", ("-c:a", "aac")),
        ("webm", ("-c:a", "libopus")),
        ("mkv", ("-c:a", "wavpack")),
        ("mkv", LATE),
    ],
    ids=str,
)
def test_the_beginning_of_a_sound_is_not_lost(
    encode: Callable[..., bytes], kind: str, coder: tuple[str, ...]
) -> None:
    """Where a container does not say how long a packet lasts, or the first one comes late."""
    data = encode(kind, *coder, given=as_wav(ramp(1.5, rate=48_000), rate=48_000))
    plain = np.frombuffer(encode("wav", "-c:a", "pcm_f32le", "-ar", "48000", given=data), np.uint8)
    given, options = np.frombuffer(data, np.uint8), {"rate": 48_000}
    expected = decode(plain, stoker.Audio(crop="whole", **options), int)
    whole = decode(given, stoker.Audio(crop="whole", **options), int)
    assert whole.shape == expected.shape
    assert np.abs(whole - expected).max() < 1e-3
    audio = stoker.Audio(seconds=0.25, **options)
    for share in (0, 0.3, 0.7, 1):
        some = decode(given, audio, lambda count, share=share: int(share * max(0, count - audio.samples)))
        assert some.shape[1] == audio.samples
    start = decode(given, stoker.Audio(seconds=0.25, crop="start", **options), lambda _: 0)
    assert np.abs(start - expected[:, : start.shape[1]]).max() < 1e-3


def test_the_sound_of_a_video_is_taken_where_nothing_else_is_sound(tmp_path: Path, video: bytes) -> None:
    batch = one_of(tmp_path, "mp4", video)
    assert batch["audio_length"].tolist() == [8_000, 8_000]
    assert batch["audio"].std() > 0.01


def test_a_video_without_a_sound_track_says_so(tmp_path: Path, silent_video: bytes) -> None:
    with pytest.raises(BadShardError, match="it has no audio track"):
        one_of(tmp_path, "mp4", silent_video)


BROKEN = {
    "nothing": b"",
    "noise": bytes(range(256)) * 8,
    "a header alone": as_wav(ramp(0)),
    "no rate of sound": as_wav(ramp(0.1), rate=10),
    "a page": b"<!doctype html><title>404</title>",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_sound_is_named(tmp_path: Path, what: str) -> None:
    with pytest.raises(BadShardError, match=r"audio of sample 's00000\d' in t0000\.tar cannot be decoded"):
        one_of(tmp_path, "wav", BROKEN[what])


def test_an_mp3_whose_channels_change_is_broken_and_kills_nobody(
    tmp_path: Path, encode: Callable[..., bytes]
) -> None:
    sides = [encode("mp3", "-f", "lavfi", "-i", "sine=440:duration=1", "-ac", n) for n in ("2", "1")]
    with pytest.raises(BadShardError, match="cannot be decoded"):
        one_of(tmp_path, "mp3", b"".join(sides), audio=stoker.Audio(crop="whole"))


@pytest.mark.parametrize("coder", ["adpcm_ms", "adpcm_ima_wav"])
@pytest.mark.parametrize("crop", ["random", "whole"])
def test_adpcm_of_which_torchcodec_loses_the_most_is_refused(
    tmp_path: Path, encode: Callable[..., bytes], coder: str, crop: str
) -> None:
    data = encode("wav", "-c:a", coder, given=as_wav(ramp(2)))
    with pytest.raises(BadShardError, match=f"of {coder} in a WAV torchcodec decodes a part alone"):
        one_of(tmp_path, "wav", data, audio=stoker.Audio(seconds=0.5, crop=crop))


def test_a_flac_cut_short_is_broken(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    data = encode("flac", "-f", "lavfi", "-i", "sine=440:duration=3")
    with pytest.raises(BadShardError, match="cannot be decoded"):
        one_of(tmp_path, "flac", data[: len(data) // 2], audio=stoker.Audio(seconds=3, crop="whole"))


def test_sound_that_is_too_long_is_refused_by_its_header(tmp_path: Path) -> None:
    with pytest.raises(BadShardError, match=r"more than max_seconds=1, and no memory was taken"):
        one_of(tmp_path, "wav", as_wav(ramp(3)), audio=stoker.Audio(seconds=0.5, max_seconds=1))


def test_numbers_that_are_none_do_not_pass_silently(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    raw = np.full(16_000, np.nan, "<f4").tobytes()
    data = encode("wav", "-c:a", "pcm_f32le", given=raw, before=("-f", "f32le", "-ar", "16000", "-ac", "1"))
    with pytest.raises(BadShardError, match="not all of its samples are numbers"):
        one_of(tmp_path, "wav", data)


def test_skipped_or_replaced_it_is_counted(tmp_path: Path) -> None:
    samples = [[("wav", as_wav(ramp(1) + 5)), ("cls", b"%d" % n)] for n in range(8)]
    samples[3][0] = ("wav", b"none")
    folder = make_pictures(tmp_path, samples)
    with loader(folder, on_corrupt="skip", workers="inline") as one:  # a thread runs ahead, and counts more
        labels = {int(label) for batch in one for label in batch["cls"]}
        report = one.report()
    assert labels == set(range(8)) - {3}
    assert report.skipped_samples == 1
    assert report.audio is not None
    assert (report.audio.corrupt, report.audio.decoded, report.audio.short) == (1, 7, 0)
    assert "s000003" in report.audio.named[0]
    assert report.audio.engine.startswith("torchcodec")
    with loader(folder, audio=stoker.Audio(seconds=0.5, on_corrupt="replace")) as one:
        batches = list(one)
    is_ok = {int(b["cls"][n]): bool(b["audio_ok"][n]) for b in batches for n in range(2)}
    silent = {int(b["cls"][n]) for b in batches for n in range(2) if not b["audio"][n].any()}
    assert is_ok == {n: n != 3 for n in range(8)}
    assert silent == {3}


def test_a_transform_gets_the_sound_of_a_sample(sounds: Path) -> None:
    def loudness(sample: dict) -> dict:
        assert sample["audio"].shape == (1, 8_000)
        return {"peak": float(sample["audio"].max()), "length": sample["audio_length"]}

    with loader(sounds, transform=loudness) as one:
        batch = next(iter(one))
    assert batch["length"].tolist() == [8_000, 8_000]
    assert (batch["peak"] > 0).all()


def test_a_feed_gives_tensors(sounds: Path) -> None:
    import torch

    with stoker.feed(sounds, batch_size=2, audio=HALF, device="cpu", world=stoker.World()) as feeder:
        batch = next(iter(feeder))
    assert batch["audio"].dtype == torch.float32
    assert batch["audio"].shape == (2, 1, 8_000)
    assert batch["audio_length"].tolist() == [8_000, 8_000]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"rate": 0},
        {"rate": 16e3},
        {"channels": 5},
        {"crop": "end"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError):
        stoker.Audio(**wrong)


def test_something_else_than_an_audio_is_refused(sounds: Path) -> None:
    with pytest.raises(UsageError, match=r"is no stoker\.Audio"):
        loader(sounds, audio=16_000)
