"""One ZeroMQ socket with the options of all links: bounded queues, keep-alive, time limits, a close that waits.

It has a context of its own, so that the keys of several listeners stay separate.
"""

from __future__ import annotations

import math
import time
from typing import Any

import zmq

from hocket.errors import HocketError
from hocket.transport.frame import FRAME_BYTES, JOB_BYTES, MAX_METADATA_BYTES, MOST_HEADER_BYTES, MOST_TENSORS, Frame

SILENCE_S = 30.0
"""A connection without acknowledgements for so long is dead. Messages behind a full queue are not acknowledged either, so the time
of the largest message at ``SLOWEST_BYTES_PER_S`` is added for each direction, up to ``MOST_SILENCE_S``. On Linux this limit also
replaces the number of TCP's keep-alive probes, so a dead peer on an idle link is noticed no earlier."""
SLOWEST_BYTES_PER_S = 1_000_000
MOST_SILENCE_S = 120.0
_CIPHER_BYTES = 64
"""At least what keys add to a frame."""

_MORE, _POLLOUT = int(zmq.SNDMORE), int(zmq.POLLOUT)


class LinkSocket:
    """A socket that is not yet bound or connected; ``most_bytes`` bounds a message, ``high_water`` each queue, in messages."""

    def __init__(self, kind: int, job: bytes, most_bytes: int, high_water: int, six: bool) -> None:
        if len(job) != JOB_BYTES:
            raise HocketError(f"The id of a job has {JOB_BYTES} bytes, got {len(job)}.")
        if most_bytes < (least := MOST_HEADER_BYTES + MAX_METADATA_BYTES):
            raise HocketError(
                f"A link must accept messages of {least} bytes, the largest without tensors, got most_bytes={most_bytes}."
            )
        if high_water < 1:
            raise HocketError(f"A queue holds at least one message, got high_water={high_water} (ZeroMQ reads 0 as unbounded).")
        self._most, self._most_frames = most_bytes, MOST_TENSORS + 3 + most_bytes // FRAME_BYTES
        # Setting an option takes as long as sending a frame, so only changes are set.
        self._send_ms = self._receive_ms = -1
        self.context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        set_options(self.socket, most_bytes, high_water, six)
        self._send: Any = super(zmq.Socket, self.socket).send  # without the checks for draft kinds of sockets

    def take(self, deadline: float) -> list[Frame] | None:
        """All frames of the next message, or None when the time is up.

        Of a message with too many frames or bytes only enough is kept to detect that.
        """
        # ZeroMQ's own time limit: a poller costs as much as the rest. Rounded up, or the last millisecond would be a busy loop.
        wait_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000))
        if wait_ms != self._receive_ms:
            self.socket.setsockopt(zmq.RCVTIMEO, wait_ms)
            self._receive_ms = wait_ms
        receive = self.socket.recv
        try:
            frame = receive(copy=False)
        except zmq.Again:
            return None
        frames: list[Frame] = [frame]
        total = len(frame)
        while frame.more:  # a message arrives as a whole: nothing to wait for
            frame = receive(copy=False)
            if total <= self._most and len(frames) <= self._most_frames:
                frames.append(frame)
            total += len(frame)
        return frames

    def put(self, frames: list[Frame], small: int, timeout_s: float) -> bool:
        """Whether the message was queued in time; the first ``small`` frames are copied, which is faster for small ones."""
        total = sum(map(len, frames))
        if total > self._most:
            raise HocketError(f"A message of {total} bytes does not fit this link, whose limit is {self._most}: send it in pieces.")
        wait_ms = max(0, math.ceil(timeout_s * 1000))
        if wait_ms != self._send_ms:
            self.socket.setsockopt(zmq.SNDTIMEO, wait_ms)
            self._send_ms = wait_ms
        if not self._begin(frames[0]):
            return False
        last = len(frames) - 1
        for k in range(1, last + 1):
            self._send(frames[k], _MORE if k < last else 0, k < small)
        return True

    def close(self, linger_s: float) -> None:
        """Close, after waiting at most ``linger_s`` until queued messages are sent."""
        if not self.context.closed:
            self.socket.disable_monitor()
            self.socket.close(int(linger_s * 1000))
            self.context.term()  # waits for queued messages, and wakes threads that wait in the context

    def _begin(self, frame: Frame) -> bool:
        """Send the first frame; ZeroMQ accepts or refuses all frames with it."""
        try:
            self._send(frame, _MORE)
        except zmq.Again:
            # ZeroMQ checks the queue only once in a millisecond, unless it is asked.
            if not int(self.socket.getsockopt(zmq.EVENTS)) & _POLLOUT:
                return False
            try:
                self._send(frame, _MORE)
            except zmq.Again:
                return False
        return True


def set_options(socket: zmq.Socket[bytes], most_bytes: int, high_water: int, six: bool) -> None:
    """Set the options of both ends of a link."""
    socket.setsockopt(zmq.LINGER, 0)  # close() sets it; a socket that is never closed must not delay the interpreter's exit
    socket.setsockopt(zmq.IPV6, six)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _CIPHER_BYTES)  # of one frame; ``take`` bounds their sum
    # TCP's keep-alive, not ZeroMQ's heartbeats: when one is due to a peer that died while its messages wait behind a full
    # queue, libzmq 4.3.5 ends the whole process (`Assertion failed: !_io_error`).
    silence_s = min(SILENCE_S + 2 * most_bytes / SLOWEST_BYTES_PER_S, MOST_SILENCE_S)
    socket.setsockopt(zmq.TCP_MAXRT, int(silence_s * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
