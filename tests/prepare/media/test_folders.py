"""Folders of images, sound and video become shuffled WebDataset shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_photos import encoded, photo, samples_of

import stoker
from stoker.errors import BadInputError, TaskError, UsageError
from stoker.manifest import read_manifest
from stoker.prepare.check import verify_dataset


def test_a_folder_of_class_folders_needs_no_options(
    classes: Path, take: Any, watcher: Any, tmp_path: Path
) -> None:
    samples = take(classes)
    assert len(samples) == 36
    assert all(sample.keys() == {"__key__", "jpg", "cls"} for sample in samples)
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog", "éel 1"]
    by_content = {path.read_bytes(): path.parent.name for path in classes.rglob("*.jpg")}
    names = ["cat", "dog", "éel 1"]
    assert all(by_content[sample["jpg"]] == names[int(sample["cls"])] for sample in samples)
    assert f"{classes}: media, not text: 36 image files in 3 class folders" in watcher.notes
    assert verify_dataset(str(tmp_path / "out")) == []


def test_samples_of_all_classes_are_mixed(classes: Path, take: Any) -> None:
    labels = [sample["cls"] for sample in take(classes)]
    assert labels != sorted(labels)
    assert len(set(labels[:12])) == 3


def test_without_a_shuffle_samples_keep_the_order_of_their_names(classes: Path, take: Any) -> None:
    samples = take(classes, shuffle=False)
    assert [sample["jpg"] for sample in samples] == [
        path.read_bytes() for path in sorted(classes.rglob("*.jpg"))
    ]


def test_epochs_are_different_permutations_of_the_same_samples(
    classes: Path, take: Any, tmp_path: Path
) -> None:
    first = take(classes, epochs=2)
    second = samples_of(tmp_path / "out", epoch=1)
    assert [one["jpg"] for one in first] != [one["jpg"] for one in second]
    assert sorted(one["jpg"] for one in first) == sorted(one["jpg"] for one in second)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset closes late
def test_the_loader_and_webdataset_read_what_was_written(
    classes: Path, take: Any, webdataset: Any, tmp_path: Path
) -> None:
    samples = take(classes)
    with stoker.Loader(tmp_path / "out", batch_size=6) as loader:
        read = [image for batch in loader for image in batch["jpg"]]
    assert sorted(read) == sorted(one["jpg"] for one in samples)
    tars = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    theirs = list(webdataset.WebDataset(tars, shardshuffle=False).decode("pil"))
    assert [one["cls"] for one in theirs] == [int(one["cls"]) for one in samples]
    assert theirs[0]["jpg"].size == (96, 64)


def test_captions_beside_images_are_members_and_folders_are_no_classes(take: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "00000"
    folder.mkdir(parents=True)
    for number in range(4):
        photo(number).save(folder / f"{number}.a.jpg")
        (folder / f"{number}.a.txt").write_text(f"picture {number}")
        (folder / f"{number}.a.json").write_text(json.dumps({"n": number}))
    samples = take(tmp_path / "raw")
    assert {frozenset(sample) for sample in samples} == {frozenset({"__key__", "jpg", "txt", "json"})}
    for sample in samples:
        number = json.loads(sample["json"])["n"]
        assert sample["jpg"] == (folder / f"{number}.a.jpg").read_bytes()
        assert sample["txt"] == b"picture %d" % number


def test_a_metadata_file_says_captions_as_datasets_has_it(take: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "train"
    (folder / "sub").mkdir(parents=True)
    rows = []
    for number in range(4):
        photo(number).save(folder / "sub" / f"{number}.jpg")
        rows.append(json.dumps({"file_name": f"sub/{number}.jpg", "text": f"nr {number}", "n": number}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    samples = take(tmp_path / "raw")
    assert {frozenset(one) for one in samples} == {frozenset({"__key__", "jpg", "txt", "json"})}
    for one in samples:
        number = json.loads(one["json"])["n"]
        assert one["txt"] == f"nr {number}".encode()
        assert one["jpg"] == (folder / "sub" / f"{number}.jpg").read_bytes()
    (folder / "metadata.jsonl").write_text('{"file": 1}')
    with pytest.raises(BadInputError, match="line 1 names no file"):
        take(tmp_path / "raw", out=tmp_path / "bad")


def test_captions_are_tokenised_beside_the_image(
    take: Any, tokenizer_path: Path, encode: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(5):
        photo(number).save(folder / f"{number}.jpg")
        if number:
            (folder / f"{number}.txt").write_text(f"a stoker shovels coal {number} times")
    samples = take(folder, tokenizer=tokenizer_path)
    captioned = [sample for sample in samples if "txt" in sample]
    assert (len(samples), len(captioned)) == (5, 4)
    assert all(json.loads(one["token_ids.json"]) == encode(one["txt"].decode()) for one in captioned)
    assert "token_ids.json" not in next(one for one in samples if "txt" not in one)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.tokens == sum(len(json.loads(one["token_ids.json"])) for one in captioned)
    assert manifest.tokenizer
    assert verify_dataset(str(tmp_path / "out")) == []


def test_sound_and_video_are_kept_as_they_are(take: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    large = os.urandom(17 << 20)  # more than is held: it is streamed
    (folder / "film.MP4").write_bytes(large)
    (folder / "film.wav").write_bytes(b"RIFF....WAVE" + bytes(100))
    (folder / "other.flac").write_bytes(b"fLaC" + bytes(100))
    samples = {frozenset(one) - {"__key__"}: one for one in take(folder)}
    assert samples[frozenset({"mp4", "wav"})]["mp4"] == large
    assert samples[frozenset({"flac"})]["flac"][:4] == b"fLaC"


def test_odd_names_links_and_hidden_files(take: Any, watcher: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    names = [
        b"a b.jpg",
        b"two\nlines.JPG",
        "snö 雪.jpeg".encode(),
        b"\xff\xfe.jpg",
        b"quote'\".jpg",
        b"x" * 240 + b".jpg",
    ]
    for number, name in enumerate(names):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(_jpeg(number))
    (folder / ".hidden.jpg").write_bytes(_jpeg(50))
    (folder / "nowhere.jpg").symlink_to("gone")
    (folder / "again").symlink_to(".")
    os.mkfifo(folder / "pipe.jpg")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "l.jpg").write_bytes(_jpeg(51))
    (folder / "linked").symlink_to(elsewhere)
    samples = take(folder)
    assert sorted(one["jpg"] for one in samples) == sorted([*map(_jpeg, range(len(names))), _jpeg(51)])
    told = "\n".join(watcher.notes)
    assert "1 file left out (hidden)" in told
    assert "1 file left out (a link to nothing)" in told
    assert "1 file left out (no plain file)" in told


def test_two_spellings_of_a_folder_and_one_inside_give_each_image_once(classes: Path, take: Any) -> None:
    assert len(take(classes, f"{classes}/../photos", classes / "cat", dedup=False)) == 36


def test_equal_files_of_one_class_are_one_and_of_two_classes_are_told(
    classes: Path, take: Any, tmp_path: Path
) -> None:
    (classes / "cat" / "copy.jpg").write_bytes((classes / "cat" / "000.jpg").read_bytes())
    (classes / "dog" / "copy.jpg").write_bytes((classes / "cat" / "000.jpg").read_bytes())
    assert len(take(classes)) == 37
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["dropped"] == {"duplicate": 1}
    assert statistics["media"]["copies"] == {"same media, other label or caption": 2}
    assert statistics["media"]["classes"] == {"cat": 12, "dog": 13, "éel 1": 12}


def test_of_splits_the_asked_one_is_taken(classes: Path, take: Any, watcher: Any, tmp_path: Path) -> None:
    root = tmp_path / "imagenet"
    root.mkdir()
    classes.rename(root / "train")
    (root / "val" / "cat").mkdir(parents=True)
    photo(5).save(root / "val" / "cat" / "v.jpg")
    assert len(take(root)) == 36
    assert len(take(root, split="validation", out=tmp_path / "val")) == 1
    assert any("split train/ of train, val" in note for note in watcher.notes)


@pytest.mark.parametrize(
    ("train", "val"),
    [("train2017", "val2017"), ("images/train", "images/val"), ("train_images", "test_images")],
)
def test_splits_as_others_name_them_are_no_classes(train: str, val: str, take: Any, tmp_path: Path) -> None:
    """COCO, YOLO, Kaggle: validation images must not come into what is trained on."""
    for number, folder in enumerate((train, val)):
        (tmp_path / "raw" / folder).mkdir(parents=True)
        photo(number).save(tmp_path / "raw" / folder / f"{number}.jpg")
    photo(5).save(tmp_path / "raw" / "logo.png")
    if "/" in train:
        (tmp_path / "raw" / "logo.png").unlink()
    samples = take(tmp_path / "raw")
    assert [sorted(one) for one in samples] == [["__key__", "jpg"]]
    assert samples[0]["jpg"] == (tmp_path / "raw" / train / "0.jpg").read_bytes()


def test_several_folders_of_one_split_have_to_be_chosen_by_name(take: Any, tmp_path: Path) -> None:
    for number, folder in enumerate(("train2014", "train2017")):
        (tmp_path / "raw" / folder).mkdir(parents=True)
        photo(number).save(tmp_path / "raw" / folder / f"{number}.jpg")
    with pytest.raises(UsageError, match="several splits train: train2014, train2017"):
        take(tmp_path / "raw")
    assert len(take(tmp_path / "raw", split="train2017")) == 1


def test_splits_beside_other_folders_are_told(take: Any, watcher: Any, tmp_path: Path) -> None:
    for number, folder in enumerate(("train", "val", "extra")):
        (tmp_path / "raw" / folder).mkdir(parents=True)
        photo(number).save(tmp_path / "raw" / folder / f"{number}.jpg")
    assert len(take(tmp_path / "raw")) == 3
    assert any("train/ and val/ are taken together with all else" in note for note in watcher.notes)


def test_a_single_folder_is_no_class_unless_it_is_said(take: Any, tmp_path: Path) -> None:
    from stoker.prepare.media.recipe import MediaOptions

    (tmp_path / "raw" / "photos").mkdir(parents=True)
    photo(1).save(tmp_path / "raw" / "photos" / "1.jpg")
    assert "cls" not in take(tmp_path / "raw")[0]
    said = MediaOptions(labels="folders")
    assert take(tmp_path / "raw", media=said, out=tmp_path / "said")[0]["cls"] == b"0"


def test_a_csv_says_captions_as_datasets_has_it(take: Any, watcher: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(2):
        photo(number).save(folder / f"{number}.jpg")
    rows = '\ufefffile_name,text,n\n0.jpg,"one, and\ntwo",0\n1.jpg,é,1\n7.jpg,gone,7\n'
    (folder / "metadata.csv").write_text(rows)
    samples = {json.loads(one["json"])["n"]: one["txt"].decode() for one in take(folder)}
    assert samples == {"0": "one, and\ntwo", "1": "é"}
    assert f"{folder}: 1 file that metadata names is not there (7.jpg, ...)" in watcher.notes
    (folder / "metadata.csv").write_text("file_name,text\n0.jpg,a,b\n")
    with pytest.raises(BadInputError, match="more values than columns"):
        take(folder, out=tmp_path / "bad")
    (folder / "metadata.csv").write_text("image_id,text\n0,a\n")
    assert sorted(take(folder, out=tmp_path / "other")[0]) == ["__key__", "jpg"]
    assert f"{folder}/metadata.csv has no file_name: left out" in watcher.notes


def test_classes_keep_their_names_when_shards_are_prepared_again(
    classes: Path, take: Any, tmp_path: Path
) -> None:
    take(classes)
    again = take(tmp_path / "out", seed=1, out=tmp_path / "again")
    assert json.loads((tmp_path / "again" / "classes.json").read_text()) == ["cat", "dog", "éel 1"]
    assert len(again) == 36
    assert verify_dataset(str(tmp_path / "again")) == []


def test_one_image_is_a_dataset(take: Any, tmp_path: Path) -> None:
    photo(1).save(tmp_path / "one.png")
    assert [sorted(one) for one in take(tmp_path / "one.png")] == [["__key__", "png"]]


def test_a_folder_of_text_with_a_few_figures_is_text(take: Any, make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.md").write_text(f"page {number}")
    photo(1).save(folder / "figure.png")
    made = make(folder)
    assert made.manifest.format == "megatron"
    assert len(take(folder, out=tmp_path / "media", media=_kind("media"))) == 1
    with pytest.raises(UsageError, match="hold text, which needs a tokenizer"):
        take(folder, out=tmp_path / "none")


def test_options_that_would_do_nothing_are_refused(classes: Path, corpus: Path, take: Any, make: Any) -> None:
    from stoker.prepare.media.recipe import MediaOptions
    from stoker.prepare.sources.documents import Reading

    with pytest.raises(UsageError, match="options for text"):
        take(classes, reading=Reading(field="body"))
    with pytest.raises(UsageError, match="options for images"):
        make(corpus, media=MediaOptions(longest_side=256))
    with pytest.raises(UsageError, match="holds media and"):
        make(classes, corpus)


def test_large_samples_make_shards_of_about_the_asked_size(take: Any, tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(24):
        (folder / f"{number}.mp4").write_bytes(os.urandom(200_000 + 50_000 * (number % 7)))
    take(folder, shard_bytes=1 << 20)
    sizes = [shard.files[0].bytes for shard in read_manifest(tmp_path / "out").shards]
    assert max(sizes) < (1 << 20) * 1.6
    assert sum(sizes) / len(sizes) > 500_000


def test_an_empty_or_changed_file_is_named(classes: Path, take: Any, tmp_path: Path) -> None:
    (classes / "cat" / "empty.jpg").write_bytes(b"")
    with pytest.raises(TaskError, match=r"cat/empty.jpg: not_an_image"):
        take(classes)
    assert len(take(classes, on_error="skip", out=tmp_path / "skipped")) == 36
    assert len(take(classes, on_error="keep", out=tmp_path / "kept")) == 37
    statistics = json.loads((tmp_path / "skipped" / "statistics.json").read_text())
    assert statistics["bad"] == {"not_an_image": 1}


def _jpeg(seed: int) -> bytes:
    return encoded(photo(seed))


def _kind(kind: str) -> Any:
    from stoker.prepare.media.recipe import MediaOptions

    return MediaOptions(kind=kind)
