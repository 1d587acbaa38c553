"""Engines: where the servers of a cluster run, and what keeps them running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import attrs

__all__ = ("ClusterSpec", "Engine", "EngineFactory", "EngineProgram", "ProgramReport", "ProgramState",
           "SupportsHosts")

ProgramState: TypeAlias = Literal["starting", "serving", "failed", "stopping"]


@attrs.frozen
class EngineProgram:
    """A program that an engine keeps running until the cluster is stopped.

    Attributes:
        name: Its name, unique in the cluster: lower-case letters, digits and hyphens.
        command: The words of its command line. Once it accepts connections, it prints one line to standard output that
            ends with its address, as ``djinn serve`` does. On SIGTERM, it ends when its clients have finished, and on
            a second SIGTERM at once. It should end with the process that started it, as with ``--with-parent``.
        variables: Environment variables, in addition to those of the process that starts the cluster. They may be
            secrets: an engine does not write them to files that others can read.
        gpus: How many GPUs it has for itself; they are its devices from ``cuda:0``.
        files: Files of this machine that it reads, as absolute paths, if its engine declares ``apart``. They may be
            secrets, as the variables.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    gpus: int = 0
    files: tuple[str, ...] = ()


@attrs.frozen
class ClusterSpec:
    """What a cluster consists of.

    Attributes:
        name: Its name: lower-case letters, digits and hyphens.
        programs: Its programs.
    """

    name: str
    programs: tuple[EngineProgram, ...]


@attrs.frozen
class ProgramReport:
    """The state of a program.

    Attributes:
        name: Its name.
        state: ``starting``: it has not printed its address; ``serving``; ``failed``: it ended before it had printed its
            address, and is tried again later; ``stopping``: the cluster is being stopped.
        address: The address that it has printed; empty before. A program that is started again may have another one.
        place: Where it runs, in words, such as ``process 123``.
        pid: Its process ID, if it runs on this machine; 0 if not.
        restarts: How often it has been started again.
        problem: Why it ended last, with the end of its log; empty if it has not.
    """

    name: str
    state: ProgramState
    address: str = ""
    place: str = ""
    pid: int = 0
    restarts: int = 0
    problem: str = ""


class Engine(Protocol):
    """Runs the programs of one cluster.

    An engine does not depend on the process that has started it: `start` returns, that process may end, and any other
    one that opens the same folder manages the cluster.

    Concurrency:
        One thread at a time; several processes at the same time.

    Laws:
        engine.runs_programs, engine.found_again, engine.starts_again, engine.failure_reported, engine.logs_kept,
        engine.nothing_left, engine.one_cluster
    """

    def start(self, spec: ClusterSpec) -> None:
        """Start the programs, and keep them running: a program that ends is started again, at growing intervals.

        It does not wait until they serve.

        Raises:
            ConfigurationError: A cluster is running in this folder, or the engine cannot run this one.
        """

    def programs(self) -> list[ProgramReport]:
        """Report the state of all programs, in the order of the specification; none if no cluster is running."""

    def watch(self) -> Iterator[list[ProgramReport]]:
        """Report the states now, and after each change; ends with an empty list when the cluster has been stopped."""

    def logs(self, program: str, lines: int) -> list[str]:
        """Return the last lines that a program has written to standard error, also before it was started again.

        Raises:
            LookupError: There is no such program.
        """

    def stop(self, drain_s: float) -> None:
        """Stop all programs, and return when none is left. Without a cluster, it does nothing.

        It also ends programs whose engine has died.

        Args:
            drain_s: How long their clients have to finish.
        """


@runtime_checkable
class SupportsHosts(Protocol):
    """What an engine has in addition if its factory declares ``apart``."""

    def host(self, cluster: str, program: str) -> str:
        """Return the name under which clients and other programs reach a program, before it runs.

        Raises:
            ConfigurationError: The system that runs programs is unknown.
        """

    def run(self, program: str, words: Sequence[str]) -> str:
        """Run Python where a program runs, with its files, and return what it prints.

        Args:
            program: The name of the program.
            words: The arguments of Python. Others may see them.

        Raises:
            ConfigurationError: That is not possible, or fails.
        """


class EngineFactory(Protocol):
    """Opens engines; what plugins register.

    Its attribute ``capabilities`` is optional. It contains ``here`` if programs are processes of this user on this
    machine; the laws can then be tested. It contains ``moves`` if programs run on machines that have the same files as
    this one, and may run on another one when they are started again: the cluster's directory then writes its address
    into a file, and programs find free ports themselves. It contains ``apart`` if programs run on machines that have
    neither the files nor the environment of this one, but djinn on their ``PATH``: the engine then gives each of them
    its ``files`` at the same paths, those variables of this process whose names begin with ``DJINN_``, and a host of
    its own (`SupportsHosts`).
    """

    name: str
    """Name in the configuration."""

    def open(self, folder: Path) -> Engine:
        """Open the engine for one cluster.

        Args:
            folder: Where its records are; only this user can read it. It may be empty.

        Raises:
            ConfigurationError: Something that the engine needs is missing on this machine.
        """


