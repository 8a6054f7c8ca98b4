"""Packed shards: WebDataset tar files with an index, read exactly once by any number of workers."""
