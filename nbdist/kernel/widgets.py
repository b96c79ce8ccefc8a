"""The widgets of ranks as the kernel has heard of them: their state, and a picture of it that needs no widget."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
_REFERENCE = "IPY_MODEL_"
_COLOURS = {"success": "#4caf50", "danger": "#f44336", "warning": "#ff9800", "info": "#00bcd4"}


class Widgets:
    """The models behind the widgets of a call's ranks, by their ids."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}

    def hear(self, kind: str, comm_id: str, data: Mapping[str, Any]) -> None:
        """Take over what a rank says to the view of a widget."""
        state = data.get("state")
        if kind == "comm_open" and isinstance(state, Mapping):
            self._models[comm_id] = dict(state)
        elif kind == "comm_msg" and data.get("method") == "update" and comm_id in self._models and state:
            self._models[comm_id].update(state)

    def picture(self, model_id: str) -> str | None:
        """A widget as HTML: bars, texts, and boxes of these. None for any other kind of widget."""
        model = self._models.get(model_id.removeprefix(_REFERENCE), {})
        kind = model.get("_model_name", "")
        if kind in ("HBoxModel", "VBoxModel", "BoxModel"):
            parts = [self.picture(child) for child in model.get("children", ())]
            direction = "column" if kind == "VBoxModel" else "row"
            if None in parts:
                return None
            inner = "".join(part or "" for part in parts)
            return f'<div style="display: flex; flex-direction: {direction}; align-items: center">{inner}</div>'
        if kind in ("FloatProgressModel", "IntProgressModel"):
            return _bar(model)
        if kind in ("HTMLModel", "HTMLMathModel"):
            return f"<span>{model.get('value', '')}</span>"
        if kind in ("LabelModel", "TextModel", "TextareaModel"):
            return f"<span>{html.escape(str(model.get('value', '')))}</span>"
        return None


def _bar(model: Mapping[str, Any]) -> str:
    low, high = float(model.get("min") or 0.0), float(model.get("max") or 1.0)
    share = min(1.0, max(0.0, (float(model.get("value") or 0.0) - low) / ((high - low) or 1.0)))
    colour = _COLOURS.get(model.get("bar_style", ""), "#2196f3")
    return (
        f"{html.escape(model.get('description', ''))}"
        f'<div style="width: 20em; height: 1em; margin: 0 0.5em; background: #ddd">'
        f'<div style="width: {100 * share:.0f}%; height: 100%; background: {colour}"></div></div>'
    )
