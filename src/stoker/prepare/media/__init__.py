"""Images, audio and video, from folders, tables and tars to samples of WebDataset shards."""
