"""The parts of the sandbox that need no server: the table of system calls, the filter made of it, and what is said."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.processes.warm import run_python

from djinn.kinds.transport import ConnectOptions
from djinn_plugins.server.certificates import make_pair, placed
from djinn_plugins.server.sandbox import landlock, seccomp
from djinn_plugins.server.sandbox.calls import ABSENT, ARCHITECTURES, CHECKED, FREE, REFUSED, Architecture, parse
from djinn_plugins.transport.tcp.tls import client_context

LIBRARY = ctypes.util.find_library("seccomp")
PROCESS = 4242
linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
LACKING = (seccomp.why_not() or landlock.why_not()) if sys.platform == "linux" else "the sandbox is Linux's"
ALLOWED = "allowed"
STREAM, DATAGRAM = 1, 2
THREAD = 0x3D0F00
"""The flags of a thread that glibc makes."""


@pytest.mark.skipif(LIBRARY is None, reason="libseccomp, whose table ours is compared with, is not here")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_numbers_of_calls_are_those_of_libseccomp(name: str) -> None:
    library, here = ctypes.CDLL(LIBRARY), ARCHITECTURES[name]
    for table in (FREE, CHECKED, ABSENT, REFUSED):
        ours = parse(table, here)
        for entry in table.split():
            call = entry.partition("=")[0]
            theirs = library.seccomp_syscall_resolve_name_arch(here.audit, call.encode())
            assert ours.get(call, -1) == max(theirs, -1), call


def test_no_call_is_in_two_tables() -> None:
    names = [entry.partition("=")[0] for table in (FREE, CHECKED, ABSENT, REFUSED) for entry in table.split()]
    assert len(names) == len(set(names)) > 250


def decide(here: Architecture, number: int, arguments: tuple[int, ...] = (), *, audit: int = 0,
           has_driver: bool = False) -> str:
    """Do what the kernel does with the filter."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, audit or here.audit, 0, *(each & (2**64 - 1) for each in padded))
    code = [*struct.iter_unpack("<HBBI", seccomp.program(here, PROCESS, has_driver=has_driver))]
    place = held = 0
    while True:
        operation, there, otherwise, operand = code[place]
        place += 1
        if operation == 0x20:
            (held,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x05:
            place += operand
        elif operation == 0x06:
            if operand == 0x7FFF0000:
                return ALLOWED
            return "killed" if operand == 0x80000000 else errno.errorcode.get(operand & 0xFFFF, "nothing done")
        else:
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[operation]
            place += there if holds else otherwise


CASES: Mapping[str, list[tuple[tuple[int, ...], str]]] = {
    "read": [((0,), ALLOWED)],
    "clone3": [((), "ENOSYS")],
    "execve": [((), "EPERM")],
    "socket": [((STREAM,), "EPERM")],
    "openat": [((0, 0, 0o2000000), ALLOWED), ((0, 0, 0o1), "EPERM"), ((0, 0, 0o2), "EPERM"), ((0, 0, 0o100), "EPERM"),
               ((0, 0, 0o1000), "EPERM"), ((0, 0, 0o20000000), "EPERM"), ((0, 0, 2**32), ALLOWED)],
    "clone": [((THREAD,), ALLOWED), ((17,), "EPERM"), ((THREAD & ~0x10000,), "EPERM"),
              ((THREAD | 0x10000000,), "EPERM"), ((THREAD | 0x2000,), "EPERM")],
    "kill": [((PROCESS, 9), ALLOWED), ((0, 9), "EPERM"), ((-1, 9), "EPERM"), ((1, 0), "EPERM"),
             ((-PROCESS, 9), "EPERM")],
    "tgkill": [((PROCESS, 7, 6), ALLOWED), ((1, 7, 6), "EPERM")],
    "fcntl": [((3, 3), ALLOWED), ((3, 4, 0o4000), "EPERM"), ((3, 8, 1), "EPERM"), ((3, 10, 9), "EPERM"),
              ((3, 2**32 + 8, 1), "EPERM")],
    "ioctl": [((0, 0x5401), ALLOWED), ((0, 0x5412), "EPERM"), ((0, 0x8901), "EPERM")],
    "prctl": [((15,), ALLOWED), ((4, 1), "EPERM"), ((22, 0), "EPERM")],
    "prlimit64": [((0, 7), ALLOWED), ((PROCESS, 7), ALLOWED), ((1, 7), "EPERM")],
    "sched_setaffinity": [((0,), ALLOWED), ((1,), "nothing done")],
    "socketpair": [((1, STREAM | 0o2000000), ALLOWED), ((1, DATAGRAM), "EPERM"), ((2, STREAM), "EPERM")],
    "sendto": [((3, 0, 1, 0, 0), ALLOWED), ((3, 0, 1, 0x20000000, 0), "EPERM"), ((3, 0, 1, 0, 8), "EPERM"),
               ((3, 0, 1, 0, 2**32), "EPERM")],
    "sendmsg": [((3, 0, 0x4040), ALLOWED), ((3, 0, 0x20000000), "EPERM")],
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("call", CASES)
def test_the_filter_decides_by_arguments(name: str, call: str) -> None:
    here = ARCHITECTURES[name]
    (number,) = [found[call] for table in (FREE, CHECKED, ABSENT, REFUSED) if call in (found := parse(table, here))]
    for arguments, wanted in CASES[call]:
        assert decide(here, number, arguments) == wanted, arguments


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_filter_knows_other_architectures_and_calls_that_are_new(name: str) -> None:
    here = ARCHITECTURES[name]
    assert decide(here, 0, audit=0x40000003) == "killed"
    assert decide(here, 5000) == decide(here, 0x40000000) == "ENOSYS"
    for call, number in parse(REFUSED, here).items():
        assert decide(here, number) == decide(here, number, has_driver=True) == "EPERM", call
    unlisted = set(range(400)) - {number for table in (FREE, CHECKED, ABSENT, REFUSED)
                                  for number in parse(table, here).values()}
    assert {decide(here, number) for number in unlisted} == {"EPERM"}
    assert {decide(here, number, has_driver=True) for number in unlisted} == {ALLOWED}


DRIVER = """
import logging, os, sys, threading
from pathlib import Path
from djinn_plugins.server.options import SandboxMode
from djinn_plugins.server.sandbox.fence import Fence

def works():
    # As NVIDIA's driver names its threads.
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("driver")

def fails():
    raise RuntimeError("no device")

logging.basicConfig(stream=sys.stdout)
Fence(SandboxMode.auto, "cuda:0").enter({"works": works, "fails": fails, "dies": os.abort}[sys.argv[1]])
works()
try:
    print("read", len(Path(sys.argv[2]).read_text()))
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(bool(landlock.why_not()), reason=landlock.why_not())
@pytest.mark.parametrize(("driver", "wanted"), [("works", "refused"), ("fails", "read 6"), ("dies", "read 6")])
def test_the_files_of_a_worker_with_a_driver_are_fenced_if_the_driver_works_there(
    tmp_path: Path, driver: str, wanted: str
) -> None:
    tmp_path.chmod(0o755)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    done = run_python(DRIVER, driver, str(secret))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == wanted, done.stdout
    assert ("sandbox without files: the device's driver does not work" in done.stdout) == (driver != "works")


@pytest.mark.skipif(bool(LACKING), reason=LACKING)
def test_what_is_missing_is_said_and_required_parts_refuse_to_start() -> None:
    """A process behind the filter can put up no other: a server there would find nothing to fence its workers with."""
    code = """
import logging, sys
from djinn.errors import ConfigurationError
from djinn_plugins.server.sandbox import seccomp
from djinn_plugins.server.options import SandboxMode
from djinn_plugins.server.sandbox.fence import examine, plan
logging.basicConfig(stream=sys.stdout)
plan(SandboxMode.require, [], encrypts=True)
seccomp.install(has_driver=False)
print([part.name for part in examine() if part.missing])
plan(SandboxMode.auto, [], encrypts=False)
plan(SandboxMode.off, [], encrypts=False)
try:
    plan(SandboxMode.require, [], encrypts=False)
except ConfigurationError as error:
    print(error)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "'system calls', 'files'" in first
    told = "\n".join(rest)
    assert "sandbox without system calls: the kernel takes no filter" in told
    assert "sandbox without files: the kernel has no Landlock" in told
    assert "no sandbox (--sandbox off): a worker that is taken over can do what the server's user can" in told
    assert "[DJ101] --sandbox require: system calls: " in told


@linux
def test_a_secret_file_among_modules_is_said() -> None:
    from djinn_plugins.server.sandbox.fence import _exposed

    # Python's own files are as readable as can be, and stand for a key that was put beside them.
    assert ctypes.__file__ in _exposed([ctypes.__file__])
    assert _exposed(["/nowhere/key.pem", ""]) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="servers need another system")
def test_a_certificate_of_a_worker_can_be_trusted_alone() -> None:
    import ssl

    first, second = make_pair(), make_pair()
    assert first.key not in repr(first)
    assert first.certificate != second.certificate
    with placed(first.certificate + first.key) as path:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
    trusting = client_context(ConnectOptions(tls_pin=first.certificate))
    assert trusting.cert_store_stats()["x509"] == 1
    assert trusting.check_hostname
