"""Pages that need nothing but a browser: one file, which fetches nothing and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from string import Template
from typing import Any


def page(template: str, *, title: str, style: str, script: str, data: Any, **more: str) -> str:
    """Fill the template of a page.

    Its policy lets the browser run exactly that script and fetch nothing at all, whatever the data say.

    Args:
        template: With ``$policy``, ``$title``, ``$style``, ``$script``, ``$data``.
        title: Plain text.
        style: Style sheet.
        script: JavaScript.
        data: What JSON can carry.
        **more: For further places of the template; HTML.
    """
    return Template(template).substitute(
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
               "form-action 'none'",
        title=html.escape(title), style=style, script=script, data=json_in_html(data), **more)


def json_in_html(content: Any) -> str:
    """Write JSON that stands inside a script element and cannot end it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate is valid in Python's text and in no encoding of it.
    return text.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
