"""A network namespace for a process of a test, and for what it starts."""

from __future__ import annotations

import ctypes
import os
import sys

NAMESPACE = "HOCKET_TEST_NAMESPACE"
_CLONE_NEWNET = 0x40000000


def enter_namespace() -> None:
    """Move this process to the namespace that its environment names, if any."""
    if namespace := os.environ.pop(NAMESPACE, None):
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                sys.exit(f"no way into {namespace}: {os.strerror(ctypes.get_errno())}")
