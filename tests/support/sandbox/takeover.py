"""What native code does that has taken over a worker: raw system calls, and loads from memory.

A test installs this module as a plugin into the server under test, which is how an extension of PyTorch gets there. Its
operator ``takeover::run`` then does in the worker, on the session's own thread, whatever its operand asks for. Nothing
of this travels: a client can call the operator only because the server was started with ``--allow-namespace takeover``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from djinn_plugins.server.sandbox.calls import ABSENT, ARCHITECTURES, CHECKED, FREE, REFUSED, parse
from djinn_plugins.server.sandbox.paths import files_for

ANSWER_BYTES = 2**18
DONE = "DONE"
"""How the outcome of what was not refused begins."""
_libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {name: number for table in (FREE, CHECKED, ABSENT, REFUSED)
            for name, number in parse(table, ARCHITECTURES.get(platform.machine(), ARCHITECTURES["x86_64"])).items()}
_NUMBERS |= {name: numbers[platform.machine() == "aarch64"] for name, numbers in {
    "memfd_create": (319, 279), "pwrite64": (18, 68), "ftruncate": (77, 46), "fallocate": (285, 47)}.items()}
HARMFUL = frozenset({"reboot", "vhangup", "sethostname", "setdomainname", "fork", "vfork", "acct", "swapoff", "umount2",
                     "settimeofday", "clock_settime", "syslog", "kill", "tkill", "chroot"})
"""Calls that are not made without arguments: where there is no filter, they would do something."""
AT_HERE = -100
Attack = Callable[[dict[str, Any]], dict[str, str]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def call(name: str, *arguments: Any) -> str:
    """Make a system call, and say what came of it."""
    if name not in _NUMBERS:
        return "no such call on this processor"
    ctypes.set_errno(0)
    widened = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = _libc.syscall(ctypes.c_long(_NUMBERS[name]), *widened)
    return f"{DONE}: {result}" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))


def descriptors() -> list[int]:
    """Name those that this process has."""
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def opened(path: str, flags: int = os.O_RDONLY, name: str = "openat") -> str:
    """Open a file, and read of it if that is possible."""
    outcome = call(name, *([AT_HERE] if name == "openat" else []), path.encode(), flags, 0o600)
    if outcome.startswith(DONE):
        descriptor = int(outcome.split()[1])
        if not flags & os.O_ACCMODE:
            try:
                outcome += f" {os.read(descriptor, 64)!r}"
            except OSError as error:
                outcome = f"{errno.errorcode[error.errno]} on reading"
        os.close(descriptor)
    return outcome


def _memory_of(process: int) -> dict[str, str]:
    """Reach for another process's memory in every way that there is."""
    there = ctypes.create_string_buffer(64)
    vector = struct.pack("PN", ctypes.addressof(there), 64)
    found = {
        "ptrace attach": call("ptrace", 16, process, 0, 0), "ptrace seize": call("ptrace", 0x4206, process, 0, 0),
        "process_vm_readv": call("process_vm_readv", process, vector, 1, vector, 1, 0),
        "process_vm_writev": call("process_vm_writev", process, vector, 1, vector, 1, 0),
        "pidfd_open": call("pidfd_open", process, 0), "pidfd_getfd": call("pidfd_getfd", 3, 0, 0),
        "kcmp": call("kcmp", os.getpid(), process, 0, 0, 0),
        "process_madvise": call("process_madvise", 3, vector, 1, 0),
    }
    for entry in ("mem", "maps", "environ", "cmdline", "status", "stat", "syscall", "stack", "auxv", "root/etc/passwd",
                  "cwd", "fd/0", "exe", "task", "map_files", "comm"):
        found[f"/proc/PID/{entry}"] = opened(f"/proc/{process}/{entry}")
    found["/proc/PID/mem to write"] = opened(f"/proc/{process}/mem", os.O_RDWR)
    return found


@attack
def memory_of_another_tenant(target: dict[str, Any]) -> dict[str, str]:
    return _memory_of(target["victim"])


@attack
def memory_of_the_gateway(target: dict[str, Any]) -> dict[str, str]:
    return _memory_of(target["gateway"])


@attack
def reading_files(target: dict[str, Any]) -> dict[str, str]:
    found = {}
    for path in [*target["secrets"], "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc", "/tmp", "/home",
                 "/proc/self/root/etc/passwd", "/proc/self/cwd", "/proc/kcore", "/proc/kallsyms", "/proc/net/tcp",
                 "/proc/thread-self/net/tcp", "/proc/self/mounts",
                 "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/shm", "/run", "/var/log"]:
        found[f"openat {path}"] = opened(path)
        found[f"open {path}"] = opened(path, name="open")
    secret = target["secrets"][0].encode()
    how = struct.pack("QQQ", os.O_RDONLY, 0, 0)
    found["openat2"] = call("openat2", AT_HERE, secret, how, len(how))
    handle = ctypes.create_string_buffer(struct.pack("II", 120, 0) + bytes(128))
    found["name_to_handle_at"] = call("name_to_handle_at", AT_HERE, secret, handle, ctypes.byref(ctypes.c_int()), 0)
    found["open_by_handle_at"] = call("open_by_handle_at", AT_HERE, handle, 0)
    found["path only, then open"] = _by_path_descriptor(target["secrets"][0])
    return found


def _by_path_descriptor(path: str) -> str:
    outcome = call("openat", AT_HERE, path.encode(), 0o10000000, 0)
    if not outcome.startswith(DONE):
        return outcome
    descriptor = int(outcome.split()[1])
    try:
        return opened(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@attack
def writing_files(target: dict[str, Any]) -> dict[str, str]:
    path, new = target["secrets"][0], target["secrets"][0] + ".new"
    old, made = path.encode(), new.encode()
    found = {f"open with {flags:o}": opened(place, flags) for place in (path, new, "/tmp/taken", "/dev/shm/taken")
             for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_TRUNC)}
    found |= {
        "temporary file": opened("/tmp", os.O_RDWR | os.O_TMPFILE), "creat": call("creat", made, 0o600),
        "truncate": call("truncate", old, 0), "unlink": call("unlinkat", AT_HERE, old, 0),
        "rename": call("renameat2", AT_HERE, old, AT_HERE, made, 0), "mkdir": call("mkdirat", AT_HERE, made, 0o700),
        "link": call("linkat", AT_HERE, old, AT_HERE, made, 0), "symlink": call("symlinkat", old, AT_HERE, made),
        "mknod": call("mknodat", AT_HERE, made, 0o100600, 0), "chmod": call("fchmodat", AT_HERE, old, 0o777),
        "chown": call("fchownat", AT_HERE, old, 0, 0, 0), "setxattr": call("setxattr", old, b"user.x", b"x", 1, 0),
        "times": call("utimensat", AT_HERE, old, 0, 0), "mount": call("mount", b"/", b"/mnt", b"", 4096, 0),
        "memory through a file": opened("/proc/self/mem", os.O_RDWR),
        "who is killed first": opened("/proc/self/oom_score_adj", os.O_WRONLY),
        "module to import": opened(str(Path(__file__).with_name("taken.py")), os.O_WRONLY | os.O_CREAT),
    }
    return found


@attack
def reaching_the_network(target: dict[str, Any]) -> dict[str, str]:
    families = {"inet": 2, "inet6": 10, "unix": 1, "netlink": 16, "packet": 17, "vsock": 40, "alg": 38, "bluetooth": 31}
    found = {f"socket {name} {kind}": call("socket", family, kind, 0) for name, family in families.items()
             for kind in (1, 2, 3)}
    mine = descriptors()
    places = {f"port {port}": struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, bytes([127, 0, 0, 1]))
              for port in target["ports"]}
    places["abstract"] = struct.pack("=H", socket.AF_UNIX) + b"\0djinn-taken"
    places["unix"] = struct.pack("=H", socket.AF_UNIX) + target["unix"].encode() + b"\0"
    for name, place in places.items():
        for descriptor in mine:
            # Those that it has already: connected elsewhere, listening again, and sent to.
            found[f"connect {descriptor} to {name}"] = call("connect", descriptor, place, len(place))
            found[f"bind {descriptor} to {name}"] = call("bind", descriptor, place, len(place))
            found[f"sendto {descriptor} {name}"] = call("sendto", descriptor, b"x", 1, 0x20000000, place, len(place))
            found[f"sendto {descriptor} {name} with an address"] = call("sendto", descriptor, b"x", 1, 0, place,
                                                                       len(place))
    found["listen"] = call("listen", mine[0], 1)
    found["datagrams in a pair"] = call("socketpair", 1, 2, 0, (ctypes.c_int * 2)())
    found["sequenced packets in a pair"] = call("socketpair", 1, 5, 0, (ctypes.c_int * 2)())
    vector = struct.pack("PIPQPQi", 0, 0, 0, 0, 0, 0, 0)
    found["sendmsg that connects"] = call("sendmsg", mine[0], vector, 0x20000000)
    found["sendmmsg"] = call("sendmmsg", mine[0], vector, 1, 0)
    return found


@attack
def starting_programs(target: dict[str, Any]) -> dict[str, str]:
    arguments = (ctypes.c_char_p * 2)(b"/bin/true", None)
    found = {"execve": call("execve", b"/bin/true", arguments, None),
             "execveat": call("execveat", AT_HERE, b"/bin/true", arguments, None, 0),
             "clone as fork": _child(lambda: call("clone", int(signal.SIGCHLD), 0, 0, 0, 0)),
             "clone3": _child(lambda: call("clone3", struct.pack("8Q", 0, 0, 0, 0, int(signal.SIGCHLD), 0, 0, 0), 64)),
             "fork": _child(lambda: call("fork")), "memfd_create": call("memfd_create", b"taken", 0)}
    for name, flag in (("user", 0x10000000), ("pid", 0x20000000), ("net", 0x40000000), ("mount", 0x20000),
                       ("ipc", 0x8000000), ("traced", 0x2000)):
        found[f"clone into a namespace: {name}"] = _child(
            lambda flag=flag: call("clone", flag | int(signal.SIGCHLD), 0, 0, 0, 0))  # type: ignore[misc]
    for name, start in (("os.fork", os.fork), ("posix_spawn", lambda: os.posix_spawn("/bin/true", ["true"], {})),
                        ("os.system", lambda: os.system("true"))):
        found[name] = _raised(start)
    started = [_raised(os.fork) for _ in range(1000)]
    found["a thousand processes"] = f"{DONE}: {started.count(DONE)}" if DONE in started else started[0]
    return found


def _child(start: Callable[[], str]) -> str:
    outcome = start()
    if outcome == f"{DONE}: 0":
        os._exit(0)
    return outcome


def _raised(start: Callable[[], int]) -> str:
    try:
        result = start()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    if result == 0 and start is os.fork:
        os._exit(0)
    return f"nothing was started: {result}" if result < 0 or result == 32512 else DONE


@attack
def harming_other_processes(target: dict[str, Any]) -> dict[str, str]:
    found = {}
    for process in (target["gateway"], target["victim"], 1, -1, 0, -target["gateway"]):
        found[f"kill {process}"] = call("kill", process, 0)
        found[f"tgkill {process}"] = call("tgkill", process, process, 0)
        found[f"tkill {process}"] = call("tkill", process, 0)
        found[f"rt_sigqueueinfo {process}"] = call("rt_sigqueueinfo", process, 0, bytes(128))
    for process in (target["gateway"], target["victim"]):
        found[f"prlimit {process}"] = call("prlimit64", process, 7, struct.pack("QQ", 3, 3), None)
        found[f"priority {process}"] = call("setpriority", 0, process, 19)
        found[f"schedule {process}"] = call("sched_setscheduler", process, 5, struct.pack("i", 0))
        found[f"input and output {process}"] = call("ioprio_set", 1, process, 3 << 13)
        found[f"memory policy {process}"] = call("migrate_pages", process, 0, None, None)
        found[f"wake by signal {process}"] = call("fcntl", 0, 8, process)
    found["signal of choice"] = call("fcntl", 0, 10, 9)
    found["owner by ioctl"] = call("ioctl", 0, 0x8901, ctypes.byref(ctypes.c_int(target["gateway"])))
    found["type on the terminal"] = call("ioctl", 2, 0x5412, b"x")
    found["owners of the processors"] = _affinity(target["victim"])
    return found


def _affinity(process: int) -> str:
    before = os.sched_getaffinity(process)
    call("sched_setaffinity", process, 8, struct.pack("Q", 1))
    changed = os.sched_getaffinity(process) != before
    if changed:
        os.sched_setaffinity(process, before)
    return DONE if changed else "nothing was changed"


@attack
def gaining_privileges(target: dict[str, Any]) -> dict[str, str]:
    found = {"setuid": call("setuid", 0), "setresuid": call("setresuid", 0, 0, 0), "setgid": call("setgid", 0),
             "setgroups": call("setgroups", 0, None), "setfsuid": call("setfsuid", 0),
             "capset": call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[2**32 - 1] * 6)),
             "dumpable": call("prctl", 4, 1, 0, 0, 0), "tracer": call("prctl", 0x59616D61, -1, 0, 0, 0),
             "keep capabilities": call("prctl", 8, 1, 0, 0, 0), "seccomp off": call("prctl", 22, 0, 0, 0, 0),
             "parent's death": call("prctl", 1, 0, 0, 0, 0), "personality": call("personality", 0x0040000),
             "namespace of files": call("setns", 0, 0x20000), "pivot_root": call("pivot_root", b"/", b"/"),
             "chroot": call("chroot", b"/")}
    for name, number in (("processes", 6), ("files", 7), ("core", 4)):
        found[f"more {name}"] = call("prlimit64", 0, number, struct.pack("QQ", 2**40, 2**40), None)
    for name, flag in (("user", 0x10000000), ("pid", 0x20000000), ("net", 0x40000000), ("mount", 0x20000)):
        found[f"unshare {name}"] = call("unshare", flag)
    return found


@attack
def attacking_the_kernel(target: dict[str, Any]) -> dict[str, str]:
    parameters = ctypes.create_string_buffer(256)
    found = {"io_uring_setup": call("io_uring_setup", 8, parameters), "bpf": call("bpf", 0, parameters, 64),
             "userfaultfd": call("userfaultfd", 1),
             "perf_event_open": call("perf_event_open", parameters, 0, -1, -1, 0),
             "keyctl": call("keyctl", 0, -3, 1), "add_key": call("add_key", b"user", b"a", b"b", 1, -3)}
    arguments = [0, 0, 0, 0, 0, 0]
    for name in sorted(set(parse(REFUSED, ARCHITECTURES.get(platform.machine(), ARCHITECTURES["x86_64"]))) - HARMFUL):
        outcome = call(name, *arguments)
        found[f"{name}()"] = outcome if outcome == "EPERM" else f"{DONE}: the kernel looked at it: {outcome}"
    for number in range(450, 480):
        ctypes.set_errno(0)
        result = _libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
        found[f"call {number}"] = errno.errorcode[ctypes.get_errno()] if result < 0 else f"{DONE}: {result}"
    if platform.machine() == "x86_64":
        result = _libc.syscall(ctypes.c_long(0x40000000 | _NUMBERS["getpid"]))
        found["getpid of x32"] = errno.errorcode[ctypes.get_errno()] if result < 0 else f"{DONE}: {result}"
    return found


@attack
def sharing_what_is_others(target: dict[str, Any]) -> dict[str, str]:
    found = {"shmget": call("shmget", target["shared_key"], 0, 0), "shmat": call("shmat", target["shared"], None, 0),
             "shmctl": call("shmctl", target["shared"], 2, bytes(256)), "semget": call("semget", 1, 1, 0o1666),
             "semop": call("semop", 0, bytes(6), 1), "msgget": call("msgget", 1, 0o1666),
             "msgsnd": call("msgsnd", 0, bytes(16), 1, 0), "mq_open": call("mq_open", b"taken", 0o100, 0o600, None),
             "memfd_secret": call("memfd_secret", 0), "vmsplice": call("vmsplice", 0, bytes(16), 1, 0)}
    for name in descriptors():
        # What it has open: its standard streams, sockets of its own, memory for its own uploads, and nothing else.
        try:
            leads = str(Path(f"/proc/self/fd/{name}").readlink())
        except OSError:
            continue
        if leads in target["log"]:
            # It may add to the log. Whatever it does, what is there stays; the test looks at that.
            found |= {f"log {name} {what}": call(what, int(name), *arguments) for what, arguments in (
                ("fcntl", (4, 0)), ("ftruncate", (0,)), ("pwrite64", (b"x", 1, 0)), ("fallocate", (3, 0, 4096)))}
            call("lseek", int(name), 0, 0)
            call("write", int(name), b"\n", 1)
        if leads.startswith(("/memfd:djinn-board", "/memfd:djinn-tenant")):
            # Where it writes whose program it runs, and what it uses. The gateway, and workers of its tenant, read
            # that, and would end if it were cut off.
            found[f"board {name}"] = call("ftruncate", int(name), 0)
            continue
        if leads.startswith("/memfd:djinn-shared"):
            # What other tenants have uploaded, too.
            found |= {f"shared upload {name} {what}": call(what, *arguments) for what, arguments in (
                ("pwrite64", (int(name), b"x", 1, 0)), ("ftruncate", (int(name), 0)), ("write", (int(name), b"x", 1)),
                ("fallocate", (int(name), 3, 0, 4096)), ("fcntl", (int(name), 1033, 0)),
                ("mmap", (0, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, int(name), 0)))}
            found[f"shared upload {name} again"] = opened(f"/proc/self/fd/{name}", os.O_RDWR)
            continue
        known = ("/dev/null", "/memfd:djinn-uploads", "socket:", "pipe:", "anon_inode:", f"/proc/{os.getpid()}/",
                 *target["log"], *(path for path in files_for(has_driver=False).readable if path.startswith("/proc/")))
        found[f"descriptor {name}"] = "its own" if leads.startswith(known) else f"{DONE}: {leads}"
        if leads.startswith("socket:"):
            found[f"socket {name}"] = _listens(name, target)
    return found


def _listens(descriptor: int, target: dict[str, Any]) -> str:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return "it does not listen"
        port = copy.getsockname()[1]
        return f"{DONE}: it listens on {port}" if port in target["ports"] else "it listens for its own tenant"


@attack
def secrets_in_its_own_memory(target: dict[str, Any]) -> dict[str, str]:
    """Look for what others must not know in all memory that can be written, where Python and OpenSSL keep theirs."""
    mask = 0x5A
    hidden = {name: bytes.fromhex(value) for name, value in target["hidden"].items()}
    counts = dict.fromkeys(hidden, 0)
    regions = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if not rights.startswith("rw") or "[v" in line:
            continue
        first, last = (int(part, 16) for part in span.split("-"))
        for start in range(first, last, 2**24):
            length = min(2**24 + 128, last - start)
            view = (ctypes.c_char * length).from_address(start)
            regions += 1
            for name, needle in hidden.items():
                counts[name] += _count(view, needle, mask)
    found = {name: f"{DONE}: found {count} times" if count else "not there" for name, count in counts.items()}
    found["looked"] = "at memory" if regions > 10 else f"{DONE}: nowhere"
    return found


def _count(view: Any, hidden: bytes, mask: int) -> int:
    """Count a needle without a whole copy of it: its first half is looked for, the rest compared as it is masked."""
    half = len(hidden) // 2
    head, rest = bytes(byte ^ mask for byte in hidden[:half]), hidden[half:]
    data = memoryview(view).cast("B")
    _libc.memmem.restype, _libc.memmem.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] * 2
    base, place, count = ctypes.addressof(view), 0, 0
    while found := _libc.memmem(base + place, len(data) - place, head, half):
        place = found - base + half
        count += bytes(byte ^ mask for byte in rest) == bytes(data[place:place + len(rest)])
    return count


@attack
def from_another_thread(target: dict[str, Any]) -> dict[str, str]:
    """Threads that begin later are behind the same fence."""
    found: dict[str, str] = {}

    def run() -> None:
        found.update(open=opened(target["secrets"][0]), socket=call("socket", 2, 1, 0), kill=call("kill", 1, 0),
                     execve=call("execve", b"/bin/true", None, None))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@attack
def other_architecture(target: dict[str, Any]) -> dict[str, str]:
    """Make a call as a program for 32 bits does; the kernel ends the process."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    return {"getpid for 32 bits": DONE}


@attack
def crashing(target: dict[str, Any]) -> dict[str, str]:
    ctypes.string_at(8)
    return {"load from 8": DONE}


def asked(what: str, target: dict[str, Any]) -> torch.Tensor:
    """Return the operand that asks for an attack."""
    return torch.frombuffer(bytearray(json.dumps({"attack": what, "target": target}).encode()), dtype=torch.uint8)


def answered(answer: torch.Tensor) -> dict[str, str]:
    """Return what came of it."""
    return json.loads(bytes(answer.tolist()).rstrip(b"\0"))


def _run(request: torch.Tensor) -> torch.Tensor:
    wish = json.loads(bytes(request.tolist()))
    found = ATTACKS[wish["attack"]](wish["target"])
    return torch.frombuffer(bytearray(json.dumps(found).encode().ljust(ANSWER_BYTES, b"\0")), dtype=torch.uint8)


library = torch.library.Library("takeover", "DEF")
library.define("run(Tensor request) -> Tensor")
library.impl("run", _run, "CPU")
library.impl("run", lambda request: torch.empty(ANSWER_BYTES, dtype=torch.uint8, device="meta"), "Meta")
assert sys.platform == "linux"
