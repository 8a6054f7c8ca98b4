"""The parameter server: shards, and the worker that pushes gradients to them and fetches weights."""
