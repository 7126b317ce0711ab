"""WordPiece, the tokenizer of BERT: text to token ids, uncased."""

from __future__ import annotations

import string
import unicodedata

LONGEST_WORD = 100  # characters; anything longer is one unknown token, as in BERT


class WordPiece:
    """Token ids of a text by greedy longest match against a vocabulary.

    Parameters
    ----------
    vocabulary : iterable of str
        The pieces in the order of their ids; a piece inside a word starts with ``##``.
    """

    def __init__(self, vocabulary):
        self.ids = {piece: index for index, piece in enumerate(vocabulary)}
        self.start, self.end, self.unknown = (self.ids[name] for name in ("[CLS]", "[SEP]", "[UNK]"))

    def __call__(self, text):
        """Ids of ``text``, without the start and end tokens."""
        return [piece for word in split_words(text) for piece in self.pieces(word)]

    def pieces(self, word):
        if len(word) > LONGEST_WORD:
            return [self.unknown]
        found, first = [], 0
        while first < len(word):
            prefix = "##" if first else ""
            for last in range(len(word), first, -1):
                piece = self.ids.get(prefix + word[first:last])
                if piece is not None:
                    break
            else:
                return [self.unknown]  # one part that is unknown makes the word unknown
            found.append(piece)
            first = last
        return found


def split_words(text):
    """Lower-case words of ``text`` without accents; each punctuation mark and each ideograph is a word."""
    text = "".join(map(spaced_or_dropped, text))
    text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if is_punctuation(c) else c for c in text.lower()).split()


def spaced_or_dropped(c):
    if c.isspace():
        return " "
    if c == "\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Co"):
        return ""
    return f" {c} " if is_ideograph(c) else c


def is_punctuation(c):
    # BERT counts every ASCII symbol ($, +, <, ...) as punctuation, whatever Unicode calls it.
    return unicodedata.category(c)[0] == "P" or c in string.punctuation


def is_ideograph(c):
    code = ord(c)
    return (
        0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2CEAF or 0xF900 <= code <= 0xFAFF or 0x2F800 <= code <= 0x2FA1F
    )  # fmt: skip
