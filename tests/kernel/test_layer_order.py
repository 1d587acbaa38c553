"""The order of a session's layers does not depend on the names of plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn.errors import PluginError
from djinn.kinds import Layer
from djinn.session.layers import ORDER, in_order

HOOKS = st.sampled_from(sorted(ORDER))
NAMES = st.lists(st.from_regex(r"[a-z][a-z-]{0,12}", fullmatch=True).filter(
    lambda name: all(name not in known for known in ORDER.values())), min_size=3, max_size=3, unique=True)


def wrap(opens: Any) -> Any:
    return opens


def ordered(hook: str, found: dict[str, Any]) -> Sequence[Any]:
    """Stand-ins for layers: strings in place of what wraps."""
    return in_order(hook, {name: Layer(name, layer.before, layer.after) if isinstance(layer, Layer) else name  # type: ignore[arg-type]
                           for name, layer in found.items()})


@given(HOOKS, NAMES, st.data())
def test_layers_of_others_have_the_places_that_they_say_whatever_their_names(
        hook: str, names: Sequence[str], data: st.DataObject) -> None:
    known = ORDER[hook]
    one, two, three = names
    # One stands around another plugin's, one inside of it; the innermost of djinn's own has one inside of it.
    layers = {**dict.fromkeys(known, wrap), one: Layer(wrap, before=known[1]), two: Layer(wrap, before=one),
              three: Layer(wrap, after=known[-1])}
    registered = data.draw(st.permutations(sorted(layers)))
    wanted = [known[0], two, one, *known[1:], three]
    assert ordered(hook, {name: layers[name] for name in registered}) == wanted
    # What is switched off keeps its place.
    without = [name for name in registered if name != known[1]]
    assert ordered(hook, {name: layers[name] for name in without}) == [name for name in wanted if name != known[1]]


@pytest.mark.parametrize(("layers", "named"), [
    ({"acme": Layer(wrap, after="djinn-later"), "zeta": Layer(wrap, after="djinn-later")}, ("'acme'", "'zeta'")),
    ({"acme": Layer(wrap, after="djinn-later"), "zeta": Layer(wrap, before="djinn-backend-replay")},
     ("'acme'", "'zeta'")),
    ({"acme": Layer(wrap, before="djinn-letter")}, ("'acme'", "'djinn-letter'", "djinn-later")),
    ({"acme": Layer(wrap, before="zeta"), "zeta": Layer(wrap, before="acme")}, ("'acme'", "'zeta'")),
    ({"acme": Layer(wrap)}, ("'acme'", "before=NAME", "after=NAME")),
    ({"acme": Layer(wrap, before="djinn-later", after="djinn-notices")}, ("'acme'", "before=NAME")),
    ({"acme": wrap}, ("'acme'", "Layer(wrap")),
])
def test_a_place_that_is_not_clear_is_refused_by_name(layers: dict[str, Any], named: Sequence[str]) -> None:
    with pytest.raises(PluginError) as caught:
        in_order("djinn_wrap_backend", layers)
    assert all(name in str(caught.value) for name in named), caught.value
