"""HTTP over a service: the paths and fields of the OpenAI and Anthropic APIs.

    body --request_schema--> fields --prompts--> ServedRequest --scheduler--> RequestHandle
    RequestHandle, its sequences --step--> Event --AnswerStream--> chat.Event --answers--> chunks

`app` has the paths, `auth` who may ask, `server` the process. What a request can be refused for is
checked before its first byte is answered.
"""
