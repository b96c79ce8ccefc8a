"""The state of the ranks' widgets in the kernel, and pictures of them that need no widget."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
_REFERENCE = "IPY_MODEL_"
_COLOURS = {"success": "#4caf50", "danger": "#f44336", "warning": "#ff9800", "info": "#00bcd4"}
_BOXES = {"HBoxModel": "row", "BoxModel": "row", "VBoxModel": "column", "GridBoxModel": "column"}
#: Widgets that only show.
_PASSIVE = {
    *_BOXES,
    "FloatProgressModel",
    "IntProgressModel",
    "HTMLModel",
    "HTMLMathModel",
    "LabelModel",
    "OutputModel",
}
#: Views of what is part of a widget, and of none.
_PARTS = {None, "LayoutView", "StyleView"}
_CONTROLS = "@jupyter-widgets/controls"
_FRAME = "border: 1px solid #bbb; border-radius: 2px; padding: 0 0.5em; margin: 0.1em 0.3em"
_OVER = "The ranks of this widget have ended: changes of it have no effect. Run the cell again."


class Widgets:
    """The models behind the widgets of ranks, by id."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}

    def handle(self, kind: str, comm_id: str, data: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Update the state from a message that a rank sends to a widget's view, or the view to the rank."""
        state = data.get("state")
        if not isinstance(state, Mapping):
            return
        state = _with_buffers(state, data.get("buffer_paths", ()), buffers)
        if kind == "comm_open":
            self._models[comm_id] = state
        elif kind == "comm_msg" and data.get("method") == "update" and comm_id in self._models:
            self._models[comm_id].update(state)

    def state(self, model_id: str) -> dict[str, Any]:
        """Return a copy of a model's state, with its buffers inserted."""
        return dict(self._models.get(model_id, {}))

    def forget(self, model_id: str) -> None:
        """Drop a model, if it exists."""
        self._models.pop(model_id, None)

    def take_input(self, model_ids: Iterable[str]) -> bool:
        """Return whether any of these widgets takes input."""
        return any(_takes_input(self._model(model_id)) for model_id in model_ids)

    def picture(self, model_id: str) -> str | None:
        """Return a widget as HTML with a note that input has no effect any more; None for widgets of other packages."""
        drawn = self._drawn(model_id)
        if drawn is None or not any(_takes_input(model) for model in self._with_children(model_id)):
            return drawn
        return f'<details><summary style="list-style: none; cursor: default">{drawn}</summary>{_OVER}</details>'

    def _model(self, model_id: str) -> dict[str, Any]:
        return self._models.get(model_id.removeprefix(_REFERENCE), {})

    def _with_children(self, model_id: str) -> Iterable[Mapping[str, Any]]:
        model = self._model(model_id)
        yield model
        for child in model.get("children", ()):
            yield from self._with_children(child)

    def _drawn(self, model_id: str) -> str | None:
        model = self._model(model_id)
        kind = model.get("_model_name", "")
        if kind in _BOXES:
            parts = [self._drawn(child) for child in model.get("children", ())]
            if None in parts:
                return None
            inner = "".join(part or "" for part in parts)
            return f'<div style="display: flex; flex-direction: {_BOXES[kind]}; align-items: center">{inner}</div>'
        if kind in ("FloatProgressModel", "IntProgressModel"):
            return _bar(model)
        if kind in ("HTMLModel", "HTMLMathModel"):
            return f"<span>{model.get('value', '')}</span>"
        if kind == "LabelModel":
            return f"<span>{html.escape(str(model.get('value', '')))}</span>"
        if model.get("_model_module") == _CONTROLS and _takes_input(model):
            return _control(model)
        return None


def _takes_input(model: Mapping[str, Any]) -> bool:
    return model.get("_view_name") not in _PARTS and model.get("_model_name") not in _PASSIVE


def _bar(model: Mapping[str, Any]) -> str:
    low, high = float(model.get("min") or 0.0), float(model.get("max") or 1.0)
    share = min(1.0, max(0.0, (float(model.get("value") or 0.0) - low) / ((high - low) or 1.0)))
    colour = _COLOURS.get(model.get("bar_style", ""), "#2196f3")
    return (
        f"{html.escape(model.get('description', ''))}"
        f'<div style="width: 20em; height: 1em; margin: 0 0.5em; background: #ddd">'
        f'<div style="width: {100 * share:.0f}%; height: 100%; background: {colour}"></div></div>'
    )


def _control(model: Mapping[str, Any]) -> str | None:
    """Return a button, slider, field or selection as HTML; None for a container, such as tabs."""
    label = html.escape(str(model.get("description", "")))
    if "children" in model:
        return None
    if "_options_labels" in model:
        options, chosen = model["_options_labels"], model.get("index")
        numbers = chosen if isinstance(chosen, (list, tuple)) else [chosen]
        value: Any = ", ".join(str(options[number]) for number in numbers if number is not None)
    elif isinstance(model.get("value"), bool):
        value = "\N{BALLOT BOX WITH CHECK}" if model["value"] else "\N{BALLOT BOX}"
    else:
        value = model.get("value", "")
    shown = html.escape(str("" if value is None else value))
    if not shown:  # a button
        return f'<span style="{_FRAME}; background: #eee; color: #666">{label}</span>'
    return f'<span>{label} <span style="{_FRAME}">{shown}</span></span>'


def _with_buffers(state: Mapping[str, Any], paths: Iterable[Sequence[Any]], buffers: Sequence[bytes]) -> dict[str, Any]:
    """Insert buffers, which were sent separately, into a state; containers on the way are copied."""
    whole = dict(state)
    for path, buffer in zip(paths, buffers, strict=False):
        place: Any = whole
        for key in path[:-1]:
            place[key] = inner = list(place[key]) if isinstance(place[key], list) else dict(place[key])
            place = inner
        place[path[-1]] = buffer
    return whole
