"""What the JSON files of a run have to hold. They may hold more: a newer pearl of the same format writes more.

Whoever reads such a file names its shape, so that a file that was damaged, or made by hand, is found out where it is
read and not where a number turns out to be a text.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator


def _text(value: Any) -> str:
    # pydantic's own takes no name of a file that is no UTF-8
    if not isinstance(value, str):
        raise ValueError("input should be a text")
    return value


Text = Annotated[str, PlainValidator(_text)]
Whole = Annotated[int, Field(strict=True, ge=0, lt=2**62)]  # that NumPy can count with
Number = Annotated[float, Field(strict=True)]
Names = dict[Text, Any]


class Record(BaseModel):
    """Any of the files; entries that are not named here may be anything, numbers are finite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


def problem(value: Any, shape: type[Record]) -> str:
    """Return what is wrong with a value of this shape and where, in a line; empty if nothing is."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}".removeprefix(": ")
    return ""


class Part(Record):
    """manifest.json beside a file of weights."""

    sha256: dict[Text, Text]
    bytes: Whole
    tensors: dict[Text, list[Whole]]


class Reference(Part):
    """reference/manifest.json."""

    parameters: Whole


class Trained(Record):
    """What is told of an epoch."""

    epoch: Whole
    loss: Number
    lr: Number
    seconds: Number


class Moment(Part):
    """resume/*/manifest.json, and that of a phase that is kept. The first versions wrote phase and steps alone."""

    phase: Text
    steps: Whole
    seconds: Number = 0.0
    epochs: list[Trained] = []
    key: Text = ""
    reused: Annotated[bool, Field(strict=True)] = False


class Layer(Record):
    """What a task's manifest says about one layer, if ranks are chosen."""

    layer: Text
    threshold: Number
    rank: Whole
    full_rank: Whole
    rows_and_columns: Whole


class Estimate(Record):
    """What was said of a task's images that it was not compared with, or not trained on: counts of each class."""

    how: Literal["left out", "held out"]
    classes: list[Whole]  # logit indices
    total: list[Whole]
    class_il: list[Whole]
    task_il: list[Whole]
    mistakes: list[tuple[Whole, Whole, Whole]]  # true class, answer, how often
    reliability: list[tuple[Number, Number, Number]]  # see `sureness.reliability`


class Task(Part):
    """tasks/*/manifest.json. The first versions did not write how many images there were, nor isolation's size."""

    task: Whole
    name: Text
    classes: list[Text]  # new ones; none if the task shows known ones again
    also: list[Text] = []
    images: Whole | None = None
    parameters: Whole
    nonzero: Whole | None = None  # of all parameters, with methods that leave most at 0
    isolation_parameters: Whole | None = None
    seconds: dict[Text, Number]
    reused: list[Text] = []  # those of its phases that were not trained by this run
    layers: list[Layer] = []
    spaces: list[Whole] = []  # tasks whose sub-networks are asked, where class statistics answer
    temperature: Number | None = None
    refused: list[Number] = []  # from and to: the share of known images expected to be called unknown at a rate of 0.05
    train: Names = {}
    estimate: Estimate | None = None
    image_hashes: dict[Text, Text] = {}  # of the images that it learnt, by class; see `data.copies`


class Listed(Record):
    """A task in classes.json and results.json."""

    name: Text
    classes: list[Text]


class Classes(Record):
    """classes.json."""

    tasks: list[Listed]


class Stage(Record):
    """What was counted after one task."""

    total: list[Whole]
    class_il: list[Whole]
    task_il: list[Whole]
    domain_il: list[Whole] | None = None  # of methods for domains
    confusion: list[list[Whole]]
    parameters: Whole
    isolation_parameters: Whole
    evaluation_seconds: Number


class Results(Record):
    """results.json."""

    tasks: list[Listed]
    stages: list[Stage]
    complete: Annotated[bool, Field(strict=True)] = False


class Named(Record):
    """A part in config.yaml."""

    name: Text


class Stream(Record):
    """The section `stream` of config.yaml."""

    tasks: Whole | list[Any]


class Settings(Record):
    """config.yaml, as far as it is read without checking the settings themselves; models have no recipe."""

    seed: Annotated[int, Field(strict=True)]
    method: Named
    train: Names
    recipe: Text | None = None
    stream: Stream | None = None
    expected: dict[Text, Names] | None = None

    @model_validator(mode="after")
    def _is_run_or_model(self) -> Self:
        if (self.recipe is None) != (self.stream is None):
            raise ValueError("a run has a recipe and a stream, a model has neither")
        return self


class Data(Record):
    """data.json."""

    stream_sha256: Text
    images_sha256: dict[Text, Text]


class Environment(Record):
    """environment.json."""

    precision: Annotated[str, Field(pattern="^(fp32|bf16)$")]


class Pending(Record):
    """resume/task.json, of the task that a model is learning."""

    index: Whole | None = None
    data: Text  # where its images are; empty if they were in memory
    name: Text
    config: Names
    aliases: dict[Text, Text] = {}
    fast: Annotated[bool, Field(strict=True)] = False
    nested: Annotated[bool, Field(strict=True)] = False
    holdout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


class Epoch(Trained):
    """A line of events.jsonl of this kind."""

    time: Text
    task: Whole
    phase: Text


class OfTask(Record):
    """A line of events.jsonl about a task: that it, or one of its phases, begins."""

    task: Whole


class Finished(OfTask):
    """A line of events.jsonl about a task that is learnt."""

    parameters: Whole


class Seen(OfTask):
    """A line of events.jsonl about a task that is evaluated."""

    class_il: Number
    task_il: Number


EVENTS: dict[str, type[Record]] = {"task": OfTask, "phase": OfTask, "epoch": Epoch, "learnt": Finished, "stage": Seen}
