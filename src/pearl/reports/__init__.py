"""For people to look at: pages, tables of text, progress, plans. Reads what is stored; trains nothing."""
