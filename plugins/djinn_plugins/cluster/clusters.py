"""The clusters of this user: their folders, and the engines that run them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from djinn.errors import ConfigurationError
from djinn.plugins.manager import Plugins
from djinn.settings.resolved import selection_of
from djinn.settings.selection import DEFAULTS
from djinn_plugins.cluster.kinds import Engine, EngineFactory, SupportsHosts
from djinn_plugins.cluster.records import replace_file

__all__ = ("Cluster", "chosen_engine", "clusters", "find", "make")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_FILE = "cluster.json"


class _Description(msgspec.Struct):
    """A cluster as its folder describes it."""

    engine: str


class Cluster:
    """A cluster of this user.

    Args:
        name: Its name.
        engine_name: The name of its engine.

    Attributes:
        engine: What runs it.
        key_file: The file with the key that its directory and its servers have in common.
        moves: Whether its programs may be on other machines, which have the same files.
        is_apart: Whether its programs are on other machines, with the files of an image.

    Raises:
        PluginError: There is no such engine.
        ConfigurationError: It cannot be used here.
    """

    def __init__(self, name: str, engine_name: str) -> None:
        self.name = name
        self.engine_name = engine_name
        self.folder = _home() / name
        self.key_file = self.folder / "key"
        factory = _factory(engine_name)
        self.engine: Engine = factory.open(self.folder / "engine")
        capabilities = getattr(factory, "capabilities", ())
        self.moves, self.is_apart = "moves" in capabilities, "apart" in capabilities

    def host_of(self, program: str) -> str:
        """Return the name under which a program is reached; empty if its host gives it."""
        return self.engine.host(self.name, program) if isinstance(self.engine, SupportsHosts) else ""

    def describe(self) -> None:
        """Write down which engine runs it, so that other commands find it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self.folder / _FILE, msgspec.json.encode(_Description(self.engine_name)))

    def remove(self) -> None:
        """Remove its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "djinn" / "clusters"


def _factory(name: str) -> EngineFactory:
    plugins = Plugins.load(selection_of({"plugins": f"engine={name}"}, os.environ), kinds=("engine",))
    found: EngineFactory = plugins.choose("engine")
    return found


def chosen_engine() -> str:
    """Return the engine that the environment chooses, or else the default."""
    return selection_of({}, os.environ).chosen.get("engine", DEFAULTS["engine"])


def make(name: str, engine_name: str) -> Cluster:
    """Return a cluster that is to be started.

    Raises:
        ConfigurationError: The name is invalid, or another engine runs a cluster of that name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a cluster.",
                                 hint="Use up to 40 lower-case letters, digits and hyphens.")
    made = Cluster(name, engine_name)
    before = _described(made.folder)
    if before is not None and before.engine != engine_name and Cluster(name, before.engine).engine.programs():
        raise ConfigurationError(f"The cluster {name} is running already, with the engine {before.engine}.",
                                 hint="Stop it with `djinn cluster down`, or choose another --name.")
    return made


def find(name: str) -> Cluster:
    """Return a cluster that was started.

    Raises:
        ConfigurationError: There is none of that name.
    """
    described = _described(_home() / name) if _NAME.fullmatch(name) else None
    if described is None:
        names = ", ".join(path.name for path in _folders())
        raise ConfigurationError(f"There is no cluster {name!r}.",
                                 hint=f"There are: {names}" if names else "`djinn cluster up` starts one.")
    return Cluster(name, described.engine)


def clusters() -> Iterator[Cluster]:
    """List the clusters of this user."""
    for path in _folders():
        described = _described(path)
        if described is not None:
            yield Cluster(path.name, described.engine)


def _folders() -> list[Path]:
    home = _home()
    return sorted(path for path in home.iterdir() if (path / _FILE).exists()) if home.is_dir() else []


def _described(folder: Path) -> _Description | None:
    try:
        return _decoder.decode((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{folder / _FILE} is damaged: {error}.", hint="Remove its folder.") from None


_decoder = msgspec.json.Decoder(_Description)
