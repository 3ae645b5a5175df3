"""The page in a browser, at the width of a desk and of a phone: drop, correct, teach, and the photos are named again.

With PEARL_SCREENSHOTS=FOLDER its pictures are written there; those of docs/ come from it.
"""

import base64
import csv
import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from photos import digit
from served import png, served, taught

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium"),
]

DROP = """async (photos) => {
  const data = new DataTransfer();
  for (const [name, text, type] of photos) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  dispatchEvent(new DragEvent("drop", { dataTransfer: data }));
}"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, client, width, height):
    """The page of a model of two classes, and a list that collects its errors and warnings."""
    page, wrong = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light"), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(str(client.base_url))
    page.get_by_text("2 classes in 1 task").wait_for()
    return page, wrong


def photos_of(label, some):
    return [[f"{label} {i}.png", base64.b64encode(png(digit(label)[i], 96)).decode(), "image/png"] for i in some]


def picture(page, name):
    if folder := os.environ.get("PEARL_SCREENSHOTS"):
        shot = Image.open(io.BytesIO(page.screenshot(scale="css")))
        shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(
            Path(folder) / f"serve-{name}.png", optimize=True
        )


@pytest.mark.parametrize(("kind", "width", "height"), [("desk", 1280, 900), ("phone", 390, 844)])
def test_photos_are_dropped_corrected_taught_and_named(one, forks, browser, tmp_path, kind, width, height):
    from playwright.sync_api import expect

    with served(one) as client:
        page, wrong = opened(browser, client, width, height)

        # photos are named; what is no photo is counted, what cannot be read says why
        page.evaluate(DROP, [*photos_of(0, (50, 51)), *photos_of(2, range(6)), ["a.txt", "eA==", "text/plain"]])
        page.get_by_text("8 photos; 1 file left out, as no photo", exact=True).wait_for()
        cards = page.locator("#pictures > li")
        assert cards.count() == 8 and cards.first.locator(".verdict").inner_text().startswith("zero, ")
        assert cards.first.locator(".candidates button").all_inner_texts()[1].startswith("one")
        picture(page, f"{kind}-photos")

        # a grid is filtered, named at once and downloaded
        show, visible = page.get_by_label("Show", exact=True), page.locator("#pictures > li:not([hidden])")
        for value, which in (
            ("=zero", page.locator(".verdict", has_text="zero, ")),
            ("?unknown", page.locator(".unknown")),
        ):
            count = which.count()
            show.select_option(value)
            expect(visible).to_have_count(count)
        show.select_option("=zero")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download CSV").click()
        rows = [*csv.DictReader(Path(download.value.path()).read_text().splitlines())]
        assert rows[0]["file"] == "0 50.png" and rows[0]["class"] == "zero" and float(rows[0]["probability"]) > 0.5
        show.select_option("")
        expect(visible).to_have_count(8)

        # corrected by keyboard alone, by a candidate, taken back, all at once
        field = page.get_by_label("Another class for 2 0.png")
        field.focus()
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        page.get_by_text("1 photo of two: new class").wait_for()
        cards.nth(7).locator(".candidates button", has_text="one").click()
        page.get_by_text("1 photo of one: more of a known class").wait_for()
        cards.nth(7).get_by_role("button", name="Undo").click()
        cards.nth(0).locator(".candidates button", has_text="zero").click()
        page.get_by_role("button", name="Remove zero from the tray").click()
        page.get_by_role("button", name="Remove all photos").click()
        expect(cards).to_have_count(0)
        expect(page.get_by_role("button", name="Teach")).to_be_disabled()
        page.evaluate(DROP, photos_of(2, range(8)))
        page.get_by_text("8 photos", exact=True).wait_for()
        page.get_by_label("All 8 photos shown are").fill("two")
        page.get_by_role("button", name="Put all into the tray").click()
        page.get_by_text("8 photos of two: new class").wait_for()
        page.get_by_role("link", name="Teach (8)").click()
        picture(page, f"{kind}-tray")

        # taught: progress is shown, a second lesson is not possible meanwhile, the model goes on answering
        page.get_by_role("button", name="Teach 8 photos").click()
        page.get_by_role("progressbar", name="Progress of this phase").wait_for()
        assert page.get_by_role("button", name="Teach 8 photos").is_disabled()
        page.get_by_role("heading", name="Learnt: two").wait_for(timeout=120_000)
        assert page.evaluate("document.activeElement.id") == "result"
        assert "Accuracy on these classes: " in page.locator("#result").inner_text()
        expect(page.locator("#tray li")).to_have_count(0)

        # and named again, by themselves and when they are dropped anew
        page.locator(".verdict", has_text="two, ").first.wait_for()
        page.evaluate(DROP, photos_of(2, range(20, 24)))
        page.get_by_text("12 photos", exact=True).wait_for()
        expect(page.locator(".verdict", has_text="…")).to_have_count(0)
        assert page.locator(".verdict", has_text="two, ").count() >= 7
        row = page.locator("#tasks tr").first.locator("td").all_inner_texts()
        assert (row[0], row[2], row[3]) == ("two", "two", "8") and row[5].endswith("\u00a0%")
        picture(page, f"{kind}-taught")

        # the model as a program, with its card
        page.get_by_label("Format").select_option("torch")
        with page.expect_download(timeout=120_000) as download:
            page.get_by_role("button", name="Export the model").click()
        expect(page.locator("#exported")).to_have_text("Exported: one-torch.zip")
        with zipfile.ZipFile(download.value.path()) as packed:
            assert sorted(packed.namelist()) == ["one.pt2", "one.pt2.md"] and b"two" in packed.read("one.pt2.md")
        picture(page, f"{kind}-export")

        # a job that is cancelled, found again by a page that was loaded meanwhile
        page.evaluate(DROP, photos_of(3, range(8)))
        page.get_by_text("20 photos", exact=True).wait_for()
        page.get_by_label("Another class for 3 0.png").fill("three")
        page.get_by_label("Another class for 3 0.png").press("Enter")
        page.get_by_role("button", name="Teach 1 photo").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("heading", name="Cancelled").wait_for(timeout=120_000)
        assert page.get_by_text("1 photo of three: new class").is_visible()

        assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing is cut off at the side
        unnamed = "[...document.querySelectorAll('input, button, select')].filter((e) => !(e.labels?.length "
        unnamed += "|| e.ariaLabel || e.textContent.trim())).length"
        assert page.evaluate(unnamed) == 0
        small = "[...document.querySelectorAll('button, .button, select')].filter((e) => e.checkVisibility() "
        assert page.evaluate(small + "&& e.getBoundingClientRect().height < 44).length") == 0
        assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        assert wrong == []
        page.close()


def test_photos_are_named_by_the_first_answer_during_a_lesson(one, forks, browser):
    """And by the model before, once the lesson is cancelled: the first answer goes with it."""
    from playwright.sync_api import expect

    config = one / "config.yaml"
    config.write_text(config.read_text().replace("  epochs: 4\n", "  epochs: 4000\n"))
    with served(one) as client:
        page, wrong = opened(browser, client, 1280, 900)
        page.evaluate(DROP, photos_of(2, range(8)))
        page.get_by_text("8 photos", exact=True).wait_for()
        expect(page.locator(".verdict", has_text="…")).to_have_count(0)
        named = page.locator(".verdict", has_text="two, ")
        assert named.count() == 0
        page.get_by_label("All 8 photos shown are").fill("two")
        page.get_by_role("button", name="Put all into the tray").click()
        page.evaluate(DROP, photos_of(3, range(4)))  # a single class would not be trained
        for i in range(4):
            page.get_by_label(f"Another class for 3 {i}.png").fill("three")
            page.get_by_label(f"Another class for 3 {i}.png").press("Enter")
        page.get_by_role("button", name="Teach 12 photos").click()
        named.first.wait_for(timeout=120_000)
        page.get_by_text("4 classes in 2 tasks").wait_for()
        expect(page.locator("#detail")).to_contain_text("until then photos are named by a first answer")
        assert client.get("/v1/model").json()["job"], "the lesson goes on"
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("heading", name="Cancelled").wait_for(timeout=120_000)
        page.get_by_text("2 classes in 1 task").wait_for()
        expect(named).to_have_count(0)
        assert page.get_by_text("8 photos of two: new class").is_visible()
        assert wrong == []
        page.close()


def test_names_are_text_and_a_strange_page_gets_nothing(one, forks, browser):
    """A class or file whose name is HTML is shown as it is; a page of another site can neither read nor teach."""
    evil = "<img src=x onerror=alert(1)>"
    with served(one) as client, served(one) as other:
        page = browser.new_page()
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        page.goto(str(client.base_url))
        (photo,) = photos_of(0, [50])
        page.evaluate(DROP, [[f"{evil}.png", *photo[1:]], [f"x{evil}.png", "eA==", "image/png"]])
        page.locator(".verdict.error", has_text="not an image").wait_for()
        page.get_by_label(f"Another class for {evil}.png").fill(evil)
        page.get_by_label(f"Another class for {evil}.png").press("Enter")
        page.get_by_text(f"1 photo of {evil}: new class").wait_for()
        assert page.locator("img[src=x]").count() == 0
        result = page.evaluate(
            """async (there) => {
              const tell = (promise) => promise.then((answer) => answer.type, () => "refused");
              const post = { method: "POST", body: "x" };
              return [await tell(fetch(`${there}v1/model`)), await tell(fetch(`${there}v1/predict`, post))];
            }""",
            str(other.base_url) + "/",
        )
        assert result == ["refused", "refused"]
        page.close()


@pytest.mark.parametrize(("kind", "width", "height"), [("desk", 1280, 900), ("phone", 390, 844)])
def test_unknown_photos_are_grouped_taught_and_the_lesson_is_undone(one, forks, browser, tmp_path, kind, width, height):
    from playwright.sync_api import expect

    with served(one, unknown_rate=0.5) as client:
        page, wrong = opened(browser, client, width, height)
        for button in ("Undo the last lesson", "Forget this task"):
            expect(page.get_by_role("button", name=button)).to_be_disabled()
        page.evaluate(DROP, [*photos_of(4, range(16)), *photos_of(6, range(16))])
        page.get_by_text("32 photos", exact=True).wait_for()
        unknown = page.locator(".verdict.unknown").count()
        assert unknown >= 20

        # the unknown photos are grouped; every one is in a group, or in none
        page.get_by_role("button", name=f"Group {unknown} unknown photos").click()
        groups, state = page.locator("#groups > li"), page.locator("#groups-state")
        expect(state).to_contain_text(f"in {unknown} photos")
        sizes = groups.locator("h3").all_inner_texts()
        assert sum(int(title.split(": ")[1].split()[0]) for title in sizes) == unknown, sizes
        assert sizes[0].startswith("Group 1: ")
        assert "nearest known class is " in groups.first.locator(".note").inner_text()
        assert groups.first.locator(".sheet span", has_text="typical: ").count() >= 2
        groups.first.scroll_into_view_if_needed()
        picture(page, f"{kind}-groups")

        # marked photos leave a group, one of them marked by keyboard, and are merged with it again
        first = int(sizes[0].split(": ")[1].split()[0])
        boxes = groups.first.locator(".sheet input")
        expect(groups.first.locator(".split")).to_be_disabled()
        boxes.nth(0).focus()
        page.keyboard.press("Space")
        boxes.nth(1).check()
        groups.first.get_by_role("button", name="Move 2 marked photos to a new group").click()
        expect(state).to_have_text("2 photos moved to New group 1")
        assert page.evaluate("document.activeElement.id") == "groups-state"
        assert groups.locator("h3").all_inner_texts()[:2] == [f"Group 1: {first - 2} photos", "New group 1: 2 photos"]
        page.get_by_label("Merge New group 1 with").select_option("Group 1")
        expect(state).to_have_text("New group 1 merged with Group 1")
        assert groups.first.locator("h3").inner_text() == sizes[0]
        if groups.first.locator(".more").is_visible():
            groups.first.locator(".more").click()
        expect(groups.first.locator(".sheet img")).to_have_count(first)

        # all but one are dismissed; naming that one puts its photos into the tray
        for title in sizes[1:]:
            page.get_by_role("button", name=f"Dismiss {title.split(':')[0]}").click()
        expect(groups).to_have_count(1)
        page.get_by_label("Name of Group 1").fill("new")
        page.get_by_label("Name of Group 1").press("Enter")
        expect(groups).to_have_count(0)
        page.get_by_text(f"{first} photos of new: new class").wait_for()

        page.get_by_label("In seconds, without training (less accurate)").check()
        page.get_by_role("button", name=f"Teach {first} photos").click()
        page.get_by_role("heading", name="Learnt: new").wait_for(timeout=120_000)
        page.get_by_text("3 classes in 2 tasks").wait_for()
        page.locator(".verdict", has_text="new, ").first.wait_for()

        # renamed; what would be forgotten is said first, and left
        dialog = page.get_by_role("dialog")
        page.get_by_label("Class", exact=True).select_option("new")
        page.get_by_label("New name").fill("four")
        page.get_by_label("New name").press("Enter")
        expect(dialog).to_contain_text("Class new is now called four.")
        dialog.get_by_role("button", name="Change the model").click()
        expect(page.locator("#changed")).to_have_text("class new is now called four")
        assert page.locator("#tasks tr").first.locator("td").all_inner_texts()[2] == "four"
        page.get_by_label("Class", exact=True).select_option("four")
        page.get_by_role("button", name="Forget this class").click()
        expect(dialog).to_contain_text("the weights and the covariance computed with its images stay")
        picture(page, f"{kind}-forget")
        assert (
            page.locator(".panel").bounding_box()["y"] + page.locator(".panel").bounding_box()["height"]
            <= (page.locator("#history").bounding_box()["y"])
        )
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        page.get_by_role("button", name="Forget this task").click()
        expect(page.locator("#changed.error")).to_contain_text("only if the features of all images are stored")

        # the lesson is undone: the photos are named by the model before
        page.get_by_role("button", name="Undo the last lesson").click()
        expect(dialog).to_contain_text("1 task with 2 classes left")
        picture(page, f"{kind}-undo")
        dialog.get_by_role("button", name="Change the model").click()
        page.get_by_text("2 classes in 1 task").wait_for()
        expect(page.locator(".verdict", has_text="four")).to_have_count(0)
        expect(page.locator(".verdict.unknown")).to_have_count(unknown)
        assert page.locator("#tasks tr").count() == 1

        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = "[...document.querySelectorAll('button, .button, select')].filter((e) => e.checkVisibility() "
        assert page.evaluate(small + "&& e.getBoundingClientRect().height < 44).length") == 0
        assert [line for line in wrong if "409" not in line] == []  # the refused task is an answer with that status
        page.close()
