"""Write the report's files, each completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hocket.errors import HocketError


def write_files(out: Path, files: dict[str, bytes]) -> None:
    """Put ``files`` (by their path below ``out``) into place: all are written first, then all are renamed."""
    ready: list[tuple[Path, Path]] = []
    path = out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = out / name
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(path.name + ".tmp")
            ready.append((temporary, path))
            temporary.write_bytes(content)
        for temporary, path in ready:
            os.replace(temporary, path)
    except OSError as error:
        remedy = "make room there, or choose another --out" if error.errno == errno.ENOSPC else "choose another --out"
        raise HocketError(f"Cannot write {path} ({error.strerror}); {remedy}.") from None
    finally:
        for temporary, _ in ready:
            temporary.unlink(missing_ok=True)
