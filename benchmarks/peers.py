"""What stoker is measured against: the same job done with other tools, each run as its own process.

    python benchmarks/peers.py NAME CORPUS TOKENIZER OUT

Every contender reads the same JSONL and tokenizer. The last line of its output is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

END = "<|endoftext|>"


def encode_lines(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """The tutorial way on one core: json.loads and Tokenizer.encode, a line at a time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    encoder, text_bytes, tokens = Tokenizer.from_file(str(tokenizer)), 0, 0
    started = time.perf_counter()
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            tokens += len(encoder.encode(text, add_special_tokens=False).ids) + 1
            text_bytes += len(text.encode())
    return {"seconds": time.perf_counter() - started, "text_bytes": text_bytes, "tokens": tokens}


def engine_alone(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """The raw engine's ceiling: two processes encode documents that lie in memory, nothing else.

    Only the encoding is timed, from a common start; each process has half of the documents in blocks of
    the size that stoker uses.
    """
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    workers = [
        spawn.Process(target=_encode_half, args=(corpus, tokenizer, half, start, results)) for half in (0, 1)
    ]
    for worker in workers:
        worker.start()
    start.wait()
    started = time.perf_counter()
    counts = [results.get() for _ in workers]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return {"seconds": seconds, "text_bytes": sum(c[0] for c in counts), "tokens": sum(c[1] for c in counts)}


def _encode_half(corpus: Path, tokenizer: Path, half: int, start, results) -> None:
    import gigatoken

    texts: list[str] = []
    blocks: list[list[str]] = []
    size = 0
    with corpus.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number % 2 == half:
                texts.append(json.loads(line)["text"])
                size += len(texts[-1])
                if size > 4 << 20:
                    blocks.append(texts)
                    texts, size = [], 0
    blocks.append(texts)
    engine = gigatoken.Tokenizer(str(tokenizer))
    engine.encode_batch(["warm up the imports"], parallel=False)
    start.wait()
    tokens = sum(len(engine.encode_batch(block, parallel=False).layout.content) for block in blocks)
    results.put((sum(len(text.encode()) for block in blocks for text in block), tokens))


def datatrove(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """datatrove: its Megatron writer on two workers, tokenizer threads on, one file a worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    halves = _split(corpus, out / "input", parts=2)
    started = time.perf_counter()
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(halves)),
            MegatronDocumentTokenizer(
                str(out / "tokens"), tokenizer_name_or_path=str(tokenizer), eos_token=END
            ),
        ],
        tasks=2,
        workers=2,
        logging_dir=str(out / "logs"),
    ).run()
    return {"seconds": time.perf_counter() - started}


def megatron(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """megatron-core's dataset builder behind a pool of two encoders, as its preprocess_data has it."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    started = time.perf_counter()
    prefix = str(out / "corpus")
    with (
        multiprocessing.get_context("spawn").Pool(2, _start_encoder, (tokenizer,)) as pool,
        corpus.open(encoding="utf-8") as file,
    ):
        import numpy

        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
        for ids in pool.imap(_encode_document, file, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
        builder.finalize(get_idx_path(prefix))
    return {"seconds": time.perf_counter() - started}


_encoder = None


def _start_encoder(tokenizer: Path) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _encoder = Tokenizer.from_file(str(tokenizer))


def _encode_document(line: str) -> list[int]:
    assert _encoder is not None
    ids = _encoder.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, _encoder.token_to_id(END)]


def write_tar_webdataset(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """webdataset's TarWriter: token_ids.json and text.txt of documents that are encoded already."""
    import webdataset

    samples = _encoded_samples(corpus, tokenizer)
    started = time.perf_counter()
    with webdataset.TarWriter(str(out / "shard.tar")) as writer:
        for number, (ids, text) in enumerate(samples):
            writer.write(
                {"__key__": f"{number:08d}", "token_ids.json": ids.tolist(), "text.txt": text.decode()}
            )
    return {"seconds": time.perf_counter() - started, "samples": len(samples)}


def write_tar_stoker(corpus: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """stoker's own writer on the same samples."""
    import orjson

    from stoker.formats.tar import TarWriter

    samples = _encoded_samples(corpus, tokenizer)
    started = time.perf_counter()
    with (out / "shard.tar").open("wb") as file:
        writer = TarWriter(file)
        for number, (ids, text) in enumerate(samples):
            encoded = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
            writer.add(f"{number:08d}", (("token_ids.json", encoded), ("text.txt", text)))
        writer.close()
    return {"seconds": time.perf_counter() - started, "samples": len(samples)}


def _encoded_samples(corpus: Path, tokenizer: Path) -> list[tuple]:
    from stoker.prepare.sources.documents import Texts
    from stoker.prepare.tokens import load_tokenizer, open_engine

    with corpus.open(encoding="utf-8") as file:
        texts = Texts.of(json.loads(line)["text"] for line in file)
    ids, offsets = open_engine("gigatoken", load_tokenizer(str(tokenizer))).encode(texts)
    bounds = offsets.tolist()
    views = texts.views()
    return [(ids[a:b].astype("u2"), bytes(v)) for a, b, v in zip(bounds[:-1], bounds[1:], views, strict=True)]


def _split(corpus: Path, folder: Path, *, parts: int) -> Path:
    """Whole lines into as many files: datatrove gives each worker its own."""
    folder.mkdir(parents=True)
    data = corpus.read_bytes()
    bounds = [0, *(data.index(b"\n", len(data) * part // parts) + 1 for part in range(1, parts)), len(data)]
    for part in range(parts):
        (folder / f"{part:02d}.jsonl").write_bytes(data[bounds[part] : bounds[part + 1]])
    return folder


CONTENDERS = {
    function.__name__: function
    for function in (
        encode_lines, engine_alone, datatrove, megatron, write_tar_webdataset, write_tar_stoker,
    )
}  # fmt: skip

if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    print(json.dumps(CONTENDERS[name](*map(Path, paths))))
