"""A phase that another run has trained is not trained again, and nothing but time says so."""

import json
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pearl.data.augment import View
from pearl.errors import Interrupted, RunError
from pearl.lifecycle.runs import execute
from pearl.methods.adapters.seqlora import SeqLora
from pearl.methods.base import Phase, own_loss
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.pearl import Pearl
from pearl.methods.prototypes.fecam import FeCam
from pearl.methods.prototypes.ncm import NearestMean
from pearl.nn.rank_rules import EnergyRule
from pearl.settings.config import load_config
from pearl.storage import phases
from pearl.storage.checkpoint import write_part
from pearl.storage.files import read_json
from pearl.testing import conformance
from pearl.testing.conformance import Cut
from pearl.testing.tiny import SIZE, config, make_task, small_resnet
from pearl.training import engine as engines
from pearl.training import fingerprint, phase_cache
from pearl.training.engine import Engine
from pearl.training.phase_cache import PhaseCache
from pearl.training.resume import Progress, Resume
from pearl.training.world import World
from recorded import Record

pytestmark = pytest.mark.slow

SHORT = config(train={"epochs": 1, "batch_size": 8, "phases": {"isolation": {"epochs": 2}}})


def taught(make, root=None, tasks=2, settings=None, resume=None):
    """A method after some tasks, what was reused in each, and what was told meanwhile."""
    told, method = Record(), make()
    engine = Engine(settings or SHORT, device="cpu", observer=told, phase_cache=root and PhaseCache(root))
    reused, seconds = [], []
    for t in range(tasks):
        seconds.append(engine.learn(method, make_task(t), resume and resume(t)))
        reused.append(engine.reused)
    return method, reused, told, seconds


def pearl(**options):
    return lambda: Pearl(small_resnet(), **options)


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------- the same, bit for bit


def test_a_phase_is_trained_once(tmp_path):
    """The reference and the probe of one rank rule are those of another; what differs is trained."""
    _, none, first, took = taught(pearl(), tmp_path)
    again, reused, told, seconds = taught(pearl(rank=EnergyRule()), tmp_path)
    assert (none, reused) == ([[], []], [["reference"], ["probe"]])
    assert equal(again, taught(pearl(rank=EnergyRule()))[0])
    assert seconds[0]["reference"] == pytest.approx(took[0]["reference"], abs=1e-3)
    assert seconds[1]["probe"] == pytest.approx(took[1]["probe"], abs=1e-3)
    own = [facts for facts in first.of("epoch") if facts["phase"] != "adapt"]
    assert [facts for facts in told.of("epoch") if facts["phase"] != "adapt"] == own, "pages show its losses"
    assert told.steps == first.steps - 3 * 2 + 2, "a bar is filled at once"


def test_what_was_learnt_before_and_is_not_read_does_not_matter(tmp_path):
    """The third task's probe depends on no adapter of the second task and no statistics."""
    taught(pearl(), tmp_path, tasks=3)
    (_, reused, _, _) = taught(pearl(init="svd", fold="view", classifier=Statistics(spaces=3)), tmp_path, tasks=3)
    assert reused == [["reference"], ["probe"], ["probe"]]


def test_isolation_with_another_classifier_trains_nothing(tmp_path):
    taught(lambda: Isolation(small_resnet()), tmp_path)
    again, reused, told, _ = taught(lambda: Isolation(small_resnet(), classifier=Statistics(train="all")), tmp_path)
    assert reused == [["isolation"]] * 2 and told.steps == 2
    assert equal(again, taught(lambda: Isolation(small_resnet(), classifier=Statistics(train="all")))[0])


def test_methods_share_what_they_train_alike(tmp_path):
    for make, reused in ((NearestMean, []), (FeCam, ["extractor"]), (Pearl, []), (SeqLora, ["reference"])):
        assert taught(lambda make=make: make(small_resnet()), tmp_path, tasks=1)[1] == [reused]


def test_what_comes_after_draws_the_same_numbers(tmp_path):
    def drawn():
        method, draws = Isolation(small_resnet()), []
        engine = Engine(SHORT, device="cpu", phase_cache=PhaseCache(tmp_path))
        method.learn_own = lambda task, own=method.learn_own: (yield from _then(own(task), draws))
        engine.learn(method, make_task(0))
        return draws

    def _then(phases_of, draws):
        yield from phases_of
        draws.append(torch.rand(3).tolist())

    assert drawn() == drawn()


# --------------------------------------------------------------------------------------------- whatever matters


class Asked(Exception):
    pass


class Ask(PhaseCache):
    """Says the key that is looked for."""

    def claimed(self, key, *_):
        raise Asked(key)


class One(Finetune):
    """A phase that says what it reads, changed as a test likes."""

    def __init__(self, network=None, head=None, **changes):
        super().__init__(network or small_resnet())
        self.head, self.changes = head or self.heads.block(2), changes

    def learn(self, task):
        loss = self.changes.pop("loss", own_loss)(self.backbone, self.head, task)
        params = [*self.backbone.parameters(), *self.head.parameters()]
        phase = Phase(self.changes.pop("name", "finetune"), params, loss, depends_on=(self.backbone, self.head))
        for key, value in self.changes.items():
            setattr(phase, key, value)
        yield phase


def key_of(method=None, task=None, at=0, world=None, **settings):
    """What decides a phase; empty if it is not kept."""
    torch.manual_seed(3)
    method, task = method or One(), task or make_task(0)
    made = Engine(config(**settings), device="cpu", phase_cache=Ask(None))
    made.world = world or made.world
    if at:  # after a phase of another kind
        method.learn = lambda task, own=method.learn: (yield from (Phase("finetune", *_other(method)), *own(task)))
    try:
        made.learn(method, task)
    except Asked as asked:
        return str(asked)
    return ""


def _other(method):
    unused = nn.Parameter(torch.zeros(1))
    return [unused], lambda batch: (unused**2).sum()


def changed(change, method=None):
    """A method of which one thing was changed."""
    torch.manual_seed(3)
    method = method or One()
    with torch.no_grad():
        change(method)
    return method


def task_with(**changes):
    task = make_task(0)
    for key, value in changes.items():
        setattr(task, key, value)
    return task


def bit(tensor):
    """Turn over the last bit of one number."""
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


class Two(World):
    def __init__(self):
        super().__init__()
        self.size = 2

    same = staticmethod(lambda value: value)
    gather = staticmethod(lambda value: [value, value])


def scaled(features, head, task, by=1.0):
    """A loss that holds a number."""

    def loss(batch):
        return by * own_loss(features, head, task)(batch)

    loss.__module__ = "pearl.methods.base"
    return loss


def one_of(which):
    """A loss that its code alone, or a constant in it, tells from the others."""

    def loss(features, head, task):
        all_of_them = [lambda batch: features(batch.x).mean(), lambda batch: features(batch.x).sum()]
        all_of_them += [lambda batch: features(batch.x).mean((0, 1)), lambda batch: features(batch.x).mean((1, 0))]
        all_of_them += [lambda batch: min(batch.x, key=lambda x: 1), lambda batch: min(batch.x, key=lambda x: 2)]
        for each in all_of_them:
            each.__module__ = "pearl.methods.base"
        return all_of_them[which]

    return loss


def tie(method):
    method.backbone.layer1[0].conv2.weight = method.backbone.layer1[0].conv1.weight


class Frozen(One):
    def train(self, mode=True):
        super().train(mode)
        self.backbone.bn1.eval()
        return self


INGREDIENTS = {
    "a weight": lambda: key_of(changed(lambda m: bit(m.backbone.conv1.weight))),
    "a weight's sign of zero": lambda: key_of(changed(lambda m: m.backbone.bn1.bias.neg_())),
    "a norm statistic": lambda: key_of(changed(lambda m: bit(m.backbone.bn1.running_mean))),
    "how many batches a norm has seen": lambda: key_of(changed(lambda m: m.backbone.bn1.num_batches_tracked.add_(1))),
    "the head": lambda: key_of(changed(lambda m: bit(m.head.bias))),
    "a type": lambda: key_of(changed(lambda m: m.double())),
    "an image": lambda: key_of(task=task_with(_images=make_task(0).images.index_fill(0, torch.tensor([3]), 0))),
    "a label": lambda: key_of(task=task_with(_labels=1 - make_task(0).labels)),
    "the order of images": lambda: key_of(
        task=task_with(_images=make_task(0).images.flip(0), _labels=make_task(0).labels.flip(0))
    ),
    "where its logits begin": lambda: key_of(task=task_with(first_class=-1)),
    "the view": lambda: key_of(task=task_with(view=View(config(images={"size": SIZE}).images, channels_last=False))),
    "the layout of images": lambda: key_of(task=task_with(view=View(config().images))),
    "epochs": lambda: key_of(train={"epochs": 3, "batch_size": 8}),
    "batches": lambda: key_of(train={"epochs": 2, "batch_size": 12}),
    "a rate": lambda: key_of(train={"epochs": 2, "batch_size": 8, "lr": 1.001e-3}),
    "a phase's own setting": lambda: key_of(
        train={"epochs": 2, "batch_size": 8, "phases": {"finetune": {"weight_decay": 0.1}}}
    ),
    "most steps": lambda: key_of(engine={"precision": "fp32", "channels_last": False, "max_steps": 2}),
    "channels last": lambda: key_of(engine={"precision": "fp32", "channels_last": True}),
    "the seed": lambda: key_of(seed=1),
    "the task": lambda: key_of(task=task_with(id=1)),
    "the place in the task": lambda: key_of(at=1),
    "the phase": lambda: key_of(One(name="another")),
    "what trains": lambda: key_of(One(groups={"": [*small_resnet().parameters()][:0]})),
    "groups": lambda: key_of(changed(lambda m: m.changes.update(groups={"body": [], "": [*m.head.parameters()]}))),
    "steadiness": lambda: key_of(One(capturable=True)),
    "a value in the structure": lambda: key_of(changed(lambda m: setattr(m.backbone.bn1, "eps", 1e-4))),
    "another module": lambda: key_of(changed(lambda m: setattr(m.backbone, "maxpool", nn.Dropout()))),
    "a share": lambda: key_of(changed(lambda m: setattr(m.backbone, "maxpool", nn.Dropout(0.1)))),
    "a frozen norm": lambda: key_of(Frozen()),
    "tied weights": lambda: key_of(changed(tie)),
    "a number in the loss": lambda: key_of(One(loss=scaled)),
    "another number in it": lambda: key_of(One(loss=partial(scaled, by=2.0))),
    "shared memory": lambda: key_of(
        changed(lambda m: setattr(m.backbone.bn1.bias, "data", m.backbone.bn1.running_mean))
    ),
    "a lambda": lambda: key_of(One(loss=one_of(0))),
    "another lambda on its line": lambda: key_of(One(loss=one_of(1))),
    "a constant in it": lambda: key_of(One(loss=one_of(2))),
    "another constant": lambda: key_of(One(loss=one_of(3))),
    "a lambda in it": lambda: key_of(One(loss=one_of(4))),
    "another lambda in it": lambda: key_of(One(loss=one_of(5))),
    "processes": lambda: key_of(world=Two()),
}


def test_each_ingredient_is_another_phase():
    usual = key_of()
    actual = {name: key() for name, key in INGREDIENTS.items()}
    assert [name for name, key in actual.items() if key == usual] == []
    assert len({*actual.values()}) == len(actual) and "" not in actual.values()
    assert key_of() == usual, "the same is the same"


MACHINES = {
    "threads": ("torch.get_num_threads", lambda: 77),
    "CPU features": ("torch.backends.cpu.get_cpu_capability", lambda: "AVX1"),
    "capabilities": ("pearl.training.machine._capabilities", lambda: {"amx_bf16": "?"}),
    "the CPU": ("pearl.training.machine._cpu_name", lambda: "Pentium"),
    "torch": ("torch.__config__.show", lambda: "another build"),
    "a version": ("pearl.training.machine.versions", lambda: {"pearl": "0"}),
    "pearl's code": ("pearl.training.fingerprint.code", lambda: "edited"),
    "a flag": ("torch.are_deterministic_algorithms_enabled", lambda: True),
    "the format": ("pearl.training.fingerprint.FORMAT", 99),
}


@pytest.mark.parametrize("what", MACHINES)
def test_each_machine_trains_for_itself(what, monkeypatch):
    usual = key_of()
    monkeypatch.setattr(*MACHINES[what])
    assert key_of() not in ("", usual)


def test_precision_and_switches_of_libraries_count(monkeypatch):
    usual = key_of()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert key_of() not in ("", usual)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(engines, "computes_bf16", lambda device: True)
    assert key_of(engine={"precision": "bf16", "channels_last": False}) not in ("", usual)


@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_how_exact_products_are_counts_however_it_is_set(name):
    """By PyTorch's newer switches too, after which it refuses to say what the older ones are."""
    library = getattr(torch.backends.mkldnn, name, None)
    if not hasattr(library, "fp32_precision"):
        pytest.skip("a PyTorch without it")
    usual, before = key_of(), library.fp32_precision
    try:
        library.fp32_precision = "bf16"
        assert key_of() not in ("", usual)
    finally:
        library.fp32_precision = before
    assert key_of() == usual


def test_the_code_is_that_of_all_rooms_that_train(tmp_path, monkeypatch):
    def code():
        fingerprint._digest_of.cache_clear()
        return fingerprint.code()

    before = code()
    home = shutil.copytree(fingerprint.HOME, tmp_path / "pearl")
    monkeypatch.setattr(fingerprint, "HOME", home)
    monkeypatch.setattr(fingerprint, "LOADED", float("inf"))
    assert before == code()
    for file in ("cli/run.py", "methods/base.py", "nn/resnet.py", "training/engine.py", "data/augment.py"):
        (home / file).write_text((home / file).read_text() + "\n")
        assert (code() == before) == (file == "cli/run.py")
        before = code()


def test_code_that_was_changed_since_it_was_loaded_vouches_for_nothing(tmp_path, monkeypatch):
    home = shutil.copytree(fingerprint.HOME, tmp_path / "pearl")  # with the times that they had; moved here just now
    monkeypatch.setattr(fingerprint, "HOME", home)
    assert key_of() == ""


def test_an_engine_of_another_kind_trains_for_itself():
    class Other(Engine):
        pass

    assert Other(config(train={"epochs": 1}), device="cpu", phase_cache=Ask(None)).learn(One(), make_task(0))


# ------------------------------------------------------------------------------------- what nobody can vouch for


class Own(nn.Parameter):
    pass


class Rate(float):
    pass


def patched(method):
    usual = method.backbone.forward
    return lambda x: 2 * usual(x)


def lambda_loss(features, head, task):
    return lambda batch: own_loss(features, head, task)(batch)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(lambda: One(after_step=lambda batch: None), id="hook"),
        pytest.param(lambda: One(after_backward=lambda: None), id="hook on gradients"),
        pytest.param(lambda: One(project=lambda before: None), id="projection"),
        pytest.param(lambda: One(keep_optimizer=True), id="optimizer handed on"),
        pytest.param(lambda: One(depends_on=()), id="does not say"),
        pytest.param(lambda: One(loss=lambda_loss), id="code of a user's"),
        pytest.param(lambda: One(loss=lambda f, head, task: own_loss(small_resnet(), head, task)), id="module unsaid"),
        pytest.param(lambda: changed(lambda m: m.changes.update(depends_on=(m.backbone,))), id="head unsaid"),
        pytest.param(
            lambda: changed(lambda m: m.backbone.bn1.register_forward_hook(lambda *x: None)), id="hook of a module"
        ),
        pytest.param(
            lambda: changed(lambda m: m.backbone.conv1.weight.register_hook(lambda grad: grad)), id="hook of a weight"
        ),
        pytest.param(
            lambda: changed(lambda m: m.head.bias.register_post_accumulate_grad_hook(lambda p: None)),
            id="hook of a weight with its gradient",
        ),
        pytest.param(
            lambda: changed(lambda m: setattr(m.head, "bias", Own(m.head.bias))), id="weight of a user's kind"
        ),
        pytest.param(lambda: changed(lambda m: setattr(m.backbone, "rate", Rate(1))), id="number of a user's kind"),
        pytest.param(lambda: changed(lambda m: setattr(m.backbone, "names", np.array(["a"]))), id="array of texts"),
        pytest.param(lambda: changed(lambda m: setattr(m.backbone, "odd", object())), id="odd value"),
        pytest.param(lambda: changed(lambda m: setattr(m.backbone, "forward", patched(m))), id="patched"),
    ],
)
def test_a_phase_of_which_not_all_is_known_is_not_kept(method):
    assert key_of(method()) == ""


def test_a_phase_after_one_that_hands_its_optimizer_on_is_not_kept():
    class Twice(One):
        def learn(self, task):
            (first,) = super().learn(task)
            first.reads, first.keep_optimizer = (), True
            yield first
            yield from super().learn(task)

    assert key_of(Twice()) == ""


class Liar(Isolation):
    """Its loss reads more, or its phase changes more, than it says."""

    def __init__(self, network, lies="reads"):
        super().__init__(network)
        self.lies = lies

    def learn_own(self, task):
        (phase,) = super().learn_own(task)
        own = phase.loss

        def loss(batch):
            if self.lies == "reads":
                return own(batch) + self.backbone.conv1.weight.sum()
            with torch.no_grad():
                self.backbone.conv1.weight.zero_()
            return own(batch)

        phase.loss = loss
        yield phase


@pytest.mark.parametrize(("lies", "message"), [("reads", "depends on more"), ("changes", "changes more than its")])
def test_the_contract_sees_who_reads_more_than_he_says(lies, message):
    with pytest.raises(AssertionError, match=message):
        conformance.shows_only_the_phase_changes(lambda: Liar(small_resnet(), lies))


# ---------------------------------------------------------------------------------------------- whole or absent


def only(root):
    (entry,) = phases.entries(root)
    return entry.path


def one_phase(root, resume=None):
    return taught(lambda: Isolation(small_resnet()), root, tasks=1, resume=resume)


def flip(location):
    file = location / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def of_another_phase(location):
    manifest = json.loads((location / "manifest.json").read_text())
    (location / "manifest.json").write_text(json.dumps(manifest | {"key": "0" * 64}))


HARM = {
    "bit": flip,
    "cut": lambda location: (location / "weights.safetensors").write_bytes(b"12"),
    "no weights": lambda location: (location / "weights.safetensors").unlink(),
    "no manifest": lambda location: (location / "manifest.json").unlink(),
    "empty manifest": lambda location: (location / "manifest.json").write_bytes(b""),
    "newer format": lambda location: (location / "manifest.json").write_text('{"format": 99}'),
    "renamed": of_another_phase,
    "other tensors": lambda location: write_part(location, {"x": torch.zeros(1)}, {**_told(location)}),
}


def _told(location):
    return {key: read_json(location / "manifest.json")[key] for key in ("phase", "steps", "epochs", "seconds", "key")}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder with one phase, and the method that has learnt it."""
    root = tmp_path_factory.mktemp("once")
    return root, one_phase(root)[0]


@pytest.mark.parametrize("harm", HARM)
def test_what_is_damaged_is_trained_again(harm, once, tmp_path):
    root, whole = once
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    HARM[harm](only(tmp_path) if harm != "no manifest" else next(tmp_path.iterdir()))
    again, reused, told, _ = one_phase(tmp_path)
    assert reused == [[]] and equal(again, whole)
    (note,) = told.of("note")
    assert "damaged and is trained again" in note["text"] and "\n" not in note["text"]
    assert one_phase(tmp_path)[1] == [["isolation"]], "it was kept again, whole"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunError("no; do something")])
def test_where_nothing_can_be_written_it_is_said_once(error, once, tmp_path, monkeypatch):
    def fails(*args, **how):
        (args[0]).mkdir()
        raise error

    monkeypatch.setattr(phase_cache, "write_part", fails)
    method, _, told, _ = taught(lambda: Isolation(small_resnet()), tmp_path)
    (note,) = told.of("note")
    assert note["text"].startswith("finished phases are not cached")
    del method.networks["1"], method.heads.blocks[1]
    assert equal(method, once[1])
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_may_only_be_read_serves(once, tmp_path, monkeypatch):
    shutil.copytree(once[0], tmp_path, dirs_exist_ok=True)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(phase_cache.Lock, "acquire", refused)
    monkeypatch.setattr(phases.os, "utime", refused)
    assert one_phase(tmp_path)[1] == [["isolation"]]
    shutil.rmtree(only(tmp_path))
    monkeypatch.setattr(phase_cache, "write_part", refused)
    _, reused, told, _ = one_phase(tmp_path)
    assert reused == [[]] and "Permission denied" in told.of("note")[0]["text"]


def test_a_folder_that_may_not_be_looked_into_stops_nothing(once, tmp_path, monkeypatch):
    usual = Path.exists

    def exists(path):
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return usual(path)

    monkeypatch.setattr(Path, "exists", exists)
    method, reused, told, _ = one_phase(tmp_path)
    assert reused == [[]] and "Permission denied" in told.of("note")[0]["text"]
    assert equal(method, once[1])


def test_a_phase_that_is_removed_while_it_is_read_was_never_there(once, tmp_path, monkeypatch):
    """Another process makes room: nothing is damaged, and the phase is trained and kept again."""
    shutil.copytree(once[0], tmp_path, dirs_exist_ok=True)
    usual = phase_cache.read_part

    def removed(location, *args):
        if location.parent == tmp_path and location.exists():
            shutil.rmtree(location)
        return usual(location, *args)

    with monkeypatch.context() as patch:
        patch.setattr(phase_cache, "read_part", removed)
        method, reused, told, _ = one_phase(tmp_path)
    assert reused == [[]] and told.of("note") == [] and equal(method, once[1])
    assert one_phase(tmp_path)[1] == [["isolation"]]


def test_a_process_that_comes_second_waits(tmp_path):
    """And takes what the first one has trained; a third one, of another phase, does not wait."""
    key, network, said, actual = "a" * 64, nn.Linear(2, 2), [], []
    told = threading.Event()

    def note(text):
        said.append(text)
        told.set()

    def second():
        with PhaseCache(tmp_path).claimed(key, [nn.Linear(2, 2)], 3, World(), note) as progress:
            actual.append(progress)

    first = PhaseCache(tmp_path)
    with first.claimed(key, [network], 3, World(), note) as progress:
        assert progress is None
        waiting = threading.Thread(target=second)
        waiting.start()
        assert told.wait(20)
        with PhaseCache(tmp_path).claimed("b" * 64, [network], 3, World(), note) as other:
            assert other is None
        first.keep("probe", [network], Progress(3, seconds=1.5, key=key), note)
        assert actual == []
    waiting.join(20)
    assert [progress.seconds for progress in actual] == [1.5] and actual[0].reused
    assert said == ["another process is training the same phase; waiting for its result"]
    assert [path.name for path in tmp_path.iterdir()] == [key], "no lock is left"


def test_who_waits_for_one_that_fails_trains(tmp_path):
    with pytest.raises(KeyboardInterrupt), PhaseCache(tmp_path).claimed("a" * 64, [], 3, World(), print):
        raise KeyboardInterrupt
    with PhaseCache(tmp_path).claimed("a" * 64, [], 3, World(), pytest.fail) as progress:
        assert progress is None


# ------------------------------------------------------------------------------------------------ interruptions


def cut_off(make, root, folder, settings=None, every=(2, 3, 5)):
    """A task that is stopped again and again, and how often."""
    for count, steps in enumerate(every * 100):
        try:
            return taught(make, root, tasks=1, settings=settings, resume=lambda t: Cut(folder, steps)), count  # noqa: B023
        except Interrupted:
            continue
    return None


def test_a_phase_that_was_cut_off_is_kept_when_it_ends(once, tmp_path):
    root, whole = once
    (method, _, _, (seconds,)), cuts = cut_off(
        lambda: Isolation(small_resnet()), tmp_path / "cut", tmp_path / "moments"
    )
    assert cuts >= 2 and equal(method, whole)
    one, other = (read_json(only(location) / "manifest.json") for location in (root, tmp_path / "cut"))
    assert one["key"] == other["key"] and one["sha256"] == other["sha256"]
    told = [[{**facts, "seconds": 0} for facts in manifest["epochs"]] for manifest in (one, other)]
    assert told[0] == told[1] and len(told[0]) == 2
    assert other["seconds"] == pytest.approx(seconds["isolation"], abs=2e-3) and seconds["isolation"] > 0


def test_steps_that_were_made_elsewhere_are_not_kept(tmp_path, monkeypatch):
    """A task goes on with another version: no other run may take the mixture for its own."""
    with pytest.raises(Interrupted):
        one_phase(tmp_path / "kept", resume=lambda t: Cut(tmp_path / "moments", 2))
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(fingerprint, "code", lambda: "another")
        one_phase(tmp_path / "kept", resume=lambda t: Cut(tmp_path / "moments", 2))
    one_phase(tmp_path / "kept", resume=lambda t: Resume(tmp_path / "moments"))
    assert phases.entries(tmp_path / "kept") == []


def test_an_interruption_after_a_phase_was_taken_does_not_need_the_folder_again(tmp_path):
    taught(pearl(reference="given"), tmp_path / "kept", tasks=1)
    make = pearl(reference="given", rank=EnergyRule())
    with pytest.raises(Interrupted):
        taught(make, tmp_path / "kept", tasks=1, resume=lambda t: Cut(tmp_path / "moments", 2))
    phases.empty(tmp_path / "kept")
    method, reused, _, _ = taught(make, None, tasks=1, resume=lambda t: Resume(tmp_path / "moments"))
    assert reused == [["probe"]], "whose mark and seconds are in the stored moment"
    assert equal(method, taught(make, tasks=1)[0])


# --------------------------------------------------------------------------------------------------------- runs


SMALL = ["backbone.width=4", "stream.per_class=8", "stream.test_per_class=4", "stream.classes=4", "stream.tasks=2"]
SMALL += ["train.epochs=1", "train.batch_size=8", "engine.max_steps=2"]


@contextmanager
def at(monkeypatch, **environment):
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        yield


def without_time(value):
    """JSON without what a clock says, and the mark."""
    if isinstance(value, dict):
        out = ("seconds", "reused", "evaluation_seconds", "time", "started")
        return {key: without_time(each) for key, each in value.items() if key not in out}
    return [without_time(each) for each in value] if isinstance(value, list) else value


def test_the_rest_of_a_run_does_not_notice(tmp_path, monkeypatch):
    settings = load_config("digits", [*SMALL, "method.rank=energy"])
    plain = execute(settings, path=tmp_path / "plain")
    assert phases.folder() is None and not (tmp_path / "data" / "phases").exists()
    with at(monkeypatch, PEARL_CACHE=""):
        execute(load_config("digits", SMALL), path=tmp_path / "other")
        before = len(phases.entries(tmp_path / "data" / "phases"))
        run = execute(settings, path=tmp_path / "run")
        assert before == len(phases.entries(tmp_path / "data" / "phases")) == 2
    assert [manifest.get("reused") for manifest in run.manifests] == [["reference"], ["probe"]]
    assert "reused" not in plain.manifests[0]
    assert without_time(run.manifests) == without_time(plain.manifests)
    assert without_time(run.results) == without_time(plain.results)
    files = [sorted(str(p.relative_to(r.path)) for p in r.path.rglob("*")) for r in (run, plain)]
    assert files[0] == files[1]
    lines = [[json.loads(line) for line in (r.path / "events.jsonl").read_text().splitlines()] for r in (run, plain)]
    drop = ("run", "data")
    one, other = ([without_time(line) for line in each if line["event"] not in drop] for each in lines)
    assert one == other


@pytest.mark.parametrize("off", ["engine.reuse=false", "PEARL_CACHE=off"])
def test_it_can_be_switched_off(off, tmp_path, monkeypatch):
    more = [] if off.startswith("PEARL") else [off]
    with at(monkeypatch, PEARL_CACHE="off" if not more else tmp_path / "kept"):
        execute(load_config("digits", [*SMALL, *more]), path=tmp_path / "run", stop_after=1)
    assert not (tmp_path / "kept").exists() and not (tmp_path / "data" / "phases").exists()
    assert load_config("digits", SMALL).id == load_config("digits", [*SMALL, "engine.reuse=false"]).id


def test_arrays_among_a_module_s_values_count():
    def with_array(values):
        return changed(lambda m: setattr(m.backbone, "table", np.array(values)))

    assert key_of(with_array([1.0, 2.0])) != key_of(with_array([1.0, 3.0])) != ""
