"""Output for users: pages, text tables, progress, plans. Reads stored files; trains nothing."""
