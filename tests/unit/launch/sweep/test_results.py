"""The table and the plot of a sweep, to the letter."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tandem.launch.sweep.folder import Run
from tandem.launch.sweep.results import COLOURS, as_csv, columns, draw, show, write_results
from tandem.launch.sweep.states import Progress
from tandem.utils.console import Console
from tandem.utils.files import append_json_line

SVG = "{http://www.w3.org/2000/svg}"


def make_item(
    folder: Path, name: str, losses: Sequence[tuple[int, object]], metrics: dict[str, float], algorithm: str = "sft"
) -> Progress:
    """A run whose metrics file has `losses` by step."""
    run = Run(name, algorithm, "sft", str(folder / name), {"seed": 3}, 1, evaluates=True)
    run.directory.mkdir(parents=True)
    for step, loss in losses:
        append_json_line(run.directory / "metrics.jsonl", {"process": "sft", "step": step, "loss": loss})
    return Progress(run, "finished", 4, 4, metrics)


def attributes(element: ElementTree.Element, *names: str) -> list[str]:
    return [element.attrib[name] for name in names]


def test_curves_go_over_the_width_and_the_height_of_their_panel(tmp_path: Path) -> None:
    lines = [(1, 2.0), (2, "x"), (3, 9.0), (4, 1.0), (2, 0), (3, float("inf")), (3, 1.0)]
    items = [
        make_item(tmp_path, "a<b", lines, {"loss": 1.0}),
        make_item(tmp_path, "later", [(2, 0.5)], {}),
        make_item(tmp_path, "not yet", [], {}),
        replace(make_item(tmp_path, "damaged", [(1, 1.0)], {}), damage="it is"),
        make_item(tmp_path, "flat", [(0, 7.0)], {"loss": 7.0}, "other"),
        make_item(tmp_path, "none", [], {}, "without"),
        make_item(tmp_path, "rising", [(1, 7), (2, 9.0)], {"loss": 9.0}, "third"),
    ]
    picture = ElementTree.fromstring(draw(items))
    assert attributes(picture, "width", "height") == ["1120", "1170"]
    frames = [attributes(each, "x", "y", "width", "height") for each in picture.findall(f"{SVG}rect")[1:]]
    assert frames == [["70", "30", "560", "300"], ["70", "420", "560", "300"], ["70", "810", "560", "300"]]
    curves = [attributes(each, "points", "stroke") for each in picture.findall(f"{SVG}polyline")]
    assert curves == [
        ["210.0,30.0 350.0,330.0 490.0,180.0 630.0,180.0", COLOURS[0]],
        ["350.0,255.0", COLOURS[1]],
        ["70.0,720.0", COLOURS[0]],
        ["350.0,1110.0 630.0,810.0", COLOURS[0]],
    ]
    ends = [attributes(each, "cx", "cy") for each in picture.findall(f"{SVG}circle")]
    assert ends == [["630.0", "180.0"], ["350.0", "255.0"], ["70.0", "720.0"], ["630.0", "810.0"]]
    texts = [(each.text, *attributes(each, "x", "y")) for each in picture.findall(f"{SVG}text")]
    assert texts == [
        *(("sft: loss", "70", "20"), ("2", "64", "40"), ("0", "64", "330"), ("step 4", "630", "346")),
        *(("a<b: 1", "644", "42"), ("later: 0.5", "644", "58")),
        *(("other: loss", "70", "410"), ("7", "64", "430"), ("7", "64", "720"), ("step 1", "630", "736")),
        *(("flat: 7", "644", "432"), ("third: loss", "70", "800"), ("9", "64", "820"), ("7", "64", "1110")),
        *(("step 2", "630", "1126"), ("rising: 9", "644", "822")),
    ]


def test_a_panel_has_room_for_the_names_of_many_runs(tmp_path: Path) -> None:
    items = [make_item(tmp_path, f"run{number}", [(1, 1.0)], {"loss": 1.0}) for number in range(21)]
    picture = ElementTree.fromstring(draw(items))
    assert picture.attrib["height"] == str(60 + 16 * 21)
    assert [each.attrib["stroke"] for each in picture.findall(f"{SVG}polyline")] == [*COLOURS, *COLOURS][:21]
    assert ElementTree.fromstring(draw(items[:20])).attrib["height"] == "390"


def test_a_plot_without_any_number(tmp_path: Path) -> None:
    item = make_item(tmp_path, "a", [(1, float("inf"))], {"loss": 1.0})
    picture = ElementTree.fromstring(draw([item]))
    assert [each.text for each in picture.findall(f"{SVG}text")] == ["sft: loss", "1", "0", "step 1"]
    assert ElementTree.fromstring(draw([replace(item, metrics={})])).attrib["height"] == "30"


def test_files_and_the_table(tmp_path: Path) -> None:
    items = [
        make_item(tmp_path, "a", [(1, 1.0)], {"loss": 1.23456}),
        replace(make_item(tmp_path, "b", [], {"eval/loss": 2.0, "loss": 1.0}), evaluation="failed"),
        replace(make_item(tmp_path, "c", [], {}), state="written", step=0, max_steps=None, evaluation="finished"),
    ]
    items[1].run.varied["beta"] = 0.5
    assert columns(items) == (["seed", "beta"], ["loss", "eval/loss"])
    write_results(tmp_path, items)
    table = (tmp_path / "results.csv").read_bytes().decode()
    assert table == as_csv(items) and (tmp_path / "results.svg").read_text() == draw(items)
    assert table.splitlines() == [
        "name,seed,beta,state,step,max_steps,loss,eval/loss",
        "a,3,,finished,4,4,1.23456,",
        "b,3,0.5,finished,4,4,1.0,2.0",
        "c,3,,written,0,,,",
    ]
    assert shown(items, 100) == [
        "┏━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━┳━━━━━━━┳━━━━━━━━━━━┓",
        "┃ run ┃ state                       ┃ step ┃ loss  ┃ eval/loss ┃",
        "┡━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━╇━━━━━━━━━━━┩",
        "│ a   │ finished                    │ 4/4  │ 1.235 │           │",
        "│ b   │ finished, evaluation failed │ 4/4  │ 1     │ 2         │",
        "│ c   │ written                     │ 0    │       │           │",
        "└─────┴─────────────────────────────┴──────┴───────┴───────────┘",
        "3 runs: 2 finished, 1 written. Results: /sweep/results.csv, results.svg",
    ]


def shown(items: Sequence[Progress], width: int) -> list[str]:
    text = io.StringIO()
    show(Console(file=text, width=width), Path("/sweep"), items)
    return text.getvalue().splitlines()


@pytest.mark.parametrize(("width", "known"), [(200, 4), (82, 4), (81, 3)])
def test_a_table_has_four_metrics_or_as_many_as_there_is_room_for(tmp_path: Path, width: int, known: int) -> None:
    """Names and states are wrapped first, down to fourteen letters."""
    metrics = {f"metric{number}": 0.5 for number in range(5)}
    item = make_item(tmp_path, "a" * 40, [], metrics)
    lines = shown([replace(item, evaluation="failed")], width)
    assert [name in lines[1] for name in metrics] == [True] * known + [False] * (5 - known)


def test_names_of_runs_are_wrapped_before_a_metric_is(tmp_path: Path) -> None:
    metric = "of_a_name_of_thirty_letters_xy"
    lines = shown([make_item(tmp_path, "a" * 40, [], {metric: 0.5})], 72)
    assert f"┃ {metric} ┃" in lines[1]
