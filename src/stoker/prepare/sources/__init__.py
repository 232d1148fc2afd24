"""Input formats: raw data, whatever it comes in, as blocks of documents."""
