"""A model that watches a folder: order of arrival, unfinished files, kills, and images without a class."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_stream_model import photos, same_bits, save, stream

import pearl.online.stream_model
from pearl.errors import ConfigError, RunError
from pearl.online import arriving
from pearl.online.stream_model import Intake, StreamModel
from pearl.storage.run_directory import RunDirectory

Step = Callable[[], object]


class Ends(BaseException):
    """The end of a watch, as by a kill."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Steps to run between two polls of the folder, one each; the watch ends after the last. Nothing really sleeps."""
    steps: list[Step] = []

    def sleep(seconds: float) -> None:
        if not steps:
            raise Ends
        steps.pop(0)()

    monkeypatch.setattr(arriving, "sleep", sleep)
    return steps


def nothing() -> None:
    """No file comes."""


def add(folder: Path, rows: Sequence[int], *, seconds: int = 1000, name: str = "", noise: bool = False) -> Step:
    """Return a step that saves some of the photos, each in the folder of its class or in another one."""
    images, names = photos()
    images = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8) if noise else images
    return lambda: [save(folder / (name or names[i]) / f"{i}.png", images[i], seconds=seconds + i) for i in rows]


def watched(model: StreamModel, folder: Path) -> list[Intake]:
    actual: list[Intake] = []
    with pytest.raises(Ends):
        for taken in model.watch(folder):
            actual.append(taken)  # noqa: PERF402 - what came before the end stays
    return actual


def journal(model: StreamModel) -> list[str]:
    lines = RunDirectory(model.path).arrivals_file.read_text().splitlines()
    return [Path(json.loads(line)["file"]).stem for line in lines]


def test_files_are_learnt_in_the_order_of_their_arrival(tmp_path: Path, script: list[Step]) -> None:
    """Within a look by time stamps; a late file with an older time stamp comes after those that are learnt."""
    folder = tmp_path / "photos"
    folder.mkdir()
    script += [add(folder, [5, 2, 9]), nothing, add(folder, [7, 1]), nothing, nothing]
    model = stream(tmp_path / "shop", learner="ncm")
    assert watched(model, folder) == [Intake(learnt=3), Intake(learnt=2)]
    assert journal(model) == ["2", "5", "9", "1", "7"] and model.classes == ["red", "green"]


def test_a_file_that_is_still_written_waits(tmp_path: Path, script: list[Step]) -> None:
    folder, file = tmp_path / "photos", tmp_path / "photos" / "red" / "0.png"
    add(folder, [0])()
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    os.utime(file, (1000, 1000))
    model = stream(tmp_path / "shop", learner="ncm")

    def grows() -> None:
        file.write_bytes(whole[:60])
        os.utime(file, (1000, 1000))  # of one time stamp to the second: the size shows it

    def ends() -> None:
        assert model.seen == 0
        file.write_bytes(whole)

    script += [grows, ends, lambda: model.seen == 0 or pytest.fail("one look is not enough"), nothing]
    assert watched(model, folder) == [Intake(learnt=1)]


def test_bad_files_are_reported_once_and_again_when_they_change(tmp_path: Path, script: list[Step]) -> None:
    folder, bad = tmp_path / "photos", tmp_path / "photos" / "red" / "bad.png"
    add(folder, [0, 1])()
    bad.write_bytes(b"no image")
    script += [nothing, nothing, lambda: bad.write_bytes(b"no image either"), nothing, nothing]
    model = stream(tmp_path / "shop", learner="ncm")
    first, second = watched(model, folder)
    assert (first.learnt, second.learnt, model.seen) == (2, 0, 2)
    assert len(first.problems) == len(second.problems) == 1 and str(bad) in first.problems[0]
    again = StreamModel(model.path, model.config, device="cpu")
    script += [nothing, nothing, lambda: save(bad, photos()[0][0], seconds=5), nothing, nothing]
    assert watched(again, folder) == [Intake(learnt=1)]  # nothing is said of what has not changed


def arrivals(folder: Path) -> list[Step]:
    """Return steps with photos that no space separates, so that the model grows."""
    first, late = add(folder, range(0, 9), noise=True), add(folder, range(12, 21), seconds=5, noise=True)
    return [first, nothing, add(folder, range(9, 12), noise=True), nothing, late]


GROWS = {"name": "pearl", "window": 8, "confused": 0.0, "sub_networks": 1, "projection": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StreamModel:
    """A model that watched all arrivals, in batches of 4, and trained a sub-network in the second one."""
    folder = tmp_path_factory.mktemp("photos")
    model = stream(folder.parent / "whole", learner=GROWS)
    steps = [*arrivals(folder), nothing, nothing]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pearl.online.stream_model, "BATCH", 4)
        patch.setattr(arriving, "sleep", lambda _: steps.pop(0)() if steps else end())
        assert [one.learnt for one in watched(model, folder)] == [4, 4, 1, 3, 4, 4, 1]
    assert model.learner.facts()["grown_at"] == [8]
    return model


def end() -> None:
    raise Ends


@pytest.mark.parametrize(("at", "kill"), [("observe", 0), ("observe", 1), ("store", 1), ("observe", 2), ("store", 5)])
def test_a_kill_at_any_image_leads_to_the_same_bits(
    tmp_path: Path, script: list[Step], monkeypatch: pytest.MonkeyPatch, whole: StreamModel, at: str, kill: int
) -> None:
    """Also if other files arrive before it watches again, and in the batch in which a sub-network is trained."""
    monkeypatch.setattr(pearl.online.stream_model, "BATCH", 4)
    folder = tmp_path / "photos"
    folder.mkdir()
    script += [*arrivals(folder), nothing, nothing]
    model = stream(tmp_path / "shop", learner=GROWS)
    left = [kill]

    def until_killed(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Ends
        real(*args)

    target: Any = model.learner if at == "observe" else pearl.online.stream_model
    real = getattr(target, at)
    with monkeypatch.context() as patch:
        patch.setattr(target, at, until_killed)
        watched(model, folder)
    assert left == [-1] and model.seen == sum([4, 4, 1, 3, 4, 4, 1][:kill])  # it is as it is stored
    script.pop(0)()  # while it does not watch
    again = StreamModel(model.path, model.config, device="cpu")
    watched(again, folder)
    assert journal(again) == journal(whole)
    same_bits(whole, again)


def test_files_that_go_before_they_are_learnt_may_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken up, then the process was killed, and their class was corrected."""
    folder = tmp_path / "photos"
    add(folder, range(8))()
    model = stream(tmp_path / "shop", learner="ncm")
    with monkeypatch.context() as patch:
        patch.setattr(pearl.online.stream_model, "store", lambda *_: (_ for _ in ()).throw(Ends))
        with pytest.raises(Ends):
            model.observe_files(folder)
    assert model.seen == 0 and len(journal(model)) == 8  # it is as it is stored
    (folder / "red" / "0.png").rename(folder / "green" / "0.png")
    assert model.observe_files(folder) == Intake(learnt=8) and len(journal(model)) == 8
    assert model.classes == ["green", "red"] and model.learner.counts.tolist() == [5, 3]  # type: ignore[operator,union-attr]
    RunDirectory(model.path).arrivals_file.write_text("")
    with pytest.raises(RunError, match="has 0 lines, but 8 files were taken up"):
        model.observe_files(folder)


def test_another_process_may_learn_between_two_calls(tmp_path: Path) -> None:
    images, names = photos()
    first = stream(tmp_path / "shop", learner="ncm")
    first.observe(images[:4], names[:4])
    other = StreamModel(first.path, first.config, device="cpu")
    other.observe(images[4:10], names[4:10])
    first.observe(images[10:], names[10:])
    assert first.seen == 30 and int(first.learner.counts.sum()) == 30  # type: ignore[operator]


def test_signals_end_a_watch(cli: Any, tmp_path: Path, script: list[Step]) -> None:
    folder, shop = tmp_path / "photos", tmp_path / "shop"
    folder.mkdir()
    settings = ["--backbone", "resnet18", "images.size=16", "images.resize=null", "backbone.width=4", "--device", "cpu"]
    watch = ["learn", shop, "--stream", "--watch", folder, "--every", "0.5", *settings]
    script += [add(folder, range(6)), nothing, lambda: os.kill(os.getpid(), signal.SIGTERM)]
    out, err = cli(*watch, code=130)
    assert out == f"learnt 6 images; 2 classes from 6 images in all; stored in {shop}\n"
    assert err == "pearl: interrupted after 6 images; its state is stored; resume with: the same command\n"
    script += [add(folder, range(6, 9)), nothing, lambda: os.kill(os.getpid(), signal.SIGINT)]
    out, _ = cli(*watch, "-q", code=130)  # the same settings again are no change
    assert out == ""
    out, _ = cli("inspect", shop)
    assert "9 images of a stream, 2 classes (red, green)" in out
    _, err = cli(*watch[:-4], "backbone.width=8", code=2)
    assert "fixed since it was created" in err


def test_the_source_is_checked_before_the_network_is_built(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pearl.online.stream_model, "open_stream", lambda *args, **options: pytest.fail("was built"))
    (tmp_path / "photos").mkdir()
    for source, complaint in (
        (["--watch", tmp_path / "none"], "none is not a folder"),
        (["--watch", tmp_path / "photos", "--every", "0"], "every=0.0"),
        (["--data", tmp_path / "none"], "none is not a folder"),
        (["--data", tmp_path / "none.csv"], "none.csv is not a folder"),
    ):
        out, err = cli("learn", tmp_path / "model", "--stream", *source, code=2)
        assert complaint in err and not out and err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_errors_of_users(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    watch = ["--watch", tmp_path / "photos"]
    for options, complaint in (
        (["--stream", "--watch", tmp_path / "none"], "none is not a folder: give one that holds a folder of images"),
        (["--stream", *watch, "--every", "0"], "every=0.0: give seconds, more than 0"),
        (["--stream", *watch, "--data", tmp_path], "--stream: give either --data or --watch"),
        (["--stream"], "--stream: give either --data or --watch"),
        (watch, "--watch: learns from a stream; add --stream"),
        ([], "learn: missing option '--data'; see: pearl learn --help"),
        (["--stream", "--data", tmp_path / "photos"], "photos has no class folders"),
    ):
        _, err = cli("learn", tmp_path / "shop", *options, "--backbone", "resnet18", code=2)
        assert complaint in err and err.count("\n") == 1, err
    assert not (tmp_path / "shop").exists()


# Images without a class


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, and images of another colour and of a known one in the folder itself and in `unlabelled`."""
    location = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for i, (colour, where) in enumerate(
        [((200, 30, 30), "red"), ((30, 200, 30), "green")] * 20
        + [((230, 230, 230), "unlabelled")] * 4
        + [((230, 230, 230), ""), ((200, 30, 30), "unlabelled")]
    ):
        pixels = np.clip(np.array(colour) + rng.normal(0, 25, (16, 16, 3)), 0, 255).astype(np.uint8)
        save(location / where / f"{i}.png", pixels, seconds=1000 + i)
    return location


SETTINGS = [
    "--backbone",
    "resnet18",
    "images.size=16",
    "images.resize=null",
    "backbone.width=4",
    "--device",
    "cpu",
    "-q",
]


def test_unlabelled_images_are_scored_and_grouped(cli: Any, tmp_path: Path, folder: Path) -> None:
    shop, new = tmp_path / "shop", tmp_path / "new.csv"
    out, _ = cli("learn", shop, "--stream", "--data", folder, *SETTINGS)
    learnt, scored = out.splitlines()
    assert learnt.startswith("learnt 40 images; 2 classes from 40 images in all")
    assert scored == f"scored 6 unlabelled images; 5 look unknown; group them with: pearl discover {shop}"
    out, _ = cli("inspect", shop)
    assert "6 unlabelled images; 5 of them looked unknown when they came: pearl discover groups them" in out
    out, _ = cli("discover", shop, "--csv", new, "-o", tmp_path / "new.html", "--device", "cpu")
    assert out.splitlines()[1].split()[:3] == ["group", "1", "5"]
    assert f"pearl learn {shop} --data {new} --stream" in (tmp_path / "new.html").read_text()
    new.write_text(new.read_text().replace("group 1", "white"))
    out, _ = cli("learn", shop, "--stream", "--data", new, "--device", "cpu", "-q")
    assert out.startswith("learnt 5 images; 3 classes from 45 images in all")
    for options, complaint in (([], "no unlabelled image looked unknown"), ([folder, "--tasks", "1"], "without tasks")):
        _, err = cli("discover", shop, *options, code=2)
        assert complaint in err and err.count("\n") == 1


def test_the_folder_without_a_class_has_a_name_of_ones_own(tmp_path: Path, folder: Path) -> None:
    learner = {"name": "pearl", "projection": 8}
    (folder / "unlabelled").rename(folder / "inbox")
    model = stream(tmp_path / "shop", learner=learner)
    assert model.observe_files(folder, unlabelled="inbox") == Intake(learnt=40, scored=6, unknown=5)
    assert len(model.unknown_files()) == 5
    (folder / "44.png").unlink()
    assert len(model.unknown_files()) == 4
    assert model.observe_files(folder, unlabelled="inbox").scored == 0  # nothing is scored twice
    (folder / "inbox" / "40.png").write_bytes(b"no image at all")
    (actual,) = model._score([one for one in arriving.scan(folder, "inbox") if not one.name])
    assert actual.scored == 0 and len(actual.problems) == 1  # only what has changed is scored again
    other = stream(tmp_path / "other", learner="slda")
    assert other.observe_files(folder, unlabelled="inbox") == Intake(learnt=40)
    with pytest.raises(ConfigError, match="the learner slda cannot detect unknown images; pearl can"):
        other.threshold(0.05)


def test_scores_follow_what_is_learnt(tmp_path: Path) -> None:
    images, names = photos()
    model = stream(tmp_path / "shop", learner={"name": "pearl", "projection": 8})
    model.observe(images[:20], names[:20])
    before = model.describe(images)[1]
    model.observe(images[20:], names[20:])
    actual, again = model.describe(images), StreamModel(model.path, model.config, device="cpu").describe(images)
    assert all(np.array_equal(one, other) for one, other in zip(actual, again, strict=True))
    assert not np.array_equal(before, actual[1])
