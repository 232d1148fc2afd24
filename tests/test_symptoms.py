"""Every finding and error that people arrive with leads to a page, and every page to what shows it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from stoker.cli import run
from stoker.cli import stoker as command
from stoker.cli.diagnose import plain
from stoker.diagnose.rules import RULES, diagnose
from stoker.errors import StokerError
from stoker.findings import Finding
from stoker.report.card import card_text
from stoker.report.html import report
from stoker.report.summary import summarise
from stoker.symptoms import SYMPTOMS, Symptom, page_of, page_of_text
from stoker.watch.runs.flat import read_flat

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs" / "symptoms").glob("*.md"))}
HEADINGS = ["What you see", "What it means", "The one command", "The cure", "What leads here"]
WITHOUT = {"crashed", "interrupted"}  # a crash has the page of what it said, Ctrl-C needs none

# What people paste, and the page they should come to.
PASTED = {
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers "
    "are out of shared memory. Please try to raise your shared memory limit.": "dataloader-worker-bus-error",
    "unable to write to file </torch_4711_0>: No space left on device (28)": "dataloader-worker-bus-error",
    "DataLoader worker (pid(s) 4711) exited unexpectedly": "dataloader-worker-exited-unexpectedly",
    "DataLoader worker (pid 4711) is killed by signal: Killed.": "dataloader-worker-exited-unexpectedly",
    "OSError: [Errno 24] Too many open files": "too-many-open-files",
    "RuntimeError: received 0 items of ancdata": "too-many-open-files",
    "CUDA out of memory. Tried to allocate 2.00 GiB": "cuda-out-of-memory",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(": "nccl-watchdog-timeout",
    "OSError: [Errno 28] No space left on device": "no-space-left-on-device",
    "the saved position belongs to another order": "loss-differs-after-resume",
    "429 Too Many Requests": "429-too-many-requests",
}
NAMED = (  # by what they are searched for, though no program prints them
    ("GPU utilization 100% but slow", "gpu-utilization-100-but-slow"),
    ("GPU utilization 0%", "gpu-utilization-0"),
    ("training slow on NFS", "training-slow-on-nfs"),
    ("loss differs after resume", "loss-differs-after-resume"),
    ("checkpoint saving slow", "checkpoint-saving-slow"),
)


def test_every_page_is_in_the_table_and_in_the_index() -> None:
    assert {one.page for one in SYMPTOMS} == set(PAGES)
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"\(symptoms/([\w-]+)\.md\)", index)) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_means_the_command_and_the_cure(page: str) -> None:
    assert re.findall(r"^## (.+)$", PAGES[page], re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda one: one.page)
def test_a_page_names_what_leads_to_it(symptom: Symptom) -> None:
    told = PAGES[symptom.page].partition("## What leads here\n")[2]
    named = [*(f"the finding `{one}`" for one in symptom.findings)]
    assert re.findall(r"^- (.+)$", told, re.MULTILINE) == [
        *named,
        *(f"an error with `{one}`" for one in symptom.signs),
    ]


@pytest.mark.parametrize(("text", "page"), PASTED.items())
def test_a_text_that_people_paste_stands_on_its_page_word_for_word(text: str, page: str) -> None:
    assert text in PAGES[page]
    assert page_of_text(text) == f"docs/symptoms/{page}.md"


@pytest.mark.parametrize(("text", "page"), NAMED)
def test_what_people_search_for_stands_on_its_page(text: str, page: str) -> None:
    assert text in PAGES[page]


def test_every_rule_leads_to_a_page() -> None:
    kinds = {rule.__name__ for rule in RULES} - WITHOUT
    assert {kind for kind in kinds if not page_of(Finding(kind=kind, summary=""))} == set()
    named = {one.partition("/")[0] for symptom in SYMPTOMS for one in symptom.findings}
    assert named <= {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda one: one.page)
def test_a_finding_leads_to_its_own_page(symptom: Symptom) -> None:
    for name in symptom.findings:
        kind, _, cause = name.partition("/")
        assert page_of(Finding(kind=kind, cause=cause, summary="")) == symptom.path
    for sign in symptom.signs:
        assert page_of_text(f"there was {sign}, alas") == symptom.path


def test_a_crash_leads_to_the_page_of_what_it_said() -> None:
    crash = Finding(kind="crashed", cause="exception", summary="the job ended with CUDA out of memory. Tried")
    assert page_of(crash).endswith("/cuda-out-of-memory.md")
    worker = Finding(
        kind="crashed", cause="worker", summary="the job ended with loader worker killed by SIGBUS"
    )
    assert page_of(worker).endswith("/dataloader-worker-bus-error.md")
    assert page_of(Finding(kind="crashed", cause="exception", summary="ValueError: no")) == ""


def test_the_card_the_report_and_json_name_the_page() -> None:
    recording = read_flat(ROOT / "examples" / "starved_cpu.jsonl")
    found = diagnose(recording)
    page = page_of(found.findings[0])
    summary = summarise(recording, found.findings)
    assert page == "docs/symptoms/gpu-utilization-0.md"
    assert page in card_text(summary)
    assert page in report(summary)
    assert plain(found)["pages"][0] == page


def test_an_error_of_the_command_names_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise StokerError("cannot read s3://b/x: the server answers 429 SlowDown", hint="wait")

    monkeypatch.setattr(command, "main", fail)
    assert run(["stage"]) == 1
    assert capsys.readouterr().err.endswith("hint: wait\nmore: docs/symptoms/429-too-many-requests.md\n")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_exist_with_their_options(page: str) -> None:
    (block,) = re.findall(r"^```sh\n(.+)\n```$", PAGES[page], re.MULTILINE)
    assert block.startswith("stoker ")
    for line in [block, *re.findall(r"`(stoker (?!\.)[a-z][^`]*)`", PAGES[page])]:
        check_command(line)


def check_command(line: str) -> None:
    words = shlex.split(line)[1:]
    words = words[: words.index("--")] if "--" in words else words
    found: click.Command = command
    context = click.Context(command)
    while isinstance(found, click.Group) and words and (child := found.get_command(context, words[0])):
        found, words = child, words[1:]
    if isinstance(found, click.Group) and (child := found.get_command(context, "run")):
        found = child
    assert found is not command, line
    known = {name for one in found.params for name in one.opts}
    assert {word for word in words if word.startswith("--")} <= known, line
