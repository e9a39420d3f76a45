"""HTTP server: the endpoints and fields of the OpenAI and Anthropic APIs.

    body --request_schema--> fields --prompts--> chat.Prompt, Request --scheduler--> RequestHandle
    RequestHandle, its sequences --step--> Event --AnswerStream--> chat.Event --answers--> chunks

`app` has the endpoints, `auth` the access checks, `server` the process. A request is fully
validated before the first byte of its response.
"""
