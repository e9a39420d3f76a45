"""Tests of clients that vLLM's server does not pass -> in what it differs, as docs/vllm.md says."""

REASONING = "a thought is the field `reasoning`, not `reasoning_content`"

DIFFERENCES = {
    "test_several_answers_to_several_prompts": "`n` above 1 wants a temperature above 0",
    "test_what_is_dictated[thoughts-False]": REASONING,
    "test_what_is_dictated[thoughts-True]": REASONING,
    "test_what_is_dictated[calls_are_text_where_none_may_be_made-False]": "such a call is left out",
    "test_what_is_known_of_a_prompt_is_told": "tokens that were known are not told",
    "test_arguments": "a string of the arguments is one part",
    "test_a_call_that_is_cut": "the string that is cut, and what follows, is left out or closed",
}
