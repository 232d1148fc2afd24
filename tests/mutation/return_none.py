"""`return x` becomes `return None`, as a cosmic-ray operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator

_NOTHING = ("None", "False")  # None in their place is the same to whoever asks


class ReturnNone(Operator):
    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "return_stmt" and node.children[1].get_code().strip() not in _NOTHING:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        assert index == 0
        node.children[1:] = [parso.python.tree.Keyword("None", node.children[1].start_pos, " ")]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()
