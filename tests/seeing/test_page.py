"""viz.page: what is in the file, and the page itself in a headless Chromium, by mouse, keyboard and finger."""

import json
import os
import re
import shutil

import pytest
import torch

import attnjourney
from attnjourney import viz

LAYERS, HEADS, N = [0, 2], [[0, 1, 5], [3, 4]], 24
TOKENS = [chr(ord("a") + i) for i in range(N)]


def one_hot(n: int, heads: int, first: int) -> torch.Tensor:
    """Head h of a layer: token i looks at token i - first - h alone, or at token 0 where there is none."""
    weights = torch.zeros(heads, n, n)
    for h in range(heads):
        for i in range(n):
            weights[h, i, max(0, i - first - h)] = 1
    return weights


def example() -> list[torch.Tensor]:
    return [one_hot(N, 3, 0), one_hot(N, 2, 10)]


def written(path, *args, **options) -> str:
    path.write_text(viz.page(*args, **options), encoding="utf-8")
    return path.as_uri()


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])


# ---------------------------------------------------------------------------------------------------- the file

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "\"'`&",
    "{{data}}",
    "\n",
    "\u202e",
    "\ud800",
    "\u0301",
    "",
    b"\xff",
    "<!--",
]


def test_the_file_is_complete_and_whatever_is_in_it_stays_text():
    n = len(HOSTILE)
    page = viz.page(HOSTILE, torch.eye(n)[None], title="<b>&", note="</style><script> é \ud800", warning="{{css}}")
    assert page.isascii()
    assert page.count("</script>") == 2 and page.count("</style>") == 1 and "<img" not in page and "<b>" not in page
    assert not re.search(r"\b(src|href)=(?!\"#|\"data:,)", page) and "http:" not in page and "https:" not in page
    assert "<title>&lt;b&gt;&amp;</title>" in page and "{{css}}</p>" in page
    tokens = data_of(page)["tokens"]
    assert tokens[0]["text"] == HOSTILE[0].replace(" ", "·") and tokens[2]["text"] == "{{data}}"
    assert tokens[3] == {"text": "↵", "name": "line break", "kind": "faint", "breaks": True}
    assert [t["text"] for t in tokens[4:9]] == ["U+202E", "U+D800", "◌\u0301", "∅", "\\xFF"]


def test_bytes_of_characters_and_of_none():
    tokens = viz.byte_tokens("a é日".encode() + b"\xe9\x00\x80")
    assert [t.text for t in tokens] == ["a", "·", "é₁", "é₂", "日₁", "日₂", "日₃", "\\xE9", "U+0000", "\\x80"]
    assert tokens[3].name == "byte A9, 2 of 2 of é" and tokens[7].name == "byte E9, not UTF-8"
    assert len(viz.byte_tokens(bytes(range(256)))) == 256 and viz.byte_tokens(b"") == []


def test_twelve_layers_of_twelve_heads_and_200_tokens_are_a_small_file():
    torch.manual_seed(0)
    scores = torch.randn(12, 12, 200, 200).masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf)
    assert len(viz.page(["x"] * 200, (2 * scores).softmax(-1))) < 4e6  # random: nothing that could be compressed


@pytest.mark.parametrize(
    "change, error, pattern",
    [
        (
            dict(tokens=TOKENS[:5]),
            ValueError,
            r"weights: expected \(heads, 5, 5\) for layer 0 and 5 tokens, got \(3, 24",
        ),
        (dict(tokens=[]), ValueError, "tokens: expected 1 to 512, got 0"),
        (dict(tokens=["x"] * 513), ValueError, "tokens: expected 1 to 512, got 513.*attention_maps"),
        (dict(tokens=[3] * N), TypeError, "tokens: expected str, bytes or Token, got int"),
        (dict(weights=[]), ValueError, "weights: expected at least one layer"),
        (dict(weights=[3]), TypeError, "weights: expected tensors or records.*got int"),
        (dict(weights=torch.full((1, N, N), 1.5)), ValueError, "weights: expected numbers from 0 to 1 in layer 0"),
        (dict(weights=torch.full((1, N, N), torch.nan)), ValueError, "weights: expected numbers from 0 to 1"),
        (dict(weights=torch.zeros(2, 3, 1, N, N).unbind()), None, ""),
        (dict(weights=[torch.zeros(2, 1, N, N)]), ValueError, "weights: expected.*of one sequence"),
        (dict(layers=[1]), ValueError, "layers: expected 2 of them, got 1"),
        (dict(layers=["a", "b"]), TypeError, "layers: expected whole numbers, got 'a'"),
        (dict(layers=3), TypeError, "layers: expected a sequence, got int"),
        (dict(heads=[[0, 1, 2.5], [3, 4]]), TypeError, "heads: expected whole numbers, got 2.5"),
        (dict(heads=[[0], [1]]), ValueError, "heads: expected 3 of them, got 1"),
    ],
)
def test_wrong_arguments(change, error, pattern):
    arguments = dict(tokens=TOKENS, weights=example()) | change
    if error is None:  # a batch of one is one sequence
        arguments["weights"] = [w.transpose(0, 1) for w in arguments["weights"]]
        viz.page(**arguments)
        return
    with pytest.raises(error, match=pattern):
        viz.page(**arguments)


# ---------------------------------------------------------------------------------------------------- in a browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a page; afterwards there must have been no error and no request but for the file itself."""
    contexts, trouble, requests = [], [], []

    def visit(tokens=TOKENS, weights=None, width=1280, height=900, fragment="", options=None, **context):
        url = written(tmp_path / "page.html", tokens, example() if weights is None else weights, **(options or {}))
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0] == url or request.url))
        page.goto(url + fragment)
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == [] and set(requests) == {True}


LABELLED = dict(layers=LAYERS, heads=HEADS)


def shaded(page, i: int) -> bool:
    """Whether a token has the colour of the whole weight."""
    color = page.evaluate("String(colors[255])").replace(",", ", ")
    return page.locator(f"#t{i}").evaluate("e => e.style.background") == f"rgb({color})"


def state(page) -> tuple:
    return tuple(page.evaluate("[layerNow().layer, layerNow().heads[at.head], tokenNow()]"))


@needs_chromium
def test_the_page_has_every_weight(visit):
    torch.manual_seed(0)
    weights = [torch.randn(heads, 9, 9).mul(3).softmax(-1) for heads in (2, 3)]
    page = visit(TOKENS[:9], weights)
    for layer, of_layer in enumerate(weights):
        for head, expected in enumerate(of_layer):
            shown = page.evaluate(f"Array.from(table({layer}, {head}), share)")
            error = (torch.tensor(shown).view(9, 9) - expected).abs()
            assert (error <= 0.5 / 255 * 2 * expected.sqrt() + 0.5 / 255**2).all()  # half a step of the root


@needs_chromium
def test_the_mouse_shows_and_keeps(visit):
    page = visit(options=LABELLED)
    assert state(page) == (0, 0, N - 1)
    header = page.get_by_role("columnheader").all_inner_texts()
    assert [t for t in header if t.startswith("H") and len(t) == 2] == ["H0", "H1", "H3", "H4", "H5"]
    under = page.get_by_role("gridcell", name="layer 2, head 4").bounding_box()["x"]
    assert abs(under - page.get_by_role("gridcell", name="layer 0, head 5").bounding_box()["x"]) > 10
    page.get_by_role("gridcell", name="layer 2, head 4").click()  # looks 11 tokens back
    assert state(page) == (2, 4, N - 1) and shaded(page, N - 12) and "layer 2, head 4" in page.inner_text("#now")
    page.hover("#t20")
    assert shaded(page, 9) and not shaded(page, N - 12)
    assert page.inner_text("#sentence") == "u20 looks most at"
    assert page.locator("#strongest li").all_inner_texts() == ["j9\n100 %"]
    page.mouse.move(5, 5)
    assert state(page)[2] == N - 1
    page.click("#t15")
    page.mouse.move(5, 5)
    assert state(page)[2] == 15 and shaded(page, 4)
    page.get_by_label("who looks at it").check(force=True)
    page.hover("#t4")
    assert shaded(page, 15) and page.inner_text("#sentence") == "Looking most at e4"
    assert "layer=2&head=4&token=15&direction=to" in page.url


@needs_chromium
def test_the_map_is_drawn_and_read(visit):
    page = visit(options=LABELLED, fragment="#layer=2&head=3&token=5")
    assert state(page) == (2, 3, 5)
    place = page.evaluate(
        """([i, j]) => {
          const { box, width, height } = mapCells();
          return [box.left + edge.left + (j + .5) * width / N, box.top + edge.top + (i + .5) * height / N];
        }""",
        [20, 10],
    )
    pixels = """([x, y]) => { // there, and a cell to the right
      const map = $("map"), box = map.getBoundingClientRect(), k = map.width / box.width, cell = mapCells().width / N;
      const row = map.getContext("2d").getImageData((x - box.left) * k, (y - box.top) * k, cell * k + 1, 1).data;
      return [String([...row].slice(0, 3)), String([...row].slice(-4, -1))];
    }"""
    assert page.evaluate(pixels, place) == page.evaluate("[String(colors[255]), String(colors[0])]")
    page.mouse.move(*place)
    assert page.inner_text("#cell") == "u20 → k10: 100 %" and state(page)[2] == 20
    page.mouse.click(*place)
    page.mouse.move(5, 5)
    assert page.inner_text("#cell") == "" and state(page)[2] == 20
    assert "layer 2, head 3: 24 by 24" in page.get_attribute("#map", "aria-label")


@needs_chromium
def test_the_keyboard_reaches_and_moves_everything(visit):
    page = visit(options=LABELLED, width=400)  # several lines of text
    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "(e => e.id || e.getAttribute('aria-label') || e.value || e.textContent)(document.activeElement)"
            )
        )
        ring = "(e => getComputedStyle(e.type === 'radio' ? e.nextSibling : e).outlineStyle)(document.activeElement)"
        assert page.evaluate(ring) == "solid", order
    sorts = ["Layer", "Head", "Entropy", "Distance", "First", "Prev.", "Itself"]
    row = "show layer 0, head 0"
    start = ["Skip to the text", "theme", "layer 0, head 0", "from", "text"]
    assert [o for o in order if "scroll" not in o][:13] == [*start, *sorts, row]

    page.focus("#picker [aria-selected=true]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert state(page)[:2] == (0, 5)
    page.keyboard.press("ArrowDown")  # this layer has no head 5
    assert state(page)[:2] == (2, 4) and page.evaluate("document.activeElement.ariaLabel") == "layer 2, head 4"
    page.keyboard.press("ArrowDown")
    assert state(page)[:2] == (2, 4)

    page.focus("#text")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert state(page) == (2, 4, 2) and page.get_attribute("#text", "aria-activedescendant") == "t2"
    page.keyboard.press("PageDown")
    assert state(page)[2] == 12
    page.keyboard.press("Shift+ArrowUp")
    assert state(page) == (0, 5, 12) and shaded(page, 10)
    page.keyboard.press("Shift+ArrowLeft")
    assert state(page) == (0, 1, 12) and shaded(page, 11)
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert state(page)[2] == N - 1 and page.get_attribute(f"#t{N - 1}", "aria-selected") == "true"
    page.keyboard.press("Control+ArrowLeft")
    assert state(page)[2] == N - 1

    page.focus("#summary tbody button[tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert state(page)[:2] == (0, 5) and page.evaluate("document.activeElement.ariaLabel") == "show layer 0, head 5"


@needs_chromium
def test_up_and_down_move_between_lines(visit):
    tokens = viz.byte_tokens(b"abcd\nefgh\nij")
    page = visit(tokens, torch.eye(len(tokens))[None], fragment="#token=2")
    page.focus("#text")
    for key, expected in (("ArrowDown", 7), ("ArrowDown", 11), ("ArrowDown", 11), ("ArrowUp", 6), ("ArrowUp", 1)):
        page.keyboard.press(key)
        assert state(page)[2] == expected, key


@needs_chromium
def test_the_table_sorts(visit):
    page = visit(options=LABELLED)

    def column(k):
        return [cells.split("\t")[k] for cells in page.locator("#summary tbody tr").all_inner_texts()]

    assert column(0) == ["0", "0", "0", "2", "2"] and column(3) == ["0.0", "1.0", "1.9", "7.7", "8.3"]
    page.get_by_role("button", name="Distance").click()
    assert column(3) == ["8.3", "7.7", "1.9", "1.0", "0.0"]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Distance")
    page.focus("th[aria-sort] button")
    page.keyboard.press("Enter")
    assert column(3) == ["0.0", "1.0", "1.9", "7.7", "8.3"] and page.locator("th[aria-sort=ascending]").count() == 1
    page.locator("#summary tbody tr").last.click()
    assert state(page)[:2] == (2, 4) and page.locator("tr[aria-current=true]").count() == 1
    assert page.locator("#summary tbody tr").last.get_attribute("aria-current") == "true"


@needs_chromium
def test_the_chosen_row_of_a_long_table_is_in_view(visit):
    page = visit(weights=torch.eye(N).expand(12, 12, N, N))
    inside = """() => {
      const frame = $("summary").parentNode.getBoundingClientRect(), head = $("summary").tHead.getBoundingClientRect();
      const row = document.querySelector("tr[aria-current=true]").getBoundingClientRect();
      return row.top >= head.bottom - 1 && row.bottom <= frame.bottom + 1 && scrollY === 0;
    }"""
    for name in ("layer 11, head 11", "layer 5, head 0", "layer 0, head 0"):
        page.get_by_role("gridcell", name=name).first.click()
        assert page.evaluate(inside), name


@needs_chromium
def test_light_and_dark(visit):
    seen = {}
    for scheme in ("light", "dark"):
        page = visit(color_scheme=scheme)
        seen[scheme] = look = page.evaluate("[getComputedStyle(document.body).backgroundColor, String(colors[0])]")
        ratio = """() => Math.min(...colors.map((rgb, byte) => {
          const light = (c) => c.map((x) => x / 255 <= .04045 ? x / 3294.6 : ((x / 255 + .055) / 1.055) ** 2.4)
            .reduce((sum, x, k) => sum + x * [.2126, .7152, .0722][k], 0);
          const ink = inks[byte] === "#ffffff" ? 1 : 0, of = light(rgb);
          return (Math.max(ink, of) + .05) / (Math.min(ink, of) + .05);
        }))"""
        assert page.evaluate(ratio) >= 4.5  # of letters on every colour: WCAG AA
        page.click("#theme")
        assert page.evaluate("[getComputedStyle(document.body).backgroundColor, String(colors[0])]") != look
        page.click("#theme")
        assert page.evaluate("[getComputedStyle(document.body).backgroundColor, String(colors[0])]") == look
    assert seen["light"] == ["rgb(244, 245, 247)", "255,255,255"] and seen["dark"] == ["rgb(13, 17, 23)", "22,27,34"]


@needs_chromium
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone(visit, width):
    weights = torch.eye(60).expand(12, 12, 60, 60)
    tokens = ["a", "a" * 300, *viz.byte_tokens(b"b <wide>\n" * 6)[:58]][:60]
    page = visit(tokens + ["x"] * (60 - len(tokens)), weights, width=width, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.tap("#t3")
    assert state(page)[2] == 3 and page.inner_text("#sentence").endswith("looks most at")
    page.get_by_role("gridcell", name="layer 11, head 11").tap()
    assert state(page)[:2] == (11, 11)
    assert min(page.locator("#picker [role=gridcell]").first.bounding_box().values()) > 0


@needs_chromium
def test_hostile_tokens_are_shown_and_do_nothing(visit):
    page = visit(HOSTILE, torch.eye(len(HOSTILE))[None], options=dict(title="<script>alert(1)</script>", warning="<i>"))
    assert page.title() == "<script>alert(1)</script>" and page.inner_text("p.warning:visible") == "<i>"
    shown = [page.inner_text(f"#t{i}") for i in range(len(HOSTILE))]
    assert shown[:3] == [token.replace(" ", "·") for token in HOSTILE[:3]] and shown[-1] == "<!--"
    assert page.locator("img").count() == 0


@needs_chromium
def test_a_damaged_page_says_so(browser, tmp_path):
    text = viz.page(TOKENS, example())
    (tmp_path / "page.html").write_text(re.sub(r'"weights":"[^"]{40}', '"weights":"', text), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#problem:visible", timeout=20_000)
    assert "cannot be shown" in page.inner_text("#problem") and not page.is_visible("#main")
    page.close()


@needs_chromium
def test_records_of_capture_are_a_page(visit):
    layer = attnjourney.nn.CausalSelfAttention(32, 8)
    with attnjourney.capture(layer, heads=[1, 6]) as seen, torch.no_grad():
        layer(torch.randn(1, 10, 32))
    page = visit(TOKENS[:10], seen)
    assert page.locator("[role=gridcell]").count() == 2 and state(page)[:2] == (0, 1)
