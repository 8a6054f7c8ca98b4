"""The keys of a job, which authenticate listeners and callers on links between machines.

Two CURVE key pairs (elliptic-curve keys of ZeroMQ, written as 40 letters of Z85): the listeners' and the workers'. All processes of
a job hold the same file, so a process that has it belongs to the job. Links with keys are encrypted, and both ends authenticated.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import zmq
from zmq.utils import z85

from hocket.errors import HocketError

_FORMAT = 1


@dataclass(frozen=True)
class Keys:
    """Public and secret keys of listeners (``server``) and callers (``worker``); printing them does not show the secrets."""

    server_public: str
    server_secret: str = field(repr=False)
    worker_public: str
    worker_secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for public, secret in ((self.server_public, self.server_secret), (self.worker_public, self.worker_secret)):
            if not (_is_key(public) and _is_key(secret)):
                raise HocketError("A key is 40 letters of Z85: make a new set with `hocket keys FILE`.")
            if zmq.curve_public(secret.encode()) != public.encode():
                raise HocketError("A public key does not belong to its secret key: make a new set with `hocket keys FILE`.")

    @classmethod
    def make(cls) -> Keys:
        """Fresh keys.

        >>> Keys.make() == Keys.make()
        False
        """
        if not zmq.has("curve"):
            raise HocketError("This build of ZeroMQ has no CURVE: install pyzmq from its wheels.")
        (server_public, server_secret), (worker_public, worker_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server_public.decode(), server_secret.decode(), worker_public.decode(), worker_secret.decode())

    def write(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write a file that only its owner can read, completely or not at all."""
        path = Path(path)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                os.fchmod(file.fileno(), 0o600)
                json.dump({"hocket_keys": _FORMAT, **asdict(self)}, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(beside, path)
            else:
                os.link(beside, path)  # unlike a rename it fails if the file exists
        except FileExistsError:
            raise HocketError(f"{path} exists already: choose another name, or overwrite it with --force.") from None
        except OSError as error:
            raise HocketError(f"{path} cannot be written: {error.strerror}.") from None
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a file of ``write``; refuse one that other users can read."""
        try:
            with open(path, encoding="utf-8") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise HocketError(f"Other users can read the keys in {path}: protect the file with `chmod 600 {path}`.")
                text = file.read(4096)
        except FileNotFoundError:
            raise HocketError(f"There are no keys at {path}: make them with `hocket keys {path}`.") from None
        except OSError as error:
            raise HocketError(f"The keys in {path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            text = ""
        try:
            found = json.loads(text)
            if found.pop("hocket_keys") != _FORMAT or set(found) != {f.name for f in fields(cls)}:
                raise ValueError
            return cls(**found)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise HocketError(
                f"{path} is not a file of keys, or damaged: make a new one with `hocket keys {path} --force`."
            ) from None


def _is_key(text: object) -> bool:
    if not isinstance(text, str) or len(text) != 40 or not text.isascii():
        return False
    try:
        return len(z85.decode(text.encode())) == 32
    except (KeyError, ValueError):
        return False
