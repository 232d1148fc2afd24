"""Checkpoints of others: recognised, read, imported, refused where they are not to be trusted; and back."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import struct
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from stoker.checkpoint.foreign.exporting import export_dcp, export_torch
from stoker.checkpoint.foreign.importing import import_checkpoint
from stoker.checkpoint.foreign.kinds import recognise
from stoker.checkpoint.foreign.naming import renaming
from stoker.checkpoint.foreign.opening import open_source
from stoker.checkpoint.foreign.source import Foreign, whole
from stoker.checkpoint.saved.export import export
from stoker.cli.checkpoint import command
from stoker.errors import BadCheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

MADE = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn,
)  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    made = {
        f"layers.{at}.{str(dtype).removeprefix('torch.')}": (torch.arange(15).reshape(3, 5) % 7).to(dtype)
        for at, dtype in enumerate(MADE)
    }
    return {**made, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.rand(4, 6).t()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(
            one[name].contiguous().view(-1).view(torch.uint8),
            other[name].contiguous().view(-1).view(torch.uint8),
        )
        for name in one
    )


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(state, checkpoint_id=folder)
    return folder


def load_dcp(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    return state


def save_torch(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


def save_model(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """As Hugging Face's save_pretrained: two files and their index."""
    folder.mkdir()
    names = sorted(state)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in shards.items():
        save_file({name: state[name].contiguous() for name in mine}, folder / file)
    where = {name: file for file, mine in shards.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text("{}")
    return folder


def save_bin(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """As older ones are."""
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def save_lightning(model: dict[str, Any], path: Path, **more: Any) -> Path:
    torch.save({"state_dict": model, "global_step": 40, "pytorch-lightning_version": "2.6.6", **more}, path)
    return path


SAVERS: dict[str, Callable[[dict[str, torch.Tensor], Path], Path]] = {
    "dcp": lambda state, tmp: save_dcp({"model": state}, tmp / "dcp"),
    "dcp-bare": lambda state, tmp: save_dcp(dict(state), tmp / "dcp"),
    "torch": lambda state, tmp: save_torch({"model": state, "step": 3}, tmp / "state.pt"),
    "torch-bare": lambda state, tmp: save_torch(state, tmp / "model.pth"),
    "safetensors": lambda state, tmp: (
        save_file({name: one.contiguous() for name, one in state.items()}, tmp / "model.safetensors")
        or tmp / "model.safetensors"
    ),
    "hugging-face": lambda state, tmp: save_model(state, tmp / "hf"),
    "hugging-face-bin": lambda state, tmp: save_bin(state, tmp / "hf"),
    "lightning": lambda state, tmp: save_lightning(state, tmp / "last.ckpt"),
}


@pytest.fixture(params=list(SAVERS))
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = tensors()
    return SAVERS[request.param](state, tmp_path), state


# --- in -----------------------------------------------------------------------------------------------


def test_a_run_begins_with_what_others_saved(foreign, open_checkpointer) -> None:
    source, state = foreign
    mine = {name: torch.zeros_like(one) for name, one in state.items()}
    ck = open_checkpointer(say=lambda line: None)
    restored = ck.restore(source=source, model=mine)
    assert equal(mine, state)
    assert not restored.fresh


def test_imported_tensors_are_equal_and_keep_their_names(foreign, open_checkpointer, tmp_path: Path) -> None:
    source, state = foreign
    name = import_checkpoint(open_source(source), tmp_path / "run")
    ck = open_checkpointer()
    assert ck.latest().verify() == []
    assert ck.latest().manifest.marks.reason == f"imported from {source}"
    assert equal(ck.load(name=name, keys=["model."])["model"], state)


def test_a_foreign_folder_is_never_a_fresh_start(foreign, open_checkpointer) -> None:
    source, state = foreign
    ck = open_checkpointer(source if source.is_dir() else source.parent)
    with pytest.raises(UsageError, match="holds a") as caught:
        ck.restore(model=state)
    assert "restore(source=" in caught.value.hint
    assert "stoker checkpoint import" in caught.value.hint


def test_one_checkpoint_is_no_run_folder(open_checkpointer, tmp_path: Path) -> None:
    ck = open_checkpointer()
    ck.save(5, state={"w": torch.ones(3)})
    ck.wait()
    name = ck.latest().name
    other = open_checkpointer(tmp_path / "run" / name)
    with pytest.raises(UsageError, match="one checkpoint of stoker") as caught:
        other.restore(state={"w": torch.zeros(3)})
    assert (
        caught.value.hint
        == f"make the Checkpointer on {tmp_path / 'run'}; restore(name={name!r}) takes this very one"
    )


def test_a_run_goes_on_from_its_own_checkpoints_and_not_from_the_source(
    open_checkpointer, tmp_path: Path
) -> None:
    source = save_torch({"w": torch.ones(3)}, tmp_path / "model.pt")
    ck = open_checkpointer()
    ck.save(5, model={"w": torch.full((3,), 5.0)})
    ck.wait()
    model = {"w": torch.zeros(3)}
    assert ck.restore(source=source, model=model).step == 5
    assert model["w"].tolist() == [5.0] * 3


def test_a_run_begins_with_the_checkpoint_of_another_run(open_checkpointer, tmp_path: Path) -> None:
    with open_checkpointer(tmp_path / "before") as before:
        before.save(9, model={"w": torch.full((3,), 9.0)})
    model = {"w": torch.zeros(3)}
    assert open_checkpointer().restore(source=tmp_path / "before", model=model).step == 9
    assert model["w"].tolist() == [9.0] * 3


def test_an_optimizer_that_torch_numbered_comes_back(make_job, same, open_checkpointer, tmp_path) -> None:
    job, other = make_job(), make_job(seed=1)
    job.step()
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": 1}
    said: list[str] = []
    ck = open_checkpointer(say=said.append)
    for source in (save_torch(state, tmp_path / "x.pt"), save_dcp(state, tmp_path / "x-dcp")):
        restored = ck.restore(source=source, **other.objects)
        assert same(job.state(), other.state())
        assert (restored.step, restored.absent) == (1, ("schedule",))
        assert said.pop() == f"restored step 1 from {source}; not in it, and as they were: schedule"


def test_tied_weights_that_a_file_leaves_out_are_no_loss(open_checkpointer, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.arange(21.0).reshape(7, 3)}, tmp_path / "model.safetensors")
    open_checkpointer().restore(source=tmp_path / "model.safetensors", model=model)
    assert model[1].weight.detach().flatten().tolist() == list(range(21))


def test_the_newest_of_a_folder_of_checkpoints_is_taken(tmp_path: Path) -> None:
    for step in (9, 10):
        save_dcp({"model": {"w": torch.full((2,), float(step))}}, tmp_path / f"step-{step}")
    assert open_source(tmp_path).step == 10


def test_names_that_begin_otherwise_are_renamed(tmp_path: Path) -> None:
    state = {"app": {"model": {"a.b": torch.ones(2)}, "optim": {"state": {"a.b": {"exp": torch.ones(2)}}}}}
    source = save_torch(state, tmp_path / "x.pt")
    found = open_source(source, rename={"app.model.": "model.net.", "app.optim.": "optimizer."})
    paths = [piece.box.path for _, piece in found.pieces()]
    assert paths == [("model", "net.a.b"), ("optimizer", "state", "a.b", "exp")]


@pytest.mark.parametrize(
    ("rename", "before", "after"),
    [
        ({"model.": "model.net."}, ("model", "a.b"), ("model", "net.a.b")),
        ({"model.net.": "model."}, ("model", "net.a"), ("model", "a")),
        ({"net": "model"}, ("net", "a"), ("model", "a")),
        ({"other.": "model."}, ("net", "a"), ("net", "a")),
        ({"net.a.": "m."}, ("net", "a"), ("m",)),
    ],
)
def test_a_renamed_path(rename, before, after) -> None:
    assert renaming(rename)(before) == after


def test_objects_that_the_source_does_not_know_are_named(open_checkpointer, tmp_path: Path) -> None:
    source = save_torch({"net": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="holds 'ema', 'net', and none of 'model'"):
        open_checkpointer().restore(source=source, model={"w": torch.zeros(2)})


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([], None),
        (["notes.txt", ".board.json", "logs/x.pt"], None),
        (["000001-step-000000005-3f9ac2d1/part-00000.bin"], None),
        (["step-100/.metadata", "step-100/__0_0.distcp"], "(DCP)"),
        (
            ["iter_0000100/.metadata", "iter_0000100/common.pt", "latest_checkpointed_iteration.txt"],
            "Megatron",
        ),
        (["global_step10/mp_rank_00_model_states.pt", "latest"], "DeepSpeed"),
        (["checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt"], "Hugging Face"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "Hugging Face"),
    ],
)
def test_what_is_a_checkpoint_and_what_is_not(names: list[str], kind: str | None) -> None:
    found = recognise(names)
    assert (found is None) == (kind is None)
    assert not kind or kind in found.kind


# --- not to be trusted --------------------------------------------------------------------------------


class Evil:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


def test_a_pickle_with_code_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    save_torch({"model": {"w": torch.ones(2)}, "x": Evil(flag)}, tmp_path / "evil.pt")
    with pytest.raises(BadCheckpointError, match="only running its code"):
        open_source(tmp_path / "evil.pt")
    (tmp_path / "evil-dcp").mkdir()
    (tmp_path / "evil-dcp" / ".metadata").write_bytes(pickle.dumps(Evil(flag)))
    with pytest.raises(BadCheckpointError, match=r"it would use (posix|os|nt)\.mkdir"):
        open_source(tmp_path / "evil-dcp")
    assert not flag.exists()


def test_code_in_a_plain_value_of_a_dcp_folder_does_not_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    save_dcp({"model": {"w": torch.ones(2)}, "x": Evil(flag)}, tmp_path / "dcp")
    with pytest.raises(BadCheckpointError, match="only running its code"):
        open_source(tmp_path / "dcp")
    assert not flag.exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"w": name}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpointError, match="not beside it"):
        open_source(tmp_path / "hf")


def test_a_table_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "dcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    for info in table.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(BadCheckpointError, match="not beside it"):
        open_source(folder)


class OlderPickler(pickle.Pickler):
    """Python 3.11.0 to 3.11.3, Debian's among them, write a member of an Enum as a call of getattr."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def written_by_older(value: Any) -> bytes:
    buffer = io.BytesIO()
    OlderPickler(buffer).dump(value)
    return buffer.getvalue()


def test_a_table_of_an_older_python_is_read(tmp_path: Path) -> None:
    folder = save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "dcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(written := written_by_older(table))
    assert b"getattr" in written
    import_checkpoint(open_source(folder), tmp_path / "run")


@pytest.mark.parametrize("name", ["__class__", "mro", "__init__"])
def test_a_table_gets_no_attribute_of_anything_but_a_member(name: str, tmp_path: Path) -> None:
    folder = save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "dcp")
    kind = dcp.metadata._MEM_FORMAT_ENCODING
    (folder / ".metadata").write_bytes(pickle.dumps(Asks(getattr, kind, name)))
    with pytest.raises(BadCheckpointError, match="it would use"):
        open_source(folder)


class Asks:
    """A pickle that calls what it likes."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._reduced = call, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def test_a_table_that_lacks_a_piece_is_refused(tmp_path: Path) -> None:
    folder = save_dcp({"model": {"w": torch.ones(4)}}, tmp_path / "dcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.state_dict_metadata["model.w"].size = torch.Size([8])
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(BadCheckpointError, match="4 of 8 elements"):
        open_source(folder)


HEADERS = {
    "longer than the file": {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "of another size": {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "negative": {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}},
    "of no dtype": {"w": {"dtype": "F9", "shape": [2], "data_offsets": [0, 8]}},
    "no table": [1],
    "two in the same bytes": {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("v", "w")
    },
    "bytes of nobody": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
}


@pytest.mark.parametrize("why", HEADERS)
def test_a_safetensors_header_that_cannot_be_is_refused(why: str, tmp_path: Path) -> None:
    text = json.dumps(HEADERS[why]).encode()
    length = len(text) + (1 << 40) * (why == "longer than the file")
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + text + bytes(8))
    with pytest.raises(BadCheckpointError, match="cannot be used"):
        open_source(tmp_path / "x.safetensors")


def test_a_safetensors_header_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    entry = '"w": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    text = f"{{{entry % (0, 4)}, {entry % (4, 8)}}}".encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(BadCheckpointError, match="'w' is in it twice"):
        open_source(tmp_path / "x.safetensors")


def test_an_index_that_names_what_its_files_do_not_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-1.safetensors")
    names = {"w": "model-1.safetensors", "v": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpointError, match="it names v, which is in none of its files"):
        open_source(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.97])
def test_what_is_truncated_is_refused_and_leaves_nothing(foreign, keep: float, tmp_path: Path) -> None:
    source, _ = foreign
    files = (
        [source]
        if source.is_file()
        else [
            path
            for path in source.iterdir()
            if "distcp" in path.name or path.suffix in (".safetensors", ".bin")
        ]
    )
    victim = max(files, key=lambda path: path.stat().st_size)
    os.truncate(victim, int(victim.stat().st_size * keep))
    with pytest.raises(BadCheckpointError):
        import_checkpoint(open_source(source), tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


# --- round trips --------------------------------------------------------------------------------------


def test_dcp_to_stoker_to_dcp(open_checkpointer, tmp_path: Path) -> None:
    job = {"model": tensors(), "optimizer": {"state": {"0": {"exp": torch.rand(3)}}, "lr": 0.1}, "step": 7}
    import_checkpoint(open_source(save_dcp(job, tmp_path / "dcp")), tmp_path / "run")
    export_dcp(open_checkpointer().latest(), tmp_path / "back")
    before, after = (dcp.FileSystemReader(tmp_path / one).read_metadata() for one in ("dcp", "back"))
    assert set(before.state_dict_metadata) == set(after.state_dict_metadata)
    assert before.planner_data == after.planner_data
    empty = {"model": {name: torch.zeros_like(one) for name, one in job["model"].items()}}
    empty |= {"optimizer": {"state": {"0": {"exp": torch.zeros(3)}}, "lr": 0.0}, "step": 0}
    found = load_dcp(empty, tmp_path / "back")
    assert equal(found["model"], job["model"])
    assert torch.equal(found["optimizer"]["state"]["0"]["exp"], job["optimizer"]["state"]["0"]["exp"])
    assert (found["step"], found["optimizer"]["lr"]) == (7, 0.1)


def test_a_model_to_stoker_to_a_model(open_checkpointer, tmp_path: Path) -> None:
    state = tensors()
    import_checkpoint(open_source(save_model(state, tmp_path / "hf")), tmp_path / "run")
    files = export(open_checkpointer().latest(), tmp_path / "back", shard_bytes=100)
    assert len(files) > 1
    assert equal({name: one for file in files for name, one in load_file(file).items()}, state)


def test_torch_to_stoker_to_safetensors_and_to_torch(open_checkpointer, tmp_path: Path) -> None:
    state = {**tensors(), "large": torch.rand(700, 800)}
    state["tied"] = state["large"]
    saved = {"model": state, "note": {"a": [1, (2, 3)]}, "optimizer": {"state": {0: {"m": torch.rand(2)}}}}
    import_checkpoint(open_source(save_torch(saved, tmp_path / "x.pt")), tmp_path / "run")
    found = open_checkpointer().latest()
    (file,) = export(found, tmp_path / "safe")
    assert equal(load_file(file), state)
    (file,) = export_torch(found, tmp_path / "torch")
    assert equal(torch.load(file, weights_only=True), state)
    (file,) = export_torch(found, tmp_path / "all.pt", prefix="")
    back = torch.load(file, weights_only=True)
    assert equal(back["model"], state)
    assert (back["note"], back["optimizer"]["state"][0]["m"].shape) == (saved["note"], (2,))
    assert file.stat().st_size < 3 * 700 * 800 * 4, "torch saves whole storages: each must have its own"


def test_what_shared_memory_shares_it_in_a_torch_file(open_checkpointer, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(700, 800), torch.nn.Linear(800, 700, bias=False))
    model[1].weight = model[0].weight
    ck = open_checkpointer()
    ck.save(1, model=model)
    ck.wait()
    (file,) = export_torch(ck.latest(), tmp_path / "out")
    assert file.stat().st_size < 1.5 * 700 * 800 * 4
    assert equal(torch.load(file, weights_only=True), model.state_dict())
    export_dcp(ck.latest(), tmp_path / "dcp", prefix="model.")
    empty = {name: torch.zeros(700, 800) for name in model.state_dict()}
    assert equal(load_dcp(empty, tmp_path / "dcp"), model.state_dict())


def test_what_ranks_did_not_hold_alike_is_not_left_out_silently(open_checkpointer, tmp_path: Path) -> None:
    held = [whole(("model", "a"), torch.ones(2)), whole(("model@0", "w"), torch.ones(2))]
    held.append(whole(("model@1", "w"), torch.zeros(2)))
    import_checkpoint(Foreign("x", held, {}, step=1, kind="made here"), tmp_path / "run")
    found = open_checkpointer().latest()
    for write in (export, export_torch):
        with pytest.raises(UsageError, match=r"model\.w was not the same on all ranks"):
            write(found, tmp_path / "out")
    (file,) = export(found, tmp_path / "out", prefix="model@1.")
    assert load_file(file)["w"].tolist() == [0.0, 0.0]


# --- the command line ---------------------------------------------------------------------------------


def test_the_command_line_brings_in_and_takes_out(tmp_path: Path) -> None:
    state = tensors()
    source, run = save_torch({"net": state, "step": 12}, tmp_path / "x.pt"), tmp_path / "run"
    said = CliRunner().invoke(
        command, ["import", str(source), "--out", str(run), "--rename", "net.=model.", "--json"]
    )
    facts = json.loads(said.output)
    assert (facts["step"], facts["objects"]) == (12, ["model"])
    for kind in ("dcp", "safetensors", "torch"):
        out = tmp_path / kind
        done = CliRunner().invoke(
            command,
            ["export", str(run), "--out", str(out), "--format", kind],
            catch_exceptions=False,
        )
        assert done.exit_code == 0
    assert equal(torch.load(tmp_path / "torch" / "model.pt", weights_only=True), state)
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_a_file_in_the_place_of_a_folder_is_answered_with_the_right_call(
    tmp_path: Path, open_checkpointer
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"x.pt is a file.*\n.*restore\(source="):
        open_checkpointer(tmp_path / "x.pt")
