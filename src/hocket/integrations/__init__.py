"""Hocket inside other people's loops: DDP's hooks, Lightning, Hugging Face, loggers. Each is loaded where it is used."""
