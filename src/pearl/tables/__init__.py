"""Every table and figure of the paper next to our results: `pearl table NAME`.

NAME.yaml    the definition of a table: rows, columns, the paper's values, our runs, the paper's claims
spec.py      reads and checks these files; maps a cell to the configuration of its runs
values.py    run directories -> numbers in cells, differences in standard errors, verdicts on claims
measured.py  the metrics of a run
objects.py   values without runs: parameters counted on models without memory, and estimated times
missing.py   runs missing runs
show.py      a filled table as text, Markdown, HTML, CSV or LaTeX
listing.py   the list of all tables
words.py     the texts of a filled table
"""
