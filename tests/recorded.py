"""An observer that keeps the events of training."""

from pearl.training.engine import Observer


class Record(Observer):
    """The events of training in order, and the number of steps."""

    def __init__(self):
        self.events, self.steps = [], 0

    def event(self, kind, **facts):
        self.events.append((kind, facts))

    def step(self, done, total):
        self.steps += 1

    def of(self, kind):
        """The facts of all events of a kind."""
        return [facts for actual, facts in self.events if actual == kind]
