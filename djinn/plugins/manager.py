"""Plugins: finding them, checking them, choosing among them.

A typed facade over pluggy. Built-in plugins are found like all others: through the entry points of the group ``djinn``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from djinn import hookspecs
from djinn.errors import AmbiguousPluginError, PluginError, PluginLoadError, PluginValidationError
from djinn.plugins.checks import check_hooks, check_object, hook_of, remedy
from djinn.settings.core import Config
from djinn.settings.declared import Declarations, Side
from djinn.settings.resolved import Settings, selection_of, sources_of
from djinn.settings.selection import DEFAULT_EXECUTORS, KINDS, PluginSelection

if TYPE_CHECKING:
    from djinn.kinds import Transport

__all__ = ("IN_PROCESS", "InProcess", "Plugins", "Registered", "installed")

_HOOKS, _MARK = MappingProxyType({kind: hook_of(kind) for kind in KINDS}), f"{hookspecs.GROUP}_impl"


@attrs.frozen
class InProcess:
    """A plugin of this process; as much of an entry point as is needed to load it."""

    name: str
    plugin: Any

    def load(self) -> Any:
        """Return the plugin."""
        return self.plugin


IN_PROCESS: dict[str, InProcess] = {}
"""The plugins of this process, by name; see `djinn.plugins.in_process`."""


@attrs.frozen
class Registered:
    """One object that a plugin registered."""

    kind: str
    """Its kind, one of `KINDS`; ``command`` for a command of the program ``djinn``."""
    name: str
    """The object's own name."""
    plugin: str
    """Name of the entry point that provides it."""
    distribution: str
    """Name and version of the installed distribution, for example ``djinn-torch 0.1.0``."""
    value: Any = attrs.field(repr=False)
    """The object."""


def installed() -> tuple[str, ...]:
    """Names of all installed plugins, including disabled ones. Imports none."""
    return tuple(sorted({entry_point.name for entry_point in entry_points(group=hookspecs.GROUP)}))


@lru_cache(maxsize=16)
def _described(found: Distribution) -> str:
    """Name a distribution; reading its metadata again for each of its plugins takes most of the time of `load`."""
    return "{Name} {Version}".format_map(found.metadata)


def _distribution_of(entry_point: EntryPoint | InProcess) -> str:
    if isinstance(entry_point, InProcess):
        return "this process"
    return "an unknown distribution" if entry_point.dist is None else _described(entry_point.dist)


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        # Most attributes of a module are no hooks. pluggy takes longer to find that out than `load` for all else.
        is_no_hook = isinstance(plugin, ModuleType) and _MARK not in getattr(vars(plugin).get(name), "__dict__", ())
        return None if is_no_hook else super().parse_hookimpl_opts(plugin, name)


class Plugins:
    """The plugins of one session: imported, checked, registered.

    Attributes:
        selection: What the configuration says about plugins.
        disabled: Plugins that are installed and switched off, with their distributions.
        distributions: Plugins that were found and not switched off, with their distributions.
        declared: The settings that they have.
        settings: The values of these, once `configure` was called; until then, all have their defaults.
    """

    def __init__(self, selection: PluginSelection) -> None:
        self.selection = selection
        self.disabled: dict[str, str] = {}
        self._manager = _Manager(hookspecs.GROUP)
        self._manager.add_hookspecs(hookspecs)
        self.distributions: dict[str, str] = {}
        self._registered: dict[str, list[Registered]] = {}
        self.settings = Settings()
        self.declared = Declarations()
        self.declared.add(Config, "both")

    @classmethod
    def load(
        cls, selection: PluginSelection | None = None, *, names: Iterable[str] | None = None,
        problems: list[PluginError] | None = None, kinds: Iterable[str] = tuple(KINDS)
    ) -> Plugins:
        """Find, import, check and register plugins.

        Args:
            selection: The plugin settings of the configuration.
            names: Load only these entry points; disabled ones are still left out.
            problems: Receives the errors of single plugins, which are then left out. Without it, the first error is
                raised.
            kinds: Kinds of which the plugins register objects now, which imports PyTorch; settings and commands do not.
                Objects of other kinds are registered, and checked, when an object of that kind is first needed.

        Raises:
            PluginLoadError: A plugin, or an object that it registers, cannot be imported.
            PluginValidationError: A plugin has an unknown hook or registers an object of the wrong kind.
            AmbiguousPluginError: Two distributions provide plugins with the same name.
            PluginError: ``names`` or the selection contains a plugin that is not installed.
        """
        made = cls(selection or PluginSelection())
        made._registered.update({kind: [] for kind in kinds})
        found: dict[str, list[EntryPoint | InProcess]] = {}
        for entry_point in (*entry_points(group=hookspecs.GROUP), *IN_PROCESS.values()):
            found.setdefault(entry_point.name, []).append(entry_point)
        for name in dict.fromkeys([*sorted(found), *sorted(made.selection.disabled)] if names is None else names):
            try:
                made._load(name, found)
            except PluginError as error:
                if problems is None:
                    raise
                problems.append(error)
        return made

    @classmethod
    def configured(cls, given: Mapping[str, Any], environ: Mapping[str, str], side: Side = "session") -> Plugins:
        """Load the plugins that the settings name, and resolve the settings of all of them.

        Objects other than observers are registered when their kind is first needed: a session needs few kinds.

        Args:
            given: Settings that the program gives.
            environ: Environment variables.
            side: Whose settings these are.

        Raises:
            PluginError: As for `load`.
            ConfigurationError: A setting is unknown or has an invalid value.
        """
        made = cls.load(selection_of(given, environ), kinds=())
        made.configure(given, environ, side)
        made.all("observer")  # they may show how the session connects
        return made

    def configure(self, given: Mapping[str, Any], environ: Mapping[str, str], side: Side = "session") -> None:
        """Resolve the settings; arguments and errors are those of `configured`."""
        # What all sources say about plugins has been combined already.
        given = {**given, "plugins": self.selection}
        sources = sources_of(given, environ, self.declared.by_name)
        self.settings = Settings.resolve(self.declared, sources, side, self.disabled)
        self._give_settings(entry for entries in self._registered.values() for entry in entries)

    def _give_settings(self, entries: Iterable[Registered]) -> None:
        for entry in entries:
            if hasattr(entry.value, "use_settings"):
                entry.value.use_settings(self.settings)

    def _load(self, name: str, found: Mapping[str, list[EntryPoint | InProcess]]) -> None:
        candidates = found.get(name)
        if candidates is None:
            close = difflib.get_close_matches(name, found, 1)
            raise PluginError(f"There is no plugin {name!r}. Installed are: {', '.join(sorted(found)) or 'none'}.",
                              hint=f"Did you mean {close[0]!r}?" if close else "Install it, or correct DJINN_PLUGINS.")
        if name in self.selection.disabled:
            self.disabled[name] = ", ".join(map(_distribution_of, candidates))
            return
        if len(candidates) > 1:
            raise AmbiguousPluginError(
                f"The plugin {name!r} is brought by {' and by '.join(sorted(map(_distribution_of, candidates)))}.",
                hint="Uninstall all but one of them.")
        self.distributions[name] = _distribution_of(candidates[0])
        self._import(name, candidates[0])
        try:
            self.call_alone(name, "djinn_add_settings", settings=self.declared.of(name))
            for registered in self._collect(name, self._registered):
                self._registered[registered.kind].append(registered)
        except PluginError:
            self._manager.unregister(name=name)
            self.declared.remove(name)
            raise

    def _import(self, name: str, entry_point: EntryPoint | InProcess) -> None:
        try:
            plugin = entry_point.load()
        except Exception as error:
            raise self._load_error(name, "could not be imported", error) from error
        check_hooks(self._manager, plugin, self.owner(name), name)
        try:
            self._manager.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            what = " ".join(str(error).split())
            raise PluginValidationError(f"{self.owner(name)} does not fit: {what}.", hint=remedy(name)) from error

    def owner(self, name: str) -> str:
        """Name a plugin and its distribution, for a message."""
        return f"The plugin {name!r} of {self.distributions[name]}"

    def _load_error(self, name: str, what: str, error: Exception) -> PluginLoadError:
        return PluginLoadError(f"{self.owner(name)} {what}: {type(error).__name__}: {error}.", hint=remedy(name))

    def call_alone(self, name: str, hook: str, **arguments: Any) -> None:
        """Call a hook of one plugin, so that errors can be attributed to it."""
        marked = getattr(self.hook, hook).get_hookimpls()
        others = [each.plugin for each in marked if each.plugin_name != name]
        try:
            if len(others) < len(marked):
                self._manager.subset_hook_caller(hook, others)(**arguments)
        except PluginError:
            raise
        except Exception as error:
            raise self._load_error(name, f"failed in {hook}", error) from error

    def _collect(self, name: str, kinds: Iterable[str]) -> list[Registered]:
        collected: list[Registered] = []

        def register(kind: str, value: Any) -> None:
            check_object(kind, value, self.owner(name), name)
            if any(other.kind == kind and other.name == value.name for other in collected):
                raise PluginValidationError(f"{self.owner(name)} registers two objects of the kind {kind} named "
                                            f"{value.name!r}.", hint=remedy(name))
            collected.append(Registered(kind, value.name, name, self.distributions[name], value))

        for kind in kinds:
            self.call_alone(name, _HOOKS[kind], register=lambda value, kind=kind: register(kind, value))
        return collected

    @property
    def hook(self) -> Any:
        """Implementations of all plugins: ``plugins.hook.djinn_session_started(session=...)``."""
        return self._manager.hook

    def registered(self, kind: str) -> dict[str, list[Registered]]:
        """All objects of a kind, by name. If several have the same name, choosing that name is ambiguous."""
        known = self._known(kind)
        return {entry.name: [same for same in known if same.name == entry.name] for entry in known}

    def _known(self, kind: str) -> list[Registered]:
        if kind not in self._registered:
            self._registered[kind] = [each for name in self.distributions for each in self._collect(name, (kind,))]
            self._give_settings(self._registered[kind])
        return self._registered[kind]

    def answers(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """Call a hook; return what is not ``None``, by plugin."""
        answers = {each.plugin_name: each.function(*map(arguments.__getitem__, each.argnames))
                   for each in getattr(self.hook, hook).get_hookimpls()}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def find(self, kind: str, default: str | None = None) -> Registered:
        """Choose one object of a kind, with its origin.

        Args:
            kind: One of `KINDS`.
            default: Name of the object to use if the configuration chooses none; ignored if no plugin has registered
                it.

        Raises:
            AmbiguousPluginError: Several objects are possible and none is chosen, or two plugins registered the chosen
                name.
            PluginError: There is no such object; the error lists those that exist.
        """
        name = self.selection.chosen.get(kind, default if default in self.registered(kind) else None)
        answers = [entry for entry in self._known(kind) if name in (None, entry.name)]
        if not answers:
            raise self._nothing(kind, "" if name is None else f"named {name!r}")
        if len(answers) > 1:
            raise _ambiguous(kind, answers)
        return answers[0]

    def choose(self, kind: str, default: str | None = None) -> Any:
        """Choose one object of a kind.

        Args:
            kind: One of `KINDS`.
            default: As for `find`.

        Raises:
            AmbiguousPluginError, PluginError: As for `find`.
        """
        return self.find(kind, default).value

    def find_all(self, kind: str) -> list[Registered]:
        """All objects of a kind that may have several active objects, ordered by name.

        If the configuration chooses one of them, only that one is returned.

        Raises:
            AmbiguousPluginError: Two plugins registered the same name.
            PluginError: The chosen object does not exist.
        """
        if kind in self.selection.chosen:
            return [self.find(kind)]
        return [self.find(kind, name) for name in sorted(self.registered(kind))]

    def all(self, kind: str) -> list[Any]:
        """All objects of a kind that may have several active objects, ordered by name.

        Raises:
            AmbiguousPluginError, PluginError: As for `find_all`.
        """
        return [entry.value for entry in self.find_all(kind)]

    def find_executor(self, device: str) -> Registered:
        """Choose the executor for a device, with its origin.

        If the configuration chooses none, it is the one that is named like the kind of device; without a device, the
        first of `DEFAULT_EXECUTORS` that has one.

        Raises:
            AmbiguousPluginError, PluginError: As for `find`.
        """
        known, kind = self.registered("executor"), device.partition(":")[0]
        return self.find("executor", next((name for name in (kind, *DEFAULT_EXECUTORS) if name in known and (
            name == kind or known[name][0].value.devices())), None))

    def find_transport(self, scheme: str) -> Registered:
        """Choose the transport for addresses ``scheme://...``, with its origin.

        If the configuration chooses none for them, it is the one that is named like the scheme, as djinn's own are.

        Raises:
            AmbiguousPluginError: Several transports support the scheme and none of them is chosen.
            PluginError: No transport supports it; the error lists the supported schemes.
        """
        entries = self._known("transport")
        answers = [entry for entry in entries if entry.value.scheme == scheme]
        for name in (self.selection.chosen.get("transport"), scheme):
            answers = [entry for entry in answers if entry.name == name] or answers
        if not answers:
            schemes = sorted({f"{entry.value.scheme}://" for entry in entries})
            raise PluginError(f"No transport carries addresses {scheme}://; there are {', '.join(schemes) or 'none'}.",
                              hint="Correct the address, or install a plugin that carries it.")
        if len(answers) > 1:
            raise _ambiguous("transport", answers)
        return answers[0]

    def transport_for(self, scheme: str) -> Transport:
        """Choose the transport for addresses ``scheme://...``.

        Raises:
            AmbiguousPluginError, PluginError: As for `find_transport`.
        """
        return self.find_transport(scheme).value  # type: ignore[no-any-return]  # checked when it was registered

    def _nothing(self, kind: str, which: str) -> PluginError:
        known = [f"{entry.name!r} of {entry.plugin}" for entry in self._known(kind)]
        off = f" Switched off are: {', '.join(sorted(self.disabled))}." if self.disabled else ""
        return PluginError(
            f"There is no {kind} {which}".rstrip() + f". Registered are: {', '.join(known) or 'none'}.{off}",
            hint=f"Install a plugin that brings it, or change the setting plugins (DJINN_PLUGINS={kind}=NAME).")


def _ambiguous(kind: str, answers: list[Registered]) -> AmbiguousPluginError:
    who = " and ".join(f"{entry.name!r} of {entry.plugin} ({entry.distribution})" for entry in answers)
    if len({entry.name for entry in answers}) == len(answers):
        hint = f"Choose one with DJINN_PLUGINS={kind}={answers[0].name} or djinn.init(plugins=...)."
    else:
        hint = f"Switch one off, for example with DJINN_PLUGINS=-{answers[-1].plugin}."
    return AmbiguousPluginError(f"Several plugins answer as {kind}: {who}.", hint=hint)
