"""Which task is it? Classes as statistics in the spaces of frozen sub-networks, compared task after task.

Logits of heads that were trained apart say nothing about each other. But when a task is learnt, its images may still be
passed through every sub-network frozen so far: in each of these spaces a class leaves its mean, and all classes
together one covariance. So two classes can be compared in every space that was there when the later one came.

An own method; nothing of it is in the PEARL paper. A single space with linear discriminants of pooled covariance is
known (first-session adaptation, Panos et al., ICCV 2023; RanPAC, McDonnell et al., NeurIPS 2023); here there are
several, and a chain of decisions over the tasks joins them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pearl.errors import RunError
from pearl.methods.base import Answers
from pearl.methods.common.classifiers import Chain
from pearl.methods.common.scatter import FOLDS, MANY, folds, inverse, pack, pieces, root, shrunk, statistics, unpack
from pearl.methods.common.spaces import (
    TRIED,
    Background,
    ByClass,
    ChainHead,
    Discriminants,
    Space,
    alive,
    begins_of,
    chain_rule,
    digest_of,
    familiarity,
    misfit,
    projection,
)
from pearl.nn.growing import TaskTensors

New = tuple[Tensor, Tensor, Tensor | None]  # of a task in a space: means, counts; a scatter if it enters the covariance

UNCALIBRATED = 0.2  # the temperature before there are two tasks to measure it with
MEASURED = 512  # images that the temperature is measured on, of a task that comes to so many prototypes
ENOUGH = 100  # images that say what is familiar
GRID = torch.logspace(math.log10(0.02), math.log10(1.5), TRIED, dtype=torch.float64)
DRAWS, WIDTHS = 128, [0.5 * i for i in range(1, 17)]  # images that stand for old ones, and how far they may lie


class ChainStatistics(nn.Module):
    """What the chain knows: spaces, prototypes - a class as one task showed it -, temperature. All in buffers.

    A space belongs to the task at whose end it was made, and is known to its prototypes and those of later tasks.
    """

    running = ("/scatter", "/freedom")  # ends of the names of what a task replaces

    def __init__(self, options: Chain) -> None:
        super().__init__()
        self.options = options
        # "space.v.birth" (), ".mean", ".std" (p_raw,), ".projection" (32,), a checksum, ".projected_mean",
        # ".projected_std" (p,), ".scatter" (p(p+1)/2,), ".freedom" (); "task.t.classes", ".counts" (k,),
        # ".means.v" (k, p); ".familiarity" (101,), percentiles among images left out, at ".temperature" ();
        # ".losses" (40,), of these images at each temperature of the grid; "temperature" ()
        self.tensors = TaskTensors(buffers=True)
        self._head: list[ChainHead] = []  # in lists: they are no part of the state
        self._backgrounds: list[Background] = []
        self.left_out: Answers | None = None  # of the task observed last, see `observe`; no part of the state either

    # ---------------------------------------------------------------------------------------------------- what is there

    def __len__(self) -> int:
        """Number of tasks observed."""
        return sum(name.endswith("/classes") for name, _ in self.tensors.named_buffers())

    @property
    def births(self) -> list[int]:
        """The task at whose end each space was made."""
        count = sum(name.endswith("/birth") for name, _ in self.tensors.named_buffers())
        return [int(self.tensors[f"space.{v}.birth"]) for v in range(count)]

    def wants_space(self) -> bool:
        """Whether the next task's sub-network becomes one."""
        return self.options.spaces == "all" or len(self.births) < self.options.spaces

    @property
    def task_of(self) -> Tensor:
        """The task of each prototype (prototypes,)."""
        sizes = [len(self.tensors[f"task.{t}.classes"]) for t in range(len(self))]
        return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))

    @property
    def class_of(self) -> Tensor:
        """The class, a logit index, of each prototype (prototypes,)."""
        parts = [self.tensors[f"task.{t}.classes"].cpu() for t in range(len(self))]
        return torch.cat([torch.empty(0, dtype=torch.long), *parts])

    @property
    def temperature(self) -> float:
        """What scores are multiplied by before they are probabilities."""
        return float(self.tensors["temperature"]) if self.calibrated else UNCALIBRATED

    @property
    def calibrated(self) -> bool:
        """Whether the temperature was measured, which takes two tasks."""
        return "temperature" in self.tensors

    # --------------------------------------------------------------------------------------------------------- learning

    @torch.no_grad()
    def add_space(self, birth: int, raw: Tensor) -> None:
        """A new space from the raw features (N, p_raw) of the images that its sub-network learnt."""
        v, raw_dim = len(self.births), raw.shape[1]
        dim = self.options.projection
        made = projection(v, raw_dim, dim).to(raw.device) if dim is not None and dim < raw_dim else None
        facts = {"mean": raw.double().mean(0).to(raw), "std": alive(raw.double().std(0, unbiased=False)).to(raw)}
        none = raw.new_zeros(1)
        rows = Space(facts | {"projected_mean": none, "projected_std": none}, made).projected(raw).double()
        p = rows.shape[1]
        facts |= {"projected_mean": rows.mean(0).to(raw), "projected_std": alive(rows.std(0, unbiased=False)).to(raw)}
        if made is not None:
            facts["projection"] = digest_of(made).to(raw.device)
        facts["scatter"] = torch.zeros(p * (p + 1) // 2, dtype=torch.float64, device=raw.device)
        facts["freedom"] = torch.zeros((), dtype=torch.long, device=raw.device)
        facts["birth"] = torch.tensor(birth, device=raw.device)
        for name, value in facts.items():
            self.tensors.add(f"space.{v}.{name}", value)
        self._forget()

    @torch.no_grad()
    def check(self, raw: Sequence[Tensor]) -> None:
        """See that it can go on with these sub-networks, by the raw features (B, p_raw) of an image in every space.

        Raises:
            RunError: statistics of other features, or a covariance that is none.
        """
        for v, (space, rows) in enumerate(zip(self.spaces(), raw, strict=True)):
            space(rows)
            root(shrunk(*self._covariance(v)))

    @torch.no_grad()
    def observe(self, features: Sequence[Tensor], labels: Tensor) -> None:
        """Add a task: features (N, p) in every space there is, and the classes' logit indices (N,).

        The temperature is measured first, with these images left out of the statistics a quarter at a time: what is
        then said of them is in `left_out`. What earlier tasks had to say of it counts as much, image by image: one that
        is never confused, as a single class or more photos of a known one, says next to nothing.
        """
        self._forget()
        t = len(self)
        # what its own sub-network makes of images that it has learnt is no measure; at first there is no other
        usable = [rows for birth, rows in zip(self.births, features, strict=True) if birth < t or t == 0]
        classes, own = labels.unique(return_inverse=True)
        temperature, losses, percentiles, self.left_out = self._calibrate(usable, classes, own)
        value = torch.tensor(temperature, dtype=torch.float64, device=labels.device)
        if t and percentiles.isfinite().all():  # it was measured
            self.tensors.add("temperature", value)
            self.tensors.add(f"task.{t}.losses", losses.to(labels.device))
        self.tensors.add(f"task.{t}.familiarity", percentiles.to(labels.device))
        self.tensors.add(f"task.{t}.temperature", value.clone())
        self.tensors.add(f"task.{t}.classes", classes)
        self.tensors.add(f"task.{t}.counts", own.bincount(minlength=len(classes)))
        for v, rows in enumerate(features):
            means, scatter = statistics(rows, own, len(classes))
            self.tensors.add(f"task.{t}.means.{v}", means.to(rows))
            if self._updates(v, t):
                self.tensors.add(f"space.{v}.scatter", self.tensors[f"space.{v}.scatter"] + pack(scatter))
                freedom = self.tensors[f"space.{v}.freedom"] + len(rows) - len(classes)
                self.tensors.add(f"space.{v}.freedom", freedom)

    def _updates(self, v: int, t: int) -> bool:
        """Whether task t's images enter the covariance of space v."""
        return self.options.covariance == "updated" or t < 2 or t == self.births[v]

    def _calibrate(
        self, features: Sequence[Tensor], classes: Tensor, own: Tensor
    ) -> tuple[float, Tensor, Tensor, Answers | None]:
        """The temperature of the least negative log-likelihood of images among all classes there were.

        With it, of a new task's images, that at each temperature of the grid (40,), the percentiles (101,) of their
        familiarity, and the answers; None if each class has a single image. Each image is left out of the statistics
        that it meets.
        """
        labels, births = classes[own], self.births[: len(features)]
        task_of = torch.cat([self.task_of, torch.full((len(classes),), len(self))])
        begins = begins_of(task_of, births)
        by_class = ByClass(torch.cat([self.class_of, classes.cpu()])).to(labels.device)
        # after many classes the task moves the covariance by little: one of before serves all folds, in float32
        many = len(self.class_of) > MANY
        known = [self._discriminants(v, dtype=torch.float32) for v in range(len(features))] if many else []
        shared = [self._background(v).float() for v in range(len(features))] if many else []
        first = [int((self.task_of < birth).sum()) for birth in births]
        fold = folds(own, MEASURED if many else len(own))
        total = torch.zeros(len(GRID), dtype=torch.float64)
        left_out: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []
        for k in range(FOLDS):
            out = fold == k
            if not out.any():
                continue
            scores, common = [], []
            for v, rows in enumerate(features):
                means, scatter = statistics(rows[~out], own[~out], len(classes))
                counts = own[~out].bincount(minlength=len(classes))
                if many:
                    x, background = rows[out].float(), shared[v]
                    made = Discriminants([means], inverse(shrunk(*self._covariance(v))), 0, x.dtype)
                    scores.append(torch.cat([known[v](x), made(x)], 1))
                else:
                    new = means, counts, scatter if self._updates(v, len(self)) else None
                    x, background = rows[out].double(), self._background(v, new)
                    scores.append(self._discriminants(v, new)(x))
                common.append(background(x))
            left_out.append((labels[out], scores, common))
            for i, temperature in enumerate(GRID):
                logp = by_class(chain_rule(scores, first, begins, births, float(temperature)))
                total[i] -= logp.gather(1, labels[out, None]).sum().cpu()
        if not left_out:  # classes of one image each: nothing is measured, and nothing strange
            return self.temperature, total, torch.full((101,), -torch.inf, dtype=torch.float64), None
        earlier = [f"task.{t}.losses" for t in range(len(self)) if f"task.{t}.losses" in self.tensors]
        vague = (GRID / UNCALIBRATED).log().square() / 2  # decides where no image does: none was ever confused
        pooled = sum((self.tensors[name].cpu() for name in earlier), total + vague)
        best = float(GRID[pooled.argmin()]) if len(self) else UNCALIBRATED
        seen, answers = [], []
        for true, scores, common in left_out:
            logp = by_class(chain_rule(scores, first, begins, births, best))
            seen.append(familiarity(logp, scores, common, best))
            among = torch.isin(torch.arange(logp.shape[1], device=classes.device), classes)
            answers.append(Answers.of(logp, true, among.expand_as(logp)))
        every = torch.cat(seen).double()
        percentiles = every.quantile(torch.linspace(0, 1, 101, dtype=torch.float64, device=every.device))
        return best, total, percentiles, Answers.joined(answers)

    def threshold(self, rate: float) -> float:
        """The familiarity below which a share `rate` of images of known classes lies, as far as is known.

        Tasks say it whose images met as many spaces as any, none of which had learnt them: in fewer spaces familiarity
        is another number. While these have few images, or less than half of the prototypes - sketches alone say little
        of photos -, tasks that met fewer spaces say it as well. The first, which its own network alone judged, is heard
        where there is no other, and if all others show fewer prototypes, where it makes the threshold lower. None say
        it that have one image a class. What an earlier temperature gave is brought to today's, in proportion to it.
        """
        heard = [t for t in range(len(self)) if self.tensors[f"task.{t}.familiarity"].isfinite().all()]
        if not heard:
            return -math.inf
        counts = {t: self.tensors[f"task.{t}.counts"] for t in heard}
        met = {t: sum(birth < t for birth in self.births) for t in heard}
        judged = [t for t in heard if met[t]] or heard
        tasks: list[int] = []
        for spaces in sorted({met[t] for t in judged}, reverse=True):
            tasks += [t for t in judged if met[t] == spaces]
            half = 2 * sum(len(counts[t]) for t in tasks) >= sum(len(counts[t]) for t in judged)
            if half and sum(int(counts[t].sum()) for t in tasks) >= ENOUGH:
                break
        few = 2 * sum(len(counts[t]) for t in judged) < sum(len(of) for of in counts.values())
        first = [t for t in heard if few and t not in judged]
        return min(self._quantile(rate, tasks), self._quantile(rate, tasks + first))

    def _quantile(self, rate: float, tasks: Sequence[int]) -> float:
        """The familiarity below which a share `rate` of these tasks' images was, at today's temperature."""
        found = torch.stack([self.tensors[f"task.{t}.familiarity"] * self._warmer(t) for t in tasks])
        images = torch.tensor([int(self.tensors[f"task.{t}.counts"].sum()) for t in tasks], device=found.device)
        values, order = found.flatten().sort()
        share = (images / images.sum() / found.shape[1]).repeat_interleave(found.shape[1])[order].cumsum(0)
        return float(values[(share >= rate).int().argmax()])

    def _warmer(self, t: int) -> float:
        """How many times the temperature is what it was with task t; models of before did not note that."""
        then = f"task.{t}.temperature"
        return self.temperature / float(self.tensors[then]) if then in self.tensors else 1.0

    # ---------------------------------------------------------------------------------------------------------- scoring

    def spaces(self) -> list[Space]:
        """From raw features to features, in every space.

        Raises:
            RunError: this torch draws other random numbers than the one that made a projection.
        """
        found = []
        for v in range(len(self.births)):
            tensors = {name: self.tensors[f"space.{v}.{name}"] for name in Space.parts}
            made = None
            if f"space.{v}.projection" in self.tensors:
                made = projection(v, len(tensors["mean"]), len(tensors["projected_mean"]))
                if not torch.equal(digest_of(made), self.tensors[f"space.{v}.projection"].cpu()):
                    raise RunError(
                        f"the random projection of space {v + 1} cannot be made again: torch {torch.__version__} draws "
                        f"other numbers; use the version that environment.json names"
                    )
                made = made.to(tensors["mean"].device)
            found.append(Space(tensors, made))
        return found

    @torch.no_grad()
    def head(self) -> ChainHead:
        """What answers, made once until a task is observed; in the features' type, float32."""
        if not self._head:
            like, spaces = self.tensors["space.0.mean"], range(len(self.births))
            made = [self._discriminants(v, dtype=like.dtype) for v in spaces]
            place = self.births, self.task_of, self.class_of, self.temperature
            self._head.append(ChainHead(self.spaces(), made, *place).to(like))
        return self._head[0]

    @torch.no_grad()
    def judge(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What `head` says of raw features, log P (B, classes), and how familiar each image is (B,)."""
        if not self._backgrounds:  # of many classes they take as long to make as all else that answers
            self._backgrounds = [self._background(v).to(raw[v]) for v in range(len(self.births))]
        return self.head().judge(raw, self._backgrounds)

    def _discriminants(self, v: int, new: New | None = None, dtype: torch.dtype = torch.float64) -> Discriminants:
        """Space v's, computed in float64; with a task that is not observed yet."""
        mu = [*self._means(v), *([new[0]] if new else [])]
        first = int((self.task_of < self.births[v]).sum())
        return Discriminants(pieces(mu), inverse(shrunk(*self._covariance(v, new))), first, dtype)

    def _background(self, v: int, new: New | None = None) -> Background:
        """Space v's, in float64; with a task that is not observed yet."""
        counts = [self.tensors[f"task.{t}.counts"] for t in range(self.births[v], len(self))]
        mu, counts = [*self._means(v), *([new[0]] if new else [])], [*counts, *([new[1]] if new else [])]
        images = torch.cat(counts).sum()
        centre = sum(weight @ rows for rows, weight in zip(pieces(mu), pieces(counts), strict=True)) / images
        between = torch.zeros_like(centre)
        for rows, weight in zip(pieces(mu), pieces(counts), strict=True):
            between = between + (rows - centre).T @ ((rows - centre) * weight[:, None])
        pooled, share = self._covariance(v, new)
        of_all = inverse(shrunk(pooled + between / images, share))
        return Background(inverse(shrunk(pooled, share)), centre, of_all)

    def _means(self, v: int) -> list[Tensor]:
        return [self.tensors[f"task.{t}.means.{v}"] for t in range(self.births[v], len(self))]

    def _covariance(self, v: int, new: New | None = None) -> tuple[Tensor, float]:
        """Of space v, within prototypes, float64 (p, p); and its shrinkage.

        Sigma = (1 - a) S + a tr(S)/p I, with S the pooled scatter over its degrees of freedom n, a = (p / (n + p))^3,
        and 1e-4 at least, for float32 has to bear it. On held-out images of two development streams (ResNet-18 with 400
        images a class, DeiT-Tiny with 40) a = p / (2 (n + p)) is 2.6 and 0.5 points worse.
        """
        p = len(self.tensors[f"space.{v}.projected_mean"])
        within, freedom = unpack(self.tensors[f"space.{v}.scatter"], p), int(self.tensors[f"space.{v}.freedom"])
        if new and (scatter := new[2]) is not None:
            within = within + scatter
            freedom += int((new[1] - 1).clamp(min=0).sum())
        return within / max(1, freedom), max((p / (freedom + p)) ** 3, 1e-4)

    def _forget(self) -> None:
        self._head.clear()
        self._backgrounds.clear()

    @torch.no_grad()
    def remaining(self, t: int, right: int, images: int) -> float:
        """Of images of task t that were right when it was learnt, which share still is, among all classes now.

        An estimate, since the images are gone: some are drawn around the task's means, in each space by itself, as the
        covariance says, but wider. How much wider is weighed by how likely it makes it that `right` of the `images`
        were right among the classes that there were then.
        """
        births = [birth for birth in self.births if birth <= t]
        own = torch.arange(DRAWS) % len(self.tensors[f"task.{t}.classes"])
        true = self.tensors[f"task.{t}.classes"].cpu()[own]
        generator = torch.Generator().manual_seed(t)
        # what answers has them already; of many classes they take seconds
        made = list(self.head().discriminants)[: len(births)]
        means, noise = [], []
        for v in range(len(births)):
            factor = root(shrunk(*self._covariance(v))).cpu()
            noise.append(torch.randn(DRAWS, len(factor), generator=generator, dtype=factor.dtype) @ factor.T)
            means.append(self.tensors[f"task.{t}.means.{v}"].cpu().double()[own])
        first = self.head().first[: len(births)]
        kind = self.tensors["space.0.mean"]

        def accuracy(scores: list[Tensor], tasks: int) -> float:
            """Among the classes of the first so many tasks."""
            known = int((self.task_of < tasks).sum())
            among = [rows[:, : known - start] for rows, start in zip(scores, first, strict=True)]
            begins = begins_of(self.task_of[:known], births)
            logp = ByClass(self.class_of[:known])(chain_rule(among, first, begins, births, self.temperature))
            found = float((logp.argmax(1) == true).double().mean())
            return min(max(found, 0.5 / DRAWS), 1 - 0.5 / DRAWS)

        likely, left = [], []
        for wider in WIDTHS:
            drawn = [(mean + wider * away).to(kind) for mean, away in zip(means, noise, strict=True)]
            scores = [score(x).cpu().double() for score, x in zip(made, drawn, strict=True)]
            then, now = accuracy(scores, t + 1), accuracy(scores, len(self))
            likely.append(right * math.log(then) + (images - right) * math.log(1 - then))
            left.append(min(now / then, 1))
        return float(torch.tensor(likely).softmax(0) @ torch.tensor(left))

    def _apply(self, *args: Any, **kwargs: Any) -> "ChainStatistics":
        self._forget()  # the tensors go elsewhere
        super()._apply(*args, **kwargs)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._forget()
        own = f"{prefix}tensors."
        if wrong := misfit({k.removeprefix(own): v for k, v in state_dict.items() if k.startswith(own)}):
            raise ValueError(f"class statistics: {wrong} is missing, or does not fit the others")
        super()._load_from_state_dict(state_dict, prefix, *args)
