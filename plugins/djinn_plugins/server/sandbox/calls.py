"""The system calls that a serving worker may make: their numbers and permitted arguments."""

from __future__ import annotations

import errno
import platform
import sys
from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs

__all__ = (
    "ABSENT",
    "ARCHITECTURES",
    "CHECKED",
    "FREE",
    "REFUSED",
    "Architecture",
    "ArgumentCondition",
    "SystemCall",
    "architecture",
    "checked",
    "parse",
)


@attrs.frozen
class Architecture:
    """System call conventions of a processor architecture.

    Attributes:
        column: Its column in the tables below.
        audit: The kernel's identifier for it (``AUDIT_ARCH_*``).
        seccomp: Number of seccomp(2).
    """

    column: int
    audit: int
    seccomp: int


ARCHITECTURES = {"x86_64": Architecture(0, 0xC000003E, 317), "aarch64": Architecture(1, 0xC00000B7, 277)}
Test: TypeAlias = Literal["in", "out", "clear", "set", "null"]


@attrs.frozen
class ArgumentCondition:
    """A condition on an argument.

    Attributes:
        argument: Its position, from 0.
        test: The argument's low 32 bits are one ``in`` the values or ``out`` of them, have all bits of the first value
            ``clear`` or ``set``; or all of its 64 bits are 0 (``null``).
        values: See ``test``.
    """

    argument: int
    test: Test
    values: tuple[int, ...] = ()


@attrs.frozen
class SystemCall:
    """A system call that is permitted depending on its arguments.

    Attributes:
        name: Its name.
        checks: Conditions that must all hold.
        otherwise: The error if they do not; 0: the call does nothing and reports success.
    """

    name: str
    checks: tuple[ArgumentCondition, ...]
    otherwise: int = errno.EPERM


# Name, number on x86_64, number on aarch64; a dash where an architecture lacks it. The most frequent calls come first.
FREE = """
futex=202/98 read=0/63 write=1/64 recvmsg=47/212 recvfrom=45/207 readv=19/65 writev=20/66 poll=7/- ppoll=271/73
epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441 select=23/- pselect6=270/72 epoll_create=213/-
epoll_create1=291/20 epoll_ctl=233/21 eventfd=284/- eventfd2=290/19 pipe=22/- pipe2=293/59 futex_waitv=449/449
clock_gettime=228/113 clock_nanosleep=230/115 clock_getres=229/114 nanosleep=35/101 gettimeofday=96/169
time=201/- times=100/153 getrusage=98/165 sysinfo=99/179 uname=63/160 getcpu=309/168 getrandom=318/278
mmap=9/222 mprotect=10/226 munmap=11/215 mremap=25/216 madvise=28/233 brk=12/214 mincore=27/232 mlock=149/228
mlock2=325/284 munlock=150/229 mbind=237/235 set_mempolicy=238/237 get_mempolicy=239/236 membarrier=324/283
rseq=334/293 exit=60/93 exit_group=231/94 gettid=186/178 getpid=39/172 getppid=110/173 getpgrp=111/-
getpgid=121/155 getsid=124/156 getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177 getresuid=118/148
getresgid=120/150 getgroups=115/158 capget=125/90 set_robust_list=273/99 set_tid_address=218/96 arch_prctl=158/-
restart_syscall=219/128 sched_yield=24/124 sched_getaffinity=204/123 sched_getparam=143/121
sched_getscheduler=145/120 sched_get_priority_max=146/125 sched_get_priority_min=147/126 getpriority=140/141
getrlimit=97/163 rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136
rt_sigtimedwait=128/137 rt_sigsuspend=130/133 sigaltstack=131/132 pause=34/- lseek=8/62 pread64=17/67 preadv=295/69
preadv2=327/286 close=3/57 close_range=436/436 dup=32/23 dup2=33/- dup3=292/24 fstat=5/80 newfstatat=262/79 stat=4/-
lstat=6/- statx=332/291 access=21/- faccessat=269/48 faccessat2=439/439 readlink=89/- readlinkat=267/78 getcwd=79/17
getdents=78/- getdents64=217/61 statfs=137/43 fstatfs=138/44 fadvise64=221/223 accept=43/202 accept4=288/242
shutdown=48/210 getsockname=51/204 getpeername=52/205 getsockopt=55/209 setsockopt=54/208 recvmmsg=299/243
"""
"""Calls that affect only the process itself: its memory, descriptors and threads, and the time."""

CHECKED = """
open=2/- openat=257/56 clone=56/220 fcntl=72/25 ioctl=16/29 prctl=157/167 tgkill=234/131 kill=62/129
sched_setaffinity=203/122 prlimit64=302/261 socketpair=53/199 sendto=44/206 sendmsg=46/211
"""
"""Calls that are permitted under the conditions in `checked`."""

ABSENT = "clone3=435/435 openat2=437/437"
"""Calls whose flags are in memory, which a filter cannot read. Callers fall back to the calls above."""

REFUSED = """
execve=59/221 execveat=322/281 fork=57/- vfork=58/- ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271
process_madvise=440/440 process_mrelease=448/448 kcmp=312/272 pidfd_open=434/434 pidfd_getfd=438/438
pidfd_send_signal=424/424 tkill=200/130 rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240
socket=41/198 connect=42/203 bind=49/200 listen=50/201 sendmmsg=307/269
io_uring_setup=425/425 io_uring_enter=426/426 io_uring_register=427/427 io_setup=206/0 io_submit=209/2 bpf=321/280
userfaultfd=323/282 perf_event_open=298/241 seccomp=317/277 keyctl=250/219 add_key=248/217 request_key=249/218
mount=165/40 umount2=166/39 pivot_root=155/41 chroot=161/51 fsopen=430/430 fsconfig=431/431 fsmount=432/432
fspick=433/433 move_mount=429/429 open_tree=428/428 mount_setattr=442/442 unshare=272/97 setns=308/268
setuid=105/146 setgid=106/144 setreuid=113/145 setregid=114/143 setresuid=117/147 setresgid=119/149
setgroups=116/159 setfsuid=122/151 setfsgid=123/152 capset=126/91 personality=135/92 setrlimit=160/164
setpriority=141/140 ioprio_set=251/30 sched_setparam=142/118 sched_setscheduler=144/119 sched_setattr=314/274
migrate_pages=256/238 move_pages=279/239 name_to_handle_at=303/264 open_by_handle_at=304/265 acct=163/89
swapon=167/224 swapoff=168/225 reboot=169/142 kexec_load=246/104 kexec_file_load=320/294 init_module=175/105
finit_module=313/273 delete_module=176/106 syslog=103/116 sethostname=170/161 setdomainname=171/162
settimeofday=164/170 clock_settime=227/112 clock_adjtime=305/266 adjtimex=159/171 quotactl=179/60 quotactl_fd=443/443
vhangup=153/58 iopl=172/- ioperm=173/- modify_ldt=154/- fanotify_init=300/262 fanotify_mark=301/263
shmget=29/194 shmat=30/196 shmctl=31/195 semget=64/190 semop=65/193 semctl=66/191 semtimedop=220/192 msgget=68/186
msgsnd=69/189 msgrcv=70/188 msgctl=71/187 mq_open=240/180 mq_unlink=241/181 vmsplice=278/75 splice=275/76 tee=276/77
creat=85/- truncate=76/45 unlink=87/- unlinkat=263/35 rename=82/- renameat=264/38 renameat2=316/276 mkdir=83/-
mkdirat=258/34 rmdir=84/- link=86/- linkat=265/37 symlink=88/- symlinkat=266/36 mknod=133/- mknodat=259/33
chmod=90/- fchmod=91/52 fchmodat=268/53 chown=92/- fchown=93/55 lchown=94/- fchownat=260/54 utime=132/- utimes=235/-
utimensat=280/88 futimesat=261/- setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7 removexattr=197/14
lremovexattr=198/15 fremovexattr=199/16 memfd_secret=447/447
"""
"""Calls that a device driver does not need either. On the CPU, calls that are in no table are refused as well."""

_O_ACCESS, _O_CREATE, _O_TRUNCATE, _O_TEMPORARY = 0o3, 0o100, 0o1000, 0o20000000
_CLONE_THREAD = 0x100 | 0x800 | 0x10000
"""``CLONE_VM``, ``CLONE_SIGHAND`` and ``CLONE_THREAD``: the flags that create a thread instead of a process."""
_CLONE_OTHER = 0x7E020000 | 0x2000 | 0x00800000
"""The namespace flags, and ``CLONE_PTRACE`` and ``CLONE_UNTRACED``."""
_FCNTL = (0, 1, 2, 3, 1030)
"""Copies of descriptors, and their flags; not the owner that receives their signals, and no flags of files: a log that
is appended to stays so."""
_SIGNALLED = (8, 10, 15)
"""``F_SETOWN``, ``F_SETSIG`` and ``F_SETOWN_EX``, which make the kernel send signals to other processes."""
_IOCTL = (0x5421, 0x541B, 0x5401, 0x802C542A, 0x5413, 0x5450, 0x5451)
"""``FIONBIO``, ``FIONREAD``, ``TCGETS``, ``TCGETS2``, ``TIOCGWINSZ``, ``FIONCLEX`` and ``FIOCLEX``."""
_TERMINAL = (0x5412, 0x541C, 0x5423, 0x540E, 0x5410, 0x8901, 0x8902)
"""``TIOCSTI``, ``TIOCLINUX``, ``TIOCSETD``, ``TIOCSCTTY`` and ``TIOCSPGRP``, which act with the rights of the user at
the terminal; ``FIOSETOWN`` and ``SIOCSPGRP``, as ``F_SETOWN``."""
_PRCTL = (3, 15, 16, 21, 23, 39, 0x53564D41)
"""Names of threads and of memory, and queries: dumpable, seccomp, capabilities, no new privileges."""
_SOCK_STREAM_KINDS = tuple(1 | close | wait for close in (0, 0o2000000) for wait in (0, 0o4000))
_MSG_FASTOPEN = 0x20000000


def checked(process: int, *, has_driver: bool) -> Sequence[SystemCall]:
    """Return the calls that are permitted depending on their arguments.

    Args:
        process: The ID of the process.
        has_driver: Whether the process uses a device driver, which opens files for writing, and controls them, at any
            time.
    """
    flags = _O_CREATE | _O_TRUNCATE | _O_TEMPORARY | (0 if has_driver else _O_ACCESS)
    control = ArgumentCondition(1, "out", _TERMINAL) if has_driver else ArgumentCondition(1, "in", _IOCTL)
    descriptor = ArgumentCondition(1, "out", _SIGNALLED) if has_driver else ArgumentCondition(1, "in", _FCNTL)
    here = ArgumentCondition(0, "in", (process,))
    own = ArgumentCondition(0, "in", (0, process))
    return (
        SystemCall("sendmsg", (ArgumentCondition(2, "clear", (_MSG_FASTOPEN,)),)),
        SystemCall("sendto", (ArgumentCondition(3, "clear", (_MSG_FASTOPEN,)), ArgumentCondition(4, "null"))),
        SystemCall("open", (ArgumentCondition(1, "clear", (flags,)),)),
        SystemCall("openat", (ArgumentCondition(2, "clear", (flags,)),)),
        SystemCall("clone", (ArgumentCondition(0, "set", (_CLONE_THREAD,)),
                             ArgumentCondition(0, "clear", (_CLONE_OTHER,)))),
        SystemCall("fcntl", (descriptor,)),
        SystemCall("ioctl", (control,)),
        SystemCall("prctl", (ArgumentCondition(0, "in", _PRCTL),)),
        SystemCall("tgkill", (here,)),
        SystemCall("kill", (here,)),
        # This is a hint, and OpenMP fails if it is refused. It names threads, whose process a filter cannot determine.
        SystemCall("sched_setaffinity", (own,), 0),
        SystemCall("prlimit64", (own,)),
        SystemCall("socketpair", (ArgumentCondition(0, "in", (1,)), ArgumentCondition(1, "in", _SOCK_STREAM_KINDS))),
    )


def parse(table: str, architecture: Architecture) -> dict[str, int]:
    """Return the numbers of a table's calls on an architecture, leaving out calls that it lacks."""
    numbers = {}
    for entry in table.split():
        name, _, pair = entry.partition("=")
        number = pair.split("/")[architecture.column]
        if number != "-":
            numbers[name] = int(number)
    return numbers


def architecture() -> Architecture | None:
    """Return the architecture of this process; ``None`` if it is not supported, or this is not Linux."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    return ARCHITECTURES.get(platform.machine())
