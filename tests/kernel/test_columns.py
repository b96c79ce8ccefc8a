"""`output="tabs"`: what each rank shows, in a column of its own."""

from __future__ import annotations

from typing import Any

import pytest
from cells import cells
from conftest import Kernel, Result
from hypothesis import given
from hypothesis import strategies as st

from nbdist import in_ddp
from nbdist.kernel.cell.tabs import _Text
from nbdist.kernel.cell.widgets import Widgets

CELLS = cells("kernel/cells/columns.py")
FIRST_CELL = "import time, torch.distributed as dist\nfrom nbdist import in_ddp"


def last(result: Result) -> dict[str, Any]:
    """Return what a page shows in the end: one display, and its updates."""
    displays = [one for one in result.outputs if "data" in one and one["kind"] != "comm_msg"]
    assert [one["kind"] for one in displays] == ["display_data"] + ["update_display_data"] * (len(displays) - 1)
    assert len({one["transient"]["display_id"] for one in displays}) == 1
    assert not [one for one in result.outputs if one["kind"].startswith("comm")], "no widget of a rank is left"
    found: dict[str, Any] = displays[-1]["data"]
    return found


def test_a_column_for_each_rank(notebook: Kernel) -> None:
    result = notebook.run(CELLS["a column for each rank"])
    assert result.error is None
    data = last(result)
    for rank in range(2):
        column = data["text/html"].split("<b>rank ")[rank + 1]
        places = [column.index(part) for part in (f"&lt;rank {rank}&gt;", f"<i>end {rank}</i>", "width: 100%", "red")]
        assert column.startswith(f"{rank}</b>") and places == sorted(places) and "begin" not in column
        assert "4/4" in column and "\x1b" not in column
    assert "<script" not in data["text/html"]
    assert data["text/plain"].startswith("[rank 0]\n<rank 0>\n") and "\n[rank 1]\n" in data["text/plain"]


def test_the_failing_rank_is_in_front(notebook: Kernel) -> None:
    result = notebook.run(CELLS["a rank that fails"])
    assert result.error == "ZeroDivisionError"
    data = last(result)
    assert data["text/plain"].startswith("[rank 1: failed]\nI am 1") and "#d32f2f" in data["text/html"]


def test_plots_and_cleared_output(notebook: Kernel) -> None:
    html = last(notebook.run(CELLS["plots and cleared output"]))["text/html"]
    assert "data:image/png;base64,iVBOR" in html and "gone" not in html


def test_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    in_ddp.options(output="tabs")(1, print, "seen")
    assert capsys.readouterr().out == "[rank 0] seen\n"


@given(st.lists(st.sampled_from(["a", "bc", "\n", "\r", "x\r\n", "\r 5%", "long" * 50])), st.integers(1, 5))
def test_text_is_the_same_in_any_pieces(parts: list[str], size: int) -> None:
    whole, pieces = _Text(), _Text()
    text = "".join(parts)
    whole.write(text)
    for start in range(0, len(text), size):
        pieces.write(text[start : start + size])
    assert str(whole) == str(pieces)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb", "a\nb"),
        ("10%\r20%\r", "20%"),
        ("\r10%\r20%\nend", "20%\nend"),
        ("windows\r\nlines\r\n", "windows\nlines"),
        ("\x1b[1mbold\x1b[0m", "bold"),
    ],
)
def test_control_characters_in_a_text_are_applied(text: str, seen: str) -> None:
    shown = _Text()
    shown.write(text)
    assert str(shown) == seen


def test_pictures_of_widgets() -> None:
    widgets = Widgets()

    def model(comm_id: str, kind: str, **state: Any) -> None:
        widgets.handle("comm_open", comm_id, {"state": {"_model_name": kind, **state}})

    model("bar", "IntProgressModel", value=1, min=0, max=4, description="<b>")
    model("text", "HTMLModel", value="<i>25 %</i>")
    model("slider", "IntSliderModel", value=3)
    model("box", "HBoxModel", children=["IPY_MODEL_bar", "IPY_MODEL_text"])
    model("mixed", "VBoxModel", children=["IPY_MODEL_bar", "IPY_MODEL_slider"])
    picture = widgets.picture("box")
    assert picture is not None and "width: 25%" in picture and "<i>25 %</i>" in picture and "&lt;b&gt;" in picture
    widgets.handle("comm_msg", "bar", {"method": "update", "state": {"value": 8}})
    assert "width: 100%" in (widgets.picture("bar") or "")
    widgets.handle("comm_msg", "bar", {"method": "custom", "state": {"value": 0}})
    assert "width: 100%" in (widgets.picture("bar") or "")
    assert widgets.picture("slider") is None and widgets.picture("mixed") is None and widgets.picture("gone") is None


def test_pictures_of_input_widgets_say_that_input_has_no_effect() -> None:
    widgets = Widgets()

    def seen(kind: str, **state: Any) -> str:
        common = {"_model_name": kind, "_model_module": "@jupyter-widgets/controls", "_view_name": "View"}
        widgets.handle("comm_open", kind, {"state": {**common, **state}})
        return widgets.picture(kind) or ""

    assert ">7<" in seen("IntSliderModel", value=7) and "rate" in seen("IntSliderModel", value=7, description="rate")
    assert "Go" in seen("ButtonModel", description="Go") and "<button" not in seen("ButtonModel", description="Go")
    assert "\N{BALLOT BOX WITH CHECK}" in seen("CheckboxModel", value=True)
    assert "b, c" in seen("SelectMultipleModel", _options_labels=["a", "b", "c"], index=[1, 2])
    assert ">b<" in seen("DropdownModel", _options_labels=["a", "b"], index=1)
    assert "&lt;i&gt;" in seen("TextModel", value="<i>") and seen("TabModel", children=[]) == ""
    assert "have ended" in seen("VBoxModel", children=["IPY_MODEL_ButtonModel", "IPY_MODEL_TextModel"])
    assert "have ended" not in seen("HTMLModel", value="text")


def test_buffers_of_a_widgets_state_are_put_in_their_places() -> None:
    widgets = Widgets()
    state = {"_model_name": "OtherModel", "traces": [{"x": {"shape": [1]}}]}
    widgets.handle("comm_open", "plot", {"state": state, "buffer_paths": [["traces", 0, "x", "value"]]}, [b"1"])
    assert widgets.state("plot")["traces"] == [{"x": {"shape": [1], "value": b"1"}}]
    assert state["traces"] == [{"x": {"shape": [1]}}], "what goes to the page is as it was"


def test_a_widget_of_the_notebook_shows_what_ranks_do_to_it(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["a widget of the notebook"])
    *shown, comm_id = result.text.split()
    assert shown == ["3", "3", "success"]
    states = [o["data"]["state"] for o in result.outputs if o["kind"] == "comm_msg" and o["comm_id"] == comm_id]
    assert {"value": 3} in states and {"bar_style": "success"} in states
    opened = [o["comm_id"] for o in result.outputs if o["kind"] == "comm_open"]
    assert opened.count(comm_id) == 1 and not [o for o in result.outputs if o["kind"] == "comm_close"]
    assert notebook.ok("bar.value = 1\nprint(bar.value)").text == "1\n", "it is alive still"


def test_a_widget_that_comes_back_is_the_notebooks(notebook: Kernel) -> None:
    comm_id = notebook.ok(CELLS["a widget that comes back"]).text.strip()
    said = {"comm_id": comm_id, "data": {"method": "update", "state": {"value": 7}, "buffer_paths": []}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", said))
    assert notebook.ok("print(slider.value)").text == "7\n", "it was moved in the page"
