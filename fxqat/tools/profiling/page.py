"""The HTML page of a profile, self-contained with its charts and its script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from fxqat.utils.compare import MOST_DB

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def render(**values: Any) -> str:
    """The page as text.

    Args:
        values: what the template reads: ``title``, ``found`` (the profile), ``curves`` (a chart), and ``details``: a
            tensor and its charts of values and of channels, for each tensor that is shown in detail.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["db"] = lambda value: "exact" if value >= MOST_DB else f"{value:.1f}"
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)
