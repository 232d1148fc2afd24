"""`stoker order`: the documents of a step, from options or from what a job saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "load"))

from small_datasets import make_tokens, write_dataset, write_files

import stoker
from stoker.cli import run
from stoker.formats import megatron


@pytest.fixture
def corpus(tmp_path) -> Path:
    rng = np.random.default_rng(7)
    return make_tokens(tmp_path / "corpus", [rng.integers(1, 90, n).tolist() for n in (60, 37, 1, 80)])


def order(capsys, *arguments) -> tuple[int, str, str]:
    code = run(["order", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_step_is_named_from_the_options_of_its_loop(corpus, capsys):
    world = stoker.World(rank=1, size=2)
    with stoker.Loader(corpus, batch_size=3, seq_len=32, seed=4, world=world) as loader:
        expected = loader.samples(5, rank=1)
    options = ["--batch-size", 3, "--seq-len", 32, "--seed", 4, "--world", 2, "--rank", 1]
    code, out, _ = order(capsys, corpus, "--step", 5, *options)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == [
        document.name for row in expected for document in row.documents
    ]
    code, out, _ = order(capsys, corpus, "--step", "5:7", *options, "--json")
    rows = json.loads(out)
    assert [row["step"] for row in rows] == [5] * 3 + [6] * 3
    assert rows[0]["documents"][0]["first_byte"] == expected[0].documents[0].first_byte


def test_a_raw_file_of_another_type_is_named_from_options_or_from_a_state(tmp_path, capsys):
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "train.bin")
    options = {"batch_size": 3, "seq_len": 32, "bin_dtype": "uint32", "output": "numpy"}
    with stoker.Loader(tmp_path / "train.bin", **options) as loader:
        tokens = next(iter(loader))["input_ids"]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    said = ["--batch-size", 3, "--seq-len", 32, "--bin-dtype", "uint32"]
    for known in (said, ["--state", tmp_path / "state.json"]):
        code, out, error = order(capsys, tmp_path / "train.bin", "--step", 0, "--json", *known)
        assert code == 0, error
        named = [row["documents"][0] for row in json.loads(out)]
        assert [one["first_byte"] // 4 for one in named] == tokens[:, 0].tolist()


@pytest.mark.parametrize("kind", ["checkpoint", "one checkpoint", "torch", "json"])
def test_what_a_job_saved_knows_its_options_and_ranks(corpus, tmp_path, capsys, kind):
    torch = pytest.importorskip("torch")
    with stoker.feed([corpus, corpus], weights=[2, 1], batch_size=2, seq_len=32, device="cpu") as feeder:
        for _ in zip(range(5), feeder, strict=False):
            pass
        expected, state = feeder.samples(3), feeder.state_dict()
        with stoker.Checkpointer(tmp_path / "run", every=1) as saver:
            saver.step(1, feeder=feeder)
    (tmp_path / "state.json").write_text(json.dumps({"feeder": state}))
    torch.save({"model": torch.zeros(3), "feeder": state}, tmp_path / "state.pt")
    saved = {
        "checkpoint": tmp_path / "run",
        "one checkpoint": next(
            one for one in (tmp_path / "run").iterdir() if (one / "part-00000.json").exists()
        ),
        "torch": tmp_path / "state.pt",
        "json": tmp_path / "state.json",
    }
    code, out, err = order(capsys, corpus, corpus, "--step", 3, "--state", saved[kind], "--json")
    assert code == 0, err
    assert [document["name"] for row in json.loads(out) for document in row["documents"]] == [
        document.name for row in expected for document in row.documents
    ]


def test_a_tokenizer_shows_the_text(tmp_path, capsys, prepared_text):
    folder, tokenizer = prepared_text
    options = ["--batch-size", 1, "--seq-len", 16, "--tokenizer", tokenizer]
    code, out, _ = order(capsys, folder, "--step", 0, *options)
    assert code == 0
    assert "shovel" in out
    assert "\x1b" not in out  # what a document holds does not move a terminal's cursor


@pytest.fixture
def prepared_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "shovel": 1, "coal": 2, "\x1b[2J": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = make_tokens(tmp_path / "text", [[40]])
    ids = np.tile(np.array([1, 2, 3, 1], np.uint16), 10)
    index = megatron.index_bytes(np.array([40]), dtype=np.dtype("uint16"))
    shard = write_files(folder, "t", {".bin": ids.tobytes(), ".idx": index}, 1, 40)
    (folder / "manifest.json").unlink()
    write_dataset(folder, [shard], format="megatron", dtype="uint16")
    return folder, tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "x", "--batch-size", "1"], "neither a step nor FIRST:STOP"),
        (["--step", "-1", "--batch-size", "1"], "steps count from 0"),
        (["--step", "5:5", "--batch-size", "1"], "names no steps"),
        (["--step", "1", "--seq-len", "32"], "give --batch-size, or --state"),
        (["--step", "1", "--batch-size", "1"], "token data needs seq_len"),
        (["--step", "1", "--batch-size", "1", "--seq-len", "32", "--rank", "1"], "none is rank 1"),
        (["--step", "1", "--batch-size", "1", "--seq-len", "32", "--weights", "a"], "are no weights"),
        (["--step", "1", "--state", "."], "holds no whole checkpoint"),
        (["--step", "1", "--state", __file__], "cannot be read"),
        (["--step", "1", "--batch-size", "9999", "--seq-len", "32"], "an epoch has no batch"),
    ],
)
def test_what_cannot_be_named_is_refused(corpus, capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = order(capsys, corpus, *arguments)
    assert code == 2
    assert said in err
