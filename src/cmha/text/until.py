"""Text as it comes, up to where it ends."""

from collections.abc import Iterable

from cmha.text.tokenizers import StreamDecoder, Tokenizer


class TextUntil:
    """ids one at a time -> text that may be shown: whole characters, and nothing of a stop string, not even a beginning
    of one that has not become whole yet. Text ends before the first stop string in it::

        text = TextUntil(tokenizer, ["\\n\\n"])
        for token in gpt.stream(ids, 100):
            print(text.feed(token), end="")
            if text.ended: break
        print(text.finish())
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Iterable[str] = ()) -> None:
        self._decoder, self._vocab_size = StreamDecoder(tokenizer), tokenizer.vocab_size
        self._strings = tuple(stop_strings)
        self._held = ""  # could be the beginning of a stop string
        self.ended = False

    def feed(self, token: int) -> str:
        """The text that is certain now, often that of this id; '' once the text has ended. An id behind the tokenizer's
        last one, which a padded vocabulary has, is U+FFFD."""
        if self.ended:
            return ""
        return self._cut(self._decoder.feed(token) if token < self._vocab_size else "\ufffd")

    def finish(self) -> str:
        """What was held back, and what is left of a character that never came whole, as U+FFFD."""
        text = self._cut(self._decoder.finish()) + self._held if not self.ended else ""
        self._held = ""
        return text

    def _cut(self, text: str) -> str:
        text = self._held + text
        places = [at for at in map(text.find, self._strings) if at >= 0]
        if places:
            self.ended, self._held = True, ""
            return text[: min(places)]
        begun = max((n for s in self._strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]
