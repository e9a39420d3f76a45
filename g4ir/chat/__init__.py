"""Prompts from conversations; reasoning, content and tool calls from output.

    messages, tools --read_messages, lower--> the same, decoded and checked, schemas lowered
        --template--> Prompt --Vocabulary--> ids
          the checkpoint's own, or built in; contents never become control tokens
    ids --TokenStream--> pieces --Reader--> events, Answer
          each piece text or a control token

Independent of HTTP and engines. Invalid requests raise InputError, whose message begins with the
field if one is at fault: `messages[2].content: ...`.
"""

from .prompt import Piece, Prompt, ReasoningBudget, TokenStream, Vocabulary
from .reader import Answer, Event, Reader, call_id
from .template import Template, make_prompt, render

__all__ = [
    "Answer",
    "Event",
    "Piece",
    "Prompt",
    "Reader",
    "ReasoningBudget",
    "Template",
    "TokenStream",
    "Vocabulary",
    "call_id",
    "make_prompt",
    "render",
]
