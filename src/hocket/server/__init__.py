"""Asynchronous programs: shards that hold the truth, workers that push and fetch, and how they meet."""
