"""Learning from streams without task boundaries: every labelled image arrives once.

Start with `learner.py`, the interface; `pearl.py` is PEARL, the other files of learners are its rivals, and `run.py` is
what `pearl run` does with a recipe that has a section `online`.
"""
