"""A store that gives so many bytes a second to all who ask, and nodes that train from it.

rclone's --bwlimit is one bucket for all connections, as the rate of a real store is; nginx's limit_rate in
front of it is the narrow network of a single node. Nodes are processes in lock-step: a step waits for its
bytes, then for the others, then computes (sleeps). A checkpoint's bytes are read from the store instead of
being written to it: rclone has no one bucket for both directions.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

from s3_server import free_ports, running
from web_server import write_noise

from stoker.stage.cache import Cache
from stoker.stage.near import Near
from stoker.stage.run import stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BURST = 4 << 20  # rclone lets so much through at once after a rest: it is taken away before a scene begins
PIECE = 64 << 10

NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} sndbuf=64k;
        location / {{
            proxy_pass http://127.0.0.1:{store_port};
            proxy_http_version 1.1;
            proxy_max_temp_file_size 0;
            limit_rate {limit_rate};
        }}
    }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class Store:
    """A running store: `url` is the dataset in it, `slow_url` the same through a narrow network."""

    url: str
    slow_url: str
    files: tuple[str, ...]
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Nodes that train for some epochs. `staging` as the policies of the model have it."""

    nodes: int
    staging: str
    step_s: float
    step_bytes: int
    epochs: int = 2
    ahead: int = 1 << 20
    slow_nodes: int = 0
    files: int = 0  # of the store, how many are read; 0 is all
    saving: str = "behind"
    checkpoint: int = 0  # bytes of a node
    interval_s: float = 0.0  # from a save's end, or its beginning behind the loop, to the next
    loss_s: float = 0.0  # a node is lost so often; 0 is never
    restart_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a scene took: from the start to the first step and to the end, and of that the compute."""

    seconds: float
    first_step_s: float
    computed_s: float

    @property
    def idle_share(self) -> float:
        return 1 - self.computed_s / self.seconds


@contextmanager
def throttled_store(
    folder: Path, *, rate: int, slow_rate: int, files: int, file_bytes: int, rclone: str, nginx: str
) -> Iterator[Store]:
    root = folder / "root"
    root.mkdir(parents=True)
    write_noise(root / "corpus", shards=files, shard_bytes=file_bytes)
    port, slow_port = free_ports(2)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=slow_port, store_port=port, limit_rate=slow_rate))
    serve = [rclone, "serve", "http", "--config", "/dev/null", "--addr", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        stack.enter_context(running([*serve, f"--bwlimit={rate}B", "--buffer-size=0", str(root)], port=port))
        stack.enter_context(running([nginx, "-p", str(folder), "-c", str(config)], port=slow_port))
        yield Store(
            url=f"http://127.0.0.1:{port}/corpus",
            slow_url=f"http://127.0.0.1:{slow_port}/corpus",
            files=tuple(f"s{number}.bin" for number in range(files)),
            file_bytes=file_bytes,
        )


def play(store: Store, scene: Scene, folder: Path) -> Seen:
    """Run the nodes of a scene; their clocks start together, when the store has no burst left."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(scene.nodes + 1), context.SimpleQueue()
    ranks = Ranks(step=context.Barrier(scene.nodes), told=context.Value("i", 0))
    nodes = [
        context.Process(target=_node, args=(store, scene, n, folder / f"node{n}", start, ranks, results))
        for n in range(scene.nodes)
    ]
    for node in nodes:
        node.start()
    start.wait(60)  # all are up
    _use_up_the_burst(store)
    start.wait(60)
    seen = [results.get() for _ in nodes]
    for node in nodes:
        node.join()
        node.close()
    shutil.rmtree(folder, ignore_errors=True)
    return Seen(
        seconds=max(one.seconds for one in seen),
        first_step_s=max(one.first_step_s for one in seen),
        computed_s=min(one.computed_s for one in seen),
    )


def _use_up_the_burst(store: Store) -> None:
    left = BURST + (1 << 20)
    for name in store.files:
        if left > 0:
            with urllib.request.urlopen(f"{store.url}/{name}") as answer:
                left -= len(answer.read(left))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What nodes share: where they meet, and what the first of them has decided for all."""

    step: Any
    told: Any

    def agree(self, number: int, decide: Callable[[], int]) -> int:
        if number == 0:
            self.told.value = decide()
        self.step.wait()
        told = self.told.value
        self.step.wait()  # before the first may decide anew
        return told


GO_ON, SAVE, LOSE = range(3)


def _node(
    store: Store, scene: Scene, number: int, folder: Path, start: Any, ranks: Ranks, results: Any
) -> None:
    url = store.slow_url if number < scene.slow_nodes else store.url
    mine = store.files[: scene.files or None][number :: scene.nodes]
    start.wait()
    start.wait()
    began = time.monotonic()
    clock, saver = Clock(scene, began), Saver(scene, store)
    steps = scene.epochs * len(mine) * store.file_bytes // scene.step_bytes
    done, first, computed = 0, 0.0, {}
    while done < steps:
        with _READERS[scene.staging](scene, url, mine, folder, done * scene.step_bytes) as pieces:
            held = 0
            while done < steps:
                while held < scene.step_bytes:
                    held += next(pieces)
                held -= scene.step_bytes
                told = ranks.agree(number, clock.decide)
                if told == SAVE:
                    saver.save(done)
                    ranks.step.wait()
                    clock.saved()
                if told == LOSE:
                    time.sleep(scene.restart_s)
                    clock.lost()
                    done = saver.durable
                    break
                ready = time.monotonic()
                first = first or ready - began
                time.sleep(scene.step_s)
                done += 1
                computed[done] = time.monotonic() - ready  # what is done twice counts once
    seconds = time.monotonic() - began
    saver.close()
    results.put(Seen(seconds=seconds, first_step_s=first, computed_s=sum(computed.values())))


class Clock:
    """When to save and when a node is lost, on the first node's clock."""

    def __init__(self, scene: Scene, began: float) -> None:
        self._scene, self._since = scene, 0.0
        self._next_loss = began + scene.loss_s if scene.loss_s else math.inf

    def decide(self) -> int:
        now = time.monotonic()
        self._since = self._since or now
        if now >= self._next_loss:
            return LOSE
        due = self._scene.checkpoint and now - self._since >= self._scene.interval_s
        return SAVE if due else GO_ON

    def saved(self) -> None:
        self._since = time.monotonic()

    def lost(self) -> None:
        self._next_loss += self._scene.loss_s
        self._since = time.monotonic()


class Saver:
    """Moves a checkpoint's bytes: while the loop stands, or behind it, one after another."""

    def __init__(self, scene: Scene, store: Store) -> None:
        self._scene, self._url = scene, f"{store.url}/{store.files[0]}"
        self._threads: list[threading.Thread] = []
        self.durable = 0

    def save(self, step: int) -> None:
        if self._scene.saving == "stop":
            self._move(step)
        else:
            self._threads.append(threading.Thread(target=self._move, args=(step,)))
            self._threads[-1].start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join()

    def _move(self, step: int) -> None:
        left = self._scene.checkpoint
        while left > 0:
            with urllib.request.urlopen(self._url) as answer:
                while left > 0 and (piece := answer.read(min(left, PIECE))):
                    left -= len(piece)
        self.durable = step


# --- the ways to read; each gives the sizes of pieces as they are there to be used ---


@contextmanager
def _from_the_store(
    scene: Scene, url: str, files: Sequence[str], folder: Path, skip: int
) -> Iterator[Iterator[int]]:
    """As scripts do: a thread reads every epoch anew, a little ahead."""
    read: Queue[int] = Queue(maxsize=scene.ahead // PIECE)
    ended = threading.Event()

    def follow() -> None:
        left = skip
        for name in [*files] * scene.epochs:
            size = int(urllib.request.urlopen(f"{url}/{name}").headers["Content-Length"]) if left else 0
            if left and left >= size:
                left -= size
                continue
            asked = urllib.request.Request(
                f"{url}/{name}", headers={"Range": f"bytes={left}-"} if left else {}
            )
            left = 0
            with urllib.request.urlopen(asked) as answer:
                while piece := answer.read(PIECE):
                    while not ended.is_set():
                        with suppress(Full):
                            read.put(len(piece), timeout=0.05)
                            break
                    if ended.is_set():
                        return

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        yield iter(read.get, None)
    finally:
        ended.set()
        reader.join()


@contextmanager
def _with_everything(
    scene: Scene, url: str, files: Sequence[str], folder: Path, skip: int
) -> Iterator[Iterator[int]]:
    """`stoker stage` of the whole dataset, then training."""
    with Cache(folder) as cache:
        near = stage(url, cache).path
        yield _pieces((near / name for name in [*files] * scene.epochs), skip)


@contextmanager
def _with_a_share(
    scene: Scene, url: str, files: Sequence[str], folder: Path, skip: int
) -> Iterator[Iterator[int]]:
    """Stoker's cache brings what this node reads, in that order, while training goes on."""
    with Cache(folder) as cache:
        near = cache.at(url)
        near.prefetch(files)
        yield _pieces_that_land(near, [*files] * scene.epochs, skip)
        near.close()


def _pieces_that_land(near: Near, names: Sequence[str], skip: int) -> Iterator[int]:
    """As `feed` reads: what is needed next comes next, and the rest once training has begun."""
    sizes = {file.name: file.bytes for unit in near.units for file in unit.files}
    for name in names:
        for at in range(0, sizes[name], PIECE):
            size = min(PIECE, sizes[name] - at)
            if skip >= size:
                skip -= size
                continue
            near.within(name, at, at + size)
            yield size
            near.cache.through.go()


def _pieces(paths: Iterable[Path], skip: int) -> Iterator[int]:
    for path in paths:
        size = path.stat().st_size
        if skip >= size:
            skip -= size
            continue
        with path.open("rb") as file:
            file.seek(skip)
            skip = 0
            while piece := file.read(PIECE):
                yield len(piece)


_READERS: dict[str, Callable[..., Any]] = {
    "none": _from_the_store,
    "everything": _with_everything,
    "share": _with_a_share,
}
