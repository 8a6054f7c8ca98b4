"""Several hosts on one machine: network namespaces on a bridge, each link with a rate of its own.

    with Lab(hosts=4, rate="100mbit") as lab:
        results = lab.run([[sys.executable, "train.py"]] * 4, env={})

A lab has one namespace for the bridge (the switch) and one per host, so the machine's own network is never touched: the
addresses 10.77.<lab>.<host + 1> exist only inside. A token bucket (`tc … tbf`) on both ends of each link holds the rate, in both
directions. Everything is named after the lab's process; leaving the context, an exception, SIGINT and SIGTERM remove it all, and
what a killed process left behind is removed by the next lab, or by `python benchmarks/netlab.py --clean`.

Limits: needs Linux, root and iproute2. There is no delay (`netem` is not everywhere). The hosts share the machine's cores: compare
ratios within one run. Above some 500 Mbit/s the interface counters see the kernel's large segments (up to 64 kB) before they are
cut, one header where a wire carries up to 45: about 4 % less than a wire for large messages. Below, the bucket cuts them first.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PREFIX = "hocketlab"
INTERFACE = "eth0"
PORT = 29500
QUEUE_MS = 50
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_numbers = itertools.count()


class Lab:
    """`hosts` machines on one switch; `rate` such as "100mbit" holds for each link and direction, None means unlimited.

    `burst_bytes` may pass at once (default: a millisecond's worth). The kernel cuts larger packets, which costs it time; with many
    hosts on few cores 64 KiB and more keep its large segments whole.
    """

    def __init__(self, hosts: int = 4, rate: str | None = None, burst_bytes: int | None = None) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"a lab has 1 to 250 hosts, got {hosts}")
        bits_per_second(rate)
        self.hosts, self.rate, self.burst_bytes = hosts, rate, burst_bytes
        self.number = next(_numbers) % 256
        self.name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{self.number}"
        self.addresses = [f"10.77.{self.number}.{host + 1}" for host in range(hosts)]
        self._switch = f"{self.name}-switch"
        self._owner = os.getpid()
        self._running: list[subprocess.Popen[str]] = []
        self._handlers: dict[int, object] = {}
        self._folder: Path | None = None

    def __enter__(self) -> Lab:
        require()
        clean()
        atexit.register(self.close)
        self._catch_signals()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the lab and removes it; a second call, or one in a forked child, does nothing."""
        if os.getpid() != self._owner:
            return
        with _signals_held():
            self._kill()
            _remove(_namespaces(f"{self.name}-"))
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self.close)
            self._restore_signals()

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self.name}-host{host}"

    def set_rate(self, rate: str | None) -> None:
        """Changes the rate of all links, also while processes run."""
        bits_per_second(rate)
        for host in range(self.hosts):
            for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, f"port{host}")):
                _shape(namespace, device, rate, self.burst_bytes)
        self.rate = rate

    def plug(self, host: int, there: bool) -> None:
        """Lets the switch carry a host's packets, or drop them in silence as a broken line far away does; also under way."""
        _ip("-n", self._switch, "link", "set", f"port{host}", *(("master", "bridge") if there else ("nomaster",)))

    def counters(self) -> list[tuple[int, int]]:
        """Bytes (sent, received) so far by each host's interface, everything included: headers, acknowledgements, ARP."""
        return [self._counter(host) for host in range(self.hosts)]

    def environment(self, host: int, workers: int) -> dict[str, str]:
        """What torch.distributed, started as one process per host, needs to find its peers."""
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(workers),
            "HOCKET_CLOSED_NETWORK": "1",
        }

    def run(
        self,
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 600.0,
        grace_s: float | None = 10.0,
        follow: int | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs command i on host i, all started together, and returns what each printed and its exit code.

        When one fails, the others get `grace_s` more seconds (None: all the time there is) and are then killed, since they
        mostly wait for it. `follow` names the host whose standard error is shown while it runs.
        """
        if not 1 <= len(commands) <= self.hosts:
            raise ValueError(f"this lab has {self.hosts} hosts, got {len(commands)} commands: give one per host, in order")
        assert self._folder is not None, "a lab runs commands inside its `with` block"
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            for host, command in enumerate(commands):
                self._running.append(self._start(host, command, folder, len(commands), env or {}))
            self._wait(commands, folder, timeout_s, grace_s, follow)
            codes = [process.wait() for process in self._running]
        finally:
            self._kill()
        return [
            subprocess.CompletedProcess(list(command), code, _read(folder, host, "out"), _read(folder, host, "err"))
            for host, (command, code) in enumerate(zip(commands, codes, strict=True))
        ]

    def _start(
        self, host: int, command: Sequence[str], folder: Path, workers: int, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        with open(folder / f"{host}.out", "w") as out, open(folder / f"{host}.err", "w") as err:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **self.environment(host, workers), **env},
                start_new_session=True,
                text=True,
            )

    def _wait(
        self, commands: Sequence[Sequence[str]], folder: Path, timeout_s: float, grace_s: float | None, follow: int | None
    ) -> None:
        deadline = time.monotonic() + timeout_s
        failed_deadline = float("inf")
        shown = 0
        while True:
            shown += _show(folder, follow, shown)
            codes = [process.poll() for process in self._running]
            late = [host for host, code in enumerate(codes) if code is None]
            if not late:
                return
            now = time.monotonic()
            if grace_s is not None and failed_deadline == float("inf") and any(codes):
                failed_deadline = now + grace_s
            if now > failed_deadline:
                _kill_groups(self._running)
                return
            if now > deadline:
                tail = _read(folder, late[0], "err")[-2000:]
                raise TimeoutError(
                    f"{' '.join(commands[late[0]])!r} on host {late[0]} (of {late} still running) did not end within "
                    f"{timeout_s:g} s and was killed; its last words: {tail or 'none'}"
                )
            time.sleep(0.02)

    def _kill(self) -> None:
        if self._running:
            _kill_groups(self._running)
            for host in range(len(self._running)):
                with suppress(RuntimeError):  # a namespace that is gone holds nothing
                    _kill_inside(self.namespace(host))
            self._running.clear()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        for host in range(self.hosts):
            self._add(host)
        self.set_rate(self.rate)

    def _add(self, host: int) -> None:
        namespace, port = self.namespace(host), f"port{host}"
        _ip("netns", "add", namespace)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        # No IPv6 addresses: their announcements would show up in the counters.
        _ip("-n", self._switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        _ip("-n", namespace, "link", "set", INTERFACE, "addrgenmode", "none", "up")

    def _counter(self, host: int) -> tuple[int, int]:
        files = [f"/sys/class/net/{INTERFACE}/statistics/{way}_bytes" for way in ("tx", "rx")]
        sent, received = _ip("netns", "exec", self.namespace(host), "cat", *files).split()
        return int(sent), int(received)

    def _catch_signals(self) -> None:
        with suppress(ValueError):  # only the main thread may set handlers
            for number in STOP_SIGNALS:
                self._handlers[number] = signal.signal(number, _stop)

    def _restore_signals(self) -> None:
        with suppress(ValueError):
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()


def bits_per_second(rate: str | None) -> int | None:
    """A rate as tc writes it, in bits per second.

    >>> bits_per_second("100mbit")
    100000000
    """
    if rate is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a rate is a positive number with bit, kbit, mbit or gbit, such as 100mbit; got {rate!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def missing() -> str | None:
    """What keeps this machine from having a lab, in one sentence; None when nothing does."""
    if not sys.platform.startswith("linux"):
        return f"a lab needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return (
            "a lab needs root to make network namespaces: run it with sudo, or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"a lab needs iproute2, and {' and '.join(absent)} cannot be found: install the package iproute2"
    return _refusal()


def require() -> None:
    """Raises RuntimeError when this machine cannot have a lab."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)


def clean() -> list[str]:
    """Removes what labs of dead processes left behind, their processes first; returns the namespaces removed."""
    left = [name for name in _namespaces(f"{PREFIX}-") if not _alive(name)]
    _remove(left)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if not _alive(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    return left


def _refusal() -> str | None:
    """Tries one namespace: being root is not enough where a container withholds the capability."""
    name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "true")
    except RuntimeError as error:
        return f"a lab needs the right to make network namespaces, and {error}"
    finally:
        _remove(_namespaces(name))
    return None


def _namespaces(prefix: str) -> list[str]:
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(prefix)]


def _remove(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        with suppress(RuntimeError):  # another process may clean up the same leftovers
            _kill_inside(name)
            _ip("netns", "delete", name)


def _started(pid: int) -> int | None:
    """A process's start in clock ticks since boot, which tells it from a later one of the same pid; None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _alive(name: str) -> bool:
    """Whether the process that a name carries still runs; a name of another form is not ours to judge."""
    match = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
    return match is None or _started(int(match[1])) == int(match[2])


def _shape(namespace: str, device: str, rate: str | None, burst_bytes: int | None = None) -> None:
    bits = bits_per_second(rate)
    if bits is None:
        if " tbf " in _command("tc", "-n", namespace, "qdisc", "show", "dev", device):
            _command("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
        return
    # A millisecond of traffic: enough for the kernel's timer to keep the rate, too little to let messages pass for free;
    # never less than two large packets, which would have to be cut.
    burst_bytes = burst_bytes or max(bits // 8 // 1000, 2 * 1600)
    shape = ("tbf", "rate", f"{bits}bit", "burst", str(burst_bytes), "latency", f"{QUEUE_MS}ms")
    _command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _kill_groups(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:  # the number of a process that has been waited for may be somebody else's by now
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _kill_inside(namespace: str) -> None:
    """Ends what runs in a namespace: what a command left in the background, or a killed lab its commands."""
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _read(folder: Path, host: int, stream: str) -> str:
    return (folder / f"{host}.{stream}").read_text(errors="replace")


def _show(folder: Path, host: int | None, start: int) -> int:
    if host is None:
        return 0
    with open(folder / f"{host}.err", "rb") as file:
        file.seek(start)
        text = file.read()
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
    return len(text)


def _stop(number: int, _: FrameType | None) -> None:
    """Turns a signal into an exception, so that `with` blocks close."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Lets a second Ctrl-C wait until the cleaning is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def throughput(lab: Lab, seconds: float = 3.0) -> float:
    """Measured TCP payload from host 0 to host 1, in bits per second."""
    me = [sys.executable, str(Path(__file__).resolve())]
    bits = bits_per_second(lab.rate)
    amount = 2**30 if bits is None else max(1, int(bits / 8 * seconds))
    send = [*me, "--send", lab.addresses[1], str(amount)]
    results = lab.run([send, [*me, "--receive", str(amount)]], timeout_s=60 + 3 * seconds)
    for result in results:
        if result.returncode != 0:
            raise RuntimeError(f"the throughput check failed: {result.stderr.strip().splitlines()[-1:]}")
    return float(results[1].stdout)


def _receive(amount: int) -> None:
    """Prints the bits per second at which `amount` bytes came in, the first read excluded: it starts the watch."""
    with socket.create_server(("", PORT)) as server:
        server.settimeout(30)
        peer, _ = server.accept()
    with peer:
        peer.settimeout(30)
        got = first = len(peer.recv(1 << 20))
        start = time.perf_counter()
        while got < amount:
            chunk = len(peer.recv(1 << 20))
            if chunk == 0:
                raise SystemExit(f"the sender stopped after {got} of {amount} bytes")
            got += chunk
        print((got - first) * 8 / (time.perf_counter() - start))


def _send(address: str, amount: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            peer = socket.create_connection((address, PORT), timeout=30)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    block = memoryview(bytes(1 << 20))
    with peer:
        while amount > 0:
            piece = min(amount, len(block))
            peer.sendall(block[:piece])
            amount -= piece
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)


def main() -> None:
    """The self-check: asked against measured rate."""
    parser = argparse.ArgumentParser(description="Several hosts on one machine; without options, a self-check of the rate.")
    parser.add_argument("--hosts", type=int, default=2, help="at least 2 (default 2)")
    parser.add_argument("--rate", help="of each link and direction, such as 100mbit or 1gbit (default: unlimited)")
    parser.add_argument("--clean", action="store_true", help="only remove what labs of dead processes left behind")
    parser.add_argument("--send", nargs=2, metavar=("ADDRESS", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--receive", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        return _receive(options.receive)
    if options.send is not None:
        return _send(options.send[0], int(options.send[1]))
    try:
        _check(options.hosts, options.rate, options.clean)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise SystemExit(f"netlab: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _check(hosts: int, rate: str | None, only_clean: bool) -> None:
    if only_clean:
        require()
        left = clean()
        print(f"removed {len(left)} namespaces of dead labs")
        return
    if hosts < 2:
        raise ValueError(f"the self-check needs at least 2 hosts, got {hosts}")
    with Lab(hosts, rate) as lab:
        measured = throughput(lab) / 1e6
    asked = bits_per_second(rate)
    share = "" if asked is None else f" ({measured * 1e6 / asked:.3f} of it)"
    print(f"{hosts} hosts, asked {rate or 'unlimited'}, measured {measured:.1f} Mbit/s of TCP payload{share}")


if __name__ == "__main__":
    main()
