"""Names of classes and tasks in one normal form."""

import unicodedata


def class_name(text: str) -> str:
    """Return the form in which a name is compared and stored: NFC, without surrounding spaces.

    macOS decomposes letters with marks in file names (NFD), Linux keeps them as they were typed; both are the same
    name. A name of spaces alone is returned unchanged; callers refuse it.
    """
    composed = unicodedata.normalize("NFC", text)
    return composed.strip() or composed


def without_marks(text: str) -> str:
    """Return a text without diacritics (Açaí: Acai), for hints about similar names."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
