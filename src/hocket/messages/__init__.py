"""ZeroMQ links: checked headers, raw tensor bytes, keys."""
