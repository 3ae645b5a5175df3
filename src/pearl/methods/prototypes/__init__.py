"""Methods that know a class by the statistics of its features."""
