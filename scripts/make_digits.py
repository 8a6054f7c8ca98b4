"""Write src/hocket/data/digits.bin.gz from scikit-learn's ``load_digits``, and print the SHA-256 of its content.

    python scripts/make_digits.py [FILE]

Needs scikit-learn, which Hocket itself does not: run it in an environment of its own. The result has equal content wherever it
runs (the time stamp in the gzip header is zero); the licence is in ``digits.LICENSE.txt`` beside the file.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "src" / "hocket" / "data" / "digits.bin.gz"


def content() -> bytes:
    """1,797 label bytes, then 64 bytes for each image, row by row."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("make_digits.py needs scikit-learn, which is not installed: pip install scikit-learn")
    digits = load_digits()
    return bytes(digits.target.astype("uint8").tobytes() + digits.images.astype("uint8").tobytes())


def main() -> None:
    """Write the file that the command line names."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    data = content()
    target.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
    print(f"{target}: {target.stat().st_size} bytes, SHA-256 of the content {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
