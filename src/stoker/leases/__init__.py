"""Who works on a thing, decided without locks."""
