"""Transfer engine: bytes of remote files over HTTP. `transfer.Course` owns every retry in here."""
