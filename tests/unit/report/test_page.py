"""The HTML report: what it holds, what it leaves out, and what it refuses."""

import json
import re
import shutil

import numpy as np
import pytest
from cli_tools import succeed
from factories import (
    make_budget_profile,
    make_evaluation,
    make_losses,
    make_row,
    make_scores,
    make_shape,
)

from kvalloc.accounting.costs import full_bytes
from kvalloc.allocation.decision import solve
from kvalloc.report.page import write_report


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    scores = make_losses(per="layer")
    scores.save(folder / "s.safetensors")
    for solver in ("greedy", "uniform"):
        solve(scores, budget=0.5, solver=solver, objective="mean").save(folder / f"{solver}.json")
    solve(make_scores(), target_retention=0.9).save(folder / "auto.json")
    make_evaluation(make_row(), make_row("kvpress:TOVA", kl=0.09, ci95=None, score=None)).save(
        folder / "result.json"
    )
    return folder


def document(path):
    """What the page's own script reads."""
    result = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return json.loads(result[1])


def test_a_page_of_everything_holds_every_figure_and_asks_for_nothing(files, tmp_path):
    names = ["s.safetensors", "greedy.json", "uniform.json", "auto.json", "result.json"]
    ran = succeed("report", *(files / name for name in names), "-o", tmp_path / "r.html")
    assert ran.out.startswith(f"written {tmp_path / 'r.html'} (")
    text, held = (tmp_path / "r.html").read_text("utf-8"), document(tmp_path / "r.html")
    curves = {"curves-0-rete", "curves-0-loss"}
    frontiers = {"frontier-retention", "frontier-loss"}
    assert held["charts"].keys() == {"budgets", "measured"} | frontiers | curves
    assert "default-src 'none'" in text
    assert not re.search(r"<(script src|link )", text)
    assert text.count("was decided by other curves") == 1  # auto: it stands under no best line
    for name in frontiers:
        drawn = held["charts"][name]["layer"][-1]["data"]["values"]
        assert {point["name"] for point in drawn} == {"greedy", "uniform"}
    for words in ("Proven optimal: no budgets", "kvpress:TOVA", "0.0310", "made up"):
        assert words in text


def test_the_calculator_holds_the_profiles_own_bytes(tmp_path):
    profile = make_budget_profile(np.array([[10, 30], [20, 20]]), context_tokens=400)
    shape = make_shape(n_layers=2, dtype_bytes=4, max_context_tokens=3000)
    profile = profile.replace(shape=shape)
    profile.save(tmp_path / "p.json")
    write_report([tmp_path / "p.json"], tmp_path / "r.html")
    memory = document(tmp_path / "r.html")["memory"]
    assert memory["contexts"][0] == 256
    assert memory["contexts"][-1] == 3000
    assert memory["contexts"][memory["start"]] == 400
    for place, context in enumerate(memory["contexts"]):
        assert memory["kept"][0][place] == profile.retained_bytes_at(context)
        assert memory["full"][place] == full_bytes(shape, context)  # as shares are of everywhere


def test_what_files_leave_out_is_said(files, tmp_path):
    make_evaluation().save(tmp_path / "empty.json")
    for given, said in (
        (files / "s.safetensors", "No budget profile"),
        (files / "auto.json", "No score profile"),
        (files / "auto.json", "No measurement of answers"),
        (tmp_path / "empty.json", "empty holds no rows: nothing was measured"),
    ):
        write_report([given], tmp_path / "r.html")
        assert said in (tmp_path / "r.html").read_text("utf-8")


def test_text_of_a_file_is_text_on_the_page(tmp_path):
    nasty = "</script><script>alert(1)</script>"
    make_scores(text_description=nasty).save(tmp_path / "s.safetensors")
    shape = make_shape(model_id=nasty)
    make_budget_profile(np.full((3, 2), 20), shape=shape).save(tmp_path / "p.json")
    for name in ("s.safetensors", "p.json"):
        write_report([tmp_path / name], tmp_path / "r.html")
        assert nasty not in (tmp_path / "r.html").read_text("utf-8")


def test_sliding_layers_and_models_of_one_head(tmp_path):
    mixed = make_shape(n_layers=3, layer_types=("sliding", "full", "sliding"), sliding_window=16)
    for shape in (mixed, make_shape(n_layers=1, n_kv_heads=1)):
        scores = make_scores(shape=shape)
        scores.save(tmp_path / "s.safetensors")
        solve(scores, budget=0.7).save(tmp_path / "p.json")
        write_report([tmp_path / "s.safetensors", tmp_path / "p.json"], tmp_path / "r.html")
        curves = document(tmp_path / "r.html")["charts"]["curves-0-rete"]["data"]["values"]
        assert {row["layer"] for row in curves} == set(shape.full_layers)


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def browser():
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        # without its sandbox, which root cannot have: the page is our own
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(files):
    names = ["s.safetensors", "greedy.json", "uniform.json", "auto.json", "result.json"]
    write_report([files / name for name in names], files / "r.html")
    return files / "r.html"


@pytest.fixture
def opened(browser, report):
    """The page on a screen, drawn; what it said and asked for stands in its lists."""
    contexts = []

    def show(screen):
        contexts.append(browser.new_context(**SCREENS[screen]))
        page = contexts[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("body[data-drawn]")
        return page

    yield show
    for context in contexts:
        context.close()


@in_browser
@pytest.mark.parametrize("screen", SCREENS)
def test_it_is_drawn_without_a_word_or_a_request_and_keeps_nobody_out(opened, screen):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(screen)
    assert page.said == []
    assert page.asked == [page.url]
    assert page.locator(".chart svg").count() == page.locator(".chart").count() == 6
    width = SCREENS[screen]["viewport"]["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    result = [
        (one["impact"], one["id"], one["nodes"][0]["html"])
        for one in Axe().run(page).response["violations"]
    ]
    assert [one for one in result if one[0] in ("serious", "critical")] == []


@in_browser
def test_sliders_move_numbers_and_marks_and_headings_sort(opened):
    page = opened("desktop")
    kept = page.locator("#kept td").first
    before = kept.text_content()
    page.locator("#context").focus()
    page.keyboard.press("End")
    longer = kept.text_content()
    page.locator("#batch").fill("4")
    assert len({before, longer, kept.text_content()}) == 3

    marks = page.locator("#curves-0-rete .mark-symbol path").first
    place = marks.get_attribute("transform")
    page.locator("#layer").focus()
    page.keyboard.press("End")
    page.wait_for_function("(place) => document.querySelector('#curves-0-rete .mark-symbol path')"
                           ".getAttribute('transform') !== place", arg=place)  # fmt: skip
    assert page.locator("output[for=layer]").text_content() == "2"

    table = page.locator("table", has_text="Decisions side by side")
    heading = table.get_by_role("button", name="retention")
    for order in ("ascending", "descending"):
        heading.click()
        cells = [float(one) for one in table.locator("tbody td:nth-child(3)").all_text_contents()]
        assert cells == sorted(cells, reverse=order == "descending")
        assert table.locator(f"th[aria-sort={order}]").count() == 1
