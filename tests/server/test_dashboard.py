"""The dashboard in a real browser, over an engine that shows a busy table: what it says is what the engine
said, in both colour schemes, at 8 and at 1024 rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import browser
from live import Live, serve
from playwright.sync_api import Browser, Page, expect
from scripted import LIMITS, ByteTokenizer
from scripted_state import BusyEngine

from slipstream.engine.client import EngineInfo
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions
from slipstream.server.pages import PAGES

__all__ = ["browser"]  # a fixture

CHOICE = {"value": "v2", "reason": "because <b>it is</b> so", "flag": "--model-runner"}
OTHER = {"value": "v1", "reason": "as it was", "flag": "--x"}
INFO = EngineInfo(LIMITS, (0,), {"model_runner": CHOICE}, {"model_runner": OTHER})
# Text on what is behind it, as WCAG 2 has it; colours are read off a canvas, whatever their notation.
CONTRAST = """(pairs) => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (name) => {
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  };
  const light = (name) => channels(name).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ordered = pairs.map(([a, b]) => [light(a), light(b)].sort((x, y) => y - x));
  return ordered.map(([a, b]) => (a + 0.05) / (b + 0.05));
}"""


@contextmanager
def over(engine: BusyEngine, **options: Any) -> Iterator[Live]:
    app = build_app(engine, "busy", tokenizer=ByteTokenizer(), options=ServerOptions(**options))
    with serve(app) as live:
        yield live


@contextmanager
def page_of(browser: Browser, live: Live, **options: Any) -> Iterator[Page]:
    """A page that must not complain, nor ask another host."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
    page = context.new_page()
    complaints: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.add("/".join(request.url.split("/")[:3])))
    page.goto(live.url)
    yield page
    context.close()
    assert complaints == []
    assert asked == {live.url}


def pause(page: Page, engine: BusyEngine) -> None:
    """The page stops at the engine's last state: what it asked for before may still be on its way. Which rows
    draft shows only in a state that differs from the one before."""
    expect(page.locator("#status-text")).to_have_text("live")
    for _ in range(20):
        engine.still = True
        for phase in (0, 1):
            shown = page.locator("#legend b").nth(phase)
            expect(shown).to_have_text(f"{(engine.table.phase == phase).sum():,}")
        page.locator("#pause").click()
        if counts(page)[3]:
            return
        page.locator("#pause").click()
        engine.still = False
        page.wait_for_timeout(500)


def counts(page: Page) -> list[int]:
    """Rows in each state, of the legend."""
    texts = page.locator("#legend b").all_text_contents()
    return [int(text.replace(",", "")) for text in texts]


@pytest.mark.parametrize("rows", [8, 1024])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_what_the_engine_said(
    browser: Browser, rows: int, scheme: str, tmp_path: Path
) -> None:
    engine = BusyEngine(rows=rows, info=INFO)
    with over(engine) as live, page_of(browser, live, color_scheme=scheme) as page:
        pause(page, engine)
        seen, table = counts(page), engine.table
        assert (sum(seen), seen[0], seen[1]) == (rows, (table.phase == 0).sum(), (table.phase == 1).sum())
        assert seen[3] > 0, "rows that draft are told apart"
        stats = engine.counts
        share = 100 * stats.accepted_tokens / stats.draft_tokens
        names, values = (page.locator(f".tile {part}") for part in ("dt", "dd:not(.sub)"))
        figures = dict(zip(names.all_text_contents(), values.all_text_contents(), strict=True))
        assert figures["Rows in use"] == f"{stats.num_running:,}of {rows:,}"
        assert figures["Waiting"] == str(stats.num_waiting)
        assert figures["Acceptance"] == f"{share:.0f}%"
        assert figures["Device step"].endswith("ms") and figures["Host step"] == "180µs"
        assert "% of host time" in str(page.locator("#steps-note").text_content())
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        plan = page.locator("#plan tbody")
        expect(plan).to_contain_text("because <b>it is</b> so")  # text, not markup
        expect(plan).to_contain_text("vLLM 0.31: v1")
        shot = page.screenshot(path=tmp_path / "page.png")
    assert len(shot) > 20_000, "a page that is not empty"


def test_a_row_tells_its_request_to_the_pointer_and_to_the_keyboard(browser: Browser) -> None:
    engine = BusyEngine(rows=1024, info=INFO)
    with over(engine) as live, page_of(browser, live) as page:
        pause(page, engine)
        row = next(row for row in range(40, 80) if engine.table.phase[row] == 2)
        canvas = page.locator("#rows")
        canvas.focus()
        # Forty to a line at this width, so one line down and some to the right.
        for key in ("Home", "ArrowDown", *["ArrowRight"] * (row - 40)):
            canvas.press(key)
        tip, said = page.locator("#tip"), page.locator("#rows-said")
        expect(tip).to_contain_text(f"Row {row}, ")
        expect(tip).to_contain_text(engine._names[row])
        ends = engine.table.length, engine.table.max_len
        output, most = (int(end[row] - engine._prompt[row]) for end in ends)
        expect(tip).to_contain_text(f"{output:,} of {most:,} tokens")
        expect(said).to_contain_text(f"Row {row}: ")
        canvas.press("Escape")
        expect(tip).to_be_hidden()
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        expect(tip).to_be_visible()
        page.mouse.move(0, 0)
        expect(tip).to_be_hidden()


def test_nothing_on_the_page_moves_while_its_figures_change(browser: Browser) -> None:
    with over(BusyEngine(rows=256, info=INFO)) as live, page_of(browser, live) as page:
        expect(page.locator("#status-text")).to_have_text("live")
        page.evaluate(
            "() => { window.shifts = 0; new PerformanceObserver((list) => list.getEntries().forEach("
            "(entry) => (window.shifts += entry.value))).observe({ type: 'layout-shift' }); }"
        )
        page.wait_for_timeout(1500)
        assert page.evaluate("window.shifts") < 0.001


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_no_state_outshines_another(browser: Browser, scheme: str) -> None:
    texts = [(ink, back) for ink in ("ink", "ink-2", "ink-3") for back in ("panel", "page")]
    states = [("prefill", "decode"), ("decode", "draft"), ("draft", "prefill")]
    with over(BusyEngine(info=INFO)) as live, page_of(browser, live, color_scheme=scheme) as page:
        ratios = page.evaluate(CONTRAST, [*texts, *states])
    assert min(ratios[: len(texts)]) >= 4.5, dict(zip(texts, ratios, strict=False))
    assert max(ratios[len(texts) :]) < 1.15, "equal weight"


def test_the_page_asks_for_the_key_and_keeps_it_in_its_tab(browser: Browser) -> None:
    engine = BusyEngine(info=INFO)
    with over(engine, api_keys=["secret"]) as live:
        for path in PAGES:
            assert live.http.get(path).status_code == 200
        assert live.http.get("/v1/engine/state").status_code == 401
        with page_of(browser, live) as page:
            field = page.get_by_label("Key", exact=True)
            field.fill("wrong")
            field.press("Enter")
            expect(page.locator("#ask-note")).to_contain_text("did not take this key")
            assert engine.looks == 0
            field.fill("secret")
            page.get_by_role("button", name="Use key").click()
            expect(page.locator("#status-text")).to_have_text("live")
            page.reload()
            expect(page.locator("#status-text")).to_have_text("live")


def test_the_scheme_is_the_systems_until_one_is_chosen(browser: Browser) -> None:
    with over(BusyEngine(info=INFO)) as live, page_of(browser, live, color_scheme="dark") as page:
        button = page.locator("#theme")
        seen = []
        for _ in range(4):
            seen.append((button.text_content(), page.evaluate("document.documentElement.dataset.theme")))
            button.click()
        assert seen == [("system", "dark"), ("light", "light"), ("dark", "dark"), ("system", "dark")]


def test_a_page_that_is_paused_asks_nothing_and_a_lost_server_is_said(browser: Browser) -> None:
    engine = BusyEngine(info=INFO)
    with over(engine) as live, page_of(browser, live) as page:
        expect(page.locator("#status-text")).to_have_text("live")
        page.locator("#pause").click()
        page.wait_for_timeout(300)
        before = engine.looks
        page.wait_for_timeout(700)
        assert engine.looks == before
        engine.errored = True
        page.route("**/v1/engine/state", lambda route: route.abort())
        page.locator("#pause").click()
        expect(page.locator("#status-text")).to_have_text("no answer, asking again")
        page.unroute("**/v1/engine/state")
        expect(page.locator("#status-text")).to_have_text("live", timeout=10_000)
