"""Names of classes and tasks: one form for each, wherever it comes from."""

import unicodedata


def class_name(text: str) -> str:
    """Return the form in which a name is compared and stored: NFC, without blanks at its ends.

    macOS decomposes letters with marks in file names (NFD), Linux keeps them as they were typed; both are one name. A
    name of blanks alone stays as it is, for its reader to refuse.
    """
    composed = unicodedata.normalize("NFC", text)
    return composed.strip() or composed


def without_marks(text: str) -> str:
    """Return a text with its letters bare (Açaí: Acai), for hints at what may have been meant."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
