"""A tokenizer whose tokens can be read."""

from __future__ import annotations


class Letters:
    """One token a character: what was asked can be read from the tokens."""

    def __init__(self, *, chat: bool = True) -> None:
        self.chat_template = "yes" if chat else None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        start = [0x2BB] if add_special_tokens else []
        return {"input_ids": start + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        said = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return f"{said}<assistant>"


def read(ids):
    return "".join(map(chr, ids))
