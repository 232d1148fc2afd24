"""Which lines of a loop make its batches: read off the source, as tutorials write it."""

from __future__ import annotations

from textwrap import dedent

import pytest

from stoker.watch.inside.flow import Flow

NANO = """\
    X, Y = get_batch("train")
    while True:
        logits, loss = model(X, Y)
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
        optimizer.step()
        print(loss.item())
        norms = [p.grad.norm() for p in model.parameters()]
    """
BY_HAND = """\
    w = torch.randn(4, 4, requires_grad=True)
    for i in range(100):
        x = make(i)
        h = torch.tanh(x @ w)
        loss = h.sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
    """
HELPERS = """\
    def train_step(model, batch):
        loss = model(batch)
        loss.backward()

    def main(model):
        for text in pages():
            batch = encode(text)
            train_step(model, batch)
            report(model)
    """
CLOSURE = """\
    for i in range(10):
        window = load(i)

        def closure():
            loss = seq(window)
            loss.backward()
            return loss

        optimizer.step(closure)
        note = describe(i)
    """


@pytest.mark.parametrize(
    ("source", "makes", "does_not"),
    [
        (NANO, {1, 4}, {3, 5, 6, 7, 8}),
        (BY_HAND, {3}, {1, 4, 5, 6, 7, 8}),
        (HELPERS, {6, 7}, {8, 9}),
        (CLOSURE, {2}, {9, 10}),
    ],
    ids=["nano", "by hand", "helpers", "closure"],
)
def test_a_line_makes_a_batch_where_its_value_goes_into_the_loss_and_no_weights_into_it(
    source: str, makes: set[int], does_not: set[int]
) -> None:
    flow = Flow(dedent(source))
    found = {line for line in range(1, len(source.splitlines()) + 1) if flow.makes_batch(line)}
    assert makes <= found
    assert not does_not & found


def test_a_hand_written_update_is_the_optimizers_work() -> None:
    flow = Flow(dedent(BY_HAND))
    assert [line for line in range(1, 9) if flow.updates_weights(line)] == [7, 8]
    assert flow.computes(4)
    assert flow.computes(5)


def test_a_loop_is_known_from_its_first_line_to_its_last() -> None:
    flow = Flow("a = 1\nfor i in range(3):\n    for j in range(2):\n        step()\n    log()\nupload()\n")
    assert flow.loop_around(4) == (2, 5)
    assert flow.loop_around(6) is None
