"""Client tests that vLLM's server fails -> how it differs from `g4ir serve` (docs/vllm.md)."""

REASONING = "reasoning is in the field `reasoning`, not `reasoning_content`"

DIFFERENCES = {
    "test_several_answers_to_several_prompts": "`n` above 1 requires a temperature above 0",
    "test_what_is_dictated[thoughts-False]": REASONING,
    "test_what_is_dictated[thoughts-True]": REASONING,
    "test_what_is_dictated[calls_are_text_where_none_may_be_made-False]": "such a call is left out",
    "test_what_is_known_of_a_prompt_is_told": "usage has no cached prompt tokens",
    "test_arguments": "a string argument is streamed as one piece",
    "test_a_call_that_is_cut": "a truncated string, and what follows, is left out or closed",
}
