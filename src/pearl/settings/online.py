"""Settings of a run whose task boundaries are hidden: the order of the images, and when to evaluate."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pearl.settings.sections import Count, Section

Percent = Annotated[float, Field(ge=0, le=100)]
Positive = Annotated[float, Field(gt=0)]


class OnlineStreamConfig(Section):
    """The order in which labelled images arrive, see `data.protocols`."""

    protocol: Literal["si_blurry", "gaussian", "sorted", "random", "tasks"] = "si_blurry"
    """`si_blurry`, `gaussian` (periodic with `periods` above 1), `sorted` (class by class), `random`, or `tasks`
    (equally many classes per stage, in the order of `stream.order`)."""
    stages: Count = 5
    """Stages of `si_blurry` and `tasks`."""
    boundaries: Literal["hidden", "given"] = "hidden"
    """Of `si_blurry` and `tasks`: whether the learner is called at the end of each stage."""
    disjoint: Percent = 50
    """Of `si_blurry`: percentage of the classes that occur in one stage only."""
    blurry: Percent = 10
    """Of `si_blurry`: percentage of the other classes' images that are redistributed among the stages."""
    varying: bool = True
    """Of `si_blurry`: draw the number of classes and images of each stage; `false` is i-Blurry."""
    sigma: Positive = 0.1
    """Of `gaussian`: standard deviation of a class's arrival, in units of the period."""
    periods: Count = 1
    """Of `gaussian`: how often each class peaks."""
    at_start: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of `gaussian`: share of the classes that occur from the first period on."""

    @model_validator(mode="after")
    def _has_the_boundaries(self) -> "OnlineStreamConfig":
        if self.boundaries == "given" and self.protocol not in ("si_blurry", "tasks"):
            raise ValueError(f"boundaries=given: protocol={self.protocol} has no stages; choose tasks or si_blurry")
        return self


class OnlineConfig(OnlineStreamConfig):
    """A stream without task boundaries: every labelled image arrives once, in batches; the learner sees no tasks."""

    learner: dict[str, Any]
    """The online learner: a name, or a mapping of name and options (`pearl list learners`)."""
    batch_size: Count = 64
    """Images that arrive together."""
    evaluate_every: Count = 1000
    """Images between two evaluations, which also take place at powers of two and at the end."""
