"""The curation that flags alone make."""

from __future__ import annotations

from typing import Any

from stoker.prepare.curate.recipe import Curation, Recipe, with_flags


def curation_of(**flags: Any) -> Curation:
    return with_flags(Recipe(curation=Curation()), **flags).curation
