"""Ctrl-C at a place that a test chooses."""

import os
import signal

from pearl.training.engine import Observer


class StopAt(Observer):
    """Asks to stop after a step of a phase."""

    def __init__(self, phase, step):
        self.at, self.phase = (phase, step), ""

    def event(self, kind, **facts):
        if kind == "phase":
            self.phase = facts["phase"]

    def step(self, done, total):
        if (self.phase, done) == self.at:
            os.kill(os.getpid(), signal.SIGINT)
