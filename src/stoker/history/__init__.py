"""History: figures of watches, benchmarks and trials over time, in an embedded store.

    from stoker.history.figures import Figure
    from stoker.history.record import record

    record("bench", "bench path /data", [Figure(name="read", value=3.1e9, unit="B/s", better="higher")])

`record` adds where it was measured (machine, cards, commit, versions) and writes one small SQLite file.
"""
