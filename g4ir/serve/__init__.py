"""HTTP server with endpoints and fields of the OpenAI, Anthropic and ollama APIs.

    body --request_schema--> fields --prompts--> chat.Prompt, then engine.Request
    Request --scheduler--> RequestHandle with its SequenceStates --prefill--> TokenBatch
    SequenceStates --step--> Event --AnswerStream--> chat.Event --answers, protocols--> body

`app` has the endpoints, `auth` the access checks, `server` the process. A request is fully
validated before the first byte of its response.
"""
