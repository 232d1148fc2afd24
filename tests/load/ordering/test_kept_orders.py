"""A cursor that was saved leads to the same samples in every later version (`kept_orders.py`)."""

from __future__ import annotations

import pytest
from kept_orders import _ORDERS, KEPT, blended, gone_on, of_order, planned

from kept_values import alike, kept, plain

ORDERS = kept(KEPT / "orders.json")
MADE = {"gone on": gone_on, "blended": blended, "planned": planned}


@pytest.mark.parametrize("name", [*_ORDERS, *MADE])
def test_positions_lead_where_they_led(name):
    found = plain(MADE[name]() if name in MADE else of_order(name))
    assert found.keys() == ORDERS[name].keys()
    for part, was in ORDERS[name].items():
        assert alike(was, found[part]), f"{part}: {found[part]}\nwas {was}"
