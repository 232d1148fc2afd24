"""Origins: what a URL names (a dataset, a folder, a hub repository), and where each file is read from."""
