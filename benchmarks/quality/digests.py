"""Digests by which measured cells know their prompts: a prompt that changed is measured again."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalloc.prompts.cases import Case


def digest_of_case(case: Case) -> str:
    """Of the tokens that are read and of what is compared."""
    turn = case.turns[0]
    said = json.dumps([case.input_ids, turn.question_ids, turn.continuation_ids])
    return hashlib.sha256(said.encode()).hexdigest()[:12]
