"""Every table and figure of the paper, ours beside theirs: `pearl table NAME`.

NAME.yaml    what a table is: rows, columns, the paper's values, which runs give ours, what the paper claims from it
spec.py      reads and checks these files; from a cell to the configuration of the run that supports it
values.py    run directories -> numbers in cells, differences in standard errors, whether claims hold
objects.py   what needs no run: parameters counted on models without memory, and how long runs would take
missing.py   runs what cells wait for
show.py      a filled table as text, Markdown, HTML, CSV or LaTeX; the list of all
"""
