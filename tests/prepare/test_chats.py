"""Chats: rendered as transformers renders them, with a loss mask of what the assistant says."""

from __future__ import annotations

import json
import shutil
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.errors import BadInputError, TaskError, TokenizerError, UsageError
from stoker.manifest import read_manifest
from stoker.prepare.check import verify_dataset
from stoker.prepare.sources.documents import Conversation, Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Read = Callable[..., list[list[int]]]

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAYING = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n"
    "{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [
    [
        {"role": "system", "content": "Be <brief> & kind."},
        {"role": "user", "content": f"What is {n} + 1? ä"},
        {"role": "assistant", "content": f"It is {n + 1}."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "어서 오세요 ✓"},
    ]
    for n in range(40)
]


@pytest.fixture
def chatty(tokenizer_path: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a tokenizer that has this chat template."""

    def folder(template: str) -> Path:
        made = tmp_path / "chatty"
        made.mkdir()
        shutil.copy(tokenizer_path, made / "tokenizer.json")
        config = {
            "chat_template": template,
            "bos_token": {"content": "<|endoftext|>"},
            "eos_token": "<|endoftext|>",
        }
        (made / "tokenizer_config.json").write_text(json.dumps(config))
        return made

    return folder


def written(path: Path, chats: list[Any], name: str = "messages") -> Path:
    path.write_text("".join(json.dumps({name: chat}) + "\n" for chat in chats))
    return path


def reading(*, mask: bool = False, field: str = "messages") -> Reading:
    return Reading(chat=field, conversation=Conversation(mask=mask))


def rendered(folder: Path, template: str, chat: Any) -> tuple[str, list[int], list[int]]:
    """(text, ids, mask) by transformers itself."""
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>", chat_template=template
    )
    text = theirs.apply_chat_template(chat, tokenize=False)
    both = theirs.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask="generation" in template
    )
    plain = theirs.backend_tokenizer.encode(text, add_special_tokens=False)
    mask = both.get("assistant_masks", [])
    return str(text), plain.ids, list(mask)


@pytest.mark.parametrize("template", [CHATML, SAYING])
def test_chats_are_rendered_as_transformers_renders_them(
    template: str, chatty: Any, make: Make, read_tokens: Read, tmp_path: Path
) -> None:
    folder = chatty(template)
    make(written(tmp_path / "a.jsonl", CHATS), tokenizer=folder, reading=reading(), shuffle=False, eod="none")
    assert read_tokens(tmp_path / "out") == [rendered(folder, template, chat)[1] for chat in CHATS]


def test_the_loss_mask_is_that_of_transformers(
    chatty: Any, make: Make, read_tokens: Read, tmp_path: Path
) -> None:
    folder = chatty(SAYING)
    make(written(tmp_path / "a.jsonl", CHATS), tokenizer=folder, reading=reading(mask=True), shuffle=False)
    masks = read_tokens(tmp_path / "out" / "loss_mask")
    assert masks == [[*rendered(folder, SAYING, chat)[2], 0] for chat in CHATS]
    assert sum(map(sum, masks)) > 0


def test_turn_by_turn_the_mask_is_the_same_without_the_tag(
    chatty: Any, make: Make, read_tokens: Read, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", CHATS)
    folder = chatty(SAYING)
    make(path, tokenizer=folder, reading=reading(mask=True), out=tmp_path / "one")
    (folder / "chat_template.jinja").write_text(CHATML)
    make(path, tokenizer=folder, reading=reading(mask=True), out=tmp_path / "two")
    for part in ("", "loss_mask"):
        assert read_tokens(tmp_path / "one" / part) == read_tokens(tmp_path / "two" / part)


@pytest.mark.parametrize("zstd", [False, True])
def test_masks_lie_beside_tokens_shard_by_shard_and_megatron_reads_them(
    zstd: bool, chatty: Any, make: Make, megatron: Any, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", CHATS)
    made = make(
        path, tokenizer=chatty(CHATML), reading=reading(mask=True), zstd=zstd, holdout=(("test", 0.2),)
    )
    for folder in (tmp_path / "out", tmp_path / "out" / "test"):
        tokens, masks = read_manifest(folder), read_manifest(folder / "loss_mask")
        assert [(s.name, s.samples, s.tokens) for s in tokens.shards] == [
            (s.name, s.samples, s.tokens) for s in masks.shards
        ]
        assert (verify_dataset(str(folder)), verify_dataset(str(folder / "loss_mask"))) == ([], [])
        if not zstd:
            ids, mask = (
                megatron.IndexedDataset(str(where / "shard-00000"))
                for where in (folder, folder / "loss_mask")
            )
            assert [len(one) for one in ids] == [len(one) for one in mask]
            assert set(np.concatenate([mask[n] for n in range(len(mask))]).tolist()) == {0, 1}
    assert made.manifest.samples + read_manifest(tmp_path / "out" / "test").samples == len(CHATS)


def test_a_webdataset_sample_has_its_loss_mask(chatty: Any, make: Make, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", CHATS)
    make(path, tokenizer=chatty(SAYING), reading=reading(mask=True), format="webdataset")
    with tarfile.open(tmp_path / "out" / "shard-00000.tar") as tar:
        members = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    stems = sorted({name.partition(".")[0] for name in members})
    assert len(stems) == len(CHATS)
    for stem in stems:
        ids, mask = (json.loads(members[f"{stem}.{kind}.json"]) for kind in ("token_ids", "loss_mask"))
        assert len(ids) == len(mask)
        assert max(ids) < 2000
        assert 0 < sum(mask) < len(mask)
        assert "\ufdd0" not in members[f"{stem}.text.txt"].decode()


def test_sharegpt_turns_and_tools_are_understood(
    chatty: Any, make: Make, read_tokens: Read, tmp_path: Path
) -> None:
    shared = [[{"from": "human", "value": f"Hi {n}"}, {"from": "gpt", "value": "Hello"}] for n in range(5)]
    plain = [
        [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "Hello"}] for n in range(5)
    ]
    folder = chatty(CHATML)
    one = written(tmp_path / "a.jsonl", shared, "conversations")
    make(one, tokenizer=folder, reading=reading(field="conversations"), out=tmp_path / "one")
    make(written(tmp_path / "b.jsonl", plain), tokenizer=folder, reading=reading(), out=tmp_path / "two")
    assert read_tokens(tmp_path / "one") == read_tokens(tmp_path / "two")


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ([], "no list of messages"),
        ("{", "neither a list of messages nor JSON"),
        ([{"content": "x"}], "not role and content"),
        ([{"role": "user", "content": "a\ufdd0b"}], r"U\+FDD0"),
    ],
)
def test_messages_that_are_none_are_told(
    chat: Any, said: str, chatty: Any, make: Make, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", [CHATS[0], chat])
    with pytest.raises((BadInputError, TaskError), match=said):
        make(path, tokenizer=chatty(CHATML), reading=reading())


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}x",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_can_do_nothing_but_write(template: str, chatty: Any, make: Make, tmp_path: Path) -> None:
    with pytest.raises((BadInputError, TaskError), match="the chat template refuses it"):
        make(written(tmp_path / "a.jsonl", CHATS), tokenizer=chatty(template), reading=reading())


def test_a_template_that_looks_back_has_no_mask(chatty: Any, make: Make, tmp_path: Path) -> None:
    last_only = CHATML.replace("messages %}", "messages[-2:] %}")
    with pytest.raises((BadInputError, TaskError), match="turn by turn"):
        make(written(tmp_path / "a.jsonl", CHATS), tokenizer=chatty(last_only), reading=reading(mask=True))


def test_a_tokenizer_without_a_template_is_told(make: Make, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        make(written(tmp_path / "a.jsonl", CHATS), reading=reading())


def test_a_loss_mask_without_a_chat_is_refused(make: Make, corpus: Path) -> None:
    with pytest.raises(UsageError, match="chats"):
        make(corpus, reading=Reading(conversation=Conversation(mask=True)))
