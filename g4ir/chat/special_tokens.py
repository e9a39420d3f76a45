"""The control tokens of the format as strings. Only a tokenizer knows their ids."""

from __future__ import annotations

BOS, EOS = "<bos>", "<eos>"
#: stands for characters that a tokenizer does not have
UNKNOWN = "<unk>"
TURN, TURN_END = "<|turn>", "<turn|>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
TOOL, TOOL_END = "<|tool>", "<tool|>"
CALL, CALL_END = "<|tool_call>", "<tool_call|>"
RESPONSE, RESPONSE_END = "<|tool_response>", "<tool_response|>"
QUOTE = '<|"|>'
THINK = "<|think|>"
#: kind of a medium -> its placeholder
PLACEHOLDERS = {"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"}

#: every control token that means something in a conversation
CONTROLS = (
    *("<pad>", EOS, BOS, UNKNOWN, "<mask>"),
    *(TURN, TURN_END, CHANNEL, CHANNEL_END, TOOL, TOOL_END),
    *(CALL, CALL_END, RESPONSE, RESPONSE_END, QUOTE, THINK),
    *("<|image>", "<image|>", "<|audio>", "<audio|>", *PLACEHOLDERS.values()),
)
#: those behind which a model's turn is over
ENDS = (TURN_END, EOS, RESPONSE)

#: how reasoning begins, behind CHANNEL, and a model's turn, behind TURN
THOUGHT = "thought\n"
MODEL = "model\n"
