"""Schemas of a run's JSON files. Additional entries are allowed: newer versions with the same format write more.

Every reader of such a file passes its schema, so that damaged or hand-written files are detected when they are read.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator


def _text(value: Any) -> str:
    # pydantic's own type rejects file names that are not UTF-8
    if not isinstance(value, str):
        raise ValueError("input should be a string")
    return value


Text = Annotated[str, PlainValidator(_text)]
Whole = Annotated[int, Field(strict=True, ge=0, lt=2**62)]  # within NumPy's range
Number = Annotated[float, Field(strict=True)]
Names = dict[Text, Any]


class Schema(BaseModel):
    """Base of all files; other entries may be anything, numbers are finite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


def problem(value: Any, shape: type[Schema]) -> str:
    """Return what is wrong with a value of this shape and where, in a line; empty if nothing is."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}".removeprefix(": ")
    return ""


class WeightFile(Schema):
    """manifest.json of a weight file."""

    sha256: dict[Text, Text]
    bytes: Whole
    tensors: dict[Text, list[Whole]]


class Reference(WeightFile):
    """reference/manifest.json."""

    parameters: Whole


class EpochEvent(Schema):
    """The event of an epoch."""

    epoch: Whole
    loss: Number
    lr: Number
    seconds: Number


class CheckpointManifest(WeightFile):
    """resume/*/manifest.json, and that of a cached phase. The first versions wrote only phase and steps."""

    phase: Text
    steps: Whole
    seconds: Number = 0.0
    epochs: list[EpochEvent] = []
    key: Text = ""
    reused: Annotated[bool, Field(strict=True)] = False


class LayerEntry(Schema):
    """A task manifest's entry for one layer, if ranks are chosen."""

    layer: Text
    threshold: Number
    rank: Whole
    full_rank: Whole
    rows_and_columns: Whole


class ExpectedAccuracy(Schema):
    """Shares, 0 to 1, of unseen images to be classified correctly, and the number of spared images that they use."""

    class_il: Number
    task_il: Number
    spared: Whole


class Estimate(Schema):
    """Counts of predictions per class for a task's cross-validated or held-out images."""

    how: Literal["left out", "held out"]
    classes: list[Whole]  # logit indices
    total: list[Whole]
    class_il: list[Whole]
    task_il: list[Whole]
    mistakes: list[tuple[Whole, Whole, Whole]]  # true class, prediction, count
    reliability: list[tuple[Number, Number, Number]]  # see `sureness.reliability`
    expected: ExpectedAccuracy | None = None  # of images that no network was trained on, if these were trained on


class TaskManifest(WeightFile):
    """tasks/*/manifest.json. The first versions wrote neither the number of images nor isolation's size."""

    task: Whole
    name: Text
    classes: list[Text]  # new ones; empty if the task has known ones only
    also: list[Text] = []
    images: Whole | None = None
    parameters: Whole
    nonzero: Whole | None = None  # of all parameters, for methods with mostly zero ones
    isolation_parameters: Whole | None = None
    seconds: dict[Text, Number]
    reused: list[Text] = []  # those of phases that another run trained
    layers: list[LayerEntry] = []
    spaces: list[Whole] = []  # tasks whose sub-networks are used by class statistics
    temperature: Number | None = None
    refused: list[Number] = []  # expected range of the share of known images called unknown at a rate of 0.05
    train: Names = {}
    estimate: Estimate | None = None
    image_hashes: dict[Text, Text] = {}  # of the learnt images, by class; see `data.copies`


class Listed(Schema):
    """A task in classes.json and results.json."""

    name: Text
    classes: list[Text]


class Classes(Schema):
    """classes.json."""

    tasks: list[Listed]


class StageEntry(Schema):
    """The counts of one evaluation."""

    total: list[Whole]
    class_il: list[Whole]
    task_il: list[Whole]
    domain_il: list[Whole] | None = None  # of methods for domains
    confusion: list[list[Whole]]
    parameters: Whole
    isolation_parameters: Whole
    evaluation_seconds: Number


class Results(Schema):
    """results.json."""

    tasks: list[Listed]
    stages: list[StageEntry]
    complete: Annotated[bool, Field(strict=True)] = False


class Named(Schema):
    """A part in config.yaml."""

    name: Text


class StreamSection(Schema):
    """The section `stream` of config.yaml."""

    tasks: Whole | list[Any]


class Settings(Schema):
    """config.yaml, as far as it is read without checking the settings themselves; models have no recipe."""

    seed: Annotated[int, Field(strict=True)]
    method: Named
    train: Names
    recipe: Text | None = None
    stream: StreamSection | None = None
    expected: dict[Text, Names] | None = None

    @model_validator(mode="after")
    def _is_run_or_model(self) -> Self:
        if (self.recipe is None) != (self.stream is None):
            raise ValueError("a run has a recipe and a stream, a model has neither")
        return self


class Data(Schema):
    """data.json."""

    stream_sha256: Text
    images_sha256: dict[Text, Text]


class Environment(Schema):
    """environment.json."""

    precision: Annotated[str, Field(pattern="^(fp32|bf16)$")]


class Pending(Schema):
    """resume/task.json, for a model's current task."""

    index: Whole | None = None
    data: Text  # path of its images; empty if they are in memory
    name: Text
    config: Names
    aliases: dict[Text, Text] = {}
    fast: Annotated[bool, Field(strict=True)] = False
    nested: Annotated[bool, Field(strict=True)] = False
    holdout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


class Exchange(Schema):
    """The list of an unfinished change; see `change`."""

    verb: Text
    files: list[Text]  # the new ones in order, relative to the directory
    removed: list[Text]


class CertifiedFile(Schema):
    """A file of tensors in a certificate; `before` and `after` are its SHA-256."""

    file: Text
    from_: Annotated[Text, Field(alias="from")]
    before: Text
    after: Text
    tensors: dict[Text, Names] = {}  # of a file that was rewritten


class Certificate(Schema):
    """certificates/NNN.json: a class or task that was forgotten, and what was left."""

    at: Text
    forgotten: Names
    exact: Annotated[bool, Field(strict=True)]
    stays: Text
    files: list[CertifiedFile]
    removed: dict[Text, Text]

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        names = [self.forgotten.get(kind) for kind in ("class", "task")]
        if sum(isinstance(name, str) for name in names) != 1:
            raise ValueError("forgotten has neither a class nor a task")
        return self


class Epoch(EpochEvent):
    """A line of events.jsonl of this kind."""

    time: Text
    task: Whole
    phase: Text


class OfTask(Schema):
    """A line of events.jsonl about a task: the start of the task or of a phase."""

    task: Whole


class Finished(OfTask):
    """A line of events.jsonl about a finished task."""

    parameters: Whole


class Seen(OfTask):
    """A line of events.jsonl about a task's evaluation."""

    class_il: Number
    task_il: Number


EVENTS: dict[str, type[Schema]] = {"task": OfTask, "phase": OfTask, "epoch": Epoch, "learnt": Finished, "stage": Seen}
