"""Every remedy is tried in a scene, or it is said why not."""

from __future__ import annotations

import yaml
from remedies import remedies, where_tried, why_not


def test_no_remedy_is_untried_without_its_reason() -> None:
    assert [row for row in remedies() if not where_tried(*row) and not why_not(row[1])] == []


def test_manifest_lines_are_yaml() -> None:
    lines = [line for _, line in remedies() if line.startswith("spec.")]
    assert len(lines) > 5
    for line in lines:
        ((path, value),) = yaml.safe_load(line).items()
        assert path.startswith("spec.")
        assert value
