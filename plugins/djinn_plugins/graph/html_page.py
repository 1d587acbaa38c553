"""Self-contained web pages: a single file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from string import Template
from typing import Any


def page(template: str, *, title: str, style: str, script: str, data: Any, **more: str) -> str:
    """Fill in the template of a page.

    Its content security policy allows the browser to run exactly this script and to load nothing, regardless of the
    data.

    Args:
        template: With ``$policy``, ``$title``, ``$style``, ``$script``, ``$data``.
        title: Plain text.
        style: Style sheet.
        script: JavaScript.
        data: Data that JSON can represent.
        **more: HTML for further placeholders of the template.
    """
    return Template(template).substitute(
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
               "form-action 'none'",
        title=html.escape(title), style=style, script=script, data=json_in_html(data), **more)


def json_in_html(content: Any) -> str:
    """Encode JSON for use inside a script element, which it cannot end."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate is valid in a Python string but cannot be encoded.
    return text.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
