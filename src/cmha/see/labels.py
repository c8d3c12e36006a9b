"""Tokens as labels: every character that could hide, break a line or run on is spelled out."""


def token_labels(tokenizer, ids):
    """One label per id: text as it is, a space as \\u2423, line breaks and other invisible characters as Python escapes
    (\\n, \\x1b), a backslash doubled, bytes that are no whole character as \\xe2."""
    return [visible(_text(tokenizer, token)) for token in ids]


def _text(tokenizer, token):
    """The text of one token; bytes that are no character by themselves become lone surrogates."""
    if hasattr(tokenizer, "token_bytes"):
        return tokenizer.token_bytes(token).decode("utf-8", errors="surrogateescape")
    return tokenizer.decode([token])


def visible(text):
    return "".join(_character(c) for c in text) or "\u2205"


def _character(c):
    if c == " ":
        return "\u2423"
    if "\udc80" <= c <= "\udcff":  # surrogateescape: a byte
        return f"\\x{ord(c) - 0xDC00:02x}"
    if c == "\\" or not c.isprintable():
        return c.encode("unicode_escape").decode("ascii")
    return c
